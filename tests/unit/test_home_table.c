/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The directory's table beside a model of it: random puts, removals, drops of holders and
 * slices of the sweep; then its limits, and which of a list of homes a key has.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/store/home_table.h"
#include "daemon/store/members.h"

#define KEYS 3000u
#define HOLDERS 40u
#define SLOTS 4096u

struct world {
	struct home_table *table;
	unsigned int number[HOLDERS];
	bool has[HOLDERS][KEYS];
	int owner[HOLDERS];
	uint64_t random;
};

static uint64_t rnd(struct world *w, uint64_t below)
{
	w->random = home_mix(w->random + 0x9e3779b97f4a7c15);
	return w->random % below;
}

static int setup(void **state)
{
	struct world *w = calloc(1, sizeof(*w));

	assert_non_null(w);
	w->random = 7;
	assert_int_equal(home_table_new(SLOTS * 16, 99, &w->table), 0);
	for (unsigned int i = 0; i < HOLDERS; i++)
		w->number[i] = home_holder_new(w->table, &w->owner[i]);
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	home_table_free(w->table);
	free(w);
	return 0;
}

/* Few ids of several spaces: some differ by the space alone. */
static struct home_key key_of(unsigned int n)
{
	return (struct home_key){.id = home_mix(n / 2 + 1),
				 .space = home_mix(n % 2 + 1) & HOME_SPACE_MASK};
}

static void check_key(struct world *w, unsigned int n)
{
	void *owners[HOLDERS];
	struct home_key key = key_of(n);
	unsigned int count = home_table_find(w->table, &key, w->random, owners, HOLDERS);
	unsigned int all = 0;

	for (unsigned int h = 0; h < HOLDERS; h++)
		all += w->has[h][n];
	assert_int_equal(count, all);
	for (unsigned int i = 0; i < count; i++)
		assert_true(w->has[(int *)owners[i] - w->owner][n]);
}

static uint64_t model_count(const struct world *w)
{
	uint64_t count = 0;

	for (unsigned int h = 0; h < HOLDERS; h++) {
		for (unsigned int n = 0; n < KEYS; n++)
			count += w->has[h][n];
	}
	return count;
}

static void step(struct world *w)
{
	unsigned int h = (unsigned int)rnd(w, HOLDERS), n = (unsigned int)rnd(w, KEYS);
	struct home_key key = key_of(n);
	uint64_t what = rnd(w, 1000);

	if (what < 2) {
		home_holder_drop(w->table, w->number[h]);
		memset(w->has[h], 0, sizeof(w->has[h]));
		w->number[h] = home_holder_new(w->table, &w->owner[h]);
		assert_true(w->number[h] != 0);
	} else if (what < 5) {
		home_table_sweep(w->table);
	} else if (what < 520) {
		if (home_table_put(w->table, w->number[h], &key) == HOME_PUT)
			w->has[h][n] = true;
		else
			assert_false(w->has[h][n]);
	} else {
		assert_int_equal(home_table_remove(w->table, w->number[h], &key),
				 w->has[h][n]);
		w->has[h][n] = false;
	}
	check_key(w, n);
}

static void table_matches_model(void **state)
{
	struct world *w = *state;
	struct home_figures f;

	for (unsigned int i = 0; i < 300000; i++)
		step(w);
	for (unsigned int n = 0; n < KEYS; n++)
		check_key(w, n);
	home_table_figures(w->table, &f);
	assert_int_equal(f.used, model_count(w));
	assert_int_equal(f.holders, HOLDERS);
	for (unsigned int i = 0; home_table_sweep(w->table); i++)
		assert_true(i < 3 * SLOTS / 512 + 3);
	for (unsigned int n = 0; n < KEYS; n++)
		check_key(w, n);
}

static unsigned int puts_until_full(struct world *w, unsigned int holder, uint64_t from)
{
	unsigned int count = 0;
	struct home_key key = {.space = 1};

	do
		key.id = home_mix(from + count);
	while (home_table_put(w->table, holder, &key) == HOME_PUT && ++count);
	return count;
}

static void one_holder_has_half_and_the_last_eighth_is_for_those_of_little(void **state)
{
	struct world *w = *state;
	const unsigned int most = SLOTS - SLOTS / 4;
	struct home_key key = {.id = 5, .space = 5};

	assert_int_equal(puts_until_full(w, w->number[0], 1), most / 2);
	assert_int_equal(puts_until_full(w, w->number[1], 1 << 20),
			 most - most / 8 - most / 2);
	assert_int_equal(home_table_put(w->table, w->number[0], &key), HOME_FULL);
	assert_int_equal(home_table_put(w->table, w->number[2], &key), HOME_PUT);
	assert_true(puts_until_full(w, w->number[3], 1 << 21) >= most / 256);
	home_holder_drop(w->table, w->number[0]);
	while (home_table_sweep(w->table))
		;
	assert_int_equal(home_table_put(w->table, w->number[1], &key), HOME_PUT);
}

static void chunk_of_all_holders_is_kept_for_some(void **state)
{
	struct world *w = *state;
	struct home_key key = {.id = 1, .space = 2};
	unsigned int more[HOME_SAME_MAX + 1], crowded = 0, named[HOME_SAME_MAX + 1] = {0};
	int owner[HOME_SAME_MAX + 1];
	void *owners[8];

	for (unsigned int i = 0; i <= HOME_SAME_MAX; i++) {
		more[i] = home_holder_new(w->table, &owner[i]);
		crowded += home_table_put(w->table, more[i], &key) == HOME_CROWDED;
	}
	assert_int_equal(crowded, 1);
	for (unsigned int i = 0; i < 4000; i++) {
		assert_int_equal(home_table_find(w->table, &key, i, owners, 8), 8);
		for (unsigned int k = 0; k < 8; k++)
			named[(int *)owners[k] - owner]++;
	}
	for (unsigned int i = 0; i < HOME_SAME_MAX; i++) /* 500 on average */
		assert_in_range(named[i], 350, 650);
	home_holder_drop(w->table, more[0]); /* not swept out yet */
	assert_int_equal(home_table_put(w->table, more[HOME_SAME_MAX], &key), HOME_PUT);
}

static void places_are_used_again_once_they_are_empty(void **state)
{
	struct world *w = *state;
	struct home_key key = {.id = 1, .space = 2};
	unsigned int first = 0, last, n;

	for (n = HOLDERS; (last = home_holder_new(w->table, w)); n++)
		first = first ? first : last;
	assert_int_equal(n, HOME_HOLDERS_MAX);
	assert_int_equal(home_table_put(w->table, first, &key), HOME_PUT);
	home_holder_drop(w->table, first);
	assert_int_equal(home_holder_count(w->table, first), 1);
	assert_int_equal(home_holder_new(w->table, w), 0);
	while (home_table_sweep(w->table))
		;
	last = home_holder_new(w->table, w);
	assert_int_not_equal(last, 0);
	assert_int_not_equal(last, first);
	assert_int_equal(home_table_put(w->table, last, &key), HOME_PUT);
	assert_int_equal(home_holder_count(w->table, first), 0);
}

/* Who tells chunks chooses both halves of a key: with one id in every space, or such that
 * the sums' mix of the two is one (home_key_mix(), which all daemons know). */
static struct home_key chosen_key(bool mixed, uint64_t n)
{
	struct home_key key = {.id = 77, .space = n};

	if (mixed)
		key.id = home_mix(n + 1) ^ 12345;
	return key;
}

static void keys_chosen_do_not_collide(void **state)
{
	const uint64_t keys = 20000, each = 8; /* of the slots a third is taken */
	struct home_figures f;

	(void)state;
	for (unsigned int mixed = 0; mixed < 2; mixed++) {
		struct home_table *table;
		unsigned int holder;
		int owner;

		assert_int_equal(home_table_new(65536 * 16, 99, &table), 0);
		holder = home_holder_new(table, &owner);
		for (uint64_t n = 0; n < keys; n++) {
			struct home_key key = chosen_key(mixed, n);

			assert_int_equal(home_table_put(table, holder, &key), HOME_PUT);
		}
		home_table_figures(table, &f);
		assert_in_range(f.steps, keys, keys * each);
		for (uint64_t n = 0; n < keys / 2; n++) {
			struct home_key key = chosen_key(mixed, n);

			assert_true(home_table_remove(table, holder, &key));
		}
		home_holder_drop(table, holder);
		while (home_table_sweep(table))
			;
		home_table_figures(table, &f);
		assert_in_range(f.steps, keys, 2 * keys * each);
		home_table_free(table);
	}
}

static void table_without_memory_is_none(void **state)
{
	struct home_table *table = NULL;

	(void)state;

	for (uint64_t nth = 1; nth <= 2; nth++) {
		mem_fail_at(nth);
		assert_true(home_table_new(1 << 20, 1, &table) < 0);
		assert_null(table);
		err_clear();
	}
	mem_fail_at(0);
}

/* ---- members ---- */

#define WORDS "tcp://a:1 tcp://b:1,tcp://c:1  tcp://d:1"

static void on_change(void *arg)
{
	++*(unsigned int *)arg;
}

static void member_removed_moves_its_keys_only(void **state)
{
	unsigned int changes = 0, count[4] = {0}, before[10000];
	struct members *m;

	(void)state;
	assert_int_equal(members_new(WORDS, on_change, &changes, &m), 0);
	assert_int_equal(members_count(m), 4);
	assert_string_equal(members_endpoint(m, 2), "tcp://c:1");
	for (unsigned int n = 0; n < 10000; n++) {
		struct home_key key = key_of(n);

		before[n] = members_home(m, &key);
		count[before[n]]++;
	}
	for (unsigned int i = 0; i < 4; i++)
		assert_in_range(count[i], 2300, 2700);
	members_set(m, WORDS);
	assert_int_equal(changes, 0);
	members_set(m, "tcp://d:1 tcp://a:1 tcp://c:1");
	assert_int_equal(changes, 1);
	for (unsigned int n = 0; n < 10000; n++) {
		static const unsigned int now[] = {1, 9, 2, 0};
		struct home_key key = key_of(n);

		if (before[n] != 1)
			assert_int_equal(members_home(m, &key), now[before[n]]);
	}
	members_free(m);
}

static void members_beyond_limit_are_left_out(void **state)
{
	char words[4096] = "", one[64];
	unsigned int changes = 0;
	struct members *m;

	(void)state;
	for (unsigned int i = 0; i < MEMBERS_MAX + 3; i++) {
		snprintf(one, sizeof(one), "tcp://h%u:1 ", i / 2 * 2 + i % 2);
		strcat(words, one);
	}
	strcat(words, "tcp://h0:1");
	assert_int_equal(members_new(words, on_change, &changes, &m), 0);
	assert_int_equal(members_count(m), MEMBERS_MAX);
	members_set(m, "tcp://x:1 tcp://x:1 ");
	assert_int_equal(members_count(m), 1);
	members_set(m, " , ");
	assert_int_equal(members_count(m), 0);
	members_free(m);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(table_matches_model),
		CASE(one_holder_has_half_and_the_last_eighth_is_for_those_of_little),
		CASE(chunk_of_all_holders_is_kept_for_some),
		CASE(places_are_used_again_once_they_are_empty),
		cmocka_unit_test(keys_chosen_do_not_collide),
		cmocka_unit_test(table_without_memory_is_none),
		cmocka_unit_test(member_removed_moves_its_keys_only),
		cmocka_unit_test(members_beyond_limit_are_left_out),
	};

	return cmocka_run_group_tests_name("home_table", tests, NULL, NULL);
}
