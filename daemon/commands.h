/* SPDX-License-Identifier: Apache-2.0 */
/*
 * commands: the one table of control commands.
 *
 * Each module that owns a noun exports a NULL-terminated table of its commands;
 * commands.c lists the tables. Dispatch, the schema check, `help` and the
 * reference page come from it. A command checks its arguments through the
 * schema first (types, limits, unknown members), then copies what it needs.
 *
 * A request is answered exactly once, in run() or later (request_reply,
 * request_fail). It survives its session's end: answers then go nowhere.
 */
#ifndef KVD_COMMANDS_H
#define KVD_COMMANDS_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"

struct kvd;
struct session;

#define REQUEST_FDS_MAX 16u

struct request {
	struct list link;	 /* in its session's list of open requests */
	struct kvd *kvd;
	struct session *session; /* NULL once the session is gone */
	cJSON *args;		 /* the whole line, schema-checked */
	int fds[REQUEST_FDS_MAX]; /* owned; a command takes one by setting it -1 */
	unsigned int fd_count;
	bool answered;
};

enum field_type {
	FIELD_STR,    /* limit: bytes */
	FIELD_INT,    /* min … max */
	FIELD_U64,    /* decimal string (or small number) */
	FIELD_BOOL,
	FIELD_ARRAY,  /* limit: entries */
	FIELD_OBJECT,
	FIELD_FD,     /* index into the line's fds */
	FIELD_ANY,    /* checked by the command itself */
};

struct command_field {
	const char *name;
	enum field_type type;
	bool required;
	int64_t min, max; /* INT: range; STR, ARRAY: max = limit */
	const char *help;
};

enum {
	COMMAND_ADMIN = 1 << 0,	   /* root, the daemon's uid or admin_uids */
	COMMAND_NO_HELLO = 1 << 1, /* allowed before hello */
	COMMAND_FDS = 1 << 2,	   /* may carry fds; others refuse them */
};

struct command {
	const char *name;
	const char *summary;
	const struct command_field *fields; /* up to name NULL */
	unsigned int flags;
	/* 0: answered or will be. Negative: commands.c answers with err_last(). */
	int (*run)(struct request *req);
	const char *reply; /* one line for the reference: what the reply holds */
};

/* Takes `result` (an object; NULL = {}); adds id and ok. */
void request_reply(struct request *req, cJSON *result);
/* The same with fds attached to the reply (duplicated). */
void request_reply_fds(struct request *req, cJSON *result, const int *fds,
		       unsigned int fd_count);
void request_fail(struct request *req, const struct err *err);
/* Fail with err_last(). */
void request_fail_last(struct request *req);
/* An empty result object, or NULL after failing the request with ERR_NOMEM. */
cJSON *request_result(struct request *req);

/* Called by control for each parsed line; takes the request. */
void commands_dispatch(struct request *req);
const struct command *commands_find(const char *name);
/* Iterate all commands: i = 0, 1, …; NULL at the end. */
const struct command *commands_at(unsigned int i);

/* The modules' tables. */
extern const struct command session_commands[]; /* hello ping help session.list … */
extern const struct command region_commands[];
extern const struct command pool_commands[];
extern const struct command room_commands[];
extern const struct command peer_commands[];
extern const struct command xfer_commands[];
extern const struct command admin_commands[]; /* stats health config.show drain … */

#endif
