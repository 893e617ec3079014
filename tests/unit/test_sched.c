/* SPDX-License-Identifier: Apache-2.0 */
/* sched and wait on a virtual loop; the transport is a list of what was posted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <string.h>

#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/handshake/sched.h"
#include "daemon/session/wait.h"

#define OPS 256

static struct {
	struct loop *loop;
	struct sched *sched;
	struct sched_line line;
	struct xp_op *posted[OPS];
	unsigned int posts, dones, canceled;
	int refuse; /* post() fails so many times */
	struct sched_op *order[OPS];
} t;

static int fake_post(struct xp_peer *peer, struct xp_op *op)
{
	(void)peer;
	if (t.refuse > 0) {
		t.refuse--;
		return err_raise(ERR_TRANSPORT, "refused by the test");
	}
	op->impl = &t;
	t.posted[t.posts++] = op;
	return 0;
}

static void fake_cancel(struct xp_op *op, const struct err *why)
{
	op->err = *why;
	op->result = -err_errno(why->code);
	t.canceled++;
}

static const struct transport_ops ops = {
	.name = "test", .post = fake_post, .cancel = fake_cancel};

static void finish(unsigned int i)
{
	t.posted[i]->impl = NULL;
	t.posted[i]->on_done(t.posted[i]);
}

static void on_done(struct sched_op *op)
{
	t.order[t.dones++] = op;
}

static int setup(void **state)
{
	(void)state;
	memset(&t, 0, sizeof(t));
	assert_int_equal(loop_new_virtual(1, &t.loop), 0);
	assert_int_equal(sched_new(t.loop, 4, 1000, &t.sched), 0);
	sched_line_init(&t.line, t.sched);
	sched_line_set(&t.line, (struct xp_peer *)&t, &ops, NULL);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	sched_line_fini(&t.line);
	sched_free(t.sched);
	loop_free(t.loop);
	return 0;
}

static void turn(void)
{
	loop_turn(t.loop, 0);
}

static void submit(struct sched_flow *flow, struct sched_op *op, struct plan *plan)
{
	op->xp.kind = XP_WRITE;
	op->xp.sides.plan = plan;
	op->on_done = on_done;
	list_init(&op->link);
	sched_submit(flow, op);
}

static void flows_take_turns_inside_the_window(void **state)
{
	struct plan small = {.bytes = 10};
	struct sched_flow a, b;
	struct sched_op of_a[6] = {0}, of_b[2] = {0};

	(void)state;
	sched_flow_init(&a, &t.line, 1);
	sched_flow_init(&b, &t.line, 1);
	for (int i = 0; i < 6; i++)
		submit(&a, &of_a[i], &small);
	for (int i = 0; i < 2; i++)
		submit(&b, &of_b[i], &small);
	turn();
	assert_int_equal(t.posts, 4); /* the window of ops */
	assert_ptr_equal(t.posted[0], &of_a[0].xp);
	assert_ptr_equal(t.posted[1], &of_b[0].xp);
	assert_ptr_equal(t.posted[2], &of_a[1].xp);
	assert_ptr_equal(t.posted[3], &of_b[1].xp);
	for (unsigned int i = 0; i < 8; i++) {
		finish(i);
		turn();
	}
	assert_int_equal(t.dones, 8);
	for (int i = 0; i < 6; i++)
		assert_int_equal(of_a[i].xp.result, 0);
}

static void window_of_bytes_lets_one_large_op_pass(void **state)
{
	struct plan large = {.bytes = 5000}, small = {.bytes = 900};
	struct sched_flow a;
	struct sched_op one[3] = {0};

	(void)state;
	sched_flow_init(&a, &t.line, 1);
	submit(&a, &one[0], &large);
	submit(&a, &one[1], &small);
	submit(&a, &one[2], &small);
	turn();
	assert_int_equal(t.posts, 1);
	finish(0);
	turn();
	assert_int_equal(t.posts, 2);
	finish(1);
	turn();
	assert_int_equal(t.posts, 3);
	finish(2);
}

/* One that has the window to itself does not keep another flow's first op out. */
static void flow_without_posted_ops_passes_large_op(void **state)
{
	struct plan large = {.bytes = 5000}, small = {.bytes = 900};
	struct sched_flow a, b, c;
	struct sched_op of_a[2] = {0}, of_b[2] = {0}, of_c = {0};

	(void)state;
	sched_flow_init(&a, &t.line, 1);
	sched_flow_init(&b, &t.line, 1);
	sched_flow_init(&c, &t.line, 1);
	submit(&a, &of_a[0], &large);
	turn();
	submit(&a, &of_a[1], &small); /* first in turn, and waits */
	submit(&b, &of_b[0], &small);
	submit(&b, &of_b[1], &small);
	submit(&c, &of_c, &large);
	turn();
	assert_int_equal(t.posts, 3);
	assert_ptr_equal(t.posted[1], &of_b[0].xp);
	assert_ptr_equal(t.posted[2], &of_c.xp);
	finish(1);
	turn();
	assert_ptr_equal(t.posted[3], &of_b[1].xp); /* its own is over: it goes */
	finish(2);
	turn();
	assert_int_equal(t.posts, 4); /* the large one still fills the window */
	finish(0);
	turn();
	assert_ptr_equal(t.posted[4], &of_a[1].xp);
	finish(3);
	finish(4);
	assert_int_equal(t.dones, 5);
}

/* The window of ops holds for all: first come, first served, in turn. */
static void window_of_ops_is_nobodys_alone(void **state)
{
	struct plan small = {.bytes = 10};
	struct sched_flow a, b;
	struct sched_op of_a[6] = {0}, of_b = {0};

	(void)state;
	sched_flow_init(&a, &t.line, 1);
	sched_flow_init(&b, &t.line, 1);
	for (int i = 0; i < 6; i++)
		submit(&a, &of_a[i], &small);
	turn();
	submit(&b, &of_b, &small);
	turn();
	assert_int_equal(t.posts, 4);
	finish(0);
	turn();
	finish(1);
	turn();
	assert_true(t.posted[4] == &of_b.xp || t.posted[5] == &of_b.xp);
	for (unsigned int i = 2; i < 7; i++) {
		finish(i);
		turn();
	}
	assert_int_equal(t.dones, 7);
}

#define MANY 200

/* A session's many rooms have 64 first ops beyond the window; another's goes at once. */
static void many_flows_of_a_session_do_not_hold_up_another(void **state)
{
	struct plan small = {.bytes = 100};
	struct sched_flow many[MANY], one;
	struct sched_op of_many[MANY] = {0}, of_one = {0};
	unsigned int before;

	(void)state;
	sched_line_fini(&t.line);
	sched_free(t.sched);
	assert_int_equal(sched_new(t.loop, 1024, 1000, &t.sched), 0);
	sched_line_init(&t.line, t.sched);
	sched_line_set(&t.line, (struct xp_peer *)&t, &ops, NULL);
	for (unsigned int i = 0; i < MANY; i++) {
		sched_flow_init(&many[i], &t.line, 1);
		submit(&many[i], &of_many[i], &small);
	}
	turn();
	assert_int_equal(t.posts, 64);
	sched_flow_init(&one, &t.line, 2);
	submit(&one, &of_one, &small);
	turn();
	assert_int_equal(t.posts, 65);
	assert_ptr_equal(t.posted[64], &of_one.xp);
	finish(64);
	for (unsigned int i = 0; i < MANY + 1; i++) {
		if (i == 64)
			continue;
		finish(i); /* the next of them takes the place */
		before = t.posts;
		turn();
		assert_in_range(t.posts, before, before + 1);
	}
	assert_int_equal(t.dones, MANY + 1);
}

static void cancel_of_a_queued_op_is_done_later_and_once(void **state)
{
	struct plan small = {.bytes = 1};
	struct err why;
	struct sched_flow a;
	struct sched_op op[6] = {0};

	(void)state;
	err_set(&why, ERR_ABORTED, "test");
	sched_flow_init(&a, &t.line, 1);
	for (int i = 0; i < 6; i++)
		submit(&a, &op[i], &small);
	turn();
	assert_int_equal(sm_state(&op[3].sm), SCHED_POSTED);
	assert_int_equal(sm_state(&op[5].sm), SCHED_QUEUED); /* the window is full */
	sched_cancel(&op[5], &why);
	assert_int_equal(sm_state(&op[5].sm), SCHED_DROPPED);
	sched_cancel(&op[5], &why);
	assert_int_equal(t.dones, 0); /* never from inside */
	turn();
	assert_int_equal(t.dones, 1);
	assert_int_equal(sm_state(&op[5].sm), SCHED_DONE);
	assert_int_equal(op[5].xp.err.code, ERR_ABORTED);
	sched_cancel(&op[0], &why); /* posted: the transport's matter */
	assert_int_equal(t.canceled, 1);
	for (unsigned int i = 0; i < 5; i++) {
		finish(i);
		turn();
	}
	assert_int_equal(t.dones, 6);
	assert_int_equal(op[0].xp.err.code, ERR_ABORTED);
}

static void post_refused_fails_its_op_only(void **state)
{
	struct plan small = {.bytes = 1};
	struct sched_flow a;
	struct sched_op op[3] = {0};

	(void)state;
	sched_flow_init(&a, &t.line, 1);
	t.refuse = 1;
	for (int i = 0; i < 3; i++)
		submit(&a, &op[i], &small);
	turn();
	turn();
	assert_int_equal(t.dones, 1);
	assert_int_equal(op[0].xp.err.code, ERR_TRANSPORT);
	assert_int_equal(t.posts, 2);
	finish(0);
	finish(1);
	turn();
}

static void line_lost_fails_queued_and_cancels_posted_ops(void **state)
{
	struct plan small = {.bytes = 1};
	struct err why;
	struct sched_flow a;
	struct sched_op op[6] = {0};

	(void)state;
	err_set(&why, ERR_PEER, "test");
	sched_flow_init(&a, &t.line, 1);
	for (int i = 0; i < 6; i++)
		submit(&a, &op[i], &small);
	turn();
	sched_line_set(&t.line, NULL, NULL, &why);
	turn();
	assert_int_equal(t.dones, 2);
	sched_cancel(&op[0], &why); /* still through the transport that has it */
	assert_int_equal(t.canceled, 1);
	for (unsigned int i = 0; i < 4; i++)
		finish(i);
	turn();
	assert_int_equal(t.dones, 6);
}

/* ---- wait ---- */

static unsigned int passed;

static void on_passed(struct wait *wait)
{
	(void)wait;
	passed++;
}

static void session_of_words(struct session *session)
{
	*session = (struct session){0};
	list_init(&session->waiting);
	list_init(&session->words_link);
}

static void wait_passes_when_the_word_does(void **state)
{
	struct session session;
	uint64_t words[2] = {0};
	struct memory memory = {
		.kind = MEMORY_SEALED, .base = (uint8_t *)words, .length = sizeof(words)};
	struct region region = {
		.session = &session, .memory = &memory, .length = sizeof(words)};
	struct wait_spec spec = {.region = &region, .offset = 8, .value = 5};
	struct wait one = {0}, other = {0};
	struct waits *waits;

	(void)state;
	session_of_words(&session);
	passed = 0;
	assert_int_equal(waits_new(t.loop, &waits), 0);
	wait_start(waits, &one, &spec, on_passed);
	wait_start(waits, &other, &spec, on_passed);
	words[1] = 4;
	for (int i = 0; i < 100; i++)
		loop_turn(t.loop, LOOP_NS_PER_MS);
	assert_int_equal(passed, 0);
	wait_stop(&other);
	words[1] = 6; /* beyond is passed, too */
	for (int i = 0; i < 100 && !passed; i++)
		loop_turn(t.loop, LOOP_NS_PER_MS);
	assert_int_equal(passed, 1);
	assert_int_equal(wait_passed(&spec), 1);
	words[1] = 7;
	loop_turn(t.loop, LOOP_NS_PER_S);
	assert_int_equal(passed, 1);
	waits_free(waits);
}

/* Looks do not grow with what is waited for, and sessions take turns. */
static void wait_for_many_words_does_not_delay_another_session(void **state)
{
	enum { WORDS = 5000 };
	uint64_t words[2] = {0};
	struct memory memory = {
		.kind = MEMORY_SEALED, .base = (uint8_t *)words, .length = sizeof(words)};
	struct session crowd, single;
	struct region theirs = {
		.session = &crowd, .memory = &memory, .length = sizeof(words)};
	struct region ours = {
		.session = &single, .memory = &memory, .length = sizeof(words)};
	const struct wait_spec many = {.region = &theirs, .value = 1};
	const struct wait_spec one = {.region = &ours, .offset = 8, .value = 1};
	struct wait *crowded = mem_calloc(WORDS, sizeof(*crowded));
	struct wait wait = {0};
	struct waits *waits;

	(void)state;
	session_of_words(&crowd);
	session_of_words(&single);
	passed = 0;
	assert_int_equal(waits_new(t.loop, &waits), 0);
	wait_start(waits, &wait, &one, on_passed);
	for (unsigned int i = 0; i < WORDS; i++)
		wait_start(waits, &crowded[i], &many, on_passed);
	assert_int_equal(crowd.words, WORDS);
	loop_turn(t.loop, LOOP_NS_PER_MS);
	words[1] = 1;
	loop_turn(t.loop, LOOP_NS_PER_MS); /* a pass */
	assert_int_equal(passed, 1);
	assert_int_equal(single.words, 0);
	words[0] = 1;
	loop_turn(t.loop, LOOP_NS_PER_MS);
	assert_in_range(passed, 2, 1 + 512);
	loop_virtual_parts(t.loop, 10); /* calls are shared out over turns, too */
	while (passed < 1 + WORDS) {
		unsigned int before = passed;

		loop_turn(t.loop, LOOP_NS_PER_MS);
		assert_in_range(passed - before, 1, 10);
	}
	loop_virtual_parts(t.loop, 0);
	assert_int_equal(crowd.words, 0);
	waits_free(waits);
	mem_free(crowded);
}

/* A word that does not move for long is looked at each millisecond. */
static void wait_for_unchanged_word_polls_less_with_time(void **state)
{
	uint64_t words[1] = {0};
	struct memory memory = {
		.kind = MEMORY_SEALED, .base = (uint8_t *)words, .length = sizeof(words)};
	struct session session;
	struct region region = {
		.session = &session, .memory = &memory, .length = sizeof(words)};
	const struct wait_spec spec = {.region = &region, .value = 2};
	uint64_t begun = loop_now_ns(t.loop);
	unsigned int looks = 0;
	struct wait wait = {0};
	struct waits *waits;

	(void)state;
	session_of_words(&session);
	passed = 0;
	assert_int_equal(waits_new(t.loop, &waits), 0);
	wait_start(waits, &wait, &spec, on_passed);
	for (; loop_now_ns(t.loop) < begun + 5 * LOOP_NS_PER_MS; looks++)
		loop_turn(t.loop, LOOP_NS_PER_S);
	assert_in_range(looks, 100, 110); /* as ever, each 50 us */
	while (loop_now_ns(t.loop) < begun + LOOP_NS_PER_S)
		loop_turn(t.loop, LOOP_NS_PER_S);
	begun = loop_now_ns(t.loop);
	for (looks = 0; loop_now_ns(t.loop) < begun + 100 * LOOP_NS_PER_MS; looks++)
		loop_turn(t.loop, LOOP_NS_PER_S);
	assert_in_range(looks, 90, 110);
	words[0] = 1; /* it moves: the next ones are near */
	loop_turn(t.loop, LOOP_NS_PER_S);
	begun = loop_now_ns(t.loop);
	words[0] = 2;
	while (!passed)
		loop_turn(t.loop, LOOP_NS_PER_S);
	assert_in_range(loop_now_ns(t.loop) - begun, 1, 50000);
	waits_free(waits);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(flows_take_turns_inside_the_window),
		CASE(window_of_bytes_lets_one_large_op_pass),
		CASE(flow_without_posted_ops_passes_large_op),
		CASE(window_of_ops_is_nobodys_alone),
		CASE(many_flows_of_a_session_do_not_hold_up_another),
		CASE(cancel_of_a_queued_op_is_done_later_and_once),
		CASE(post_refused_fails_its_op_only),
		CASE(line_lost_fails_queued_and_cancels_posted_ops),
		CASE(wait_passes_when_the_word_does),
		CASE(wait_for_many_words_does_not_delay_another_session),
		CASE(wait_for_unchanged_word_polls_less_with_time),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
