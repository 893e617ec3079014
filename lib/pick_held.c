/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reservations of a picker: what was picked and is not over.
 *
 * A reservation is in three lists: of its prefill worker, of its decode worker, and of
 * all by age. It counts in full on a side until a load shows it (one whose sample is
 * later than the pick by `lag_s`), and at most for hold_s: a worker need not publish a
 * load that differs too little. With `results` it stays in the worker's list after that,
 * until the first token on the prefill side and until the end on the decode side, for
 * KEEP_NS at most: so much is surely there, whatever the worker says (pick_score.c).
 *
 * An id has a serial number beside the place in the table, so that one which is used up
 * names nothing.
 */
#include <math.h>

#include "daemon/base/mem.h"
#include "lib/pick_impl.h"

#define KEEP_NS (120 * UINT64_C(1000000000))
#define ROOM_FIRST 256u
/* of sums of observed and predicted times, an answer */
#define RESULT_KEEP 0.9
#define SPEED_TOKENS 1000.0 /* that are computed tell a speed */

/* ---- lists ---- */

static struct pick_link *held_link(struct kvd_picker *picker, uint32_t index, int list)
{
	struct pick_held *held = &picker->held[index];

	return list == KVD_PICK_SIDES ? &held->age : &held->side[list].link;
}

static void held_append(struct kvd_picker *picker, struct pick_ends *ends, uint32_t index,
			int list)
{
	struct pick_link *link = held_link(picker, index, list);

	*link = (struct pick_link){ends->last, PICK_NONE};
	if (ends->last == PICK_NONE)
		ends->first = index;
	else
		held_link(picker, ends->last, list)->after = index;
	ends->last = index;
}

static void held_unlink(struct kvd_picker *picker, struct pick_ends *ends, uint32_t index,
			int list)
{
	struct pick_link *link = held_link(picker, index, list);

	if (link->before == PICK_NONE)
		ends->first = link->after;
	else
		held_link(picker, link->before, list)->after = link->after;
	if (link->after == PICK_NONE)
		ends->last = link->before;
	else
		held_link(picker, link->after, list)->before = link->before;
}

/* ---- the table ---- */

static int held_grow(struct kvd_picker *picker)
{
	uint32_t room = picker->held_room ? 2 * picker->held_room : ROOM_FIRST;
	struct pick_held *held;

	if (picker->held_room >= KVD_PICK_HELD_MAX)
		return -KVD_E_LIMIT;
	held = mem_regrow(picker->held, room, sizeof(*held));
	if (!held)
		return -KVD_E_NOMEM;
	for (uint32_t i = picker->held_room; i < room; i++) {
		held[i] = (struct pick_held){0};
		held[i].age.after = i + 1 < room ? i + 1 : PICK_NONE;
	}
	picker->held_free = picker->held_room;
	picker->held = held;
	picker->held_room = room;
	return 0;
}

static struct pick_held *held_find(struct kvd_picker *picker, uint64_t id)
{
	uint32_t index = (uint32_t)id;

	if (index >= picker->held_room || !picker->held[index].live ||
	    picker->held[index].serial != id >> 32)
		return NULL;
	return &picker->held[index];
}

struct pick_member *pick_member_of(const struct kvd_picker *picker,
				   const struct pick_held *held, enum kvd_pick_side side)
{
	uint32_t at = held->side[side].member;
	struct pick_member *member =
		at == PICK_NONE ? NULL : picker->side[side].members[at];

	return member && member->epoch == held->side[side].epoch ? member : NULL;
}

/* A load shows it, or it is too old to count beside one. */
static void held_shown(struct pick_held *held, enum kvd_pick_side side,
		       struct pick_member *member)
{
	if (held->side[side].shown)
		return;
	held->side[side].shown = true;
	member->fresh_tokens = fmax(0, member->fresh_tokens - held->side[side].tokens);
	member->fresh_bytes = fmax(0, member->fresh_bytes - held->bytes);
	member->fresh_count--;
}

/* Nothing of it is on this side any more. */
static void held_leave(struct kvd_picker *picker, struct pick_held *held,
		       enum kvd_pick_side side)
{
	struct pick_member *member = pick_member_of(picker, held, side);

	if (member) {
		held_shown(held, side, member);
		held_unlink(picker, &member->held, (uint32_t)(held - picker->held),
			    (int)side);
		member->held_count--;
		member->held_tokens =
			member->held_count
				? fmax(0, member->held_tokens - held->side[side].tokens)
				: 0;
	}
	held->side[side].member = PICK_NONE;
}

static void held_free(struct kvd_picker *picker, struct pick_held *held)
{
	uint32_t index = (uint32_t)(held - picker->held);

	held_leave(picker, held, KVD_PICK_PREFILL);
	held_leave(picker, held, KVD_PICK_DECODE);
	if (picker->fresh == index)
		picker->fresh = held->age.after;
	held_unlink(picker, &picker->age, index, KVD_PICK_SIDES);
	held->live = false;
	held->age.after = picker->held_free;
	picker->held_free = index;
}

static void held_enter(struct kvd_picker *picker, struct pick_held *held,
		       enum kvd_pick_side side, struct pick_member *member, double tokens)
{
	struct pick_side *of = &picker->side[side];

	held->side[side].member = of->order[member->at];
	held->side[side].epoch = member->epoch;
	held->side[side].tokens = tokens;
	held->side[side].shown = false;
	held_append(picker, &member->held, (uint32_t)(held - picker->held), (int)side);
	member->held_count++;
	member->fresh_count++;
	member->held_tokens += tokens;
	member->fresh_tokens += tokens;
	member->fresh_bytes += held->bytes;
}

int pick_hold(struct kvd_picker *picker, const struct pick_request *request,
	      const struct pick_candidate *chosen[KVD_PICK_SIDES], uint64_t *id_p)
{
	const struct pick_candidate *prefill = chosen[KVD_PICK_PREFILL];
	const struct pick_candidate *decode = chosen[KVD_PICK_DECODE];
	struct pick_held *held;
	uint32_t index;
	int r;

	if (picker->held_free == PICK_NONE) {
		r = held_grow(picker);
		if (r < 0)
			return r;
	}
	index = picker->held_free;
	held = &picker->held[index];
	picker->held_free = held->age.after;
	*held = (struct pick_held){
		.live = true,
		.serial = ++picker->serial,
		.made_ns = picker->now_ns,
		.bytes = request->bytes,
		.side = {{.member = PICK_NONE}, {.member = PICK_NONE}},
	};
	held_append(picker, &picker->age, index, KVD_PICK_SIDES);
	if (picker->fresh == PICK_NONE)
		picker->fresh = index;
	if (prefill) {
		double tokens = fmax(0, request->prompt - prefill->near);

		held->predicted_s = prefill->score.queue_s + prefill->score.compute_s +
				    prefill->score.transfer_s;
		held->predicted_s /= prefill->ratio;
		held_enter(picker, held, KVD_PICK_PREFILL, prefill->member, tokens);
		pick_drain_work(picker, prefill->member);
		prefill->member->work += tokens;
		prefill->member->own_work = fmin(prefill->member->own_work + tokens,
						 pick_speed(picker, prefill->member) *
							 (double)picker->hold_ns * 1e-9);
		prefill->member->own =
			pick_faded(prefill->member->own, prefill->member->own_ns,
				   picker->now_ns, PICK_OTHERS_S) +
			tokens;
		prefill->member->own_ns = picker->now_ns;
	}
	if (decode)
		held_enter(picker, held, KVD_PICK_DECODE, decode->member,
			   request->prompt + request->output);
	*id_p = (uint64_t)held->serial << 32 | index;
	return 0;
}

void pick_show(struct kvd_picker *picker, enum kvd_pick_side side,
	       struct pick_member *member, uint64_t sampled_ns)
{
	uint32_t next;

	for (uint32_t i = member->held.first; i != PICK_NONE; i = next) {
		struct pick_held *held = &picker->held[i];

		next = held->side[side].link.after;
		if (held->made_ns + picker->lag_ns > sampled_ns)
			break; /* the oldest are first */
		held_shown(held, side, member);
		if (!picker->options.results)
			held_leave(picker, held, side);
	}
}

static void held_too_old(struct kvd_picker *picker, struct pick_held *held,
			 enum kvd_pick_side side)
{
	struct pick_member *member = pick_member_of(picker, held, side);

	if (member)
		held_shown(held, side, member);
}

void pick_expire(struct kvd_picker *picker)
{
	uint64_t keep_ns = picker->options.results ? KEEP_NS : picker->hold_ns;

	while (picker->age.first != PICK_NONE &&
	       picker->held[picker->age.first].made_ns + keep_ns <= picker->now_ns)
		held_free(picker, &picker->held[picker->age.first]);
	while (picker->fresh != PICK_NONE &&
	       picker->held[picker->fresh].made_ns + picker->hold_ns <= picker->now_ns) {
		struct pick_held *held = &picker->held[picker->fresh];

		held_too_old(picker, held, KVD_PICK_PREFILL);
		held_too_old(picker, held, KVD_PICK_DECODE);
		picker->fresh = held->age.after;
	}
}

void pick_lose(struct kvd_picker *picker, enum kvd_pick_side side,
	       struct pick_member *member)
{
	while (member->held.first != PICK_NONE)
		held_leave(picker, &picker->held[member->held.first], side);
}

/* ---- results ---- */

static void result_failed(struct kvd_picker *picker, const struct pick_held *held,
			  enum kvd_pick_side side)
{
	struct pick_member *member = pick_member_of(picker, held, side);

	if (!member)
		return;
	member->failures = pick_faded(member->failures, member->failures_ns,
				      picker->now_ns, PICK_FAILURES_S);
	member->failures = fmin(member->failures + 1, 16);
	member->failures_ns = picker->now_ns;
}

/* Prompts are computed in turn: this one's took no longer than since the one before it
 * was answered. Small ones are taken together: of each alone, what is fixed takes
 * longest, and those of a batch are answered at the same moment. */
static void result_speed(struct kvd_picker *picker, const struct pick_held *held,
			 struct pick_member *member)
{
	uint64_t begun =
		member->answered_ns > held->made_ns ? member->answered_ns : held->made_ns;

	member->seen_tokens += held->side[KVD_PICK_PREFILL].tokens;
	member->seen_s += pick_seconds(begun, picker->now_ns);
	if (member->seen_tokens < SPEED_TOKENS)
		return;
	pick_learn_speed(&member->seen_speed, 0.05,
			 member->seen_tokens / fmax(member->seen_s, 1e-4), true);
	member->seen_tokens = member->seen_s = 0;
}

/* Answers of a side have come as far as to picks of that time. */
static void result_reached(struct kvd_picker *picker, const struct pick_held *held)
{
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++) {
		struct pick_side *of = &picker->side[side];

		if (held->side[side].member != PICK_NONE &&
		    held->made_ns > of->answered_ns)
			of->answered_ns = held->made_ns;
	}
}

static void result_answered(struct kvd_picker *picker, struct pick_held *held,
			    double ttft_s)
{
	struct pick_member *member = pick_member_of(picker, held, KVD_PICK_PREFILL);
	uint32_t index = (uint32_t)(held - picker->held);

	if (!member)
		return;
	member->observed_s = RESULT_KEEP * member->observed_s + ttft_s;
	member->predicted_s = RESULT_KEEP * member->predicted_s + held->predicted_s;
	member->observations++;
	result_speed(picker, held, member);
	member->answered_ns = picker->now_ns;
	/* what was picked before it has been computed, too */
	while (member->held.first != index)
		held_leave(picker, &picker->held[member->held.first], KVD_PICK_PREFILL);
}

void kvd_pick_settle(struct kvd_picker *picker, uint64_t id, double ttft_s,
		     unsigned int failed, uint64_t now_ns)
{
	struct pick_held *held = held_find(picker, id);

	pick_now(picker, now_ns);
	if (!held || held->settled)
		return;
	held->settled = true;
	if (ttft_s >= 0 && isfinite(ttft_s)) {
		result_reached(picker, held);
		result_answered(picker, held, fmin(ttft_s, 3600));
	} else {
		if (failed & KVD_PICK_FAILED_PREFILL)
			result_failed(picker, held, KVD_PICK_PREFILL);
		if (failed & KVD_PICK_FAILED_DECODE)
			result_failed(picker, held, KVD_PICK_DECODE);
	}
	held_leave(picker, held, KVD_PICK_PREFILL);
}

void kvd_pick_release(struct kvd_picker *picker, uint64_t id, uint64_t now_ns)
{
	struct pick_held *held = held_find(picker, id);

	pick_now(picker, now_ns);
	if (held)
		held_free(picker, held);
}
