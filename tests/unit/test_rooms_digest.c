/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room.digest: equal after a push between pages of other sizes and other ranks, one byte
 * that differs is named, replies are cut and continued, and a room that is closed
 * meanwhile ends it. In-process cluster, virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/request/commands.h"
#include "daemon/memory/copy.h"
#include "daemon/session/region.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster.h"

#define LAYERS 2u
#define UNITS 4u
#define TOKENS 96u
#define BLOCK 16u
#define VIEWS_SRC "{'kv':{'pages':[5,2,11,3,8,12],'tokens':[0,96]}}"
#define VIEWS_DST "{'kv':{'pages':[3,1,2],'tokens':[0,96]}}"

/* Node 0 prefills all heads in pages of 16, node 1 decodes in pages of 32. */
struct pair {
	struct cluster c;
	struct session *prefill, *decode;
	struct cache src, dst;
};

/* The receiver holds so many heads, from `first`. */
static int setup_heads(void **state, unsigned int first, unsigned int units)
{
	struct pair *t = calloc(1, sizeof(*t));

	cluster_new(&t->c, 7, 2);
	/* copied on the loop: a cluster has no threads */
	for (unsigned int n = 0; n < 2; n++)
		assert_int_equal(copier_new(t->c.loop, 1, 0, &t->c.nodes[n].kvd.copier),
				 0);
	t->prefill = cluster_engine(&t->c, 0, "vllm");
	t->decode = cluster_engine(&t->c, 1, "sglang");
	t->src = (struct cache){.layers = LAYERS,
				.pages = 14,
				.page_tokens = 16,
				.units = UNITS,
				.total_units = UNITS,
				.unit_bytes = 32};
	t->dst = (struct cache){.layers = LAYERS,
				.pages = 8,
				.page_tokens = 32,
				.units = units,
				.first_unit = first,
				.total_units = UNITS,
				.unit_bytes = 32};
	cluster_cache(&t->c, t->prefill, "kv", 0, &t->src);
	cluster_cache(&t->c, t->decode, "kv", 0, &t->dst);
	for (uint64_t i = 0; i < t->src.bytes; i++)
		t->src.base[i] = (uint8_t)(i * 131 + i / 251);
	cluster_ok(&t->c, t->prefill,
		   "{'cmd':'room.open','room':'1','role':'send','pool':%llu}",
		   (unsigned long long)t->src.pool);
	cluster_ok(&t->c, t->decode,
		   "{'cmd':'room.open','room':'1','role':'recv','pool':%llu,"
		   "'sources':['%s']}",
		   (unsigned long long)t->dst.pool, t->c.nodes[0].endpoint);
	cluster_ok(&t->c, t->decode,
		   "{'cmd':'room.bind','room':'1','views':" VIEWS_DST "}");
	cluster_ok(&t->c, t->prefill,
		   "{'cmd':'room.send','room':'1','seq':0,'last':true,'views':" VIEWS_SRC
		   "}");
	cluster_until_state(&t->c, t->decode, "recv", 1, KVD_SUCCESS);
	cluster_until_state(&t->c, t->prefill, "send", 1, KVD_SUCCESS);
	*state = t;
	return 0;
}

static int setup(void **state)
{
	return setup_heads(state, 0, UNITS);
}

static int setup_rank_1_of_2(void **state)
{
	return setup_heads(state, UNITS / 2, UNITS / 2);
}

static int teardown(void **state)
{
	struct pair *t = *state;

	for (unsigned int n = 0; n < 2; n++) {
		copier_free(t->c.nodes[n].kvd.copier);
		t->c.nodes[n].kvd.copier = NULL;
	}
	cluster_free(&t->c);
	cache_close(&t->src);
	cache_close(&t->dst);
	free(t);
	return 0;
}

/* By layer, field (k, v), unit and block. */
struct sums {
	char hex[LAYERS][2][UNITS][TOKENS][17];
	unsigned int count;
	unsigned int page[TOKENS];
};

static void read_units(const cJSON *reply, unsigned int block, struct sums *sums)
{
	const cJSON *unit, *item;

	cJSON_ArrayForEach(unit, cJSON_GetObjectItem(reply, "units")) {
		int layer = cJSON_GetObjectItem(unit, "layer")->valueint;
		int head = cJSON_GetObjectItem(unit, "unit")->valueint;
		bool is_v = !strcmp(cJSON_GetObjectItem(unit, "field")->valuestring, "v");

		cJSON_ArrayForEach(item, cJSON_GetObjectItem(unit, "blocks")) {
			int first = cJSON_GetArrayItem(item, 0)->valueint;
			int end = cJSON_GetArrayItem(item, 1)->valueint;
			char *hex;

			assert_in_range(layer, 0, LAYERS - 1);
			assert_in_range(head, 0, UNITS - 1);
			assert_in_range(first, 0, TOKENS - 1);
			hex = sums->hex[layer][is_v][head][first];
			assert_int_equal(first % (int)block, 0);
			assert_int_equal(end, first + (int)block);
			assert_string_equal(hex, "");
			snprintf(hex, 17, "%s", cJSON_GetArrayItem(item, 3)->valuestring);
			assert_int_equal(strlen(hex), 16);
			sums->page[first] =
				(unsigned int)cJSON_GetArrayItem(item, 2)->valueint;
			sums->count++;
		}
	}
}

static struct sums *digest(struct pair *t, bool of_src, unsigned int block)
{
	struct sums *sums = calloc(1, sizeof(*sums));
	char from[32] = "0";

	for (;;) {
		cJSON *reply;

		cluster_run(&t->c, LOOP_NS_PER_MS); /* so much is copied a turn */
		reply = cluster_call(
			&t->c, of_src ? t->prefill : t->decode,
			"{'cmd':'room.digest','room':'1','block':%u,'from':'%s'%s}",
			block, from, of_src ? ",'views':" VIEWS_SRC : "");
		const cJSON *next;

		assert_true(cJSON_IsTrue(cJSON_GetObjectItem(reply, "ok")));
		read_units(reply, block, sums);
		next = cJSON_GetObjectItem(reply, "next");
		if (next)
			snprintf(from, sizeof(from), "%s", next->valuestring);
		cJSON_Delete(reply);
		if (!next)
			return sums;
	}
}

static void digest_after_a_push_is_equal(void **state)
{
	struct pair *t = *state;
	struct sums *src = digest(t, true, BLOCK), *dst = digest(t, false, BLOCK);

	assert_int_equal(src->count, LAYERS * 2 * UNITS * TOKENS / BLOCK);
	assert_int_equal(dst->count, src->count);
	assert_memory_equal(src->hex, dst->hex, sizeof(src->hex));
	assert_string_not_equal(src->hex[0][0][0][0], src->hex[0][0][1][0]);
	assert_int_equal(src->page[16], 2);
	assert_int_equal(dst->page[16], 3);
	assert_int_equal(dst->page[32], 1);
	free(src);
	free(dst);
}

static void digest_of_a_rank_is_of_the_models_heads(void **state)
{
	struct pair *t = *state;
	struct sums *src = digest(t, true, BLOCK), *dst = digest(t, false, BLOCK);

	assert_int_equal(dst->count, src->count / 2);
	for (unsigned int l = 0; l < LAYERS; l++)
		for (unsigned int f = 0; f < 2; f++) {
			assert_string_equal(dst->hex[l][f][0][0], "");
			assert_memory_equal(src->hex[l][f][UNITS / 2],
					    dst->hex[l][f][UNITS / 2],
					    sizeof(src->hex[l][f]) / 2);
		}
	free(src);
	free(dst);
}

/* Token 37 is the sixth of the second page. */
static void digest_of_a_flipped_byte_differs_there_only(void **state)
{
	struct pair *t = *state;
	struct sums *before = digest(t, false, BLOCK), *after;
	unsigned int differ = 0;

	*cache_at(&t->dst, 1, 1, 1, 37 - 32, 2, 31) ^= 1;
	after = digest(t, false, BLOCK);
	for (unsigned int l = 0; l < LAYERS; l++)
		for (unsigned int f = 0; f < 2; f++)
			for (unsigned int u = 0; u < UNITS; u++)
				for (unsigned int k = 0; k < TOKENS; k += BLOCK)
					differ += strcmp(before->hex[l][f][u][k],
							 after->hex[l][f][u][k]) != 0;
	assert_int_equal(differ, 1);
	assert_string_not_equal(before->hex[1][1][2][32], after->hex[1][1][2][32]);
	free(before);
	free(after);
}

/* Blocks of one token: 1536 of them are one reply. */
static void digest_continues_at_given_place(void **state)
{
	struct pair *t = *state;
	struct sums *all = digest(t, false, 1), *rest = calloc(1, sizeof(*rest));
	cJSON *reply;

	cluster_run(&t->c, LOOP_NS_PER_MS);
	reply = cluster_call(&t->c, t->decode,
			     "{'cmd':'room.digest','room':'1','block':1,'from':'1000'}");

	read_units(reply, 1, rest);
	cJSON_Delete(reply);
	assert_int_equal(all->count, LAYERS * 2 * UNITS * TOKENS);
	assert_int_equal(rest->count, all->count - 1000);
	assert_memory_equal(all->hex[LAYERS - 1][1], rest->hex[LAYERS - 1][1],
			    sizeof(all->hex[0][0]));
	free(all);
	free(rest);
}

static void digest_invalid_is_refused(void **state)
{
	struct pair *t = *state;
	struct session *stranger = cluster_engine(&t->c, 1, "other");

	stranger->admin = false;
	cluster_refused(&t->c, t->prefill, "ESTATE", "{'cmd':'room.digest','room':'1'}");
	cluster_refused(&t->c, t->decode, "EINVAL",
			"{'cmd':'room.digest','room':'1','views':" VIEWS_DST "}");
	cluster_refused(&t->c, stranger, "ENOTFOUND", "{'cmd':'room.digest','room':'1'}");
	cluster_ok(&t->c, t->decode, "{'cmd':'room.close','room':'1'}");
	cluster_refused(&t->c, t->decode, "ENOTFOUND",
			"{'cmd':'room.digest','room':'1'}");
}

static void note(void *arg, const char *text, size_t len)
{
	snprintf(arg, 256, "%.*s", (int)len, text);
}

/* It is asked and not waited for. */
static void ask(struct pair *t, char answer[256])
{
	static const char line[] = "{\"cmd\":\"room.digest\",\"room\":\"1\",\"id\":1}";
	struct request *req = request_new(t->decode, sizeof(line), NULL, 0);

	assert_non_null(req);
	answer[0] = '\0';
	req->on_answer = note;
	req->on_answer_arg = answer;
	req->line = cJSON_Parse(line);
	commands_dispatch(req);
}

static void digest_ends_with_its_room(void **state)
{
	struct pair *t = *state;
	char one[256], two[256];

	ask(t, one);
	ask(t, two);
	assert_string_equal(one, "");
	assert_non_null(strstr(two, "EBUSY"));
	cluster_ok(&t->c, t->decode, "{'cmd':'room.close','room':'1'}");
	cluster_run(&t->c, LOOP_NS_PER_MS);
	assert_non_null(strstr(one, "closed during the command"));
}

/* Teardown finds a session that is left. */
static void digest_ends_with_its_session(void **state)
{
	struct pair *t = *state;
	char answer[256];

	ask(t, answer);
	cluster_engine_dies(&t->c, t->decode);
	assert_string_equal(answer, "");
}

/* Its memory faulted. */
static void digest_of_removed_memory_fails(void **state)
{
	struct pair *t = *state;
	struct region *region = idmap_get(&t->decode->regions, t->dst.region);

	assert_non_null(region);
	atomic_store(&region->memory->dead, true);
	cluster_refused(&t->c, t->decode, "EFAULT", "{'cmd':'room.digest','room':'1'}");
	atomic_store(&region->memory->dead, false);
}

/* Each allocation fails once: an answer in any case, and nothing is left. */
static void digest_without_memory_is_done_or_refused(void **state)
{
	struct pair *t = *state;
	struct cluster_lack lack = {.nth = 0};
	unsigned int refused = 0;

	do {
		cJSON *reply;

		lack.nth++;
		cluster_run(&t->c, LOOP_NS_PER_MS);
		reply = cluster_call_fd(&t->c, t->decode, -1, &lack,
					"{\"cmd\":\"room.digest\",\"room\":\"1\"}");
		refused += !cJSON_IsTrue(cJSON_GetObjectItem(reply, "ok"));
		cJSON_Delete(reply);
	} while (lack.used >= lack.nth);
	assert_true(refused > 3);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(digest_after_a_push_is_equal, setup,
						teardown),
		cmocka_unit_test_setup_teardown(digest_of_a_rank_is_of_the_models_heads,
						setup_rank_1_of_2, teardown),
		cmocka_unit_test_setup_teardown(
			digest_of_a_flipped_byte_differs_there_only, setup, teardown),
		cmocka_unit_test_setup_teardown(digest_continues_at_given_place, setup,
						teardown),
		cmocka_unit_test_setup_teardown(digest_invalid_is_refused, setup,
						teardown),
		cmocka_unit_test_setup_teardown(digest_ends_with_its_room, setup,
						teardown),
		cmocka_unit_test_setup_teardown(digest_ends_with_its_session, setup,
						teardown),
		cmocka_unit_test_setup_teardown(digest_without_memory_is_done_or_refused,
						setup, teardown),
		cmocka_unit_test_setup_teardown(digest_of_removed_memory_fails, setup,
						teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
