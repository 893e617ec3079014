/* SPDX-License-Identifier: Apache-2.0 */
/* pick_impl: what the parts of a picker share: pick.c members and picks, pick_held.c
 * reservations, pick_score.c predictions, pick_feed.c answers of group.query. */
#ifndef KVD_LIB_PICK_IMPL_H
#define KVD_LIB_PICK_IMPL_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/kvd_pick.h"

#define PICK_NONE UINT32_MAX
#define PICK_SLOTS (2u * KVD_PICK_WORKERS_MAX) /* of the table of names; a power of 2 */
#define PICK_AMOUNT_MAX 1e15

struct pick_ends {
	uint32_t first, last;
};

struct pick_link {
	uint32_t before, after;
};

/* One of a worker's ranks: its place, and what it said last. */
struct pick_rank {
	uint32_t place[4]; /* dp, tp, pp, cp */
	uint32_t of;	   /* so many ranks the worker has */
	bool draining, loaded;
	uint64_t told_ns, mark;
	struct kvd_pick_load load; /* cleaned */
};

struct pick_member {
	char name[KVD_PICK_NAME_MAX];
	enum kvd_pick_state state;
	uint32_t at;	/* in its side's order */
	uint64_t epoch; /* of this membership: reservations name it */

	bool loaded;
	struct kvd_pick_load load; /* cleaned: negative is not known */
	uint64_t sampled_ns, told_ns;

	/* prefill: prompt tokens that are not computed, as of work_ns */
	double work, own_work; /* own_work: of picks here alone */
	uint64_t work_ns;
	double speed, seen_speed; /* tokens a second; 0: not known */
	double gbps;		  /* 0: not known */
	double served;		  /* tokens a second, lately */
	double own;		  /* tokens that were picked here, fading, as of own_ns */
	uint64_t own_ns;

	/* results */
	double observed_s, predicted_s; /* sums that forget */
	unsigned int observations;
	double failures; /* as of failures_ns; they fade */
	uint64_t failures_ns, answered_ns;
	double seen_tokens, seen_s; /* that were computed since seen_speed was set */

	/* reservations: all of them, oldest first; what no load has shown */
	struct pick_ends held;
	double held_tokens, fresh_tokens, fresh_bytes;
	unsigned int held_count, fresh_count;

	struct pick_rank *ranks; /* of kvd_picker_feed() */
	unsigned int rank_count, rank_room;
	bool fed, changed;
};

struct pick_held {
	uint32_t serial; /* of the id */
	bool live, settled;
	uint64_t made_ns;
	double bytes, predicted_s;
	struct {
		uint32_t member; /* PICK_NONE: not on this side (any more) */
		uint64_t epoch;
		double tokens;
		bool shown; /* by a load, or it is too old */
		struct pick_link link;
	} side[KVD_PICK_SIDES];
	struct pick_link age;
};

/* What members of a side usually are, so that one that says nothing counts as usual, and
 * one that says too much as not far from that. 0: not known. */
struct pick_usual {
	uint64_t at_ns;
	bool known;
	double speed, gbps, kv_total, decode_s, ratio, queue_s;
};

struct pick_side {
	struct pick_member *members[KVD_PICK_WORKERS_MAX];
	uint16_t order[KVD_PICK_WORKERS_MAX]; /* of members: those that serve, the rest */
	uint32_t serving, count;
	uint16_t slots[PICK_SLOTS]; /* by name: member + 1 */
	struct pick_usual usual;
	uint64_t synced_ns;   /* all loads are as they were told */
	uint64_t answered_ns; /* when the latest pick that was answered was made */
};

struct kvd_picker {
	struct kvd_pick_options options;
	uint64_t stale_ns, hold_ns, lag_ns;
	uint64_t now_ns, random, salt, epoch, mark;
	struct pick_side side[KVD_PICK_SIDES];

	struct pick_held *held;
	uint32_t held_room, held_free;
	uint32_t serial;
	struct pick_ends age; /* of reservations that live */
	uint32_t fresh;	      /* the oldest of them that is not older than hold_s */

	double mean_prompt, mean_output;
};

/* A request, its amounts worked out. */
struct pick_request {
	double prompt, output, bytes;
};

struct pick_candidate {
	struct pick_member *member;
	double near; /* tokens of the prompt that it holds */
	struct kvd_pick_score score;
	double ratio;
};

static inline bool pick_known(double value)
{
	return value >= 0;
}

#define PICK_OTHERS_S 10.0   /* over which the share of other routers is taken */
#define PICK_FAILURES_S 30.0 /* in which failures fade to a third */

static inline double pick_seconds(uint64_t from_ns, uint64_t to_ns)
{
	return to_ns > from_ns ? (double)(to_ns - from_ns) * 1e-9 : 0;
}

/* What is left of an amount that fades. */
static inline double pick_faded(double amount, uint64_t since_ns, uint64_t now_ns,
				double fade_s)
{
	return amount > 0 ? amount * exp(-pick_seconds(since_ns, now_ns) / fade_s) : 0;
}

/* A speed is near the largest that was seen: what was seen is less whenever it was not
 * busy all the time, or busy for others. It rises by this part, and falls more slowly
 * where it `was_busy`. */
static inline void pick_learn_speed(double *speed, double rise, double seen,
				    bool was_busy)
{
	if (!(seen >= 1))
		return;
	if (seen > *speed)
		*speed += (*speed > 0 ? rise : 1) * (seen - *speed);
	else if (was_busy)
		*speed += 0.02 * (seen - *speed);
}

/* ---- pick.c ---- */
uint64_t pick_random(struct kvd_picker *picker);
uint64_t pick_now(struct kvd_picker *picker, uint64_t now_ns);
struct pick_member *pick_find(struct kvd_picker *picker, enum kvd_pick_side side,
			      const char *worker);
bool pick_name_ok(const char *worker);
/* The member, a new one if need be; it does not serve until pick_state(). */
int pick_member_get(struct kvd_picker *picker, enum kvd_pick_side side,
		    const char *worker, struct pick_member **member_p);
void pick_state(struct kvd_picker *picker, enum kvd_pick_side side,
		struct pick_member *member, enum kvd_pick_state state);
void pick_load(struct kvd_picker *picker, enum kvd_pick_side side,
	       struct pick_member *member, const struct kvd_pick_load *load,
	       uint64_t sampled_ns);
void pick_forget(struct kvd_picker *picker, enum kvd_pick_side side,
		 struct pick_member *member);
/* The member of a reservation, while it is the same. */
struct pick_member *pick_member_of(const struct kvd_picker *picker,
				   const struct pick_held *held, enum kvd_pick_side side);

/* ---- pick_score.c ---- */
void pick_usual_refresh(struct kvd_picker *picker, enum kvd_pick_side side, bool must);
bool pick_is_fresh(const struct kvd_picker *picker, enum kvd_pick_side side,
		   const struct pick_member *member);
double pick_speed(const struct kvd_picker *picker, const struct pick_member *member);
/* How much later it answers than was predicted, beside the others; at least 1. */
double pick_ratio(const struct kvd_picker *picker, const struct pick_member *member);
/* How often it is looked at, beside the usual: 1/8 to 8. */
double pick_weight(const struct kvd_picker *picker, enum kvd_pick_side side,
		   const struct pick_member *member);
void pick_score(const struct kvd_picker *picker, enum kvd_pick_side side,
		const struct pick_request *request, struct pick_candidate *candidate);
/* A new load, cleaned: prompts that wait are those it tells of and what was picked
 * since. */
void pick_take_load(struct kvd_picker *picker, enum kvd_pick_side side,
		    struct pick_member *member, const struct kvd_pick_load *load,
		    uint64_t sampled_ns);
/* Prompt tokens that wait, as a load says; 0: it does not. */
double pick_load_prompts(const struct kvd_picker *picker,
			 const struct kvd_pick_load *load);
void pick_drain_work(const struct kvd_picker *picker, struct pick_member *member);

/* ---- pick_held.c ---- */
int pick_hold(struct kvd_picker *picker, const struct pick_request *request,
	      const struct pick_candidate *chosen[KVD_PICK_SIDES], uint64_t *id_p);
/* Those that a load of this time shows. */
void pick_show(struct kvd_picker *picker, enum kvd_pick_side side,
	       struct pick_member *member, uint64_t sampled_ns);
void pick_expire(struct kvd_picker *picker);
/* A member goes: its reservations end on this side. */
void pick_lose(struct kvd_picker *picker, enum kvd_pick_side side,
	       struct pick_member *member);

#endif
