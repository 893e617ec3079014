/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sorted arrays of disjoint intervals, merged as they touch: a sender that works from
 * front to back has one interval a layer, for any number of chunks.
 *
 * Chunks reserve tokens before any byte is written and return them when they fail, so
 * removal is as exact as insertion. If a removal finds no memory for the second half of a
 * cut interval, the set forgets more than necessary: it then reports pages as missing
 * that are complete, never the reverse.
 */
#include "daemon/plan/coverage.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

int coverage_init(struct coverage *cov, const uint32_t *layers, uint32_t layer_count)
{
	*cov = (struct coverage){.layer_count = layer_count};
	cov->layers = mem_dup(layers, layer_count * sizeof(*layers));
	cov->sets = mem_zalloc(sizeof(*cov->sets));
	if (!cov->layers || !cov->sets) {
		coverage_fini(cov);
		return err_pass(-ENOMEM);
	}
	return 0;
}

static uint32_t set_count(const struct coverage *cov)
{
	return cov->split ? cov->layer_count : 1;
}

void coverage_fini(struct coverage *cov)
{
	for (uint32_t i = 0; cov->sets && i < set_count(cov); i++)
		mem_free(cov->sets[i].at);
	mem_free(cov->sets);
	mem_free(cov->layers);
	charge_drop(&cov->charge);
	*cov = (struct coverage){0};
}

int coverage_charge(struct coverage *cov, struct account *account,
		    enum account_class class)
{
	return err_pass(charge_take(&cov->charge, account, class,
				    cov->layer_count * sizeof(*cov->layers) +
					    sizeof(*cov->sets)));
}

/* First interval whose end is after `begin`. */
static uint32_t set_find(const struct coverage_set *set, uint64_t begin)
{
	uint32_t lo = 0, hi = set->count;

	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;

		if (set->at[mid].end <= begin)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

static bool set_overlaps(const struct coverage_set *set, uint64_t begin, uint64_t end)
{
	uint32_t i = set_find(set, begin);

	return i < set->count && set->at[i].begin < end;
}

static int set_reserve(struct coverage *cov, struct coverage_set *set, uint32_t count)
{
	uint32_t cap = set->cap ? set->cap : 2;
	uint64_t more;
	void *at;
	int r;

	if (count <= set->cap)
		return 0;
	if (count > COVERAGE_INTERVALS_MAX)
		return err_raise(ERR_LIMIT, "chunks leave more than %u gaps (limit)",
				 COVERAGE_INTERVALS_MAX);
	while (cap < count)
		cap *= 2;
	more = (cap - set->cap) * sizeof(*set->at);
	r = charge_more(&cov->charge, more);
	if (r < 0)
		return err_pass(r);
	at = mem_regrow(set->at, cap, sizeof(*set->at));
	if (!at) {
		charge_less(&cov->charge, more);
		return err_pass(-ENOMEM);
	}
	set->at = at;
	set->cap = cap;
	return 0;
}

/* Space for one more was reserved; the interval overlaps nothing. */
static void set_insert(struct coverage_set *set, uint64_t begin, uint64_t end)
{
	uint32_t i = set_find(set, begin);
	bool joins_left = i > 0 && set->at[i - 1].end == begin;
	bool joins_right = i < set->count && set->at[i].begin == end;

	if (joins_left && joins_right) {
		set->at[i - 1].end = set->at[i].end;
		memmove(&set->at[i], &set->at[i + 1],
			(set->count - i - 1) * sizeof(*set->at));
		set->count--;
	} else if (joins_left) {
		set->at[i - 1].end = end;
	} else if (joins_right) {
		set->at[i].begin = begin;
	} else {
		memmove(&set->at[i + 1], &set->at[i],
			(set->count - i) * sizeof(*set->at));
		set->at[i].begin = begin;
		set->at[i].end = end;
		set->count++;
	}
}

/* One interval holds all of [begin, end): it was inserted, and possibly merged. */
static int set_cut(struct coverage *cov, struct coverage_set *set, uint64_t begin,
		   uint64_t end)
{
	uint32_t i = set_find(set, begin);
	uint64_t tail;

	if (i == set->count || set->at[i].begin > begin || set->at[i].end < end)
		return 0;
	tail = set->at[i].end;
	if (begin > set->at[i].begin && tail > end) {
		int r = set_reserve(cov, set, set->count + 1);

		set->at[i].end = begin; /* without memory the tail is lost */
		if (r < 0)
			return r;
		memmove(&set->at[i + 2], &set->at[i + 1],
			(set->count - i - 1) * sizeof(*set->at));
		set->at[i + 1].begin = end;
		set->at[i + 1].end = tail;
		set->count++;
	} else if (begin > set->at[i].begin) {
		set->at[i].end = begin;
	} else if (tail > end) {
		set->at[i].begin = end;
	} else {
		memmove(&set->at[i], &set->at[i + 1],
			(set->count - i - 1) * sizeof(*set->at));
		set->count--;
	}
	return 0;
}

static int coverage_split(struct coverage *cov)
{
	struct coverage_set *one = &cov->sets[0];
	const uint64_t was = one->cap * sizeof(*one->at) + sizeof(*one);
	const uint64_t is =
		cov->layer_count * (one->count * sizeof(*one->at) + sizeof(*one));
	struct coverage_set *sets;
	int r = charge_more(&cov->charge, is);

	if (r < 0)
		return err_pass(r);
	sets = mem_calloc(cov->layer_count, sizeof(*sets));
	if (!sets) {
		charge_less(&cov->charge, is);
		return err_pass(-ENOMEM);
	}
	for (uint32_t i = 0; i < cov->layer_count && one->count; i++) {
		sets[i].at = mem_dup(one->at, one->count * sizeof(*one->at));
		if (!sets[i].at) {
			while (i--)
				mem_free(sets[i].at);
			mem_free(sets);
			charge_less(&cov->charge, is);
			return err_pass(-ENOMEM);
		}
		sets[i].count = sets[i].cap = one->count;
	}
	mem_free(one->at);
	mem_free(cov->sets);
	charge_less(&cov->charge, was);
	cov->sets = sets;
	cov->split = true;
	return 0;
}

/* Wanted layers [*lo, *hi) are in the range; false when that is not all. */
static bool layer_span(const struct coverage *cov, struct plan_layers layers,
		       uint32_t *lo, uint32_t *hi)
{
	*lo = 0;
	while (*lo < cov->layer_count && cov->layers[*lo] < layers.begin)
		++*lo;
	*hi = *lo;
	while (*hi < cov->layer_count && cov->layers[*hi] < layers.end)
		++*hi;
	return *lo == 0 && *hi == cov->layer_count;
}

/* The sets of the named layers, after splitting if necessary. */
static int coverage_choose(struct coverage *cov, struct plan_layers layers, uint32_t *lo,
			   uint32_t *hi)
{
	bool all = layer_span(cov, layers, lo, hi);
	int r;

	if (*lo == *hi)
		return 0;
	if (!all && !cov->split) {
		r = coverage_split(cov);
		if (r < 0)
			return r;
	}
	if (!cov->split) {
		*lo = 0;
		*hi = 1;
	}
	return 0;
}

int coverage_add(struct coverage *cov, struct plan_layers layers, uint64_t begin,
		 uint64_t end)
{
	uint32_t lo, hi;
	int r;

	if (begin >= end)
		return 0;
	r = coverage_choose(cov, layers, &lo, &hi);
	if (r < 0)
		return r;
	for (uint32_t i = lo; i < hi; i++) {
		if (set_overlaps(&cov->sets[i], begin, end))
			return err_raise(ERR_DUP, "tokens [%llu, %llu) were sent before",
					 (unsigned long long)begin,
					 (unsigned long long)end);
		r = set_reserve(cov, &cov->sets[i], cov->sets[i].count + 1);
		if (r < 0)
			return r;
	}
	for (uint32_t i = lo; i < hi; i++)
		set_insert(&cov->sets[i], begin, end);
	return 0;
}

int coverage_remove(struct coverage *cov, struct plan_layers layers, uint64_t begin,
		    uint64_t end)
{
	uint32_t lo, hi;
	int r = coverage_choose(cov, layers, &lo, &hi);

	if (r < 0 || begin >= end)
		return r;
	for (uint32_t i = lo; i < hi; i++) {
		int k = set_cut(cov, &cov->sets[i], begin, end);

		r = k < 0 ? k : r;
	}
	return r;
}

bool coverage_whole(const struct coverage *cov, uint64_t begin, uint64_t end)
{
	if (cov->layer_count == 0)
		return true; /* nothing is due from this source here */
	if (begin < end &&
	    token_shard_slot(&cov->shard, begin) == token_shard_slot(&cov->shard, end))
		return true; /* nor of these tokens */
	for (uint32_t i = 0; i < set_count(cov); i++) {
		const struct coverage_set *set = &cov->sets[i];
		uint32_t k = set_find(set, begin);

		if (begin < end &&
		    (k == set->count || set->at[k].begin > begin || set->at[k].end < end))
			return false;
	}
	return true;
}
