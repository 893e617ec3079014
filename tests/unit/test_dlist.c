/* SPDX-License-Identifier: Apache-2.0 */
/* Descriptor lists: what is refused, which rows a pick makes (against a walk of
 * the entries one by one), and index lists on the wire. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/xfer/dlist.h"
#include "daemon/xfer/search.h"
#include "proto/base64.h"

static struct dlist *make(const struct dlist_entry *entries, uint32_t n)
{
	struct dlist *dlist = NULL;

	assert_int_equal(dlist_new(mem_dup(entries, n * sizeof(*entries)), n, 1, &dlist),
			 0);
	return dlist;
}

static void refused(struct dlist_entry entry, enum err_code code)
{
	struct dlist *dlist = NULL;

	assert_int_equal(dlist_new(mem_dup(&entry, sizeof(entry)), 1, 1, &dlist),
			 -err_errno(code));
	assert_null(dlist);
}

static void new_refuses_bad_entries(void **state)
{
	(void)state;
	refused((struct dlist_entry){1, 0, 0, 1}, ERR_INVAL);
	refused((struct dlist_entry){1, 8, 0, 0}, ERR_INVAL);
	refused((struct dlist_entry){1, 8, 7, 2}, ERR_INVAL);
	refused((struct dlist_entry){UINT64_MAX, 2, 0, 1}, ERR_RANGE);
	refused((struct dlist_entry){1, 8, UINT64_MAX / 2, 4}, ERR_RANGE);
	refused((struct dlist_entry){1, 1, 1, DLIST_DESCS_MAX + 1}, ERR_LIMIT);
}

/* Row k of a pick, by walking the entries one by one. */
static uint64_t oracle(const struct dlist_pick *pick, uint64_t k, uint64_t *len_p)
{
	uint64_t i = pick->index ? pick->index[k] : k;
	uint32_t e = 0;

	while (i >= pick->dlist->entries[e].count)
		i -= pick->dlist->entries[e++].count;
	*len_p = pick->dlist->entries[e].bytes;
	return pick->places->at[e].offset + i * pick->dlist->entries[e].stride;
}

/* The same few rows again and again are a plan of as many. */
static void plan_beyond_its_room_is_not_made(void **state)
{
	const struct dlist_entry entries[] = {{1000, 16, 0, 1}, {5000, 32, 0, 1}};
	struct search_place at[] = {{0, 1000}, {0, 5000}};
	struct places places = {.refs = 1, .at = at};
	struct dlist *list = make(entries, 2);
	uint32_t index[1000];
	struct dlist_pick pick = {list, &places, index, ARRAY_LEN(index)};
	struct plan *plan;
	size_t bytes;

	(void)state;
	for (uint32_t i = 0; i < ARRAY_LEN(index); i++)
		index[i] = i % 2;
	assert_int_equal(dlist_plan(&pick, &pick, UINT64_MAX, &plan), 0);
	bytes = plan_memory(plan);
	plan_free(plan);
	assert_int_equal(dlist_plan(&pick, &pick, bytes, &plan), 0);
	plan_free(plan);
	assert_int_equal(dlist_plan(&pick, &pick, bytes / 2, &plan),
			 -err_errno(ERR_LIMIT));
	assert_non_null(strstr(err_last()->text, "memory"));
	dlist_free(list);
}

static void plan_rows_are_the_picked_descriptors(void **state)
{
	const struct dlist_entry entries[] = {{1000, 16, 32, 10},
					      {5000, 16, 0, 1},
					      {6000, 16, 16, 20},
					      {9000, 16, 64, 5}};
	struct search_place at[] = {{0, 1000}, {0, 5000}, {1, 0}, {0, 9000}};
	struct places places = {.refs = 1, .at = at};
	struct dlist *a = make(entries, 4), *b = make(entries, 4);

	(void)state;
	for (unsigned int seed = 0; seed < 200; seed++) {
		uint32_t from[64], to[64];
		struct dlist_pick src = {a, &places, seed % 4 ? from : NULL, 36};
		struct dlist_pick dst = {b, &places, to, 36};
		struct plan_walk walk;
		struct plan_span span;
		struct plan *plan;

		srand(seed);
		for (int i = 0; i < 36; i++) {
			from[i] = (uint32_t)rand() % 36;
			to[i] = seed % 3 ? (uint32_t)rand() % 36 : (uint32_t)i;
		}
		assert_int_equal(dlist_plan(&src, &dst, 0, &plan), 0);
		assert_int_equal(plan->bytes, 36 * 16);
		plan_walk_begin(&walk, plan);
		for (uint64_t k = 0; k < 36; k++) {
			uint64_t left = 16, len, s = oracle(&src, k, &len);
			uint64_t d = oracle(&dst, k, &len);

			while (left && plan_walk_next(&walk, left, &span)) {
				assert_int_equal(span.src, s);
				assert_int_equal(span.dst, d);
				s += span.len;
				d += span.len;
				left -= span.len;
			}
			assert_int_equal(left, 0);
		}
		plan_free(plan);
	}
	dlist_free(a);
	dlist_free(b);
}

/* Row by row the same, and never more entries; grids of eight rows and more go. */
static void squeezed_rows_are_the_same_rows(void **state)
{
	(void)state;
	for (unsigned int seed = 0; seed < 500; seed++) {
		struct dlist_entry rows[300], squeezed[300];
		uint32_t n = 0, k = 0, left, grids = 0;

		srand(seed);
		while (n < 300) { /* grids of any length, rows that go back, repeats */
			uint32_t count = 1 + (uint32_t)rand() % 20;
			uint64_t at = (uint64_t)rand() % 100000,
				 bytes = 1 + (uint64_t)rand() % 3;
			uint64_t stride = (uint64_t)rand() % 6;

			grids += count >= 8 && stride >= bytes && n + count <= 300;
			for (uint32_t i = 0; i < count && n < 300; i++)
				rows[n++] = (struct dlist_entry){at + i * stride, bytes,
								 0, 1};
			if (n < 300 && rand() % 5 == 0)
				rows[n++] = (struct dlist_entry){at, bytes, bytes + 1, 3};
		}
		memcpy(squeezed, rows, sizeof(rows));
		left = dlist_squeeze(squeezed, 300);
		assert_true(left <= 300 - 7 * grids);
		for (uint32_t i = 0; i < left; i++) {
			if (squeezed[i].count == 1 ||
			    squeezed[i].count == 3) { /* as it came */
				assert_memory_equal(&squeezed[i], &rows[k],
						    sizeof(rows[0]));
				k++;
				continue;
			}
			assert_true(squeezed[i].count >= 8);
			for (uint64_t j = 0; j < squeezed[i].count; j++, k++) {
				assert_int_equal(squeezed[i].address +
							 j * squeezed[i].stride,
						 rows[k].address);
				assert_int_equal(squeezed[i].bytes, rows[k].bytes);
				assert_int_equal(rows[k].count, 1);
			}
		}
		assert_int_equal(k, 300);
	}
}

static void list_made_entry_by_entry_is_the_same(void **state)
{
	const struct dlist_entry entries[] = {{1000, 16, 32, 10}, {5000, 16, 0, 1}};
	const struct dlist_entry bad = {1, 0, 0, 1};
	struct dlist *a = make(entries, 2), *b = NULL;

	(void)state;
	assert_int_equal(dlist_begin(2, 1, &b), 0);
	assert_int_equal(dlist_put(b, 0, &entries[0]), 0);
	assert_true(dlist_put(b, 1, &bad) < 0);
	assert_int_equal(dlist_put(b, 1, &entries[1]), 0);
	assert_int_equal(a->descs, b->descs);
	assert_memory_equal(a->entries, b->entries, sizeof(entries));
	assert_memory_equal(a->first, b->first, 3 * sizeof(*a->first));
	dlist_free(a);
	dlist_free(b);
}

static void picks_mismatched_are_refused(void **state)
{
	const struct dlist_entry one[] = {{0, 16, 16, 8}}, other[] = {{0, 32, 32, 8}};
	struct dlist *a = make(one, 1), *b = make(other, 1);
	uint32_t index[] = {1, 8};
	struct dlist_pick src = {a, NULL, NULL, 8}, dst = {b, NULL, NULL, 8};

	(void)state;
	assert_int_equal(dlist_check_picks(&src, &dst), -err_errno(ERR_INVAL));
	dst = (struct dlist_pick){a, NULL, index, 2};
	assert_int_equal(dlist_check_picks(&src, &dst), -err_errno(ERR_INVAL));
	src = dst;
	assert_int_equal(dlist_check_picks(&src, &dst), -err_errno(ERR_RANGE));
	dst.count = src.count = 0;
	assert_int_equal(dlist_check_picks(&src, &dst), -err_errno(ERR_INVAL));
	dlist_free(a);
	dlist_free(b);
}

static void index_wire_roundtrip_is_equal(void **state)
{
	(void)state;
	for (unsigned int seed = 0; seed < 100; seed++) {
		uint32_t index[100], *back;
		struct dlist_pick pick = {.index = index, .count = 100};
		uint8_t buf[1024];
		const uint8_t *raw;
		uint64_t count;
		size_t len;
		struct cursor c;

		srand(seed);
		for (uint32_t i = 0; i < 100; i++)
			index[i] = i && (unsigned int)rand() % 100 < seed
					   ? index[i - 1] + 1
					   : (uint32_t)rand() % 5000;
		cursor_write(&c, buf, sizeof(buf));
		dlist_index_put(&c, &pick);
		assert_false(c.bad);
		assert_int_equal(c.pos, dlist_index_bytes(&pick));
		for (size_t cut = 0; cut < c.pos; cut++) {
			struct cursor in;

			cursor_read(&in, buf, cut);
			assert_true(dlist_index_get(&in, 1000, &back, &count) < 0);
			cursor_read(&in, buf, cut);
			assert_true(dlist_index_skip(&in, &raw, &len, &count) < 0);
		}
		cursor_read(&c, buf, c.pos);
		assert_int_equal(dlist_index_skip(&c, &raw, &len, &count), 0);
		assert_int_equal(len, dlist_index_bytes(&pick));
		assert_int_equal(count, 100);
		assert_int_equal(cursor_left(&c), 0);
		cursor_read(&c, buf, c.pos);
		assert_int_equal(dlist_index_get(&c, 100, &back, &count), 0);
		assert_int_equal(count, 100);
		assert_memory_equal(back, index, sizeof(index));
		mem_free(back);
		c.pos = 0;
		assert_true(dlist_index_get(&c, 99, &back, &count) < 0);
	}
}

/* What is said to be 256 MiB takes none unless the runs give it. */
static void index_forged_takes_no_memory(void **state)
{
	static const uint32_t lies[][2] = {{1, 4}, {3, 4}, {1u << 26, 1}};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(lies); i++) {
		uint8_t buf[32];
		uint32_t *back;
		uint64_t count;
		struct cursor c;

		cursor_write(&c, buf, sizeof(buf));
		cursor_put_u32(&c, lies[i][0]);
		cursor_put_u32(&c, 1);
		cursor_put_u32(&c, 7);
		cursor_put_u32(&c, lies[i][1]);
		cursor_read(&c, buf, c.pos);
		mem_fail_at(1);
		assert_int_equal(dlist_index_get(&c, DLIST_DESCS_MAX, &back, &count),
				 -err_errno(ERR_PROTO));
		mem_fail_at(0);
	}
}

static void base64_is_strict(void **state)
{
	static const char *const bad[] = {"A",	  "AA",	    "AAA",  "A===",
					  "====", "Zh==",   "Zm9=", "Zm=v",
					  "Z m9", "Zm9v\n", "=Zm9", "Zg==Zg=="};
	uint8_t bytes[64];
	char text[64];
	size_t len;

	(void)state;
	for (size_t n = 0; n < 32; n++) {
		uint8_t data[32];

		for (size_t i = 0; i < n; i++)
			data[i] = (uint8_t)(i * 37 + n);
		base64_encode(data, n, text);
		assert_int_equal(strlen(text), BASE64_CHARS(n));
		assert_true(base64_decode(text, strlen(text), bytes, &len));
		assert_int_equal(len, n);
		assert_memory_equal(bytes, data, n);
	}
	for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
		if (base64_decode(bad[i], strlen(bad[i]), bytes, &len))
			fail_msg("taken: %s", bad[i]);
	}
	base64_encode("foobar", 6, text);
	assert_string_equal(text, "Zm9vYmFy"); /* RFC 4648, section 10 */
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(new_refuses_bad_entries),
		cmocka_unit_test(plan_beyond_its_room_is_not_made),
		cmocka_unit_test(plan_rows_are_the_picked_descriptors),
		cmocka_unit_test(squeezed_rows_are_the_same_rows),
		cmocka_unit_test(list_made_entry_by_entry_is_the_same),
		cmocka_unit_test(picks_mismatched_are_refused),
		cmocka_unit_test(index_wire_roundtrip_is_equal),
		cmocka_unit_test(index_forged_takes_no_memory),
		cmocka_unit_test(base64_is_strict),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
