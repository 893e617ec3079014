/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segment: see the header. The cuts are made and sorted once per map, for any number of
 * layers; everything after that is linear. Page lists of engines are mostly ascending,
 * and then the sort is skipped.
 *
 * Sorting is by destination because rows are: the rows of a field are then produced in
 * order, and pages [4,3] -> [1,0] are neighbours. Two cuts that reach the same
 * destination token are left in place: whether a byte is reached twice depends on the
 * fields, and is detected there by address.
 */
#include "daemon/plan/segment.h"

#include <stdlib.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/layout.h"
#include "daemon/plan/plan.h"

#define SHARD_CUTS_MAX (1u << 20) /* limit of pieces of a map that shards may make */

/* One side of a map. */
struct side {
	const char *name; /* "src" or "dst" */
	const uint32_t *pages;
	size_t count;
	uint64_t first;
	uint64_t end; /* first token after the list */
	uint32_t page_tokens;
	struct token_shard shard;
};

/* The position of a token in the list of those that are held. */
static uint64_t side_slot(const struct side *s, uint64_t token)
{
	return token_shard_slot(&s->shard, token - s->first);
}

static int segment_side_check(struct side *s, const struct layout_view *view,
			      size_t index)
{
	uint64_t tokens;

	for (size_t i = 0; i < s->count; i++)
		if (s->pages[i] >= view->pages)
			return err_raise(ERR_RANGE,
					 "map[%zu] view %s: %s_pages[%zu] = %u, the pool "
					 "has %u pages",
					 index, view->name, s->name, i, s->pages[i],
					 view->pages);
	s->page_tokens = view->page_tokens;
	s->shard = view->shard;
	if (s->first % token_shard_turn(&s->shard))
		return err_raise(
			ERR_RANGE,
			"map[%zu] view %s: %s_first_token %llu is not a multiple "
			"of %llu, the shard's size x run",
			index, view->name, s->name, (unsigned long long)s->first,
			(unsigned long long)token_shard_turn(&s->shard));
	if (__builtin_mul_overflow((uint64_t)s->count, s->page_tokens, &tokens) ||
	    !token_shard_at(&s->shard, tokens, &tokens) ||
	    __builtin_add_overflow(s->first, tokens, &s->end))
		return err_raise(ERR_RANGE,
				 "map[%zu] view %s: %s_first_token %llu overflows", index,
				 view->name, s->name, (unsigned long long)s->first);
	return 0;
}

static int range_check(const struct plan_map *map, size_t index, const struct side *s)
{
	if (map->token_begin < s->first || map->token_end > s->end)
		return err_raise(ERR_RANGE,
				 "map[%zu] view %s: tokens [%llu,%llu) reach beyond "
				 "%s_pages, which hold [%llu,%llu)",
				 index, map->view, (unsigned long long)map->token_begin,
				 (unsigned long long)map->token_end, s->name,
				 (unsigned long long)s->first,
				 (unsigned long long)s->end);
	return 0;
}

static int select_check(const struct plan_map *map, size_t index, const struct side *dst)
{
	if (!token_shard_is_all(&dst->shard))
		return err_raise(ERR_REQUIRE,
				 "map[%zu] view %s: a selection needs all tokens, not a "
				 "shard of them",
				 index, map->view);
	if (map->select_count > dst->count * dst->page_tokens ||
	    dst->first > dst->count * dst->page_tokens - map->select_count)
		return err_raise(ERR_RANGE,
				 "map[%zu] view %s: %zu selected tokens from place %llu "
				 "on exceed dst_pages",
				 index, map->view, map->select_count,
				 (unsigned long long)dst->first);
	return 0;
}

static int token_range(const struct plan_map *map, size_t index, const struct side *src,
		       const struct side *dst, uint64_t *begin_p, uint64_t *end_p)
{
	int r;

	if (!map->tokens_set && map->token_begin == 0 && map->token_end == 0) {
		*begin_p = src->first > dst->first ? src->first : dst->first;
		*end_p = src->end < dst->end ? src->end : dst->end;
		if (*end_p < *begin_p)
			*end_p = *begin_p;
		return 0;
	}
	if (map->token_begin > map->token_end)
		return err_raise(ERR_RANGE,
				 "map[%zu] view %s: tokens [%llu,%llu) reversed", index,
				 map->view, (unsigned long long)map->token_begin,
				 (unsigned long long)map->token_end);
	r = range_check(map, index, src);
	if (r == 0)
		r = map->select ? select_check(map, index, dst)
				: range_check(map, index, dst);
	*begin_p = map->token_begin;
	*end_p = map->token_end;
	return r < 0 ? err_pass(r) : 0;
}

static int segment_by_destination(const void *a, const void *b)
{
	const struct segment *x = a, *y = b;

	if (x->dst_page != y->dst_page)
		return x->dst_page < y->dst_page ? -1 : 1;
	if (x->dst_token != y->dst_token)
		return x->dst_token < y->dst_token ? -1 : 1;
	/* the same token twice: any fixed order is fine */
	if (x->src_page != y->src_page)
		return x->src_page < y->src_page ? -1 : 1;
	return (x->src_token > y->src_token) - (x->src_token < y->src_token);
}

/* ---- sorting ---- */

struct sort_key {
	uint64_t slot; /* destination token, counted over pages */
	uint32_t index;
};

#define DIGIT 11
#define DIGITS (1u << DIGIT)
#define RADIX_MIN 512u

/* One pass: stable, by DIGIT bits of the slot. */
static void radix_pass(const struct sort_key *in, struct sort_key *out, size_t count,
		       unsigned int shift)
{
	uint32_t at[DIGITS] = {0}, sum = 0;

	for (size_t i = 0; i < count; i++)
		at[in[i].slot >> shift & (DIGITS - 1)]++;
	for (uint32_t d = 0; d < DIGITS; d++) {
		uint32_t n = at[d];

		at[d] = sum;
		sum += n;
	}
	for (size_t i = 0; i < count; i++)
		out[at[in[i].slot >> shift & (DIGITS - 1)]++] = in[i];
}

/*
 * Long lists (a million pages of one token) are sorted digit by digit of the destination
 * slot, which takes 0.1 s instead of a second for a comparison sort. Segments of the same
 * slot keep the order of the list.
 */
static int sort_radix(struct segment_list *list, uint32_t page_tokens)
{
	struct segment *s = list->segments;
	struct sort_key *keys cleanup_free =
		mem_regrow(NULL, 2 * list->count, sizeof(*keys));
	struct segment *sorted = mem_regrow(NULL, list->count, sizeof(*sorted));
	struct sort_key *from, *to;
	uint64_t most = 0;

	if (!keys || !sorted) {
		mem_free(sorted);
		return -err_errno(ERR_NOMEM);
	}
	from = keys;
	to = keys + list->count;
	for (size_t i = 0; i < list->count; i++) {
		from[i].slot = (uint64_t)s[i].dst_page * page_tokens + s[i].dst_token;
		from[i].index = (uint32_t)i;
		most = from[i].slot > most ? from[i].slot : most;
	}
	for (unsigned int shift = 0; shift < 64 && most >> shift; shift += DIGIT) {
		struct sort_key *t = from;

		radix_pass(from, to, list->count, shift);
		from = to;
		to = t;
	}
	for (size_t i = 0; i < list->count; i++)
		sorted[i] = s[from[i].index];
	mem_free(list->segments);
	list->segments = sorted;
	return 0;
}

/* ---- cutting ---- */

static uint64_t min3(uint64_t a, uint64_t b, uint64_t c)
{
	uint64_t m = a < b ? a : b;

	return m < c ? m : c;
}

/* How many complete pages from here on are adjacent on both sides? */
static size_t whole_pages(const struct side *src, const struct side *dst, size_t si,
			  size_t di, uint64_t tokens)
{
	size_t most = (size_t)(tokens / src->page_tokens), n = 1;

	while (n < most && src->pages[si + n] == src->pages[si + n - 1] + 1 &&
	       dst->pages[di + n] == dst->pages[di + n - 1] + 1)
		n++;
	return n;
}

/* Cut tokens [t, end), which both sides hold, at every page end; the caller has
 * reserved space after the first n. Complete pages that are adjacent on both sides
 * become blocks of one segment at once. */
static size_t segment_cut_run(struct segment *out, size_t n, const struct side *src,
			      const struct side *dst, uint64_t t, uint64_t end,
			      bool *sorted_p)
{
	uint64_t s_at = side_slot(src, t), d_at = side_slot(dst, t);
	size_t si = (size_t)(s_at / src->page_tokens);
	size_t di = (size_t)(d_at / dst->page_tokens);
	uint32_t st = (uint32_t)(s_at % src->page_tokens);
	uint32_t dt = (uint32_t)(d_at % dst->page_tokens);

	while (t < end) {
		struct segment *s = &out[n];
		uint64_t len =
			min3(src->page_tokens - st, dst->page_tokens - dt, end - t);

		*s = (struct segment){.src_page = src->pages[si],
				      .src_token = st,
				      .dst_page = dst->pages[di],
				      .dst_token = dt,
				      .tokens = len,
				      .blocks = 1};
		if (len == src->page_tokens && len == dst->page_tokens)
			s->blocks = whole_pages(src, dst, si, di, end - t);
		if (n > 0 && segment_by_destination(&out[n - 1], s) > 0)
			*sorted_p = false;
		n++;
		t += len * s->blocks;
		si += s->blocks - 1;
		di += s->blocks - 1;
		st += (uint32_t)len;
		dt += (uint32_t)len;
		if (st == src->page_tokens) {
			st = 0;
			si++;
		}
		if (dt == dst->page_tokens) {
			dt = 0;
			di++;
		}
	}
	return n;
}

/* Up to which token after t does this side hold the tokens, or not hold them? */
static bool side_run(const struct side *s, uint64_t t, uint64_t *end_p)
{
	bool held = token_shard_run(&s->shard, t - s->first, end_p);

	if (__builtin_add_overflow(*end_p, s->first, end_p))
		*end_p = UINT64_MAX;
	return held;
}

static size_t segment_cut(struct segment *out, size_t n, const struct side *src,
			  const struct side *dst, uint64_t t, uint64_t end,
			  bool *sorted_p)
{
	while (t < end) {
		uint64_t src_end, dst_end, next;
		bool src_holds = side_run(src, t, &src_end);
		bool dst_holds = side_run(dst, t, &dst_end);

		next = min3(src_end, dst_end, end);
		if (src_holds && dst_holds)
			n = segment_cut_run(out, n, src, dst, t, next, sorted_p);
		t = next;
	}
	return n;
}

/* Upper bound of the pieces of [begin, end): one for each end of a page and of a run,
 * and one. */
static uint64_t cuts_max(const struct side *s, uint64_t begin, uint64_t end)
{
	uint64_t cuts = side_slot(s, end) / s->page_tokens -
			side_slot(s, begin) / s->page_tokens + 1;

	if (!token_shard_is_all(&s->shard))
		cuts += (end - begin) / token_shard_turn(&s->shard) + 2;
	return cuts;
}

static int segment_map_sort(struct segment_map *sm)
{
	if (sm->cuts.count >= RADIX_MIN && sm->cuts.count <= UINT32_MAX)
		return err_pass(sort_radix(&sm->cuts, sm->dst_page_tokens));
	qsort(sm->cuts.segments, sm->cuts.count, sizeof(struct segment),
	      segment_by_destination);
	return 0;
}

/* Runs of selected tokens. Each segment has at least one token. */
static int segment_map_select(struct segment_map *sm, size_t index,
			      const struct plan_map *map, const struct side *src,
			      const struct side *dst)
{
	const uint64_t tokens = map->token_end - map->token_begin;
	struct side at = *dst;
	bool sorted = true;

	sm->cuts.segments = mem_regrow(NULL, map->select_count, sizeof(struct segment));
	if (!sm->cuts.segments)
		return -err_errno(ERR_NOMEM);
	for (size_t i = 0, n = 1; i < map->select_count; i += n, n = 1) {
		const uint32_t *first = &map->select[i];
		const uint64_t t = map->token_begin + *first;

		while (i + n < map->select_count && first[n] == first[n - 1] + 1)
			n++;
		if (*first >= tokens || n > tokens - *first)
			return err_raise(
				ERR_RANGE,
				"map[%zu] view %s: select[%zu]: token %u of %llu", index,
				map->view, i, *first, (unsigned long long)tokens);
		at.first = t - (dst->first + i); /* token t has this place; it may wrap */
		sm->cuts.count = segment_cut(sm->cuts.segments, sm->cuts.count, src, &at,
					     t, t + n, &sorted);
	}
	return sorted ? 0 : err_pass(segment_map_sort(sm));
}

static int segment_map_cut(struct segment_map *sm, size_t index, const char *view,
			   const struct side *src, const struct side *dst, uint64_t begin,
			   uint64_t end)
{
	uint64_t most = cuts_max(src, begin, end) + cuts_max(dst, begin, end);
	bool sorted = true;

	if (most > SHARD_CUTS_MAX &&
	    !(token_shard_is_all(&src->shard) && token_shard_is_all(&dst->shard)))
		return err_raise(
			ERR_LIMIT,
			"map[%zu] view %s: shards cut %llu tokens into up to %llu "
			"pieces (limit %u); move fewer tokens at a time",
			index, view, (unsigned long long)(end - begin),
			(unsigned long long)most, SHARD_CUTS_MAX);
	sm->cuts.segments = mem_regrow(NULL, most, sizeof(struct segment));
	if (!sm->cuts.segments)
		return -err_errno(ERR_NOMEM);
	sm->cuts.count = segment_cut(sm->cuts.segments, 0, src, dst, begin, end, &sorted);
	return sorted ? 0 : err_pass(segment_map_sort(sm));
}

int segment_map_init(struct segment_map *sm, const struct plan_map *map, size_t index,
		     const struct layout_view *src, const struct layout_view *dst)
{
	struct side s = {.name = "src",
			 .pages = map->src_pages,
			 .count = map->src_page_count,
			 .first = map->src_first_token};
	struct side d = {.name = "dst",
			 .pages = map->dst_pages,
			 .count = map->dst_page_count,
			 .first = map->dst_first_token};
	uint64_t begin = 0, end = 0;
	int r;

	*sm = (struct segment_map){0};
	if ((r = segment_side_check(&s, src, index)) < 0 ||
	    (r = segment_side_check(&d, dst, index)) < 0 ||
	    (r = token_range(map, index, &s, &d, &begin, &end)) < 0)
		return err_pass(r);
	sm->src_page_tokens = s.page_tokens;
	sm->dst_page_tokens = d.page_tokens;
	sm->cuts.made = true;
	if (begin == end)
		return 0;
	if (map->select)
		return err_pass(segment_map_select(sm, index, map, &s, &d));
	return err_pass(segment_map_cut(sm, index, map->view, &s, &d, begin, end));
}

void segment_map_fini(struct segment_map *sm)
{
	mem_free(sm->cuts.segments);
	for (int i = 0; i < 4; i++)
		mem_free(sm->lists[i / 2][i % 2].segments);
	*sm = (struct segment_map){0};
}

/* Does (page, token) follow `tokens` after (page0, token0)? */
static bool follows(bool flat, uint32_t page_tokens, uint32_t page0, uint32_t token0,
		    uint64_t tokens, uint32_t page, uint32_t token)
{
	if (!flat)
		return page == page0 && token == token0 + tokens;
	return (uint64_t)page * page_tokens + token ==
	       (uint64_t)page0 * page_tokens + token0 + tokens;
}

/* Does (page, token) repeat block `blocks - 1` once more? */
static bool repeats(bool flat, uint32_t page_tokens, const struct segment *a,
		    uint32_t page0, uint32_t token0, uint32_t page, uint32_t token)
{
	if (!flat)
		return token == token0 && page == page0 + a->blocks;
	return (uint64_t)page * page_tokens + token ==
	       (uint64_t)page0 * page_tokens + token0 + a->tokens * a->blocks;
}

static bool join_tokens(const struct segment_map *sm, bool src_flat, bool dst_flat,
			struct segment *a, const struct segment *b)
{
	if (a->blocks > 1 || b->blocks > 1 ||
	    !follows(src_flat, sm->src_page_tokens, a->src_page, a->src_token, a->tokens,
		     b->src_page, b->src_token) ||
	    !follows(dst_flat, sm->dst_page_tokens, a->dst_page, a->dst_token, a->tokens,
		     b->dst_page, b->dst_token))
		return false;
	a->tokens += b->tokens;
	return true;
}

static bool join_blocks(const struct segment_map *sm, bool src_flat, bool dst_flat,
			struct segment *a, const struct segment *b)
{
	if (a->tokens != b->tokens ||
	    !repeats(src_flat, sm->src_page_tokens, a, a->src_page, a->src_token,
		     b->src_page, b->src_token) ||
	    !repeats(dst_flat, sm->dst_page_tokens, a, a->dst_page, a->dst_token,
		     b->dst_page, b->dst_token))
		return false;
	a->blocks += b->blocks;
	return true;
}

/* Two passes: tokens join first, as one segment may include several cuts (pages of 16
 * into pages of 64), and only complete segments repeat as blocks. Blocks of complete
 * pages are tokens where both sides are flat. */
static void join_all(const struct segment_map *sm, bool src_flat, bool dst_flat,
		     struct segment_list *list)
{
	struct segment *s = list->segments;
	size_t n = 0, m = 0;

	for (size_t i = 0; i < list->count; i++) {
		if (src_flat && dst_flat) {
			s[i].tokens *= s[i].blocks;
			s[i].blocks = 1;
		}
		if (n == 0 || !join_tokens(sm, src_flat, dst_flat, &s[n - 1], &s[i]))
			s[n++] = s[i];
	}
	for (size_t i = 0; i < n; i++)
		if (m == 0 || !join_blocks(sm, src_flat, dst_flat, &s[m - 1], &s[i]))
			s[m++] = s[i];
	list->count = m;
}

static void extend(uint64_t v, uint64_t *min_p, uint64_t *max_p)
{
	if (v < *min_p)
		*min_p = v;
	if (v > *max_p)
		*max_p = v;
}

static void segment_measure(struct segment_list *list, uint32_t page_tokens)
{
	list->slot_min = list->page_min = list->token_min = UINT64_MAX;
	for (size_t i = 0; i < list->count; i++) {
		const struct segment *s = &list->segments[i];
		uint64_t slot = (uint64_t)s->dst_page * page_tokens + s->dst_token;

		extend(slot, &list->slot_min, &list->slot_max);
		extend(slot + s->tokens * s->blocks - 1, &list->slot_min,
		       &list->slot_max);
		extend(s->dst_page, &list->page_min, &list->page_max);
		extend(s->dst_page + s->blocks - 1, &list->page_min, &list->page_max);
		extend(s->dst_token, &list->token_min, &list->token_max);
		extend(s->dst_token + s->tokens - 1, &list->token_min, &list->token_max);
	}
}

int segment_map_list(struct segment_map *sm, bool src_flat, bool dst_flat,
		     const struct segment_list **list_p)
{
	struct segment_list *list = &sm->lists[src_flat][dst_flat];

	*list_p = list;
	if (list->made)
		return 0;
	list->segments =
		mem_dup(sm->cuts.segments, sm->cuts.count * sizeof(struct segment));
	if (!list->segments)
		return -err_errno(ERR_NOMEM);
	list->count = sm->cuts.count;
	list->made = true;
	join_all(sm, src_flat, dst_flat, list);
	segment_measure(list, sm->dst_page_tokens);
	return 0;
}
