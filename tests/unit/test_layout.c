/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts: every malformed or hostile one is refused by the name of the faulty field,
 * and both forms, JSON and wire, preserve the layout. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cjson/cJSON.h>
#include <cmocka.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/layout.h"
#include "tests/lib/shapes.h"
#include "tests/lib/plan_random.h"

static struct layout *parse(const char *text)
{
	cJSON *json = cJSON_Parse(text);
	struct layout *layout;

	assert_non_null(json);
	if (layout_parse(json, &layout) < 0) {
		print_error("%s\n", err_last()->text);
		fail();
	}
	cJSON_Delete(json);
	return layout;
}

/* 40 layers of K and V, each in its own buffer: the pool of a model. */
static struct layout *pool(void)
{
	struct shape_sglang_kv kv = {.view = "kv",
				     .page_size = 16,
				     .pages = 64,
				     .layer_count = 40,
				     .kv_heads = 8,
				     .tp = {.size = 2, .rank = 1},
				     .head_bytes = 256};
	struct layout *layout;

	assert_int_equal(shape_new(9, &layout), 0);
	assert_int_equal(shape_sglang_mha(layout, &kv), 0);
	assert_int_equal(layout_check(layout), 0);
	return layout;
}

static bool fields_equal(const struct layout_field *a, const struct layout_field *b)
{
	return strcmp(a->name, b->name) == 0 && a->buffer == b->buffer &&
	       a->offset == b->offset && a->page_stride == b->page_stride &&
	       a->token_stride == b->token_stride && a->unit_stride == b->unit_stride &&
	       a->unit_bytes == b->unit_bytes && a->first_unit == b->first_unit &&
	       a->units == b->units && a->total_units == b->total_units &&
	       strcmp(a->format, b->format) == 0;
}

static void assert_layouts_equal(const struct layout *a, const struct layout *b)
{
	assert_int_equal(a->rank, b->rank);
	assert_int_equal(a->buffer_count, b->buffer_count);
	assert_memory_equal(a->buffers, b->buffers, a->buffer_count * sizeof(uint64_t));
	assert_int_equal(a->view_count, b->view_count);
	for (uint32_t i = 0; i < a->view_count; i++) {
		const struct layout_view *v = &a->views[i], *w = &b->views[i];

		assert_string_equal(v->name, w->name);
		assert_int_equal(v->page_tokens, w->page_tokens);
		assert_int_equal(v->pages, w->pages);
		assert_memory_equal(&v->shard, &w->shard, sizeof(v->shard));
		assert_int_equal(v->layer_count, w->layer_count);
		for (uint32_t j = 0; j < v->layer_count; j++) {
			assert_int_equal(v->layers[j].layer, w->layers[j].layer);
			assert_int_equal(v->layers[j].field_count,
					 w->layers[j].field_count);
			for (uint32_t k = 0; k < v->layers[j].field_count; k++)
				assert_true(fields_equal(&v->layers[j].fields[k],
							 &w->layers[j].fields[k]));
		}
	}
}

static uint8_t *encoded(const struct layout *layout, size_t *size_p)
{
	struct cursor out;
	uint8_t *bytes;

	bytes = malloc(1u << 20);
	assert_non_null(bytes);
	cursor_write(&out, bytes, 1u << 20);
	assert_int_equal(layout_encode(layout, &out), 0);
	*size_p = out.pos;
	return realloc(bytes, out.pos); /* reads past its end are detected */
}

static void layout_encoded_decodes_to_the_same(void **state)
{
	struct layout *a = pool(), *b;
	struct cursor in;
	size_t size;
	uint8_t *bytes = encoded(a, &size);

	(void)state;
	cursor_read(&in, bytes, size);
	assert_int_equal(layout_decode(&in, &b), 0);
	assert_int_equal(in.pos, size);
	assert_layouts_equal(a, b);
	/* 80 alike fields: 12 bytes each, and a little around them */
	assert_true(size < 80 * 8 + 80 * 12 + 40 * 5 + 300);
	layout_free(a);
	layout_free(b);
	free(bytes);
}

static void layout_printed_parses_to_the_same(void **state)
{
	struct layout *a = pool(), *b;
	cJSON *json;

	(void)state;
	assert_int_equal(layout_print(a, &json), 0);
	assert_int_equal(layout_parse(json, &b), 0);
	assert_layouts_equal(a, b);
	cJSON_Delete(json);
	layout_free(a);
	layout_free(b);
}

static void layouts_at_random_survive_both_forms(void **state)
{
	(void)state;
	for (uint64_t seed = 1; seed <= 500; seed++) {
		struct plan_random pr;
		struct layout *b, *c;
		struct cursor in;
		uint8_t *bytes;
		cJSON *json;
		size_t size;

		plan_random_init(&pr, seed);
		bytes = encoded(pr.src, &size);
		cursor_read(&in, bytes, size);
		assert_int_equal(layout_decode(&in, &b), 0);
		assert_layouts_equal(pr.src, b);
		assert_int_equal(layout_print(b, &json), 0);
		assert_int_equal(layout_parse(json, &c), 0);
		assert_layouts_equal(pr.src, c);
		cJSON_Delete(json);
		free(bytes);
		layout_free(b);
		layout_free(c);
		plan_random_fini(&pr);
	}
}

static void encoding_without_room_is_refused(void **state)
{
	struct layout *a = pool();
	struct cursor out;
	uint8_t bytes[100];

	(void)state;
	cursor_write(&out, bytes, sizeof(bytes));
	assert_true(layout_encode(a, &out) < 0);
	assert_int_equal(err_last()->code, ERR_TOOBIG);
	layout_free(a);
}

static void wire_cut_short_is_refused(void **state)
{
	struct layout *a = pool(), *b;
	size_t size;
	uint8_t *bytes = encoded(a, &size);

	(void)state;
	for (size_t len = 0; len < size; len++) {
		uint8_t *exact = malloc(len + 1); /* so that a sanitizer sees past it */
		struct cursor in;

		memcpy(exact, bytes, len);
		cursor_read(&in, exact, len);
		assert_true(layout_decode(&in, &b) < 0);
		assert_null(b);
		free(exact);
	}
	free(bytes);
	layout_free(a);
}

/* Any byte changed: decoded to a sound layout or refused, never trusted. */
static void wire_with_a_changed_byte_is_checked(void **state)
{
	struct layout *a = pool(), *b;
	size_t size;
	uint8_t *bytes = encoded(a, &size);
	size_t refused = 0;

	(void)state;
	for (size_t i = 0; i < size; i++) {
		for (int bit = 0; bit < 8; bit++) {
			struct cursor in;

			bytes[i] ^= (uint8_t)(1 << bit);
			cursor_read(&in, bytes, size);
			if (layout_decode(&in, &b) < 0) {
				assert_null(b);
				refused++;
			} else {
				assert_int_equal(layout_check(b), 0);
				layout_free(b);
			}
			bytes[i] ^= (uint8_t)(1 << bit);
		}
	}
	assert_true(refused > size);
	free(bytes);
	layout_free(a);
}

#define HEAD(views) "\x02\0\0\0\0\0\0\0\0" views "\0\0\0"
#define ALL "\0\0\0\0\0\0\0\0\0\0\0\0" /* tokens */

static void wire_hostile_is_refused(void **state)
{
	static const struct {
		const char *bytes;
		size_t size;
		const char *needle;
	} cases[] = {
		{"\x01", 1, "form 1"},
		{"\x02\0\0\0\0\xff\xff\xff\xff", 9, "layout"},
		{"\x02\0\0\0\0\x01\0\0\0", 9, "layout"},
		/* no buffers, 2^32 - 1 views */
		{"\x02\0\0\0\0\0\0\0\0\xff\xff\xff\xff", 13, "layout"},
		/* a view of no layers and no name */
		{HEAD("\x01") "\0\0\x01\0\0\0\x01\0\0\0" ALL "\0\0\0\0", 40, "name"},
		/* page_tokens 0 */
		{HEAD("\x01") "\x01\0a\0\0\0\0\x01\0\0\0" ALL "\0\0\0\0", 41,
		 "views.a.page_tokens"},
		/* shards: size 1, rank 2 of 2, run 0 */
		{HEAD("\x01") "\x01\0a\x01\0\0\0\x01\0\0\0"
			      "\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0",
		 41, "views.a.shard.size"},
		{HEAD("\x01") "\x01\0a\x01\0\0\0\x01\0\0\0"
			      "\x02\0\0\0\x02\0\0\0\x01\0\0\0\0\0\0\0",
		 41, "views.a.shard.rank"},
		{HEAD("\x01") "\x01\0a\x01\0\0\0\x01\0\0\0"
			      "\x02\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0",
		 41, "views.a.shard.run"},
		/* a first layer like the one before it */
		{HEAD("\x01") "\x01\0a\x01\0\0\0\x01\0\0\0" ALL "\x01\0\0\0\0\0\0\0\x01",
		 46, "bad form"},
		/* layers out of order */
		{HEAD("\x01") "\x01\0a\x01\0\0\0\x01\0\0\0" ALL "\x02\0\0\0"
			      "\x05\0\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0\0",
		 59, "out of order"},
		/* the same view twice */
		{HEAD("\x02") "\x01\0a\x01\0\0\0\x01\0\0\0" ALL "\0\0\0\0"
			      "\x01\0a\x01\0\0\0\x01\0\0\0" ALL "\0\0\0\0",
		 69, "views.a: named twice"},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		struct layout *b;
		struct cursor in;

		cursor_read(&in, cases[i].bytes, cases[i].size);
		err_clear();
		assert_true(layout_decode(&in, &b) < 0);
		assert_null(b);
		if (!strstr(err_last()->text, cases[i].needle))
			print_error("%zu: %s\n", i, err_last()->text);
		assert_non_null(strstr(err_last()->text, cases[i].needle));
	}
}

#define ONE(view, layer, name, bytes, total) FULL("", view, layer, name, bytes, total, "")
#define OF_FORMAT(format) FULL("", "kv", "3", "k", "4", "2", ",\"format\":\"" format "\"")
#define BY_RUNS(run)                                                                    \
	FULL("\"shard\":{\"size\":2,\"rank\":1,\"run\":" run "},", "kv", "3", "k", "4", \
	     "2", "")
#define FULL(shard, view, layer, name, bytes, total, format)                 \
	"{\"buffers\":[64],\"views\":{\"" view "\":{" shard                  \
	"\"page_tokens\":1,\"pages\":1,"                                     \
	"\"layers\":[{\"layer\":" layer ",\"fields\":[{\"name\":\"" name     \
	"\",\"buffer\":0,\"offset\":0,\"page_stride\":8,\"token_stride\":4," \
	"\"unit_stride\":4,\"unit_bytes\":" bytes                            \
	",\"first_unit\":0,\"units\":1,\"total_units\":" total format "}]}]}}}"

static void layouts_contradicting_name_the_difference(void **state)
{
	static const struct {
		const char *here, *there, *needle; /* NULL = compatible */
	} cases[] = {
		{ONE("kv", "3", "k", "4", "2"), ONE("kv", "3", "k", "4", "2"), NULL},
		{ONE("kv", "3", "k", "4", "2"), ONE("kv", "4", "x", "8", "9"), NULL},
		{ONE("kv", "3", "k", "4", "2"), ONE("ssm", "3", "x", "8", "9"), NULL},
		{ONE("kv", "3", "k", "4", "2"), ONE("kv", "3", "k", "8", "2"),
		 "view kv layer 3 field k: unit_bytes 4 (ours), 8 (the peer's)"},
		{ONE("kv", "3", "k", "4", "2"), ONE("kv", "3", "k", "4", "3"),
		 "view kv layer 3 field k: total_units, heads of the model: 2 (ours), 3 "
		 "(the peer's)"},
		{ONE("kv", "3", "k", "4", "2"), ONE("kv", "3", "v", "4", "2"),
		 "view kv layer 3 field k: only in ours"},
		{OF_FORMAT("bf16"), ONE("kv", "3", "k", "4", "2"), NULL},
		{OF_FORMAT("bf16"), OF_FORMAT("bf16"), NULL},
		{OF_FORMAT("bf16"), OF_FORMAT("fp16"),
		 "view kv layer 3 field k: format bf16 (ours), fp16 (the peer's)"},
		{BY_RUNS("2"), BY_RUNS("6"), NULL},
		{BY_RUNS("2"), ONE("kv", "3", "k", "4", "2"), NULL},
		{BY_RUNS("2"), BY_RUNS("3"),
		 "view kv: shard.run 2 (ours), 3 (the peer's): one must be a multiple of "
		 "the other"},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		struct layout *a = parse(cases[i].here), *b = parse(cases[i].there);
		int r = layout_compatible(a, b, &layout_from_us);

		if (!cases[i].needle) {
			assert_int_equal(r, 0);
		} else {
			assert_true(r < 0);
			assert_int_equal(err_last()->code, ERR_LAYOUT);
			assert_string_equal(err_last()->text, cases[i].needle);
		}
		layout_free(a);
		layout_free(b);
	}
}

static void json_with_unknown_fields_is_refused(void **state)
{
	static const struct {
		const char *text, *needle;
	} cases[] = {
		{"{\"buffers\":[],\"views\":{},\"color\":1}",
		 "layout.color: unknown member"},
		{FULL("\"color\":1,", "kv", "3", "k", "4", "2", ""),
		 "views.kv.color: unknown member"},
		{FULL("", "kv", "3,\"color\":1", "k", "4", "2", ""),
		 "views.kv.layers[0].color: unknown member"},
		{FULL("", "kv", "3", "k", "4", "2", ",\"color\":1"),
		 "views.kv.layers[0].fields[0].color: unknown member"},
		{FULL("", "kv", "3", "k", "4", "2", ",\"format\":16"),
		 "views.kv.layers[0].fields[0].format: must be a string"},
		{OF_FORMAT("sixteen_letters_"),
		 "a format has 0 to 15 bytes, this has 16"},
		{OF_FORMAT("b 16"), "a format is printable ASCII without spaces"},
		{FULL("\"shard\":2,", "kv", "3", "k", "4", "2", ""),
		 "views.kv.shard: must be an object"},
		{FULL("\"shard\":{\"size\":2,\"rank\":0},", "kv", "3", "k", "4", "2", ""),
		 "views.kv.shard.run: missing"},
		{FULL("\"shard\":{\"size\":2,\"rank\":0,\"run\":1,\"of\":1},", "kv", "3",
		      "k", "4", "2", ""),
		 "views.kv.shard.of: unknown member"},
		{FULL("\"shard\":{\"size\":257,\"rank\":0,\"run\":1},", "kv", "3", "k",
		      "4", "2", ""),
		 "views.kv.shard.size: 257 is not in 2"},
		{FULL("\"shard\":{\"size\":2,\"rank\":2,\"run\":1},", "kv", "3", "k", "4",
		      "2", ""),
		 "views.kv.shard.rank: 2, must be below size 2"},
		{BY_RUNS("1048577"), "views.kv.shard.run: 1048577 is not in 1"},
	};
	struct layout *one;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		cJSON *json = cJSON_Parse(cases[i].text);
		struct layout *layout;

		assert_non_null(json);
		assert_true(layout_parse(json, &layout) < 0);
		if (!strstr(err_last()->text, cases[i].needle))
			print_error("%zu: %s\n", i, err_last()->text);
		assert_non_null(strstr(err_last()->text, cases[i].needle));
		cJSON_Delete(json);
	}
	one = parse(FULL("\"shard\":{\"size\":1,\"rank\":0,\"run\":9},", "kv", "3", "k",
			 "4", "2", ""));
	assert_true(token_shard_is_all(&one->views[0].shard));
	layout_free(one);
}

static void layers_in_any_order_are_sorted(void **state)
{
	struct layout *a =
		parse("{\"buffers\":[],\"views\":{\"a\":{\"page_tokens\":1,\"pages\":0,"
		      "\"layers\":["
		      "{\"layer\":7,\"fields\":[]},{\"layer\":2,\"fields\":[]},"
		      "{\"layer\":5,\"fields\":[]}]}}}");

	(void)state;
	assert_int_equal(a->views[0].layers[0].layer, 2);
	assert_int_equal(a->views[0].layers[1].layer, 5);
	assert_int_equal(a->views[0].layers[2].layer, 7);
	assert_ptr_equal(layout_layer_find(&a->views[0], 5), &a->views[0].layers[1]);
	assert_null(layout_layer_find(&a->views[0], 6));
	assert_null(layout_view_find(a, "b"));
	layout_free(a);
}

/* ---- targets ---- */

static struct layout *two_fields(uint64_t k_offset, uint64_t v_offset, uint64_t page,
				 uint64_t token, uint64_t unit)
{
	struct layout_field f = {.offset = k_offset,
				 .page_stride = page,
				 .token_stride = token,
				 .unit_stride = unit,
				 .unit_bytes = 4,
				 .units = 3,
				 .total_units = 3};
	struct layout *layout;
	struct layout_view *view;
	struct layout_layer *layer;
	uint32_t index;

	assert_int_equal(shape_new(0, &layout), 0);
	assert_int_equal(shape_buffer(layout, 1 << 20, &index), 0);
	assert_int_equal(shape_view(layout, "kv", 5, 7, &view), 0);
	assert_int_equal(shape_layer(view, 1, &layer), 0);
	assert_int_equal(shape_field(layer, "k", &f), 0);
	f.offset = v_offset;
	assert_int_equal(shape_field(layer, "v", &f), 0);
	assert_int_equal(layout_check(layout), 0);
	return layout;
}

static void target_with_overlapping_fields_is_refused(void **state)
{
	static const struct {
		uint64_t k, v, page, token, unit;
		const char *needle; /* NULL = fine */
	} cases[] = {
		{0, 60, 120, 12, 4, NULL}, /* NHD, K then V in a page */
		{0, 12, 120, 24, 4, NULL}, /* K and V next to each other in a token */
		{0, 420, 60, 12, 4, NULL}, /* K of all pages, then V */
		{0, 4, 4 * 2, 8 * 7, 8 * 35, NULL}, /* pages innermost */
		{0, 59, 120, 12, 4, "layer 1 field k and layer 1 field v share byte 59"},
		{0, 0, 120, 12, 4, "share byte 0"},
		{8, 0, 120, 24, 4, "share byte 8"},
		{0, 4096, 120, 11, 4, "field k: two of its pages, tokens or units"},
		{0, 4096, 59, 12, 4, "two of its pages"},
		{0, 4096, 60, 12, 3, "two of its pages"},
		{0, 4096, 0, 12, 4, "two of its pages"},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		struct layout *a = two_fields(cases[i].k, cases[i].v, cases[i].page,
					      cases[i].token, cases[i].unit);
		int r = layout_check_target(a);

		if (r < 0 && !cases[i].needle)
			print_error("%zu: %s\n", i, err_last()->text);
		if (!cases[i].needle) {
			assert_int_equal(r, 0);
		} else {
			assert_true(r < 0);
			assert_int_equal(err_last()->code, ERR_LAYOUT);
			if (!strstr(err_last()->text, cases[i].needle))
				print_error("%zu: %s\n", i, err_last()->text);
			assert_non_null(strstr(err_last()->text, cases[i].needle));
		}
		layout_free(a);
	}
}

static void target_of_a_pool_is_fine(void **state)
{
	struct layout *a = pool();

	(void)state;
	assert_int_equal(layout_check_target(a), 0);
	layout_free(a);
}

/* Attention and state of one tensor: views may share, fields of one may not. */
static void target_views_may_share_a_buffer(void **state)
{
	struct layout *a = two_fields(0, 60, 120, 12, 4);
	struct layout_view *view;
	struct layout_layer *layer;
	struct layout_field f = {.page_stride = 240,
				 .unit_bytes = 200,
				 .unit_stride = 200,
				 .units = 1,
				 .total_units = 1};

	(void)state;
	assert_int_equal(shape_view(a, "ssm", 1, 3, &view), 0);
	assert_int_equal(shape_layer(view, 1, &layer), 0);
	assert_int_equal(shape_field(layer, "s", &f), 0);
	assert_int_equal(layout_check(a), 0);
	assert_int_equal(layout_check_target(a), 0);
	layout_free(a);
}

/* ---- memory ---- */

static void decode_without_memory_is_an_error(void **state)
{
	struct layout *a = pool(), *b;
	size_t size;
	uint8_t *bytes = encoded(a, &size);
	uint64_t count;
	struct cursor in;

	(void)state;
	mem_fail_at(0);
	cursor_read(&in, bytes, size);
	assert_int_equal(layout_decode(&in, &b), 0);
	count = mem_count();
	layout_free(b);
	for (uint64_t n = 1; n <= count; n++) {
		cursor_read(&in, bytes, size);
		mem_fail_at(n);
		assert_true(layout_decode(&in, &b) < 0);
		mem_fail_at(0);
		assert_int_equal(err_last()->code, ERR_NOMEM);
	}
	free(bytes);
	layout_free(a);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(layout_encoded_decodes_to_the_same),
		cmocka_unit_test(layout_printed_parses_to_the_same),
		cmocka_unit_test(json_with_unknown_fields_is_refused),
		cmocka_unit_test(layouts_at_random_survive_both_forms),
		cmocka_unit_test(encoding_without_room_is_refused),
		cmocka_unit_test(wire_cut_short_is_refused),
		cmocka_unit_test(wire_with_a_changed_byte_is_checked),
		cmocka_unit_test(wire_hostile_is_refused),
		cmocka_unit_test(layouts_contradicting_name_the_difference),
		cmocka_unit_test(layers_in_any_order_are_sorted),
		cmocka_unit_test(target_with_overlapping_fields_is_refused),
		cmocka_unit_test(target_of_a_pool_is_fine),
		cmocka_unit_test(target_views_may_share_a_buffer),
		cmocka_unit_test(decode_without_memory_is_an_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
