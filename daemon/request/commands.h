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
#include "daemon/base/text.h"
#include "daemon/loop/offload.h"
#include "proto/fields.h"

struct kvd;
struct session;

#define REQUEST_FDS_MAX 16u
#define REQUEST_INLINE_BYTES 4096u /* longer lines are parsed on a helper thread */
#define REQUEST_ID_MAX 128u	   /* bytes of a request's id */

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
	struct offload_job job; /* private: of request_offload(), or of a large tree */
	void (*work)(struct request *req), (*done)(struct request *req);
	void *state;	      /* the command's, for both */
	struct session *held; /* private: while a helper works */
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

/*
 * A reply. Its members are written by proto/out.h into the text of reply_begin(), then
 * it is sent. A short one needs no memory.
 */
#define REPLY_SPACE 4096u
struct reply {
	struct request *req;
	struct text text;
	char space[REPLY_SPACE];
};
struct text *reply_begin(struct reply *reply, struct request *req);
/* The end of a run(): it is sent, or else the request fails. Returns 0. */
int reply_end(struct reply *reply);
/* The same with fds attached to the reply (duplicated). */
int reply_end_fds(struct reply *reply, const int *fds, unsigned int fd_count);
/* Negative: not answered, because the reply is too long or memory is short; the
 * command undoes its effect. */
int reply_try(struct reply *reply);
int request_reply(struct request *req); /* a reply without members; returns 0 */
/* The state of an object whose entry the ring refused: KVD_FAILED, with the reason. */
int request_reply_refused(struct request *req, const struct err *why);
/* A reply that is written in several calls, in a text of its own. ERR_TOOBIG, ERR_NOMEM:
 * not answered. `text` is empty afterwards. */
void request_text_begin(const struct request *req, struct text *text);
int request_text_reply(struct request *req, struct text *text);
void out_error(struct text *out, const struct err *err); /* the member of replies */
void request_fail(struct request *req, const struct err *err);
/* Fail with err_last(). */
void request_fail_last(struct request *req);
/* A command's only argument: the object that it is about. */
struct request_id_args {
	uint64_t id;
};
/* A list command's field "all" is for admins: else ERR_PERM. */
int request_all(const struct request *req, bool all);
/* A list command with request_list_args: `put` for its session, or for all of them. */
struct request_list_args {
	bool all;
};
int request_list(struct request *req, const char *name,
		 void (*put)(struct text *out, const struct session *session,
			     const struct request *req));

/* A helper runs req->work, which touches only the request's own memory. Then req->done
 * answers on the loop, or drops the request if its session has ended. The session's next
 * line waits. */
void request_offload(struct request *req);

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
/* One error line without an id, with its newline, in `space`. Allocates nothing. */
struct text reply_error(const struct err *err, char space[REPLY_SPACE]);

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
