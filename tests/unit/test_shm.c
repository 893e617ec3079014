/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm: bytes, order, bounds and refusals, between two transports in one process.
 * (tests/conform runs the cases that all backends share, in two processes.)
 */
#include "daemon/transport/shm/shm_private.h"

#include <limits.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gpu/gpu.h"
#include "tests/lib/shm_duo.h"

/* ---- data ---- */

static void bytes_of_each_kind_cross_exactly(void **state)
{
	static const struct {
		enum xp_kind kind;
		bool src_vm, dst_vm;
		uint64_t rows, len;
	} cases[] = {
		{XP_WRITE, false, false, 1000, 256}, {XP_READ, false, false, 1000, 256},
		{XP_WRITE, true, false, 1000, 256},  {XP_READ, true, false, 1000, 256},
		{XP_WRITE, false, true, 1000, 256},  {XP_READ, false, true, 1000, 256},
		{XP_WRITE, true, true, 1000, 256},   {XP_READ, true, true, 1000, 256},
		{XP_WRITE, false, false, 1, 1},	     {XP_READ, true, false, 1, 1},
		{XP_WRITE, true, false, 9, 1 << 20}, {XP_READ, true, true, 9, 1 << 20},
		{XP_WRITE, false, false, 100000, 3}, {XP_READ, false, false, 100000, 3},
		{XP_WRITE, true, false, 100000, 3},
	};
	struct duo *t = duo_pair();

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		struct duo_transfer x;
		unsigned int n = t->b.requests;
		bool direct = !cases[i].src_vm;

		duo_transfer_init(&x, t, cases[i].kind, cases[i].rows, cases[i].len,
				  cases[i].src_vm, cases[i].dst_vm);
		assert_int_equal(duo_post(&x), 0);
		DUO_WAIT(t, x.top.calls && t->b.inbound_dones == n + 1);
		duo_assert_done(&x, ERR_OK);
		assert_int_equal(t->b.seen[n].kind, cases[i].kind == XP_READ && direct
							    ? XP_CHECK
							    : cases[i].kind);
		assert_int_equal(t->b.seen[n].err.code, ERR_OK);
		duo_transfer_check(&x);
		duo_transfer_fini(&x);
	}
	assert_string_equal(((struct xp_peer_base *)(void *)t->a.peer)->path,
			    "memfd + bounce ring");
	duo_end(t);
}

/* A GPU's driver pins what is mapped for writing alone. */
static void ring_is_mapped_for_writing_where_gpus_are(void **state)
{
	struct gpu *gpu = NULL;

	(void)state;
	assert_int_equal(gpu_new("libno-such-driver.so.1", "auto", &gpu), 0);
	for (int with = 0; with < 2; with++) {
		struct duo_transfer x;
		struct duo *t;

		duo_gpu = with ? gpu : NULL;
		t = duo_pair();
		duo_transfer_init(&x, t, XP_WRITE, 64, 1024, true, false);
		assert_int_equal(duo_post(&x), 0);
		DUO_WAIT(t, x.top.calls && t->b.inbound_dones == 1);
		duo_assert_done(&x, ERR_OK);
		duo_transfer_check(&x);
		duo_transfer_fini(&x);
		assert_int_equal(
			((struct shm_peer *)(void *)t->b.peer)->rx.memory->writable,
			with);
		duo_end(t);
	}
	duo_gpu = NULL;
	gpu_free(gpu);
}

static void self_peer_needs_no_socket(void **state)
{
	struct duo *t = duo_new();
	struct duo_transfer x;

	(void)state;
	assert_int_equal(duo_peer_open(&t->a, t->a.xp, false, DUO_TOKEN_A, DUO_TOKEN_A),
			 0);
	DUO_WAIT(t, t->a.ready);
	for (int i = 0; i < 8; i++) {
		bool no_key = i & 4;

		t->b.peer = t->a.peer; /* the fixture's answerer is a itself */
		struct transport *b_xp = t->b.xp;
		t->b.xp = t->a.xp;
		duo_transfer_init(&x, t, i & 1 ? XP_READ : XP_WRITE, 5000, 300, i & 2,
				  false);
		t->b.peer = NULL;
		t->b.xp = b_xp;
		if (no_key) /* then the ring, to itself */
			x.remote_src.key = NULL;
		t->a.sides = t->b.sides;
		assert_int_equal(duo_post(&x), 0);
		DUO_WAIT(t, x.top.calls);
		duo_assert_done(&x, ERR_OK);
		duo_transfer_check(&x);
		duo_transfer_fini(&x);
	}
	DUO_WAIT(t, t->a.inbound_dones == 8);
	duo_end(t);
}

static void write_without_bytes_is_a_message(void **state)
{
	struct duo *t = duo_pair();
	struct duo_op top = {.test = t};

	(void)state;
	top.op = (struct xp_op){.kind = XP_WRITE,
				.on_done = duo_on_op_done,
				.header = "mark",
				.header_len = 4};
	assert_int_equal(shm_transport.post(t->a.peer, &top.op), 0);
	DUO_WAIT(t, top.calls);
	assert_int_equal(top.op.result, 0);
	assert_memory_equal(&t->b.seen[0].mark, "mark", 4);
	/* the largest header, and one more byte */
	top = (struct duo_op){.test = t};
	top.op = (struct xp_op){.kind = XP_WRITE,
				.on_done = duo_on_op_done,
				.header = test_calloc(1, XP_HEADER_MAX + 1),
				.header_len = XP_HEADER_MAX + 1};
	assert_int_equal(shm_transport.post(t->a.peer, &top.op), -err_errno(ERR_TOOBIG));
	top.op.header_len--;
	assert_int_equal(shm_transport.post(t->a.peer, &top.op), 0);
	DUO_WAIT(t, top.calls);
	assert_int_equal(top.op.result, 0);
	test_free((void *)top.op.header);
	duo_end(t);
}

/* ---- order, once, back-pressure ---- */

/* 9000 posts, more than may be open at once, with READs among them. */
static void requests_keep_the_order_of_posts(void **state)
{
	enum { COUNT = 6000 };
	struct duo *t = duo_pair_threads(1);
	struct duo_op *tops = test_calloc(COUNT, sizeof(*tops));
	uint32_t *marks = test_calloc(COUNT, sizeof(*marks));
	struct duo_transfer x;

	(void)state;
	duo_transfer_init(&x, t, XP_READ, 2000, 512, false, false);
	for (uint32_t i = 0; i < COUNT; i++) {
		marks[i] = i;
		tops[i].test = t;
		tops[i].op = (struct xp_op){.kind = XP_WRITE,
					    .on_done = duo_on_op_done,
					    .header = &marks[i],
					    .header_len = 4};
		if (i % 500 == 3) {
			tops[i].op.kind = XP_READ;
			tops[i].op.sides = x.top.op.sides;
		}
		assert_int_equal(shm_transport.post(t->a.peer, &tops[i].op), 0);
	}
	t->b.sides = (struct xp_sides){0};
	DUO_WAIT(t, t->b.inbound_dones == COUNT && tops[COUNT - 1].calls);
	for (uint32_t i = 0; i < COUNT; i++) {
		assert_int_equal(t->b.seen[i].mark, i);
		assert_int_equal(t->b.seen[i].kind, i % 500 == 3 ? XP_CHECK : XP_WRITE);
		assert_int_equal(tops[i].calls, 1);
		assert_int_equal(tops[i].op.result, 0);
	}
	duo_transfer_fini(&x);
	test_free(tops);
	test_free(marks);
	duo_end(t);
}

/* Nobody answers: the peer's limit is kept, the rest waits at the caller. */
static void unanswered_requests_are_bounded(void **state)
{
	enum { COUNT = XP_INBOUND_MAX + 100 };
	struct duo *t = duo_pair();
	struct duo_op *tops = test_calloc(COUNT, sizeof(*tops));
	unsigned int done = 0;

	(void)state;
	t->b.answer = DUO_HOLD;
	for (uint32_t i = 0; i < COUNT; i++) {
		tops[i].test = t;
		tops[i].op = (struct xp_op){.kind = XP_WRITE, .on_done = duo_on_op_done};
		assert_int_equal(shm_transport.post(t->a.peer, &tops[i].op), 0);
	}
	DUO_WAIT(t, t->b.requests == XP_INBOUND_MAX);
	loop_turn(t->loop, 10 * LOOP_NS_PER_MS);
	assert_int_equal(t->b.requests, XP_INBOUND_MAX);
	assert_int_equal(t->a.lost + t->b.lost, 0);
	t->b.answer = DUO_LAND;
	for (uint32_t i = 0; i < XP_INBOUND_MAX; i++)
		shm_transport.land(t->b.seen[i].in, &t->b.sides, NULL);
	DUO_WAIT(t, t->b.inbound_dones == COUNT);
	DUO_WAIT(t, tops[COUNT - 1].calls);
	for (uint32_t i = 0; i < COUNT; i++)
		done += tops[i].calls;
	assert_int_equal(done, COUNT);
	test_free(tops);
	duo_end(t);
}

/* Large headers that nobody answers stay under the byte limit. */
static void unanswered_headers_are_bounded(void **state)
{
	enum { COUNT = 12 };
	struct duo *t = duo_pair();
	struct duo_op tops[COUNT] = {0};
	void *header = test_calloc(1, XP_HEADER_MAX);

	(void)state;
	t->b.answer = DUO_HOLD;
	for (uint32_t i = 0; i < COUNT; i++) {
		tops[i].test = t;
		tops[i].op = (struct xp_op){.kind = XP_WRITE,
					    .on_done = duo_on_op_done,
					    .header = header,
					    .header_len = XP_HEADER_MAX};
		assert_int_equal(shm_transport.post(t->a.peer, &tops[i].op), 0);
	}
	DUO_WAIT(t, t->b.requests == NET_HEADERS_MAX / XP_HEADER_MAX);
	for (int i = 0; i < 20; i++)
		loop_turn(t->loop, LOOP_NS_PER_MS);
	assert_int_equal(t->b.requests, NET_HEADERS_MAX / XP_HEADER_MAX);
	t->b.answer = DUO_LAND;
	for (uint32_t i = 0; i < NET_HEADERS_MAX / XP_HEADER_MAX; i++)
		shm_transport.land(t->b.seen[i].in, &t->b.sides, NULL);
	DUO_WAIT(t, tops[COUNT - 1].calls);
	test_free(header);
	duo_end(t);
}

/* Canceled requests count at the peer until it has let go of them: their
 * successors wait for its word, and it never sees more than its limit. */
static void canceled_headers_stay_counted(void **state)
{
	enum { COUNT = 60 };
	struct duo *t = duo_pair();
	struct duo_op tops[COUNT] = {0};
	void *header = test_calloc(1, XP_HEADER_MAX);
	struct err why;

	(void)state;
	err_set(&why, ERR_ABORTED, "the engine said so");
	t->b.answer = DUO_HOLD;
	for (uint32_t i = 0; i < COUNT; i++) {
		tops[i].test = t;
		tops[i].op = (struct xp_op){.kind = XP_WRITE,
					    .on_done = duo_on_op_done,
					    .header = header,
					    .header_len = XP_HEADER_MAX};
		assert_int_equal(shm_transport.post(t->a.peer, &tops[i].op), 0);
		if (i % 3)
			loop_turn(t->loop, 0);
		shm_transport.cancel(&tops[i].op, &why);
	}
	for (uint32_t i = 0; i < COUNT; i++)
		DUO_WAIT(t, tops[i].calls);
	DUO_WAIT(t, t->b.inbound_dones == t->b.requests);
	DUO_WAIT(t, ((struct shm_peer *)(void *)t->a.peer)->net.asked == 0);
	assert_int_equal(((struct shm_peer *)(void *)t->a.peer)->net.asked_bytes, 0);
	assert_int_equal(((struct shm_peer *)(void *)t->b.peer)->held_bytes, 0);
	assert_int_equal(t->a.lost + t->b.lost, 0);
	test_free(header);
	duo_end(t);
}

/* ---- still ---- */

/* ---- refusals ---- */

static void refusal_reaches_the_initiator_with_text(void **state)
{
	struct duo *t = duo_pair();
	struct duo_transfer x;

	(void)state;
	t->b.answer = DUO_REFUSE;
	duo_transfer_init(&x, t, XP_WRITE, 10, 64, false, false);
	assert_int_equal(duo_post(&x), 0);
	DUO_WAIT(t, x.top.calls);
	duo_assert_done(&x, ERR_RANGE);
	assert_string_equal(x.top.op.err.text, "not here");
	assert_true(duo_dst_is_zero(&x));
	duo_transfer_fini(&x);
	duo_end(t);
}

static void plans_different_are_refused(void **state)
{
	struct duo *t = duo_pair();
	struct plan *other = duo_plan_rows(11, 64);
	struct duo_transfer x;

	(void)state;
	duo_transfer_init(&x, t, XP_WRITE, 10, 64, false, false);
	t->b.sides.plan = other;
	assert_int_equal(duo_post(&x), 0);
	DUO_WAIT(t, x.top.calls);
	duo_assert_done(&x, ERR_PLAN);
	x.top.calls = 0;
	t->b.sides.plan = NULL;
	assert_int_equal(duo_post(&x), 0);
	DUO_WAIT(t, x.top.calls);
	duo_assert_done(&x, ERR_PLAN);
	assert_true(duo_dst_is_zero(&x));
	plan_free(other);
	duo_transfer_fini(&x);
	duo_end(t);
}

static void rows_outside_a_buffer_are_refused(void **state)
{
	struct duo *t = duo_pair();
	struct duo_transfer x;

	(void)state;
	/* by the poster, for its own memory */
	duo_transfer_init(&x, t, XP_WRITE, 10, 64, false, false);
	x.local.length--;
	assert_int_equal(duo_post(&x), 0); /* the last source row ends 64 bytes earlier */
	DUO_WAIT(t, x.top.calls);
	x.top.calls = 0;
	x.local.length = 10 * 64;
	assert_int_equal(duo_post(&x), -err_errno(ERR_RANGE));
	x.local = (struct xp_buffer){.reg = x.src.reg, .length = x.bytes, .offset = 1};
	assert_int_equal(duo_post(&x), -err_errno(ERR_RANGE));
	x.local.offset = 0;
	/* by the destination, for both */
	x.here.length = x.bytes - 1;
	assert_int_equal(duo_post(&x), 0);
	DUO_WAIT(t, x.top.calls);
	duo_assert_done(&x, ERR_RANGE);
	x.here.length = x.bytes;
	x.remote_src.offset = 1;
	x.top.calls = 0;
	assert_int_equal(duo_post(&x), 0);
	DUO_WAIT(t, x.top.calls);
	duo_assert_done(&x, ERR_RANGE);
	duo_transfer_fini(&x);
	duo_end(t);
}

static void op_kinds_are_checked(void **state)
{
	struct duo *t = duo_pair();
	struct duo_transfer x;

	(void)state;
	duo_transfer_init(&x, t, XP_WRITE, 10, 64, false, false);
	x.top.op.kind = XP_CHECK;
	assert_int_equal(duo_post(&x), -EINVAL);
	duo_transfer_fini(&x);
	duo_end(t);
}

/* ---- memory ---- */

/* Each allocation of a transfer fails once: it costs the op, never the peer. */
static void transfer_out_of_memory_fails_alone(void **state)
{
	struct duo *t = duo_pair();
	bool failed = true;

	(void)state;
	for (uint64_t n = 1; failed; n++) {
		struct duo_transfer x, y;
		int r;

		duo_transfer_init(&x, t, XP_WRITE, 1000, 64, n & 1, false);
		mem_fail_at(n);
		r = duo_post(&x);
		if (r == 0)
			for (int i = 0;
			     i < 1000 && !x.top.calls && !t->a.lost && !t->b.lost; i++)
				loop_turn(t->loop, LOOP_NS_PER_MS);
		failed = mem_count() >= n;
		mem_fail_at(0);
		if (r < 0)
			assert_int_equal(r, -ENOMEM);
		assert_int_equal(t->a.lost + t->b.lost, 0);
		if (r == 0) {
			DUO_WAIT(t, x.top.calls);
			if (x.top.op.result < 0)
				assert_int_equal(x.top.op.err.code, ERR_NOMEM);
			else
				duo_transfer_check(&x);
		}
		duo_transfer_init(&y, t, XP_WRITE, 10, 64, false, false);
		assert_int_equal(duo_post(&y), 0);
		DUO_WAIT(t, y.top.calls);
		duo_assert_done(&y, ERR_OK);
		duo_transfer_fini(&x);
		duo_transfer_fini(&y);
	}
	duo_end(t);
}

/* ---- system calls ---- */

static int counted_fd = -1;
static unsigned int writes;

/* The backend's, in place of libc's. */
ssize_t sendmsg(int fd, const struct msghdr *msg, int flags)
{
	writes += fd == counted_fd;
	return syscall(SYS_sendmsg, fd, msg, flags);
}

struct follower {
	struct duo *t;
	struct xp_op first, second;
	struct loop_defer later;
	unsigned int ended;
};

static void on_second(struct xp_op *op)
{
	struct follower *f = container_of(op, struct follower, second);

	assert_int_equal(op->result, 0);
	f->ended++;
}

static void on_follow(struct loop_defer *defer)
{
	struct follower *f = container_of(defer, struct follower, later);

	assert_int_equal(shm_transport.post(f->t->a.peer, &f->second), 0);
}

/* As the end of a transfer is the reason of a room's step. */
static void on_first(struct xp_op *op)
{
	struct follower *f = container_of(op, struct follower, first);

	assert_int_equal(op->result, 0);
	loop_defer(f->t->loop, &f->later);
}

/* `a` has to answer a request, and to send the one that follows its own. */
static unsigned int writes_of_a_turn(struct duo *t)
{
	const unsigned int at_a = t->a.inbound_dones, at_b = t->b.requests;
	struct follower f = {.t = t};
	struct duo_op z = {.test = t};
	const struct xp_sides nothing = {0};

	f.first = (struct xp_op){.kind = XP_WRITE, .header = "1st", .header_len = 4};
	f.second = z.op = f.first;
	f.first.on_done = on_first;
	f.second.on_done = on_second;
	z.op.on_done = duo_on_op_done;
	loop_defer_init(&f.later, on_follow);
	t->b.answer = DUO_HOLD;
	assert_int_equal(shm_transport.post(t->a.peer, &f.first), 0);
	DUO_WAIT(t, t->b.requests == at_b + 1);
	t->b.answer = DUO_LAND;
	counted_fd = ((struct shm_peer *)(void *)t->a.peer)->fd;
	writes = 0;
	t->in_call = true;
	shm_transport.land(t->b.seen[at_b].in, &nothing, NULL);
	assert_int_equal(shm_transport.post(t->b.peer, &z.op), 0);
	t->in_call = false;
	DUO_WAIT(t, f.ended && z.calls && t->a.inbound_dones == at_a + 1);
	counted_fd = -1;
	return writes;
}

/* A turn that has no time left writes earlier, so not each try is one write. */
static void answers_and_following_requests_are_one_write(void **state)
{
	struct duo *t = duo_pair();
	unsigned int least = UINT_MAX;

	(void)state;
	for (unsigned int i = 0; i < 200 && least > 1; i++) {
		unsigned int n = writes_of_a_turn(t);

		least = n < least ? n : least;
	}
	assert_int_equal(least, 1);
	duo_end(t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(bytes_of_each_kind_cross_exactly),
		cmocka_unit_test(answers_and_following_requests_are_one_write),
		cmocka_unit_test(ring_is_mapped_for_writing_where_gpus_are),
		cmocka_unit_test(self_peer_needs_no_socket),
		cmocka_unit_test(write_without_bytes_is_a_message),
		cmocka_unit_test(requests_keep_the_order_of_posts),
		cmocka_unit_test(unanswered_requests_are_bounded),
		cmocka_unit_test(unanswered_headers_are_bounded),
		cmocka_unit_test(canceled_headers_stay_counted),
		cmocka_unit_test(refusal_reaches_the_initiator_with_text),
		cmocka_unit_test(plans_different_are_refused),
		cmocka_unit_test(rows_outside_a_buffer_are_refused),
		cmocka_unit_test(op_kinds_are_checked),
		cmocka_unit_test(transfer_out_of_memory_fails_alone),
	};

	return cmocka_run_group_tests_name("shm", tests, NULL, NULL);
}
