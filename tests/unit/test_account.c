/* SPDX-License-Identifier: Apache-2.0 */
/* Accounts: who shares one, what a charge takes and gives back, whom the ceiling stops.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <ftw.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/base/account.h"
#include "daemon/base/cgroup.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/base/metrics.h"
#include "tests/lib/tmp.h"

#define LIMIT 8192u /* a 256th: 32; the last eighth: 1024 */

static struct metrics metrics;

static void accounts_begin(struct accounts *accounts)
{
	memset(&metrics, 0, sizeof(metrics));
	*accounts = (struct accounts){.limit = LIMIT, .metrics = &metrics};
}

static uint64_t counted(enum account_class class)
{
	return metrics_get(&metrics, METRIC_AT(ACCOUNT_BYTES, class, 0));
}

static void principal_of_one_name_is_one(void **state)
{
	struct accounts accounts;
	struct account *a, *b, *c;

	(void)state;
	accounts_begin(&accounts);
	a = account_get(&accounts, "uid", "1000");
	b = account_get(&accounts, "uid", "1000");
	c = account_get(&accounts, "peer", "1000");
	assert_ptr_equal(a, b);
	assert_ptr_not_equal(a, c);
	assert_string_equal(a->name, "uid:1000");
	assert_int_equal(accounts.count, 2);
	assert_int_equal(metrics_get(&metrics, METRIC_PRINCIPALS), 2);
	account_unref(c);
	account_unref(a);
	assert_false(accounts_idle(&accounts));
	account_unref(b);
	assert_true(accounts_idle(&accounts));
	assert_int_equal(metrics_get(&metrics, METRIC_PRINCIPALS), 0);
}

static void charge_outlives_the_last_reference(void **state)
{
	struct charge charge = {0}, moved;
	struct accounts accounts;
	struct account *a;

	(void)state;
	accounts_begin(&accounts);
	a = account_get(&accounts, "addr", "::1");
	assert_int_equal(charge_take(&charge, a, ACCOUNT_PAGES, 10), 0);
	account_unref(a);
	assert_int_equal(charge_more(&charge, 5), 0);
	charge_less(&charge, 3);
	moved = charge_steal(&charge);
	charge_drop(&charge); /* nothing is left in it */
	assert_int_equal(accounts.total, 12);
	assert_int_equal(counted(ACCOUNT_PAGES), 12);
	charge_drop(&moved);
	charge_drop(&moved);
	assert_true(accounts_idle(&accounts));
	assert_int_equal(counted(ACCOUNT_PAGES), 0);
}

static void last_eighth_is_for_those_with_little(void **state)
{
	struct charge much = {0}, more = {0}, little = {0}, other = {0};
	struct accounts accounts;
	struct account *a, *b;

	(void)state;
	accounts_begin(&accounts);
	a = account_get(&accounts, "uid", "1");
	b = account_get(&accounts, "uid", "2");
	assert_int_equal(charge_take(&much, a, ACCOUNT_LISTS, LIMIT - LIMIT / 8 - 1), 0);
	assert_int_equal(charge_take(&more, a, ACCOUNT_PLANS, 2), -err_errno(ERR_LIMIT));
	assert_string_equal(
		err_last()->text,
		"uid:1: plans: 2 bytes more; it holds 7167 in all, 0 of them "
		"plans, and all principals 7167 of 8192 (memory_limit), the last "
		"eighth is reserved for principals with little");
	assert_int_equal(charge_take(&more, a, ACCOUNT_PLANS, 1), 0);
	assert_int_equal(charge_more(&more, 1), -err_errno(ERR_LIMIT));
	assert_int_equal(charge_take(&little, b, ACCOUNT_LISTS, 31), 0);
	assert_int_equal(charge_take(&other, b, ACCOUNT_LISTS, 1), /* a 256th */
			 -err_errno(ERR_LIMIT));
	assert_int_equal(a->refused, 2);
	assert_int_equal(
		metrics_get(&metrics, METRIC_AT(ACCOUNT_REFUSED, ACCOUNT_PLANS, 0)), 2);
	charge_drop(&much);
	assert_int_equal(charge_take(&other, b, ACCOUNT_LISTS, 1), 0);
	charge_drop(&more);
	charge_drop(&little);
	charge_drop(&other);
	account_unref(a);
	account_unref(b);
	assert_true(accounts_idle(&accounts));
}

/* Sums that would wrap are refused, and a limit that was lowered refuses all. */
static void account_room_matches_check(void **state)
{
	struct charge own = {0}, others = {0};
	struct accounts accounts;
	struct account *a, *b;

	(void)state;
	accounts_begin(&accounts);
	a = account_get(&accounts, "uid", "1");
	b = account_get(&accounts, "uid", "2");
	for (uint64_t held = 0; held < LIMIT - LIMIT / 8; held += 7) {
		for (uint64_t rest = 0; rest <= LIMIT - held; rest += 251) {
			uint64_t room;

			charge_force(&own, a, ACCOUNT_PLANS, held);
			charge_force(&others, b, ACCOUNT_PLANS, rest);
			room = account_room(a);
			assert_true(room == 1 ||
				    account_check(a, ACCOUNT_PLANS, room) == 0);
			assert_true(room > 0);
			assert_true(account_check(a, ACCOUNT_PLANS, room + 1) < 0);
			charge_drop(&own);
			charge_drop(&others);
		}
	}
	accounts.limit = 0;
	assert_int_equal(account_room(a), UINT64_MAX);
	assert_int_equal(account_room(NULL), UINT64_MAX);
	account_unref(a);
	account_unref(b);
}

static void descriptors_of_one_leave_some_for_others(void **state)
{
	struct charge many[20] = {0}, one = {0};
	struct accounts accounts;
	struct account *a, *b;

	(void)state;
	accounts_begin(&accounts);
	accounts.fds_limit = 160;
	a = account_get(&accounts, "uid", "1");
	b = account_get(&accounts, "uid", "2");
	for (int i = 0; i < 20; i++)
		charge_force(&many[i], a, ACCOUNT_REGIONS, 1);
	for (int i = 0; i < 14; i++)
		assert_int_equal(charge_fds(&many[i], 10), 0);
	assert_int_equal(charge_fds(&many[14], 1), -err_errno(ERR_LIMIT));
	assert_string_equal(
		err_last()->text,
		"uid:1: regions: 1 descriptors more; it holds about 140, and "
		"all engines 140 of 160, half of what the daemon may open "
		"(LimitNOFILE), the last eighth is reserved for users with few");
	assert_int_equal(a->refused, 1);
	charge_force(&one, b, ACCOUNT_SESSIONS, 1);
	assert_int_equal(charge_fds(&one, 8), 0);
	assert_int_equal(charge_fds(&one, 8), 0);
	assert_true(charge_fds(&one, 1) < 0);
	charge_fds_force(&one, 1); /* 157: under 140 when two of a's are gone */
	charge_drop(&many[0]);
	charge_drop(&many[1]);
	assert_int_equal(charge_fds(&many[14], 3), 0);
	for (int i = 0; i < 20; i++)
		charge_drop(&many[i]);
	charge_drop(&one);
	assert_int_equal(accounts.fds, 0);
	account_unref(a);
	account_unref(b);
	assert_true(accounts_idle(&accounts));
}

static void charge_beyond_the_ceiling_leaks_nothing(void **state)
{
	struct charge charge = {0}, more = {0};
	struct accounts accounts;
	struct account *a;

	(void)state;
	accounts_begin(&accounts);
	a = account_get(&accounts, "uid", "1");
	assert_int_equal(charge_take(&charge, a, ACCOUNT_LISTS, 100), 0);
	assert_true(charge_take(&more, a, ACCOUNT_LISTS, UINT64_MAX) < 0);
	assert_true(charge_take(&more, a, ACCOUNT_LISTS, UINT64_MAX - 50) < 0);
	assert_true(charge_more(&charge, UINT64_MAX - 99) < 0);
	accounts.limit = 50;
	assert_true(charge_more(&charge, 1) < 0);
	assert_null(more.account);
	assert_int_equal(accounts.total, 100);
	charge_drop(&charge);
	account_unref(a);
	assert_true(accounts_idle(&accounts));
}

static void charge_without_account_is_unlimited(void **state)
{
	struct charge charge = {0};

	(void)state;
	assert_int_equal(charge_take(&charge, NULL, ACCOUNT_LISTS, UINT64_MAX), 0);
	assert_int_equal(charge_more(&charge, UINT64_MAX), 0);
	charge_less(&charge, 5);
	charge_drop(&charge);
	account_unref(NULL);
}

static void account_without_memory_is_none(void **state)
{
	struct accounts accounts;

	(void)state;
	accounts_begin(&accounts);
	mem_fail_at(1);
	assert_null(account_get(&accounts, "uid", "1"));
	mem_fail_at(0);
	assert_int_equal(err_last()->code, ERR_NOMEM);
	err_clear();
	assert_true(accounts_idle(&accounts));
}

static void preset_is_a_part_of_the_memory(void **state)
{
	(void)state;
	assert_true(accounts_preset() >= UINT64_C(256) << 20);
	assert_true(accounts_preset() <= UINT64_C(8) << 30);
}

/* ---- control groups ---- */

static void text_put(const char *dir, const char *name, const char *text)
{
	char path[PATH_MAX];
	FILE *file;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	for (char *at = path + strlen(dir) + 1; (at = strchr(at, '/')); at++) {
		*at = 0;
		assert_true(mkdir(path, 0700) == 0 || errno == EEXIST);
		*at = '/';
	}
	file = fopen(path, "w");
	assert_non_null(file);
	assert_true(fputs(text, file) >= 0);
	assert_int_equal(fclose(file), 0);
}

static int on_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

static void limit_is_the_least_of_all_groups(void **state)
{
	static const struct {
		const char *what, *self;
		const char *files[2][2]; /* name, text */
		uint64_t limit;
	} rows[] = {
		{"v2",
		 "0::/a/b\n",
		 {{"a/b/memory.max", "max\n"}, {"a/memory.max", "7000"}},
		 7000},
		{"v2, its own",
		 "0::/a/b\n",
		 {{"a/b/memory.max", "6000"}, {"a/memory.max", "7000"}},
		 6000},
		{"v2 in a container", "0::/\n", {{"memory.max", "5000\n"}}, 5000},
		{"v1",
		 "3:cpu:/x\n4:memory:/a/b\n",
		 {{"memory/a/b/memory.limit_in_bytes", "9223372036854771712"},
		  {"memory/a/memory.limit_in_bytes", "4000"}},
		 4000},
		{"v1 in a container",
		 "4:memory:/docker/f00\n",
		 {{"memory/memory.limit_in_bytes", "3000"}},
		 3000},
		{"both",
		 "5:devices:/\n4:cpu,memory:/a\n0::/system.slice/x\n",
		 {{"memory/a/memory.limit_in_bytes", "2000"},
		  {"unified/cgroup.procs", ""}},
		 2000},
		{"another controller",
		 "4:memorable:/a\n",
		 {{"memory/a/memory.limit_in_bytes", "2000"}},
		 UINT64_MAX},
		{"none", "0::/a\n", {{"a/memory.max", "max\n"}}, UINT64_MAX},
		{"no lines", "", {{NULL}}, UINT64_MAX},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
		char dir[80];

		tmp_path(dir, sizeof(dir), "kvd-cgroup-XXXXXX");
		assert_non_null(mkdtemp(dir));
		text_put(dir, "cgroup", rows[i].self);
		for (size_t k = 0; k < 2 && rows[i].files[k][0]; k++)
			text_put(dir, rows[i].files[k][0], rows[i].files[k][1]);
		if (cgroup_memory_limit_in(dir, dir) != rows[i].limit)
			fail_msg("%s: %ju", rows[i].what,
				 (uintmax_t)cgroup_memory_limit_in(dir, dir));
		assert_int_equal(nftw(dir, on_entry, 8, FTW_DEPTH | FTW_PHYS), 0);
	}
	assert_true(memory_limit() <= cgroup_memory_limit());
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(principal_of_one_name_is_one),
		cmocka_unit_test(charge_outlives_the_last_reference),
		cmocka_unit_test(last_eighth_is_for_those_with_little),
		cmocka_unit_test(account_room_matches_check),
		cmocka_unit_test(descriptors_of_one_leave_some_for_others),
		cmocka_unit_test(charge_beyond_the_ceiling_leaks_nothing),
		cmocka_unit_test(charge_without_account_is_unlimited),
		cmocka_unit_test(account_without_memory_is_none),
		cmocka_unit_test(preset_is_a_part_of_the_memory),
		cmocka_unit_test(limit_is_the_least_of_all_groups),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
