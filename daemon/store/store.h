/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store: KV that has a name. A chunk is the KV of a run of tokens, named by 32 bytes that
 * engines compute alike for the same tokens (a chain of hashes); it is kept in memory of
 * this daemon, shared by its user's engines and outlives them.
 *
 *   space   what must agree for chunks of two engines to mean the same
 *   handle  a session's use of a space, with the layout of one rank
 *   hold    chunks that do not leave: what a fetch reads
 *   move    a put or a fetch under way, with a slot in the status page
 *
 * A move goes by rooms like everything else: an offer at one side and a pull at the
 * other, both in this daemon, so plans, waits, abort and the end in quiet are the rooms'.
 * A chunk is found only once all of its bytes are there. Loop thread.
 */
#ifndef KVD_STORE_H
#define KVD_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/context.h"
#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "daemon/room/room_map.h"
#include "daemon/session/wait.h"
#include "daemon/store/home.h"
#include "daemon/store/homes.h"

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
#define STORE_FAR_MS_MAX 60000u		   /* that it waits for other daemons */
#define STORE_ASKING_MAX 64u		   /* questions of a user to other daemons */
#define STORE_IN_MEMORY 1u		   /* where a chunk is, as bits */
#define STORE_IN_FILE 2u
#define STORE_IN_PAGES 4u   /* an engine's, published */
#define STORE_WORD_MAX 200u /* bytes of a space's model, revision, … */

/* With chunk_memory = off there is no part. Its memory is made by helpers meanwhile. */
extern const struct module store_module;
static inline struct store *store_of(const struct kvd *kvd)
{
	return kvd->part[MODULE_STORE];
}
/* What it has measured of peers; NULL: without a store. */
struct live *store_costs(const struct kvd *kvd);
void store_free(struct store *store); /* no session is left; NULL is fine */
/* Outcome 1: it can be used. ERR_STATE: this daemon has none; ERR_BUSY: its memory is
 * being made; or why that failed. */
int store_ready(struct store *store);
/* Rooms of the pool that read what was published: they fail with it. */
unsigned int store_pool_readings(const struct pool *pool);
/* Its session has ended, and nothing is under way in its files. NULL is fine. */
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

struct store_handle_facts {
	uint64_t id, part_bytes; /* of a rank's part of a chunk, as it is kept */
	uint32_t tokens;
	const char *tenant;
	const uint8_t *digest; /* of the space, 16 bytes: as events tell it */
};
void store_handle_facts(const struct store_handle *handle,
			struct store_handle_facts *facts_p);

/* ---- chunks ---- */

/* Names of chunks that follow each other: chunk i holds the tokens from
 * (first + i) * tokens on. STORE_ANYWHERE: whoever names them does not know where in
 * their prompt they are; they are found by those alone who do not either, and the tokens
 * of a call are counted from its first chunk on. */
#define STORE_ANYWHERE UINT32_MAX
struct store_ids {
	const uint8_t *bytes; /* STORE_ID_BYTES each */
	uint32_t count;
	uint64_t first;
};
struct store_found {
	uint32_t chunks; /* from the first on, without a gap */
	uint32_t far;	 /* of them, the last: at another daemon */
	uint32_t pages;	 /* of them: in engines' pages alone */
	uint64_t tokens;
};
/* What is there for the handle's rank. It may leave at any time: hold it. */
void store_find(struct store_handle *handle, const struct store_ids *ids,
		struct store_found *found_p);
/* Forget them; what is in use goes when it is not. How many there were. */
uint32_t store_drop(struct store_handle *handle, const struct store_ids *ids);

/* ---- holds ---- */

struct store_hold_args {
	uint64_t lease_ns;
	/* What the own daemon has not is asked of those in chunk_peers and those that
	 * chunk_index name, for at most so long; 0: it is not, and neither is that of a
	 * user who has STORE_ASKING_MAX such questions open. Then on_done comes;
	 * `why` not NULL: the hold is being closed before it was answered. */
	uint64_t far_ns;
	void (*on_done)(void *arg, struct store_hold *hold, const struct err *why);
	void *arg;
	uint64_t id;	       /* that the engine chose; 0: the daemon does */
	const uint8_t *secret; /* the same; NULL */
};
/* What is there of them stays for the lease, or until it is closed. ERR_LIMIT; ERR_EXIST:
 * another hold has the secret. None at all is a hold of nothing. Outcome 1: chunks are
 * still being taken, or others are asked: on_done(arg) tells of *hold_p. */
int store_hold_open(struct store_handle *handle, const struct store_ids *ids,
		    const struct store_hold_args *args, struct store_hold **hold_p);
/* The same chunks for another session or rank: of the hold with this secret, as far as
 * they are there for this handle. ERR_NOTFOUND, ERR_LEASE. */
int store_hold_join(struct store_handle *handle, const uint8_t secret[STORE_SECRET_BYTES],
		    const struct store_hold_args *args, struct store_hold **hold_p);
void store_hold_close(struct store_hold *hold); /* its moves go on */
struct store_hold *store_hold_find(struct session *session, uint64_t id);

struct store_hold_facts {
	uint64_t id, first;
	const uint8_t *secret;
	struct store_found found;
};
void store_hold_facts(const struct store_hold *hold, struct store_hold_facts *facts_p);
/* Can it be read by? ERR_LEASE; ERR_STATE: it has not been answered. */
int store_hold_check(const struct store_hold *hold);
/* Of a hold's chunks so many are here, the others follow at another daemon. */
uint32_t store_hold_here(const struct store_hold *hold);
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
	STORE_MOVE_WAITING, /* for the engine's stream, or for what is made once */
	STORE_MOVE_RUNNING,
	STORE_MOVE_ABORTING,
	STORE_MOVE_FAILED,
	STORE_MOVE_SUCCESS,
	STORE_MOVE_STATES,
};

struct store_move_args {
	struct pool *pool;     /* of the handle's layout */
	struct room_maps maps; /* where the tokens are, or go: each view of the space */
	struct wait_spec wait; /* before any is touched */
	bool durable;	       /* put: it succeeds when all would outlast the power */
	bool publish;	       /* put: nothing is copied, the pages are what is read */
	uint64_t deadline_ns;  /* 0: none */
	/* put: where store_put() answers 1, once its chunks are taken */
	void (*on_taken)(void *arg, struct store_move *move);
	void *arg;
	bool slotted; /* the engine chose its slot and id: */
	uint32_t slot, slot_gen;
	uint64_t id;
};
/*
 * Both take maps and wait whatever comes. Pages are kvd's until the move is terminal.
 * A put leaves out what is there already, and what finds no room (`left_out`); it
 * succeeds when all that it took is there. The tokens of `maps` begin at the first
 * chunk's, and only the last chunk may be short of some.
 * With `publish` its chunks are there, when it has succeeded, in the pages themselves,
 * until store_withdraw() or the end of the pool: then the engine must not write them. A
 * page holds tokens of one chunk alone. ERR_REQUIRE: the views have others.
 * Its chunks are taken some a turn. Outcome 1: not all are; on_taken() follows, and until
 * then nothing of the move's figures stands.
 */
int store_put(struct store_handle *handle, const struct store_ids *ids,
	      struct store_move_args *args, struct store_move **move_p);
/*
 * What this session has published of them is found by nobody any more. It succeeds when
 * nobody reads those pages, nor any that it had published before: what does is let go on
 * for grace_ns, then fails. Chunks: of those that were there (`done`); `left_out`: the
 * rest.
 */
int store_withdraw(struct store_handle *handle, const struct store_ids *ids,
		   uint64_t grace_ns, struct store_move **move_p);
/* The tokens that `maps` names, which the hold has. ERR_LEASE, ERR_RANGE. */
int store_fetch(struct store_hold *hold, struct store_move_args *args,
		struct store_move **move_p);
struct store_move *store_move_find(struct session *session, uint64_t id);
/* Has a hold this number, or a move, perhaps dropped, that has not ended? */
bool store_has(const struct session *session, uint64_t id);
void store_move_abort(struct store_move *move, const struct err *why);
/* Its engine is done with it: aborted if it has not ended, gone once it has. */
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

/* ---- records ---- */

struct store_figures {
	bool ready;
	uint64_t memory_bytes, slab_bytes, slabs_free;
	uint64_t chunks, evicted, spaces_evicted;
	uint64_t published;	/* parts of them, in engines' pages */
	uint64_t found, missed; /* chunks asked for */
	uint64_t put_bytes, fetched_bytes;
	unsigned int spaces, holds, moves;
	struct store_far { /* other daemons */
		uint64_t found, bytes,
			retries;	     /* chunks; legs that another went on with */
		uint64_t hedges, hedges_won; /* legs that were asked of another, too */
		uint64_t lends;		     /* holds of chunks here, by others */
		unsigned int lent;	     /* that are open */
		unsigned int stores, up;     /* daemons that are asked */
		unsigned int left_out;	     /* for a while: they were late */
	} far;
	struct store_homes homes; /* daemons that are told what is here */
	struct store_home home;	  /* what others tell this one */
	struct store_files {
		const char *dir; /* NULL: there are none */
		const char *way; /* how they are read and written */
		bool open, scanned, readonly, direct;
		bool full;	       /* the file system had no room for another file */
		bool stands;	       /* the disk has not answered for some seconds */
		const struct err *why; /* code != OK: why nothing is written, or read */
		uint64_t bytes, written_bytes, read_bytes;
		uint64_t free_bytes;	  /* of them, as far as there is room */
		uint64_t disk_free_bytes; /* the file system's */
		uint64_t written, read, bad, faults, evicted;
		unsigned int queued;
	} files;
};
void store_figures(const struct store *store, struct store_figures *figures_p);

/* A space as lists show it. */
struct store_space_facts {
	const char *tenant, *model, *revision, *scheme, *rope;
	const uint8_t *digest;
	uint32_t tokens, handles, classes;
	uint64_t chunks, bytes;
};
/* Those of the session's tenant, or (all) of every one: i = 0, 1, …; false: no more. */
bool store_space_at(const struct session *session, bool all, unsigned int i,
		    struct store_space_facts *facts_p);

#endif
