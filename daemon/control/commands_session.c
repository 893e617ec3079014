/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hello, ping, help, session.list: greeting and information about sessions.
 *
 * hello creates the status page and passes it with the reply. A repeated hello returns
 * the same reply, because the first one may have failed for lack of memory. The secret of
 * a session gives any daemon access to its memory, so it is shown to that session only,
 * not to administrators.
 */
#include "daemon/request/commands.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/base/text.h"
#include "daemon/config/config.h"
#include "daemon/control/commands.h"
#include "daemon/base/context.h"
#include "daemon/link/link.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/transport/transport.h"

#define PROTO_VERSION 1

static const char *const roles[] = {"prefill", "decode", NULL};

struct hello_args {
	uint32_t proto;
	int role; /* of roles[]; -1: not given */
	const char *client;
};

struct help_args {
	const char *command;
};

static bool add_limits(cJSON *result, const struct config *config)
{
	cJSON *limits = cJSON_AddObjectToObject(result, "limits");

	return limits &&
	       cJSON_AddNumberToObject(limits, "line_bytes", SESSION_LINE_MAX) &&
	       cJSON_AddNumberToObject(limits, "line_fds", REQUEST_FDS_MAX) &&
	       cJSON_AddNumberToObject(limits, "queue_bytes",
				       (double)config->client_queue_bytes) &&
	       cJSON_AddNumberToObject(limits, "regions", config->session_regions_max) &&
	       cJSON_AddNumberToObject(limits, "pools", config->session_pools_max) &&
	       cJSON_AddNumberToObject(limits, "rooms", config->rooms_max);
}

static bool add_strings(cJSON *result, const char *name, const char *const *strings,
			size_t count)
{
	cJSON *list = cJSON_AddArrayToObject(result, name);
	bool filled = list;

	for (size_t i = 0; filled && i < count; i++) {
		cJSON *string = cJSON_CreateString(strings[i]);

		filled = string && cJSON_AddItemToArray(list, string);
	}
	return filled;
}

static bool add_transports(cJSON *result, const struct kvd *kvd)
{
	const char *names[TRANSPORTS_MAX];
	size_t count = 0;

	for (unsigned int i = 0; i < kvd->transport_count; i++) {
		if (kvd->transports[i])
			names[count++] = kvd->transports[i]->ops->name;
	}
	return add_strings(result, "transports", names, count);
}

static bool add_status(cJSON *result, const struct status_page *page)
{
	cJSON *status = cJSON_AddObjectToObject(result, "status");
	uint32_t slots = status_page_slots(page);

	return status && cJSON_AddNumberToObject(status, "slots", slots) &&
	       cJSON_AddNumberToObject(status, "bytes",
				       ((double)slots + 1) * KVD_STATUS_SLOT_BYTES);
}

bool result_add_daemon(cJSON *result, const struct session *session)
{
	const struct kvd *kvd = session->kvd;

	return cJSON_AddStringToObject(result, "daemon", "kvd " KVD_VERSION) &&
	       cJSON_AddStringToObject(result, "name", kvd->config->name) &&
	       result_add_hex(result, "instance", session_instance(session), 16) &&
	       cJSON_AddNumberToObject(result, "pid", (double)getpid()) &&
	       cJSON_AddStringToObject(result, "endpoint",
				       kvd->link ? kvd->link->endpoint : "");
}

static bool add_greeting(cJSON *result, const struct session *session)
{
	static const char *const features[] = {"memfd", "shm", "vm"};
	const struct kvd *kvd = session->kvd;

	return cJSON_AddNumberToObject(result, "proto", PROTO_VERSION) &&
	       result_add_daemon(result, session) &&
	       cJSON_AddNumberToObject(result, "session", (double)session->id) &&
	       result_add_u64(result, "epoch", session->epoch) &&
	       result_add_u64(result, "time_ns", loop_clock_ns(kvd->loop)) &&
	       add_limits(result, kvd->config) &&
	       add_strings(result, "features", features, ARRAY_LEN(features)) &&
	       add_transports(result, kvd) && add_status(result, session->status);
}

static int hello_run(struct request *req)
{
	const struct hello_args *args = request_args(req);
	struct session *session = req->session;
	cJSON *result;
	int r, fd;

	if (args->proto != PROTO_VERSION)
		return err_raise(ERR_VERSION,
				 "proto %u: this daemon, kvd " KVD_VERSION ", speaks %d",
				 args->proto, PROTO_VERSION);
	if (req->kvd->stopping)
		return err_raise(ERR_DRAIN, "the daemon is shutting down");
	/* repeated because the reply failed for lack of memory: send the same greeting */
	r = session->greeted ? 0
			     : session_greet(session, args->client,
					     args->role < 0 ? NULL : roles[args->role]);
	result = r < 0 ? NULL : request_result();
	if (!result)
		return err_pass(r < 0 ? r : -ENOMEM);
	if (!add_greeting(result, session))
		return request_finish(req, result, false);
	fd = status_page_fd(session->status);
	request_reply_fds(req, result, &fd, 1);
	return 0;
}

static int ping_run(struct request *req)
{
	cJSON *result = request_result();

	if (!result)
		return err_pass(-ENOMEM);
	return request_finish(
		req, result,
		result_add_u64(result, "time_ns", loop_clock_ns(req->kvd->loop)));
}

static int help_run(struct request *req)
{
	const struct help_args *args = request_args(req);
	const struct command *cmd;
	struct text text = {0};
	bool any = false;
	int r;

	if (args->command && !commands_find(req->kvd->modules, args->command, NULL))
		return err_raise(ERR_NOCMD, "%.64s: no such command", args->command);
	request_text_begin(req, &text);
	text_puts(&text, ",\"commands\":[");
	for (unsigned int i = 0; (cmd = commands_at(req->kvd->modules, i)); i++) {
		if (args->command && strcmp(args->command, cmd->name) != 0)
			continue;
		if (any)
			text_puts(&text, ",");
		any = true;
		command_put(&text, cmd);
	}
	text_puts(&text, "]");
	r = request_text_reply(req, &text);
	if (r < 0)
		text_fini(&text);
	return err_pass(r);
}

/* ---- session.list ---- */

static bool add_session(cJSON *list, const struct session *session,
			const struct request *req)
{
	bool own = session == req->session;
	uint64_t age_ns = loop_now_ns(session->kvd->loop) - session->started_ns;
	cJSON *json = cJSON_CreateObject();
	bool filled = json && cJSON_AddItemToArray(list, json) &&
		      cJSON_AddNumberToObject(json, "session", (double)session->id) &&
		      cJSON_AddStringToObject(json, "client", session->client) &&
		      cJSON_AddStringToObject(json, "role", session->role) &&
		      cJSON_AddNumberToObject(json, "pid", session_pid(session)) &&
		      cJSON_AddNumberToObject(json, "uid", session->uid) &&
		      cJSON_AddNumberToObject(json, "age_ms",
					      (double)(age_ns / LOOP_NS_PER_MS)) &&
		      cJSON_AddNumberToObject(json, "regions",
					      (double)idmap_count(&session->regions)) &&
		      cJSON_AddNumberToObject(json, "pools",
					      (double)idmap_count(&session->pools)) &&
		      cJSON_AddNumberToObject(json, "requests", session->requests_open) &&
		      cJSON_AddBoolToObject(json, "ending", session->ending) &&
		      cJSON_AddBoolToObject(json, "own", own);

	if (!filled || !own) /* the secret is shown to its own session only */
		return filled;
	return result_add_u64(json, "epoch", session->epoch) &&
	       result_add_hex(json, "secret", session->secret, sizeof(session->secret));
}

static int session_list_run(struct request *req)
{
	return request_list(req, "sessions", add_session);
}

static const struct field hello_fields[] = {
	F_INT("proto", hello_args, proto, REQUIRED, 0, INT32_MAX,
	      "Version of the protocol; must be 1."),
	F_STR("client", hello_args, client, REQUIRED, 63,
	      "Name of the client, shown to operators."),
	F_CHOICE("role", hello_args, role, DEFAULT(-1), roles,
		 "\"prefill\" or \"decode\", shown to operators; no effect."),
	F_END,
};

static const struct field help_fields[] = {
	F_STR("command", help_args, command, OPTIONAL, 64,
	      "Describe only this command; default: all."),
	F_END,
};

static const struct field session_list_fields[] = {
	F_BOOL("all", request_list_args, all,
	       "Include the sessions of other clients (administrators only)."),
	F_END,
};

const struct command session_commands[] = {
	{"hello", "Open a session", hello_fields, COMMAND_NO_HELLO, hello_run,
	 "proto, daemon, name, instance, pid, session, epoch, time_ns (its monotonic "
	 "clock, which the status page uses), endpoint, limits, features, transports, "
	 "status {slots, bytes}; with a read-only descriptor of the status page"},
	{"ping", "Check that the daemon responds", NULL, COMMAND_NO_HELLO, ping_run,
	 "time_ns: its monotonic clock"},
	{"help", "Describe the commands", help_fields, COMMAND_NO_HELLO, help_run,
	 "commands [{name, summary, fields, reply, admin}]"},
	{"session.list", "List this session, or all sessions", session_list_fields, 0,
	 session_list_run,
	 "sessions [{session, client, role, pid, uid, age_ms, regions, pools, "
	 "requests, ending, own}]; sessions of the daemon itself have its pid. The own "
	 "session also has epoch and secret, which give other daemons access to its "
	 "memory"},
	{.name = NULL},
};
