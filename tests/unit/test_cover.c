/* SPDX-License-Identifier: Apache-2.0 */
/* Covers against a choice made unit by unit, and what a sender checks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/cover.h"
#include "tests/lib/shapes.h"
#include "tests/lib/shard.h"
#include "tests/lib/plan_random.h"

#define SOURCES_MAX 12
#define LAYERS 4

/* What a rank holds of each layer's only field; units 0 = the layer is absent. */
struct holding {
	uint32_t first[LAYERS], units[LAYERS];
};

static struct layout *rank_make(uint32_t rank, const struct holding *h, uint32_t total)
{
	struct layout *layout;
	struct layout_view *view;
	uint32_t index;

	assert_int_equal(shape_new(rank, &layout), 0);
	assert_int_equal(shape_buffer(layout, 4096, &index), 0);
	assert_int_equal(shape_view(layout, "kv", 1, 4, &view), 0);
	for (uint32_t i = 0; i < LAYERS; i++) {
		struct layout_field f = {.page_stride = 1024,
					 .unit_stride = 4,
					 .unit_bytes = 4,
					 .offset = i * 128,
					 .first_unit = h->first[i],
					 .units = h->units[i],
					 .total_units = total};
		struct layout_layer *layer;

		if (h->units[i] == 0)
			continue;
		assert_int_equal(shape_layer(view, i, &layer), 0);
		assert_int_equal(shape_field(layer, "k", &f), 0);
	}
	assert_int_equal(layout_check(layout), 0);
	return layout;
}

struct scene {
	struct layout *sources[SOURCES_MAX], *dst;
	struct cover_source list[SOURCES_MAX];
	struct holding held[SOURCES_MAX], want;
	uint32_t count, total;
	uint64_t room;
};

static void scene_make(struct scene *s, uint64_t seed)
{
	uint64_t *rng = &seed;

	*s = (struct scene){.count = random_below(rng, SOURCES_MAX + 1),
			    .total = random_below(rng, 3) ? 1 + random_below(rng, 9) : 1,
			    .room = random_next(rng)};
	for (uint32_t i = 0; i <= s->count; i++) {
		struct holding *h = i < s->count ? &s->held[i] : &s->want;

		for (uint32_t l = 0; l < LAYERS; l++) {
			h->first[l] = random_below(rng, s->total);
			h->units[l] = random_below(rng, s->total - h->first[l] + 1);
		}
	}
	for (uint32_t i = 0; i < s->count; i++) /* ranks apart, in no order */
		s->sources[i] =
			rank_make((i * 7 + 3) % SOURCES_MAX, &s->held[i], s->total);
	for (uint32_t i = 0; i < s->count; i++)
		s->list[i].layout = s->sources[i];
	s->dst = rank_make(99, &s->want, s->total);
}

static void scene_free(struct scene *s)
{
	for (uint32_t i = 0; i < s->count; i++)
		layout_free(s->sources[i]);
	layout_free(s->dst);
}

/* The source of one unit by the rule, or -1. */
static int chosen(const struct scene *s, uint32_t layer, uint32_t unit)
{
	int best = -1, holders[SOURCES_MAX], n = 0;

	for (uint32_t rank = 0; rank < SOURCES_MAX; rank++)
		for (uint32_t i = 0; i < s->count; i++)
			if (s->sources[i]->rank == rank &&
			    unit >= s->held[i].first[layer] &&
			    unit < s->held[i].first[layer] + s->held[i].units[layer])
				holders[n++] = (int)i;
	if (n > 0)
		best = holders[s->total == 1 ? s->room % (uint64_t)n : 0];
	return best;
}

static int wanted_of(const struct scene *s, const struct cover *cover, uint32_t layer,
		     uint32_t unit)
{
	int found = -1;

	for (uint32_t i = 0; i < s->count; i++)
		for (size_t j = 0; j < cover->per_source[i].count; j++) {
			const struct plan_want *w = &cover->per_source[i].wants[j];

			if (w->layer != layer || unit < w->first_unit ||
			    unit >= w->first_unit + w->units)
				continue;
			assert_int_equal(found, -1); /* exactly one */
			found = (int)i;
		}
	return found;
}

static bool can_cover(const struct scene *s)
{
	for (uint32_t l = 0; l < LAYERS; l++)
		for (uint32_t u = 0; u < s->want.units[l]; u++)
			if (chosen(s, l, s->want.first[l] + u) < 0)
				return false;
	return true;
}

static void cover_of_random_ranks_takes_each_unit_once(void **state)
{
	uint32_t made = 0, refused = 0;

	(void)state;
	for (uint64_t seed = 1; seed <= 20000; seed++) {
		struct scene s;
		struct cover *cover;

		scene_make(&s, seed);
		if (cover_make(s.list, s.count, s.dst, NULL, 0, s.room, &cover) < 0) {
			assert_int_equal(err_last()->code, ERR_COVER);
			assert_false(can_cover(&s));
			assert_null(cover);
			scene_free(&s);
			refused++;
			continue;
		}
		for (uint32_t l = 0; l < LAYERS; l++)
			for (uint32_t u = 0; u < s.total; u++) {
				bool want = u >= s.want.first[l] &&
					    u < s.want.first[l] + s.want.units[l];

				assert_int_equal(wanted_of(&s, cover, l, u),
						 want ? chosen(&s, l, u) : -1);
			}
		for (uint32_t i = 0; i < s.count; i++) {
			assert_int_equal(cover_check_wants(s.sources[i], s.dst,
							   cover->per_source[i].wants,
							   cover->per_source[i].count),
					 0);
		}
		made++;
		cover_free(cover);
		scene_free(&s);
	}
	assert_true(made > 2000 && refused > 2000);
}

/* ---- engines ---- */

static struct layout *mha(uint32_t tp, uint32_t rank, uint32_t heads,
			  uint32_t first_layer, uint32_t layers)
{
	uint32_t ids[16];
	struct shape_sglang_kv kv = {.view = "kv",
				     .page_size = 4,
				     .pages = 4,
				     .layer_ids = ids,
				     .layer_count = layers,
				     .kv_heads = heads,
				     .tp = {.size = tp, .rank = rank % tp},
				     .head_bytes = 8};
	struct layout *layout;

	for (uint32_t i = 0; i < layers; i++)
		ids[i] = first_layer + i;
	assert_int_equal(shape_new(rank, &layout), 0);
	assert_int_equal(shape_sglang_mha(layout, &kv), 0);
	assert_int_equal(layout_check(layout), 0);
	return layout;
}

static void cover_of_stages_takes_each_layer_from_its_stage(void **state)
{
	struct layout *a = mha(1, 0, 8, 0, 5), *b = mha(1, 1, 8, 5, 4);
	struct layout *idle = mha(1, 2, 8, 9, 3), *dst = mha(2, 1, 8, 0, 9);
	struct cover_source list[] = {{a}, {b}, {idle}};
	struct cover *cover;

	(void)state;
	assert_int_equal(cover_make(list, 3, dst, NULL, 0, 1, &cover), 0);
	assert_int_equal(cover->per_source[0].count, 2 * 5);
	assert_int_equal(cover->per_source[1].count, 2 * 4);
	assert_int_equal(cover->per_source[2].count, 0);
	for (size_t i = 0; i < 8; i++) {
		assert_int_equal(cover->per_source[1].wants[i].layer, 5 + i / 2);
		assert_int_equal(cover->per_source[1].wants[i].first_unit, 4);
		assert_int_equal(cover->per_source[1].wants[i].units, 4);
	}
	cover_free(cover);
	assert_true(cover_make(list, 1, dst, NULL, 0, 1, &cover) < 0);
	assert_string_equal(err_last()->text,
			    "view kv layer 5 field k units [4,8): no source holds them");
	layout_free(a);
	layout_free(b);
	layout_free(idle);
	layout_free(dst);
}

/* Rooms go round the replicas of a latent; a room stays with one for all
 * layers, so it is one contribution. */
static void cover_of_a_latent_spreads_rooms(void **state)
{
	struct shape_sglang_kv kv = {.view = "kv",
				     .page_size = 4,
				     .pages = 4,
				     .layer_count = 6,
				     .tp = {.size = 4},
				     .head_bytes = 1152};
	struct layout *ranks[4], *dst;
	struct cover_source list[4];

	(void)state;
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(shape_new(i, &ranks[i]), 0);
		assert_int_equal(shape_sglang_mla(ranks[i], &kv), 0);
		list[i].layout = ranks[i];
	}
	dst = ranks[0];
	for (uint64_t room = UINT64_MAX - 5; room != 6; room++) {
		struct cover *cover;

		assert_int_equal(cover_make(list, 4, dst, NULL, 0, room, &cover), 0);
		for (unsigned int i = 0; i < 4; i++)
			assert_int_equal(cover->per_source[i].count,
					 i == room % 4 ? 6 : 0);
		cover_free(cover);
	}
	for (uint32_t i = 0; i < 4; i++)
		layout_free(ranks[i]);
}

/* Sources [0, n) and a destination, each a shard of the tokens; all units on each. */
static void shards_make(struct layout **sources, struct cover_source *list, uint32_t n,
			uint32_t run, struct layout **dst, uint32_t m, uint32_t rank)
{
	for (uint32_t i = 0; i < n; i++) {
		sources[i] = mha(1, i, 8, 0, 2);
		if (n > 1)
			sources[i]->views[0].shard = (struct token_shard){n, i, run};
		list[i].layout = sources[i];
	}
	*dst = mha(1, 0, 8, 0, 2);
	if (m > 1)
		(*dst)->views[0].shard = (struct token_shard){m, rank, run};
}

static bool wants_all(const struct cover *cover, uint32_t source)
{
	if (cover->per_source[source].count == 0)
		return false;
	assert_int_equal(cover->per_source[source].count, 4); /* k, v of two layers */
	for (size_t i = 0; i < 4; i++)
		assert_int_equal(cover->per_source[source].wants[i].units, 8);
	return true;
}

/* Of each token that the destination holds exactly one source is asked. */
static void cover_of_token_shards_takes_each_token_once(void **state)
{
	struct layout *sources[SOURCES_MAX], *dst;
	struct cover_source list[SOURCES_MAX];
	struct cover *cover;

	(void)state;
	for (uint32_t n = 1; n <= 4; n++)
		for (uint32_t m = 1; m <= 4; m++)
			for (uint32_t rank = 0; rank < m; rank++) {
				shards_make(sources, list, n, 3, &dst, m, rank);
				assert_int_equal(
					cover_make(list, n, dst, NULL, 0, 5, &cover), 0);
				for (uint32_t t = 0; t < n * m * 3 * 2; t++) {
					uint32_t asked = 0;

					if (t / 3 % m != rank)
						continue;
					for (uint32_t i = 0; i < n; i++)
						asked += wants_all(cover, i) &&
							 t / 3 % n == i;
					assert_int_equal(asked, 1);
				}
				for (uint32_t i = 0; i < n; i++) /* and nobody in vain */
					assert_int_equal(
						wants_all(cover, i),
						n == 1 || m == 1 ||
							token_shard_meet(
								&sources[i]
									 ->views[0]
									 .shard,
								&dst->views[0].shard));
				cover_free(cover);
				for (uint32_t i = 0; i < n; i++)
					layout_free(sources[i]);
				layout_free(dst);
			}
}

static void cover_of_missing_shards_is_refused(void **state)
{
	struct layout *sources[4], *dst;
	struct cover_source list[4];
	struct cover *cover;

	(void)state;
	shards_make(sources, list, 4, 3, &dst, 1, 0);
	assert_true(cover_make(list, 3, dst, NULL, 0, 5, &cover) < 0);
	assert_int_equal(err_last()->code, ERR_COVER);
	assert_string_equal(
		err_last()->text,
		"view kv layer 0 field k units [0,8) of token shard 3 of 4: no "
		"source holds them");
	sources[2]->rank = 1; /* another shard of the same rank is none twice */
	assert_int_equal(cover_make(list, 4, dst, NULL, 0, 5, &cover), 0);
	cover_free(cover);
	sources[2]->views[0].shard.rank = 1;
	assert_true(cover_make(list, 4, dst, NULL, 0, 5, &cover) < 0);
	assert_int_equal(err_last()->code, ERR_DUP);
	sources[2]->views[0].shard = (struct token_shard){4, 2, 6};
	assert_true(cover_make(list, 4, dst, NULL, 0, 5, &cover) < 0);
	assert_int_equal(err_last()->code, ERR_LAYOUT);
	assert_non_null(strstr(err_last()->text, "divide the tokens differently"));
	for (uint32_t i = 0; i < 4; i++)
		layout_free(sources[i]);
	layout_free(dst);
}

static void cover_of_named_views_leaves_the_others(void **state)
{
	struct layout *a = mha(1, 0, 8, 0, 2), *dst = mha(1, 0, 8, 0, 2);
	struct layout_view *view;
	struct layout_layer *layer;
	struct layout_field f = {
		.page_stride = 8, .unit_bytes = 8, .units = 1, .total_units = 1};
	const char *kv = "kv", *twice[] = {"kv", "kv"}, *other = "none";
	struct cover_source list = {a};
	struct cover *cover;

	(void)state;
	assert_int_equal(shape_view(dst, "state", 1, 1, &view), 0);
	assert_int_equal(shape_layer(view, 0, &layer), 0);
	assert_int_equal(shape_field(layer, "s", &f), 0);
	assert_true(cover_make(&list, 1, dst, NULL, 0, 0, &cover) < 0);
	assert_int_equal(err_last()->code, ERR_COVER);
	assert_int_equal(cover_make(&list, 1, dst, &kv, 1, 0, &cover), 0);
	assert_int_equal(cover->per_source[0].count, 4);
	cover_free(cover);
	assert_true(cover_make(&list, 1, dst, twice, 2, 0, &cover) < 0);
	assert_int_equal(err_last()->code, ERR_INVAL);
	assert_true(cover_make(&list, 1, dst, &other, 1, 0, &cover) < 0);
	assert_int_equal(err_last()->code, ERR_INVAL);
	layout_free(a);
	layout_free(dst);
}

static void cover_of_contradicting_ranks_is_refused(void **state)
{
	struct layout *a = mha(1, 4, 8, 0, 2), *dst = mha(1, 0, 16, 0, 2);
	struct cover_source list = {a};
	struct cover *cover;

	(void)state;
	assert_true(cover_make(&list, 1, dst, NULL, 0, 0, &cover) < 0);
	assert_int_equal(err_last()->code, ERR_LAYOUT);
	assert_string_equal(
		err_last()->text,
		"destination and source of rank 4: view kv layer 0 field k: "
		"total_units, heads of the model: 16 (the destination), 8 (the source)");
	layout_free(a);
	layout_free(dst);
}

static void wants_off_the_wire_are_checked(void **state)
{
	struct layout *src = mha(2, 1, 8, 1, 4), *dst = mha(1, 0, 8, 0, 4);
	static const struct {
		struct plan_want wants[3];
		size_t count;
		int code;
		const char *needle;
	} cases[] = {
		{{{.layer = 1, .first_unit = 4, .units = 4}}, 1, 0, NULL},
		{{{.layer = 1, .first_unit = 4, .units = 2},
		  {.layer = 1, .first_unit = 6, .units = 2}},
		 2,
		 0,
		 NULL},
		{{{.layer = 1, .first_unit = 4, .units = 2},
		  {.layer = 1, .field = 1, .first_unit = 4, .units = 2}},
		 2,
		 0,
		 NULL},
		{{{.layer = 1, .first_unit = 4, .units = 3},
		  {.layer = 1, .first_unit = 6, .units = 2}},
		 2,
		 ERR_DUP,
		 "unit 6 twice"},
		{{{.layer = 1, .first_unit = 6, .units = 2},
		  {.layer = 1, .field = 1, .first_unit = 4, .units = 2},
		  {.layer = 1, .first_unit = 4, .units = 3}},
		 3,
		 ERR_DUP,
		 "unit 6 twice"},
		{{{.view = 1, .layer = 1, .first_unit = 4, .units = 4}},
		 1,
		 ERR_RANGE,
		 "view number 1"},
		{{{.layer = 0, .first_unit = 4, .units = 4}}, 1, ERR_RANGE, "source"},
		{{{.layer = 4, .first_unit = 4, .units = 4}},
		 1,
		 ERR_RANGE,
		 "destination"},
		{{{.layer = 9, .first_unit = 4, .units = 4}}, 1, ERR_RANGE, "layer 9"},
		{{{.layer = 1, .field = 2, .first_unit = 4, .units = 4}},
		 1,
		 ERR_RANGE,
		 "field number 2"},
		{{{.layer = 1, .first_unit = 3, .units = 4}}, 1, ERR_RANGE, "[3,7)"},
		{{{.layer = 1, .first_unit = 4, .units = 5}}, 1, ERR_RANGE, "[4,9)"},
		{{{.layer = 1, .first_unit = UINT32_MAX, .units = UINT32_MAX}},
		 1,
		 ERR_RANGE,
		 "4294967295"},
		{{{.layer = 1, .first_unit = 4, .units = 0}}, 1, ERR_RANGE, "no units"},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		int r = cover_check_wants(src, dst, cases[i].wants, cases[i].count);

		if (cases[i].code == 0) {
			assert_int_equal(r, 0);
			continue;
		}
		assert_true(r < 0);
		assert_int_equal(err_last()->code, cases[i].code);
		assert_non_null(strstr(err_last()->text, cases[i].needle));
	}
	assert_int_equal(cover_check_wants(src, dst, NULL, 0), 0);
	layout_free(src);
	layout_free(dst);
}

static void cover_without_memory_is_an_error(void **state)
{
	struct layout *a = mha(2, 0, 8, 0, 9), *b = mha(2, 1, 8, 0, 9);
	struct layout *dst = mha(1, 0, 8, 0, 9);
	struct cover_source list[] = {{a}, {b}};
	struct cover *cover;
	uint64_t count;

	(void)state;
	mem_fail_at(0);
	assert_int_equal(cover_make(list, 2, dst, NULL, 0, 0, &cover), 0);
	count = mem_count();
	cover_free(cover);
	assert_true(count > 5);
	for (uint64_t n = 1; n <= count; n++) {
		mem_fail_at(n);
		assert_true(cover_make(list, 2, dst, NULL, 0, 0, &cover) < 0);
		mem_fail_at(0);
		assert_null(cover);
		assert_int_equal(err_last()->code, ERR_NOMEM);
	}
	layout_free(a);
	layout_free(b);
	layout_free(dst);
}

/* Processor seconds for the cover of so many sources that hold nothing. */
static double cover_seconds(uint32_t count)
{
	struct cover_source *list = calloc(count, sizeof(*list));
	struct layout *sources = calloc(count, sizeof(*sources)), dst = {.rank = 0};
	struct cover *cover;
	clock_t begun;

	assert_non_null(list);
	assert_non_null(sources);
	for (uint32_t i = 0; i < count; i++) {
		sources[i].rank = count - i;
		list[i].layout = &sources[i];
	}
	begun = clock();
	assert_int_equal(cover_make(list, count, &dst, NULL, 0, 0, &cover), 0);
	cover_free(cover);
	free(list);
	free(sources);
	return (double)(clock() - begun) / CLOCKS_PER_SEC;
}

/* Engines decide how many there are: a square would be seconds. */
static void cover_of_many_sources_is_not_quadratic(void **state)
{
	double few = 1e9, many = 1e9;

	(void)state;
	for (int i = 0; i < 3; i++) { /* the best: a shared machine only adds */
		double a = cover_seconds(4000), b = cover_seconds(64000);

		few = a < few ? a : few;
		many = b < many ? b : many;
	}
	if (many > few * 64) /* 16 times the sources, 256 times their square */
		fail_msg("4000 sources: %f s, 64000: %f s", few, many);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(cover_of_random_ranks_takes_each_unit_once),
		cmocka_unit_test(cover_of_stages_takes_each_layer_from_its_stage),
		cmocka_unit_test(cover_of_a_latent_spreads_rooms),
		cmocka_unit_test(cover_of_token_shards_takes_each_token_once),
		cmocka_unit_test(cover_of_missing_shards_is_refused),
		cmocka_unit_test(cover_of_named_views_leaves_the_others),
		cmocka_unit_test(cover_of_contradicting_ranks_is_refused),
		cmocka_unit_test(wants_off_the_wire_are_checked),
		cmocka_unit_test(cover_without_memory_is_an_error),
		cmocka_unit_test(cover_of_many_sources_is_not_quadratic),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
