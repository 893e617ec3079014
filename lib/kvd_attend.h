/* SPDX-License-Identifier: Apache-2.0 */
/* Attention where the KV is: the part of kvd.h that sends query rows to chunks, of this
 * daemon and of others, and gets back what they made of them. */
#ifndef KVD_ATTEND_LIB_H
#define KVD_ATTEND_LIB_H

#include "kvd_chunk.h"

#ifdef __cplusplus
extern "C" {
#endif

enum kvd_attend_kind {
	KVD_MLA = 0, /* one latent a token: keys are all of it, values its first dv */
	KVD_GQA = 1, /* kv_heads heads of K and of V */
};
enum kvd_value_type { KVD_BF16 = 0, KVD_FP16 = 1, KVD_FP32 = 2 };
enum kvd_rope_pairs {
	KVD_HALVES = 0,	     /* value i and value i + dims / 2 are a pair */
	KVD_INTERLEAVED = 1, /* 2i and 2i + 1 */
};

/* Values [first, first + dims) of a query row and of a key are turned by position *
 * inv_freq[pair]: scaled frequencies, where the model scales them. */
struct kvd_rope {
	uint32_t first, dims; /* dims 0: chunks are attended where they were computed */
	enum kvd_rope_pairs pairs;
	const double *inv_freq; /* dims / 2 */
};

/*
 * Seats: memory of the engine's, in a memfd that it registered, for query rows (q) and
 * results (o, m, l: fp32), one seat behind the other. Row t * heads + h is head h of
 * query token t.
 */
struct kvd_attend_args {
	struct kvd_region *region;
	uint64_t offset;      /* of the first seat, a multiple of 64 */
	uint32_t rows, seats; /* rows: of a seat, at most 4096 */
	enum kvd_attend_kind kind;
	enum kvd_value_type q_type, kv_type;
	uint32_t heads, kv_heads; /* of this rank; MLA: kv_heads 1 */
	uint32_t first_head;	  /* of the model's kv heads, the first of these */
	uint32_t dqk, dv;	  /* values of a query row and a key; of a v */
	float scale;
	float softcap;		 /* scores become cap * tanh(score / cap); 0: none */
	const char *view;	 /* of the chunks; NULL: the one that they have */
	const char *key, *value; /* the layout's fields; MLA: key alone */
	struct kvd_rope rope;
};
struct kvd_attend;
/* Where things are in a seat, from its begin on; seat n begins at offset + n * bytes. */
struct kvd_seat {
	uint64_t bytes, q, o, m, l;
};
/* -KVD_E_STATE: the daemon keeps no chunks. */
int kvd_attend_open(struct kvd_client *client, const struct kvd_attend_args *args,
		    const struct kvd_call *call, struct kvd_attend **attend_p);
int kvd_attend_seat(const struct kvd_attend *attend, struct kvd_seat *seat_p);
/* Posts that are under way end. Frees the handle on success. */
int kvd_attend_close(struct kvd_attend *attend, const struct kvd_call *call);

/* Rows, and the chunks of a hold that they attend to. */
struct kvd_part {
	const struct kvd_hold *hold;
	uint32_t row, rows;    /* whole query tokens of the seat */
	uint32_t first, count; /* chunks of the hold */
	uint64_t tokens;       /* from the first one's first on; 0: all */
	int32_t delta; /* the chunks are to stand so many positions further on than where
			* they were computed. Not with a selection */
	/* 0: dense. Else of each query token so many tokens of the part, one behind the
	 * other; UINT32_MAX: none. Its heads share them. */
	uint32_t per_token;
	const uint32_t *select;
};
/*
 * Rows of a seat and one layer's KV. Never waits: q is the engine's again at
 * KVD_TRANSFERRING, o, m and l are there at KVD_SUCCESS: o over all parts' tokens, m the
 * largest score, l the sum of exp(score - m); rows without tokens have l 0. With `own`
 * the seat's o, m and l before are a part, too: the engine's own attention.
 * `deadline_us`: then it fails; 0: a second.
 */
int kvd_attend_post(struct kvd_attend *attend, uint32_t seat, uint32_t layer,
		    const struct kvd_part *parts, size_t part_count, bool own,
		    uint32_t deadline_us);
/* Loads; terminal means that the seat is the engine's. KVD_BOOTSTRAPPING: never posted;
 * KVD_WAITING_FOR_INPUT: q was not read yet. */
int kvd_attend_state(const struct kvd_attend *attend, uint32_t seat);
int kvd_attend_wait(struct kvd_attend *attend, uint32_t seat, int timeout_ms);
struct kvd_attend_facts {
	uint64_t queue_us, attend_us; /* where that was longest */
	uint32_t daemons;	      /* others that took part */
	uint32_t together;	      /* so many askers had rows for the same chunks */
	bool replicate; /* more than 8: fetch these chunks, and others ask you */
};
int kvd_attend_read(const struct kvd_attend *attend, uint32_t seat,
		    struct kvd_attend_facts *facts_p);
/* Why it failed; code 0: it has not. */
int kvd_attend_error(const struct kvd_attend *attend, uint32_t seat, int timeout_ms,
		     struct kvd_error *error_p);
int kvd_attend_stop(struct kvd_attend *attend, uint32_t seat); /* it ends, failed */

#ifdef __cplusplus
}
#endif

#endif
