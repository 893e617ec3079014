/* SPDX-License-Identifier: Apache-2.0 */
/* Maps by number and by bytes, checked against plain arrays. */
#include "daemon/base/idmap.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

static void idmap_put_get_remove_agree(void **state)
{
	struct idmap map;
	int a, b;

	(void)state;
	idmap_init(&map);
	assert_null(idmap_get(&map, 0));
	assert_null(idmap_remove(&map, 0));
	assert_int_equal(idmap_put(&map, 0, &a), 0);
	assert_int_equal(idmap_put(&map, UINT64_MAX, &b), 0);
	assert_int_equal(idmap_put(&map, 0, &b), -EEXIST);
	assert_ptr_equal(idmap_get(&map, 0), &a);
	assert_ptr_equal(idmap_get(&map, UINT64_MAX), &b);
	assert_int_equal(idmap_count(&map), 2);
	assert_ptr_equal(idmap_remove(&map, 0), &a);
	assert_null(idmap_get(&map, 0));
	assert_ptr_equal(idmap_get(&map, UINT64_MAX), &b);
	assert_int_equal(idmap_count(&map), 1);
	idmap_fini(&map);
	idmap_fini(&map);
}

static void idmap_swap_changes_only_present_entries(void **state)
{
	struct idmap map;
	int a, b;

	(void)state;
	idmap_init(&map);
	assert_null(idmap_swap(&map, 7, &a));
	assert_null(idmap_get(&map, 7));
	assert_int_equal(idmap_put(&map, 7, &a), 0);
	mem_fail_from(1);
	assert_ptr_equal(idmap_swap(&map, 7, &b), &a);
	mem_fail_at(0);
	assert_ptr_equal(idmap_get(&map, 7), &b);
	assert_int_equal(idmap_count(&map), 1);
	idmap_fini(&map);
}

/* 200 000 random puts and removes over 512 keys, against a plain array. */
static void idmap_random_matches_a_model(void **state)
{
	enum { KEYS = 512 };
	static char cells[KEYS];
	void *model[KEYS] = {NULL};
	struct idmap map;
	uint64_t x = 88172645463325252u;
	size_t count = 0;

	(void)state;
	idmap_init(&map);
	for (int i = 0; i < 200000; i++) {
		uint64_t k;

		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		k = x % KEYS;
		assert_ptr_equal(idmap_get(&map, k * 4096), model[k]);
		if (x & (1 << 20)) {
			int r = idmap_put(&map, k * 4096, &cells[k]);

			assert_int_equal(r, model[k] ? -EEXIST : 0);
			count += !model[k];
			model[k] = &cells[k];
		} else {
			assert_ptr_equal(idmap_remove(&map, k * 4096), model[k]);
			count -= !!model[k];
			model[k] = NULL;
		}
		assert_int_equal(idmap_count(&map), count);
	}
	assert_true(map.cap <= 2 * KEYS);
	idmap_fini(&map);
}

/* The first present key above, or `end`. */
static uint64_t model_above(const char *present, uint64_t key, uint64_t end)
{
	while (++key < end && !present[key])
		;
	return key < end ? key : end;
}

static void expect_above(const struct idmap *map, const char *present, uint64_t key,
			 uint64_t end)
{
	struct idmap_cursor cur;

	assert_int_equal(idmap_next_above(map, key, &cur) ? cur.key : end,
			 model_above(present, key, end));
}

/* Rising keys, of which the oldest are removed: look-ups and walks agree with a model at
 * any moment, while puts move entries and change the index, also both at once. */
static void idmap_moved_in_steps_matches_a_model(void **state)
{
	enum { KEYS = 60000 };
	static char present[KEYS];
	struct idmap_cursor cur;
	struct idmap map;
	uint64_t first = 1, window = 8000;
	bool both = false;

	(void)state;
	idmap_init(&map);
	for (uint64_t k = 1; k < KEYS; k++) {
		uint64_t probe = first + k * 7919 % (k - first + 1);

		assert_int_equal(idmap_put(&map, k, &present[k]), 0);
		present[k] = 1;
		both |= map.old && map.pack_from;
		window = map.pack_from && !both ? 20000 : window;
		for (; k - first > window; first++) {
			if (first % 100 == 0)
				continue; /* it stays */
			assert_ptr_equal(idmap_remove(&map, first),
					 present[first] ? &present[first] : NULL);
			present[first] = 0;
		}
		if (k % 40 == 0 && present[probe]) {
			assert_ptr_equal(idmap_remove(&map, probe), &present[probe]);
			present[probe] = 0;
		}
		assert_ptr_equal(idmap_get(&map, k), present[k] ? &present[k] : NULL);
		assert_ptr_equal(idmap_get(&map, probe),
				 present[probe] ? &present[probe] : NULL);
		if (k % 61)
			continue;
		expect_above(&map, present, probe, k + 1);
		expect_above(&map, present, k * 31 % k, k + 1);
		expect_above(&map, present, k / 2, k + 1);
	}
	assert_true(both);
	first = 0;
	idmap_foreach(&map, cur) {
		assert_int_equal(cur.key, model_above(present, first, KEYS));
		first = cur.key;
	}
	assert_int_equal(model_above(present, first, KEYS), KEYS);
	idmap_fini(&map);
}

/* No put moves more than some entries: it does not take longer in a large map. */
static void idmap_put_moves_few_entries(void **state)
{
	struct idmap map;
	size_t old_at = 0, pack_from = 0, cap;
	int cell;

	(void)state;
	idmap_init(&map);
	for (uint64_t k = 1; k < 100000; k++) {
		cap = map.index_cap;
		assert_int_equal(idmap_put(&map, k, &cell), 0);
		assert_true(map.index_cap == cap || map.old || map.count <= 513);
		assert_true(!map.old || map.old_at <= old_at + 8);
		assert_true(map.pack_from <= pack_from + 8);
		assert_true(map.used <= 2 * map.count + map.count / 2 + 16);
		old_at = map.old ? map.old_at : 0;
		pack_from = map.pack_from;
		if (k > 30000)
			assert_non_null(idmap_remove(&map, k - 30000));
	}
	idmap_fini(&map);
}

static void idmap_churn_does_not_grow(void **state)
{
	struct idmap map;
	int cell;

	(void)state;
	idmap_init(&map);
	for (uint64_t k = 0; k < 100000; k++) {
		assert_int_equal(idmap_put(&map, k, &cell), 0);
		if (k >= 8)
			assert_non_null(idmap_remove(&map, k - 8));
	}
	assert_int_equal(idmap_count(&map), 8);
	assert_true(map.cap <= 32);
	idmap_fini(&map);
}

static void foreach_follows_insertion_order_and_survives_removal(void **state)
{
	enum { N = 100 };
	struct idmap_cursor cur;
	struct idmap map;
	char cells[N];
	uint64_t expect = 0;

	(void)state;
	idmap_init(&map);
	for (uint64_t k = 0; k < N; k++)
		assert_int_equal(idmap_put(&map, N - k, &cells[k]), 0);
	idmap_foreach(&map, cur) {
		assert_int_equal(cur.key, N - expect);
		assert_ptr_equal(cur.value, &cells[expect]);
		assert_ptr_equal(idmap_remove(&map, cur.key), cur.value);
		expect++;
		if (expect % 10 == 5) { /* another one, further on */
			assert_non_null(idmap_remove(&map, N - expect));
			expect++;
		}
	}
	assert_int_equal(expect, N);
	assert_int_equal(idmap_count(&map), 0);
	idmap_foreach(&map, cur)
		fail();
	idmap_fini(&map);
}

static void idmap_without_memory_is_unchanged(void **state)
{
	struct idmap map;
	int cell, refused = 0;

	(void)state;
	idmap_init(&map);
	for (uint64_t k = 0; k < 100; k++) {
		for (uint64_t n = 1; n <= 2; n++) {
			mem_fail_at(n);
			if (idmap_put(&map, k, &cell) == 0)
				break;
			assert_int_equal(err_last()->code, ERR_NOMEM);
			assert_int_equal(idmap_count(&map), k);
			assert_null(idmap_get(&map, k));
			refused++;
		}
		mem_fail_at(0);
		if (!idmap_get(&map, k))
			assert_int_equal(idmap_put(&map, k, &cell), 0);
		for (uint64_t old = 0; old <= k; old++)
			assert_ptr_equal(idmap_get(&map, old), &cell);
	}
	assert_true(refused >= 8);
	idmap_fini(&map);
}

static void strmap_keys_are_copied_and_compared_whole(void **state)
{
	char key[] = "node-a", cells[3];
	struct idmap_cursor cur;
	struct strmap map;

	(void)state;
	strmap_init(&map);
	assert_int_equal(strmap_put(&map, key, &cells[0]), 0);
	key[5] = 'b';
	assert_null(strmap_get(&map, key));
	assert_int_equal(strmap_put(&map, key, &cells[1]), 0);
	assert_int_equal(strmap_put(&map, "", &cells[2]), 0);
	assert_int_equal(strmap_put(&map, "", &cells[0]), -EEXIST);
	assert_ptr_equal(strmap_get(&map, "node-a"), &cells[0]);
	assert_null(strmap_get(&map, "node"));
	assert_null(strmap_get_bytes(&map, "node-a\0", 7));
	strmap_foreach(&map, cur)
	{
		assert_string_equal(cur.bytes, "node-a");
		break;
	}
	assert_ptr_equal(strmap_remove(&map, "node-a"), &cells[0]);
	assert_ptr_equal(strmap_remove(&map, ""), &cells[2]);
	assert_int_equal(strmap_count(&map), 1);
	strmap_fini(&map);
}

static void strmap_of_16_byte_ids_holds_many(void **state)
{
	enum { N = 5000 };
	static uint8_t ids[N][16];
	struct strmap map;

	(void)state;
	strmap_init(&map);
	for (uint32_t i = 0; i < N; i++) {
		memcpy(ids[i] + 12, &i, sizeof(i)); /* NULs inside */
		assert_int_equal(strmap_put_bytes(&map, ids[i], 16, ids[i]), 0);
	}
	for (uint32_t i = 0; i < N; i += 2)
		assert_ptr_equal(strmap_remove_bytes(&map, ids[i], 16), ids[i]);
	for (uint32_t i = 0; i < N; i++)
		assert_ptr_equal(strmap_get_bytes(&map, ids[i], 16),
				 i % 2 ? ids[i] : NULL);
	assert_int_equal(strmap_count(&map), N / 2);
	strmap_fini(&map);
}

static void strmap_key_too_long_is_refused(void **state)
{
	static char key[STRMAP_KEY_MAX + 2];
	struct strmap map;
	int cell;

	(void)state;
	memset(key, 'k', sizeof(key) - 1);
	strmap_init(&map);
	assert_int_equal(strmap_put(&map, key, &cell), -EMSGSIZE);
	key[STRMAP_KEY_MAX] = '\0';
	mem_fail_at(3); /* the key's copy; 1 and 2 make the table */
	assert_int_equal(strmap_put(&map, key, &cell), -ENOMEM);
	mem_fail_at(0);
	assert_int_equal(strmap_count(&map), 0);
	assert_int_equal(strmap_put(&map, key, &cell), 0);
	strmap_fini(&map);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(idmap_put_get_remove_agree),
		cmocka_unit_test(idmap_swap_changes_only_present_entries),
		cmocka_unit_test(idmap_random_matches_a_model),
		cmocka_unit_test(idmap_moved_in_steps_matches_a_model),
		cmocka_unit_test(idmap_put_moves_few_entries),
		cmocka_unit_test(idmap_churn_does_not_grow),
		cmocka_unit_test(foreach_follows_insertion_order_and_survives_removal),
		cmocka_unit_test(idmap_without_memory_is_unchanged),
		cmocka_unit_test(strmap_keys_are_copied_and_compared_whole),
		cmocka_unit_test(strmap_of_16_byte_ids_holds_many),
		cmocka_unit_test(strmap_key_too_long_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
