/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks of KV in the daemon: the part of kvd.h that names, shares and stores them.
 * Include kvd.h. */
#ifndef KVD_CHUNK_H
#define KVD_CHUNK_H

#include "kvd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- chunks -------------------------------------------------------------- */

/*
 * KV that has a name. A chunk is the KV of `tokens` consecutive tokens. Its name is 32
 * bytes that engines derive from these tokens and all tokens before them (a chain of
 * hashes). It is stored in the daemon's memory (option chunk_memory). Engines of one user
 * share chunks, whatever their ranks, page sizes and head orders, and chunks outlive
 * engines.
 *
 * A space defines what must be equal for chunks of two engines to be interchangeable. A
 * hold pins chunks against eviction. kvd_put() stores pages, kvd_fetch() reads held
 * chunks into pages. A chunk is found when all of its bytes are present. Handles end with
 * the session: open them again after a reconnect.
 */
#define KVD_CHUNK_ID_BYTES 32
#define KVD_HOLD_SECRET_BYTES 16

struct kvd_space_args {
	struct kvd_pool *pool; /* its layout is used; or NULL and */
	const char *layout;    /* the layout text (kvd_layout_text()); "buffers" may be
				* absent */
	const char *model;
	const char *revision; /* revision of its weights and adapters; NULL: none */
	/* How ids are derived: hash, seed, block size. Engines with equal schemes must
	 * give equal ids to equal tokens. */
	const char *scheme;
	const char *rope; /* position encoding, if the model name does not determine it */
	uint32_t tokens;  /* tokens per chunk: 16 to 4096 */
	const char *const
		*views; /* views of a chunk; NULL: all of the layout except "aux" */
	size_t view_count;
};
struct kvd_space;
/* -KVD_E_STATE: the chunk store is off. -KVD_E_BUSY: its memory is being allocated;
 * retry. */
int kvd_space_open(struct kvd_client *client, const struct kvd_space_args *args,
		   const struct kvd_call *call, struct kvd_space **space_p);
/* Its holds and moves continue, its chunks stay in the store. Frees the handle on
 * success. */
int kvd_space_close(struct kvd_space *space, const struct kvd_call *call);

/* Consecutive chunks: chunk i holds the tokens from (first + i) * tokens on. At most
 * 4096. KVD_CHUNK_ANYWHERE: the engine does not know the position in the prompt. Such
 * chunks are found only by engines that use it too, and tokens of a call, or a hold,
 * are counted from its first chunk. */
#define KVD_CHUNK_ANYWHERE UINT32_MAX
struct kvd_chunks {
	const void *ids; /* KVD_CHUNK_ID_BYTES each */
	size_t count;
	uint64_t first;
};
struct kvd_found {
	uint64_t chunks; /* consecutive, from the first one */
	uint64_t tokens;
	uint64_t remote; /* of the chunks, the last ones: from the first one on that is at
			    another daemon */
};
/* Chunks present for the space's rank; they may be evicted at any time. Blocks. */
int kvd_find(struct kvd_space *space, const struct kvd_chunks *chunks, int timeout_ms,
	     struct kvd_found *found_p);
/* Remove them from the store; chunks in use are removed when they are no longer in
 * use. Blocks. */
int kvd_drop(struct kvd_space *space, const struct kvd_chunks *chunks, int timeout_ms);

struct kvd_hold;
/* Pin those that are present for lease_ms (0: ten seconds), or until the hold is
 * closed. remote_ms > 0: query the daemons in the option chunk_peers, and those that the
 * index nodes (chunk_index) name, for the missing rest, which they pin; the reply
 * takes at most this time. If none are found, the hold is empty. Blocks. */
int kvd_hold_open(struct kvd_space *space, const struct kvd_chunks *chunks,
		  uint32_t lease_ms, uint32_t remote_ms, int timeout_ms,
		  struct kvd_hold **hold_p);
/* The same chunks as in another session's hold, if present for this space's rank, by
 * kvd_hold_secret() of that hold. -KVD_E_NOTFOUND, -KVD_E_LEASE. Blocks. */
int kvd_hold_join(struct kvd_space *space, const void *secret, uint32_t lease_ms,
		  int timeout_ms, struct kvd_hold **hold_p);
/* -KVD_E_STATE: the daemon has no such hold any more. *first_p: the number of the first
 * chunk. */
int kvd_hold_found(const struct kvd_hold *hold, struct kvd_found *found_p,
		   uint64_t *first_p);
int kvd_hold_secret(const struct kvd_hold *hold, void *secret);
#define KVD_HOLDERS_MAX 16u
struct kvd_holder {
	uint8_t instance[16]; /* as in struct kvd_cost_holder */
	uint64_t first;	      /* of its chunks: its number in the hold */
	uint64_t chunks, tokens;
	bool gpu; /* most chunks are in an engine's pages in GPU memory there */
};
/* The daemons that have chunks of the hold, in the order of the chunks: if one fails, the
 * next one with the same `first` is asked. Returns their number. Blocks. */
int kvd_hold_holders(struct kvd_hold *hold, struct kvd_holder holders[KVD_HOLDERS_MAX],
		     int timeout_ms);
/* Fetches in progress finish. Frees the handle on success. */
int kvd_hold_close(struct kvd_hold *hold, const struct kvd_call *call);

struct kvd_move_args {
	struct kvd_pool *pool;	      /* with the layout of the space */
	const struct kvd_view *views; /* each view of the space */
	size_t view_count;
	struct kvd_wait wait; /* wait before any page is accessed */
	uint32_t deadline_ms; /* fetch: timeout for missing chunks; 0: none */
	/* put: succeed only when all chunks are synced to files (the daemon's option
	 * chunk_dir) and survive a loss of power. */
	bool durable;
};
struct kvd_move;
/*
 * Store chunks from pages. Chunks that are already present, and those that do not fit,
 * are left out: a put succeeds when all accepted chunks are stored (kvd_move_show() has
 * their number). The tokens of the views start at the first chunk; only the last chunk
 * may be incomplete, and its id is then of that many tokens.
 */
int kvd_put(struct kvd_space *space, const struct kvd_chunks *chunks,
	    const struct kvd_move_args *args, const struct kvd_call *call,
	    struct kvd_move **move_p);
/*
 * Chunks are found and read in the pages themselves: nothing is copied, and no memory of
 * the daemon is used. After success the pages must not be written until kvd_withdraw() of
 * these chunks, the unregistration of the pool, or the session has ended. A page holds
 * tokens of one chunk only. `there`: chunks already published from this pool, which keep
 * their pages.
 */
int kvd_publish(struct kvd_space *space, const struct kvd_chunks *chunks,
		const struct kvd_move_args *args, const struct kvd_call *call,
		struct kvd_move **move_p);
/*
 * The session's publications of these chunks are no longer found by any engine. The move
 * ends when the pages are no longer read: reads in progress may continue for grace_ms (at
 * most 60000), then they fail or continue with another holder. Whether it fails or not,
 * the engine may reuse the pages.
 */
int kvd_withdraw(struct kvd_space *space, const struct kvd_chunks *chunks,
		 uint32_t grace_ms, const struct kvd_call *call,
		 struct kvd_move **move_p);
/*
 * Read the tokens of the views, which the hold contains, into pages.
 *
 * A gather: with one view that has `select`, only these tokens are read, of its layers
 * only. Tokens are numbered in the request, ascending, at most 65536. select[i] has
 * place i of the pages: place % page_tokens of pages[place / page_tokens]; first_token
 * and the token range are 0. For any places, use a pool with a layout of one-token pages
 * over the same memory. Layers with other tokens are other fetches, in progress at the
 * same time. call->post is needed; a refusal fails the move. Keys keep the positions that
 * they were computed at, so kvd_move_splice() refuses it. Of a failed gather,
 * prefix_tokens is the range from the first selected token on in which all selected ones
 * were read.
 */
int kvd_fetch(struct kvd_hold *hold, const struct kvd_move_args *args,
	      const struct kvd_call *call, struct kvd_move **move_p);
/* As their room counterparts: terminal means that the engine may reuse the pages. */
int kvd_move_state(const struct kvd_move *move);
int kvd_move_read(const struct kvd_move *move, struct kvd_room_status *status_p);
int kvd_move_wait(struct kvd_move *move, int state, int timeout_ms);
struct kvd_move_facts {
	uint64_t chunks, done; /* accepted; moved or already present */
	/* put: already present; left out for lack of space, or stored at another
	 * position. kvd_withdraw(): `chunks` were published, `left_out` were not, by
	 * this session */
	uint64_t there, left_out;
	uint64_t prefix_tokens; /* tokens moved without a gap, from the first one */
	struct kvd_error error; /* error of its failure; code 0: none */
};
int kvd_move_show(struct kvd_move *move, int timeout_ms, struct kvd_move_facts *facts_p);
int kvd_move_abort(struct kvd_move *move, const struct kvd_call *call);
/* Any state. A move that has not ended is aborted, and its pages may change until it
 * has ended: abort and wait before. Frees the handle on success. */
int kvd_move_close(struct kvd_move *move, const struct kvd_call *call);

#ifdef __cplusplus
}
#endif

#endif
