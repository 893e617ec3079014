/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a member says of its load: rates of counts, what is a step, how often, and that
 * the text is JSON within its bound whatever the numbers are.
 */
#include "daemon/cluster/load.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include <cjson/cJSON.h>

#include "daemon/cluster/directory.h"

#define S UINT64_C(1000000000)
#define NEAR(a, b, part) assert_true((a) > (b) * (1 - (part)) && (a) < (b) * (1 + (part)))

static struct load idle(void)
{
	return (struct load){.engine = ENGINE_LOAD_NONE};
}

static void rate_is_of_the_last_seconds(void **state)
{
	struct load_counts counts = {0};
	struct load load = idle();
	struct load_meter meter = {0};

	(void)state;
	counts.moved = 1000 * S; /* before the first look: nobody knows when */
	load_meter_take(&meter, &counts, 5 * S, &load);
	assert_true(load.gbps == 0);
	for (unsigned int s = 6; s < 30; s++) {
		counts.moved += 12 * S;
		load_meter_take(&meter, &counts, s * S, &load);
	}
	NEAR(load.gbps, 12, 0.01);
	for (unsigned int s = 30; s < 40; s++)
		load_meter_take(&meter, &counts, s * S, &load);
	assert_true(load.gbps < 1);
	for (unsigned int s = 40; s < 140; s++)
		load_meter_take(&meter, &counts, s * S, &load);
	assert_true(load.gbps == 0);
	/* looked at late, it is the same rate */
	counts.moved += 1000 * S;
	load_meter_take(&meter, &counts, 239 * S, &load);
	NEAR(load.gbps, 10, 0.01);
}

static void first_bytes_are_a_mean_of_rooms(void **state)
{
	struct load_counts counts = {.firsts = 7, .first_ns = 7 * S};
	struct load load = idle();
	struct load_meter meter = {0};

	(void)state;
	load_meter_take(&meter, &counts, S, &load);
	assert_int_equal(load.ttfb_us, 0);
	counts.firsts += 10;
	counts.first_ns += 10 * 350000;
	load_meter_take(&meter, &counts, 2 * S, &load);
	assert_in_range(load.ttfb_us, 349, 1000000);
	for (unsigned int s = 3; s < 20; s++) {
		counts.firsts += 10;
		counts.first_ns += 10 * 350000;
		load_meter_take(&meter, &counts, s * S, &load);
	}
	assert_in_range(load.ttfb_us, 349, 351);
	load_meter_take(&meter, &counts, 500 * S, &load);
	assert_in_range(load.ttfb_us, 349, 351); /* no room came since */
}

static void failures_are_of_the_last_minute(void **state)
{
	struct load_counts counts = {.failed = 40};
	struct load load = idle();
	struct load_meter meter = {0};

	(void)state;
	load_meter_take(&meter, &counts, 100 * S, &load);
	assert_int_equal(load.failed, 0);
	for (unsigned int s = 101; s <= 110; s++) {
		counts.failed++;
		load_meter_take(&meter, &counts, s * S, &load);
	}
	assert_int_equal(load.failed, 10);
	load_meter_take(&meter, &counts, 165 * S, &load);
	assert_int_equal(load.failed, 5);
	load_meter_take(&meter, &counts, 171 * S, &load);
	assert_int_equal(load.failed, 0);
	counts.failed += 3;
	load_meter_take(&meter, &counts, 1000 * S, &load);
	assert_int_equal(load.failed, 3);
	load_meter_take(&meter, &counts, 9000 * S, &load);
	assert_int_equal(load.failed, 0);
}

/* A pool of the same name that was registered anew counts from 0. */
static void counts_falling_restart(void **state)
{
	struct load_counts counts = {.moved = 50 * S, .failed = 9, .firsts = 3};
	struct load load = idle();
	struct load_meter meter = {0};

	(void)state;
	load_meter_take(&meter, &counts, S, &load);
	counts = (struct load_counts){.moved = S, .failed = 1};
	load_meter_take(&meter, &counts, 2 * S, &load);
	assert_true(load.gbps == 0 && load.failed == 0);
	counts.moved += S;
	load_meter_take(&meter, &counts, 2 * S, &load); /* no time has passed */
	assert_true(load.gbps == 0);
	load_meter_take(&meter, &counts, 3 * S, &load);
	NEAR(load.gbps, 0.25, 0.01);
}

static bool pass(struct load_gate *gate, struct load_budget *budget,
		 const struct load *load, uint64_t now_ns)
{
	load_budget_fill(budget, now_ns);
	return load_gate_pass(gate, budget, load);
}

static void load_step_is_published_and_less_is_not(void **state)
{
	struct load_budget budget = {0};
	struct load_gate gate = {0};
	struct load load = idle();

	(void)state;
	assert_true(pass(&gate, &budget, &load, 100 * S)); /* the first */
	assert_false(pass(&gate, &budget, &load, 101 * S));
	load.running = 1;
	assert_true(pass(&gate, &budget, &load, 102 * S));
	load.running = 100;
	load.engine.kv_free_tokens = 100000;
	assert_true(pass(&gate, &budget, &load, 103 * S));
	load.running = 101;
	load.engine.kv_free_tokens = 99000;
	assert_false(pass(&gate, &budget, &load, 200 * S));
	load.engine.kv_free_tokens = 87000;
	assert_true(pass(&gate, &budget, &load, 201 * S));
}

/* Whatever the load does; and what did not pass is told once there is time. */
static void load_is_published_once_in_five_seconds(void **state)
{
	struct load_budget budget = {0};
	struct load_gate gate = {0};
	struct load load = idle();
	unsigned int told = 0, last = 0;

	(void)state;
	for (unsigned int s = 0; s < 1000; s++) {
		load.waiting = s % 2 ? 1000 : 0;
		if (pass(&gate, &budget, &load, s * S)) {
			told++;
			last = s;
		}
	}
	assert_in_range(told, 190, 1000 / 5 + LOAD_BURST);
	load.waiting = 77;
	for (unsigned int s = 1000; s < 1006; s++)
		if (pass(&gate, &budget, &load, s * S))
			last = s;
	assert_true(last >= 1000);
	assert_int_equal(gate.last.waiting, 77);
}

static double number(const cJSON *json, const char *a, const char *b)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, a);

	if (b)
		item = cJSON_GetObjectItemCaseSensitive(item, b);
	return cJSON_IsNumber(item) ? item->valuedouble : -1;
}

static cJSON *read_text(const struct load *load, uint64_t seq)
{
	struct text text = {0};
	cJSON *json;

	load_text(load, seq, &text);
	assert_false(text.failed);
	assert_true(text.len < DIRECTORY_LOAD_MAX);
	json = cJSON_ParseWithLength(text.data, text.len);
	assert_non_null(json);
	text_fini(&text);
	return json;
}

static void load_text_matches_measurement(void **state)
{
	struct load load = idle();
	cJSON *json = read_text(&load, 1);

	(void)state;
	assert_null(cJSON_GetObjectItem(json, "engine"));
	assert_null(cJSON_GetObjectItem(json, "peers"));
	assert_null(cJSON_GetObjectItem(json, "ttfb_us"));
	cJSON_Delete(json);
	load.running = 4;
	load.gbps = 12.5;
	load.ttfb_us = 350;
	load.engine.waiting = 0;
	load.engine.kv_free_tokens = 4096;
	json = read_text(&load, 17);
	assert_true(number(json, "seq", NULL) == 17);
	assert_true(number(json, "rooms", "running") == 4);
	assert_true(number(json, "gbps", NULL) == 12.5);
	assert_true(number(json, "engine", "waiting") == 0);
	assert_true(number(json, "engine", "kv_free_tokens") == 4096);
	assert_null(cJSON_GetObjectItem(cJSON_GetObjectItem(json, "engine"), "running"));
	cJSON_Delete(json);
}

static void text_of_the_largest_fits(void **state)
{
	struct load load = {
		.waiting = UINT32_MAX,
		.running = UINT32_MAX,
		.queued = UINT64_MAX,
		.moving = UINT64_MAX,
		.gbps = 1e12,
		.ttfb_us = UINT64_MAX,
		.failed = UINT64_MAX,
		.peer_count = LOAD_PEERS_MAX,
	};

	(void)state;
#define LARGEST(name, help) load.engine.name = ENGINE_LOAD_MOST;
	ENGINE_LOADS(LARGEST)
	for (unsigned int i = 0; i < LOAD_PEERS_MAX; i++)
		load.peers[i] = (struct load_peer){"0123456789abcdef", 1e12};
	cJSON_Delete(read_text(&load, UINT64_MAX));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(rate_is_of_the_last_seconds),
		cmocka_unit_test(first_bytes_are_a_mean_of_rooms),
		cmocka_unit_test(failures_are_of_the_last_minute),
		cmocka_unit_test(counts_falling_restart),
		cmocka_unit_test(load_step_is_published_and_less_is_not),
		cmocka_unit_test(load_is_published_once_in_five_seconds),
		cmocka_unit_test(load_text_matches_measurement),
		cmocka_unit_test(text_of_the_largest_fits),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
