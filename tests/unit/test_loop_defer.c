/* SPDX-License-Identifier: Apache-2.0 */
/* Deferred calls of the loop: their order within a turn, and between turns. */
#include "daemon/loop/loop.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"

static void note(char *log, char name)
{
	size_t n = strlen(log);

	log[n] = name;
	log[n + 1] = '\0';
}

struct note_defer {
	struct loop_defer defer;
	struct loop *loop;
	char *log;
	char name;
	unsigned int again;
	struct note_defer *cancels;
};

static void on_note_defer(struct loop_defer *defer)
{
	struct note_defer *d = container_of(defer, struct note_defer, defer);

	note(d->log, d->name);
	if (d->cancels)
		loop_defer_cancel(&d->cancels->defer);
	if (d->again) {
		d->again--;
		loop_defer(d->loop, defer);
	}
}

static void defer_runs_once_in_order_and_again_next_turn(void **state)
{
	struct loop *loop;
	char log[16] = "";
	struct note_defer a, b, c;

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	a = (struct note_defer){.loop = loop, .log = log, .name = 'a', .again = 1};
	b = (struct note_defer){.loop = loop, .log = log, .name = 'b'};
	c = (struct note_defer){.loop = loop, .log = log, .name = 'c'};
	loop_defer_init(&a.defer, on_note_defer);
	loop_defer_init(&b.defer, on_note_defer);
	loop_defer_init(&c.defer, on_note_defer);
	b.cancels = &c;
	loop_defer(loop, &a.defer);
	loop_defer(loop, &b.defer);
	loop_defer(loop, &c.defer);
	loop_defer(loop, &a.defer);
	assert_true(loop_turn(loop, UINT64_MAX));
	assert_string_equal(log, "ab");
	loop_run(loop);
	assert_string_equal(log, "aba");
	loop_free(loop);
}

struct chained {
	struct loop_defer defer;
	struct loop *loop;
	struct chained *next;
	unsigned int *ran;
};

static void on_chained(struct loop_defer *defer)
{
	struct chained *c = container_of(defer, struct chained, defer);

	(*c->ran)++;
	if (c->next)
		loop_defer(c->loop, &c->next->defer);
}

/* A room's step, the scheduler's pump, the transport's run. */
static void defer_of_another_runs_in_the_same_turn(void **state)
{
	unsigned int ran = 0, before;
	struct chained chain[3];
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	for (unsigned int i = 0; i < 3; i++) {
		chain[i] = (struct chained){
			.loop = loop, .next = i < 2 ? &chain[i + 1] : NULL, .ran = &ran};
		loop_defer_init(&chain[i].defer, on_chained);
	}
	loop_defer(loop, &chain[0].defer);
	assert_true(loop_turn(loop, 0));
	assert_int_equal(ran, 3);
	/* a ring of them runs again, and the turn ends */
	chain[2].next = &chain[0];
	loop_defer(loop, &chain[0].defer);
	assert_true(loop_turn(loop, 0));
	assert_in_range(ran, 6, 1000);
	before = ran;
	assert_true(loop_turn(loop, 0));
	assert_true(ran > before);
	for (unsigned int i = 0; i < 3; i++)
		loop_defer_cancel(&chain[i].defer);
	loop_free(loop);
}

static void ranked_init(struct note_defer *note, struct loop *loop, char *log,
			enum loop_rank rank)
{
	*note = (struct note_defer){
		.loop = loop, .log = log, .name = rank == LOOP_TO_PEER ? 'p' : 'e'};
	loop_defer_init(&note->defer, on_note_defer);
	note->defer.rank = rank;
}

/* Messages leave when all calls have run, once, to peers before engines. */
static void defer_of_a_later_rank_runs_after_all_others(void **state)
{
	struct note_defer calls[2], to_peer, to_engine;
	struct chained first, second;
	unsigned int ran = 0;
	char log[16] = "";
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	ranked_init(&to_engine, loop, log, LOOP_TO_ENGINE);
	ranked_init(&to_peer, loop, log, LOOP_TO_PEER);
	for (unsigned int i = 0; i < 2; i++) {
		calls[i] = (struct note_defer){
			.loop = loop, .log = log, .name = (char)('a' + (int)i)};
		loop_defer_init(&calls[i].defer, on_note_defer);
	}
	/* one defers a message and another call, as a room's step does */
	first = (struct chained){.loop = loop, .next = &second, .ran = &ran};
	second = (struct chained){.loop = loop, .ran = &ran};
	loop_defer_init(&first.defer, on_chained);
	loop_defer_init(&second.defer, on_chained);
	loop_defer(loop, &to_engine.defer);
	loop_defer(loop, &calls[0].defer);
	loop_defer(loop, &to_peer.defer);
	loop_defer(loop, &first.defer);
	loop_defer(loop, &calls[1].defer);
	assert_true(loop_turn(loop, 0));
	assert_int_equal(ran, 2);
	assert_string_equal(log, "abpe");
	loop_free(loop);
}

/* Calls without end: each rank has its turn. */
static void defer_of_a_later_rank_is_not_starved(void **state)
{
	struct note_defer to_peer, to_engine;
	struct chained ring[2];
	unsigned int ran = 0;
	char log[16] = "";
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	for (unsigned int i = 0; i < 2; i++) {
		ring[i] =
			(struct chained){.loop = loop, .next = &ring[1 - i], .ran = &ran};
		loop_defer_init(&ring[i].defer, on_chained);
	}
	ranked_init(&to_engine, loop, log, LOOP_TO_ENGINE);
	ranked_init(&to_peer, loop, log, LOOP_TO_PEER);
	loop_defer(loop, &to_engine.defer);
	loop_defer(loop, &to_peer.defer);
	loop_defer(loop, &ring[0].defer);
	assert_true(loop_turn(loop, 0));
	assert_string_equal(log, "pe");
	for (unsigned int i = 0; i < 2; i++)
		loop_defer_cancel(&ring[i].defer);
	loop_free(loop);
}

/* A turn is short: a long chain goes on in the next, after the poll. */
static void defer_chain_without_end_leaves_the_turn(void **state)
{
	enum { LENGTH = 1000 };
	static struct chained chain[LENGTH];
	unsigned int ran = 0, turns = 0;
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	for (unsigned int i = 0; i < LENGTH; i++) {
		chain[i] = (struct chained){.loop = loop,
					    .next = i + 1 < LENGTH ? &chain[i + 1] : NULL,
					    .ran = &ran};
		loop_defer_init(&chain[i].defer, on_chained);
	}
	loop_defer(loop, &chain[0].defer);
	while (loop_turn(loop, 0))
		turns++;
	assert_int_equal(ran, LENGTH);
	assert_in_range(turns, 5, LENGTH / 2);
	loop_free(loop);
}

struct mortal {
	struct loop_defer defer;
	struct loop_fd watch;
	int *freed;
};

static void on_mortal_die(struct loop_defer *defer)
{
	struct mortal *m = container_of(defer, struct mortal, defer);

	(*m->freed)++;
	loop_fd_stop(&m->watch);
	close(m->watch.fd);
	mem_free(m);
}

static void on_mortal_ready(struct loop_fd *watch, int events)
{
	struct mortal *m = container_of(watch, struct mortal, watch);

	(void)events;
	loop_defer(watch->loop, &m->defer);
}

static void defer_freed_owner_in_its_own_run_is_fine(void **state)
{
	struct mortal *m = mem_zalloc(sizeof(*m));
	struct loop *loop;
	int freed = 0, fds[2];

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(pipe(fds), 0);
	m->freed = &freed;
	loop_defer_init(&m->defer, on_mortal_die);
	loop_fd_init(&m->watch, loop, fds[0], on_mortal_ready);
	assert_int_equal(loop_fd_set(&m->watch, LOOP_READ), 0);
	assert_int_equal(write(fds[1], "x", 1), 1);
	assert_true(loop_turn(loop, UINT64_MAX));
	assert_int_equal(freed, 0);
	assert_true(loop_turn(loop, 0));
	assert_int_equal(freed, 1);
	close(fds[1]);
	loop_free(loop);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(defer_runs_once_in_order_and_again_next_turn),
		cmocka_unit_test(defer_of_another_runs_in_the_same_turn),
		cmocka_unit_test(defer_of_a_later_rank_runs_after_all_others),
		cmocka_unit_test(defer_of_a_later_rank_is_not_starved),
		cmocka_unit_test(defer_chain_without_end_leaves_the_turn),
		cmocka_unit_test(defer_freed_owner_in_its_own_run_is_fine),
	};

	return cmocka_run_group_tests_name("loop_defer", tests, NULL, NULL);
}
