/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on the daemon that has the KV: the part of kvd.h that sends query rows to
 * chunks, of this daemon and of others, and returns the attention results. */
#ifndef KVD_ATTEND_LIB_H
#define KVD_ATTEND_LIB_H

#include "kvd_chunk.h"

#ifdef __cplusplus
extern "C" {
#endif

enum kvd_attend_kind {
	KVD_MLA = 0, /* one latent per token: the whole is the key, its first dv values
		      * are the value */
	KVD_GQA = 1, /* kv_heads heads of K and of V */
};
enum kvd_value_type {
	KVD_BF16 = 0,
	KVD_FP16 = 1,
	KVD_FP32 = 2,
	KVD_FP8_E4M3 = 3, /* torch's float8_e4m3fn. If K and V have scales: one of a
			   * tensor or of a KV head multiplies q (K's) and o (V's),
			   * by the engine; those of each token are key_scale and
			   * value_scale */
};
enum kvd_rope_pairs {
	KVD_HALVES = 0,	     /* value i and value i + dims / 2 are a pair */
	KVD_INTERLEAVED = 1, /* 2i and 2i + 1 */
};

/* Values [first, first + dims) of a query row and of a key are rotated by position *
 * inv_freq[pair]: scaled frequencies, if the model scales them. */
struct kvd_rope {
	uint32_t first, dims; /* dims 0: chunks are used at the positions that they
			       * were computed at */
	enum kvd_rope_pairs pairs;
	const double *inv_freq; /* dims / 2 */
};

/*
 * Seats: memory of the engine, in a memfd that it registered, for query rows (q) and
 * results (o, m, l: fp32), laid out contiguously. Row t * heads + h is head h of query
 * token t.
 */
struct kvd_attend_args {
	struct kvd_region *region;
	uint64_t offset;      /* offset of the first seat, a multiple of 64 */
	uint32_t rows, seats; /* rows: per seat, at most 4096 */
	enum kvd_attend_kind kind;
	enum kvd_value_type q_type, kv_type;
	bool out_bf16; /* other daemons send o as bf16: about half the bytes, with
			* an error of at most 2^-8 of each value. Seats are fp32
			* in any case */
	uint32_t heads, kv_heads; /* of this rank; MLA: kv_heads 1 */
	uint32_t first_head;	  /* index of the first KV head among the model's */
	uint32_t dqk, dv;	  /* values per query row and key; per v */
	float scale;
	float softcap;		 /* scores become cap * tanh(score / cap); 0: off */
	const char *view;	 /* view of the chunks; NULL: the only one */
	const char *key, *value; /* fields of the layout; MLA: key only */
	/* fp8: fields with an fp32 for each head of a token, which multiplies k or v;
	 * MLA: the key's multiplies both. NULL: none */
	const char *key_scale, *value_scale;
	struct kvd_rope rope;
	void *address; /* of the first seat in this process, for ordered requests; NULL:
			* without them */
};
struct kvd_attend;
/* Offsets within a seat; seat n starts at offset + n * bytes. */
struct kvd_seat {
	uint64_t bytes, q, o, m, l;
	uint64_t ready, done; /* 64-bit words: kvd_attend_order() */
};
/* -KVD_E_STATE: the chunk store of the daemon is off. */
int kvd_attend_open(struct kvd_client *client, const struct kvd_attend_args *args,
		    const struct kvd_call *call, struct kvd_attend **attend_p);
int kvd_attend_seat(const struct kvd_attend *attend, struct kvd_seat *seat_p);
/* Requests in progress end. Frees the handle on success. */
int kvd_attend_close(struct kvd_attend *attend, const struct kvd_call *call);

/*
 * Keys of a fetch, for other positions: a rotation by delta * inv_freq, in fp32, rounded
 * once. Values without a position (V, and the latent of MLA) stay. This is an
 * approximation for tokens that would have other tokens before them: their KV depends on
 * these, too.
 */
struct kvd_splice {
	struct kvd_pool *pool;	      /* of the fetch; its regions were registered with
				       * their address in this process */
	const struct kvd_view *views; /* of the fetch */
	size_t view_count;
	const char *key; /* field of the layout, in each layer: of heads of `type`. MLA:
			  * the row, whose rope values `rope` names */
	enum kvd_value_type type;
	struct kvd_rope rope;
	int32_t delta; /* positions by which the tokens are used later than they were
			* computed */
};
struct kvd_move;
/* Rotates the keys of a fetch that has succeeded, in place, once: on this thread, or in
 * memory of a GPU by that one (bf16 only), for which the thread waits; not while a graph
 * of CUDA is captured. -KVD_E_STATE: it
 * has not succeeded, or they were rotated before. -KVD_E_REQUIRE: not in this memory, or
 * libkvd was built without nvcc. Other refusals leave the keys as they are. After a fault
 * of a GPU that runs they are undefined, as the message says: fetch them again. */
int kvd_move_splice(struct kvd_move *move, const struct kvd_splice *splice);

/* Rows, and the chunks of a hold that they attend to. */
struct kvd_part {
	const struct kvd_hold *hold;
	uint32_t row, rows;    /* whole query tokens of the seat */
	uint32_t first, count; /* chunks of the hold */
	uint64_t tokens;       /* tokens from the start of the first chunk; 0: all */
	int32_t delta; /* positions by which the chunks are shifted from where they
			* were computed. Not with a selection */
	/* 0: dense. Otherwise the number of selected tokens of the part per query
	 * token, contiguous; UINT32_MAX: none. All heads share them. */
	uint32_t per_token;
	const uint32_t *select;
};
/*
 * Attention of a seat's rows over one layer's KV. Never blocks: the engine may reuse q at
 * KVD_TRANSFERRING, and o, m and l are ready at KVD_SUCCESS: o over the tokens of all
 * parts, m the largest score, l the sum of exp(score - m); rows without tokens have l 0.
 * A request has the cost of its rows, the seat's up to the last one of a part: rows after
 * it are neither read nor written.
 * `deadline_us`: timeout; 0: one second.
 *
 * The engine merges them with its own attention over other tokens, which it computes
 * meanwhile. For each row, of two parts:
 *     M = max(m, m'), w = l exp(m - M), w' = l' exp(m' - M)
 *     o = (w o + w' o') / (w + w'), l = w + w', m = M
 * A part with l 0 is left out (its m is -inf). A kernel that returns the log-sum-exp has
 * m = LSE, l = 1. All logarithms are natural (base e), as those of FlashAttention, torch
 * and vLLM; an LSE of base 2, such as FlashInfer's, is multiplied by ln 2 before.
 */
int kvd_attend_post(struct kvd_attend *attend, uint32_t seat, uint32_t layer,
		    const struct kvd_part *parts, size_t part_count,
		    uint32_t deadline_us);
/*
 * An ordered request, for queries that a GPU's stream computes: it is posted before q is
 * there, and neither the engine's threads nor the daemon wait for the stream. The
 * seats are in a memfd that is mapped at args.address and registered with the driver
 * (cuMemHostRegister). The stream then
 *     writes q,
 *     stores *value_p in the seat's word `ready` (cuStreamWriteValue64),
 *     works on other tokens,
 *     waits until the word `done` is at least *value_p (cuStreamWaitValue64, GEQ), and
 *     reads o, m and l.
 * Its wait always ends: with the request, successful or not; when the daemon's process
 * has ended; and half a second after the deadline, even if the daemon hangs. A stream
 * cannot see a failure: when it has passed the word, and before results are used, call
 * kvd_attend_state() for each seat. Only those of KVD_SUCCESS are results.
 *
 * Layers that the engine posts ahead of its stream need a seat each. The deadline counts
 * from this call on. -KVD_E_STATE: no args.address.
 */
int kvd_attend_order(struct kvd_attend *attend, uint32_t seat, uint32_t layer,
		     const struct kvd_part *parts, size_t part_count,
		     uint32_t deadline_us, uint64_t *value_p);
/* Reads only shared memory; terminal means that the engine may reuse the seat.
 * KVD_BOOTSTRAPPING: never posted; KVD_WAITING_FOR_INPUT: q has not been read yet. */
int kvd_attend_state(const struct kvd_attend *attend, uint32_t seat);
int kvd_attend_wait(struct kvd_attend *attend, uint32_t seat, int timeout_ms);
struct kvd_attend_facts {
	uint64_t queue_us, attend_us; /* the largest over the daemons */
	uint32_t daemons;	      /* other daemons that took part */
	uint32_t together;	      /* number of requesters with rows for the same
				       * chunks */
	bool replicate; /* more than 8: fetch these chunks, so that other requesters
			 * can use this daemon */
	/* of a failed request; error: its code, KVD_E_…; 0: it has not failed */
	bool retryable;
	int error;
};
/* Reads only shared memory. */
int kvd_attend_read(const struct kvd_attend *attend, uint32_t seat,
		    struct kvd_attend_facts *facts_p);
/* The error of its failure with the daemon's message, which is queried; code 0: none. */
int kvd_attend_error(const struct kvd_attend *attend, uint32_t seat, int timeout_ms,
		     struct kvd_error *error_p);
int kvd_attend_stop(struct kvd_attend *attend, uint32_t seat); /* it ends as failed */

#ifdef __cplusplus
}
#endif

#endif
