/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Page lists on the wire: as runs, because a prefill's pages are mostly ascending.
 *
 * A room of gigabytes has 65 536 scattered pages, half a megabyte here, and the loop
 * writes and reads it. So both can be done some pages a turn, and neither checks the
 * cursor for each word. A writer may stop in the middle of a run, a reader in the middle
 * of summing or of expanding one: a run of a million pages costs eight bytes to send.
 *
 * Runs are summed under the limit before memory is allocated, and each is checked against
 * its view then, so that pages need no further check; the tokens, too, are checked
 * against the sum first. Where they must be pages of an offer, each piece is compared
 * with it once it is expanded. The allocated memory is charged to the sender until it is
 * freed: a peer that passes all checks may still send requests of a million pages and
 * never complete them.
 */
#include "daemon/room/room_map.h"

#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define RUN_BYTES 8u
/* Longer lists of scattered pages are sent unchanged, half as long, or 131 072 of them
 * would not fit a message: the count of runs has this bit, and each is a single page.
 * Shorter lists do not use it, for daemons that do not know it. */
#define LIST_BIT (UINT32_C(1) << 31)
#define SELECT_BIT (UINT32_C(1) << 30)
#define LIST_PAGES 125000u
#define LIST_BYTES 4u
#define LOOKS 256u
#define VIEW_FIXED_BYTES (2 + 3 * 8 + 3 * 4)

static uint32_t room_map_wire_runs_of(const struct room_map *map)
{
	uint32_t runs = map->page_count > 0;

	for (size_t i = 1; i < map->page_count; i++)
		runs += map->pages[i] != map->pages[i - 1] + 1;
	return runs;
}

/* An estimate from a sample: either form holds any pages. */
static bool goes_as_list(const struct room_map *map)
{
	size_t step = map->page_count / LOOKS;
	uint32_t breaks = 0;

	if (map->page_count < LIST_PAGES)
		return false;
	for (size_t i = step; i < map->page_count; i += step)
		breaks += map->pages[i] != map->pages[i - 1] + 1;
	return breaks > LOOKS / 2;
}

static size_t select_bytes(const struct room_map *map)
{
	return map->select ? 4 + 4 * map->select_count : 0;
}

size_t room_maps_wire_bytes(const struct room_maps *maps)
{
	size_t bytes = 4;

	for (size_t i = 0; i < maps->count; i++)
		bytes += VIEW_FIXED_BYTES + strlen(maps->maps[i].view) +
			 select_bytes(&maps->maps[i]) +
			 (goes_as_list(&maps->maps[i])
				  ? LIST_BYTES * maps->maps[i].page_count
				  : RUN_BYTES * (size_t)room_map_wire_runs_of(
							&maps->maps[i]));
	return bytes;
}

size_t maps_writer_most(const struct room_maps *maps)
{
	size_t bytes = 4;

	for (size_t i = 0; i < maps->count; i++)
		bytes += VIEW_FIXED_BYTES + LAYOUT_NAME_MAX +
			 select_bytes(&maps->maps[i]) +
			 (goes_as_list(&maps->maps[i]) ? LIST_BYTES : RUN_BYTES) *
				 maps->maps[i].page_count;
	return bytes;
}

/* ---- writing ---- */

static inline void put_le32(uint8_t *at, uint32_t v)
{
	v = htole32(v);
	memcpy(at, &v, sizeof(v));
}

void maps_writer_begin(struct maps_writer *writer, struct cursor *out,
		       const struct room_maps *maps)
{
	*writer = (struct maps_writer){.out = out, .maps = maps};
	cursor_put_u32(out, (uint32_t)maps->count);
}

#define MAP(F)             \
	F(64, first_token) \
	F(64, token_begin) F(64, token_end) F(32, layers.begin) F(32, layers.end)

static void view_begin(struct maps_writer *writer, const struct room_map *m)
{
	struct cursor *c = writer->out;

	cursor_put_str(c, m->view);
	MAP(CURSOR_PUT);
	writer->runs_at = c->pos;
	writer->runs = writer->run_count = 0;
	writer->list = goes_as_list(m);
	cursor_put_u32(c, 0); /* its place */
	if (!m->select)
		return;
	cursor_put_u32(c, (uint32_t)m->select_count);
	for (size_t i = 0; i < m->select_count; i++) /* at most 65536: selection */
		cursor_put_u32(c, m->select[i]);
}

static void put_list(struct maps_writer *writer, const struct room_map *map, size_t end)
{
	size_t count = end - writer->page;
	uint8_t *at = cursor_put_room(writer->out, LIST_BYTES * count);

	for (size_t i = 0; at && i < count; i++)
		put_le32(at + LIST_BYTES * i, map->pages[writer->page + i]);
	writer->runs += (uint32_t)count;
	writer->page = end;
}

static void run_end(struct maps_writer *writer)
{
	uint8_t *at;

	if (writer->run_count == 0)
		return;
	at = cursor_put_room(writer->out, RUN_BYTES);
	if (at) {
		put_le32(at, writer->run_page);
		put_le32(at + 4, writer->run_count);
	}
	writer->runs++;
	writer->run_count = 0;
}

/* Pages until `end`: they extend the current run or start others. */
static void put_pages(struct maps_writer *writer, const struct room_map *map, size_t end)
{
	const uint32_t *page = map->pages + writer->page, *last = map->pages + end;

	while (page < last) {
		uint32_t next = writer->run_page + writer->run_count;
		const uint32_t *first = page;

		if (writer->run_count == 0 || *page != next) {
			run_end(writer);
			writer->run_page = next = *page;
		}
		while (page < last && *page == next) {
			page++;
			next++;
		}
		writer->run_count += (uint32_t)(page - first);
	}
	writer->page = end;
}

static void view_end(struct maps_writer *writer)
{
	bool selects = writer->maps->maps[writer->map].select;

	run_end(writer);
	if (!writer->out->bad)
		put_le32(writer->out->base + writer->runs_at,
			 writer->runs | (writer->list ? LIST_BIT : 0) |
				 (selects ? SELECT_BIT : 0));
	writer->map++;
	writer->page = 0;
}

bool maps_write_some(struct maps_writer *writer, size_t most)
{
	while (writer->map < writer->maps->count && !writer->out->bad) {
		const struct room_map *map = &writer->maps->maps[writer->map];
		size_t left = map->page_count - writer->page;

		if (most == 0)
			return true;
		if (writer->page == 0)
			view_begin(writer, map);
		left = left < most ? left : most;
		if (writer->list)
			put_list(writer, map, writer->page + left);
		else
			put_pages(writer, map, writer->page + left);
		most -= left;
		if (writer->page == map->page_count)
			view_end(writer);
	}
	return false;
}

void room_maps_put(struct cursor *out, const struct room_maps *maps)
{
	struct maps_writer writer;

	maps_writer_begin(&writer, out, maps);
	while (maps_write_some(&writer, SIZE_MAX))
		;
}

/* ---- reading ---- */

static inline uint32_t le32(const uint8_t *p)
{
	uint32_t v;

	memcpy(&v, p, sizeof(v));
	return le32toh(v);
}

int maps_reader_begin(struct maps_reader *reader, const struct cursor *in,
		      const struct layout *layout, struct account *account)
{
	int r;

	*reader = (struct maps_reader){
		.in = *in, .layout = layout, .budget = ROOM_PAGES_MAX};
	reader->views =
		cursor_get_count(&reader->in, LAYOUT_VIEWS_MAX + 1, VIEW_FIXED_BYTES);
	r = charge_take(&reader->maps.charge, account, ACCOUNT_PAGES,
			reader->views * sizeof(*reader->maps.maps));
	if (r < 0)
		return err_pass(r);
	reader->maps.maps = mem_calloc(reader->views, sizeof(*reader->maps.maps));
	if (reader->maps.maps)
		return 0;
	charge_drop(&reader->maps.charge);
	return err_pass(-ENOMEM);
}

void maps_reader_fini(struct maps_reader *reader)
{
	room_maps_fini(&reader->maps);
}

void maps_reader_rebase(struct maps_reader *reader, const void *base)
{
	if (reader->run_bytes)
		reader->run_bytes =
			(const uint8_t *)base + (reader->run_bytes - reader->in.base);
	reader->in.base = (uint8_t *)base; /* never written through */
}

static struct room_map *under_way(struct maps_reader *reader)
{
	return &reader->maps.maps[reader->maps.count - 1];
}

static void where_of(struct maps_reader *reader, char where[64])
{
	snprintf(where, 64, "views.%.31s", under_way(reader)->view);
}

static size_t run_bytes(const struct maps_reader *reader)
{
	return reader->list ? LIST_BYTES : RUN_BYTES;
}

/* Run i: its first page, and its length. */
static inline uint32_t run_at(const struct maps_reader *reader, uint32_t i,
			      uint32_t *page_p)
{
	const uint8_t *at = reader->run_bytes + run_bytes(reader) * i;

	*page_p = le32(at);
	return reader->list ? 1 : le32(at + 4);
}

/* Of the first view only: so one header has one, which is read at once. */
static int select_open(struct maps_reader *reader, struct room_map *map)
{
	struct cursor *in = &reader->in;
	uint32_t count = cursor_get_count(in, ROOM_SELECT_MAX, sizeof(*map->select));
	const uint8_t *at = cursor_get_bytes(in, count * sizeof(*map->select));
	int r;

	if (!reader->selects || reader->maps.count > 1 || !at || count == 0)
		return err_raise(ERR_PROTO, "views.%.31s.select: cut off, or not allowed",
				 map->view);
	r = charge_more(&reader->maps.charge, count * sizeof(*map->select));
	if (r < 0)
		return err_pass(r);
	map->select = mem_alloc(count * sizeof(*map->select));
	if (!map->select)
		return err_pass(-ENOMEM);
	map->select_count = count;
	for (uint32_t i = 0; i < count; i++) /* at most 65536: ROOM_SELECT_MAX */
		map->select[i] = le32(at + i * sizeof(*map->select));
	return 0;
}

static int view_open(struct maps_reader *reader)
{
	struct room_map *m = &reader->maps.maps[reader->maps.count++];
	struct cursor *c = &reader->in;
	char where[64];
	int r = 0;

	cursor_get_str(c, m->view, sizeof(m->view));
	MAP(CURSOR_GET);
	reader->runs = cursor_get_u32(c);
	reader->list = reader->runs & LIST_BIT;
	if (reader->runs & SELECT_BIT)
		r = select_open(reader, m);
	if (r < 0)
		return err_pass(r);
	reader->runs &= ~(LIST_BIT | SELECT_BIT);
	reader->run_bytes =
		reader->runs <= ROOM_PAGES_MAX
			? cursor_get_bytes(c, (size_t)reader->runs * run_bytes(reader))
			: NULL;
	where_of(reader, where);
	if (!reader->run_bytes || c->bad)
		return err_raise(ERR_PROTO, "%s.pages: cut off", where);
	for (size_t i = 0; i + 1 < reader->maps.count; i++) {
		if (strcmp(reader->maps.maps[i].view, m->view) == 0)
			return err_raise(ERR_PROTO, "%s: named twice", where);
	}
	reader->view = layout_view_find(reader->layout, m->view);
	if (!reader->view)
		return err_raise(ERR_NOTFOUND, "%s: the pool has no view '%s'", where,
				 m->view);
	reader->run = reader->run_done = 0;
	reader->total = reader->filled = 0;
	reader->summed = false;
	return 0;
}

static int refuse_run(struct maps_reader *reader, uint32_t run, uint64_t page, uint64_t n)
{
	char where[64];
	int r = 0;

	where_of(reader, where);
	if (n > 0 && n <= reader->budget - reader->total)
		r = room_map_check_page(reader->view, where,
					(size_t)(reader->total + n - 1), page + n - 1);
	if (r < 0)
		return err_pass(r);
	return err_raise(ERR_PROTO, "%s.pages: run %u is empty or exceeds %u pages",
			 where, run, ROOM_PAGES_MAX);
}

/* Number of checked runs; negative: one is invalid. */
static int sum_some(struct maps_reader *reader, size_t *most_p)
{
	const uint64_t pages = reader->view->pages;
	uint32_t left = reader->runs - reader->run;
	uint32_t end = reader->run + (left < *most_p ? left : (uint32_t)*most_p);

	for (uint32_t i = reader->run; i < end; i++) {
		uint32_t page;
		uint64_t n = run_at(reader, i, &page);

		if (n == 0 || n > reader->budget - reader->total || page + n > pages)
			return err_pass(refuse_run(reader, i, page, n));
		reader->total += n;
	}
	*most_p -= end - reader->run;
	reader->run = end;
	return 0;
}

static int pages_new(struct charge *charge, struct room_map *map, size_t count)
{
	int r = charge_more(charge, count * sizeof(*map->pages));

	if (r < 0)
		return err_prefix(r, "views.%.31s.pages", map->view);
	map->pages = mem_regrow(NULL, count, sizeof(*map->pages));
	if (map->pages)
		return 0;
	charge_less(charge, count * sizeof(*map->pages));
	return err_pass(-ENOMEM);
}

/* The runs are valid: check the rest, then expand the pages. */
static int summed(struct maps_reader *reader)
{
	struct room_map *map = under_way(reader);
	char where[64];
	int r;

	where_of(reader, where);
	map->page_count = reader->total;
	r = room_map_check_ranges(map, reader->view, where);
	if (r >= 0 && reader->among)
		r = room_map_same_begin(map, reader->among, reader->view, &reader->same);
	if (r >= 0)
		r = pages_new(&reader->maps.charge, map, reader->total);
	if (r < 0)
		return err_pass(r);
	reader->budget -= reader->total;
	reader->summed = true;
	reader->run = 0;
	return 0;
}

static void fill_some(struct maps_reader *reader, size_t *most_p)
{
	uint32_t *pages = under_way(reader)->pages + reader->filled;
	const uint32_t *begin = pages;
	size_t most = *most_p;

	while (reader->run < reader->runs && most > 0) {
		uint32_t page, n = run_at(reader, reader->run, &page) - reader->run_done;

		page += reader->run_done;
		if (n > most) {
			n = (uint32_t)most;
			reader->run_done += n;
		} else {
			reader->run_done = 0;
			reader->run++;
		}
		most -= n;
		while (n--)
			*pages++ = page++;
	}
	reader->filled += (uint64_t)(pages - begin);
	*most_p = most;
}

/* 1: there is more of this view. */
static int view_some(struct maps_reader *reader, size_t *most_p)
{
	int r;

	if (!reader->summed) {
		r = sum_some(reader, most_p);
		if (r >= 0 && reader->run < reader->runs)
			return 1;
		if (r >= 0)
			r = summed(reader);
		if (r < 0)
			return err_pass(r);
	}
	fill_some(reader, most_p);
	if (reader->among) {
		r = room_map_same_check(under_way(reader), reader->filled, &reader->same);
		if (r < 0)
			return err_pass(r);
	}
	if (reader->run < reader->runs)
		return 1;
	reader->view = NULL;
	return 0;
}

int maps_read_some(struct maps_reader *reader, size_t most)
{
	int r = 0;

	while (r == 0 && (reader->view || reader->views > 0)) {
		if (most == 0)
			return 1;
		if (!reader->view) {
			reader->views--;
			r = view_open(reader);
		}
		if (r == 0)
			r = view_some(reader, &most);
	}
	if (r == 0)
		r = cursor_check(&reader->in, "views");
	if (r < 0) {
		maps_reader_fini(reader);
		return err_pass(r);
	}
	return r;
}
