/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_plan_wire: two layouts in the form of REGISTER, then page lists, token
 * ranges and wants in bytes. What is accepted must encode to a form that decodes
 * to the same plan, and every plan must hold what fuzz_plan_check() asks.
 */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/cursor.h"
#include "daemon/plan/cover.h"
#include "tests/fuzz/lib/fuzz.h"
#include "tests/fuzz/lib/plan_check.h"

#define MAPS 3
#define LIST 32
#define WANTS 16

struct request {
	struct plan_map maps[MAPS];
	uint32_t pages[MAPS][2][LIST];
	struct plan_want wants[WANTS];
	struct plan_request req;
};

static size_t get_pages(struct cursor *in, uint32_t *pages)
{
	size_t n = cursor_get_u8(in) % (LIST + 1);

	for (size_t i = 0; i < n; i++)
		pages[i] = cursor_get_u16(in);
	return n;
}

static void get_map(struct cursor *in, struct request *r, size_t i)
{
	const struct layout *dst = r->req.dst;
	struct plan_map *m = &r->maps[i];
	uint8_t flags = cursor_get_u8(in);

	m->view = dst->view_count ? dst->views[cursor_get_u8(in) % dst->view_count].name
				  : "none";
	m->src_pages = r->pages[i][0];
	m->dst_pages = r->pages[i][1];
	m->src_page_count = get_pages(in, r->pages[i][0]);
	m->dst_page_count = get_pages(in, r->pages[i][1]);
	if (flags & 1)
		m->src_first_token = cursor_get_u64(in);
	if (flags & 2)
		m->dst_first_token = cursor_get_u64(in);
	if (flags & 4) {
		m->token_begin = cursor_get_u32(in);
		m->token_end = cursor_get_u32(in);
		m->tokens_set = flags & 8;
	}
	if (flags & 16)
		m->layers = (struct plan_layers){cursor_get_u8(in), cursor_get_u8(in)};
}

static void get_wants(struct cursor *in, struct request *r)
{
	size_t n = cursor_get_u8(in) % (WANTS + 1);

	for (size_t i = 0; i < n; i++)
		r->wants[i] = (struct plan_want){.view = cursor_get_u8(in),
						 .field = cursor_get_u8(in),
						 .layer = cursor_get_u32(in),
						 .first_unit = cursor_get_u32(in),
						 .units = cursor_get_u32(in)};
	if (n > 0 && cover_check_wants(r->req.src, r->req.dst, r->wants, n) == 0) {
		r->req.wants = r->wants;
		r->req.want_count = n;
	}
}

/* The layout as the other daemon has it. */
static struct layout *sent(const struct layout *layout)
{
	const size_t size = 1u << 20;
	uint8_t *bytes = malloc(size);
	struct layout *copy;
	struct cursor c;

	cursor_write(&c, bytes, size);
	if (layout_encode(layout, &c) < 0)
		abort();
	bytes = realloc(bytes, c.pos);
	cursor_read(&c, bytes, c.pos);
	if (layout_decode(&c, &copy) < 0)
		abort();
	free(bytes);
	return copy;
}

static void plan_both(struct request *r)
{
	struct layout *src = sent(r->req.src), *dst = sent(r->req.dst);
	struct plan_request other = r->req;
	struct plan *a, *b;
	int x = plan_make(&r->req, &a), y;

	other.src = src;
	other.dst = dst;
	y = plan_make(&other, &b);
	if (x != y || (x == 0 && a->digest != b->digest))
		abort();
	if (x == 0)
		fuzz_plan_check(r->req.src, r->req.dst, a);
	plan_free(a);
	plan_free(b);
	layout_free(src);
	layout_free(dst);
}

static void cover_both(const struct layout *src, const struct layout *dst, uint64_t room)
{
	const struct cover_source sources[] = {{src}, {dst}};
	struct cover *cover;

	if (cover_make(sources, 2, dst, NULL, 0, room, &cover) < 0)
		return;
	for (size_t i = 0; i < 2; i++)
		if (cover_check_wants(sources[i].layout, dst, cover->per_source[i].wants,
				      cover->per_source[i].count) < 0)
			abort();
	cover_free(cover);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct request r;
	struct layout *src = NULL, *dst = NULL;
	struct cursor in;
	size_t maps;

	memset(&r, 0, sizeof(r));
	cursor_read(&in, data, size);
	if (layout_decode(&in, &src) == 0 && layout_decode(&in, &dst) == 0) {
		r.req = (struct plan_request){.src = src,
					      .dst = dst,
					      .maps = r.maps,
					      .max_rows = FUZZ_ROWS_MAX};
		maps = cursor_get_u8(&in) % (MAPS + 1);
		for (size_t i = 0; i < maps; i++)
			get_map(&in, &r, i);
		r.req.map_count = maps;
		get_wants(&in, &r);
		layout_compatible(src, dst, &layout_from_source);
		layout_check_target(dst);
		cover_both(src, dst, size);
		plan_both(&r);
	}
	layout_free(src);
	layout_free(dst);
	return 0;
}
