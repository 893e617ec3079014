/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The function that a picker minimises: when the first token is predicted (docs/pick.md).
 *
 * Prompts that a worker has not computed are known from its last load, which is a second
 * old: since then it has computed some, and more was picked. So `work` is drained at the
 * worker's speed and raised by each pick, and a new load sets it, after which the picks
 * that this load cannot show yet are put on it again, each at its time.
 *
 * What a worker says is used within bounds. A speed is one eighth to eight times the
 * usual one; what was picked here and was not answered is there, whatever a load says
 * (`floor`); an answer later than predicted, in proportion to the others', makes all
 * predictions later; an overdue answer is expected as late again. A worker without a load
 * that is trusted is expected to have the usual queue, and at least what was picked here.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "lib/pick_impl.h"

#define USUAL_NS (250 * UINT64_C(1000000))
#define USUAL_OF 128u /* members, at most, that are looked at */
#define BOUND 8.0     /* of what a member says, beside the usual */
#define SPEED_UNKNOWN 10000.0
#define RATIO_FREE 1.5
#define RATIO_MAX 64.0
#define RATIO_COUNT 3u
#define OTHERS_MAX 0.9 /* of its speed */
#define STEP_S 0.1     /* what a full batch adds to a token */
#define BATCH_USUAL 32.0
#define FAILURE_S 1.0
#define FAILURE_MAX_S 60.0
#define TOLD_FAILURE_S 0.25 /* of what the worker itself counts */
#define TOLD_FAILURE_MAX_S 5.0
#define OVERDUE_FREE 2.0 /* times what was predicted */
#define OVERDUE_FREE_S 0.25
#define SCORE_MAX_S 1e6 /* a part of the score */

/* ---- what is usual ---- */

struct usual_values {
	double value[USUAL_OF + 1];
	unsigned int count;
};

static void usual_add(struct usual_values *values, double value)
{
	if (value > 0 && values->count <= USUAL_OF)
		values->value[values->count++] = value;
}

static int usual_order(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double usual_middle(struct usual_values *values)
{
	if (!values->count)
		return 0;
	qsort(values->value, values->count, sizeof(double), usual_order);
	return values->value[values->count / 2];
}

static double score_raw_ratio(const struct pick_member *member)
{
	return member->observations >= RATIO_COUNT
		       ? member->observed_s / fmax(member->predicted_s, 1e-4)
		       : 0;
}

static double score_member_speed(const struct pick_member *member)
{
	return fmax(member->speed, member->seen_speed);
}

void pick_usual_refresh(struct kvd_picker *picker, enum kvd_pick_side side, bool must)
{
	struct pick_side *of = &picker->side[side];
	struct pick_usual *usual = &of->usual;
	struct usual_values speed = {.count = 0}, gbps = {.count = 0};
	struct usual_values total = {.count = 0}, decode = {.count = 0};
	struct usual_values ratio = {.count = 0}, queue = {.count = 0};
	uint32_t step = of->serving / USUAL_OF + 1;

	if (usual->known && !must && usual->at_ns + USUAL_NS > picker->now_ns)
		return;
	for (uint32_t i = (uint32_t)(picker->now_ns / USUAL_NS) % step; i < of->serving;
	     i += step) {
		struct pick_member *member = of->members[of->order[i]];

		usual_add(&speed, score_member_speed(member));
		usual_add(&gbps, member->gbps);
		usual_add(&ratio, score_raw_ratio(member));
		usual_add(&total, member->load.kv_total_tokens);
		usual_add(&decode, member->load.decode_tokens_s);
		if (pick_is_fresh(picker, side, member)) {
			pick_drain_work(picker, member);
			usual_add(&queue,
				  fmax(member->work, 1e-9) / pick_speed(picker, member));
		}
	}
	*usual = (struct pick_usual){
		.at_ns = picker->now_ns,
		.known = of->serving != 0,
		.speed = usual_middle(&speed),
		.gbps = usual_middle(&gbps),
		.kv_total = usual_middle(&total),
		.decode_s = usual_middle(&decode),
		.ratio = usual_middle(&ratio),
		.queue_s = usual_middle(&queue),
	};
}

/* What a member says, not far from the usual. */
static double score_bound(double value, double usual)
{
	if (value <= 0)
		return usual;
	if (usual <= 0)
		return value;
	return fmin(fmax(value, usual / BOUND), usual * BOUND);
}

double pick_speed(const struct kvd_picker *picker, const struct pick_member *member)
{
	double speed = score_bound(score_member_speed(member),
				   picker->side[KVD_PICK_PREFILL].usual.speed);

	return speed > 0 ? speed : SPEED_UNKNOWN;
}

double pick_ratio(const struct kvd_picker *picker, const struct pick_member *member)
{
	double usual = picker->side[KVD_PICK_PREFILL].usual.ratio;
	double ratio = score_raw_ratio(member) / fmax(usual, 1e-6);

	return usual > 0 ? fmin(fmax(ratio / RATIO_FREE, 1), RATIO_MAX) : 1;
}

double pick_weight(const struct kvd_picker *picker, enum kvd_pick_side side,
		   const struct pick_member *member)
{
	const struct pick_usual *usual = &picker->side[side].usual;
	double weight = 1;

	if (side == KVD_PICK_PREFILL && usual->speed > 0)
		weight = pick_speed(picker, member) / usual->speed /
			 pick_ratio(picker, member);
	else if (side == KVD_PICK_DECODE && usual->kv_total > 0)
		weight = score_bound(member->load.kv_total_tokens, usual->kv_total) /
			 usual->kv_total;
	return fmin(fmax(weight, 1 / BOUND), BOUND);
}

/* ---- loads ---- */

bool pick_is_fresh(const struct kvd_picker *picker, enum kvd_pick_side side,
		   const struct pick_member *member)
{
	uint64_t told = member->told_ns;

	if (told < picker->side[side].synced_ns)
		told = picker->side[side].synced_ns;
	return member->loaded && told + picker->stale_ns >= picker->now_ns;
}

void pick_drain_work(const struct kvd_picker *picker, struct pick_member *member)
{
	double done = pick_seconds(member->work_ns, picker->now_ns) *
		      pick_speed(picker, member);

	member->work = fmax(0, member->work - done);
	member->own_work = fmax(0, member->own_work - done);
	member->work_ns = picker->now_ns;
}

/* Prompt tokens that wait, as a load says. */
double pick_load_prompts(const struct kvd_picker *picker,
			 const struct kvd_pick_load *load)
{
	if (pick_known(load->prompt_tokens_waiting))
		return load->prompt_tokens_waiting;
	if (pick_known(load->waiting))
		return load->waiting * picker->mean_prompt;
	if (pick_known(load->rooms_waiting))
		return load->rooms_waiting * picker->mean_prompt;
	return 0;
}

/* What it computed lately is at most its speed; about its speed if more prompts wait than
 * it computes in that time. */
static void load_speed(struct pick_member *member, const struct kvd_pick_load *load)
{
	double said = load->prompt_tokens_s;

	pick_learn_speed(&member->speed, 0.3, said,
			 load->prompt_tokens_waiting > said || load->waiting > 1);
	if (load->gbps > 0)
		member->gbps = member->gbps > 0
				       ? member->gbps + 0.3 * (load->gbps - member->gbps)
				       : load->gbps;
}

/* What others bring to it: what it computes, less what was picked here. */
static void load_others(struct pick_member *member, const struct kvd_pick_load *load,
			uint64_t sampled_ns)
{
	double past =
		fmin(pick_seconds(member->sampled_ns, sampled_ns), 10 * PICK_OTHERS_S);

	if (pick_known(load->prompt_tokens_s) && past > 0)
		member->served += (1 - exp(-past / PICK_OTHERS_S)) *
				  (load->prompt_tokens_s - member->served);
}

/* Puts what the load cannot show on the work again, in the order of time. */
static void load_replay(const struct kvd_picker *picker, struct pick_member *member,
			uint64_t sampled_ns)
{
	double speed = pick_speed(picker, member);

	for (uint32_t i = member->held.first; i != PICK_NONE;
	     i = picker->held[i].side[KVD_PICK_PREFILL].link.after) {
		const struct pick_held *held = &picker->held[i];

		if (held->made_ns + picker->lag_ns <= sampled_ns)
			continue;
		if (held->made_ns > member->work_ns) {
			double done =
				pick_seconds(member->work_ns, held->made_ns) * speed;

			member->work = fmax(0, member->work - done);
			member->work_ns = held->made_ns;
		}
		member->work += held->side[KVD_PICK_PREFILL].tokens;
	}
	member->work = fmax(
		0, member->work - pick_seconds(member->work_ns, picker->now_ns) * speed);
	member->work_ns = picker->now_ns;
}

void pick_take_load(struct kvd_picker *picker, enum kvd_pick_side side,
		    struct pick_member *member, const struct kvd_pick_load *load,
		    uint64_t sampled_ns)
{
	load_others(member, load, sampled_ns);
	member->load = *load;
	member->loaded = true;
	member->sampled_ns = sampled_ns;
	load_speed(member, load);
	if (side == KVD_PICK_PREFILL) {
		pick_drain_work(picker, member);
		member->work = pick_load_prompts(picker, load);
		member->work_ns = sampled_ns;
		load_replay(picker, member, sampled_ns);
	}
	pick_show(picker, side, member, sampled_ns);
}

/* ---- the score ---- */

/* Prompt tokens that are there, whatever a load says. With results: what was picked here
 * and is not answered; the oldest is being computed, and not before the one in front of
 * it was answered. Without: what was picked here, less what its speed can have done
 * since. */
static double score_floor(const struct kvd_picker *picker,
			  const struct pick_member *member)
{
	const struct pick_held *head;
	uint64_t begun;
	double done;

	if (!picker->options.results)
		return picker->side[KVD_PICK_PREFILL].usual.speed > 0 ? member->own_work
								      : 0;
	if (!member->held_count)
		return 0;
	head = &picker->held[member->held.first];
	begun = head->made_ns > member->answered_ns ? head->made_ns : member->answered_ns;
	done = pick_seconds(begun, picker->now_ns) * pick_speed(picker, member);
	return member->held_tokens - fmin(done, head->side[KVD_PICK_PREFILL].tokens);
}

/* By failures, and by an answer that did not come, although others came that were asked
 * for later: where all are slow, nothing is said of one. */
static double score_penalty(const struct kvd_picker *picker, enum kvd_pick_side side,
			    const struct pick_member *member)
{
	double failures = pick_faded(member->failures, member->failures_ns,
				     picker->now_ns, PICK_FAILURES_S);
	double told =
		pick_known(member->load.failed)
			? fmin(member->load.failed * TOLD_FAILURE_S, TOLD_FAILURE_MAX_S)
			: 0;
	double penalty =
		fmin(FAILURE_S * failures * (1 + failures), FAILURE_MAX_S) + told;

	if (picker->options.results && member->held_count) {
		const struct pick_held *head = &picker->held[member->held.first];
		double late =
			pick_seconds(head->made_ns, picker->side[side].answered_ns) -
			OVERDUE_FREE * head->predicted_s - OVERDUE_FREE_S;

		if (!head->settled && late > 0)
			penalty += side == KVD_PICK_PREFILL ? late : fmin(late, 10);
	}
	return penalty;
}

static void score_transfer(const struct kvd_picker *picker, enum kvd_pick_side side,
			   const struct pick_request *request,
			   struct pick_candidate *candidate)
{
	const struct pick_member *member = candidate->member;
	double gbps = score_bound(member->gbps, picker->side[side].usual.gbps);
	double bytes = request->bytes + member->fresh_bytes;

	if (side == KVD_PICK_DECODE && request->prompt > 0)
		bytes -= request->bytes * fmin(candidate->near / request->prompt, 1);
	if (candidate->score.fresh && pick_known(member->load.bytes_queued))
		bytes += member->load.bytes_queued;
	candidate->score.transfer_s = gbps > 0 ? bytes / (gbps * 1e9) : 0;
}

/* What other routers have brought since the load was sampled, as far as it can be
 * expected: the queue of a worker of which they take this share, reached in about the
 * time of a prompt. It also makes a worker that others use less attractive, so routers
 * that share nothing come to prefer different workers, of which each knows the queue
 * well. */
static double score_others(const struct kvd_picker *picker,
			   const struct pick_member *member)
{
	double speed = pick_speed(picker, member);
	double own =
		pick_faded(member->own, member->own_ns, picker->now_ns, PICK_OTHERS_S) /
		PICK_OTHERS_S;
	double share = fmin(fmax(member->served - own, 0) / speed, OTHERS_MAX);
	double prompt_s = picker->mean_prompt / speed;
	double age = pick_seconds(member->sampled_ns, picker->now_ns);

	return share / (1 - share) * prompt_s * (1 - exp(-age / prompt_s));
}

static void score_prefill(const struct kvd_picker *picker,
			  const struct pick_request *request,
			  struct pick_candidate *candidate)
{
	struct kvd_pick_score *score = &candidate->score;
	struct pick_member *member = candidate->member;
	double speed = pick_speed(picker, member);

	pick_drain_work(picker, member);
	candidate->ratio = pick_ratio(picker, member);
	score->queue_s = fmax(member->work, score_floor(picker, member)) / speed;
	if (!score->fresh)
		score->queue_s = fmax(score->queue_s,
				      picker->side[KVD_PICK_PREFILL].usual.queue_s);
	else
		score->queue_s += score_others(picker, member);
	score->compute_s = fmax(0, request->prompt - candidate->near) / speed;
	score->queue_s *= candidate->ratio;
	score->compute_s *= candidate->ratio;
}

/* Room for KV is what is left of what the load says, but for what was picked since, and
 * never more than what was picked here and is not over leaves. */
static void score_decode(const struct kvd_picker *picker,
			 const struct pick_request *request,
			 struct pick_candidate *candidate)
{
	const struct pick_usual *usual = &picker->side[KVD_PICK_DECODE].usual;
	struct kvd_pick_score *score = &candidate->score;
	const struct pick_member *member = candidate->member;
	const struct kvd_pick_load *load = &member->load;
	bool fresh = score->fresh;
	double total = score_bound(load->kv_total_tokens, usual->kv_total);
	double need = request->prompt + request->output;
	double mean = picker->mean_prompt + picker->mean_output;
	double known_running = fresh && pick_known(load->running) ? load->running : 0;
	double waiting = fresh && pick_known(load->waiting) ? load->waiting : 0;
	double batch = known_running + waiting + member->fresh_count;
	double a_request = picker->mean_output /
			   fmax(score_bound(load->decode_tokens_s, usual->decode_s), 100);
	double used, full;

	if (picker->options.results)
		batch = fmax(batch, member->held_count);
	if (fresh && pick_known(load->kv_free_tokens) && total > 0)
		used = fmax(total - load->kv_free_tokens, 0) + member->fresh_tokens;
	else
		used = fmax(known_running * mean, member->fresh_tokens);
	if (picker->options.results)
		used = fmax(used, member->held_tokens);
	full = total > 0 ? (used + need) / total : batch / (batch + BATCH_USUAL);
	score->queue_s = waiting * a_request;
	if (full > 1) {
		score->last_resort = true;
		score->queue_s += (used + need - total) / fmax(mean, 1) * a_request;
	}
	score->compute_s = STEP_S * fmin(full, 1);
}

void pick_score(const struct kvd_picker *picker, enum kvd_pick_side side,
		const struct pick_request *request, struct pick_candidate *candidate)
{
	struct kvd_pick_score *score = &candidate->score;

	candidate->ratio = 1;
	*score = (struct kvd_pick_score){
		.fresh = pick_is_fresh(picker, side, candidate->member)};
	if (side == KVD_PICK_PREFILL)
		score_prefill(picker, request, candidate);
	else
		score_decode(picker, request, candidate);
	score_transfer(picker, side, request, candidate);
	score->penalty_s = score_penalty(picker, side, candidate->member);
	score->total_s =
		score->queue_s + score->compute_s + score->transfer_s + score->penalty_s;
}
