/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/plan/token_shard.h"

#include <assert.h>

uint64_t token_shard_slot(const struct token_shard *shard, uint64_t token)
{
	uint64_t turn = token_shard_turn(shard);
	uint64_t rest = token % turn, begin = (uint64_t)shard->rank * shard->run;
	uint64_t held = rest < begin ? 0 : rest - begin;

	if (token_shard_is_all(shard))
		return token;
	return token / turn * shard->run + (held < shard->run ? held : shard->run);
}

bool token_shard_at(const struct token_shard *shard, uint64_t slot, uint64_t *token_p)
{
	uint64_t in_turn;

	*token_p = slot;
	if (token_shard_is_all(shard))
		return true;
	in_turn = (uint64_t)shard->rank * shard->run + slot % shard->run;
	return !__builtin_mul_overflow(slot / shard->run, token_shard_turn(shard),
				       token_p) &&
	       !__builtin_add_overflow(*token_p, in_turn, token_p);
}

bool token_shard_run(const struct token_shard *shard, uint64_t begin, uint64_t *end_p)
{
	uint64_t turn = token_shard_turn(shard), rest = begin % turn;
	uint64_t first = (uint64_t)shard->rank * shard->run, end = first + shard->run;
	bool held = token_shard_is_all(shard) || (rest >= first && rest < end);
	uint64_t step = held	       ? end - rest
			: rest < first ? first - rest
				       : turn - rest + first;

	if (token_shard_is_all(shard) || __builtin_add_overflow(begin, step, end_p))
		*end_p = UINT64_MAX;
	return held;
}

bool token_shard_nests(const struct token_shard *a, const struct token_shard *b)
{
	return token_shard_is_all(a) || token_shard_is_all(b) || a->run % b->run == 0 ||
	       b->run % a->run == 0;
}

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
	while (b) {
		uint64_t rest = a % b;

		a = b;
		b = rest;
	}
	return a;
}

/* By the runs of `coarse`, which are the longer ones. */
static uint64_t common_by_runs(const struct token_shard *coarse,
			       const struct token_shard *fine, uint64_t begin,
			       uint64_t end)
{
	uint64_t common = 0;

	while (begin < end) {
		uint64_t next;
		bool held = token_shard_run(coarse, begin, &next);

		next = next < end ? next : end;
		if (held)
			common += token_shard_slot(fine, next) -
				  token_shard_slot(fine, begin);
		begin = next;
	}
	return common;
}

/* Both repeat after `period` tokens, which is at most TOKEN_SHARD_SIZE_MAX turns of the
 * coarser: so the work does not grow with the request. */
uint64_t token_shard_common(const struct token_shard *a, const struct token_shard *b,
			    uint64_t begin, uint64_t end)
{
	const struct token_shard *coarse = a->run >= b->run ? a : b;
	const struct token_shard *fine = coarse == a ? b : a;
	uint64_t turn = token_shard_turn(coarse), other = token_shard_turn(fine);
	uint64_t period, whole;

	assert(token_shard_nests(a, b));
	if (begin >= end)
		return 0;
	if (token_shard_is_all(a))
		return token_shard_slot(b, end) - token_shard_slot(b, begin);
	if (token_shard_is_all(b))
		return token_shard_slot(a, end) - token_shard_slot(a, begin);
	period = turn / common_divisor(turn, other) * other;
	whole = (end - begin) / period;
	if (whole == 0)
		return common_by_runs(coarse, fine, begin, end);
	return whole * common_by_runs(coarse, fine, 0, period) +
	       common_by_runs(coarse, fine, begin + whole * period, end);
}

/*
 * A token's positions in the two rounds are equal modulo their common divisor d, and any
 * two such positions belong to some token. So the runs meet when a multiple of d is among
 * the differences of their positions, which are consecutive numbers.
 */
bool token_shard_meet(const struct token_shard *a, const struct token_shard *b)
{
	uint64_t d, most, least, a_first, b_first;

	if (token_shard_is_all(a) || token_shard_is_all(b))
		return true;
	d = common_divisor(token_shard_turn(a), token_shard_turn(b));
	a_first = (uint64_t)a->rank * a->run;
	b_first = (uint64_t)b->rank * b->run;
	/* one more round of b, which d divides: never below 0 */
	most = a_first + a->run - 1 + token_shard_turn(b) - b_first;
	least = a_first + token_shard_turn(b) - b_first - (b->run - 1);
	return most / d > (least - 1) / d;
}
