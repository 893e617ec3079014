/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks while an allocation of a move's whole life fails, not only of its command
 * (test_alloc_commands.c): of its legs' rooms, of parts that are read back from files, of
 * a start that reads what files hold. A move ends, with or without success, and what it
 * had is given back; the next one succeeds, with the right bytes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster_store.h"
#include "tests/lib/disk_sim.h"
#include "tests/lib/starve.h"

#define MEMORY_BYTES (1u << 20) /* 255 parts or so */
#define DISK_BYTES (UINT64_C(256) << 20)
#define AFTER_NS (100 * LOOP_NS_PER_MS)
#define NTH_MAX 2000u

#define H8(digit) digit digit digit digit digit digit digit digit
#define ID(digit) "'" H8(H8(digit)) "'"
#define IDS "'space':$space,'ids':[" ID("1") "," ID("2") "]"
#define WORDS "'model':'m','scheme':'s','tokens':16"
#define SPACE "a{'cmd':'space.open','pool':$pool_a," WORDS "}"
#define SPACE_CLOSE "a{'cmd':'space.close','space':$space}"
#define PAGES "'pool':$pool_a,'views':{'kv':{'pages':[7,2,3,4,0,9,6,8]}}"
#define PUT "a{'cmd':'chunk.put'," IDS "," PAGES "}"
#define PUT_DURABLE "a{'cmd':'chunk.put','durable':true," IDS "," PAGES "}"
#define MOVE "a{'cmd':'chunk.move','move':$move}"
#define MOVE_CLOSE "a{'cmd':'chunk.close','move':$move}"
#define HOLD "a{'cmd':'chunk.hold'," IDS "}"
#define HOLD_CLOSE "a{'cmd':'chunk.release','hold':$hold}"
#define FETCH "a{'cmd':'chunk.fetch','hold':$hold," PAGES "}"
#define PUBLISH "a{'cmd':'chunk.publish'," IDS "," PAGES "}"
#define WITHDRAW "a{'cmd':'chunk.withdraw'," IDS "}"
#define FETCH_AWAY                                                                   \
	"a{'cmd':'chunk.fetch','hold':$hold,'pool':$pool_a,'views':{'kv':{'pages':[" \
	"1,5,10,11,12,13,14,15]}}}"
#define FIND "a{'cmd':'chunk.find'," IDS "}"
#define DROP "a{'cmd':'chunk.drop'," IDS "}"

struct world {
	struct starve s;
	struct disk_sim *disk; /* NULL: no files */
};

/* True: all allocations of the store's start were had. */
static bool world_begin(struct world *w, uint64_t lack_nth)
{
	struct cluster_store_args args = {.memory_bytes = MEMORY_BYTES,
					  .disk = w->disk,
					  .file_bytes = DISK_BYTES / 2,
					  .lack_nth = lack_nth};

	starve_new(&w->s);
	return cluster_store(&w->s.c, 0, &args);
}

static int setup(void **state)
{
	struct world *w = calloc(1, sizeof(*w));

	assert_non_null(w);
	world_begin(w, 0);
	*state = w;
	return 0;
}

static int setup_with_files(void **state)
{
	struct world *w = calloc(1, sizeof(*w));

	assert_non_null(w);
	assert_int_equal(disk_sim_new(1, DISK_BYTES, &w->disk), 0);
	world_begin(w, 0);
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	starve_free(&w->s);
	disk_sim_free(w->disk);
	free(w);
	return 0;
}

static struct store_figures figures(const struct world *w)
{
	struct store_figures f;

	store_figures(store_of(&w->s.c.nodes[0].kvd), &f);
	return f;
}

/* A number of the answer to a line that must succeed. */
static uint64_t number(struct world *w, const char *line, const char *name)
{
	return cluster_number(starve_try(&w->s, line, false, NULL), name);
}

/* False: the store's start failed for want of memory. */
static bool is_used(struct world *w)
{
	cJSON *answer = starve_try(&w->s, SPACE, false, NULL);
	bool ok = strcmp(starve_code(answer), "ok") == 0;

	if (!ok)
		assert_string_equal(starve_code(answer), "ENOMEM");
	cJSON_Delete(answer);
	return ok;
}

static void say(struct world *w, const char *line)
{
	starve_say(&w->s, line);
}

/* Of 0 and 4: a move that has ended. */
static unsigned int ended(struct world *w)
{
	uint64_t state = number(w, MOVE, "state");

	assert_true(state == KVD_FAILED || state == KVD_SUCCESS);
	say(w, MOVE_CLOSE);
	cluster_run(&w->s.c, LOOP_NS_PER_MS);
	return (unsigned int)state;
}

static uint8_t *byte_of(struct world *w)
{
	return cache_at(&w->s.src, 1, 1, 8, 3, 1, 5);
}

/* The bytes that were put are those that come. */
static void comes_back(struct world *w, uint8_t value)
{
	assert_int_equal(number(w, HOLD, "chunks"), 2);
	*byte_of(w) = 0;
	say(w, FETCH);
	cluster_run(&w->s.c, LOOP_NS_PER_S);
	assert_int_equal(ended(w), KVD_SUCCESS);
	assert_int_equal(*byte_of(w), value);
	say(w, HOLD_CLOSE);
}

static void stores(struct world *w, const char *line, uint8_t value)
{
	*byte_of(w) = value;
	say(w, line);
	cluster_run(&w->s.c, 5 * LOOP_NS_PER_S);
	assert_int_equal(ended(w), KVD_SUCCESS);
}

static void nothing_is_left(struct world *w, int64_t live, const char *what, uint64_t nth)
{
	struct store_figures f = figures(w);

	say(w, DROP);
	say(w, SPACE_CLOSE);
	cluster_run(&w->s.c, LOOP_NS_PER_S);
	f = figures(w);
	assert_int_equal(f.chunks + f.holds + f.moves + f.spaces, 0);
	live = starve_blocks(&w->s) - live;
	if (live > 0)
		fail_msg("%s without allocation %ju: %jd heap blocks more", what,
			 (uintmax_t)nth, (intmax_t)live);
}

/* True when there was an allocation to fail. The command may be refused. */
static bool tries(struct world *w, const char *line, uint64_t nth, bool *done_p)
{
	struct cluster_lack lack = {.nth = nth, .after_ns = AFTER_NS};
	cJSON *answer = starve_try(&w->s, line, false, &lack);

	*done_p = strcmp(starve_code(answer), "ok") == 0;
	if (!*done_p && strcmp(starve_code(answer), "ENOMEM") != 0)
		fail_msg("%s: %s", line, cJSON_PrintUnformatted(answer));
	cJSON_Delete(answer);
	cluster_run(&w->s.c, 2 * LOOP_NS_PER_S);
	return lack.used >= nth;
}

/* ---- moves ---- */

static void put_without_one_allocation_ends(void **state)
{
	struct world *w = *state;
	bool hit = true, done;
	int64_t live = 0;

	for (uint64_t nth = 0; hit; nth++) {
		assert_true(nth < NTH_MAX);
		say(w, SPACE);
		*byte_of(w) = (uint8_t)(nth | 1);
		hit = tries(w, PUT, nth ? nth : NTH_MAX, &done) || !nth;
		if (done)
			ended(w);
		stores(w, PUT, (uint8_t)(nth | 1)); /* again, or there already */
		comes_back(w, (uint8_t)(nth | 1));
		nothing_is_left(w, nth ? live : INT64_MAX, "put", nth);
		live = nth ? live : starve_blocks(&w->s);
	}
}

static void fetch_without_one_allocation_ends(void **state)
{
	struct world *w = *state;
	bool hit = true, done;
	int64_t live = 0;

	for (uint64_t nth = 0; hit; nth++) {
		assert_true(nth < NTH_MAX);
		say(w, SPACE);
		stores(w, PUT, 77);
		say(w, HOLD);
		*byte_of(w) = 0;
		hit = tries(w, FETCH, nth ? nth : NTH_MAX, &done) || !nth;
		if (done && ended(w) == KVD_SUCCESS)
			assert_int_equal(*byte_of(w), 77);
		say(w, HOLD_CLOSE);
		comes_back(w, 77);
		nothing_is_left(w, nth ? live : INT64_MAX, "fetch", nth);
		live = nth ? live : starve_blocks(&w->s);
	}
}

/* ---- engines' pages ---- */

/* Each of the three commands in turn lacks an allocation; whatever comes of it, the
 * chunks are there or not, and nobody reads pages that a withdrawal has given back. */
static void pages_without_one_allocation_are_there_or_not(void **state)
{
	static const char *const lines[] = {PUBLISH, FETCH_AWAY, WITHDRAW};
	struct world *w = *state;
	uint8_t *away = cache_at(&w->s.src, 1, 1, 15, 3, 1, 5);
	int64_t live = 0;

	for (unsigned int at = 0; at < 3; at++) {
		bool hit = true, done;

		for (uint64_t nth = 0; hit; nth++) {
			uint64_t lacks = nth ? nth : NTH_MAX;

			assert_true(nth < NTH_MAX);
			say(w, SPACE);
			*byte_of(w) = (uint8_t)(nth | 1);
			*away = 0;
			if (at == 0) {
				hit = tries(w, PUBLISH, lacks, &done) || !nth;
				if (done)
					ended(w);
			}
			stores(w, PUBLISH, (uint8_t)(nth | 1));
			assert_int_equal(figures(w).published, 2);
			assert_int_equal(number(w, HOLD, "chunks"), 2);
			if (at == 1) {
				hit = tries(w, FETCH_AWAY, lacks, &done) || !nth;
				if (done && ended(w) == KVD_SUCCESS)
					assert_int_equal(*away, nth | 1);
			}
			say(w, FETCH_AWAY);
			cluster_run(&w->s.c, LOOP_NS_PER_S);
			assert_int_equal(ended(w), KVD_SUCCESS);
			assert_int_equal(*away, nth | 1);
			if (at == 2) {
				hit = tries(w, WITHDRAW, lacks, &done) || !nth;
				if (done)
					assert_int_equal(ended(w), KVD_SUCCESS);
			}
			starve_word(&w->s, "fetch", "%ju", /* while they are given back */
				    (uintmax_t)number(w, FETCH_AWAY, "move"));
			stores(w, WITHDRAW, 0);
			assert_int_equal(figures(w).published, 0);
			assert_int_equal(number(w, FIND, "chunks"), 0);
			say(w, HOLD_CLOSE);
			cluster_run(&w->s.c, LOOP_NS_PER_S);
			starve_say(&w->s, "a{'cmd':'chunk.close','move':$fetch}");
			nothing_is_left(w, nth ? live : INT64_MAX, lines[at], nth);
			live = nth ? live : starve_blocks(&w->s);
		}
	}
}

/* A rank of half the heads, of longer pages: the planner is asked what of the parts that
 * are there serves it, and its answer is remembered. */
#define FIELD(name, at)                                                                \
	"{'name':'" name "','buffer':0,'offset':" at ",'page_stride':512,"             \
	"'token_stride':32,'unit_stride':32,'unit_bytes':32,'first_unit':0,'units':1," \
	"'total_units':2}"
#define LAYER(n) "{'layer':" n ",'fields':[" FIELD("k", "0") "," FIELD("v", "2048") "]}"
#define RANK_SPACE                                                                      \
	"a{'cmd':'space.open','layout':{'rank':0,'buffers':[65536],'views':{'kv':{"     \
	"'page_tokens':16,'pages':4,'layers':[" LAYER("0") "," LAYER("1") "]}}}," WORDS \
									  "}"

static void cover_without_memory_is_retried(void **state)
{
	struct world *w = *state;
	bool hit = true;

	say(w, SPACE);
	stores(w, PUT, 7);
	for (uint64_t nth = 1; hit; nth++) {
		struct cluster_lack lack = {.nth = nth, .lasting = true};

		say(w, RANK_SPACE);
		cJSON_Delete(starve_try(&w->s, FIND, false, &lack));
		hit = lack.used >= nth;
		assert_int_equal(number(w, FIND, "chunks"), 2);
		say(w, SPACE_CLOSE);
	}
}

/* ---- kinds of parts ---- */

#define KINDS 65u /* one more than a space has */

static void part_of_one_kind_too_many_takes_the_place_of_the_oldest(void **state)
{
	struct world *w = *state;
	struct starve *s = &w->s;

	for (unsigned int i = 0; i < KINDS; i++) {
		cJSON *answer;

		starve_word(s, "layer", "%u", i);
		starve_say(s, "a{'cmd':'pool.register','name':'layer.$layer','regions':[{"
			      "'region':$region_a}],'layout':{'rank':0,'buffers':[4096],"
			      "'views':{'kv':{'page_tokens':16,'pages':4,'layers':[{"
			      "'layer':$layer,'fields':[" FIELD("k", "0") "]}]}}}}");
		starve_say(s, "a{'cmd':'space.open','pool':$pool," WORDS "}");
		answer = starve_try(s,
				    "a{'cmd':'chunk.put'," IDS ",'pool':$pool,'views':{"
				    "'kv':{'pages':[0,1]}}}",
				    false, NULL);
		assert_string_equal(starve_code(answer), "ok");
		cJSON_Delete(answer);
		cluster_run(&s->c, LOOP_NS_PER_S);
		starve_say(s, "a{'cmd':'pool.unregister','pool':$pool}");
	}
	assert_int_equal(list_first(&store_of(&w->s.c.nodes[0].kvd)->spaces,
				    struct store_space, link)
				 ->class_count,
			 KINDS - 1);
}

/* ---- files ---- */

#define FLOOD 300u /* more parts than the memory takes */

/* Other chunks take the memory. */
static void flood(struct world *w, uint64_t nth)
{
	size_t size = FLOOD * 100;
	char *text = malloc(size), *at = text;
	const struct starve *s = &w->s;
	cJSON *answer;

	at += snprintf(at, size, "{'cmd':'chunk.put','space':%llu,'pool':%llu,'ids':[",
		       (unsigned long long)number(w, SPACE, "space"),
		       (unsigned long long)s->src.pool);
	for (unsigned int i = 0; i < FLOOD; i++)
		at += sprintf(at, "%s'%032llx%032x'", i ? "," : "",
			      (unsigned long long)nth, i + 3);
	at += sprintf(at, "],'views':{'kv':{'pages':[0");
	for (unsigned int i = 1; i < 4 * FLOOD; i++)
		at += sprintf(at, ",0");
	sprintf(at, "]}}}");
	answer = cluster_call(&w->s.c, w->s.a, "%s", text);
	free(text);
	assert_true(cJSON_IsNumber(cJSON_GetObjectItem(answer, "move")));
	starve_word(&w->s, "move", "%.0f",
		    cJSON_GetObjectItem(answer, "move")->valuedouble);
	cJSON_Delete(answer);
	cluster_run(&w->s.c, LOOP_NS_PER_S);
	ended(w);
	say(w, SPACE_CLOSE);
}

/* What a hold finds, it may fetch; what it does not, may be put. */
static void hold_is_good(struct world *w, uint8_t value)
{
	uint64_t chunks = number(w, HOLD, "chunks");

	if (chunks == 2) {
		*byte_of(w) = 0;
		say(w, FETCH);
		cluster_run(&w->s.c, LOOP_NS_PER_S);
		if (ended(w) == KVD_SUCCESS)
			assert_int_equal(*byte_of(w), value);
	}
	say(w, HOLD_CLOSE);
	stores(w, PUT, value);
	comes_back(w, value);
}

static void part_without_memory_is_read_or_a_miss(void **state)
{
	struct world *w = *state;
	bool hit = true, done;
	uint64_t read = 0, space;

	for (uint64_t nth = 1; hit; nth++) {
		assert_true(nth < NTH_MAX);
		space = number(w, SPACE, "space");
		stores(w, PUT_DURABLE, 99);
		flood(w, nth);
		starve_word(&w->s, "space", "%ju", (uintmax_t)space);
		hit = tries(w, HOLD, nth, &done);
		read += figures(w).files.read;
		if (done)
			say(w, HOLD_CLOSE);
		hold_is_good(w, 99);
		say(w, DROP);
		say(w, SPACE_CLOSE);
		cluster_run(&w->s.c, LOOP_NS_PER_S);
	}
	assert_true(read > 0);
}

static void start_without_one_allocation_has_chunks_or_misses(void **state)
{
	struct world *w = *state;
	bool had = false;

	for (uint64_t nth = 1; !had; nth++) {
		assert_true(nth < NTH_MAX);
		assert_true(is_used(w));
		stores(w, PUT_DURABLE, 55);
		starve_free(&w->s);
		had = world_begin(w, nth);
		if (is_used(w))
			hold_is_good(w, 55);
		starve_free(&w->s);
		disk_sim_free(w->disk);
		assert_int_equal(disk_sim_new(1, DISK_BYTES, &w->disk), 0);
		world_begin(w, 0);
	}
}

static bool is_scanned(void *arg)
{
	return figures(arg).files.scanned;
}

static bool has_memory(void *arg)
{
	return figures(arg).ready;
}

/* The pool of what the files hold is being made yet. */
static void fetch_waits_for_its_parts_pool(void **state)
{
	struct world *w = *state;
	struct offload *offload;

	say(w, SPACE);
	stores(w, PUT_DURABLE, 44);
	starve_free(&w->s);
	starve_new(&w->s);
	offload = w->s.c.nodes[0].kvd.offload;
	cluster_store_begin(&w->s.c, 0,
			    &(struct cluster_store_args){.memory_bytes = MEMORY_BYTES,
							 .disk = w->disk,
							 .file_bytes = DISK_BYTES / 2});
	cluster_until(&w->s.c, has_memory, w, "memory");
	offload_hold(offload, true);
	cluster_until(&w->s.c, is_scanned, w, "files");
	say(w, SPACE);
	assert_int_equal(number(w, HOLD, "chunks"), 2);
	say(w, FETCH);
	cluster_run(&w->s.c, 100 * LOOP_NS_PER_MS);
	offload_hold(offload, false);
	cluster_run(&w->s.c, LOOP_NS_PER_S);
	assert_int_equal(ended(w), KVD_SUCCESS);
	assert_int_equal(*byte_of(w), 44);
	say(w, HOLD_CLOSE);
}

static const char *const three_spaces[] = {
	"a{'cmd':'space.open','pool':$pool_a,'model':'x','scheme':'s','tokens':16}",
	"a{'cmd':'space.open','pool':$pool_a,'model':'y','scheme':'s','tokens':16}",
	"a{'cmd':'space.open','pool':$pool_a,'model':'z','scheme':'s','tokens':16}",
};

static void store_in_three_spaces(struct world *w)
{
	for (unsigned int i = 0; i < ARRAY_LEN(three_spaces); i++) {
		say(w, three_spaces[i]);
		stores(w, PUT_DURABLE, 33);
	}
}

static void drop_in_three_spaces(struct world *w)
{
	for (unsigned int i = 0; i < ARRAY_LEN(three_spaces); i++) {
		say(w, three_spaces[i]);
		say(w, DROP);
	}
	say(w, "~9000"); /* their slots say so */
}

/* A start removes, one behind the other, the descriptions that no part is of. One that is
 * written meanwhile must not go with them. */
static void description_reused_is_kept(void **state)
{
	struct world *w = *state;

	disk_sim_delays(w->disk, 100 * LOOP_NS_PER_MS, 300 * LOOP_NS_PER_MS);
	store_in_three_spaces(w);
	drop_in_three_spaces(w);
	starve_free(&w->s);
	world_begin(w, 0);
	store_in_three_spaces(w);
	starve_free(&w->s);
	world_begin(w, 0);
	for (unsigned int i = 0; i < ARRAY_LEN(three_spaces); i++) {
		say(w, three_spaces[i]);
		comes_back(w, 33);
	}
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
#define FILE_CASE(name) cmocka_unit_test_setup_teardown(name, setup_with_files, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(put_without_one_allocation_ends),
		CASE(fetch_without_one_allocation_ends),
		CASE(pages_without_one_allocation_are_there_or_not),
		CASE(cover_without_memory_is_retried),
		CASE(part_of_one_kind_too_many_takes_the_place_of_the_oldest),
		FILE_CASE(part_without_memory_is_read_or_a_miss),
		FILE_CASE(start_without_one_allocation_has_chunks_or_misses),
		FILE_CASE(fetch_waits_for_its_parts_pool),
		FILE_CASE(description_reused_is_kept),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("alloc_chunks", tests, NULL, NULL);
}
