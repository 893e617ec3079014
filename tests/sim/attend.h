/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend: query rows in the simulation. In some scripts each place has a chunk store and
 * a requester: an engine that puts chunks, holds its own and others', and posts rows of
 * its seats. attend.c acts, attend_judge.c looks, attend_forge.c is the hostile peer.
 *
 * What a chunk holds depends on its id alone, whoever put it. So the judge knows what
 * rows make of any of them, without looking at memory of kvd's.
 */
#ifndef KVD_TESTS_SIM_ATTEND_H
#define KVD_TESTS_SIM_ATTEND_H

#include "proto/kvd_ring.h"
#include "tests/sim/sim.h"

#define ASK_SEATS 5u
#define ASK_HEADS 4u
#define ASK_KV_HEADS 2u
#define ASK_DIMS 16u
#define ASK_QUERIES 2u /* query tokens of a seat */
#define ASK_ROWS (ASK_QUERIES * ASK_HEADS)
#define ASK_IDS 8u
#define ASK_CHUNK 16u /* tokens */
#define ASK_PAGE 8u
#define ASK_LAYERS 2u
#define ASK_PARTS 3u
#define ASK_CHOSEN 5u /* tokens of a selection, at most */
#define ASK_HOLDS 5u
#define ASK_MOVES 4u
#define ASK_SCALE 0.5f

struct ask_hold {
	uint64_t id; /* 0: none */
	unsigned int first, count;
};

struct ask_post {
	bool used; /* the seat was posted; the word of its end is to stay */
	bool live;
	bool canceled;
	bool back; /* its rows are the engine's again, and were scribbled over */
	bool lied; /* a holder lied: the numbers may be wrong, and how it ends */
	uint32_t gen, layer;
	uint64_t value; /* ordered; 0: not */
	bool ready;	/* and its rows are in the seat, as its word says */
	uint64_t deadline_ns, word;
	struct kvd_ring_part parts[ASK_PARTS];
	unsigned int first[ASK_PARTS], part_count; /* first: the hold's first chunk */
	uint32_t select[ASK_PARTS * ASK_QUERIES * ASK_CHOSEN];
	unsigned int select_count;
	uint16_t q[ASK_ROWS * ASK_DIMS]; /* as they were when it was posted */
};

/* Memory of seats, and what it must hold. `told`: of a requester that died, words of its
 * ordered posts, which its daemon may store when it ends them. */
struct ask_seats {
	struct {
		uint64_t at, value;
	} told[ASK_SEATS];
	uint8_t *base, *shadow;
	uint64_t bytes;
	int fd;
};

struct requester {
	unsigned int place;
	bool alive;
	struct session *session;
	struct cache cache;
	uint64_t space, region, attend;
	uint64_t seat_bytes, q, o, m, l, ready, done;
	struct ask_seats seats;
	struct ask_hold holds[ASK_HOLDS];
	uint64_t moves[ASK_MOVES];
	struct ask_post posts[ASK_SEATS];
	uint32_t gens[ASK_SEATS];
};

#define ASK_GRAVES 64u

struct asks {
	struct requester requesters[SIM_PLACES_MAX];
	struct offload *kernels[CLUSTER_NODES_MAX]; /* of each node, dead ones, too */
	bool held[CLUSTER_NODES_MAX];
	uint32_t holds[CLUSTER_NODES_MAX]; /* how often it was held up */
	struct ask_seats graves[ASK_GRAVES];
	struct cache caches[ASK_GRAVES];
	unsigned int grave_count;
};
extern struct asks asks;

static inline bool ask_out_bf16(const struct requester *requester)
{
	return requester->place % 2;
}
static inline void *ask_seat(const struct requester *requester, unsigned int seat,
			     uint64_t at)
{
	return requester->seats.base + seat * requester->seat_bytes + at;
}
static inline void *ask_shadow(const struct requester *requester, unsigned int seat,
			       uint64_t at)
{
	return requester->seats.shadow + seat * requester->seat_bytes + at;
}

/* attend_judge.c */
uint16_t ask_value(unsigned int id, unsigned int layer, unsigned int field,
		   unsigned int token, unsigned int head, unsigned int d);
double ask_inv_freq(unsigned int i);
void ask_judge_seats(struct sim *sim, const struct ask_seats *seats, const char *whose);
void ask_judge_post(struct sim *sim, struct requester *requester, unsigned int seat);
/* Once the word says that its rows are. */
void ask_rows_back(struct requester *a, unsigned int seat);
void ask_judge_sticky(struct sim *sim, const struct requester *requester);
void ask_judge_place(struct sim *sim, unsigned int node, bool alive);
void ask_judge_begin(void);
/* Around each message about attends, true or forged. */
void ask_judge_before(struct sim *sim, const struct kvd *kvd, const struct remote *remote,
		      const struct wire_header *h, struct cursor body);
void ask_judge_after(struct sim *sim, const struct kvd *kvd, const struct remote *remote,
		     const struct wire_header *h, struct cursor body);

/* attend_forge.c */
#define ASK_STRANGERS (UINT64_C(1) << 40) /* numbers of what strangers ask, from here */
void ask_forge_begin(void);
bool ask_forge(struct sim *sim, struct sim_draw *d);

#endif
