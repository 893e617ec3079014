/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks of KV in the daemon: the part of kvd.h that names, shares and keeps them.
 * Include kvd.h. */
#ifndef KVD_CHUNK_H
#define KVD_CHUNK_H

#include "kvd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- chunks -------------------------------------------------------------- */

/*
 * KV that has a name. A chunk is the KV of `tokens` tokens that follow each other; it is
 * named by 32 bytes that engines compute alike for the same tokens and all before them
 * (a chain of hashes), and kept in memory of the daemon (its option chunk_memory).
 * Engines of one user share chunks, whatever their ranks, page sizes and head orders, and
 * chunks outlive them.
 *
 * A space says what must agree for chunks of two engines to mean the same; a hold keeps
 * chunks from leaving; kvd_put() stores pages, kvd_fetch() reads held chunks into pages.
 * A chunk is found once all of its bytes are there. What a handle belongs to ends with
 * the session: after a reconnect open it again.
 */
#define KVD_CHUNK_ID_BYTES 32
#define KVD_HOLD_SECRET_BYTES 16

struct kvd_space_args {
	struct kvd_pool *pool; /* whose layout is meant; NULL: */
	const char *layout; /* this text (kvd_layout_text()); "buffers" may be absent */
	const char *model;
	const char *revision; /* of its weights and adapters; NULL: none */
	/* How ids are made: hash, seed, block size. Where two engines' are equal, equal
	 * tokens have equal ids. */
	const char *scheme;
	const char *rope; /* how positions are encoded, where the model does not say it */
	uint32_t tokens;  /* of a chunk: 16 to 4096 */
	const char *const
		*views; /* that a chunk has; NULL: all of the layout but "aux" */
	size_t view_count;
};
struct kvd_space;
/* -KVD_E_STATE: the daemon keeps no chunks. -KVD_E_BUSY: not yet, its memory is being
 * made. */
int kvd_space_open(struct kvd_client *client, const struct kvd_space_args *args,
		   const struct kvd_call *call, struct kvd_space **space_p);
/* Its holds and moves go on, its chunks stay. Frees the handle on success. */
int kvd_space_close(struct kvd_space *space, const struct kvd_call *call);

/* Chunks that follow each other: chunk i of them holds the tokens from
 * (first + i) * tokens on. At most 4096. KVD_CHUNK_ANYWHERE: an engine that does not know
 * where in their prompt they are. They are found by those alone who do not either, and
 * the tokens of a call, or a hold, are counted from its first chunk on. */
#define KVD_CHUNK_ANYWHERE UINT32_MAX
struct kvd_chunks {
	const void *ids; /* KVD_CHUNK_ID_BYTES each */
	size_t count;
	uint64_t first;
};
struct kvd_found {
	uint64_t chunks; /* from the first on, without a gap */
	uint64_t tokens;
	uint64_t far; /* of the chunks: the last so many are at another daemon */
};
/* What is there for the space's rank; it may leave at any time. Blocks. */
int kvd_find(struct kvd_space *space, const struct kvd_chunks *chunks, int timeout_ms,
	     struct kvd_found *found_p);
/* Forget them; what is in use goes when it is not. Blocks. */
int kvd_drop(struct kvd_space *space, const struct kvd_chunks *chunks, int timeout_ms);

struct kvd_hold;
/* What is there of them stays for lease_ms (0: ten seconds), or until the hold is closed.
 * far_ms > 0: what follows and is not there is asked of the daemons that the option
 * chunk_peers names, and of those that its chunk_index do, and is held there; the answer
 * takes at most so long.
 * None at all is a hold of nothing. */
int kvd_hold_open(struct kvd_space *space, const struct kvd_chunks *chunks,
		  uint32_t lease_ms, uint32_t far_ms, const struct kvd_call *call,
		  struct kvd_hold **hold_p);
/* The same chunks as another session's hold, as far as they are there for this space's
 * rank: by kvd_hold_secret() of that one. -KVD_E_NOTFOUND, -KVD_E_LEASE. */
int kvd_hold_join(struct kvd_space *space, const void *secret, uint32_t lease_ms,
		  const struct kvd_call *call, struct kvd_hold **hold_p);
/* Once it is answered; else -KVD_E_STATE. *first_p: the number of the first chunk. */
int kvd_hold_found(const struct kvd_hold *hold, struct kvd_found *found_p,
		   uint64_t *first_p);
int kvd_hold_secret(const struct kvd_hold *hold, void *secret);
#define KVD_HOLDERS_MAX 2u
struct kvd_holder {
	uint8_t instance[16]; /* as struct kvd_cost_holder names it */
	uint64_t chunks, tokens;
};
/* Which daemons have the hold's last `far` chunks: who is asked for them, and who goes on
 * when that one fails. How many they are. Blocks. */
int kvd_hold_holders(struct kvd_hold *hold, struct kvd_holder holders[KVD_HOLDERS_MAX],
		     int timeout_ms);
/* What reads by it goes on. Frees the handle on success. */
int kvd_hold_close(struct kvd_hold *hold, const struct kvd_call *call);

struct kvd_move_args {
	struct kvd_pool *pool;	      /* with the layout that the space was opened with */
	const struct kvd_view *views; /* each of the space's */
	size_t view_count;
	struct kvd_wait wait; /* before any page is touched */
	uint32_t deadline_ms; /* fetch: what is not there by then fails it; 0: none */
	/* put: it succeeds when all of it is in files (the daemon's option chunk_dir) and
	 * would outlast a loss of power. */
	bool durable;
};
struct kvd_move;
/*
 * Store chunks from pages. What is there already is left out, and what finds no room: a
 * put succeeds when all that it took is there (kvd_move_show() says how much that is).
 * The views' tokens begin at the first chunk's; only the last chunk may be short of some,
 * and then its id is of that many tokens.
 */
int kvd_put(struct kvd_space *space, const struct kvd_chunks *chunks,
	    const struct kvd_move_args *args, const struct kvd_call *call,
	    struct kvd_move **move_p);
/*
 * Chunks are found and read in the pages themselves: nothing is copied, and no memory of
 * the daemon is used. Once it has succeeded the pages must not be written until
 * kvd_withdraw() of these chunks has ended, or the pool's unregistration, or the session.
 * A page holds tokens of one chunk alone. Out of `there`: in this pool already, which
 * stays as it was.
 */
int kvd_publish(struct kvd_space *space, const struct kvd_chunks *chunks,
		const struct kvd_move_args *args, const struct kvd_call *call,
		struct kvd_move **move_p);
/*
 * What this session has published of them is found no more, whoever holds it. The move
 * ends when nobody reads the pages: what does by then may go on for grace_ms (at most
 * 60000), then it fails or goes on with another holder. Failed or not, the pages are the
 * engine's.
 */
int kvd_withdraw(struct kvd_space *space, const struct kvd_chunks *chunks,
		 uint32_t grace_ms, const struct kvd_call *call,
		 struct kvd_move **move_p);
/* Read into pages the tokens that the views name; the hold has them. */
int kvd_fetch(struct kvd_hold *hold, const struct kvd_move_args *args,
	      const struct kvd_call *call, struct kvd_move **move_p);
/* As their room counterparts: terminal means that the pages are the engine's. */
int kvd_move_state(const struct kvd_move *move);
int kvd_move_read(const struct kvd_move *move, struct kvd_room_status *status_p);
int kvd_move_wait(struct kvd_move *move, int state, int timeout_ms);
struct kvd_move_facts {
	uint64_t chunks, done; /* taken; moved or there before */
	/* of a put: there before; no room for them, or stored at another place. Of
	 * kvd_withdraw(): `chunks` were published, `left_out` were not, by this session
	 */
	uint64_t there, left_out;
	uint64_t prefix_tokens; /* moved without a gap from the first on */
	struct kvd_error error; /* why it failed; code 0: it has not */
};
int kvd_move_show(struct kvd_move *move, int timeout_ms, struct kvd_move_facts *facts_p);
int kvd_move_abort(struct kvd_move *move, const struct kvd_call *call);
/* Any state: what has not ended is aborted, and its pages may change until it has: abort
 * and wait before. Frees the handle on success. */
int kvd_move_close(struct kvd_move *move, const struct kvd_call *call);

#ifdef __cplusplus
}
#endif

#endif
