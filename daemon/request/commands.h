/* SPDX-License-Identifier: Apache-2.0 */
/*
 * commands: control commands, in tables of the modules that own their objects
 * (module->commands). Dispatch, the schema check, `help` and the reference page use these
 * tables. A command's fields (proto/fields.h) are bound to a struct of its own, which is
 * filled before run(): the table is the only place with types and limits.
 *
 * A request is answered exactly once, in run() or later (request_reply, request_fail). It
 * survives the end of its session; its reply is then discarded.
 */
#ifndef KVD_COMMANDS_H
#define KVD_COMMANDS_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "daemon/loop/offload.h"
#include "proto/fields.h"

struct brief;
struct kvd;
struct session;
struct text;

#define REQUEST_FDS_MAX 16u
#define REQUEST_INLINE_BYTES 4096u /* longer lines are parsed on a helper thread */
#define REQUEST_ID_MAX 128u	   /* bytes of a request's id */
#define RESULT_HEX_MAX 32u	   /* bytes */

struct request {
	struct list link; /* in the list of open requests of its session */
	struct kvd *kvd;
	struct session *session; /* NULL after the session has ended */
	cJSON *line;		 /* parsed */
	/* the struct that the command's fields fill: see request_args() */
	_Alignas(uint64_t) char args[FIELDS_BYTES_MAX];
	int fds[REQUEST_FDS_MAX]; /* owned; a command takes ownership by setting it to
				   * -1 */
	unsigned int fd_count;
	bool answered, failed;
	bool frees; /* its effect releases resources, so it is never refused for lack
		     * of them */
	unsigned int number;	/* of its command, from 1; 0: none */
	size_t bytes;		/* of the line, charged to the session */
	struct offload_job job; /* private: deletes a large tree off the loop */
	/* callers without a connection (simulation, tests) receive the reply here */
	void (*on_answer)(void *arg, const char *text, size_t len);
	void *on_answer_arg;
};

enum {
	COMMAND_ADMIN = 1 << 0,	   /* root, the daemon's uid or admin_uids */
	COMMAND_NO_HELLO = 1 << 1, /* allowed before hello */
	COMMAND_FDS = 1 << 2,	   /* may carry fds; others refuse them */
};

struct command {
	const char *name;
	const char *summary;
	const struct field *fields; /* fill its args; may be NULL */
	unsigned int flags;
	/* 0: answered, now or later. Negative: commands.c replies with err_last(). */
	int (*run)(struct request *req);
	const char *reply; /* one line for the reference: the contents of the reply */
};

/* The values of the line's fields; valid as long as the request. */
static inline const void *request_args(const struct request *req)
{
	return req->args;
}

/* Takes `result` (an object, also as raw text; NULL = {}); adds id and ok. */
void request_reply(struct request *req, cJSON *result);
/* Negative: not answered, because the reply is too long or memory is short; the
 * command undoes its effect. */
int request_try_reply(struct request *req, cJSON *result);
/* The same without allocation, for commands that have taken effect: see brief.h. */
void request_reply_brief(struct request *req, const struct brief *brief);
/* The same with fds attached to the reply (duplicated). */
void request_reply_fds(struct request *req, cJSON *result, const int *fds,
		       unsigned int fd_count);
/* A reply formatted as text: start it, add members (`,"rooms":[…]`), then send it.
 * ERR_TOOBIG, ERR_NOMEM: not answered. `text` is empty afterwards. */
void request_text_begin(const struct request *req, struct text *text);
int request_text_reply(struct request *req, struct text *text);
void request_fail(struct request *req, const struct err *err);
/* Fail with err_last(). */
void request_fail_last(struct request *req);
/* The end of a run(): replies with `result` (taken) and returns 0 if it was filled
 * completely. ERR_NOMEM, the request not answered, if a member could not be added. */
int request_finish(struct request *req, cJSON *result, bool filled);
/* An empty result object, or NULL with ERR_NOMEM raised. */
cJSON *request_result(void);
/* A list command's field "all" is for admins: else ERR_PERM. */
int request_all(const struct request *req, bool all);
/* A list command with request_list_args: `add` for its session, or for all of them;
 * false: no memory. */
struct request_list_args {
	bool all;
};
int request_list(struct request *req, const char *name,
		 bool (*add)(cJSON *list, const struct session *session,
			     const struct request *req));
/* Members common to several results. */
bool result_add_hex(cJSON *obj, const char *name, const uint8_t *bytes, size_t len);
/* Version, name, instance, pid and endpoint of the daemon. */
bool result_add_daemon(cJSON *result, const struct session *session);
bool result_add_u64(cJSON *obj, const char *name, uint64_t v); /* decimal string */

/* For control: a request of one line, not parsed yet; takes the line's fds. It counts
 * as open until it is answered. NULL: ERR_NOMEM. */
struct request *request_new(struct session *session, size_t bytes, const int *fds,
			    unsigned int fd_count);
/* Ended without a reply, because its client has disconnected. */
void request_drop(struct request *req);
/* The session has ended: replies to its open requests are discarded. */
void requests_detach(struct session *session);
extern const struct module request_module;
extern const struct command ring_commands[]; /* commands_ring.c */
/* One error line, with its newline; returns its length. `id` NULL: null.
 * Allocates nothing. */
#define REPLY_ERROR_MAX 4096u
size_t reply_error_text(const cJSON *id, const struct err *err,
			char text[REPLY_ERROR_MAX]);

/* Called by control for each parsed line; takes the request. */
void commands_dispatch(struct request *req);
/* Check the line against the command's fields; fills request_args(). */
int commands_check(struct request *req, const struct command *cmd);
/* Of the given modules. *number_p: 1 + the `i` of commands_at(); may be NULL. */
const struct command *commands_find(const struct module *const *modules, const char *name,
				    unsigned int *number_p);
/* All of them: i = 0, 1, …; NULL at the end. */
const struct command *commands_at(const struct module *const *modules, unsigned int i);

/* {"name":…, "summary":…, "fields":[…], …} */
void command_put(struct text *text, const struct command *cmd);
const char *field_type_name(enum field_type type); /* the name of the type in both:
						    * "u64" */

#endif
