/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ordered posts: rows are read when the seat's word says that they are there, and each
 * end of a post is told by a word that a stream waits for. Two daemons in virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <string.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/loop/offload.h"
#include "tests/lib/attend_world.h"

#define SOON (20 * LOOP_NS_PER_MS)
#define LATE_US 60000000u

static uint64_t done_of(const struct attend_world *w, unsigned int seat)
{
	return *attend_world_word(w, seat, w->done);
}

static void rows_come(struct attend_world *w, unsigned int seat, uint64_t value)
{
	attend_world_rows(w, seat, 7);
	*attend_world_word(w, seat, w->ready) = value;
}

/* A post of both holds' chunks that nothing has come for. */
static void post_waits(struct attend_world *w, unsigned int seat, uint64_t value,
		       unsigned int deadline_us)
{
	struct kvd_ring_part part = attend_world_part(seat % 2 ? w->near : w->hold);

	memset(attend_world_floats(w, seat, w->q), 0xff, w->o - w->q);
	attend_world_order(w, seat, value, &part, deadline_us);
	cluster_run(&w->c, SOON);
	assert_int_equal(attend_world_state(w, seat), KVD_BOOTSTRAPPING);
	assert_true(done_of(w, seat) < value);
}

static void failed_and_told(struct attend_world *w, unsigned int seat, uint64_t value,
			    unsigned int code)
{
	assert_int_equal(attend_world_state(w, seat), KVD_FAILED);
	assert_int_equal(attend_world_error(w, seat), code);
	assert_int_equal(done_of(w, seat), value);
}

static void rows_are_read_when_the_word_says_so(void **state)
{
	struct attend_world *w = *state;

	for (unsigned int seat = 0; seat < 2; seat++) {
		post_waits(w, seat, 5, LATE_US);
		*attend_world_word(w, seat, w->ready) = 4;
		cluster_run(&w->c, SOON);
		assert_int_equal(attend_world_state(w, seat), KVD_BOOTSTRAPPING);
		rows_come(w, seat, 6);
		cluster_run(&w->c, SOON);
		attend_world_right(w, seat, 0, AW_CHUNK * AW_CHUNKS, NULL, 0);
		assert_int_equal(done_of(w, seat), 5);
	}
	attend_world_quiet(w);
}

static void rows_that_are_there_are_read_at_once(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part part = attend_world_part(w->near);

	rows_come(w, 0, 9);
	attend_world_order(w, 0, 9, &part, LATE_US);
	assert_int_equal(attend_world_state(w, 0), KVD_TRANSFERRING);
	cluster_run(&w->c, SOON);
	attend_world_right(w, 0, 0, AW_CHUNK * AW_CHUNKS, NULL, 0);
	assert_int_equal(done_of(w, 0), 9);
}

/* A stream that sees the word reads o, m and l. */
static void word_comes_after_the_results(void **state)
{
	struct attend_world *w = *state;
	struct offload *helpers = w->c.nodes[AW_HOLDER].kvd.compute;

	offload_hold(helpers, true);
	post_waits(w, 0, 1, LATE_US);
	rows_come(w, 0, 1);
	cluster_run(&w->c, SOON);
	assert_int_equal(attend_world_state(w, 0), KVD_TRANSFERRING);
	assert_int_equal(done_of(w, 0), 0);
	offload_hold(helpers, false);
	cluster_run(&w->c, SOON);
	attend_world_right(w, 0, 0, AW_CHUNK * AW_CHUNKS, NULL, 0);
	assert_int_equal(done_of(w, 0), 1);
}

/* With rows that came, and without. */
static void each_end_is_told(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_entry cancel = {.op = KVD_RING_CANCEL,
					.a = KVD_RING_IDS + AW_SLOT + 1};

	post_waits(w, 0, 3, 50000);
	post_waits(w, 1, 4, LATE_US);
	entry_give(&w->c, w->engine[AW_REQUESTER], &cancel, NULL);
	failed_and_told(w, 1, 4, ERR_CANCELED);
	cluster_run(&w->c, 100 * LOOP_NS_PER_MS);
	failed_and_told(w, 0, 3, ERR_TIMEOUT);
	attend_world_quiet(w);
	/* the seats are free, and rows that come late change nothing */
	rows_come(w, 0, 3);
	cluster_run(&w->c, SOON);
	assert_int_equal(attend_world_state(w, 0), KVD_FAILED);
	post_waits(w, 0, 10, LATE_US);
	rows_come(w, 0, 10);
	cluster_run(&w->c, SOON);
	attend_world_right(w, 0, 0, AW_CHUNK * AW_CHUNKS, NULL, 0);
}

static void end_of_its_seats_is_told(void **state)
{
	struct attend_world *w = *state;
	struct session *engine = w->engine[AW_REQUESTER];

	post_waits(w, 0, 1, LATE_US);
	cluster_ok(&w->c, engine, "{'cmd':'attention.close','attend':%llu}",
		   (unsigned long long)w->attend);
	failed_and_told(w, 0, 1, ERR_CANCELED);
	w->attend = attend_world_open(w, "");
	post_waits(w, 0, 2, LATE_US);
	cluster_ok(&w->c, engine, "{'cmd':'region.unregister','region':%llu}",
		   (unsigned long long)w->region);
	assert_int_equal(attend_world_state(w, 0), KVD_FAILED);
	assert_int_equal(done_of(w, 0), 2);
	attend_world_quiet(w);
}

static void end_of_its_session_is_told(void **state)
{
	struct attend_world *w = *state;

	for (unsigned int seat = 0; seat < AW_SEATS; seat++)
		post_waits(w, seat, seat + 1, LATE_US);
	cluster_engine_dies(&w->c, w->engine[AW_REQUESTER]);
	w->engine[AW_REQUESTER] = NULL;
	cluster_run(&w->c, SOON);
	for (unsigned int seat = 0; seat < AW_SEATS; seat++)
		assert_int_equal(done_of(w, seat), seat + 1);
}

/* The stream waits for it, too. */
static void refusal_is_told(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part part = attend_world_part(w->hold + 100);
	struct kvd_ring_entry e;
	struct payload p = {0};

	attend_world_order(w, 0, 7, &part, LATE_US); /* no such hold */
	failed_and_told(w, 0, 7, ERR_NOTFOUND);
	part = attend_world_part(w->hold);
	attend_world_order(w, 0, 8, &part, LATE_US + 1); /* too late */
	failed_and_told(w, 0, 8, ERR_RANGE);
	attends_close(attends_of(&w->c.nodes[AW_REQUESTER].kvd));
	attend_world_order(w, 0, 9, &part, LATE_US);
	failed_and_told(w, 0, 9, ERR_DRAIN);
	/* a seat that is not one of the context's: no word is its own */
	e = attend_world_entry(w, AW_SEATS, 0);
	e.c = 1;
	payload_add(&p, &part, sizeof(part));
	p.views = p.len;
	p.count = 1;
	entry_give(&w->c, w->engine[AW_REQUESTER], &e, &p);
	assert_int_equal(attend_world_error(w, AW_SEATS), ERR_DRAIN);
}

/* The word of the post that has the seat is not touched. */
static void refusal_of_a_used_seat_tells_nothing(void **state)
{
	struct attend_world *w = *state;
	struct kvd_ring_part part = attend_world_part(w->hold);
	struct kvd_ring_entry e = attend_world_entry(w, AW_SEATS - 1, 0);
	struct payload p = {0};

	post_waits(w, 0, 1, LATE_US);
	e.n0 = 0;
	e.c = 2;
	payload_add(&p, &part, sizeof(part));
	p.views = p.len;
	p.count = 1;
	entry_give(&w->c, w->engine[AW_REQUESTER], &e, &p);
	assert_int_equal(attend_world_error(w, AW_SEATS - 1), ERR_BUSY);
	assert_int_equal(done_of(w, 0), 0);
	rows_come(w, 0, 1);
	cluster_run(&w->c, SOON);
	attend_world_right(w, 0, 0, AW_CHUNK * AW_CHUNKS, NULL, 0);
	assert_int_equal(done_of(w, 0), 1);
}

#define CASE(test) \
	cmocka_unit_test_setup_teardown(test, attend_world_setup, attend_world_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(rows_are_read_when_the_word_says_so),
		CASE(rows_that_are_there_are_read_at_once),
		CASE(word_comes_after_the_results),
		CASE(each_end_is_told),
		CASE(end_of_its_seats_is_told),
		CASE(end_of_its_session_is_told),
		CASE(refusal_is_told),
		CASE(refusal_of_a_used_seat_tells_nothing),
	};

	return cmocka_run_group_tests_name("attend_order", tests, NULL, NULL);
}
