/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Attends while an allocation of a post's whole life fails, at the requester or the
 * holder: of its entry, its legs, the messages, the queues, what is gathered. A post
 * ends, with success and the right rows or with ENOMEM; the next one succeeds; nothing is
 * left.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/attend/attend.h"
#include "daemon/base/account.h"
#include "daemon/base/mem.h"
#include "proto/base64.h"
#include "tests/lib/attend_world.h"

#define SOON (50 * LOOP_NS_PER_MS)
#define NTH_MAX 500u

static uint64_t held(const struct attend_world *w)
{
	return w->engine[AW_REQUESTER]->account->bytes[ACCOUNT_ATTENDS] +
	       attend_world_remote(w, AW_HOLDER)->account->bytes[ACCOUNT_ATTENDS];
}

static bool lacks_memory(const cJSON *answer)
{
	const cJSON *error = cJSON_GetObjectItem(answer, "error");

	return error &&
	       strcmp(cJSON_GetObjectItem(error, "code")->valuestring, "ENOMEM") == 0;
}

/* The seat's parts, by the socket; true when there was an allocation to fail. */
static bool tries(struct attend_world *w, const struct kvd_ring_part *parts,
		  unsigned int count, const uint32_t *select, unsigned int chosen,
		  uint64_t nth)
{
	struct cluster_lack lack = {.nth = nth, .after_ns = SOON};
	struct kvd_ring_entry e = attend_world_entry(w, 0, 1);
	char text[4096], entry[BASE64_CHARS(sizeof(e)) + 1], data[2048] = "";
	uint8_t bytes[512];
	cJSON *answer;

	e.n1 = count;
	e.bytes = (uint32_t)(count * sizeof(*parts) + chosen * sizeof(*select));
	assert_true(e.bytes <= sizeof(bytes));
	memcpy(bytes, parts, count * sizeof(*parts));
	if (chosen)
		memcpy(bytes + count * sizeof(*parts), select, chosen * sizeof(*select));
	base64_encode(&e, sizeof(e), entry);
	base64_encode(bytes, e.bytes, data);
	snprintf(text, sizeof(text),
		 "{\"cmd\":\"xfer.submit\",\"entry\":\"%s\",\"data\":\"%s\"}", entry,
		 data);
	answer = cluster_call_fd(&w->c, w->engine[AW_REQUESTER], -1, &lack, text);
	if (!cJSON_HasObjectItem(answer, "ok") && !lacks_memory(answer))
		fail_msg("%s", cJSON_PrintUnformatted(answer));
	cJSON_Delete(answer);
	cluster_run(&w->c, SOON);
	return lack.used >= nth;
}

static unsigned int gen(const struct attend_world *w)
{
	return kvd_word_gen(slot_read(w->engine[AW_REQUESTER], AW_SLOT).word);
}

static bool is_up(void *arg)
{
	struct attend_world *w = arg;
	const struct remote *remote = attend_world_remote(w, AW_REQUESTER);

	return remote->peer && sm_state(&remote->peer->sm) == PEER_UP && remote->ready;
}

/* Without memory for a message its line goes down, and holds with it. */
static void hold_again(struct attend_world *w, struct kvd_ring_part *part)
{
	cluster_until(&w->c, is_up, w, "the holder");
	cluster_ok(&w->c, w->engine[AW_REQUESTER], "{'cmd':'chunk.release','hold':%llu}",
		   (unsigned long long)part->hold);
	part->hold = attend_world_hold(w, AW_REQUESTER, 1, AW_CHUNKS, 600000);
}

static void sweep(struct attend_world *w, struct kvd_ring_part *parts, unsigned int count,
		  const uint32_t *select, unsigned int chosen, bool far)
{
	unsigned int failed = 0;
	uint64_t before = held(w);
	bool hit = true;

	attend_world_rows(w, 0, 3);
	for (uint64_t nth = 1; hit; nth++) {
		unsigned int was = gen(w);

		assert_true(nth < NTH_MAX);
		hit = tries(w, parts, count, select, chosen, nth);
		if (gen(w) == was) { /* no memory for the line that said it */
			w->gens[0]--;
			failed++;
			continue;
		}
		cluster_run(&w->c, 2 * LOOP_NS_PER_S); /* a line that was lost says so */
		if (attend_world_state(w, 0) == KVD_FAILED)
			failed++;
		else
			attend_world_right(w, 0, 1, 64, select, chosen / 2);
		attend_world_quiet(w);
		assert_int_equal(held(w), before);
		if (far)
			hold_again(w, &parts[0]);
	}
	print_message("%u ended without success\n", failed);
	assert_true(failed > 3);
}

static void post_without_one_allocation_ends(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part part = attend_world_part(w->near);
	const uint32_t select[6] = {3, 5, 63, 0, UINT32_MAX, 7};

	sweep(w, &part, 1, NULL, 0, false);
	part.per_token = 3;
	sweep(w, &part, 1, select, 6, false);
}

static void post_to_another_daemon_without_one_allocation_ends(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part parts[2] = {attend_world_part(w->hold),
					 attend_world_part(w->near)};

	parts[0].count = 2;
	parts[1].first = parts[1].count = 2;
	sweep(w, parts, 2, NULL, 0, true);
}

static void open_without_one_allocation_is_refused(void **state)
{
	struct attend_world *w = *state;
	bool hit = true;
	char text[512];

	snprintf(text, sizeof(text),
		 "{\"cmd\":\"attention.open\",\"region\":%llu,\"rows\":8,\"seats\":4,"
		 "\"kind\":\"gqa\",\"q_type\":\"bf16\",\"kv_type\":\"bf16\",\"heads\":4,"
		 "\"kv_heads\":4,\"dqk\":16,\"dv\":16,\"scale\":0.25,\"key\":\"k\","
		 "\"value\":\"v\",\"rope\":{\"first\":0,\"dims\":4,\"pairs\":\"halves\","
		 "\"inv_freq\":[1,0.5]}}",
		 (unsigned long long)w->region);
	for (uint64_t nth = 1; hit; nth++) {
		struct cluster_lack lack = {.nth = nth};
		cJSON *answer =
			cluster_call_fd(&w->c, w->engine[AW_REQUESTER], -1, &lack, text);
		const cJSON *id = cJSON_GetObjectItem(answer, "attend");

		assert_true(nth < NTH_MAX);
		hit = lack.used >= nth;
		if (id)
			cluster_ok(&w->c, w->engine[AW_REQUESTER],
				   "{'cmd':'attention.close','attend':%.0f}",
				   id->valuedouble);
		else
			assert_true(lacks_memory(answer));
		cJSON_Delete(answer);
	}
}

/* At either end; without memory for a message its line goes down. */
static void calibration_without_one_allocation_ends(void **state)
{
	struct attend_world *w = *state;
	unsigned int done = 0, failed = 0;
	bool hit = true;
	char text[256];

	for (uint64_t nth = 1; hit; nth++) {
		struct cluster_lack lack = {.nth = nth, .after_ns = SOON};
		const cJSON *error;
		cJSON *answer;

		assert_true(nth < NTH_MAX);
		cluster_until(&w->c, is_up, w, "the holder");
		snprintf(text, sizeof(text),
			 "{\"cmd\":\"cost.calibrate\",\"endpoint\":\"%s\",\"rows\":1,"
			 "\"rounds\":3}",
			 w->c.nodes[AW_HOLDER].endpoint);
		answer = cluster_call_fd(&w->c, w->engine[AW_REQUESTER], -1, &lack, text);
		error = cJSON_GetObjectItem(answer, "error");
		if (error && !lacks_memory(answer))
			assert_string_equal(
				cJSON_GetObjectItem(error, "code")->valuestring, "EPEER");
		hit = lack.used >= nth;
		done += !error;
		failed += error != NULL;
		cJSON_Delete(answer);
		cluster_run(&w->c, 2 * LOOP_NS_PER_S);
		attend_world_quiet(w);
	}
	print_message("%u ended without success\n", failed);
	assert_true(done > 0 && failed > 3);
}

#define CASE(name) \
	cmocka_unit_test_setup_teardown(name, attend_world_setup, attend_world_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(post_without_one_allocation_ends),
		CASE(post_to_another_daemon_without_one_allocation_ends),
		CASE(open_without_one_allocation_is_refused),
		CASE(calibration_without_one_allocation_ends),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("alloc_attend", tests, NULL, NULL);
}
