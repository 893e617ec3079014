/* SPDX-License-Identifier: Apache-2.0 */
/* Which workers serve a request, and how many are wanted: a part of kvd.h. Include kvd.h.
 */
#ifndef KVD_PICK_H
#define KVD_PICK_H

#include "kvd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- picks ---------------------------------------------------------------- */

/*
 * A picker knows the workers of a prefill and of a decode group with their loads, and
 * names the pair that is predicted to give the first token soonest. It is arithmetic in
 * memory of its own: no daemon, descriptor, thread or clock. Times are arguments:
 * nanoseconds of any clock that does not run backwards. One thread at a time.
 * kvd_last_error() is not set. docs/pick.md has the function that is minimised.
 */
struct kvd_picker;

#define KVD_PICK_WORKERS_MAX 4096   /* a group */
#define KVD_PICK_NAME_MAX 64	    /* bytes with the NUL */
#define KVD_PICK_RANKS_MAX 1024	    /* a worker */
#define KVD_PICK_NEAR_MAX 64	    /* workers with a prefix, and such to avoid */
#define KVD_PICK_HELD_MAX (1 << 18) /* reservations */

enum kvd_pick_side {
	KVD_PICK_PREFILL = 0,
	KVD_PICK_DECODE = 1,
	KVD_PICK_SIDES = 2,
};

enum kvd_pick_state {
	KVD_PICK_SERVING = 0,
	KVD_PICK_DRAINING = 1, /* is not picked */
	KVD_PICK_GONE = 2,     /* is forgotten */
};

struct kvd_pick_options {
	uint64_t seed;	     /* of ties and samples; another in each process */
	double token_bytes;  /* of KV, to tell tokens from bytes; 0: not known */
	double stale_s;	     /* a load is distrusted after; 0: 5 */
	double hold_s;	     /* a reservation counts that no load shows; 0: 5 */
	double lag_s;	     /* a load shows what was picked so long before; 0: 0.1 */
	unsigned int scan;   /* groups up to this size are looked at whole; 0: 64 */
	unsigned int sample; /* members that are looked at of larger ones; 0: 2 */
	/* The caller tells the outcome of each pick: kvd_pick_settle(),
	 * kvd_pick_release(). Then what was picked and has not answered counts, whatever
	 * the worker says, for at most two minutes. */
	bool results;
};

/* What a worker says of itself. A member that is not known is negative or not a number,
 * as after kvd_pick_load_unknown(). */
struct kvd_pick_load {
	uint64_t seq; /* another one: another load */
	double rooms_waiting, rooms_running;
	double bytes_queued, gbps; /* of transfers; 10^9 bytes a second, lately */
	double failed;		   /* rooms of the last minute */
	double running, waiting;   /* the engine's requests */
	double kv_free_tokens, kv_total_tokens;
	double prompt_tokens_waiting;		 /* not computed yet */
	double prompt_tokens_s, decode_tokens_s; /* computed a second, lately */
};

struct kvd_pick_near {
	const char *worker;
	double tokens; /* of the prompt, that it holds */
};

struct kvd_pick_args {
	double prompt_tokens, bytes; /* one of them; 0: by the other */
	double output_tokens;	     /* expected; 0: not known */
	const struct kvd_pick_near *near;
	size_t near_count;
	const char *const *avoid; /* workers that are not to be picked */
	size_t avoid_count;
	bool only_prefill, only_decode;
};

/* A prediction, in seconds. */
struct kvd_pick_score {
	double total_s;	   /* first token: the sum of the others */
	double queue_s;	   /* what is before it */
	double compute_s;  /* its own prompt, without what is held; decode: the batch */
	double transfer_s; /* of its KV, behind what is queued */
	double penalty_s;  /* of failures, and of an answer that is overdue */
	bool last_resort;  /* decode: no room for its KV */
	bool fresh;	   /* of a load that is trusted */
};

struct kvd_pick_result {
	uint64_t id; /* of the reservation */
	char worker[KVD_PICK_SIDES][KVD_PICK_NAME_MAX];
	struct kvd_pick_score score[KVD_PICK_SIDES];
};

/* -KVD_E_INVAL: an option is not a finite number or beyond its limits. */
int kvd_picker_new(const struct kvd_pick_options *options, struct kvd_picker **picker_p);
void kvd_picker_free(struct kvd_picker *picker);

void kvd_pick_load_unknown(struct kvd_pick_load *load);
/* A worker and its load as of sampled_ns, NULL: nothing new is known of that. A load with
 * the seq that is known says again what it said. -KVD_E_INVAL: the name; -KVD_E_LIMIT:
 * the group is full. */
int kvd_picker_set(struct kvd_picker *picker, enum kvd_pick_side side, const char *worker,
		   enum kvd_pick_state state, const struct kvd_pick_load *load,
		   uint64_t sampled_ns, uint64_t now_ns);
/* The answer of group.query with loads: what has changed (it has `gone`, and not
 * `whole`), or all. Loads of a worker's ranks are put together; it is not picked when one
 * of them drains or is missing. Once it has `synced`, loads are as they were told,
 * however long ago. -KVD_E_PROTO: not such an answer, and nothing is changed; what is
 * wrong in a single rank's load counts as not known. -KVD_E_LIMIT, -KVD_E_NOMEM: what
 * there is room for is taken. */
int kvd_picker_feed(struct kvd_picker *picker, enum kvd_pick_side side,
		    const char *answer, size_t length, uint64_t now_ns);
/* Workers that serve, and all. */
size_t kvd_picker_count(const struct kvd_picker *picker, enum kvd_pick_side side,
			size_t *all_p);

/* -KVD_E_NOTFOUND: no worker serves on a side (result->worker[side] is ""); -KVD_E_INVAL:
 * an amount; -KVD_E_LIMIT: too many reservations. */
int kvd_pick(struct kvd_picker *picker, const struct kvd_pick_args *args, uint64_t now_ns,
	     struct kvd_pick_result *result);
/* The score of worker number `index` of a side, below kvd_picker_count()'s all; nothing
 * is reserved. */
int kvd_picker_score(struct kvd_picker *picker, enum kvd_pick_side side, size_t index,
		     const struct kvd_pick_args *args, uint64_t now_ns,
		     char worker[KVD_PICK_NAME_MAX], enum kvd_pick_state *state_p,
		     struct kvd_pick_score *score);

enum kvd_pick_failed {
	KVD_PICK_FAILED_PREFILL = 1,
	KVD_PICK_FAILED_DECODE = 2,
};

/* The first token came after ttft_s, or (with ttft_s negative) it will not, by the fault
 * of the sides in `failed`. Once a pick; ids that are not known, or not any more, are
 * passed over. */
void kvd_pick_settle(struct kvd_picker *picker, uint64_t id, double ttft_s,
		     unsigned int failed, uint64_t now_ns);
/* The request has ended, or never began: the id is free. */
void kvd_pick_release(struct kvd_picker *picker, uint64_t id, uint64_t now_ns);

/* ---- how many workers are wanted ------------------------------------------ */

struct kvd_scale_options {
	unsigned int min[KVD_PICK_SIDES], max[KVD_PICK_SIDES]; /* 0: 1; 4096 */
	double prefill_busy; /* share of its speed that is to be used; 0: 0.7 */
	double decode_full;  /* share of its KV; 0: 0.75 */
	double wait_s;	     /* prompts that wait are to be computed within; 0: 60 */
	double start_s; /* a worker takes to start: load is looked ahead so far; 0: 180 */
	double up_s;	/* between two steps up; 0: 60 */
	double down_s;	/* less was wanted for so long before a step down; 0: 900 */
	double band;	/* hysteresis: a step up goes so far beyond the need, and one
			 * down is made three times as far above it; 0: 0.1 */
};

/* What is measured of a side. */
struct kvd_scale_side {
	unsigned int workers; /* that serve */
	double speed;	/* prompt tokens a second of one, when it has enough; KV tokens of
			   one */
	double served;	/* prompt tokens computed a second by all; KV tokens in use */
	double waiting; /* prompt tokens; KV tokens that requests without room wait for */
};

struct kvd_scale_sample {
	struct kvd_scale_side side[KVD_PICK_SIDES];
};

/* Of one side, between steps: all zeros at the start. Copied freely. */
#define KVD_SCALE_BINS 32
struct kvd_scale_memory {
	uint64_t last_ns, up_ns, bin_ns;
	double rate, slope, waiting;
	double need[KVD_SCALE_BINS]; /* the largest of each part of down_s */
	unsigned int wanted, bin;
};

struct kvd_scale_state {
	struct kvd_scale_memory side[KVD_PICK_SIDES];
};

struct kvd_scale_wanted {
	unsigned int workers[KVD_PICK_SIDES];
	double need[KVD_PICK_SIDES]; /* not rounded, not held */
	bool changed, known[KVD_PICK_SIDES];
};

/* As the picker's loads say. */
void kvd_scale_measure(struct kvd_picker *picker, uint64_t now_ns,
		       struct kvd_scale_sample *sample);
/* One step, some seconds after the last. -KVD_E_INVAL: an option. A side of which nothing
 * can be told keeps what was wanted, or has. */
int kvd_scale_step(struct kvd_scale_state *state, const struct kvd_scale_options *options,
		   const struct kvd_scale_sample *sample, uint64_t now_ns,
		   struct kvd_scale_wanted *wanted);

#ifdef __cplusplus
}
#endif

#endif
