/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests. A request is one line of text, written into a client_op: most of its bytes
 * are page lists, so no tree is built. It is checked against every limit before it is
 * queued; from then on it ends exactly once, by a reply, its deadline or the end of the
 * connection (client_conn.c).
 *
 * A blocking call is an asynchronous one with a waiter on the caller's stack and a loop
 * of turns.
 *
 * libkvd's own clean-up requests (`forced`) are exempt from the limits: there is at most
 * one for each accepted request.
 */
#include "daemon/base/clock.h"
#include "lib/client.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

void client_op_begin(struct kvd_client *client, struct client_op *op, const char *cmd)
{
	*op = (struct client_op){.id = ++client->next_request};
	out_object(&op->text, NULL);
	out_number(&op->text, "id", op->id);
	out_text(&op->text, "cmd", cmd);
}

static int op_check(struct kvd_client *client, struct client_op *op)
{
	int r;

	text_put(&op->text, "}\n", 2);
	if (op->text.failed)
		return client_fail_nomem(client);
	if (op->text.len > CLIENT_LINE_MAX)
		return client_fail(client, KVD_E_TOOBIG, "request: %zu bytes; at most %u",
				   op->text.len, CLIENT_LINE_MAX);
	if (op->fd_count > CLIENT_FDS_MAX)
		return client_fail(client, KVD_E_TOOBIG, "request: %u fds; at most %u",
				   op->fd_count, CLIENT_FDS_MAX);
	if (op->forced && client->conn.fd >= 0)
		return 0;
	r = client_session_check(client);
	if (r)
		return r;
	if (client->conn.pending >= client->max_pending)
		return client_fail(client, KVD_E_FULL,
				   "requests: %u without a reply; at most %u",
				   client->conn.pending, client->max_pending);
	if (client->conn.queued_bytes + op->text.len > client->max_queued_bytes)
		return client_fail(client, KVD_E_FULL,
				   "requests: %zu bytes unsent; at most %zu",
				   client->conn.queued_bytes, client->max_queued_bytes);
	return 0;
}

static int op_frame(struct kvd_client *client, struct client_op *op,
		    struct client_frame **frame_p)
{
	struct client_frame *frame = mem_zalloc(sizeof(*frame));

	if (!frame)
		return client_fail_nomem(client);
	list_init(&frame->link);
	while (frame->fd_count < op->fd_count) {
		int fd = fcntl(op->fds[frame->fd_count], F_DUPFD_CLOEXEC, 0);

		if (fd < 0) {
			int no = errno;

			client_frame_free(&client->conn, frame);
			return client_fail(client, KVD_E_INVAL, "fd %d: %s",
					   op->fds[frame->fd_count], strerror(no));
		}
		frame->fds[frame->fd_count++] = fd;
	}
	frame->data = mem_steal(op->text.data);
	frame->len = op->text.len;
	client->conn.queued_bytes += frame->len; /* until client_frame_free() */
	*frame_p = frame;
	return 0;
}

static struct client_request *request_new(struct kvd_client *client,
					  const struct client_op *op,
					  const struct kvd_call *call,
					  struct client_waiter *waiter)
{
	struct client_request *req = mem_zalloc(sizeof(*req));
	int timeout_ms = call && call->timeout_ms ? call->timeout_ms : client->timeout_ms;

	if (!req)
		return NULL;
	list_init(&req->link);
	req->client = client;
	req->id = op->id;
	req->finish = op->finish;
	req->take = op->take;
	req->out = op->out;
	req->object = op->object;
	req->waiter = waiter;
	if (req->object)
		client_object_ref(req->object);
	if (!waiter && call) {
		req->on_done = call->on_done;
		req->arg = call->arg;
	}
	if (timeout_ms > 0) {
		req->deadline_ns = clock_ns() + (uint64_t)timeout_ms * 1000000u;
		if (!client->conn.next_deadline_ns ||
		    req->deadline_ns < client->conn.next_deadline_ns)
			client->conn.next_deadline_ns = req->deadline_ns;
	}
	return req;
}

/* Queue op; the connection owns the request. */
static int op_queue(struct kvd_client *client, struct client_op *op,
		    const struct kvd_call *call, struct client_waiter *waiter)
{
	struct client_conn *conn = &client->conn;
	struct client_frame *frame = NULL;
	struct client_request *req = NULL;
	int r = op_check(client, op);

	if (!r)
		r = op_frame(client, op, &frame);
	if (!r) {
		req = request_new(client, op, call, waiter);
		if (!req) {
			client_frame_free(conn, frame);
			r = client_fail_nomem(client);
		}
	}
	text_fini(&op->text);
	if (r)
		return r;
	list_push_back(&conn->frames, &frame->link);
	list_push_back(&conn->requests, &req->link);
	conn->pending++;
	/* a broken socket is detected and reported in the next turn */
	client_conn_flush(conn);
	return 0;
}

static int op_wait(struct kvd_client *client, struct client_waiter *waiter)
{
	/* a failed turn has ended every request, including this one */
	while (!waiter->done)
		client_conn_turn(client, kvd_timeout_ms(client));
	/* other requests of the same turn have set their own errors */
	if (waiter->result)
		client->error = waiter->error;
	return waiter->result;
}

int client_op_run(struct kvd_client *client, struct client_op *op,
		  const struct kvd_call *call)
{
	struct client_waiter waiter = {0};
	bool blocks = client_blocks(call) && !op->forced;
	int r;

	if (call && call->post) {
		text_fini(&op->text);
		return client_fail(client, KVD_E_INVAL, "post: only for calls on rooms");
	}
	r = op_queue(client, op, call, blocks ? &waiter : NULL);

	if (r || !blocks)
		return r;
	return op_wait(client, &waiter);
}

int client_op_ask(struct kvd_client *client, struct client_op *op,
		  const struct kvd_call *call, client_take *take, void *out)
{
	op->take = take;
	op->out = out;
	return client_op_run(client, op, call);
}

int client_op_json(struct kvd_client *client, struct client_op *op, int timeout_ms,
		   char **json_p)
{
	struct client_waiter waiter = {.want_json = true};
	struct kvd_call call = {.timeout_ms = timeout_ms};
	int r;

	*json_p = NULL;
	r = op_queue(client, op, &call, &waiter);
	if (r)
		return r;
	r = op_wait(client, &waiter);
	if (!r && !waiter.json)
		return client_fail_nomem(client);
	*json_p = waiter.json;
	return r;
}

int client_op_local(struct kvd_client *client, const struct kvd_call *call)
{
	struct client_op op = {.id = ++client->next_request};
	struct client_request *req;

	if (client_blocks(call))
		return 0;
	req = request_new(client, &op, call, NULL);
	if (!req)
		return client_fail_nomem(client);
	list_push_back(&client->conn.ready, &req->link);
	client->conn.pending++;
	return 0;
}

/* ---- any command ---------------------------------------------------------- */

static int args_splice(struct kvd_client *client, struct client_op *op, const char *args)
{
	cJSON *json = args ? cJSON_Parse(args) : NULL;
	char *copy = NULL, *end;
	int r = 0;

	if (args &&
	    (!cJSON_IsObject(json) || cJSON_GetObjectItemCaseSensitive(json, "cmd") ||
	     cJSON_GetObjectItemCaseSensitive(json, "id")))
		r = client_fail(client, KVD_E_INVAL,
				"args: must be a JSON object without \"cmd\" and \"id\"");
	else if (json && json->child) {
		copy = mem_strdup(args);
		if (!copy) {
			r = client_fail_nomem(client);
		} else {
			cJSON_Minify(copy); /* a newline would end the line */
			end = copy + strlen(copy) - 1;
			text_put(&op->text, ",", 1);
			text_put(&op->text, copy + 1, (size_t)(end - copy - 1));
		}
	}
	mem_free(copy);
	cJSON_Delete(json);
	if (r)
		text_fini(&op->text);
	return r;
}

int kvd_submit(struct kvd_client *client, const char *cmd, const char *args,
	       const struct kvd_call *call)
{
	struct client_op op;
	int r = client_enter(client, false);

	if (r)
		return r;
	if (client_blocks(call) || !cmd)
		return client_fail(client, KVD_E_INVAL,
				   "kvd_submit: cmd and on_done are required");
	r = client_session_need(client);
	if (r)
		return r;
	client_op_begin(client, &op, cmd);
	r = args_splice(client, &op, args);
	return r ? r : client_op_run(client, &op, call);
}

int kvd_command(struct kvd_client *client, const char *cmd, const char *args,
		int timeout_ms, char **reply_p)
{
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct client_op op;
	int r = client_begin(client, &call);

	*reply_p = NULL;
	if (r)
		return r;
	client_op_begin(client, &op, cmd);
	r = args_splice(client, &op, args);
	return r ? r : client_op_json(client, &op, timeout_ms, reply_p);
}

void kvd_string_free(char *string)
{
	mem_free(string);
}
