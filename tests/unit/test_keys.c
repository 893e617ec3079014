/* SPDX-License-Identifier: Apache-2.0 */
/* Which regions of a session keep their keys when it tells them all anew, and what it
 * costs to find that out. Lists by hand; test_xfer has the lives of lists. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake_impl.h"

#define MANY 4096u

enum order { AS_BEFORE, BACKWARDS, ALL_NEW };

/* Many regions are told anew in that order: what the core was had for, and how many
 * kept their key. */
static uint64_t carry_many(enum order order, uint32_t *kept_p)
{
	static struct xp_key_base keys[MANY];
	static struct remote_region before[MANY], after[MANY];
	static uint8_t packed[16];
	struct remote_pool old = {
		.regions = before, .region_count = MANY, .wanted = true};
	struct remote_pool pool = {.regions = after, .region_count = MANY};
	uint64_t begin;

	for (uint32_t i = 0; i < MANY; i++) {
		struct remote_region region = {.packed = packed,
					       .packed_len = sizeof(packed)};

		before[i] = after[i] = region;
		before[i].id = i;
		before[i].key = (struct xp_key *)&keys[i];
		after[i].id = order == AS_BEFORE   ? i
			      : order == BACKWARDS ? MANY - 1 - i
						   : i + MANY;
	}
	begin = clock_of(CLOCK_THREAD_CPUTIME_ID);
	keys_carry(&old, &pool);
	begin = clock_of(CLOCK_THREAD_CPUTIME_ID) - begin;
	*kept_p = 0;
	for (uint32_t i = 0; i < MANY; i++)
		*kept_p += after[i].key != NULL &&
			   after[i].key == before[after[i].id].key &&
			   keys[after[i].id].owner == &after[i];
	return begin;
}

/* Whoever tells them chooses the order, and our loop does the looking. */
static void regions_registered_in_any_order_take_equal_time(void **state)
{
	uint64_t least[3] = {UINT64_MAX, UINT64_MAX, UINT64_MAX};
	uint32_t kept[3];

	(void)state;
	for (unsigned int i = 0; i < 15; i++) {
		uint64_t ns = carry_many(i % 3, &kept[i % 3]);

		least[i % 3] = ns < least[i % 3] ? ns : least[i % 3];
	}
	assert_int_equal(kept[AS_BEFORE], MANY);
	assert_int_equal(kept[BACKWARDS], MANY);
	assert_int_equal(kept[ALL_NEW], 0);
	for (unsigned int i = 1; i < 3;
	     i++) /* each beside each: some hundred times as much */
		if (least[i] > 100 * least[AS_BEFORE])
			fail_msg("order %u: %ju ns beside %ju", i, (uintmax_t)least[i],
				 (uintmax_t)least[AS_BEFORE]);
}

/* Want of memory on the way: some keys are asked for anew, and none is in both lists. */
static void regions_without_memory_are_requested_again(void **state)
{
	uint32_t kept;

	(void)state;
	mem_fail_from(1);
	carry_many(BACKWARDS, &kept);
	mem_fail_at(0);
	assert_true(kept < MANY);
	mem_fail_from(1);
	carry_many(AS_BEFORE, &kept); /* needs none */
	mem_fail_at(0);
	assert_int_equal(kept, MANY);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(regions_registered_in_any_order_take_equal_time),
		cmocka_unit_test(regions_without_memory_are_requested_again),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
