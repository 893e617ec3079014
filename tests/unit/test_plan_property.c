/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The planner against an oracle that works byte by byte, over random pairs of
 * layouts. KVD_PROPERTY_PAIRS sets their number, KVD_PROPERTY_SEED the first
 * seed; a failure prints the seed, and that seed with 1 pair shows it again.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/plan/cover.h"
#include "tests/lib/plan_oracle.h"
#include "tests/lib/plan_random.h"
#include "tests/lib/sweep.h"

#define PAIRS_DEFAULT 100000 /* the others take a tenth */

static uint64_t env_number(const char *name, uint64_t otherwise)
{
	const char *s = getenv(name);

	return s && *s ? strtoull(s, NULL, 0) : otherwise;
}

/* How many pairs a test plays, from the seed *first_p. */
static uint64_t pairs_of(unsigned int fraction, uint64_t *first_p)
{
	*first_p = env_number("KVD_PROPERTY_SEED", 1);
	return sweep_part(first_p,
			  env_number("KVD_PROPERTY_PAIRS", PAIRS_DEFAULT) / fraction, 6);
}

#define check(ok, seed, ...)                                                    \
	do {                                                                    \
		if (!(ok)) {                                                    \
			print_error("seed %llu: ", (unsigned long long)(seed)); \
			print_error(__VA_ARGS__);                               \
			print_error("\n");                                      \
			fail();                                                 \
		}                                                               \
	} while (0)

struct outcome {
	uint64_t planned, refused, rows, fewest;
};

/* The plan of the request, beside the oracle's. */
static void plan_is_the_oracle_s(uint64_t seed, const struct plan_request *req,
				 struct outcome *sum)
{
	struct plan_oracle oracle;
	struct plan *plan;
	int r;

	plan_oracle_init(&oracle, req);
	r = plan_make(req, &plan);
	if (oracle.twice) {
		check(r < 0 && err_last()->code == ERR_DUP, seed,
		      "bytes reached twice were not refused (%d)", r);
		sum->refused++;
	} else {
		const char *fault;

		check(r == 0, seed, "refused: %s", err_last()->text);
		fault = plan_oracle_check(&oracle, plan);
		check(!fault, seed, "%s: %llu rows, the fewest are %llu", fault,
		      (unsigned long long)plan->rows, (unsigned long long)oracle.rows);
		sum->planned++;
		sum->rows += plan->rows;
		sum->fewest += oracle.rows;
	}
	plan_free(plan);
	plan_oracle_fini(&oracle);
}

static void outcome_print(const struct outcome *sum)
{
	print_message("%llu pairs planned, %llu refused as reached twice, %llu rows, "
		      "fewest %llu\n",
		      (unsigned long long)sum->planned, (unsigned long long)sum->refused,
		      (unsigned long long)sum->rows, (unsigned long long)sum->fewest);
}

static void plan_of_random_pairs_moves_exactly_the_bytes(void **state)
{
	uint64_t first, pairs = pairs_of(1, &first);
	struct outcome sum = {0};

	(void)state;
	for (uint64_t seed = first; seed < first + pairs; seed++) {
		struct plan_random pr;
		int r;

		plan_random_init(&pr, seed);
		r = layout_check(pr.src);
		check(r == 0, seed, "src: %s", err_last()->text);
		r = layout_check(pr.dst);
		check(r == 0, seed, "dst: %s", err_last()->text);
		plan_is_the_oracle_s(seed, &pr.req, &sum);
		plan_random_fini(&pr);
	}
	outcome_print(&sum);
	assert_true(pairs < 100 || sum.planned > pairs / 4);
}

/* ---- selections ---- */

#define SELECT_MOST 256u

/* Some of the map's tokens, as many as the destination has places for. */
static void select_some(uint64_t *s, const struct plan_random *pr, struct plan_map *map,
			uint32_t *select)
{
	const struct layout_view *src = layout_view_find(pr->src, map->view);
	struct layout_view *dst = (void *)(uintptr_t)layout_view_find(pr->dst, map->view);
	uint64_t places = map->dst_page_count * dst->page_tokens, tokens;

	dst->shard = (struct token_shard){0};
	token_shard_at(&src->shard, map->src_page_count * src->page_tokens, &tokens);
	tokens = tokens < SELECT_MOST ? tokens : SELECT_MOST;
	map->token_begin = map->src_first_token;
	map->token_end = map->src_first_token + tokens;
	map->tokens_set = true;
	map->dst_first_token = places ? random_below(s, (uint32_t)places) : 0;
	map->select = select;
	map->select_count = 0;
	for (uint32_t t = 0, odds = 1 + random_below(s, 4); t < tokens; t++)
		if (map->dst_first_token + map->select_count < places &&
		    random_below(s, 4) < odds)
			select[map->select_count++] = t;
}

static void plan_of_random_selections_moves_exactly_the_bytes(void **state)
{
	static uint32_t select[RANDOM_MAPS][SELECT_MOST];
	uint64_t first, pairs = pairs_of(4, &first);
	struct outcome sum = {0};

	(void)state;
	for (uint64_t seed = first; seed < first + pairs; seed++) {
		uint64_t s = seed;
		struct plan_random pr;

		plan_random_init(&pr, seed);
		for (size_t i = 0; i < pr.req.map_count; i++)
			select_some(&s, &pr, &pr.maps[i], select[i]);
		plan_is_the_oracle_s(seed, &pr.req, &sum);
		plan_random_fini(&pr);
	}
	outcome_print(&sum);
	assert_true(pairs < 100 || sum.planned > pairs / 4);
}

/* ---- there and back ---- */

struct memory {
	uint8_t **buffers;
	const struct layout *layout;
};

static void memory_init(struct memory *m, const struct layout *layout, uint64_t *seed)
{
	m->layout = layout;
	m->buffers = calloc(layout->buffer_count + 1, sizeof(*m->buffers));
	for (uint32_t b = 0; b < layout->buffer_count; b++) {
		m->buffers[b] = malloc(layout->buffers[b] + 1);
		for (uint64_t i = 0; i < layout->buffers[b]; i++)
			m->buffers[b][i] = (uint8_t)random_next(seed);
	}
}

static void memory_fini(struct memory *m)
{
	for (uint32_t b = 0; b < m->layout->buffer_count; b++)
		free(m->buffers[b]);
	free(m->buffers);
}

/* Copy in pieces of at most `step` bytes, as a transport would. */
static void copy(const struct plan *plan, const struct memory *src, struct memory *dst,
		 uint64_t step)
{
	struct plan_walk walk;
	struct plan_span s;

	plan_walk_begin(&walk, plan);
	while (plan_walk_next(&walk, step, &s))
		memcpy(dst->buffers[s.dst_buffer] + s.dst,
		       src->buffers[s.src_buffer] + s.src, s.len);
}

/* A's pages to B, and B's pages to another A: every byte that moved is the
 * first A's again. */
static void round_trip(uint64_t seed, const struct plan_random *pr,
		       const struct plan *there, const struct plan *back)
{
	uint64_t rng = seed;
	struct memory a, b, a_after;
	struct plan_walk walk;
	struct plan_span s;
	uint64_t bytes = 0;

	memory_init(&a, pr->src, &rng);
	memory_init(&b, pr->dst, &rng);
	memory_init(&a_after, pr->src, &rng);
	copy(there, &a, &b, 1 + seed % 7);
	copy(back, &b, &a_after, 1 + seed % 5);
	plan_walk_begin(&walk, there);
	while (plan_walk_next(&walk, UINT64_MAX, &s)) {
		check(memcmp(a.buffers[s.src_buffer] + s.src,
			     a_after.buffers[s.src_buffer] + s.src, s.len) == 0,
		      seed, "bytes came back changed");
		bytes += s.len;
	}
	check(bytes == there->bytes && bytes == back->bytes, seed, "bytes differ");
	memory_fini(&a);
	memory_fini(&b);
	memory_fini(&a_after);
}

static void bytes_sent_there_and_back_are_restored(void **state)
{
	uint64_t first, pairs = pairs_of(10, &first), done = 0;

	(void)state;
	for (uint64_t seed = first; seed < first + pairs; seed++) {
		struct plan_map maps[RANDOM_MAPS];
		struct plan *there = NULL, *back = NULL;
		struct plan_request req;
		struct plan_random pr;

		plan_random_init(&pr, seed);
		plan_random_reverse(&pr, maps, &req);
		/* repeated pages of the source make the reverse plan impossible */
		if (plan_make(&pr.req, &there) == 0 && plan_make(&req, &back) == 0) {
			round_trip(seed, &pr, there, back);
			done++;
		}
		plan_free(there);
		plan_free(back);
		plan_random_fini(&pr);
	}
	print_message("%llu round trips\n", (unsigned long long)done);
	assert_true(pairs < 100 || done > pairs / 4);
}

/* ---- one plan on two daemons ---- */

static struct layout *sent(const struct layout *layout)
{
	uint8_t bytes[1 << 14];
	struct layout *copy_of;
	struct cursor c;

	cursor_write(&c, bytes, sizeof(bytes));
	assert_int_equal(layout_encode(layout, &c), 0);
	cursor_read(&c, bytes, c.pos);
	assert_int_equal(layout_decode(&c, &copy_of), 0);
	return copy_of;
}

static void plan_of_layouts_off_the_wire_is_the_same(void **state)
{
	uint64_t first, pairs = pairs_of(10, &first);

	(void)state;
	for (uint64_t seed = first; seed < first + pairs; seed++) {
		struct plan *a = NULL, *b = NULL;
		struct plan_random pr;
		struct plan_request req;
		struct layout *src, *dst;
		int r, q;

		plan_random_init(&pr, seed);
		req = pr.req;
		req.src = src = sent(pr.src);
		req.dst = dst = sent(pr.dst);
		r = plan_make(&pr.req, &a);
		q = plan_make(&req, &b);
		check(r == q, seed, "one is refused");
		if (r == 0) {
			check(a->digest == b->digest, seed, "digests differ");
			check(a->run_count == b->run_count &&
				      memcmp(a->runs, b->runs,
					     a->run_count * sizeof(*a->runs)) == 0,
			      seed, "runs differ");
		}
		plan_free(a);
		plan_free(b);
		layout_free(src);
		layout_free(dst);
		plan_random_fini(&pr);
	}
}

/* ---- wants ---- */

/* Some units of some fields; a cover from one source is all of them. */
static size_t some_wants(struct plan_random *pr, const struct cover *cover,
			 struct plan_want *wants)
{
	size_t n = 0;

	for (size_t i = 0; i < cover->per_source[0].count; i++) {
		struct plan_want w = cover->per_source[0].wants[i];
		uint32_t cut = random_below(&pr->state, w.units + 1);

		if (cut > 0 && random_below(&pr->state, 4)) {
			wants[n] = w;
			wants[n++].units = cut;
		}
		if (cut < w.units && random_below(&pr->state, 4)) {
			wants[n] = w;
			wants[n].first_unit += cut;
			wants[n++].units -= cut;
		}
	}
	for (size_t i = n; i > 1; i--) { /* a peer may send them in any order */
		size_t j = random_below(&pr->state, (uint32_t)i);
		struct plan_want t = wants[i - 1];

		wants[i - 1] = wants[j];
		wants[j] = t;
	}
	return n;
}

static void plan_of_wants_moves_those_units(void **state)
{
	uint64_t first, pairs = pairs_of(10, &first), planned = 0;

	(void)state;
	for (uint64_t seed = first; seed < first + pairs; seed++) {
		struct cover *cover = NULL;
		struct plan_want wants[64];
		struct plan_random pr;

		plan_random_init(&pr, seed);
		if (cover_make(&(struct cover_source){pr.src}, 1, pr.dst, NULL, 0, seed,
			       &cover) == 0) {
			struct plan_oracle oracle;
			struct plan *plan = NULL;
			int r;

			pr.req.want_count = some_wants(&pr, cover, wants);
			pr.req.wants = wants;
			r = cover_check_wants(pr.src, pr.dst, wants, pr.req.want_count);
			check(r == 0, seed, "wants refused: %s", err_last()->text);
			plan_oracle_init(&oracle, &pr.req);
			r = plan_make(&pr.req, &plan);
			check(oracle.twice == (r < 0), seed, "%s", err_last()->text);
			if (r == 0) {
				const char *fault = plan_oracle_check(&oracle, plan);

				check(!fault, seed, "%s", fault);
				planned++;
			}
			plan_free(plan);
			plan_oracle_fini(&oracle);
		}
		cover_free(cover);
		plan_random_fini(&pr);
	}
	print_message("%llu plans of wants\n", (unsigned long long)planned);
	assert_true(pairs < 1000 || planned > pairs / 100);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(plan_of_random_pairs_moves_exactly_the_bytes),
		cmocka_unit_test(plan_of_random_selections_moves_exactly_the_bytes),
		cmocka_unit_test(bytes_sent_there_and_back_are_restored),
		cmocka_unit_test(plan_of_layouts_off_the_wire_is_the_same),
		cmocka_unit_test(plan_of_wants_moves_those_units),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
