/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers of group.query for a picker: ranks of workers, with loads, put together.
 *
 * Ranks of a worker with the same dp rank serve the same requests, so of what the engine
 * and the rooms count the rank that told it last counts; different dp ranks have requests
 * of their own, which add up. Bytes and GB/s add up over all ranks. The sum of the ranks'
 * numbers of loads is the worker's: another one whenever one of them has told something.
 *
 * A worker of which ranks are missing, or of which one drains, is not picked. An answer
 * with `gone` and without `whole` tells what has changed; any other tells all that there
 * is.
 */
#include <cjson/cJSON.h>
#include <math.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "lib/pick_impl.h"

#define AXES 4u
#define SIZE_MAX_AXIS 65536.0

static const char *const feed_ranks[AXES] = {"dp_rank", "tp_rank", "pp_rank", "cp_rank"};
static const char *const feed_sizes[AXES] = {"dp_size", "tp_size", "pp_size", "cp_size"};

/* Where figures are in a load: object ("": the load itself), member, and how they add up.
 */
static const struct feed_figure {
	const char *object, *name;
	size_t at;
	bool each_rank;
} feed_figures[] = {
#define OF(member) offsetof(struct kvd_pick_load, member)
	{"rooms", "waiting", OF(rooms_waiting), false},
	{"rooms", "running", OF(rooms_running), false},
	{"bytes", "queued", OF(bytes_queued), true},
	{"", "gbps", OF(gbps), true},
	{"", "failed", OF(failed), false},
	{"engine", "running", OF(running), false},
	{"engine", "waiting", OF(waiting), false},
	{"engine", "kv_free_tokens", OF(kv_free_tokens), false},
	{"engine", "kv_total_tokens", OF(kv_total_tokens), false},
	{"engine", "prompt_tokens_waiting", OF(prompt_tokens_waiting), false},
	{"engine", "prompt_tokens_s", OF(prompt_tokens_s), false},
	{"engine", "decode_tokens_s", OF(decode_tokens_s), false},
#undef OF
};

static double *feed_at(struct kvd_pick_load *load, size_t at)
{
	return (double *)(void *)((char *)load + at);
}

static const cJSON *feed_member(const cJSON *object, const char *name)
{
	return cJSON_GetObjectItemCaseSensitive(object, name);
}

/* ---- one rank ---- */

static bool feed_number(const cJSON *object, const char *name, double least, double most,
			uint32_t absent, uint32_t *out_p)
{
	const cJSON *item = feed_member(object, name);

	*out_p = absent;
	if (!item)
		return true;
	if (!cJSON_IsNumber(item) || !(item->valuedouble >= least) ||
	    !(item->valuedouble <= most))
		return false;
	*out_p = (uint32_t)item->valuedouble;
	return true;
}

/* The worker's name and the place of a rank; false: not a rank. */
static bool feed_place(const cJSON *json, const char **worker_p, struct pick_rank *rank)
{
	const cJSON *worker = feed_member(json, "worker");
	double of = 1;

	if (!cJSON_IsObject(json) || (worker && !cJSON_IsString(worker)))
		return false;
	*worker_p = worker && *worker->valuestring ? worker->valuestring : "-";
	for (unsigned int i = 0; i < AXES; i++) {
		uint32_t size;

		if (!feed_number(json, feed_ranks[i], 0, SIZE_MAX_AXIS - 1, 0,
				 &rank->place[i]) ||
		    !feed_number(json, feed_sizes[i], 1, SIZE_MAX_AXIS, 1, &size))
			return false;
		of *= size;
	}
	rank->of = (uint32_t)fmin(of, UINT32_MAX);
	return pick_name_ok(*worker_p);
}

static bool feed_load(const cJSON *json, struct kvd_pick_load *load)
{
	const cJSON *seq;

	kvd_pick_load_unknown(load);
	if (!cJSON_IsObject(json))
		return false;
	seq = feed_member(json, "seq");
	if (cJSON_IsNumber(seq) && seq->valuedouble >= 0 && seq->valuedouble < 0x1p53)
		load->seq = (uint64_t)seq->valuedouble;
	for (size_t i = 0; i < ARRAY_LEN(feed_figures); i++) {
		const struct feed_figure *f = &feed_figures[i];
		const cJSON *item = feed_member(
			*f->object ? feed_member(json, f->object) : json, f->name);

		if (cJSON_IsNumber(item) && item->valuedouble >= 0 &&
		    item->valuedouble <= PICK_AMOUNT_MAX)
			*feed_at(load, f->at) = item->valuedouble;
	}
	return true;
}

static int feed_order(const struct pick_rank *a, const struct pick_rank *b)
{
	for (unsigned int i = 0; i < AXES; i++)
		if (a->place[i] != b->place[i])
			return a->place[i] < b->place[i] ? -1 : 1;
	return 0;
}

/* Where it is, or would be, among those of the member. */
static unsigned int feed_find(const struct pick_member *member,
			      const struct pick_rank *rank, bool *there_p)
{
	unsigned int low = 0, high = member->rank_count;

	while (low < high) {
		unsigned int middle = (low + high) / 2;

		if (feed_order(&member->ranks[middle], rank) < 0)
			low = middle + 1;
		else
			high = middle;
	}
	*there_p = low < member->rank_count && feed_order(&member->ranks[low], rank) == 0;
	return low;
}

static int feed_insert(struct pick_member *member, unsigned int at,
		       const struct pick_rank *rank)
{
	if (member->rank_count == KVD_PICK_RANKS_MAX)
		return -KVD_E_LIMIT;
	if (member->rank_count == member->rank_room) {
		unsigned int room = member->rank_room ? 2 * member->rank_room : 1;
		struct pick_rank *ranks = mem_regrow(member->ranks, room, sizeof(*ranks));

		if (!ranks)
			return -KVD_E_NOMEM;
		member->ranks = ranks;
		member->rank_room = room;
	}
	memmove(&member->ranks[at + 1], &member->ranks[at],
		(member->rank_count - at) * sizeof(*rank));
	member->ranks[at] = *rank;
	member->rank_count++;
	return 0;
}

static int feed_rank(struct kvd_picker *picker, enum kvd_pick_side side,
		     const cJSON *json)
{
	const cJSON *state = feed_member(json, "state");
	struct pick_rank rank = {.mark = picker->mark, .told_ns = picker->now_ns};
	struct pick_member *member;
	const char *worker;
	unsigned int at;
	bool there;
	int r;

	if (!feed_place(json, &worker, &rank))
		return -KVD_E_PROTO;
	r = pick_member_get(picker, side, worker, &member);
	if (r < 0)
		return r;
	member->fed = member->changed = true;
	rank.draining =
		cJSON_IsString(state) && strcmp(state->valuestring, "serving") != 0;
	rank.loaded = feed_load(feed_member(json, "load"), &rank.load);
	at = feed_find(member, &rank, &there);
	if (!there)
		return feed_insert(member, at, &rank);
	if (!rank.loaded ||
	    (member->ranks[at].loaded && member->ranks[at].load.seq == rank.load.seq)) {
		rank.loaded = member->ranks[at].loaded;
		rank.load = member->ranks[at].load;
		rank.told_ns = member->ranks[at].told_ns;
	}
	member->ranks[at] = rank;
	return 0;
}

static void feed_remove(struct pick_member *member, unsigned int at)
{
	memmove(&member->ranks[at], &member->ranks[at + 1],
		(--member->rank_count - at) * sizeof(*member->ranks));
	member->changed = true;
}

static void feed_gone(struct kvd_picker *picker, enum kvd_pick_side side,
		      const cJSON *json)
{
	struct pick_member *member;
	struct pick_rank rank;
	const char *worker;
	unsigned int at;
	bool there;

	if (!feed_place(json, &worker, &rank))
		return;
	member = pick_find(picker, side, worker);
	if (!member)
		return;
	at = feed_find(member, &rank, &there);
	if (there)
		feed_remove(member, at);
}

/* ---- a worker ---- */

/* One figure of those ranks from `first` that have its dp rank: of the one that told it
 * last, or the sum. */
static double feed_figure_of(struct pick_member *member, unsigned int first,
			     const struct feed_figure *f)
{
	uint64_t latest = 0;
	double value = -1;

	for (unsigned int i = first;
	     i < member->rank_count &&
	     member->ranks[i].place[0] == member->ranks[first].place[0];
	     i++) {
		double told = *feed_at(&member->ranks[i].load, f->at);

		if (!member->ranks[i].loaded || told < 0)
			continue;
		if (f->each_rank)
			value = fmax(value, 0) + told;
		else if (value < 0 || member->ranks[i].told_ns > latest)
			value = told;
		if (member->ranks[i].told_ns > latest)
			latest = member->ranks[i].told_ns;
	}
	return value;
}

static void feed_together(struct pick_member *member, struct kvd_pick_load *load,
			  uint64_t *told_p)
{
	kvd_pick_load_unknown(load);
	for (unsigned int i = 0; i < member->rank_count; i++) {
		const struct pick_rank *rank = &member->ranks[i];

		if (rank->loaded) {
			load->seq += rank->load.seq + 1;
			*told_p = rank->told_ns > *told_p ? rank->told_ns : *told_p;
		}
		if (i && rank->place[0] == member->ranks[i - 1].place[0])
			continue;
		for (size_t k = 0; k < ARRAY_LEN(feed_figures); k++) {
			double *sum = feed_at(load, feed_figures[k].at);
			double more = feed_figure_of(member, i, &feed_figures[k]);

			if (more >= 0)
				*sum = fmax(*sum, 0) + more;
		}
	}
}

static void feed_member_changed(struct kvd_picker *picker, enum kvd_pick_side side,
				struct pick_member *member)
{
	struct kvd_pick_load load;
	uint64_t told_ns = 0;
	bool serves;

	member->changed = false;
	if (!member->rank_count) {
		pick_forget(picker, side, member);
		return;
	}
	serves = member->rank_count >= member->ranks[0].of;
	for (unsigned int i = 0; i < member->rank_count; i++)
		serves = serves && !member->ranks[i].draining;
	pick_state(picker, side, member, serves ? KVD_PICK_SERVING : KVD_PICK_DRAINING);
	feed_together(member, &load, &told_ns);
	if (told_ns)
		pick_load(picker, side, member, &load, told_ns);
}

/* Of all members those that changed; with `whole` what was not told is not there. */
static void feed_settle(struct kvd_picker *picker, enum kvd_pick_side side, bool whole)
{
	struct pick_side *of = &picker->side[side];

	/* by slots, which do not move */
	for (uint32_t index = 0; index < KVD_PICK_WORKERS_MAX; index++) {
		struct pick_member *member = of->members[index];

		if (!member || !member->fed)
			continue;
		for (unsigned int i = member->rank_count; whole && i-- > 0;)
			if (member->ranks[i].mark != picker->mark)
				feed_remove(member, i);
		if (member->changed)
			feed_member_changed(picker, side, member);
	}
}

/* ---- an answer ---- */

static bool feed_ok(const cJSON *answer, const cJSON *ranks, const cJSON *gone)
{
	struct pick_rank rank;
	const char *worker;
	const cJSON *item;

	if (!cJSON_IsObject(answer) || !cJSON_IsArray(ranks) ||
	    (gone && !cJSON_IsArray(gone)))
		return false;
	cJSON_ArrayForEach(item, ranks) {
		if (!feed_place(item, &worker, &rank))
			return false;
	}
	return true;
}

static int feed_take(struct kvd_picker *picker, enum kvd_pick_side side,
		     const cJSON *answer)
{
	const cJSON *ranks = feed_member(answer, "ranks");
	const cJSON *gone = feed_member(answer, "gone"), *item;
	bool whole = !gone || cJSON_IsTrue(feed_member(answer, "whole"));
	int result = 0;

	if (!feed_ok(answer, ranks, gone))
		return -KVD_E_PROTO;
	picker->mark++;
	if (!whole)
		cJSON_ArrayForEach(item, gone)
			feed_gone(picker, side, item);
	cJSON_ArrayForEach(item, ranks) {
		int r = feed_rank(picker, side, item);

		result = r < 0 && !result ? r : result;
	}
	feed_settle(picker, side, whole);
	if (!cJSON_IsFalse(feed_member(answer, "synced")))
		picker->side[side].synced_ns = picker->now_ns;
	return result;
}

int kvd_picker_feed(struct kvd_picker *picker, enum kvd_pick_side side,
		    const char *answer, size_t length, uint64_t now_ns)
{
	cJSON *json;
	int r;

	if ((unsigned int)side >= KVD_PICK_SIDES)
		return -KVD_E_INVAL;
	pick_now(picker, now_ns);
	pick_expire(picker);
	json = cJSON_ParseWithLength(answer, length);
	if (!json)
		return -KVD_E_PROTO;
	r = feed_take(picker, side, json);
	cJSON_Delete(json);
	return r;
}
