/* SPDX-License-Identifier: Apache-2.0 */
/* Figures: the sets of peers, and the texts that are made of them. */
#include "daemon/metrics/figures.h"
#include "daemon/modules.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/base/text.h"
#include "daemon/modules.h"
#include "daemon/request/commands.h"

static struct metrics metrics;
static struct figures figures;

static int clear(void **state)
{
	(void)state;
	memset(&metrics, 0, sizeof(metrics));
	memset(&figures, 0, sizeof(figures));
	return 0;
}

static void peer_named(char name[METRIC_PEER_NAME], unsigned int n)
{
	snprintf(name, METRIC_PEER_NAME, "peer%u@10.0.0.1:%u", n, n);
}

/* ---- sets of peers ---- */

static void peer_reconnected_continues_its_counts(void **state)
{
	static int a, b;
	unsigned int at = metrics_peer(&metrics, "a", &a);

	(void)state;
	metrics_add(&metrics, METRIC_AT(PEER_BYTES, at, METRIC_IN), 7);
	metrics_peer_left(&metrics, at, &a);
	assert_int_not_equal(metrics_peer(&metrics, "b", &b), at);
	assert_int_equal(metrics_peer(&metrics, "a", &a), at);
	assert_int_equal(metrics_get(&metrics, METRIC_AT(PEER_BYTES, at, METRIC_IN)), 7);
}

/* Its new connection is up before the old one's end is told. */
static void peer_replaced_keeps_its_row(void **state)
{
	static int before, now;
	unsigned int at = metrics_peer(&metrics, "a", &before);

	(void)state;
	assert_int_equal(metrics_peer(&metrics, "a", &now), at);
	metrics_peer_left(&metrics, at, &before);
	assert_ptr_equal(metrics.peers[at].owner, &now);
	metrics_peer_left(&metrics, METRIC_PEER_OTHER, &now);
}

static void peers_past_the_cap_share_a_set(void **state)
{
	char name[METRIC_PEER_NAME];
	static int owner;

	(void)state;
	for (unsigned int i = 0; i < METRIC_PEERS_MAX; i++) {
		peer_named(name, i);
		assert_int_equal(metrics_peer(&metrics, name, &owner), i);
		assert_false(metrics.peers_other);
	}
	assert_int_equal(metrics_peer(&metrics, "one more", &owner), METRIC_PEER_OTHER);
	assert_true(metrics.peers_other);
	metrics_add(&metrics, METRIC_AT(PEER_LOST, 5, 0), 3);
	metrics_peer_left(&metrics, 9, &owner);
	metrics_peer_left(&metrics, 5, &owner);
	assert_int_equal(metrics_peer(&metrics, "one more", &owner), 9); /* left first */
	assert_int_equal(metrics_peer(&metrics, "another", &owner), 5);
	assert_int_equal(metrics_get(&metrics, METRIC_AT(PEER_LOST, 5, 0)), 0);
	assert_int_equal(metrics_peer(&metrics, "a third", &owner), METRIC_PEER_OTHER);
}

/* ---- texts ---- */

static void labels_of_peers_are_escaped(void **state)
{
	struct text text = {0};
	static int owner;

	(void)state;
	metrics_peer(&figures.metrics, "x\"} 1\nkvd_y{\\z", &owner);
	metrics_add(&figures.metrics, METRIC_AT(PEER_LOST, 0, 0), 2);
	figures_expose(&figures, &text);
	assert_non_null(strstr(
		text.data,
		"\nkvd_peer_disconnects_total{peer=\"x\\\"} 1\\nkvd_y{\\\\z\"} 2\n"));
	assert_null(strstr(text.data, "\nkvd_y"));
	text_fini(&text);
}

static size_t module_rows(void)
{
	size_t rows = 0;

	MODULES_EACH(&figures, m)
	{
		rows += m->metric_count;
	}
	return rows;
}

static void json_of_every_figure_can_be_read(void **state)
{
	char name[METRIC_PEER_NAME];
	struct text text = {0};
	cJSON *json, *family;
	size_t families = 0;
	static int owner;

	(void)state;
	figures.modules = modules_built;
	for (unsigned int i = 0; i < METRIC_PEERS_MAX; i++) {
		snprintf(name, sizeof(name), "\"\\\x01 %u", i);
		metrics_peer(&figures.metrics, name, &owner);
	}
	for (unsigned int i = 0; i < METRIC_END; i++)
		figures.metrics.value[i] = i + 1;
	for (unsigned int i = 0; i < METRIC_HISTOGRAMS_END; i++)
		histogram_put(&figures.metrics.histogram[i], i, 1000);
	text_puts(&text, "{\"id\":1");
	figures_json(&figures, &text);
	text_puts(&text, "}");
	json = cJSON_ParseWithOpts(text.data, NULL, true);
	assert_non_null(json);
	cJSON_ArrayForEach(family, cJSON_GetObjectItem(json, "metrics")) {
		if (families < METRIC_ROWS)
			assert_string_equal(
				cJSON_GetObjectItem(family, "name")->valuestring,
				metric_rows[families].name);
		families++;
		assert_true(cJSON_IsNumber(cJSON_GetObjectItem(family, "value")));
		assert_true(cJSON_IsString(cJSON_GetObjectItem(family, "help")));
	}
	assert_int_equal(families, METRIC_ROWS + module_rows());
	cJSON_Delete(json);
	text_fini(&text);
}

static void seconds_have_fractions(void **state)
{
	struct text text = {0};

	(void)state;
	metrics_set(&figures.metrics, METRIC_DEAD_AFTER, 800000000);
	metrics_set(&figures.metrics, METRIC_LOOP_LONGEST, 12000000000);
	metrics_set(&figures.metrics, METRIC_PROCESS_CPU, 1000000001);
	figures_expose(&figures, &text);
	assert_non_null(strstr(text.data, "\nkvd_peer_dead_after_seconds 0.8\n"));
	assert_non_null(strstr(text.data, "\nkvd_loop_longest_iteration_seconds 12\n"));
	assert_non_null(strstr(text.data, "\nprocess_cpu_seconds_total 1.000000001\n"));
	assert_non_null(strstr(text.data, "_bucket{role=\"send\",phase=\"total\",le="
					  "\"0.00005\"} 0\n"));
	assert_non_null(
		strstr(text.data, "kvd_room_size_bytes_bucket{le=\"4096.0\"} 0\n"));
	text_fini(&text);
}

static void text_without_memory_is_not_sent(void **state)
{
	struct text text = {0};

	(void)state;
	mem_fail_from(1);
	figures_expose(&figures, &text);
	mem_fail_at(0);
	assert_true(text.failed);
	text_fini(&text);
}

static void every_command_has_its_cells(void **state)
{
	unsigned int count = 0;

	(void)state;
	figures.modules = modules_built;
	while (commands_at(modules_built, count))
		count++;
	assert_true(count < METRIC_VALUES_COMMAND); /* and one for the unknown */
	for (unsigned int i = 0; i < count; i++)
		assert_string_equal(figures_label(&figures, METRIC_BY_COMMAND, 0, i + 1),
				    commands_at(modules_built, i)->name);
	assert_null(figures_label(&figures, METRIC_BY_COMMAND, 0, count + 1));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(peer_reconnected_continues_its_counts, clear),
		cmocka_unit_test_setup(peer_replaced_keeps_its_row, clear),
		cmocka_unit_test_setup(peers_past_the_cap_share_a_set, clear),
		cmocka_unit_test_setup(labels_of_peers_are_escaped, clear),
		cmocka_unit_test_setup(json_of_every_figure_can_be_read, clear),
		cmocka_unit_test_setup(seconds_have_fractions, clear),
		cmocka_unit_test_setup(text_without_memory_is_not_sent, clear),
		cmocka_unit_test(every_command_has_its_cells),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
