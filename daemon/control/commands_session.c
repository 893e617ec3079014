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
#include "proto/out.h"

#include <string.h>
#include <unistd.h>

#include "daemon/base/mem.h"
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

static void put_limits(struct text *out, const struct config *config)
{
	out_object(out, "limits");
	out_number(out, "line_bytes", SESSION_LINE_MAX);
	out_number(out, "line_fds", REQUEST_FDS_MAX);
	out_number(out, "queue_bytes", config->client_queue_bytes);
	out_number(out, "regions", config->session_regions_max);
	out_number(out, "pools", config->session_pools_max);
	out_number(out, "rooms", config->rooms_max);
	out_close(out, '}');
}

void put_daemon(struct text *out, const struct session *session)
{
	const struct kvd *kvd = session->kvd;

	out_text(out, "daemon", "kvd " KVD_VERSION);
	out_text(out, "name", kvd->config->name);
	out_hex(out, "instance", session_instance(session), 16);
	out_number(out, "pid", getpid());
	out_text(out, "endpoint", kvd->link ? kvd->link->endpoint : "");
}

static void put_greeting(struct text *out, const struct session *session)
{
	static const char *const features[] = {"memfd", "shm", "vm"};
	const struct kvd *kvd = session->kvd;
	uint32_t slots = status_page_slots(session->status);

	out_number(out, "proto", PROTO_VERSION);
	put_daemon(out, session);
	out_number(out, "session", session->id);
	out_id(out, "epoch", session->epoch);
	out_id(out, "time_ns", loop_clock_ns(kvd->loop));
	put_limits(out, kvd->config);
	out_array(out, "features");
	for (size_t i = 0; i < ARRAY_LEN(features); i++)
		out_text(out, NULL, features[i]);
	out_close(out, ']');
	out_array(out, "transports");
	for (unsigned int i = 0; i < kvd->transport_count; i++) {
		if (kvd->transports[i])
			out_text(out, NULL, kvd->transports[i]->ops->name);
	}
	out_close(out, ']');
	out_object(out, "status");
	out_number(out, "slots", slots);
	out_number(out, "bytes", (slots + INT64_C(1)) * KVD_STATUS_SLOT_BYTES);
	out_close(out, '}');
}

static int hello_run(struct request *req)
{
	const struct hello_args *args = request_args(req);
	struct session *session = req->session;
	struct reply reply;
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
	if (r < 0)
		return err_pass(r);
	put_greeting(reply_begin(&reply, req), session);
	fd = status_page_fd(session->status);
	return reply_end_fds(&reply, &fd, 1);
}

static int ping_run(struct request *req)
{
	struct reply reply;
	struct text *out = reply_begin(&reply, req);

	out_id(out, "time_ns", loop_clock_ns(req->kvd->loop));
	return reply_end(&reply);
}

static int help_run(struct request *req)
{
	const struct help_args *args = request_args(req);
	const struct command *cmd;
	struct reply reply;
	struct text *out;

	if (args->command && !commands_find(req->kvd->modules, args->command, NULL))
		return err_raise(ERR_NOCMD, "%.64s: no such command", args->command);
	out = reply_begin(&reply, req);
	out_array(out, "commands");
	for (unsigned int i = 0; (cmd = commands_at(req->kvd->modules, i)); i++) {
		if (!args->command || strcmp(args->command, cmd->name) == 0)
			command_put(out, cmd);
	}
	out_close(out, ']');
	return reply_end(&reply);
}

/* ---- session.list ---- */

static void put_session(struct text *out, const struct session *session,
			const struct request *req)
{
	bool own = session == req->session;
	uint64_t age_ns = loop_now_ns(session->kvd->loop) - session->started_ns;

	out_object(out, NULL);
	out_number(out, "session", session->id);
	out_text(out, "client", session->client);
	out_text(out, "role", session->role);
	out_number(out, "pid", session_pid(session));
	out_number(out, "uid", session->uid);
	out_number(out, "age_ms", age_ns / LOOP_NS_PER_MS);
	out_number(out, "regions", idmap_count(&session->regions));
	out_number(out, "pools", idmap_count(&session->pools));
	out_number(out, "requests", session->requests_open);
	out_bool(out, "ending", session->ending);
	out_bool(out, "own", own);
	if (own) { /* the secret is shown to its own session only */
		out_id(out, "epoch", session->epoch);
		out_hex(out, "secret", session->secret, sizeof(session->secret));
	}
	out_close(out, '}');
}

static int session_list_run(struct request *req)
{
	return request_list(req, "sessions", put_session);
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
