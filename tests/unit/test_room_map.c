/* SPDX-License-Identifier: Apache-2.0 */
/* Page lists from commands and from the wire: every refusal by name, and hostile
 * bytes never become a map that breaks the promises of room_map.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/room/room_map.h"
#include "tests/lib/accounts.h"

/* Views kv (16 pages of 4 tokens) and aux (4 slots of one). */
static struct layout layout = {
	.view_count = 2,
	.views = (struct layout_view[]){{.name = "kv", .page_tokens = 4, .pages = 16},
					{.name = "aux", .page_tokens = 1, .pages = 4}},
};

static bool selects; /* readers take selections */

/* The whole message at once. */
static int maps_get(struct cursor *in, struct room_maps *maps)
{
	struct maps_reader reader;
	int r = maps_reader_begin(&reader, in, &layout, NULL);

	reader.selects = selects;
	*maps = (struct room_maps){0};
	if (r >= 0)
		r = maps_read_some(&reader, SIZE_MAX);
	*in = reader.in;
	if (r >= 0)
		*maps = reader.maps;
	return r;
}

static int parse(const char *text, int64_t aux, struct room_maps *maps)
{
	cJSON *json = cJSON_Parse(text);
	int r;

	assert_non_null(json);
	r = room_maps_parse(json, aux, &layout, NULL, maps);
	cJSON_Delete(json);
	return r;
}

static void parse_takes_defaults_from_the_pages(void **state)
{
	struct room_maps maps;

	(void)state;
	assert_int_equal(parse("{\"kv\":{\"pages\":[3,4,9]}}", 2, &maps), 0);
	assert_int_equal(maps.count, 2);
	assert_int_equal(maps.maps[0].token_begin, 0);
	assert_int_equal(maps.maps[0].token_end, 12);
	assert_string_equal(maps.maps[1].view, "aux");
	assert_int_equal(maps.maps[1].pages[0], 2);
	room_maps_fini(&maps);
	assert_int_equal(
		parse("{\"kv\":{\"pages\":[[3,2]],\"first_token\":8,\"tokens\":[9,12]}}",
		      -1, &maps),
		0);
	assert_int_equal(maps.maps[0].page_count, 2);
	assert_int_equal(maps.maps[0].pages[1], 4);
	room_maps_fini(&maps);
}

static void parse_refuses_by_name(void **state)
{
	static const struct {
		const char *text, *words;
		int64_t aux;
	} bad[] = {
		{"{\"kv\":{\"pages\":[16]}}", "16", -1},
		{"{\"kv\":{\"pages\":[-1]}}", "pages", -1},
		{"{\"kv\":{\"pages\":[1.5]}}", "pages", -1},
		{"{\"kv\":{\"pages\":\"all\"}}", "pages", -1},
		{"{\"kv\":{}}", "pages", -1},
		{"{\"kv\":{\"pages\":[1],\"page\":[2]}}", "page", -1},
		{"{\"ssm\":{\"pages\":[1]}}", "ssm", -1},
		{"{\"kv\":[1]}", "object", -1},
		{"{\"kv\":{\"pages\":[1],\"tokens\":[3,2]}}", "tokens", -1},
		{"{\"kv\":{\"pages\":[1],\"tokens\":[0,5]}}", "tokens", -1},
		{"{\"kv\":{\"pages\":[1],\"first_token\":4,\"tokens\":[0,4]}}", "tokens",
		 -1},
		{"{\"kv\":{\"pages\":[1],\"tokens\":[0]}}", "tokens", -1},
		{"{\"kv\":{\"pages\":[1],\"layers\":[2,1]}}", "layers", -1},
		{"{\"kv\":{\"pages\":[[15,2]]}}", "pages", -1},
		{"{\"kv\":{\"pages\":[1]}}", "aux", 4},
		{"{\"aux\":{\"pages\":[1]}}", "aux", 1},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
		struct room_maps maps;

		if (parse(bad[i].text, bad[i].aux, &maps) >= 0)
			fail_msg("taken: %s", bad[i].text);
		if (!strstr(err_last()->text, bad[i].words))
			fail_msg("%s: '%s' is not in '%s'", bad[i].text, bad[i].words,
				 err_last()->text);
	}
}

static void map_wire_roundtrip_is_equal(void **state)
{
	struct room_maps maps, back;
	uint8_t buf[512];
	struct cursor c;

	(void)state;
	assert_int_equal(
		parse("{\"kv\":{\"pages\":[3,4,5,9,1],\"first_token\":4,\"tokens\":"
		      "[5,22],\"layers\":[1,3]}}",
		      3, &maps),
		0);
	cursor_write(&c, buf, sizeof(buf));
	room_maps_put(&c, &maps);
	assert_false(c.bad);
	assert_int_equal(c.pos, room_maps_wire_bytes(&maps));
	cursor_read(&c, buf, c.pos);
	assert_int_equal(maps_get(&c, &back), 0);
	assert_int_equal(back.count, 2);
	assert_memory_equal(back.maps[0].pages, maps.maps[0].pages, 5 * sizeof(uint32_t));
	assert_int_equal(back.maps[0].token_begin, 5);
	assert_int_equal(back.maps[0].layers.end, 3);
	room_maps_fini(&maps);
	room_maps_fini(&back);
}

static bool same_maps(const struct room_maps *a, const struct room_maps *b)
{
	if (a->count != b->count)
		return false;
	for (size_t i = 0; i < a->count; i++) {
		const struct room_map *x = &a->maps[i], *y = &b->maps[i];

		if (strcmp(x->view, y->view) != 0 || x->first_token != y->first_token ||
		    x->token_begin != y->token_begin || x->token_end != y->token_end ||
		    x->layers.begin != y->layers.begin ||
		    x->layers.end != y->layers.end || x->page_count != y->page_count ||
		    x->select_count != y->select_count ||
		    memcmp(x->pages, y->pages, x->page_count * sizeof(*x->pages)) != 0 ||
		    (x->select_count &&
		     memcmp(x->select, y->select, x->select_count * sizeof(*x->select)) !=
			     0))
			return false;
	}
	return true;
}

/* Some pages a time is the same as all at once, in its bytes and in its verdict. */
static int read_by(const uint8_t *bytes, size_t len, size_t most,
		   const struct room_maps *among, struct room_maps *maps)
{
	struct maps_reader reader;
	uint8_t *moved = NULL;
	struct cursor in;
	int r;

	cursor_read(&in, bytes, len);
	r = maps_reader_begin(&reader, &in, &layout, NULL);
	if (r < 0)
		return r;
	reader.among = among;
	reader.selects = selects;
	while ((r = maps_read_some(&reader, most)) > 0) {
		uint8_t *next = mem_dup(bytes, len); /* and the bytes may move */

		maps_reader_rebase(&reader, next);
		mem_free(moved);
		moved = next;
	}
	mem_free(moved);
	*maps = reader.maps;
	return r;
}

static void pages_by_pieces_are_the_same_as_at_once(void **state)
{
	static const char *const texts[] = {
		"{\"kv\":{\"pages\":[3,4,5,9,1],\"first_token\":4,\"tokens\":[5,22]}}",
		"{\"kv\":{\"pages\":[1,2,3,4,5,6,7,8,9]}}",
		"{\"kv\":{\"pages\":[9,7,5,3,1,0,2,4,6,8]}}",
		"{\"kv\":{\"pages\":[]}}",
		"{}",
	};

	(void)state;
	for (size_t t = 0; t < ARRAY_LEN(texts); t++) {
		for (size_t most = 1; most < 12; most++) {
			struct room_maps maps, back;
			struct maps_writer writer;
			uint8_t whole[512], pieces[512];
			struct cursor a, b;
			unsigned int calls = 1;

			assert_int_equal(parse(texts[t], t % 2 ? -1 : 3, &maps), 0);
			cursor_write(&a, whole, sizeof(whole));
			room_maps_put(&a, &maps);
			cursor_write(&b, pieces, maps_writer_most(&maps));
			maps_writer_begin(&writer, &b, &maps);
			while (maps_write_some(&writer, most))
				calls++;
			assert_false(a.bad || b.bad);
			assert_int_equal(a.pos, b.pos);
			assert_memory_equal(whole, pieces, a.pos);
			assert_true(maps.count == 0 || maps.maps[0].page_count <= most ||
				    calls > 1);
			assert_int_equal(read_by(whole, a.pos, most, NULL, &back), 0);
			assert_true(same_maps(&maps, &back));
			room_maps_fini(&maps);
			room_maps_fini(&back);
		}
	}
}

/* Scattered pages, too many for runs in a message, are sent one by one, half as long. */
static void many_scattered_pages_fit_a_message(void **state)
{
	enum { PAGES = 131072 };
	struct layout_view *view = &layout.views[0];
	struct room_map map = {
		.view = "kv", .token_end = 4ul * PAGES, .page_count = PAGES};
	struct room_maps maps = {.maps = &map, .count = 1}, back;
	struct maps_writer writer;
	uint8_t *bytes = calloc(1, 2 << 20);
	struct cursor out, in;
	uint32_t count_at;

	(void)state;
	view->pages = 2 * PAGES;
	map.layers.end = UINT32_MAX;
	map.pages = calloc(PAGES, sizeof(*map.pages));
	for (uint32_t i = 0; i < PAGES; i++)
		map.pages[i] = 2 * (i * 5u % PAGES);
	assert_true(maps_writer_most(&maps) < PAGES * 4 + 200);
	cursor_write(&out, bytes, maps_writer_most(&maps));
	maps_writer_begin(&writer, &out, &maps);
	while (maps_write_some(&writer, 1000))
		;
	assert_false(out.bad);
	assert_int_equal(out.pos, room_maps_wire_bytes(&maps));
	assert_true(out.pos < PAGES * 4 + 200);
	assert_int_equal(read_by(bytes, out.pos, 999, NULL, &back), 0);
	assert_true(same_maps(&maps, &back));
	room_maps_fini(&back);
	/* a page outside, a count of more than there is, and of more than may be */
	memset(bytes + out.pos - 4, 0xff, 4);
	assert_int_equal(read_by(bytes, out.pos, 999, NULL, &back),
			 -err_errno(ERR_RANGE));
	count_at = (uint32_t)out.pos - PAGES * 4 - 4;
	bytes[count_at]++;
	cursor_read(&in, bytes, out.pos);
	assert_int_equal(maps_get(&in, &back), -err_errno(ERR_PROTO));
	memset(bytes + count_at, 0xff, 4);
	cursor_read(&in, bytes, out.pos);
	assert_int_equal(maps_get(&in, &back), -err_errno(ERR_PROTO));
	/* as many in runs are sent as runs */
	for (uint32_t i = 0; i < PAGES; i++)
		map.pages[i] = i;
	assert_true(room_maps_wire_bytes(&maps) < 100);
	view->pages = 16;
	free(map.pages);
	free(bytes);
}

/* Every prefix, every flipped byte: refused or a map that passes the checks. */
static void select_is_fine(const struct room_map *map, const struct layout_view *view)
{
	uint64_t places = map->page_count * view->page_tokens;

	assert_true(map->select_count > 0);
	assert_true(map->first_token + map->select_count <= places);
	for (size_t i = 0; i < map->select_count; i++) {
		assert_true(map->select[i] < map->token_end - map->token_begin);
		assert_true(i == 0 || map->select[i] > map->select[i - 1]);
	}
}

/* Cut off, and with each value of each byte. */
static void bytes_are_bent(struct room_maps *maps)
{
	struct room_maps back, pieces;
	uint8_t buf[512], bent[512];
	struct cursor c;
	size_t len;

	cursor_write(&c, buf, sizeof(buf));
	room_maps_put(&c, maps);
	assert_int_equal(c.pos, room_maps_wire_bytes(maps));
	assert_true(c.pos <= maps_writer_most(maps));
	len = c.pos;
	room_maps_fini(maps);
	for (size_t i = 0; i < len; i++) {
		cursor_read(&c, buf, i);
		assert_true(maps_get(&c, &back) < 0);
	}
	for (size_t i = 0; i < len * 255; i++) {
		memcpy(bent, buf, len);
		bent[i / 255] ^= (uint8_t)(1 + i % 255);
		cursor_read(&c, bent, len);
		if (maps_get(&c, &back) < 0) {
			assert_true(read_by(bent, len, 1 + i % 3, NULL, &pieces) < 0);
			continue;
		}
		assert_int_equal(read_by(bent, len, 1 + i % 3, NULL, &pieces), 0);
		assert_true(same_maps(&back, &pieces));
		room_maps_fini(&pieces);
		for (size_t m = 0; m < back.count; m++) {
			const struct layout_view *view =
				layout_view_find(&layout, back.maps[m].view);

			assert_non_null(view);
			assert_true(back.maps[m].token_begin <= back.maps[m].token_end);
			if (back.maps[m].select)
				select_is_fine(&back.maps[m], view);
			for (size_t p = 0; p < back.maps[m].page_count; p++)
				assert_true(back.maps[m].pages[p] < view->pages);
		}
		room_maps_fini(&back);
	}
}

static void wire_hostile_bytes_never_pass_a_bad_map(void **state)
{
	struct room_maps maps;

	(void)state;
	assert_int_equal(
		parse("{\"kv\":{\"pages\":[3,4,9],\"first_token\":4}}", 3, &maps), 0);
	bytes_are_bent(&maps);
}

/* ---- selections ---- */

/* 10 of 4000 tokens, from the second place of page 3 on. */
static void selection(struct room_maps *maps)
{
	static const uint32_t some[] = {0, 1, 2, 7, 9, 100, 101, 3000, 3998, 3999};

	assert_int_equal(parse("{\"kv\":{\"pages\":[3,4,9]}}", -1, maps), 0);
	maps->maps[0].first_token = 1;
	maps->maps[0].token_begin = 1000;
	maps->maps[0].token_end = 5000;
	maps->maps[0].select = mem_dup(some, sizeof(some));
	maps->maps[0].select_count = ARRAY_LEN(some);
	assert_int_equal(room_map_check_ranges(&maps->maps[0], &layout.views[0], "kv"),
			 0);
}

static void selection_hostile_bytes_never_pass_a_bad_map(void **state)
{
	struct room_maps maps, back;
	uint8_t buf[512];
	struct cursor c;

	(void)state;
	selection(&maps);
	cursor_write(&c, buf, sizeof(buf));
	room_maps_put(&c, &maps);
	cursor_read(&c, buf, c.pos); /* where none is expected */
	assert_int_equal(maps_get(&c, &back), -err_errno(ERR_PROTO));
	selects = true;
	cursor_read(&c, buf, c.size);
	assert_int_equal(maps_get(&c, &back), 0);
	assert_true(same_maps(&maps, &back));
	room_maps_fini(&back);
	bytes_are_bent(&maps);
	selects = false;
}

/* A header has one selection, which bounds the turn that reads it. */
static void selection_is_of_the_first_view_only(void **state)
{
	static const uint32_t some[] = {0, 2};
	struct room_maps maps, back;
	uint8_t buf[512];
	struct cursor c;

	(void)state;
	selects = true;
	for (size_t view = 0; view < 2; view++) {
		assert_int_equal(
			parse("{\"kv\":{\"pages\":[3]},\"aux\":{\"pages\":[0,1,2]}}", -1,
			      &maps),
			0);
		maps.maps[view].token_begin = 0;
		maps.maps[view].token_end = 3;
		maps.maps[view].select = mem_dup(some, sizeof(some));
		maps.maps[view].select_count = ARRAY_LEN(some);
		cursor_write(&c, buf, sizeof(buf));
		room_maps_put(&c, &maps);
		cursor_read(&c, buf, c.pos);
		assert_int_equal(maps_get(&c, &back), view ? -err_errno(ERR_PROTO) : 0);
		if (!view)
			room_maps_fini(&back);
		room_maps_fini(&maps);
	}
	selects = false;
}

static void selection_is_charged_and_refused_over_a_share(void **state)
{
	struct accounts accounts = {0};
	struct account *peer = account_get(&accounts, "peer", "a");
	struct charge filler = {0};
	struct room_maps maps;
	uint8_t buf[512];

	(void)state;
	account_leave(peer, sizeof(struct room_map) + 12 * sizeof(uint32_t), &filler);
	for (size_t count = 10; count >= 9; count--) {
		struct maps_reader reader;
		struct cursor c;
		int r;

		selection(&maps);
		maps.maps[0].select_count = count;
		cursor_write(&c, buf, sizeof(buf));
		room_maps_put(&c, &maps);
		room_maps_fini(&maps);
		cursor_read(&c, buf, c.pos);
		assert_int_equal(maps_reader_begin(&reader, &c, &layout, peer), 0);
		reader.selects = true;
		r = maps_read_some(&reader, SIZE_MAX);
		assert_int_equal(r, count == 9 ? 0 : -err_errno(ERR_LIMIT));
		if (r == 0)
			room_maps_fini(&reader.maps);
	}
	charge_drop(&filler);
	account_unref(peer);
}

/* Each range: the tokens, and the places of their pages. */
static void selection_cut_has_its_tokens_at_their_places(void **state)
{
	struct room_maps maps, cut;

	(void)state;
	selection(&maps);
	for (uint64_t begin = 1000; begin < 5000; begin += 3) {
		for (uint64_t end = begin + 1; end <= 5000; end += 97) {
			const struct room_map *map = &maps.maps[0], *got;
			size_t n = 0;

			if (room_map_select_from(map, begin) ==
			    room_map_select_from(map, end))
				continue;
			assert_int_equal(room_maps_cut(&maps, &layout, begin, end, &cut),
					 0);
			got = &cut.maps[0];
			select_is_fine(got, &layout.views[0]);
			for (size_t i = 0; i < map->select_count; i++) {
				uint64_t token = 1000 + map->select[i], place = 1 + i;

				if (token < begin || token >= end)
					continue;
				assert_int_equal(got->token_begin + got->select[n],
						 token);
				assert_int_equal(got->pages[(got->first_token + n) / 4],
						 map->pages[place / 4]);
				assert_int_equal((got->first_token + n) % 4, place % 4);
				n++;
			}
			assert_int_equal(got->select_count, n);
			assert_true(got->token_begin >= begin && got->token_end <= end);
			room_maps_fini(&cut);
		}
	}
	room_maps_fini(&maps);
}

/* One run: `count` pages from 0 on, in a view that has them, for `tokens`. */
static void one_run(struct cursor *c, uint32_t count, uint64_t tokens)
{
	cursor_put_u32(c, 1);
	cursor_put_str(c, "kv");
	cursor_put_u64(c, 0);
	cursor_put_u64(c, 0);
	cursor_put_u64(c, tokens);
	cursor_put_u32(c, 0);
	cursor_put_u32(c, UINT32_MAX);
	cursor_put_u32(c, 1);
	cursor_put_u32(c, 0);
	cursor_put_u32(c, count);
	assert_false(c->bad);
}

static void wire_refuses_before_it_takes_memory_for_pages(void **state)
{
	struct room_maps back;
	uint8_t buf[128];
	struct cursor c;

	(void)state;
	cursor_write(&c, buf, sizeof(buf));
	one_run(&c, 16, 65); /* the last token lies beyond the pages */
	cursor_read(&c, buf, c.pos);
	mem_fail_at(2); /* the first is the view's */
	assert_int_equal(maps_get(&c, &back), -err_errno(ERR_RANGE));
	mem_fail_at(0);
}

static void wire_pages_are_charged_and_capped(void **state)
{
	struct accounts accounts = {0};
	struct account *peer = account_get(&accounts, "peer", "a");
	struct charge filler = {0};
	uint64_t others;

	(void)state;
	account_leave(peer, sizeof(struct room_map) + 10 * sizeof(uint32_t), &filler);
	others = accounts.total;
	for (uint32_t count = 9; count <= 11; count++) {
		struct maps_reader reader;
		uint8_t buf[128];
		struct cursor c;
		int r;

		cursor_write(&c, buf, sizeof(buf));
		one_run(&c, count, 4);
		cursor_read(&c, buf, c.pos);
		assert_int_equal(maps_reader_begin(&reader, &c, &layout, peer), 0);
		r = maps_read_some(&reader, SIZE_MAX);
		assert_int_equal(r, count <= 10 ? 0 : -err_errno(ERR_LIMIT));
		if (r == 0) {
			struct room_maps maps = room_maps_steal(&reader.maps);

			assert_int_equal(accounts.total,
					 others + sizeof(struct room_map) +
						 count * sizeof(uint32_t));
			room_maps_fini(&reader.maps);
			room_maps_fini(&maps);
		}
		assert_int_equal(accounts.total, others);
	}
	charge_drop(&filler);
	account_unref(peer);
	assert_true(accounts_idle(&accounts));
}

static void within_sees_any_other_page(void **state)
{
	struct room_maps outer, inner;

	(void)state;
	assert_int_equal(
		parse("{\"kv\":{\"pages\":[3,4,9,1],\"tokens\":[0,14]}}", -1, &outer), 0);
	assert_int_equal(
		parse("{\"kv\":{\"pages\":[9,1],\"first_token\":8,\"tokens\":[9,14]}}",
		      -1, &inner),
		0);
	assert_int_equal(room_maps_within(&inner, &outer, &layout), 0);
	inner.maps[0].pages[1] = 2;
	assert_true(room_maps_within(&inner, &outer, &layout) < 0);
	inner.maps[0].pages[1] = 1;
	inner.maps[0].token_end = 15;
	assert_true(room_maps_within(&inner, &outer, &layout) < 0);
	room_maps_fini(&inner);
	/* the same page at another token */
	assert_int_equal(parse("{\"kv\":{\"pages\":[3],\"first_token\":4}}", -1, &inner),
			 0);
	assert_true(room_maps_within(&inner, &outer, &layout) < 0);
	room_maps_fini(&inner);
	room_maps_fini(&outer);
}

/* Some pages a time, of runs and of single pages: whichever is another, it is found. */
static void among_sees_any_other_page_by_pieces(void **state)
{
	struct room_maps outer, inner, back;
	uint8_t bytes[512];
	struct cursor c;

	(void)state;
	assert_int_equal(parse("{\"kv\":{\"pages\":[15,3,4,5,9,1],\"tokens\":[0,24]}}",
			       -1, &outer),
			 0);
	for (size_t most = 1; most < 7; most++) {
		for (size_t other = 0; other < 6; other++) {
			/* tokens [5, 18): of the pages 3, 4, 5 and 9; 0 is not used */
			assert_int_equal(parse("{\"kv\":{\"pages\":[0,3,4,5,9],"
					       "\"tokens\":[5,18]}}",
					       -1, &inner),
					 0);
			if (other < 5)
				inner.maps[0].pages[other] = 14;
			cursor_write(&c, bytes, sizeof(bytes));
			room_maps_put(&c, &inner);
			if (other == 0 || other == 5) {
				assert_int_equal(
					read_by(bytes, c.pos, most, &outer, &back), 0);
				assert_true(same_maps(&inner, &back));
				room_maps_fini(&back);
			} else {
				assert_int_equal(
					read_by(bytes, c.pos, most, &outer, &back),
					-err_errno(ERR_RANGE));
				assert_non_null(strstr(err_last()->text, "page 14"));
			}
			room_maps_fini(&inner);
		}
	}
	room_maps_fini(&outer);
}

/* What a helper has found is not searched again, and a cut does not inherit it. */
static void page_bound_twice_is_refused_wherever_it_was_found(void **state)
{
	struct room_maps maps, cut;

	(void)state;
	assert_int_equal(parse("{\"kv\":{\"pages\":[3,4,3,5]}}", -1, &maps), 0);
	assert_int_equal(room_maps_check_once(&maps), -err_errno(ERR_DUP));
	assert_non_null(strstr(err_last()->text, "pages[2]: page 3 is bound twice"));
	maps.maps[0].repeat = 4;
	assert_int_equal(room_maps_check_once(&maps), 0);
	assert_int_equal(room_maps_cut(&maps, &layout, 4, 16, &cut), 0);
	assert_int_equal(cut.maps[0].repeat, 0);
	room_maps_fini(&cut);
	maps.maps[0].repeat = 1;
	maps.maps[0].pages[2] = 6;
	assert_true(room_maps_check_once(&maps) < 0);
	assert_non_null(strstr(err_last()->text, "pages[1]: page 4 is bound twice"));
	room_maps_fini(&maps);
}

static void pair_is_cut_to_intersection(void **state)
{
	struct room_maps a, b;
	struct plan_map *pairs;
	size_t n;

	(void)state;
	assert_int_equal(parse("{\"kv\":{\"pages\":[3,4],\"layers\":[0,5]}}", 1, &a), 0);
	assert_int_equal(
		parse("{\"kv\":{\"pages\":[5],\"first_token\":4,\"layers\":[3,9]}}", -1,
		      &b),
		0);
	assert_int_equal(room_maps_pair(&a, &b, &pairs, &n), 0);
	assert_int_equal(n, 1);
	assert_int_equal(pairs[0].token_begin, 4);
	assert_int_equal(pairs[0].token_end, 8);
	assert_int_equal(pairs[0].layers.begin, 3);
	assert_int_equal(pairs[0].layers.end, 5);
	mem_free(pairs);
	b.maps[0].first_token = b.maps[0].token_begin = 8;
	b.maps[0].token_end = 12;
	assert_int_equal(room_maps_pair(&a, &b, &pairs, &n), 0);
	assert_int_equal(n, 0);
	mem_free(pairs);
	room_maps_fini(&a);
	room_maps_fini(&b);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(parse_takes_defaults_from_the_pages),
		cmocka_unit_test(parse_refuses_by_name),
		cmocka_unit_test(map_wire_roundtrip_is_equal),
		cmocka_unit_test(pages_by_pieces_are_the_same_as_at_once),
		cmocka_unit_test(many_scattered_pages_fit_a_message),
		cmocka_unit_test(wire_hostile_bytes_never_pass_a_bad_map),
		cmocka_unit_test(selection_hostile_bytes_never_pass_a_bad_map),
		cmocka_unit_test(selection_is_of_the_first_view_only),
		cmocka_unit_test(selection_is_charged_and_refused_over_a_share),
		cmocka_unit_test(selection_cut_has_its_tokens_at_their_places),
		cmocka_unit_test(wire_refuses_before_it_takes_memory_for_pages),
		cmocka_unit_test(wire_pages_are_charged_and_capped),
		cmocka_unit_test(within_sees_any_other_page),
		cmocka_unit_test(among_sees_any_other_page_by_pieces),
		cmocka_unit_test(page_bound_twice_is_refused_wherever_it_was_found),
		cmocka_unit_test(pair_is_cut_to_intersection),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
