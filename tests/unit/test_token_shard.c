/* SPDX-License-Identifier: Apache-2.0 */
/* Shards of tokens against the definition, token by token. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/plan/token_shard.h"
#include "tests/lib/plan_random.h"

static bool holds(const struct token_shard *s, uint64_t t)
{
	return s->size == 0 || t / s->run % s->size == s->rank;
}

static struct token_shard shard_random(uint64_t *rng, uint32_t run)
{
	struct token_shard s = {.size = random_below(rng, 5), .run = run};

	if (s.size < 2)
		return (struct token_shard){0};
	s.rank = random_below(rng, s.size);
	return s;
}

static void places_are_those_of_the_tokens_held_before(void **state)
{
	uint64_t rng = 7;

	(void)state;
	for (unsigned int n = 0; n < 500; n++) {
		struct token_shard s = shard_random(&rng, 1 + random_below(&rng, 5));
		uint64_t slot = 0;

		for (uint64_t t = 0; t < 100; t++) {
			uint64_t end, token;
			bool held = token_shard_run(&s, t, &end);

			assert_int_equal(held, holds(&s, t));
			assert_true(end > t);
			for (uint64_t u = t; u < end && u < 150; u++)
				assert_int_equal(holds(&s, u), held);
			assert_true(end == UINT64_MAX || holds(&s, end) != held);
			assert_int_equal(token_shard_slot(&s, t), slot);
			if (!held)
				continue;
			assert_true(token_shard_at(&s, slot++, &token));
			assert_int_equal(token, t);
		}
	}
}

static void tokens_past_64_bits_are_none(void **state)
{
	struct token_shard s = {.size = 3, .rank = 1, .run = 4};
	uint64_t token, end;

	(void)state;
	assert_false(token_shard_at(&s, UINT64_MAX / 3 + 4, &token));
	assert_true(token_shard_at(&s, UINT64_MAX / 3 - 4, &token));
	token_shard_run(&s, UINT64_MAX - 1, &end);
	assert_true(end == UINT64_MAX);
}

static void tokens_in_both_shards_are_counted(void **state)
{
	uint64_t rng = 9;

	(void)state;
	for (unsigned int n = 0; n < 3000; n++) {
		uint32_t run = 1 + random_below(&rng, 4);
		struct token_shard a = shard_random(&rng, run);
		struct token_shard b =
			shard_random(&rng, run * (1 + random_below(&rng, 3)));
		uint64_t begin = random_below(&rng, 60), wanted = 0;
		uint64_t end = begin + random_below(&rng, 400);

		assert_true(token_shard_nests(&a, &b));
		for (uint64_t t = begin; t < end; t++)
			wanted += holds(&a, t) && holds(&b, t);
		assert_int_equal(token_shard_common(&a, &b, begin, end), wanted);
		assert_int_equal(token_shard_common(&b, &a, begin, end), wanted);
	}
	assert_int_equal(token_shard_common(&(struct token_shard){0},
					    &(struct token_shard){0}, 9, 4),
			 0);
}

static void shards_with_a_common_token_overlap(void **state)
{
	uint64_t rng = 11;
	unsigned int met = 0, apart = 0;

	(void)state;
	for (unsigned int n = 0; n < 3000; n++) {
		uint32_t run = 1 + random_below(&rng, 6);
		struct token_shard a = shard_random(&rng, run);
		struct token_shard b =
			shard_random(&rng, n % 2 ? run : 1 + random_below(&rng, 6));
		bool meet = false;

		for (uint64_t t = 0; t < token_shard_turn(&a) * token_shard_turn(&b); t++)
			meet = meet || (holds(&a, t) && holds(&b, t));
		assert_int_equal(token_shard_meet(&a, &b), meet);
		assert_int_equal(token_shard_meet(&b, &a), meet);
		met += meet;
		apart += !meet;
	}
	assert_true(met > 100 && apart > 100);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(places_are_those_of_the_tokens_held_before),
		cmocka_unit_test(tokens_past_64_bits_are_none),
		cmocka_unit_test(tokens_in_both_shards_are_counted),
		cmocka_unit_test(shards_with_a_common_token_overlap),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
