/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store: named KV. A chunk is the KV of a run of tokens, named by 32 bytes that engines
 * compute alike for the same tokens (a chain of hashes). It is kept in memory of this
 * daemon, shared by its user's engines, and survives them.
 *
 *   space   the properties that make chunks of two engines interchangeable
 *   handle  a session's use of a space, with the layout of one rank
 *   hold    pinned chunks: the source of a fetch
 *   move    a put or a fetch in progress, with a slot in the status page
 *
 * A move uses rooms like everything else: an offer and a pull, both in this daemon, so
 * plans, waits, aborts and quiescing are the rooms'. A chunk can be found only once all
 * of its bytes are stored. Loop thread.
 */
#ifndef KVD_STORE_H
#define KVD_STORE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/context.h"
#include "daemon/base/err.h"
#include "daemon/room/room_map.h"
#include "daemon/session/wait.h"

struct far_hold;
struct live;
struct pool;
struct session;
struct store;
struct store_handle;
struct store_hold;
struct store_move;

#define STORE_ID_BYTES 32u
#define STORE_IDS_MAX 4096u /* of one command */
#define STORE_SECRET_BYTES 16u
#define STORE_LEASE_MS_MAX INT64_C(600000) /* of a hold */
#define STORE_REMOTE_MS_MAX 60000u	   /* its wait for other daemons */
#define STORE_ASKING_MAX 64u		   /* open queries of a user to other daemons */
#define STORE_IN_MEMORY 1u		   /* where a chunk is stored, as bits */
#define STORE_IN_FILE 2u
#define STORE_IN_PAGES 4u   /* an engine's, published */
#define STORE_WORD_MAX 200u /* bytes of a space's model, revision, … */

/* Without chunk_memory there is no part. Helper threads allocate its memory meanwhile. */
extern const struct module store_module;
static inline struct store *store_of(const struct kvd *kvd)
{
	return kvd->part[MODULE_STORE];
}
/* Its measurements of peers; NULL: without a store. */
struct live *store_costs(const struct kvd *kvd);
void store_free(struct store *store); /* no session is left; NULL is fine */
/* Outcome 1: it can be used. ERR_STATE: this daemon has none; ERR_BUSY: its memory is
 * being allocated; or the error of that. */
int store_ready(struct store *store);
/* Rooms of the pool that read published pages: they fail with it. */
unsigned int store_pool_readings(const struct pool *pool);
/* Its session has ended, and no file operation is in progress. NULL is fine. */
bool store_drained(const struct store *store);

/* ---- spaces ---- */

struct store_space_args {
	const char *model, *revision, *scheme, *rope; /* NULL: "" */
	uint32_t tokens;			      /* of a chunk */
	const struct layout *layout;
	const char *const *views; /* NULL: all */
	uint32_t view_count;
};
/* ERR_INVAL, ERR_LIMIT, ERR_NOMEM, those of canon_make() and store_ready(). */
int store_open(struct session *session, const struct store_space_args *args,
	       struct store_handle **handle_p);
void store_close(struct store_handle *handle);
/* NULL + ERR_NOTFOUND */
struct store_handle *store_handle_find(struct session *session, uint64_t id);

/* ---- chunks ---- */

/* Names of chunks that follow each other: chunk i holds the tokens from (first + i) *
 * tokens on. STORE_ANYWHERE: the caller does not know their position in the prompt. Such
 * chunks are found only by callers that use STORE_ANYWHERE, too, and the tokens of a call
 * are counted from its first chunk on. */
#define STORE_ANYWHERE UINT32_MAX
struct store_ids {
	const uint8_t *bytes; /* STORE_ID_BYTES each */
	uint32_t count;
	uint64_t first;
};
struct store_found {
	uint32_t chunks; /* from the first on, without a gap */
	uint32_t remote; /* of them, the last: from the first one at another daemon on */
	uint64_t tokens;
};
/* The chunks for the handle's rank. They may be evicted at any time: hold them. */
void store_find(struct store_handle *handle, const struct store_ids *ids,
		struct store_found *found_p);
/* References for work over several turns. */
struct store_handle *store_handle_ref(struct store_handle *handle);
void store_handle_unref(struct store_handle *handle);
/* Removes them; a chunk in use is removed when it is not. Returns how many were found. */
uint32_t store_drop(struct store_handle *handle, const struct store_ids *ids);

/* ---- holds ---- */

struct store_hold_args {
	uint64_t lease_ns;
	/* Chunks that this daemon lacks are queried at those in chunk_peers and those
	 * that chunk_index names, for at most this time in all; 0: no queries, as for a
	 * user with STORE_ASKING_MAX open ones. Then on_done is called; `why` not NULL:
	 * the hold is being closed before the reply. */
	uint64_t far_ns;
	void (*on_done)(void *arg, struct store_hold *hold, const struct err *why);
	void *arg;
	uint64_t id;	       /* that the engine chose; 0: the daemon does */
	const uint8_t *secret; /* the same; NULL */
};
/* The chunks found stay for the lease, or until it is closed. ERR_LIMIT; ERR_EXIST:
 * another hold has the secret. A hold may be empty. Outcome 1: chunks are being added, or
 * queries are open: on_done(arg) announces *hold_p. */
int store_hold_open(struct store_handle *handle, const struct store_ids *ids,
		    const struct store_hold_args *args, struct store_hold **hold_p);
/* The same chunks for another session or rank: of the hold with this secret, as far as
 * they serve this handle. ERR_NOTFOUND, ERR_LEASE. */
int store_hold_join(struct store_handle *handle, const uint8_t secret[STORE_SECRET_BYTES],
		    const struct store_hold_args *args, struct store_hold **hold_p);
void store_hold_close(struct store_hold *hold); /* its moves continue */
struct store_hold *store_hold_find(struct session *session, uint64_t id);

struct store_hold_facts {
	uint64_t id, first;
	struct store_found found;
};
void store_hold_facts(const struct store_hold *hold, struct store_hold_facts *facts_p);
/* Is it readable? ERR_LEASE; ERR_STATE: its reply is pending. */
int store_hold_check(const struct store_hold *hold);
uint32_t store_hold_chunks(const struct store_hold *hold);
/* How many from chunk `first` on, before `end`, are all here (*far_p NULL), or all at one
 * daemon; 0: those that had them are lost. */
uint32_t store_hold_piece(const struct store_hold *hold, uint32_t first, uint32_t end,
			  struct far_hold **far_p);
uint32_t store_hold_chunk_tokens(const struct store_hold *hold); /* of a whole one */
struct far_hold *store_hold_far(const struct store_hold *hold);	 /* NULL: none */

/* ---- moves ---- */

enum store_kind {
	STORE_PUT,
	STORE_FETCH,
	STORE_PUBLISH,
	STORE_WITHDRAW,
	STORE_HEDGE,
};
enum store_move_state {
	STORE_MOVE_WAITING, /* for the engine's stream, or for a one-time set-up */
	STORE_MOVE_RUNNING,
	STORE_MOVE_ABORTING,
	STORE_MOVE_FAILED,
	STORE_MOVE_SUCCESS,
	STORE_MOVE_STATES,
};

struct store_move_args {
	struct pool *pool;     /* of the handle's layout */
	struct room_maps maps; /* pages of the tokens: each view of the space */
	struct wait_spec wait; /* before any is touched */
	bool durable;	       /* put: it succeeds once all is durable */
	bool publish;	       /* put: nothing is copied, readers read these pages */
	uint64_t deadline_ns;  /* 0: none */
	/* put: where store_put() returns 1, once its chunks are taken */
	void (*on_taken)(void *arg, struct store_move *move);
	void *arg;
	bool slotted; /* the engine chose its slot and id: */
	uint32_t slot, slot_gen;
	uint64_t id;
};
/*
 * Both take maps and wait in any case. Pages are kvd's until the move is terminal. A put
 * skips chunks that are stored already, or have no space (`left_out`); it succeeds when
 * all chunks that it took are stored. The tokens of `maps` start at the first chunk's,
 * and only the last chunk may be short. With `publish` its chunks stay in the pages
 * themselves, once it has succeeded, until store_withdraw() or the end of the pool:
 * meanwhile the engine must not write them. A page holds tokens of one chunk only.
 * ERR_REQUIRE: the views have others. Its chunks are taken some a turn. Outcome 1: not
 * all are yet; on_taken() follows, and until then the move's figures are not valid.
 */
int store_put(struct store_handle *handle, const struct store_ids *ids,
	      struct store_move_args *args, struct store_move **move_p);
/*
 * The chunks that this session has published can no longer be found. It succeeds when
 * these pages, and all that it had published before, have no readers: readers may
 * continue for grace_ns, then they fail. Chunks: of those that were published (`done`);
 * `left_out`: the rest.
 */
int store_withdraw(struct store_handle *handle, const struct store_ids *ids,
		   uint64_t grace_ns, struct store_move **move_p);
/* The tokens that `maps` names, which the hold has. ERR_LEASE, ERR_RANGE. */
int store_fetch(struct store_hold *hold, struct store_move_args *args,
		struct store_move **move_p);
struct store_move *store_move_find(struct session *session, uint64_t id);
/* Is the number that of a hold, or of a move, perhaps dropped, that has not ended? */
bool store_has(const struct session *session, uint64_t id);
void store_move_abort(struct store_move *move, const struct err *why);
/* Its engine has finished with it: aborted if it has not ended, freed once it has. */
void store_move_drop(struct store_move *move);

struct store_move_facts {
	uint64_t id, bytes, total;
	enum store_kind kind;
	enum store_move_state state;
	const struct err *error;
	uint32_t chunks, there, left_out, done;
	uint64_t prefix_tokens; /* whole, from the first on */
	uint32_t slot, slot_gen;
	unsigned int poll_state; /* enum kvd_state */
};
void store_move_facts(const struct store_move *move, struct store_move_facts *facts_p);
extern const char *const store_kind_names[];

#endif
