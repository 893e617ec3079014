/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A picker's members, and the pick of a pair.
 *
 * The two sides do not depend on each other: the predicted time is a sum, so each side's
 * least is the pair's. A group of up to `scan` members is looked at whole. Of a larger
 * one `sample` members are drawn, each as often as it is fast, beside those that hold a
 * prefix: two choices keep routers that share nothing from all finding the same worker
 * (Mitzenmacher, 2001), and cost the same in any group. A draw of only bad members
 * (without room, or with failures) is repeated, and at last the whole group is looked at.
 * Among those within a hundredth or half a millisecond of the least one is drawn.
 *
 * Members lie in slots that stay theirs; `order` names those that serve first, so a
 * member that drains is not even seen by a pick.
 */
#include <math.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "lib/pick_impl.h"

#define SCAN_USUAL 64u
#define SAMPLE_USUAL 2u
#define SAMPLE_MAX 64u
#define DRAWS_MAX 8u /* samples beyond the first, while all are bad */
#define BAD_S 1.0    /* a penalty of that, and no better one is known */
#define TIE_SHARE 0.01
#define TIE_S 0.0005
#define TOKENS_MAX 1e9
#define BYTES_MAX 1e15

/* ---- small things ---- */

uint64_t pick_random(struct kvd_picker *picker)
{
	uint64_t x = picker->random += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */

	x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
	return x ^ x >> 31;
}

static uint32_t pick_below(struct kvd_picker *picker, uint32_t limit)
{
	return (uint32_t)((pick_random(picker) >> 32) * limit >> 32);
}

uint64_t pick_now(struct kvd_picker *picker, uint64_t now_ns)
{
	if (now_ns > picker->now_ns)
		picker->now_ns = now_ns;
	return picker->now_ns;
}

bool pick_name_ok(const char *worker)
{
	return worker && *worker &&
	       strnlen(worker, KVD_PICK_NAME_MAX) < KVD_PICK_NAME_MAX;
}

/* ---- names ---- */

static uint32_t name_slot(const struct kvd_picker *picker, const char *name)
{
	uint64_t h = picker->salt;

	for (; *name; name++)
		h = (h ^ (uint8_t)*name) * UINT64_C(0x100000001b3);
	h ^= h >> 29;
	h *= UINT64_C(0xbf58476d1ce4e5b9);
	return (uint32_t)(h >> 32) & (PICK_SLOTS - 1);
}

/* Its slot, or the free one where it would be. */
static uint32_t name_find(const struct kvd_picker *picker, const struct pick_side *of,
			  const char *name)
{
	uint32_t slot = name_slot(picker, name);

	while (of->slots[slot] &&
	       strcmp(of->members[of->slots[slot] - 1]->name, name) != 0)
		slot = (slot + 1) & (PICK_SLOTS - 1);
	return slot;
}

/* Those behind it move up, unless they would pass their own slot. */
static void name_remove(const struct kvd_picker *picker, struct pick_side *of,
			uint32_t slot)
{
	uint32_t next = slot;

	for (;;) {
		uint32_t own;

		of->slots[slot] = 0;
		do {
			next = (next + 1) & (PICK_SLOTS - 1);
			if (!of->slots[next])
				return;
			own = name_slot(picker, of->members[of->slots[next] - 1]->name);
		} while (((next - own) & (PICK_SLOTS - 1)) <
			 ((next - slot) & (PICK_SLOTS - 1)));
		of->slots[slot] = of->slots[next];
		slot = next;
	}
}

struct pick_member *pick_find(struct kvd_picker *picker, enum kvd_pick_side side,
			      const char *worker)
{
	struct pick_side *of = &picker->side[side];
	uint16_t index;

	if (!pick_name_ok(worker))
		return NULL;
	index = of->slots[name_find(picker, of, worker)];
	return index ? of->members[index - 1] : NULL;
}

/* ---- members ---- */

static void order_swap(struct pick_side *of, uint32_t a, uint32_t b)
{
	uint16_t index = of->order[a];

	of->order[a] = of->order[b];
	of->order[b] = index;
	of->members[of->order[a]]->at = a;
	of->members[of->order[b]]->at = b;
}

void pick_state(struct kvd_picker *picker, enum kvd_pick_side side,
		struct pick_member *member, enum kvd_pick_state state)
{
	struct pick_side *of = &picker->side[side];
	bool serves = member->at < of->serving;

	member->state = state;
	if (serves && state != KVD_PICK_SERVING)
		order_swap(of, member->at, --of->serving);
	else if (!serves && state == KVD_PICK_SERVING)
		order_swap(of, member->at, of->serving++);
}

int pick_member_get(struct kvd_picker *picker, enum kvd_pick_side side,
		    const char *worker, struct pick_member **member_p)
{
	struct pick_side *of = &picker->side[side];
	struct pick_member *member = pick_find(picker, side, worker);
	uint32_t index;

	*member_p = member;
	if (member)
		return 0;
	if (of->count == KVD_PICK_WORKERS_MAX)
		return -KVD_E_LIMIT;
	member = mem_zalloc(sizeof(*member));
	if (!member)
		return -KVD_E_NOMEM;
	memcpy(member->name, worker, strlen(worker));
	kvd_pick_load_unknown(&member->load);
	member->held = (struct pick_ends){PICK_NONE, PICK_NONE};
	member->epoch = ++picker->epoch;
	member->work_ns = picker->now_ns;
	member->state = KVD_PICK_DRAINING;
	/* beyond `count`, order has the slots that are free */
	member->at = of->count++;
	index = of->order[member->at];
	of->members[index] = member;
	of->slots[name_find(picker, of, worker)] = (uint16_t)(index + 1);
	*member_p = member;
	return 0;
}

void pick_forget(struct kvd_picker *picker, enum kvd_pick_side side,
		 struct pick_member *member)
{
	struct pick_side *of = &picker->side[side];
	uint32_t index = of->order[member->at];

	pick_lose(picker, side, member);
	pick_state(picker, side, member, KVD_PICK_GONE);
	name_remove(picker, of, name_find(picker, of, member->name));
	order_swap(of, member->at, --of->count);
	of->members[index] = NULL;
	mem_free(member->ranks);
	mem_free(member);
}

/* ---- loads ---- */

void kvd_pick_load_unknown(struct kvd_pick_load *load)
{
	*load = (struct kvd_pick_load){0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
}

/* What is not a finite number of a sane size is not known; less than a millionth is none.
 */
static double load_clean(double value)
{
	if (!(value >= 0) || value > PICK_AMOUNT_MAX)
		return -1;
	return value < 1e-6 ? 0 : value;
}

static struct kvd_pick_load load_cleaned(const struct kvd_pick_load *load)
{
	return (struct kvd_pick_load){
		.seq = load->seq,
		.rooms_waiting = load_clean(load->rooms_waiting),
		.rooms_running = load_clean(load->rooms_running),
		.bytes_queued = load_clean(load->bytes_queued),
		.gbps = load_clean(load->gbps),
		.failed = load_clean(load->failed),
		.running = load_clean(load->running),
		.waiting = load_clean(load->waiting),
		.kv_free_tokens = load_clean(load->kv_free_tokens),
		.kv_total_tokens = load_clean(load->kv_total_tokens),
		.prompt_tokens_waiting = load_clean(load->prompt_tokens_waiting),
		.prompt_tokens_s = load_clean(load->prompt_tokens_s),
		.decode_tokens_s = load_clean(load->decode_tokens_s),
	};
}

void pick_load(struct kvd_picker *picker, enum kvd_pick_side side,
	       struct pick_member *member, const struct kvd_pick_load *load,
	       uint64_t sampled_ns)
{
	struct kvd_pick_load cleaned = load_cleaned(load);

	if (sampled_ns > picker->now_ns)
		sampled_ns = picker->now_ns;
	if (sampled_ns > member->told_ns)
		member->told_ns = sampled_ns;
	/* one from the past, or the same again */
	if (member->loaded &&
	    (cleaned.seq == member->load.seq || sampled_ns < member->sampled_ns))
		return;
	pick_take_load(picker, side, member, &cleaned, sampled_ns);
}

int kvd_picker_set(struct kvd_picker *picker, enum kvd_pick_side side, const char *worker,
		   enum kvd_pick_state state, const struct kvd_pick_load *load,
		   uint64_t sampled_ns, uint64_t now_ns)
{
	struct pick_member *member;
	int r;

	if ((unsigned int)side >= KVD_PICK_SIDES || (unsigned int)state > KVD_PICK_GONE ||
	    !pick_name_ok(worker))
		return -KVD_E_INVAL;
	pick_now(picker, now_ns);
	pick_expire(picker);
	if (state == KVD_PICK_GONE) {
		member = pick_find(picker, side, worker);
		if (member)
			pick_forget(picker, side, member);
		return 0;
	}
	r = pick_member_get(picker, side, worker, &member);
	if (r < 0)
		return r;
	pick_state(picker, side, member, state);
	if (load)
		pick_load(picker, side, member, load, sampled_ns);
	return 0;
}

size_t kvd_picker_count(const struct kvd_picker *picker, enum kvd_pick_side side,
			size_t *all_p)
{
	if ((unsigned int)side >= KVD_PICK_SIDES)
		return 0;
	if (all_p)
		*all_p = picker->side[side].count;
	return picker->side[side].serving;
}

/* ---- life ---- */

static bool option_ok(double value, double max)
{
	return value >= 0 && value <= max;
}

int kvd_picker_new(const struct kvd_pick_options *options, struct kvd_picker **picker_p)
{
	struct kvd_pick_options o = options ? *options : (struct kvd_pick_options){0};
	struct kvd_picker *picker;

	*picker_p = NULL;
	if (!option_ok(o.token_bytes, 1e9) || !option_ok(o.stale_s, 3600) ||
	    !option_ok(o.hold_s, 60) || !option_ok(o.lag_s, 60) ||
	    o.scan > KVD_PICK_WORKERS_MAX || o.sample > SAMPLE_MAX)
		return -KVD_E_INVAL;
	picker = mem_zalloc(sizeof(*picker));
	if (!picker)
		return -KVD_E_NOMEM;
	o.scan = o.scan ? o.scan : SCAN_USUAL;
	o.sample = o.sample ? o.sample : SAMPLE_USUAL;
	picker->options = o;
	picker->stale_ns = (uint64_t)((o.stale_s > 0 ? o.stale_s : 5) * 1e9);
	picker->hold_ns = (uint64_t)((o.hold_s > 0 ? o.hold_s : 5) * 1e9);
	picker->lag_ns = (uint64_t)((o.lag_s > 0 ? o.lag_s : 0.1) * 1e9);
	picker->random = o.seed;
	picker->salt = pick_random(picker);
	picker->age = (struct pick_ends){PICK_NONE, PICK_NONE};
	picker->fresh = PICK_NONE;
	picker->mean_prompt = 2048;
	picker->mean_output = 256;
	picker->held_free = PICK_NONE;
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++)
		for (uint16_t i = 0; i < KVD_PICK_WORKERS_MAX; i++)
			picker->side[side].order[i] = i;
	*picker_p = picker;
	return 0;
}

void kvd_picker_free(struct kvd_picker *picker)
{
	if (!picker)
		return;
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++) {
		struct pick_side *of = &picker->side[side];

		for (uint32_t i = 0; i < of->count; i++) {
			mem_free(of->members[of->order[i]]->ranks);
			mem_free(of->members[of->order[i]]);
		}
	}
	mem_free(picker->held);
	mem_free(picker);
}

/* ---- a pick ---- */

static bool pick_args_ok(const struct kvd_pick_args *args)
{
	if (!option_ok(args->prompt_tokens, TOKENS_MAX) ||
	    !option_ok(args->output_tokens, TOKENS_MAX) ||
	    !option_ok(args->bytes, BYTES_MAX) || args->near_count > KVD_PICK_NEAR_MAX ||
	    args->avoid_count > KVD_PICK_NEAR_MAX ||
	    (args->only_prefill && args->only_decode))
		return false;
	for (size_t i = 0; i < args->near_count; i++)
		if (!pick_name_ok(args->near[i].worker) || !(args->near[i].tokens >= 0))
			return false;
	for (size_t i = 0; i < args->avoid_count; i++)
		if (!pick_name_ok(args->avoid[i]))
			return false;
	return true;
}

/* Tokens by bytes, bytes by tokens; what is not known is as usual. */
static struct pick_request pick_request_of(const struct kvd_picker *picker,
					   const struct kvd_pick_args *args)
{
	double token_bytes = picker->options.token_bytes;
	struct pick_request request = {.prompt = args->prompt_tokens,
				       .output = args->output_tokens,
				       .bytes = args->bytes};

	if (request.prompt <= 0)
		request.prompt = token_bytes > 0 && args->bytes > 0
					 ? args->bytes / token_bytes
					 : picker->mean_prompt;
	if (request.bytes <= 0)
		request.bytes = request.prompt * token_bytes;
	if (request.output <= 0)
		request.output = picker->mean_output;
	return request;
}

static bool pick_avoids(const struct kvd_pick_args *args,
			const struct pick_member *member)
{
	for (size_t i = 0; i < args->avoid_count; i++)
		if (strcmp(args->avoid[i], member->name) == 0)
			return true;
	return false;
}

struct choice {
	struct pick_candidate best; /* member NULL: none yet */
	unsigned int ties;
};

static bool choice_better(const struct pick_candidate *a, const struct pick_candidate *b)
{
	if (a->score.last_resort != b->score.last_resort)
		return b->score.last_resort;
	return a->score.total_s < b->score.total_s;
}

/* The best so far; of those that are as good, each with the same chance. */
static void choice_offer(struct kvd_picker *picker, struct choice *choice,
			 const struct pick_candidate *candidate)
{
	double margin = TIE_S + TIE_SHARE * candidate->score.total_s;
	struct pick_candidate *best = &choice->best;

	if (best->member && best->score.last_resort == candidate->score.last_resort &&
	    fabs(best->score.total_s - candidate->score.total_s) <= margin) {
		if (pick_below(picker, ++choice->ties) == 0)
			*best = *candidate;
	} else if (!best->member || choice_better(candidate, best)) {
		*best = *candidate;
		choice->ties = 1;
	}
}

static double pick_near_tokens(const struct kvd_pick_args *args,
			       const struct pick_request *request,
			       const struct pick_member *member)
{
	double most = 0;

	for (size_t i = 0; i < args->near_count; i++)
		if (strcmp(args->near[i].worker, member->name) == 0)
			most = fmax(most, args->near[i].tokens);
	return fmin(most, request->prompt);
}

static void choice_look(struct kvd_picker *picker, enum kvd_pick_side side,
			const struct kvd_pick_args *args,
			const struct pick_request *request, struct pick_member *member,
			struct choice *choice)
{
	struct pick_candidate candidate = {.member = member};

	if (pick_avoids(args, member))
		return;
	candidate.near = pick_near_tokens(args, request, member);
	pick_score(picker, side, request, &candidate);
	choice_offer(picker, choice, &candidate);
}

/* Each as often as its weight says. */
static struct pick_member *pick_draw(struct kvd_picker *picker, enum kvd_pick_side side)
{
	const struct pick_side *of = &picker->side[side];
	struct pick_member *member = NULL;

	for (unsigned int i = 0; i < 64; i++) {
		double chance = (double)(pick_random(picker) >> 11) * 0x1p-53;

		member = of->members[of->order[pick_below(picker, of->serving)]];
		if (chance * 8 < pick_weight(picker, side, member))
			break;
	}
	return member;
}

static bool choice_is_bad(const struct choice *choice)
{
	return !choice->best.member || choice->best.score.last_resort ||
	       choice->best.score.penalty_s > BAD_S;
}

static struct pick_candidate pick_one(struct kvd_picker *picker, enum kvd_pick_side side,
				      const struct kvd_pick_args *args,
				      const struct pick_request *request)
{
	const struct pick_side *of = &picker->side[side];
	struct choice choice = {.ties = 0};

	pick_usual_refresh(picker, side, false);
	if (of->serving > picker->options.scan) {
		unsigned int draws = picker->options.sample;

		for (size_t i = 0; i < args->near_count; i++) {
			struct pick_member *member =
				pick_find(picker, side, args->near[i].worker);

			if (member && member->state == KVD_PICK_SERVING)
				choice_look(picker, side, args, request, member, &choice);
		}
		for (unsigned int i = 0;
		     i < draws || (i < draws + DRAWS_MAX && choice_is_bad(&choice)); i++)
			choice_look(picker, side, args, request, pick_draw(picker, side),
				    &choice);
		if (!choice_is_bad(&choice))
			return choice.best;
	}
	for (uint32_t i = 0; i < of->serving; i++)
		choice_look(picker, side, args, request, of->members[of->order[i]],
			    &choice);
	return choice.best;
}

/* What prompts and outputs usually are. */
static void pick_learn(struct kvd_picker *picker, const struct kvd_pick_args *args,
		       const struct pick_request *request)
{
	picker->mean_prompt += 0.05 * (request->prompt - picker->mean_prompt);
	if (args->output_tokens > 0)
		picker->mean_output += 0.05 * (args->output_tokens - picker->mean_output);
}

int kvd_pick(struct kvd_picker *picker, const struct kvd_pick_args *args, uint64_t now_ns,
	     struct kvd_pick_result *result)
{
	const struct pick_candidate *chosen[KVD_PICK_SIDES] = {NULL, NULL};
	struct pick_candidate best[KVD_PICK_SIDES];
	struct pick_request request;
	bool missing = false;

	*result = (struct kvd_pick_result){0};
	if (!pick_args_ok(args))
		return -KVD_E_INVAL;
	pick_now(picker, now_ns);
	pick_expire(picker);
	request = pick_request_of(picker, args);
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++) {
		if (side == KVD_PICK_PREFILL ? args->only_decode : args->only_prefill)
			continue;
		best[side] = pick_one(picker, side, args, &request);
		if (!best[side].member) {
			missing = true;
			continue;
		}
		chosen[side] = &best[side];
		memcpy(result->worker[side], best[side].member->name, KVD_PICK_NAME_MAX);
		result->score[side] = best[side].score;
	}
	if (missing)
		return -KVD_E_NOTFOUND;
	pick_learn(picker, args, &request);
	return pick_hold(picker, &request, chosen, &result->id);
}

int kvd_picker_score(struct kvd_picker *picker, enum kvd_pick_side side, size_t index,
		     const struct kvd_pick_args *args, uint64_t now_ns,
		     char worker[KVD_PICK_NAME_MAX], enum kvd_pick_state *state_p,
		     struct kvd_pick_score *score)
{
	struct pick_candidate candidate = {.near = 0};
	struct pick_request request;

	if ((unsigned int)side >= KVD_PICK_SIDES || !pick_args_ok(args))
		return -KVD_E_INVAL;
	if (index >= picker->side[side].count)
		return -KVD_E_NOTFOUND;
	pick_now(picker, now_ns);
	pick_expire(picker);
	pick_usual_refresh(picker, side, false);
	request = pick_request_of(picker, args);
	candidate.member = picker->side[side].members[picker->side[side].order[index]];
	candidate.near = pick_near_tokens(args, &request, candidate.member);
	pick_score(picker, side, &request, &candidate);
	memcpy(worker, candidate.member->name, KVD_PICK_NAME_MAX);
	*state_p = candidate.member->state;
	*score = candidate.score;
	return 0;
}
