/* SPDX-License-Identifier: Apache-2.0 */
/* Where rows lie: found in the innermost region, held while used, and not counted when
 * the region has gone meanwhile. */
#include "daemon/xfer/search.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/session/region.h"
#include "daemon/session/region_map.h"
#include "daemon/session/session.h"

#define REGIONS 4

struct stage {
	struct session session;
	struct region regions[REGIONS];
	struct xp_reg *reg; /* what the transport made of each; never looked into */
};

static int setup(void **state)
{
	/* two side by side, one inside the second, one elsewhere without transport 1 */
	static const uint64_t at[REGIONS][2] = {{0x10000, 0x10000},
						{0x20000, 0x10000},
						{0x24000, 0x1000},
						{0x80000, 0x1000}};
	struct stage *s = mem_zalloc(sizeof(*s));

	assert_int_equal(region_map_new(&s->session.region_map), 0);
	s->session.regions_version = 7;
	for (size_t i = 0; i < REGIONS; i++) {
		struct region *r = &s->regions[i];

		r->id = i;
		sm_init(&r->sm, &region_table, REGION_READY);
		r->address = at[i][0];
		r->length = at[i][1];
		r->pins = 1; /* ours: it never closes by itself */
		r->regs[0] = (struct xp_reg *)&s->reg;
		r->regs[1] = i < 3 ? (struct xp_reg *)&s->reg : NULL;
		assert_int_equal(region_map_put(s->session.region_map, r), 0);
	}
	*state = s;
	return 0;
}

static int teardown(void **state)
{
	struct stage *s = *state;

	for (size_t i = 0; i < REGIONS; i++)
		assert_int_equal(s->regions[i].pins, 1);
	region_map_free(s->session.region_map);
	mem_free(s);
	return 0;
}

static struct dlist *make(const struct dlist_entry *entries, uint32_t n)
{
	struct dlist *dlist = NULL;

	assert_int_equal(dlist_new(mem_dup(entries, n * sizeof(*entries)), n, 1, &dlist),
			 0);
	return dlist;
}

static int look_local(struct dlist *dlist, struct session *session,
		      unsigned int transport, struct places **places_p)
{
	struct located at = {.dlist = dlist};
	int r = locate_local(&at, session, transport);

	*places_p = r < 0 ? NULL : at.places;
	if (r < 0)
		locate_drop(&at);
	return r;
}

static void rows_are_found_in_innermost_region(void **state)
{
	const struct dlist_entry entries[] = {
		{0x10010, 16, 0, 1},
		{0x24010, 16, 0, 1},
		{0x20010, 16, 0, 1},
		{0x24ff8, 16, 0, 1} /* over the inner one's end */,
		{0x1fff0, 16, 0, 1}};
	struct stage *s = *state;
	struct dlist *dlist = make(entries, 5);
	struct places *places, *again;

	assert_int_equal(look_local(dlist, &s->session, 0, &places), 0);
	assert_ptr_equal(places->regions[places->at[0].buffer], &s->regions[0]);
	assert_ptr_equal(places->regions[places->at[1].buffer], &s->regions[2]);
	assert_ptr_equal(places->regions[places->at[2].buffer], &s->regions[1]);
	assert_ptr_equal(places->regions[places->at[3].buffer], &s->regions[1]);
	assert_int_equal(places->at[4].buffer, places->at[0].buffer);
	assert_int_equal(places->at[1].offset, 0x10);
	assert_int_equal(places->at[3].offset, 0x4ff8);
	assert_int_equal(places->buffer_count, 3);
	assert_int_equal(s->regions[0].pins, 2);
	assert_int_equal(s->regions[3].pins, 1); /* nobody needs it */
	/* known, until a region comes or goes or another transport asks */
	again = search_known_local(dlist, &s->session, 0);
	assert_ptr_equal(again, places);
	places_unref(again);
	assert_null(search_known_local(dlist, &s->session, 1));
	s->session.regions_version++;
	assert_null(search_known_local(dlist, &s->session, 0));
	places_unref(places);
	dlist_free(dlist);
}

static void rows_of_no_region_are_named(void **state)
{
	const struct dlist_entry over[] = {{0x10000, 16, 0, 1}, {0x1fff8, 16, 0, 1}};
	const struct dlist_entry grid[] = {
		{0x1ff00, 16, 16, 32}}; /* into the next region */
	const struct dlist_entry apart[] = {{0x80000, 16, 0, 1}};
	struct stage *s = *state;
	struct places *places = NULL;
	struct dlist *dlist = make(over, 2);

	assert_int_equal(look_local(dlist, &s->session, 0, &places),
			 -err_errno(ERR_NOTFOUND));
	assert_non_null(strstr(err_last()->text, "descs[1]"));
	assert_null(dlist->places);
	dlist_free(dlist);
	dlist = make(grid, 1);
	assert_int_equal(look_local(dlist, &s->session, 0, &places),
			 -err_errno(ERR_NOTFOUND));
	dlist_free(dlist);
	dlist = make(apart, 1);
	assert_int_equal(look_local(dlist, &s->session, 1, &places),
			 -err_errno(ERR_IMPORT));
	assert_int_equal(look_local(dlist, &s->session, 0, &places), 0);
	places_unref(places);
	dlist_free(dlist);
}

/* Between the helper's work and its end the region was unregistered. */
static void region_removed_meanwhile_is_revoked(void **state)
{
	const struct dlist_entry entries[] = {{0x10000, 16, 0, 1}};
	struct stage *s = *state;
	struct places *places = NULL;
	struct dlist *dlist = make(entries, 1);
	struct search *search = NULL;

	assert_int_equal(search_begin_local(&s->session, 0, &search), 0);
	assert_int_equal(s->regions[0].pins, 2); /* it waits for us */
	assert_null(search_found(search));
	assert_int_equal(search_run(search, dlist), 0);
	assert_non_null(search_found(search));
	sm_move(&s->regions[0].sm, REGION_CLOSING);
	assert_int_equal(search_end(search, dlist, &places), -err_errno(ERR_REVOKED));
	assert_null(dlist->places);
	sm_init(&s->regions[0].sm, &region_table, REGION_READY);
	/* begun and given up */
	assert_int_equal(search_begin_local(&s->session, 0, &search), 0);
	assert_int_equal(search_run(search, dlist), 0);
	search_free(search);
	dlist_free(dlist);
}

/* A region that comes after the beginning is not seen; what was found is of then. */
static void search_uses_regions_at_its_start(void **state)
{
	const struct dlist_entry entries[] = {{0x90000, 16, 0, 1}};
	struct region late = {.sm = {&region_table, REGION_READY},
			      .address = 0x90000,
			      .length = 4096,
			      .pins = 1};
	struct stage *s = *state;
	struct dlist *dlist = make(entries, 1);
	struct search *search = NULL;

	assert_int_equal(search_begin_local(&s->session, 0, &search), 0);
	assert_int_equal(region_map_put(s->session.region_map, &late), 0);
	assert_int_equal(search_run(search, dlist), -err_errno(ERR_NOTFOUND));
	search_free(search);
	assert_int_equal(late.pins, 1);
	dlist_free(dlist);
}

/* The owner's daemon and its pending's must agree on the region of every row, and on the
 * numbers of the buffers, whatever overlaps and in whatever order regions came. */
static void owner_and_guest_find_the_same(void **state)
{
	enum { N = 24, ROWS = 64 };
	struct region regions[N];
	struct remote_region far[N];
	struct session session = {.regions_version = 1};
	struct remote_pool pool = {.regions = far, .region_count = N, .uses = 1};
	struct dlist_entry entries[ROWS];

	(void)state;
	srand(5);
	for (int round = 0; round < 200; round++) {
		struct places *mine, *yours;
		struct located theirs = {0};
		struct dlist *a, *b;

		assert_int_equal(region_map_new(&session.region_map), 0);
		memset(regions, 0, sizeof(regions));
		memset(far, 0, sizeof(far));
		for (size_t i = 0; i < N; i++) {
			struct region *r = &regions[i];
			struct remote_region *f = &far[(i * 7 + (size_t)round) % N];

			sm_init(&r->sm, &region_table, REGION_READY);
			r->address = 0x10000 + 64u * ((unsigned int)rand() % 40);
			r->length = 64 * (1 + (unsigned int)rand() % (i % 3 ? 4 : 40));
			r->pins = 1;
			r->regs[0] = (struct xp_reg *)r;
			f->address = r->address;
			f->length = r->length;
			assert_int_equal(region_map_put(session.region_map, r), 0);
		}
		for (size_t i = 0; i < ROWS; i++) {
			const struct region *r = &regions[(unsigned int)rand() % N];

			entries[i] = (struct dlist_entry){
				r->address + (unsigned int)rand() % (r->length - 15), 16,
				0, 1};
		}
		a = make(entries, ROWS);
		b = make(entries, ROWS);
		assert_int_equal(look_local(a, &session, 0, &mine), 0);
		theirs.dlist = b;
		assert_int_equal(locate_remote(&theirs, &pool), 0);
		yours = theirs.places;
		assert_int_equal(mine->buffer_count, yours->buffer_count);
		for (size_t i = 0; i < ROWS; i++) {
			assert_int_equal(mine->at[i].buffer, yours->at[i].buffer);
			assert_int_equal(mine->at[i].offset, yours->at[i].offset);
		}
		for (size_t i = 0; i < mine->buffer_count; i++)
			assert_int_equal(mine->buffers[i].length,
					 yours->buffers[i].length);
		places_unref(mine);
		places_unref(yours);
		dlist_free(a);
		dlist_free(b);
		region_map_free(session.region_map);
		region_map_free(pool.by_address);
		pool.by_address = NULL;
	}
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		T(rows_are_found_in_innermost_region),
		T(rows_of_no_region_are_named),
		T(region_removed_meanwhile_is_revoked),
		T(search_uses_regions_at_its_start),
		T(owner_and_guest_find_the_same),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
