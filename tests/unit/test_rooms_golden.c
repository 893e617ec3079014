/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results of SGLang (tests/golden): pairs of ranks, the tokens of each and the cuts of a
 * prefill, through real rooms: opened and filled as SGLang does, they succeed, and every
 * byte is at SGLang's address.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/kvd_status.h"
#include "tests/lib/shapes.h"
#include "tests/lib/handover.h"
#include "tests/lib/plan_golden.h"

/* ---- ranks ---- */

#define LAYERS 4u
#define HEADS 8u
#define HEAD_BYTES 16u

static struct layout *side(bool mla, uint32_t number, struct shape_tp tp, uint32_t stage,
			   uint32_t stages)
{
	static const uint32_t ids[LAYERS] = {0, 1, 2, 3};
	const struct shape_sglang_kv kv = {.view = "kv",
					   .page_size = 4,
					   .pages = 14,
					   .layer_ids = ids + stage * LAYERS / stages,
					   .layer_count = LAYERS / stages,
					   .kv_heads = HEADS,
					   .head_bytes = HEAD_BYTES,
					   .tp = tp};
	struct layout *layout;

	must(shape_new(number, &layout));
	must(mla ? shape_sglang_mla(layout, &kv) : shape_sglang_mha(layout, &kv));
	return layout;
}

/* The decode ranks that the case's prefill ranks serve, with the sources that SGLang
 * names: each source whose answer it expects sends bytes, and dummy ones send none.
 * All heads of those ranks are requested, by as many ranks as in SGLang. */
static void ranks(const char *id, const cJSON *in, const cJSON *expect)
{
	static const uint32_t here[] = {5, 2, 11, 3, 8}, there[] = {7, 10, 4, 6, 0};
	const struct handover_view kv = {"kv", {{here, 5, 0}, {there, 5, 0}}, 4, 19};
	bool mla = golden_num(in, "mla");
	uint32_t d_tp = golden_u32(in, "d_tp"), p_tp = golden_u32(in, "p_tp");
	uint32_t receivers = golden_u32(expect, "required_dst_info_num");
	uint32_t first = golden_u32(in, "d_rank") % d_tp / receivers * receivers;
	uint32_t answers = golden_u32(expect, "required_prefill_response_num");
	uint32_t heads = 0;
	struct handover h;
	const cJSON *c;

	handover_new(&h);
	cJSON_ArrayForEach(c, golden_at(expect, "connections_in_order")) {
		uint32_t tp = golden_u32(c, "tp"), pp = golden_u32(c, "pp");

		heads += pp == 0 ? HEADS / p_tp : 0;
		handover_rank(&h, HANDOVER_PREFILL,
			      side(mla, pp * p_tp + tp, (struct shape_tp){p_tp, tp}, pp,
				   golden_u32(in, "p_pp")));
	}
	for (uint32_t r = first; r < first + receivers; r++)
		handover_rank(&h, HANDOVER_DECODE,
			      side(mla, r, (struct shape_tp){d_tp, r}, 0, 1));
	handover_push(&h, &(struct handover_request){&kv, 1, 8});
	assert_int_equal(handover_wrong(&h, id), 0);
	assert_int_equal(h.carried, answers);
	if (!mla)
		assert_int_equal(h.moved, heads * HEAD_BYTES * 2 * LAYERS * 15);
	handover_pull(&h, &(struct handover_request){&kv, 1, 0});
	assert_int_equal(handover_wrong(&h, id), 0);
	assert_int_equal(h.carried, answers);
	handover_free(&h);
}

/* ---- a prefill and a decode rank, one layer ---- */

struct two {
	struct cluster c;
	struct session *prefill, *decode;
	struct cache src, dst;
};

static void two_new(struct two *t, const struct cache *src, const struct cache *dst)
{
	cluster_new(&t->c, 1, 2);
	t->prefill = cluster_engine(&t->c, 0, "prefill");
	t->decode = cluster_engine(&t->c, 1, "decode");
	t->src = *src;
	t->dst = *dst;
	cluster_cache(&t->c, t->prefill, "kv", 0, &t->src);
	cluster_cache(&t->c, t->decode, "kv", 0, &t->dst);
	cluster_ok(&t->c, t->prefill,
		   "{'cmd':'room.open','room':'1','role':'send','pool':%llu}",
		   (unsigned long long)t->src.pool);
	cluster_ok(&t->c, t->decode,
		   "{'cmd':'room.open','room':'1','role':'recv','pool':%llu,"
		   "'sources':[{'endpoint':'%s'}]}",
		   (unsigned long long)t->dst.pool, t->c.nodes[0].endpoint);
}

static void two_end(struct two *t)
{
	cluster_until_state(&t->c, t->decode, "recv", 1, KVD_SUCCESS);
	cluster_until_state(&t->c, t->prefill, "send", 1, KVD_SUCCESS);
}

static void two_free(struct two *t)
{
	cache_close(&t->src);
	cache_close(&t->dst);
	cluster_free(&t->c);
}

/* A slot's bytes: never 0. */
static uint8_t pattern(uint64_t slot, unsigned int field, unsigned int b)
{
	return (uint8_t)(1 + (slot * 37 + field * 11 + b * 3) % 251);
}

static uint8_t *slot_at(const struct cache *k, uint64_t slot, unsigned int field,
			unsigned int b)
{
	return cache_at(k, 0, field, (unsigned int)(slot / k->page_tokens),
			(unsigned int)(slot % k->page_tokens), 0, b);
}

static void fill(const struct cache *k)
{
	for (uint64_t s = 0; s < (uint64_t)k->pages * k->page_tokens; s++)
		for (unsigned int i = 0; i < 2 * k->unit_bytes; i++)
			*slot_at(k, s, i % 2, i / 2) = pattern(s, i % 2, i / 2);
}

/* Whether slot `to` holds the bytes of the source's `from`. */
static bool holds(const struct cache *k, uint64_t to, uint64_t from)
{
	for (unsigned int i = 0; i < 2 * k->unit_bytes; i++)
		if (*slot_at(k, to, i % 2, i / 2) != pattern(from, i % 2, i / 2))
			return false;
	return true;
}

static unsigned int slots_written(const struct cache *k)
{
	unsigned int n = 0;

	for (uint64_t s = 0; s < (uint64_t)k->pages * k->page_tokens; s++)
		n += *slot_at(k, s, 0, 0) != 0;
	return n;
}

static void list_text(char *out, size_t size, const uint32_t *pages, size_t count)
{
	size_t n = 0;

	out[0] = 0;
	for (size_t i = 0; i < count; i++)
		n += (size_t)snprintf(out + n, size - n, "%s%u", i ? "," : "", pages[i]);
	assert_true(n < size);
}

static void give(struct two *t, unsigned int seq, bool last, const char *pages,
		 uint64_t first, uint64_t begin, uint64_t end)
{
	if (begin == end)
		cluster_ok(&t->c, t->prefill,
			   "{'cmd':'room.send','room':'1','seq':%u,'last':%s,'views':{}}",
			   seq, last ? "true" : "false");
	else
		cluster_ok(
			&t->c, t->prefill,
			"{'cmd':'room.send','room':'1','seq':%u,'last':%s,'views':{'kv':{"
			"'pages':[%s],'first_token':%llu,'tokens':[%llu,%llu]}}}",
			seq, last ? "true" : "false", pages, (unsigned long long)first,
			(unsigned long long)begin, (unsigned long long)end);
}

static void bind(struct two *t, const char *pages, uint64_t first, uint64_t end)
{
	cluster_ok(&t->c, t->decode,
		   "{'cmd':'room.bind','room':'1','views':{'kv':{'pages':[%s],"
		   "'first_token':%llu,'tokens':[%llu,%llu]}}}",
		   pages, (unsigned long long)first, (unsigned long long)first,
		   (unsigned long long)end);
}

/* ---- decode context parallelism ---- */

static uint32_t optional(const cJSON *in, const char *name)
{
	return cJSON_GetObjectItemCaseSensitive(in, name) ? golden_u32(in, name) : 0;
}

/* One decode-context rank, whose pages hold every size-th token after the prefix. The
 * chunks before the case's are from pages 0, 1, … of the source. */
static void dcp_rank(const char *id, const cJSON *in, const cJSON *rank)
{
	uint32_t src_pages[GOLDEN_LIST_MAX], dst_pages[GOLDEN_LIST_MAX];
	uint32_t from[GOLDEN_LIST_MAX], to[GOLDEN_LIST_MAX];
	size_t src_count = golden_list(golden_at(in, "src_pages"), src_pages);
	size_t dst_count = golden_list(golden_at(in, "dst_pages"), dst_pages);
	size_t n = golden_list(golden_at(rank, "src_tokens"), from);
	uint32_t page = golden_u32(in, "page"), size = golden_u32(in, "size");
	uint32_t before = optional(in, "off"), prefix = optional(in, "prefix");
	uint32_t tokens = optional(in, "ntok");
	uint32_t begin = prefix + before * page;
	const struct cache whole = {.layers = 1,
				    .pages = 32,
				    .page_tokens = page,
				    .units = 1,
				    .total_units = 1,
				    .unit_bytes = 16};
	struct cache part = whole;
	char text[256];
	struct two t;

	assert_int_equal(golden_list(golden_at(rank, "dst_tokens"), to), n);
	tokens = tokens ? tokens : (uint32_t)src_count * page;
	part.shard_size = size;
	part.shard_rank = golden_u32(rank, "dcp_rank");
	part.shard_run = 1;
	two_new(&t, &whole, &part);
	fill(&t.src);
	list_text(text, sizeof(text), dst_pages, dst_count);
	bind(&t, text, prefix, begin + tokens);
	if (before)
		give(&t, 0, false, "0,1", prefix, prefix, begin);
	list_text(text, sizeof(text), src_pages, src_count);
	give(&t, before > 0, true, text, begin, begin, begin + tokens);
	two_end(&t);
	for (size_t i = 0; i < n; i++) {
		if (!holds(&t.dst, to[i], from[i]))
			fail_msg("case %s: slot %u is not slot %u", id, to[i], from[i]);
	}
	assert_int_equal(slots_written(&t.dst), n + before * page / size);
	two_free(&t);
}

static void dcp(const char *id, const cJSON *in, const cJSON *expect)
{
	const cJSON *rank;

	assert_true(optional(in, "off") == 0 || optional(in, "off") == 2);
	cJSON_ArrayForEach(rank, golden_at(expect, "per_rank"))
		dcp_rank(id, in, rank);
}

/* ---- chunks ---- */

#define SLOTS 16384u
#define TEXT (SLOTS * 8)

/* Tokens [prefix, prompt): token t of the request is in slot t of the source, and at
 * the same distance from the end of the destination. */
static void begin_chunks(struct two *t, uint32_t page, uint64_t prefix, uint64_t prompt)
{
	const struct cache k = {.layers = 1,
				.pages = SLOTS / page,
				.page_tokens = page,
				.units = 1,
				.total_units = 1,
				.unit_bytes = 8};
	static uint32_t pages[SLOTS];
	static char text[TEXT];
	size_t n = 0;

	assert_int_equal(prefix % page, 0);
	two_new(t, &k, &k);
	fill(&t->src);
	for (uint64_t at = prefix; at < prompt; at += page)
		pages[n++] = k.pages - 1 - (uint32_t)(at / page);
	list_text(text, sizeof(text), pages, n);
	bind(t, text, prefix, prompt);
}

/* Pages of the source for tokens [begin, end). */
static void give_tokens(struct two *t, unsigned int seq, bool last, uint64_t begin,
			uint64_t end)
{
	static uint32_t pages[SLOTS];
	static char text[TEXT];
	uint32_t page = t->src.page_tokens;
	size_t n = 0;

	for (uint64_t p = begin / page; p * page < end; p++)
		pages[n++] = (uint32_t)p;
	list_text(text, sizeof(text), pages, n);
	give(t, seq, last, text, begin / page * page, begin, end);
}

static void end_chunks(struct two *t, const char *id, uint64_t prefix, uint64_t prompt)
{
	uint32_t page = t->src.page_tokens;

	two_end(t);
	for (uint64_t token = prefix; token < prompt; token++) {
		uint64_t to = (t->dst.pages - 1 - token / page) * page + token % page;

		if (!holds(&t->dst, to, token))
			fail_msg("case %s: token %llu", id, (unsigned long long)token);
	}
	assert_int_equal(slots_written(&t->dst), prompt - prefix);
	two_free(t);
}

/* The sends of a chunked prefill; a page list starts at the end of the last one. */
static void sends(const char *id, const cJSON *in, const cJSON *expect)
{
	uint64_t prefix = golden_num(in, "decode_prefix_len");
	uint64_t prompt = golden_num(in, "prompt_len");
	uint64_t page = golden_num(in, "page_size");
	unsigned int seq = 0;
	const cJSON *send;
	struct two t;

	begin_chunks(&t, (uint32_t)page, prefix, prompt);
	cJSON_ArrayForEach(send, golden_at(expect, "sends")) {
		const cJSON *tokens = golden_at(send, "token_range");
		const cJSON *slice = golden_at(send, "index_slice");

		assert_int_equal(prefix + page * golden_nth(slice, 0),
				 golden_nth(tokens, 0));
		give_tokens(&t, seq++, golden_num(send, "is_last"), golden_nth(tokens, 0),
			    golden_nth(tokens, 1));
	}
	end_chunks(&t, id, prefix, prompt);
}

static void segments(const char *id, const cJSON *in, const cJSON *expect)
{
	const cJSON *s, *list = golden_at(expect, "segments");
	unsigned int seq = 0;
	struct two t;

	begin_chunks(&t, 8, golden_num(in, "start"), golden_num(in, "end"));
	cJSON_ArrayForEach(s, list) {
		give_tokens(&t, seq, s->next == NULL, golden_nth(s, 0), golden_nth(s, 1));
		seq++;
	}
	end_chunks(&t, id, golden_num(in, "start"), golden_num(in, "end"));
}

static void chunks(const char *id, const cJSON *in, const cJSON *expect)
{
	const char *fn = golden_at(in, "fn")->valuestring;

	if (strcmp(fn, "chunk_sends") == 0)
		sends(id, in, expect);
	else if (strcmp(fn, "grid") == 0)
		segments(id, in, expect);
	else if (strcmp(fn, "group_runs") != 0) /* test_plan_golden's */
		fail_msg("case %s: fn %s is not known here", id, fn);
}

/* ---- files ---- */

static const struct file {
	const char *name;
	void (*visit)(const char *id, const cJSON *in, const cJSON *expect);
} files[] = {
	{"sglang_rank_mapping.json", ranks},
	{"sglang_dcp_plan.json", dcp},
	{"sglang_pages_and_chunks.json", chunks},
};

static void golden_file_holds(void **state)
{
	const struct file *file = *state;

	golden_each(file->name, file->visit);
}

int main(void)
{
	struct CMUnitTest tests[ARRAY_LEN(files)];

	for (size_t i = 0; i < ARRAY_LEN(files); i++)
		tests[i] = (struct CMUnitTest){.name = files[i].name,
					       .test_func = golden_file_holds,
					       .initial_state = (void *)&files[i]};
	return cmocka_run_group_tests_name("rooms_golden", tests, NULL, NULL);
}
