/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a parsed line to a running command, and from its result to a reply.
 *
 * The tables of the modules are the only description of a command. Its fields are read
 * here, before run(), into the command's own struct, so each member has its type, is
 * within its limits, or has its default. A command checks conditions that a table cannot
 * express (two exclusive fields, a number inside a layout).
 *
 * A reply is formatted as text: `{"id":<as received>,"ok":true` and then the members of
 * the result. It starts in a buffer on the stack, and only a long one needs memory: so
 * "out of memory" can be reported, and a command that has taken effect does not fail for
 * lack of memory; else its engine would reuse pages that a room has, or never learn the
 * number of its new object. The tree of a long line is deleted on a helper thread: half a
 * million nodes take 10 ms in free().
 */
#include "daemon/request/commands.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "proto/out.h"
#include "daemon/session/session.h"
#include "proto/json.h"
#include "proto/kvd_status.h"

const struct command *commands_at(const struct module *const *modules, unsigned int i)
{
	for (; modules && *modules; modules++) {
		const struct command *const *table = (*modules)->commands;

		for (; table && *table; table++) {
			for (const struct command *cmd = *table; cmd->name; cmd++) {
				if (i-- == 0)
					return cmd;
			}
		}
	}
	return NULL;
}

const struct command *commands_find(const struct module *const *modules, const char *name,
				    unsigned int *number_p)
{
	unsigned int number = 0;

	for (; modules && *modules; modules++) {
		const struct command *const *table = (*modules)->commands;

		for (; table && *table; table++) {
			for (const struct command *cmd = *table; cmd->name; cmd++) {
				number++;
				if (strcmp(cmd->name, name) != 0)
					continue;
				if (number_p)
					*number_p = number;
				return cmd;
			}
		}
	}
	return NULL;
}

/* ---- requests ---- */

struct request *request_new(struct session *session, size_t bytes, const int *fds,
			    unsigned int fd_count)
{
	struct request *req = mem_zalloc(sizeof(*req));

	assert(fd_count <= REQUEST_FDS_MAX);
	if (!req)
		return NULL;
	req->kvd = session->kvd;
	req->session = session;
	req->bytes = bytes;
	req->fd_count = fd_count;
	for (unsigned int i = 0; i < fd_count; i++)
		req->fds[i] = fds[i];
	list_push_back(&session->requests, &req->link);
	session->requests_open++;
	session->requests_bytes += bytes;
	return req;
}

static void request_leave(struct request *req)
{
	struct session *session = req->session;

	list_remove(&req->link);
	if (!session)
		return;
	req->session = NULL;
	session->requests_open--;
	session->requests_bytes -= req->bytes;
}

static void tree_work(struct offload_job *job)
{
	struct request *req = container_of(job, struct request, job);

	cJSON_Delete(req->line);
}

static void tree_done(struct offload_job *job)
{
	mem_free(container_of(job, struct request, job));
}

static void commands_request_free(struct request *req)
{
	request_leave(req);
	for (unsigned int i = 0; i < req->fd_count; i++)
		mem_closep(&req->fds[i]);
	if (req->bytes > REQUEST_INLINE_BYTES && req->line) {
		req->job = (struct offload_job){.work = tree_work, .done = tree_done};
		offload_submit(req->kvd->offload, &req->job);
		return;
	}
	cJSON_Delete(req->line);
	mem_free(req);
}

void request_drop(struct request *req)
{
	assert(!req->answered);
	req->answered = true;
	commands_request_free(req);
}

/* The session has ended: replies to its open requests are discarded. */
void requests_detach(struct session *session)
{
	struct request *req;

	list_foreach_safe(req, &session->requests, link)
		request_leave(req);
}

/* ---- helpers ---- */

static void request_work(struct offload_job *job)
{
	struct request *req = container_of(job, struct request, job);

	req->work(req);
}

static void request_worked(struct offload_job *job)
{
	struct request *req = container_of(job, struct request, job);
	struct session *session = mem_steal(req->held);

	session->walking--;
	req->done(req);
	session_drain_end(session);
}

void request_offload(struct request *req)
{
	req->held = req->session;
	req->held->walking++;
	session_drain_begin(req->held);
	req->job = (struct offload_job){.work = request_work,
					.done = request_worked,
					.principal = session_principal(req->held)};
	offload_submit(req->kvd->offload, &req->job);
}

/* ---- replies ---- */

#define REPLY_LARGE_BYTES (64u << 10)

/* An id of REQUEST_ID_MAX and a message of ERR_TEXT_MAX with each byte written as \u00XX,
 * and the surrounding text. */
_Static_assert(6 * (REQUEST_ID_MAX + ERR_TEXT_MAX) + 256 < REPLY_SPACE, "errors fit");

static void reply_head(struct text *text, const cJSON *id)
{
	int64_t number;

	out_object(text, NULL);
	if (cJSON_IsString(id))
		out_text(text, "id", id->valuestring);
	else if (json_number_is_int(id, &number))
		out_number(text, "id", number);
	else
		out_null(text, "id");
}

void out_error(struct text *out, const struct err *err)
{
	char message[ERR_TEXT_MAX];

	snprintf(message, sizeof(message), "%s", err->text);
	json_sanitize(message);
	out_object(out, "error");
	out_text(out, "code", err_name(err->code));
	out_text(out, "message", message);
	out_bool(out, "retryable", err->retryable);
	out_text(out, "scope", err_scope_name(err->scope));
	out_close(out, '}');
}

static struct text error_text(const cJSON *id, const struct err *err,
			      char space[REPLY_SPACE])
{
	struct text text = text_on(space, REPLY_SPACE);

	reply_head(&text, id);
	out_error(&text, err);
	text_puts(&text, "}\n");
	assert(text.borrowed);
	return text;
}

struct text reply_error(const struct err *err, char space[REPLY_SPACE])
{
	return error_text(NULL, err, space);
}

static const cJSON *request_id(const struct request *req)
{
	return cJSON_GetObjectItemCaseSensitive(req->line, "id");
}

/* Answer with `text`, which is empty afterwards, and free the request. */
static void request_answer(struct request *req, struct text *text, const int *fds,
			   unsigned int fd_count)
{
	struct session *session = req->session;

	assert(!req->answered);
	req->answered = true;
	metrics_add(&req->kvd->metrics,
		    METRIC_AT(COMMANDS, req->number,
			      req->failed ? METRIC_COMMAND_ERROR : METRIC_COMMAND_OK),
		    1);
	if (req->on_answer)
		req->on_answer(req->on_answer_arg, text->data, text->len);
	if (session && session->conn)
		session->conn_ops->answer(session->conn, text, fds, fd_count);
	else
		text_fini(text);
	commands_request_free(req);
}

void request_fail(struct request *req, const struct err *err)
{
	char space[REPLY_SPACE];
	struct text text = error_text(request_id(req), err, space);

	req->failed = true;
	request_answer(req, &text, NULL, 0);
}

void request_fail_last(struct request *req)
{
	struct err err;

	err_take(&err);
	assert(err.code != ERR_OK);
	request_fail(req, &err);
}

/* A large reply may wait for a long time; small ones are available to any client for
 * diagnosis. */
static int check_size(const struct request *req, size_t len)
{
	if (len > req->kvd->config->client_queue_bytes)
		return err_raise(ERR_TOOBIG, "reply: %zu bytes exceed client_queue", len);
	if (len < REPLY_LARGE_BYTES || !req->session || req->frees)
		return 0;
	return err_pass(account_check(req->session->account, ACCOUNT_REPLIES, len));
}

static int request_send(struct request *req, struct text *text, const int *fds,
			unsigned int fd_count)
{
	int r;

	text_puts(text, "}\n");
	r = text->failed ? err_raise(ERR_NOMEM, "out of memory for the reply")
			 : check_size(req, text->len);
	if (r >= 0)
		request_answer(req, text, fds, fd_count);
	else
		text_fini(text);
	return err_pass(r);
}

void request_text_begin(const struct request *req, struct text *text)
{
	reply_head(text, request_id(req));
	out_bool(text, "ok", true);
}

int request_text_reply(struct request *req, struct text *text)
{
	return err_pass(request_send(req, text, NULL, 0));
}

struct text *reply_begin(struct reply *reply, struct request *req)
{
	reply->req = req;
	reply->text = text_on(reply->space, sizeof(reply->space));
	request_text_begin(req, &reply->text);
	return &reply->text;
}

int reply_try(struct reply *reply)
{
	return err_pass(request_send(reply->req, &reply->text, NULL, 0));
}

int reply_end_fds(struct reply *reply, const int *fds, unsigned int fd_count)
{
	if (request_send(reply->req, &reply->text, fds, fd_count) < 0)
		request_fail_last(reply->req);
	return 0;
}

int reply_end(struct reply *reply)
{
	return reply_end_fds(reply, NULL, 0);
}

int request_reply(struct request *req)
{
	struct reply reply;

	reply_begin(&reply, req);
	return reply_end(&reply);
}

int request_reply_refused(struct request *req, const struct err *why)
{
	struct reply reply;
	struct text *out = reply_begin(&reply, req);

	out_number(out, "state", KVD_FAILED);
	out_error(out, why);
	return reply_end(&reply);
}

int request_all(const struct request *req, bool all)
{
	if (all && !req->session->admin)
		return err_raise(ERR_PERM,
				 "all: only administrators may list the objects of "
				 "other sessions");
	return 0;
}

int request_list(struct request *req, const char *name,
		 void (*put)(struct text *out, const struct session *session,
			     const struct request *req))
{
	const struct request_list_args *args = request_args(req);
	const struct session *session;
	struct reply reply;
	struct text *out;

	if (request_all(req, args->all) < 0)
		return err_pass(-EPERM);
	out = reply_begin(&reply, req);
	out_array(out, name);
	list_foreach(session, &req->kvd->sessions, link) {
		if (args->all || session == req->session)
			put(out, session, req);
	}
	out_close(out, ']');
	return reply_end(&reply);
}

/* ---- the schema ---- */

static int fd_check(const struct request *req, const struct field *f, int fd)
{
	if (!req->fd_count)
		return err_raise(ERR_INVAL,
				 "%s: the line has no descriptor; pass one by SCM_RIGHTS",
				 f->name);
	if ((unsigned int)fd >= req->fd_count)
		return err_raise(ERR_RANGE, "%s: %d is not in 0 … %u", f->name, fd,
				 req->fd_count - 1);
	return 0;
}

/* Each descriptor of the line must be named by a field. An unused descriptor is an
 * error of the client, which is reported. */
static int fds_check(const struct request *req, const struct command *cmd)
{
	unsigned int named = 0;
	int r;

	for (const struct field *f = cmd->fields; f && f->name; f++) {
		const int *fd = (const void *)(req->args + f->at);

		if (f->type != FIELD_FD || *fd < 0)
			continue;
		r = fd_check(req, f, *fd);
		if (r < 0)
			return err_pass(r);
		named++;
	}
	if (req->fd_count && !(cmd->flags & COMMAND_FDS))
		return err_raise(ERR_INVAL,
				 "%s: takes no descriptors, but the line has %u",
				 cmd->name, req->fd_count);
	if (req->fd_count != named)
		return err_raise(ERR_INVAL,
				 "the line has %u descriptors, but its fields name %u",
				 req->fd_count, named);
	return 0;
}

int commands_check(struct request *req, const struct command *cmd)
{
	const cJSON *it;
	int r;

	cJSON_ArrayForEach(it, req->line) {
		if (strcmp(it->string, "id") != 0 && strcmp(it->string, "cmd") != 0 &&
		    !field_find(cmd->fields, it->string))
			return err_raise(ERR_INVAL, "%.64s: unknown field of %s",
					 it->string, cmd->name);
	}
	r = fields_read(cmd->fields, req->line, req->args);
	return r < 0 ? err_pass(r) : err_pass(fds_check(req, cmd));
}

/* ---- dispatch ---- */

/* The parts of a line that are common to all commands. */
static int envelope_check(struct request *req, const char **name_p)
{
	const cJSON *id;
	int64_t ignored;

	if (!cJSON_IsObject(req->line))
		return err_raise(ERR_PROTO, "a line must be one JSON object");
	id = cJSON_GetObjectItemCaseSensitive(req->line, "id");
	if (id && !json_number_is_int(id, &ignored) &&
	    !(cJSON_IsString(id) && strlen(id->valuestring) <= REQUEST_ID_MAX)) {
		cJSON_DeleteItemFromObjectCaseSensitive(req->line, "id");
		return err_raise(ERR_INVAL,
				 "id: must be an integer or a string of at most %u bytes",
				 REQUEST_ID_MAX);
	}
	return err_pass(json_get_str(req->line, "cmd", true, 64, name_p));
}

static int permit(const struct session *session, const struct command *cmd)
{
	if (!session->greeted && !session->own && !(cmd->flags & COMMAND_NO_HELLO))
		return err_raise(ERR_STATE,
				 "%s: not allowed before hello; send hello first",
				 cmd->name);
	if ((cmd->flags & COMMAND_ADMIN) && !session->admin)
		return err_raise(ERR_PERM,
				 "%s: uid %u may not run this; use root, the daemon's "
				 "user or one of admin_uids",
				 cmd->name, session->uid);
	return 0;
}

static int commands_do_dispatch(struct request *req)
{
	const struct command *cmd;
	const char *name = NULL;
	int r = envelope_check(req, &name);

	if (r < 0)
		return err_pass(r);
	cmd = commands_find(req->kvd->modules, name, &req->number);
	if (!cmd)
		return err_raise(ERR_NOCMD, "%.64s: unknown command; see help", name);
	r = permit(req->session, cmd);
	if (r == 0)
		r = commands_check(req, cmd);
	if (r < 0)
		return err_pass(r);
	log_trace("control", NULL, name, "session=%llu",
		  (unsigned long long)req->session->id);
	return err_pass(cmd->run(req));
}

void commands_dispatch(struct request *req)
{
	err_clear();
	/* run() may have replied and freed the request when it returns 0 */
	if (commands_do_dispatch(req) < 0)
		request_fail_last(req);
}
