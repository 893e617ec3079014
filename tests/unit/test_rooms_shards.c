/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Context parallelism through rooms: n prefill ranks that each hold some of a request's
 * tokens, m decode ranks that hold others. Every byte of every token is compared.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/room/room.h"
#include "daemon/room/room_cover.h"
#include "daemon/room/rooms.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster.h"
#include "tests/sim/fake.h"

#define RANKS 3
#define TOKENS 37u

struct shards {
	struct cluster c;
	unsigned int n, m, run;
	struct cache src[RANKS], dst[RANKS];
	struct session *prefill[RANKS], *decode[RANKS];
	char sources[512];
};

static bool holds(const struct cache *k, unsigned int t)
{
	return !k->shard_size || t / k->shard_run % k->shard_size == k->shard_rank;
}

static uint8_t pattern(unsigned int l, unsigned int f, unsigned int t, unsigned int b)
{
	return (uint8_t)(1 + (l * 71 + f * 31 + t * 13 + b * 5) % 250);
}

/* Pages are taken from the end: place p of the tokens held lies in page 15 - p / 4. */
static uint8_t *byte_of(const struct cache *k, unsigned int l, unsigned int f,
			unsigned int t, unsigned int b)
{
	unsigned int slot = 0;

	for (unsigned int u = 0; u < t; u++)
		slot += holds(k, u);
	return cache_at(k, l, f, k->pages - 1 - slot / k->page_tokens,
			slot % k->page_tokens, 0, b);
}

static void fill(const struct cache *k)
{
	for (unsigned int t = 0; t < TOKENS; t++)
		for (unsigned int i = 0; holds(k, t) && i < k->layers * 2; i++)
			for (unsigned int b = 0; b < k->unit_bytes; b++)
				*byte_of(k, i / 2, i % 2, t, b) =
					pattern(i / 2, i % 2, t, b);
}

/* The bytes of its tokens from `from` on, and no others. */
static void check(const struct cache *k, unsigned int from)
{
	uint64_t wanted = 0, there = 0;

	for (unsigned int t = from; t < TOKENS; t++)
		for (unsigned int i = 0; holds(k, t) && i < k->layers * 2; i++)
			for (unsigned int b = 0; b < k->unit_bytes; b++, wanted++)
				assert_int_equal(*byte_of(k, i / 2, i % 2, t, b),
						 pattern(i / 2, i % 2, t, b));
	for (uint64_t i = 0; i < k->bytes; i++)
		there += k->base[i] != 0;
	assert_int_equal(there, wanted);
}

static void cache_make(struct shards *s, struct session *session, unsigned int size,
		       unsigned int rank, struct cache *k)
{
	*k = (struct cache){.layers = 2,
			    .pages = 16,
			    .page_tokens = 4,
			    .units = 1,
			    .total_units = 1,
			    .unit_bytes = 16};
	if (size > 1) {
		k->shard_size = size;
		k->shard_rank = rank;
		k->shard_run = s->run;
	}
	cluster_cache(&s->c, session, "kv", rank, k);
}

static void shards_new(struct shards *s, unsigned int n, unsigned int m, unsigned int run)
{
	size_t len = 0;

	*s = (struct shards){.n = n, .m = m, .run = run};
	cluster_new(&s->c, n * 100 + m * 10 + run, n + m);
	for (unsigned int i = 0; i < n; i++) {
		s->prefill[i] = cluster_engine(&s->c, i, "prefill");
		cache_make(s, s->prefill[i], n, i, &s->src[i]);
		fill(&s->src[i]);
		len += (size_t)snprintf(s->sources + len, sizeof(s->sources) - len,
					"%s{'endpoint':'%s','pool':'kv','rank':%u}",
					i ? "," : "", s->c.nodes[i].endpoint, i);
	}
	for (unsigned int i = 0; i < m; i++) {
		s->decode[i] = cluster_engine(&s->c, n + i, "decode");
		cache_make(s, s->decode[i], m, i, &s->dst[i]);
	}
}

static void shards_free(struct shards *s)
{
	for (unsigned int i = 0; i < s->n; i++)
		cache_close(&s->src[i]);
	for (unsigned int i = 0; i < s->m; i++)
		cache_close(&s->dst[i]);
	cluster_free(&s->c);
}

/* The pages of a cache from slot `slot` on, of tokens [begin, end), after `begin`. */
static const char *view_of(const struct cache *k, unsigned int begin, unsigned int end)
{
	static char text[256];
	unsigned int turn = k->shard_size ? k->shard_size * k->shard_run : 1;
	unsigned int first = begin / turn * turn, slots[2] = {0};
	size_t len;

	while (first % (turn * k->page_tokens)) /* the list starts with a page */
		first -= turn;
	for (unsigned int t = 0; t < end; t++) {
		slots[0] += t < first && holds(k, t);
		slots[1] += holds(k, t);
	}
	len = (size_t)snprintf(text, sizeof(text),
			       "{'first_token':%u,'tokens':[%u,%u],'pages':[", first,
			       begin, end);
	for (unsigned int p = slots[0] / 4; p < (slots[1] + 3) / 4; p++)
		len += (size_t)snprintf(text + len, sizeof(text) - len, "%s%u",
					p > slots[0] / 4 ? "," : "", k->pages - 1 - p);
	snprintf(text + len, sizeof(text) - len, "]}");
	return text;
}

static void ends(struct shards *s, const char *role, const char *of, int state)
{
	for (unsigned int i = 0; i < s->m; i++)
		cluster_until_state(&s->c, s->decode[i], role, 1, state);
	for (unsigned int i = 0; i < s->n; i++)
		cluster_until_state(&s->c, s->prefill[i], of, 1, state);
}

static void open_push(struct shards *s, unsigned int from)
{
	for (unsigned int i = 0; i < s->n; i++)
		cluster_ok(&s->c, s->prefill[i],
			   "{'cmd':'room.open','room':'1','role':'send','pool':%llu}",
			   (unsigned long long)s->src[i].pool);
	for (unsigned int i = 0; i < s->m; i++) {
		cluster_ok(&s->c, s->decode[i],
			   "{'cmd':'room.open','room':'1','role':'recv','pool':%llu,"
			   "'receivers':%u,'sources':[%s]}",
			   (unsigned long long)s->dst[i].pool, s->m, s->sources);
		cluster_ok(&s->c, s->decode[i],
			   "{'cmd':'room.bind','room':'1','views':{'kv':%s}}",
			   view_of(&s->dst[i], from, TOKENS));
	}
}

static void give(struct shards *s, unsigned int rank, unsigned int seq,
		 unsigned int begin, unsigned int end)
{
	cluster_ok(&s->c, s->prefill[rank],
		   "{'cmd':'room.send','room':'1','seq':%u,'last':%s,'views':{'kv':%s}}",
		   seq, end == TOKENS ? "true" : "false",
		   view_of(&s->src[rank], begin, end));
}

static void push(unsigned int n, unsigned int m, unsigned int run, unsigned int from)
{
	struct shards s;

	shards_new(&s, n, m, run);
	open_push(&s, from);
	for (unsigned int i = 0; i < n; i++) {
		if (from < 24)
			give(&s, i, 0, from, 24);
		give(&s, i, from < 24, from < 24 ? 24 : from, TOKENS);
	}
	ends(&s, "recv", "send", KVD_SUCCESS);
	for (unsigned int i = 0; i < m; i++)
		check(&s.dst[i], from);
	shards_free(&s);
}

static void pull(unsigned int n, unsigned int m, unsigned int run)
{
	struct shards s;

	shards_new(&s, n, m, run);
	for (unsigned int i = 0; i < n; i++)
		cluster_ok(&s.c, s.prefill[i],
			   "{'cmd':'room.open','room':'1','role':'offer','pool':%llu,"
			   "'receivers':%u,'views':{'kv':%s}}",
			   (unsigned long long)s.src[i].pool, m,
			   view_of(&s.src[i], 0, TOKENS));
	for (unsigned int i = 0; i < m; i++)
		cluster_ok(&s.c, s.decode[i],
			   "{'cmd':'room.open','room':'1','role':'pull','pool':%llu,"
			   "'sources':[%s],'views':{'kv':%s}}",
			   (unsigned long long)s.dst[i].pool, s.sources,
			   view_of(&s.dst[i], 0, TOKENS));
	ends(&s, "pull", "offer", KVD_SUCCESS);
	for (unsigned int i = 0; i < m; i++)
		check(&s.dst[i], 0);
	shards_free(&s);
}

static void every_division_pushes_every_token_once(void **state)
{
	static const unsigned int runs[] = {1, 2, 4, 8};

	(void)state;
	for (unsigned int n = 1; n <= RANKS; n++)
		for (unsigned int m = 1; m <= RANKS; m++)
			for (unsigned int i = 0; i < 4; i++)
				push(n, m, runs[i], 0);
}

static void every_division_pulls_every_token_once(void **state)
{
	(void)state;
	for (unsigned int n = 1; n <= RANKS; n++)
		for (unsigned int m = 1; m <= RANKS; m++) {
			pull(n, m, 1);
			pull(n, m, 4);
		}
}

/* The decode side has the first 24 or 30 tokens: a prefix hit, in a turn or not. */
static void prefix_hits_leave_the_rest(void **state)
{
	(void)state;
	push(2, 1, 1, 24);
	push(2, 3, 4, 24);
	push(3, 2, 1, 30);
	push(1, 2, 8, 36);
}

/* Of two sources one has all its tokens read and confirmed, the other gets stuck: the
 * pages of the first are whole. */
static void pages_of_confirmed_source_are_reported(void **state)
{
	const struct fake_rule stuck = {
		.fault = FAKE_STUCK, .kinds = 1 << XP_READ, .skip = 1, .times = 1};
	const struct room *room;
	struct shards s;
	uint8_t *bits;

	(void)state;
	shards_new(&s, 2, 1, 4);
	for (unsigned int i = 0; i < 2; i++)
		cluster_ok(&s.c, s.prefill[i],
			   "{'cmd':'room.open','room':'1','role':'offer','pool':%llu,"
			   "'views':{'kv':%s}}",
			   (unsigned long long)s.src[i].pool,
			   view_of(&s.src[i], 0, TOKENS));
	assert_int_equal(fake_script(s.c.bytes, &stuck), 0);
	cluster_ok(
		&s.c, s.decode[0],
		"{'cmd':'room.open','room':'1','role':'pull','pool':%llu,'sources':[%s],"
		"'timeouts':{'stall_ms':500},'views':{'kv':%s}}",
		(unsigned long long)s.dst[0].pool, s.sources,
		view_of(&s.dst[0], 0, TOKENS));
	cluster_until_state(&s.c, s.decode[0], "pull", 1, KVD_FAILED);
	room = rooms_find(rooms_of(&s.c.nodes[2].kvd), s.decode[0], ROOM_PULL, 1);
	assert_int_equal(room_landed_pages(room, 0, &bits), 0);
	for (unsigned int p = 0; p < (TOKENS + 3) / 4; p++) /* tokens 4p to 4p + 3 */
		assert_int_equal(bits[p / 8] >> p % 8 & 1, p % 2 == 0);
	mem_free(bits);
	cluster_ok(&s.c, s.prefill[1], "{'cmd':'room.abort','room':'1'}");
	cluster_until_state(&s.c, s.prefill[1], "offer", 1, KVD_FAILED);
	shards_free(&s);
}

/* A rank whose tokens never arrive is reported, and the others' pages as complete. */
static void shard_missing_fails_the_room(void **state)
{
	struct shards s;

	(void)state;
	shards_new(&s, 2, 1, 4);
	open_push(&s, 0);
	give(&s, 0, 0, 0, TOKENS);
	cluster_ok(&s.c, s.prefill[1],
		   "{'cmd':'room.send','room':'1','seq':0,'last':true,'views':{'kv':%s}}",
		   view_of(&s.src[1], 0, 24));
	ends(&s, "recv", "send", KVD_FAILED);
	assert_int_equal(
		rooms_find(rooms_of(&s.c.nodes[2].kvd), s.decode[0], ROOM_RECV, 1)
			->error->code,
		ERR_SHORT);
	shards_free(&s);
}

static void page_lists_not_fitting_the_shard_are_refused(void **state)
{
	struct shards s;

	(void)state;
	shards_new(&s, 2, 1, 4);
	open_push(&s, 0);
	cluster_refused(
		&s.c, s.prefill[0], "EINVAL",
		"{'cmd':'room.send','room':'1','seq':0,'views':{'kv':{'pages':[3]}}}");
	cluster_refused(
		&s.c, s.prefill[0], "ERANGE",
		"{'cmd':'room.send','room':'1','seq':0,'views':{'kv':{'pages':[3],"
		"'first_token':4,'tokens':[4,8]}}}");
	cluster_refused(
		&s.c, s.prefill[0], "ERANGE", /* the page ends with token 3 */
		"{'cmd':'room.send','room':'1','seq':0,'views':{'kv':{'pages':[3],"
		"'tokens':[0,9]}}}");
	cluster_ok(&s.c, s.prefill[0],
		   "{'cmd':'room.send','room':'1','seq':0,'views':{'kv':{'pages':[15],"
		   "'tokens':[0,8]}}}");
	cluster_ok(&s.c, s.prefill[0], "{'cmd':'room.abort','room':'1'}");
	ends(&s, "recv", "send", KVD_FAILED);
	shards_free(&s);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_division_pushes_every_token_once),
		cmocka_unit_test(every_division_pulls_every_token_once),
		cmocka_unit_test(prefix_hits_leave_the_rest),
		cmocka_unit_test(pages_of_confirmed_source_are_reported),
		cmocka_unit_test(shard_missing_fails_the_room),
		cmocka_unit_test(page_lists_not_fitting_the_shard_are_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
