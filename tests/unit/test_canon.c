/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How parts of chunks lie, by what they are for: bytes that an engine puts come out right
 * in any other engine's pool.
 *
 * Engines here are views of a few arrangements (a buffer for each of K and V, pages that
 * hold K and V or all layers, one latent, …) in either head order, at page sizes from a
 * token up. A canon is held against its own words first: in its slot, apart, counted,
 * again the same. Then bytes go from pools into slots and on into other pools by the
 * planner; each is a hash of what it is, so whoever reads one knows what it should be.
 * Random layouts of the planner's property test follow, where strides overlap and some
 * hold nothing: by way of slots they move what they move without.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cjson/cJSON.h>
#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/canon.h"
#include "daemon/plan/plan.h"
#include "tests/lib/shapes.h"
#include "tests/lib/plan_random.h"

#define MEMORY (UINT64_C(16) << 20) /* of slots */
#define VIEWS_MAX 3u
#define PAGES_MAX 600u
#define TOKENS 256u /* that pools have */

enum arrangement {
	APART,	 /* a buffer for each of a layer's K and V, K's first */
	PAIRED,	 /* a buffer a layer; a page has K, then V */
	STACKED, /* one buffer, field behind field */
	WHOLE,	 /* one buffer; a page has all layers */
	LATENT,	 /* one unit, a buffer a layer */
	ARRANGEMENTS,
};

/* A view of an engine's pool. 0: as in engine_of(). */
struct engine {
	const char *view, *format, *v_name;
	enum arrangement how;
	bool hnd;
	uint32_t page_tokens, pages;
	uint32_t first_layer, layers;
	uint32_t first_unit, units, total;
	uint64_t unit_bytes, padding; /* of a page */
	struct token_shard shard;
};

#define NONE UINT32_MAX /* units, layers: 0 */

static const uint32_t page_sizes[] = {1, 8, 16, 32, 128};
static const uint32_t chunk_sizes[] = {16, 64, 256};

/* ---- engines ---- */

static struct engine engine_of(const struct engine *asked)
{
	struct engine e = *asked;

	e.view = e.view ? e.view : "kv";
	e.format = e.format ? e.format : "bf16";
	e.page_tokens = e.page_tokens ? e.page_tokens : 16;
	e.pages = e.pages ? e.pages : 512 / e.page_tokens + 3;
	e.layers = e.layers == NONE ? 0 : e.layers ? e.layers : 3;
	e.units = e.units == NONE ? 0 : e.how == LATENT ? 1 : e.units ? e.units : 4;
	e.total = e.how == LATENT ? 1 : e.total ? e.total : 8;
	e.unit_bytes = e.unit_bytes ? e.unit_bytes : 8;
	return e;
}

/* Where field k of layer i begins, and what a page of its buffer takes. `first`: buffer
 * of the view. */
static void place_field(struct layout *layout, const struct engine *e, uint32_t first,
			uint32_t i, uint32_t k, struct layout_field *f)
{
	uint32_t n = e->how == LATENT ? 1 : 2, all = e->layers * n, at = i * n + k, index;
	uint64_t bytes = e->page_tokens * e->units * e->unit_bytes;
	uint64_t page = bytes + e->padding, len = page * e->pages;
	bool fresh = true; /* buffer */

	f->buffer = first + k * e->layers + i; /* a V's behind all K's */
	f->page_stride = page;
	if (e->how == PAIRED) {
		fresh = k == 0;
		f->buffer = first + i;
		f->page_stride = page + bytes;
		f->offset = k * bytes;
		len += bytes * e->pages;
	} else if (e->how == STACKED || e->how == WHOLE) {
		fresh = at == 0;
		f->buffer = first;
		f->page_stride = e->how == WHOLE ? all * bytes + e->padding : page;
		f->offset = at * (e->how == WHOLE ? bytes : len);
		len *= all;
	}
	if (fresh)
		assert_int_equal(shape_buffer(layout, len, &index), 0);
}

static void add_view(struct layout *layout, const struct engine *asked)
{
	const struct engine e = engine_of(asked);
	uint32_t first = layout->buffer_count;
	struct layout_view *view;

	assert_int_equal(shape_view(layout, e.view, e.page_tokens, e.pages, &view), 0);
	view->shard = e.shard;
	for (uint32_t i = 0; i < e.layers; i++) {
		struct layout_layer *layer;

		assert_int_equal(shape_layer(view, e.first_layer + i, &layer), 0);
		for (uint32_t k = 0; k < (e.how == LATENT ? 1 : 2); k++) {
			struct layout_field f = {.unit_bytes = e.unit_bytes,
						 .first_unit = e.first_unit,
						 .units = e.units,
						 .total_units = e.total};

			if (e.page_tokens > 1) /* else it may be any number */
				f.token_stride = e.unit_bytes * (e.hnd ? 1 : e.units);
			f.unit_stride = e.unit_bytes * (e.hnd ? e.page_tokens : 1);
			place_field(layout, &e, first, i, k, &f);
			snprintf(f.format, sizeof(f.format), "%s", e.format);
			assert_int_equal(shape_field(layer,
						     k ? e.v_name ? e.v_name : "v" : "k",
						     &f),
					 0);
		}
	}
}

/* A view each, as pool.register gets it. */
static struct layout *engines_make(const struct engine *e, uint32_t count)
{
	struct layout *layout, *parsed;
	cJSON *json;

	assert_int_equal(shape_new(0, &layout), 0);
	for (uint32_t i = 0; i < count; i++)
		add_view(layout, &e[i]);
	assert_int_equal(layout_print(layout, &json), 0);
	layout_free(layout);
	if (layout_parse(json, &parsed) < 0)
		fail_msg("%s", err_last()->text);
	cJSON_Delete(json);
	return parsed;
}

static int canon_try(const struct layout *layout, uint32_t tokens, struct canon **canon_p)
{
	const struct canon_args args = {
		.layout = layout, .tokens = tokens, .memory_bytes = MEMORY};

	return canon_make(&args, canon_p);
}

static struct canon *canon_of(const struct layout *layout, uint32_t tokens)
{
	struct canon *canon = NULL;

	if (canon_try(layout, tokens, &canon) < 0)
		fail_msg("%s", err_last()->text);
	return canon;
}

static struct canon *canon_of_engine(const struct engine *e, uint32_t tokens)
{
	struct layout *layout = engines_make(e, 1);
	struct canon *canon = canon_of(layout, tokens);

	layout_free(layout);
	return canon;
}

/* ---- its own words ---- */

/* Of one field in one page. */
static uint64_t mark_field(uint8_t *bytes, uint64_t most, const struct layout_field *f,
			   uint32_t tokens, uint64_t page)
{
	for (uint32_t t = 0; t < tokens; t++)
		for (uint32_t u = 0; u < f->units; u++) {
			uint64_t at = page + f->offset + t * f->token_stride +
				      u * f->unit_stride;

			assert_true(at <= most && f->unit_bytes <= most - at);
			for (uint64_t i = at; i < at + f->unit_bytes; i++)
				assert_int_equal(bytes[i]++, 0);
		}
	return (uint64_t)tokens * f->units * f->unit_bytes;
}

/* Each byte of a part lies in its slot, no two are one; how many there are. */
static uint64_t mark_slot(const struct canon *canon, uint64_t offset)
{
	uint8_t *bytes = calloc(canon->slot_bytes + 1, 1);
	uint32_t pages[CANON_TOKENS_MAX];
	uint64_t sum = 0;

	assert_non_null(bytes);
	for (uint32_t v = 0; v < canon->layout->view_count; v++) {
		const struct layout_view *view = &canon->layout->views[v];

		canon_pages(canon, v, offset, pages);
		for (uint32_t n = 0; n < view->layer_count * canon->views[v].pages; n++) {
			const struct layout_layer *layer =
				&view->layers[n % view->layer_count];
			uint64_t page = pages[n / view->layer_count] * CANON_GRAIN;

			for (uint32_t k = 0; k < layer->field_count; k++)
				sum += mark_field(bytes, canon->slot_bytes,
						  &layer->fields[k], view->page_tokens,
						  page - offset);
		}
	}
	free(bytes);
	return sum;
}

static void check_pages(const struct canon *canon, uint32_t tokens)
{
	uint64_t memory = canon->layout->buffers[0];
	uint64_t last = (memory - canon->slot_bytes) / CANON_GRAIN * CANON_GRAIN;
	uint32_t pages[CANON_TOKENS_MAX];

	assert_int_equal(layout_check(canon->layout), 0);
	for (uint32_t v = 0; v < canon->layout->view_count; v++) {
		const struct layout_view *view = &canon->layout->views[v];
		uint32_t held = view->shard.size ? tokens / view->shard.size : tokens;

		assert_int_equal(canon->views[v].pages * view->page_tokens, held);
		assert_false(canon->views[v].page_bytes % CANON_GRAIN);
		canon_pages(canon, v, last, pages);
		for (uint32_t i = 0; i < canon->views[v].pages; i++)
			assert_true(pages[i] < view->pages);
	}
}

static void check_canon(const struct canon *canon, uint32_t tokens)
{
	struct canon *again = canon_of(canon->layout, tokens);

	assert_true(canon->slot_bytes > 0 && canon->slot_bytes % CANON_GRAIN == 0);
	assert_int_equal(mark_slot(canon, 0), canon->chunk_bytes);
	mark_slot(canon, CANON_GRAIN * 77);
	check_pages(canon, tokens);
	assert_true(canon_equal(canon, again));
	assert_int_equal(again->chunk_bytes, canon->chunk_bytes);
	assert_memory_equal(canon->views, again->views,
			    canon->layout->view_count * sizeof(*canon->views));
	canon_free(again);
}

/* Views of unequal kinds, shards (one has a single token of a chunk, and no order of
 * heads is left), units from the middle, an aux view that stays out. */
static void canon_of_several_views_is_stable(void **state)
{
	static const struct engine e[] = {
		{.how = WHOLE, .hnd = true, .first_unit = 2},
		{.how = LATENT, .page_tokens = 1, .view = "swa", .unit_bytes = 1153},
		{.how = APART, .page_tokens = 32, .view = "aux"},
		{.how = PAIRED, .page_tokens = 8, .view = "part", .shard = {4, 3, 2}},
		{.how = APART, .hnd = true, .view = "one", .shard = {64, 3, 1}},
	};
	struct layout *layout = engines_make(e, ARRAY_LEN(e));
	struct canon *canon = canon_of(layout, 64);
	const char *names[] = {"swa", "kv"};
	const struct canon_args args = {.layout = layout,
					.views = names,
					.view_count = 2,
					.tokens = 64,
					.rank = 9,
					.memory_bytes = MEMORY};

	(void)state;
	assert_int_equal(canon->layout->view_count, 4);
	assert_null(layout_view_find(canon->layout, "aux"));
	check_canon(canon, 64);
	assert_int_equal(canon->chunk_bytes,
			 64 * 3 * (2 * 4 * 8 + 1153) + (64 / 4 + 1) * 3 * 2 * 4 * 8);
	canon_free(canon);
	assert_int_equal(canon_make(&args, &canon), 0);
	assert_true(canon->layout->rank == 9 && canon->layout->view_count == 2);
	assert_string_equal(canon->layout->views[0].name, "swa"); /* as they are named */
	check_canon(canon, 64);
	canon_free(canon);
	layout_free(layout);
}

/* ---- bytes ---- */

struct memory {
	const struct layout *layout;
	uint8_t **buffers;
};

/* Of zeroes, or (seed) of bytes at random. */
static struct memory memory_of(const struct layout *layout, uint64_t seed)
{
	struct memory m = {layout, calloc(layout->buffer_count + 1, sizeof(uint8_t *))};

	assert_non_null(m.buffers);
	for (uint32_t i = 0; i < layout->buffer_count; i++) {
		m.buffers[i] = calloc(layout->buffers[i] + 1, 1);
		assert_non_null(m.buffers[i]);
		for (uint64_t k = 0; seed && k < layout->buffers[i]; k++)
			m.buffers[i][k] = (uint8_t)random_next(&seed);
	}
	return m;
}

static void memory_fini(struct memory *m)
{
	for (uint32_t i = 0; i < m->layout->buffer_count; i++)
		free(m->buffers[i]);
	free(m->buffers);
}

/* Row by row. False: it is refused. */
static bool move(const struct memory *src, const struct memory *dst,
		 const struct plan_map *maps, size_t count, uint64_t *bytes_p,
		 uint64_t *rows_p)
{
	const struct plan_request req = {
		.src = src->layout, .dst = dst->layout, .maps = maps, .map_count = count};
	struct plan_walk walk;
	struct plan_span s;
	struct plan *plan;

	if (plan_make(&req, &plan) < 0)
		return false;
	*bytes_p = plan->bytes;
	*rows_p = plan->rows;
	plan_walk_begin(&walk, plan);
	while (plan_walk_next(&walk, 1000, &s))
		memcpy(dst->buffers[s.dst_buffer] + s.dst,
		       src->buffers[s.src_buffer] + s.src, s.len);
	plan_free(plan);
	return true;
}

/* A pool, and the pages that have the tokens [0, TOKENS): without a seed in order. */
struct pool {
	struct layout *layout;
	struct memory memory;
	uint32_t pages[VIEWS_MAX][PAGES_MAX], page_count[VIEWS_MAX];
	struct canon *canon;
};

static void pool_init(struct pool *p, struct layout *layout, uint64_t *seed)
{
	*p = (struct pool){.layout = layout, .memory = memory_of(layout, 0)};
	for (uint32_t v = 0; v < layout->view_count; v++) {
		const struct layout_view *view = &layout->views[v];
		uint64_t held = token_shard_slot(&view->shard, TOKENS);
		uint32_t *pages = p->pages[v];

		assert_true(view->pages <= PAGES_MAX);
		for (uint32_t i = 0; i < view->pages; i++) {
			uint32_t at = seed ? random_below(seed, i + 1) : i;

			pages[i] = pages[at];
			pages[at] = i;
		}
		p->page_count[v] = (uint32_t)(held / view->page_tokens) + 1;
	}
}

static void pool_fini(struct pool *p)
{
	memory_fini(&p->memory);
	canon_free(p->canon);
	layout_free(p->layout);
}

static uint8_t byte_of(const char *view, uint32_t layer, const char *field,
		       uint64_t token, uint32_t unit, uint64_t byte)
{
	uint64_t seed = (((token * 64 + layer) * 64 + unit) * 4096 + byte) * 65536 +
			(uint8_t)view[0] * 256u + (uint8_t)field[0];

	return (uint8_t)(random_next(&seed) | 1); /* never what was there before */
}

/* Each byte of a token of one layer is written, or looked at. */
static void layer_each(const struct pool *p, uint32_t v, const struct layout_layer *layer,
		       uint64_t at, uint64_t token, bool write)
{
	const struct layout_view *view = &p->layout->views[v];
	uint64_t page = p->pages[v][at / view->page_tokens];

	for (uint32_t n = 0; n < layer->field_count; n++) {
		const struct layout_field *f = &layer->fields[n];
		uint8_t *is = p->memory.buffers[f->buffer] + f->offset +
			      page * f->page_stride +
			      at % view->page_tokens * f->token_stride;

		for (uint64_t i = 0; i < f->units * f->unit_bytes; i++) {
			uint32_t unit = f->first_unit + (uint32_t)(i / f->unit_bytes);
			uint8_t *here = is + i / f->unit_bytes * f->unit_stride +
					i % f->unit_bytes;
			uint8_t want = byte_of(view->name, layer->layer, f->name, token,
					       unit, i % f->unit_bytes);

			if (write)
				*here = want;
			else if (*here != want)
				fail_msg("view %s layer %u field %s token %llu unit %u",
					 view->name, layer->layer, f->name,
					 (unsigned long long)token, unit);
		}
	}
}

static void pool_each(const struct pool *p, bool write)
{
	for (uint32_t v = 0; v < p->layout->view_count; v++) {
		const struct layout_view *view = &p->layout->views[v];
		uint64_t token;

		for (uint64_t at = 0; at < token_shard_slot(&view->shard, TOKENS); at++) {
			assert_true(token_shard_at(&view->shard, at, &token));
			for (uint32_t i = 0; i < view->layer_count; i++)
				layer_each(p, v, &view->layers[i], at, token, write);
		}
	}
}

/* Parts of one writer's chunks, one behind the other in tokens. */
struct parts {
	const struct canon *canon;
	struct memory memory; /* of all slots */
	uint32_t pages[VIEWS_MAX][PAGES_MAX], page_count[VIEWS_MAX];
};

/* *next_p: free memory; slots come in no order. `chunks` is a power of 2. */
static void parts_init(struct parts *parts, const struct canon *canon, uint8_t **memory,
		       uint32_t chunks, uint64_t *next_p)
{
	*parts = (struct parts){.canon = canon, .memory = {canon->layout, memory}};
	for (uint32_t v = 0; v < canon->layout->view_count; v++) {
		uint32_t n = canon->views[v].pages;

		for (uint32_t i = 0; i < chunks; i++)
			canon_pages(canon, v,
				    *next_p + (i * 5 + 3) % chunks * canon->slot_bytes,
				    parts->pages[v] + i * n);
		parts->page_count[v] = n * chunks;
	}
	*next_p += canon->slot_bytes * chunks;
	assert_true(*next_p <= MEMORY);
}

/* Bytes that it takes, rows. */
static uint64_t put(const struct pool *p, const struct parts *parts, bool back,
		    uint64_t *rows_p)
{
	struct plan_map maps[VIEWS_MAX];
	uint32_t count = parts->canon->layout->view_count;
	uint64_t bytes = 0;

	for (uint32_t v = 0; v < count; v++)
		maps[v] = (struct plan_map){
			.view = parts->canon->layout->views[v].name,
			.src_pages = back ? parts->pages[v] : p->pages[v],
			.src_page_count = back ? parts->page_count[v] : p->page_count[v],
			.dst_pages = back ? p->pages[v] : parts->pages[v],
			.dst_page_count = back ? p->page_count[v] : parts->page_count[v],
			.token_end = TOKENS,
			.tokens_set = true};
	if (!move(back ? &parts->memory : &p->memory, back ? &p->memory : &parts->memory,
		  maps, count, &bytes, rows_p))
		fail_msg("%s", err_last()->text);
	return bytes;
}

/* ---- from any engine to any other ---- */

/* How an engine divides its model of four layers and four heads. */
struct split {
	uint32_t tp, cp, pp, run, ranks;
};

static struct split split_at_random(uint64_t *seed, uint32_t tokens)
{
	struct split s = {.tp = 1u << random_below(seed, 3),
			  .cp = 1u << random_below(seed, 2),
			  .pp = 1u << random_below(seed, 2)};

	s.run = tokens >= 32 && random_below(seed, 2) ? 16 : 1;
	s.ranks = s.tp * s.cp * s.pp;
	return s;
}

static struct layout *rank_at_random(uint64_t *seed, const struct split *s, uint32_t rank)
{
	struct engine e[2];
	uint32_t stage = rank / s->tp / s->cp, units = 4 / s->tp;
	uint32_t layers = s->pp == 1 ? 4 : 1 + 2 * stage;

	for (uint32_t v = 0; v < 2; v++) {
		e[v] = (struct engine){.how = v ? LATENT : random_below(seed, LATENT),
				       .hnd = random_below(seed, 2),
				       .page_tokens = page_sizes[random_below(seed, 5)],
				       .padding = random_below(seed, 2) * 24,
				       .layers = layers,
				       .first_layer = stage,
				       .units = units,
				       .first_unit = v ? 0 : rank % s->tp * units};
		if (s->cp > 1)
			e[v].shard =
				(struct token_shard){s->cp, rank / s->tp % s->cp, s->run};
	}
	e[1].view = "latent";
	e[1].unit_bytes = 36;
	return engines_make(e, 2);
}

static void bytes_between_any_engines_are_equal(void **state)
{
	static struct pool from[16], to;
	static struct parts parts[16];
	uint8_t *memory[1] = {calloc(MEMORY, 1)};

	(void)state;
	for (uint64_t seed = 1; seed <= 200; seed++) {
		uint64_t rng = seed, next = 4096 * 3, rows;
		uint32_t tokens = chunk_sizes[random_below(&rng, 3)];
		struct split src = split_at_random(&rng, tokens);
		struct split dst = split_at_random(&rng, tokens);

		for (uint32_t i = 0; i < src.ranks; i++) {
			struct pool *p = &from[i];

			pool_init(p, rank_at_random(&rng, &src, i), &rng);
			p->canon = canon_of(p->layout, tokens);
			pool_each(p, true);
			parts_init(&parts[i], p->canon, memory, TOKENS / tokens, &next);
			assert_int_equal(put(p, &parts[i], false, &rows),
					 p->canon->chunk_bytes * (TOKENS / tokens));
		}
		for (uint32_t i = 0; i < dst.ranks; i++) {
			pool_init(&to, rank_at_random(&rng, &dst, i), &rng);
			for (uint32_t k = 0; k < src.ranks; k++)
				put(&to, &parts[k], true, &rows);
			pool_each(&to, false);
			pool_fini(&to);
		}
		for (uint32_t i = 0; i < src.ranks; i++)
			pool_fini(&from[i]);
	}
	free(memory[0]);
}

/* ---- engines alike ---- */

/* Rows of a put, and of the fetch back into the same pages. */
static uint64_t rows_of(const struct engine *e, uint32_t tokens, bool in_order)
{
	static struct pool pool;
	static struct parts parts;
	uint8_t *memory[1] = {calloc(MEMORY, 1)};
	uint64_t seed = 5, next = 0, rows, back;

	pool_init(&pool, engines_make(e, 1), in_order ? NULL : &seed);
	pool.canon = canon_of(pool.layout, tokens);
	parts_init(&parts, pool.canon, memory, TOKENS / tokens, &next);
	put(&pool, &parts, false, &rows);
	put(&pool, &parts, true, &back);
	assert_int_equal(rows, back);
	pool_fini(&pool);
	free(memory[0]);
	return rows;
}

/* And their rows are whole fields of pages, or more. */
static void canon_of_each_engine_is_stable(void **state)
{
	static const uint32_t in_page[ARRANGEMENTS] = {6, 3, 6, 1, 3};

	(void)state;
	for (uint32_t i = 0; i < ARRANGEMENTS * 2 * 5 * 3; i++) {
		struct engine e = {.how = i / 30,
				   .hnd = i % 2,
				   .page_tokens = page_sizes[i / 6 % 5]};
		uint32_t tokens = chunk_sizes[i / 2 % 3];
		bool own = e.page_tokens >= 16 && tokens % e.page_tokens == 0;
		uint32_t page = own ? e.page_tokens : tokens;
		uint64_t rows = (uint64_t)TOKENS / page * in_page[e.how];
		struct canon *canon = canon_of_engine(&e, tokens);

		check_canon(canon, tokens);
		assert_int_equal(canon->layout->views[0].page_tokens, page);
		assert_int_equal(canon->chunk_bytes,
				 tokens * 3 * 8 * (e.how == LATENT ? 1 : 2 * 4));
		canon_free(canon);
		if (e.page_tokens < 16 && e.how == APART && !e.hnd) /* tokens in order */
			assert_true(rows_of(&e, tokens, true) <= rows);
		if (!own)
			continue;
		assert_true(rows_of(&e, tokens, false) <= rows);
		e.padding = 64; /* no page meets the next */
		assert_int_equal(rows_of(&e, tokens, false), rows);
	}
}

/* ---- equal, identity ---- */

/* Engines that differ in one thing: are the parts the first one's, is what they mean? */
static const struct {
	const char *what;
	struct engine e;
	bool equal, identity;
} changed[] = {
	{"nothing", {.pages = 0}, true, true},
	{"number of pages", {.pages = 90}, true, true},
	{"padding", {.padding = 64}, true, true},
	{"page size", {.page_tokens = 32}, false, true},
	{"small page size", {.page_tokens = 4}, false, true},
	{"head order", {.hnd = true}, false, true},
	{"TP rank", {.first_unit = 4}, false, true},
	{"TP size", {.units = 2}, false, true},
	{"order of fields", {.how = PAIRED}, false, true},
	{"stage", {.first_layer = 1}, false, true},
	{"layers", {.layers = 2}, false, true},
	{"shard", {.shard = {2, 1, 16}}, false, true},
	{"shard's rank", {.shard = {2, 0, 16}}, false, true},
	{"unit_bytes", {.unit_bytes = 16}, false, false},
	{"total_units", {.total = 16}, false, false},
	{"format", {.format = "fp8"}, false, false},
	{"no format", {.format = ""}, false, false},
	{"format of a dash", {.format = "-"}, false, false},
	{"view", {.view = "swa"}, false, false},
	{"field", {.v_name = "w"}, false, false},
};

static void identity_depends_on_meaning_not_place(void **state)
{
	struct canon *canons[ARRAY_LEN(changed)];
	char *texts[ARRAY_LEN(changed)];

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(changed); i++) {
		canons[i] = canon_of_engine(&changed[i].e, 64);
		texts[i] = canon_identity(canons[i]);
		if (canon_equal(canons[0], canons[i]) != changed[i].equal)
			fail_msg("canon of another %s", changed[i].what);
		if ((strcmp(texts[i], texts[0]) == 0) != changed[i].identity)
			fail_msg("identity of another %s: %s", changed[i].what, texts[i]);
		for (size_t k = 0; k < i; k++)
			if ((!changed[i].equal && canon_equal(canons[k], canons[i])) ||
			    (!changed[i].identity && strcmp(texts[k], texts[i]) == 0))
				fail_msg("%s, %s", changed[k].what, changed[i].what);
	}
	assert_string_equal(texts[0], "kv k 8 8 bf16\nkv v 8 8 bf16\n");
	for (size_t i = 0; i < ARRAY_LEN(changed); i++) {
		canon_free(canons[i]);
		mem_free(texts[i]);
	}
}

/* Layers that show the same bytes: whatever the heap does, one order. */
static void canon_of_layers_sharing_bytes_is_stable(void **state)
{
	enum { LAYERS = 6 };
	static const struct engine e = {.how = WHOLE, .layers = LAYERS};
	struct layout *layout = engines_make(&e, 1);
	struct canon *canons[2];

	(void)state;
	for (uint32_t i = 0; i < 2 * LAYERS; i++)
		layout->views[0].layers[i / 2].fields[i % 2].offset = i % 2 * 512;
	for (uint32_t round = 0; round < 2; round++) {
		void *blocks[LAYERS];

		for (size_t i = 0; i < LAYERS; i++)
			blocks[i] = malloc(2 * sizeof(struct layout_field));
		for (size_t i = 0; i < LAYERS; i++) /* they come back the other way */
			free(blocks[round ? i : LAYERS - 1 - i]);
		canons[round] = canon_of(layout, 64);
		check_canon(canons[round], 64);
	}
	assert_true(canon_equal(canons[0], canons[1]));
	canon_free(canons[0]);
	canon_free(canons[1]);
	layout_free(layout);
}

/* ---- refusals ---- */

static void canon_impossible_is_refused_by_name(void **state)
{
	static const char *const none[] = {"kv", "nope"}, *const twice[] = {"kv", "kv"};
	static const struct engine one = {.how = APART}, empty = {.layers = NONE};
	static const struct engine sharded = {.shard = {4, 0, 6}}, aux = {.view = "aux"};
	static const struct engine units = {.units = NONE};
	static const struct engine large = {.unit_bytes = 3 << 20, .pages = 1};
	static const struct {
		const struct engine *e;
		const char *const *views;
		uint32_t view_count, tokens;
		uint64_t memory;
		enum err_code code;
		const char *needle;
	} cases[] = {
		{&one, NULL, 0, 15, MEMORY, ERR_RANGE, "tokens: 15"},
		{&one, NULL, 0, 4097, MEMORY, ERR_RANGE, "tokens: 4097"},
		{&one, NULL, 0, UINT32_MAX, MEMORY, ERR_RANGE, "tokens: 4294967295"},
		{&one, none, 2, 64, MEMORY, ERR_NOTFOUND, "views: "},
		{&one, twice, 2, 64, MEMORY, ERR_INVAL, "views: kv named twice"},
		{&one, none, 0, 64, MEMORY, ERR_INVAL, "views: empty"},
		{&aux, NULL, 0, 64, MEMORY, ERR_INVAL, "views: empty"},
		{&empty, NULL, 0, 64, MEMORY, ERR_INVAL, "view kv"},
		{&units, NULL, 0, 64, MEMORY, ERR_INVAL, "view"},
		{&sharded, NULL, 0, 64, MEMORY, ERR_INVAL, "tokens: 64"},
		{&large, NULL, 0, 16, CANON_MEMORY_MAX, ERR_TOOBIG, "tokens"},
		{&large, NULL, 0, 4096, CANON_MEMORY_MAX, ERR_TOOBIG, "tokens"},
		{&one, NULL, 0, 64, 3 * 4096, ERR_TOOBIG, "chunk_memory 12288"},
		{&one, NULL, 0, 64, 0, ERR_TOOBIG, "chunk_memory"},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		struct layout *layout = engines_make(cases[i].e, 1);
		const struct canon_args args = {.layout = layout,
						.views = cases[i].views,
						.view_count = cases[i].view_count,
						.tokens = cases[i].tokens,
						.memory_bytes = cases[i].memory};
		int64_t live = mem_live();
		struct canon *canon = NULL;

		err_clear();
		if (canon_make(&args, &canon) >= 0 || err_last()->code != cases[i].code ||
		    !strstr(err_last()->text, cases[i].needle))
			fail_msg("case %zu: %s", i, err_last()->text);
		assert_int_equal(mem_live(), live);
		layout_free(layout);
	}
}

/* The largest part in the largest memory, beside a view that this rank has nothing of. */
static void canon_at_its_limits_is_made(void **state)
{
	static const struct engine e[] = {
		{.unit_bytes = 1 << 20, .layers = 4, .pages = 1},
		{.view = "none", .units = NONE},
	};
	struct layout *layout = engines_make(e, 2);
	const struct canon_args args = {
		.layout = layout, .tokens = 16, .memory_bytes = CANON_MEMORY_MAX};
	struct canon *canon;

	(void)state;
	assert_int_equal(canon_make(&args, &canon), 0);
	assert_int_equal(canon->chunk_bytes, CANON_SLOT_MAX);
	check_pages(canon, 16);
	canon_free(canon);
	layout_free(layout);
}

static void canon_without_memory_leaks_nothing(void **state)
{
	static const struct engine e[] = {{.how = APART}, {.view = "b", .how = LATENT}};
	struct layout *layout = engines_make(e, 2);
	int64_t live = mem_live();
	struct canon *canon = NULL;
	char *identity = NULL;
	uint32_t failed = 0;

	(void)state;
	while (!identity) { /* first the canon, then its identity */
		mem_fail_at(++failed);
		if (!canon && canon_try(layout, 64, &canon) >= 0) {
			assert_true(failed > 10);
			failed = 0;
			live = mem_live();
			continue;
		}
		identity = canon ? canon_identity(canon) : NULL;
		assert_true(identity || err_last()->code == ERR_NOMEM);
		assert_int_equal(mem_live(), live + (identity != NULL));
	}
	mem_fail_at(0);
	assert_true(failed > 2);
	mem_free(identity);
	canon_free(canon);
	layout_free(layout);
}

/* ---- layouts at random ---- */

#define CHUNK 144u /* a multiple of all turns */

/* The tokens that both sides hold; false: none. */
static bool map_tokens(const struct plan_random *pr, struct plan_map *map)
{
	const struct layout_view *src = layout_view_find(pr->src, map->view);
	const struct layout_view *dst = layout_view_find(pr->dst, map->view);
	uint64_t a = map->src_first_token, a_tokens;
	uint64_t b = map->dst_first_token, b_tokens;

	token_shard_at(&src->shard, map->src_page_count * src->page_tokens, &a_tokens);
	token_shard_at(&dst->shard, map->dst_page_count * dst->page_tokens, &b_tokens);
	map->token_begin = a > b ? a : b;
	map->token_end = a + a_tokens < b + b_tokens ? a + a_tokens : b + b_tokens;
	map->tokens_set = true;
	return map->token_begin < map->token_end;
}

/* One map's bytes straight into one memory, by slots into another. False: straight they
 * reach a byte twice. */
static bool by_slots(const struct plan_random *pr, const struct canon *canon,
		     const struct plan_map *map, uint8_t **slots)
{
	struct memory src = memory_of(pr->src, 5);
	struct memory straight = memory_of(pr->dst, 7), by = memory_of(pr->dst, 7);
	uint32_t v = (uint32_t)(layout_view_find(canon->layout, map->view) -
				canon->layout->views);
	struct plan_map in = *map, out = *map;
	static struct parts parts;
	uint64_t next = 4096, bytes, rows;
	bool can = move(&src, &straight, map, 1, &bytes, &rows);

	parts_init(&parts, canon, slots, 2, &next);
	memset(slots[0], 0xee, next);
	in.dst_pages = out.src_pages = parts.pages[v];
	in.dst_page_count = out.src_page_count = parts.page_count[v];
	in.dst_first_token = out.src_first_token = 0;
	if (can && !(move(&src, &parts.memory, &in, 1, &bytes, &rows) &&
		     move(&parts.memory, &by, &out, 1, &bytes, &rows)))
		fail_msg("%s", err_last()->text);
	for (uint32_t i = 0; can && i < pr->dst->buffer_count; i++)
		assert_memory_equal(straight.buffers[i], by.buffers[i],
				    pr->dst->buffers[i]);
	memory_fini(&src);
	memory_fini(&straight);
	memory_fini(&by);
	return can;
}

/* NULL: it holds nothing, of a view or at all. */
static struct canon *canon_at_random(const struct layout *layout)
{
	struct canon *canon = NULL;

	if (canon_try(layout, CHUNK, &canon) >= 0)
		check_canon(canon, CHUNK);
	else
		assert_non_null(strstr(err_last()->text, "nothing"));
	return canon;
}

static void layouts_random_move_equally_by_slots(void **state)
{
	uint8_t *memory[1] = {calloc(MEMORY, 1)};
	uint32_t can[2] = {0};

	(void)state;
	for (uint64_t seed = 1; seed <= 4000; seed++) {
		struct plan_random pr;
		struct canon *canon;

		plan_random_init(&pr, seed);
		canon = canon_at_random(pr.src);
		canon_free(canon_at_random(pr.dst));
		for (size_t i = 0; canon && i < pr.req.map_count; i++) {
			if (!map_tokens(&pr, &pr.maps[i]))
				continue;
			can[by_slots(&pr, canon, &pr.maps[i], memory)]++;
		}
		canon_free(canon);
		plan_random_fini(&pr);
	}
	print_message("%u maps moved, %u reach a byte twice\n", can[1], can[0]);
	assert_true(can[1] > 2000);
	free(memory[0]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(canon_of_each_engine_is_stable),
		cmocka_unit_test(canon_of_several_views_is_stable),
		cmocka_unit_test(bytes_between_any_engines_are_equal),
		cmocka_unit_test(identity_depends_on_meaning_not_place),
		cmocka_unit_test(canon_of_layers_sharing_bytes_is_stable),
		cmocka_unit_test(canon_impossible_is_refused_by_name),
		cmocka_unit_test(canon_at_its_limits_is_made),
		cmocka_unit_test(canon_without_memory_leaks_nothing),
		cmocka_unit_test(layouts_random_move_equally_by_slots),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
