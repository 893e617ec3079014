/* SPDX-License-Identifier: Apache-2.0 */
/* The table of refused peers: bounded, and rate-limited in the log. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/link/link_refused.h"
#include "daemon/loop/loop.h"

static struct link_refusals table;

static bool note(uint64_t at_s, const char *key, const char *address)
{
	bool log;

	link_refused_note(&table, at_s * LOOP_NS_PER_S, key, address, "why", &log);
	return log;
}

static void caller_refused_repeatedly_is_logged_once_a_minute(void **state)
{
	unsigned int lines = 0;

	(void)state;
	memset(&table, 0, sizeof(table));
	for (unsigned int i = 0; i < 600; i++)
		lines += note(1000 + i, "key", "10.0.0.1");
	assert_int_equal(lines, 10);
	assert_int_equal(table.count, 1);
	assert_int_equal(table.entries[0].count, 600);
	assert_int_equal(table.entries[0].first_ns, 1000 * LOOP_NS_PER_S);
	assert_int_equal(table.entries[0].last_ns, 1599 * LOOP_NS_PER_S);
	assert_true(note(1600, "key", "10.0.0.2")); /* another one */
	assert_true(note(1600, "other", "10.0.0.1"));
	assert_int_equal(table.count, 3);
}

static void flood_of_keys_takes_the_place_of_the_quietest(void **state)
{
	char key[48];

	(void)state;
	memset(&table, 0, sizeof(table));
	for (unsigned int i = 0; i < 5000; i++) {
		snprintf(key, sizeof(key), "key-%u", i);
		note(1000 + i, key, "10.0.0.1");
		note(1000 + i, "constant", "10.0.0.2");
	}
	assert_int_equal(table.count, LINK_REFUSED_MAX);
	for (unsigned int i = 0; i < table.count; i++) {
		const struct link_refused *entry = &table.entries[i];

		if (strcmp(entry->key, "constant") == 0)
			assert_int_equal(entry->count, 5000);
		else
			assert_true(entry->last_ns > 5900 * LOOP_NS_PER_S);
	}
}

static void long_texts_are_cut(void **state)
{
	char text[400];

	(void)state;
	memset(&table, 0, sizeof(table));
	memset(text, 'x', sizeof(text) - 1);
	text[sizeof(text) - 1] = '\0';
	assert_true(note(1, text, text));
	assert_int_equal(strlen(table.entries[0].key), 40);
	assert_int_equal(strlen(table.entries[0].address), 63);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(caller_refused_repeatedly_is_logged_once_a_minute),
		cmocka_unit_test(flood_of_keys_takes_the_place_of_the_quietest),
		cmocka_unit_test(long_texts_are_cut),
	};

	return cmocka_run_group_tests_name("link_refused", tests, NULL, NULL);
}
