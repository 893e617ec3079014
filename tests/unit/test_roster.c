/* SPDX-License-Identifier: Apache-2.0 */
/* A group's entries come and go: how many workers there are is known without a walk. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/roster.h"

#define WORKERS 3u
#define RANKS 4u

static struct place place_of(unsigned int worker, unsigned int rank)
{
	struct place place = {.group = "g", .rank = {rank}};

	snprintf(place.worker, sizeof(place.worker), "w%u", worker);
	return place;
}

/* By a look at all. */
static const char *only_worker(const struct roster *roster)
{
	const struct roster_entry *entry;
	const char *found = NULL;

	list_foreach(entry, &roster->order, link) {
		if (!entry->record)
			continue;
		if (found && strcmp(found, entry->place.worker) != 0)
			return NULL;
		found = entry->place.worker;
	}
	return found;
}

static void assert_only_worker(const struct roster *roster)
{
	const char *a = only_worker(roster), *b = roster_only_worker(roster);

	assert_int_equal(a == NULL, b == NULL);
	if (a)
		assert_string_equal(a, b);
}

static void worker_alone_is_found_as_entries_change(void **state)
{
	struct roster_entry *entry;
	unsigned int alone = 0;
	struct roster roster;

	(void)state;
	srand(1);
	roster_init(&roster, 1);
	for (int i = 0; i < 20000; i++) {
		struct place place =
			place_of((unsigned)rand() % WORKERS, (unsigned)rand() % RANKS);

		entry = roster_find(&roster, &place);
		if (entry && rand() % 8)
			roster_drop(&roster, entry);
		else
			assert_true(roster_put(&roster, &place, i % 2 ? "a" : "b", NULL,
					       &entry) >= 0);
		assert_only_worker(&roster);
		alone += roster_only_worker(&roster) != NULL;
		if (i % 1000 == 0) {
			roster_mark(&roster);
			roster_sweep(&roster, NULL, NULL);
			assert_null(roster_only_worker(&roster));
		}
	}
	assert_in_range(alone, 100, 19900);
	roster_fini(&roster);
}

/* Without memory nothing changes. */
static void entry_without_memory_is_no_worker(void **state)
{
	const struct place place = place_of(0, 0);
	struct roster_entry *entry;
	struct roster roster;
	int r = -1;

	(void)state;
	roster_init(&roster, 1);
	for (uint64_t nth = 1; r < 0; nth++) {
		mem_fail_at(nth);
		r = roster_put(&roster, &place, "a", NULL, &entry);
		mem_fail_at(0);
		if (r < 0) {
			assert_null(roster_only_worker(&roster));
			assert_int_equal(roster.count + roster.gone_count, 0);
			err_clear();
		}
	}
	assert_string_equal(roster_only_worker(&roster), "w0");
	roster_fini(&roster);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(worker_alone_is_found_as_entries_change),
		cmocka_unit_test(entry_without_memory_is_no_worker),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
