/* SPDX-License-Identifier: Apache-2.0 */
/*
 * module: a part of the daemon unknown to the layers below it: sessions, peers and kvd.c
 * call it only by this table. Hooks may be NULL. They run in the order of the list
 * kvd->modules, free() in reverse. Loop thread.
 *
 * A hook runs also where its module has no part (disabled by options, or left out by a
 * test): the hook checks.
 */
#ifndef KVD_MODULE_H
#define KVD_MODULE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct command;
struct config;
struct cursor;
struct err;
struct kvd;
struct metric_row;
struct pool;
struct region;
struct remote;
struct remote_pool;
struct ring_verb;
struct session;
struct wire_header;
struct xp_inbound;

/* In the order of modules_built[]; the index of part[] in struct kvd. */
enum module_id {
	MODULE_REQUEST,
	MODULE_CLUSTER,
	MODULE_ROOM,
	MODULE_XFER,
	MODULE_STORE,
	MODULE_ATTEND,
	MODULE_CONTROL,
	MODULES
};

struct module {
	enum module_id id;
	const char *name;   /* as in make MODULES=, --version and the options' rows */
	uint64_t feature;   /* of HELLO: peers without it are sent none of its messages;
			     * 0: all have it */
	unsigned int owner; /* enum wire_owner, of messages and requests; 0: of none */

	const struct command *const *commands; /* tables, NULL-terminated; NULL: none */
	const struct ring_verb *verbs; /* of the submission ring, ends with op 0 */

	/* ---- life ---- */

	/* Would new() accept the options? For --check-config; ERR_CONFIG. */
	int (*check)(const struct config *config);
	/* 0 and *part_p NULL: switched off by options. */
	int (*new)(struct kvd *kvd, void **part_p);
	/* Read files that options name again; not `apply`: only checks them. ERR_CONFIG:
	 * nothing changed. */
	int (*reload)(void *part, bool apply);
	void (*drain)(void *part);		/* new work is refused */
	unsigned int (*live)(const void *part); /* a drain waits until all are 0 */
	/* Fail running work, start nothing. Idempotent. */
	void (*close)(void *part, const struct err *why);
	/* free() may follow. False: *why_p may name the work that is not finished. */
	bool (*drained)(const void *part, struct err *why_p);
	void (*free)(void *part);

	/* ---- sessions, their regions and pools ---- */

	size_t session_bytes; /* of session->part[id]: zero, it lives as long as the
			       * session. 0: the value that the module stores there */
	void (*session_init)(struct session *session);
	/* It starts to end: its pages and slots belong to the engine again at once. */
	void (*session_closing)(struct session *session);
	/* End its objects. 0; outcome 1: later, by session_end_next(). Then the next
	 * module is called; the session's pools and regions are freed last. */
	int (*session_end)(struct session *session);
	void (*session_gone)(struct session *session); /* about to be freed */
	void (*region_coming)(struct session *session);
	void (*region_going)(struct region *region); /* drop pins */
	void (*pool_coming)(struct pool *pool);
	void (*pool_going)(struct pool *pool);
	/* Of pool->rooms, those that end with the pool. */
	unsigned int (*pool_readings)(const struct pool *pool);

	/* ---- objects with numbers from an engine: KVD_RING_IDS + slot ---- */

	/* The module has an object of this number. */
	bool (*ring_has)(const struct session *session, uint64_t id);
	/* Cancel it, release it; false: the module has none. */
	bool (*ring_cancel)(struct session *session, uint64_t id);
	bool (*ring_release)(struct session *session, uint64_t id);

	/* ---- peers ---- */

	size_t remote_bytes; /* of remote->part[id]: zero, it lives as long as the remote
			      */
	void (*remote_init)(struct remote *remote);
	bool (*remote_idle)(const struct remote *remote); /* asserted before its end */
	void (*remote_up)(struct remote *remote);
	/* A pool of it became ready or was refused; its connection became ready or was
	 * lost (all its ops are done by then); its connection attempt was refused. */
	void (*remote_change)(struct remote *remote);
	/* Everything of it is invalid after this call. */
	void (*remote_down)(struct remote *remote, const struct err *why);
	/* The owner withdraws the pool: stop using it. */
	void (*remote_pool_going)(struct remote_pool *pool);
	/* It has accepted handshake_share_session()'s list of that epoch; `why`: refused
	 * it. */
	void (*remote_shared)(struct remote *remote, uint64_t epoch,
			      const struct err *why);
	/* A message with this owner. Negative: the peer broke the protocol. */
	int (*message)(struct remote *remote, const struct wire_header *header,
		       struct cursor *body);
	/* The same on the data line; header is after the kind byte. */
	void (*request)(struct remote *remote, struct xp_inbound *in, unsigned int kind,
			struct cursor *header);

	/* ---- for operators ---- */

	const struct metric_row *metrics; /* METRIC_OWN(): a cell each */
	unsigned int metric_count;	  /* at most METRIC_OWN_MAX */
	/* At a scrape: all cells, which are 0. */
	void (*figures)(const void *part, uint64_t *cells);
	/* False: degraded, *why_p has the reason. */
	bool (*health)(const void *part, struct err *why_p);
	/* A member of `health`; false: nothing to report. */
	struct {
		const char *member;
		bool (*text)(const void *part, char *text, size_t size);
	} about;
};

/* Each of kvd->modules, a list that ends with NULL; none where that is NULL. */
#define MODULES_EACH(kvd, m)                                          \
	for (const struct module *const *m##_at = (kvd)->modules, *m; \
	     m##_at && (m = *m##_at) != NULL; m##_at++)

/* Data that each module keeps with an object, in the object's own block, behind it.
 * `member`: offsetof(struct module, session_bytes), or of remote_bytes. */
size_t modules_part_bytes(const struct kvd *kvd, size_t member);
/* Sets the parts that have bytes; `at`: aligned like allocated memory. */
void modules_part_place(const struct kvd *kvd, size_t member, void *at,
			void *part[MODULES]);

/* Makes all parts; after a failure modules_free() frees those made. */
int modules_new(struct kvd *kvd);
int modules_reload(struct kvd *kvd, bool apply);
void modules_drain(struct kvd *kvd);
unsigned int modules_live(const struct kvd *kvd);
void modules_close(struct kvd *kvd, const struct err *why);
/* False: *why_p, if its code is not OK, names the work that is not finished. */
bool modules_drained(const struct kvd *kvd, struct err *why_p);
void modules_free(struct kvd *kvd);

#endif
