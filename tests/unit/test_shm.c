/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm: each promise of transport.h, between two transports in one process, and
 * against a hostile peer that is a bare socket. (tests/conform runs the data
 * cases that all backends share, in two processes.)
 */
#include "daemon/transport/shm_private.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define WAIT_NS (20 * LOOP_NS_PER_S)
#define REQUESTS_MAX 8192u

enum answer { LAND, HOLD, REFUSE };

struct node {
	struct test *test;
	struct transport *xp;
	struct xp_peer *peer;
	unsigned int ready, lost, closed, keys_ok, keys_bad;
	struct err why, key_err;
	enum answer answer;
	struct xp_sides sides; /* what LAND answers */
	unsigned int requests;
	struct {
		struct xp_inbound *in; /* NULL when done */
		enum xp_kind kind;
		uint32_t mark; /* the header's first bytes */
		unsigned int done;
		struct err err;
	} seen[REQUESTS_MAX];
	unsigned int inbound_dones;
};

struct test {
	struct loop *loop;
	struct offload *offload;
	struct copier *copier;
	struct node a, b; /* a dials */
	bool in_call;	  /* inside post, land, cancel: no callback may come */
};

struct test_op {
	struct xp_op op;
	struct test *test;
	unsigned int calls;
};

/* ---- callbacks ---- */

static void on_request(void *owner, struct xp_inbound *in)
{
	struct node *n = owner;
	unsigned int i = n->requests++ % REQUESTS_MAX;

	assert_null(n->seen[i].in);
	n->seen[i].in = in;
	n->seen[i].kind = in->kind;
	if (in->header_len >= 4)
		memcpy(&n->seen[i].mark, in->header, 4);
	in->owner = &n->seen[i];
	if (n->answer == HOLD)
		return;
	n->test->in_call = true;
	if (n->answer == LAND) {
		n->xp->ops->land(in, &n->sides, NULL);
	} else {
		struct err err;

		err_set(&err, ERR_RANGE, "not here");
		n->xp->ops->land(in, NULL, &err);
	}
	n->test->in_call = false;
}

static void on_inbound_done(void *owner, struct xp_inbound *in, const struct err *err)
{
	struct node *n = owner;
	__typeof__(&n->seen[0]) seen = in->owner;

	assert_false(n->test->in_call);
	assert_ptr_equal(seen->in, in);
	seen->in = NULL;
	seen->done++;
	if (err)
		seen->err = *err;
	n->inbound_dones++;
}

static void on_peer_ready(void *owner, struct xp_peer *peer)
{
	struct node *n = owner;

	assert_ptr_equal(peer, n->peer);
	n->ready++;
}

static void on_peer_lost(void *owner, struct xp_peer *peer, const struct err *why)
{
	struct node *n = owner;

	assert_ptr_equal(peer, n->peer);
	assert_int_equal(n->inbound_dones, n->requests);
	n->lost++;
	n->why = *why;
}

static void on_key(void *owner, struct xp_key *key, const struct err *err)
{
	struct node *n = owner;

	(void)key;
	if (err) {
		n->keys_bad++;
		n->key_err = *err;
	} else {
		n->keys_ok++;
	}
}

static void on_closed(void *arg)
{
	((struct node *)arg)->closed++;
}

static void on_op_done(struct xp_op *op)
{
	struct test_op *top = container_of(op, struct test_op, op);

	assert_false(top->test->in_call);
	assert_null(op->impl);
	top->calls++;
}

/* ---- fixture ---- */

static void node_open(struct test *t, struct node *n)
{
	struct xp_env env = {.loop = t->loop, .offload = t->offload, .copier = t->copier};
	struct xp_callbacks cb = {.owner = n,
				  .on_request = on_request,
				  .on_inbound_done = on_inbound_done,
				  .on_peer_ready = on_peer_ready,
				  .on_peer_lost = on_peer_lost,
				  .on_key = on_key};

	n->test = t;
	assert_int_equal(shm_transport.open(&env, &cb, &n->xp), 0);
}

static int peer_open(struct node *n, const struct transport *remote, bool dial,
		     const char *in, const char *out)
{
	struct xp_peer_args args = {.dial = dial, .self = remote == n->xp};

	memcpy(args.token_in, in, XP_TOKEN_BYTES);
	memcpy(args.token_out, out, XP_TOKEN_BYTES);
	args.address = remote->address;
	args.address_len = remote->address_len;
	return shm_transport.peer_open(n->xp, &args, &n->peer);
}

#define WAIT_FOR(t, condition)                                                     \
	do {                                                                       \
		uint64_t end_ = loop_clock_ns((t)->loop) + WAIT_NS;                \
		while (!(condition)) {                                             \
			if (loop_clock_ns((t)->loop) > end_)                       \
				fail_msg("waited in vain for %s", #condition);     \
			loop_turn((t)->loop, 20 * LOOP_NS_PER_MS);                 \
		}                                                                  \
	} while (0)

#define TOKEN_A "token of a ....."
#define TOKEN_B "token of b ....."

/* Transfers that overlap themselves or each other want one copy thread: two
 * would write the same bytes at once, as an engine may ask for, but no test. */
static struct test *test_new_threads(unsigned int threads)
{
	struct test *t = test_calloc(1, sizeof(*t));

	assert_int_equal(memory_guard_install(), 0);
	assert_int_equal(loop_new(&t->loop), 0);
	assert_int_equal(offload_new(t->loop, 1, &t->offload), 0);
	assert_int_equal(copier_new(t->loop, threads, 64 * KIB, &t->copier), 0);
	node_open(t, &t->a);
	node_open(t, &t->b);
	return t;
}

static struct test *test_new(void)
{
	return test_new_threads(2);
}

static struct test *test_pair_threads(unsigned int threads)
{
	struct test *t = test_new_threads(threads);

	assert_int_equal(peer_open(&t->a, t->b.xp, true, TOKEN_B, TOKEN_A), 0);
	assert_int_equal(peer_open(&t->b, t->a.xp, false, TOKEN_A, TOKEN_B), 0);
	WAIT_FOR(t, t->a.ready && t->b.ready);
	return t;
}

static struct test *test_pair(void)
{
	return test_pair_threads(2);
}

static void node_close(struct test *t, struct node *n)
{
	if (n->peer && !n->closed) {
		shm_transport.peer_close(n->peer, on_closed, n);
		WAIT_FOR(t, n->closed);
	}
	assert_int_equal(n->inbound_dones, n->requests);
	for (unsigned int i = 0; i < n->requests && n->requests <= REQUESTS_MAX; i++)
		assert_int_equal(n->seen[i].done, 1);
	shm_transport.close(n->xp);
}

static void test_end(struct test *t)
{
	node_close(t, &t->a);
	node_close(t, &t->b);
	copier_free(t->copier);
	offload_free(t->offload);
	loop_free(t->loop);
	test_free(t);
}

/* Memory registered at one node, and the key the other has of it. */
struct shared {
	struct memory *memory;
	struct xp_reg *reg;
	struct xp_key *key;
	uint8_t *heap; /* vm: the memory behind */
};

static struct xp_key *key_of(struct node *of, struct xp_reg *reg, struct node *at)
{
	uint8_t packed[XP_KEY_MAX];
	struct xp_key *key = NULL;
	unsigned int answers = at->keys_ok + at->keys_bad;
	size_t len = 0;

	assert_int_equal(shm_transport.key_pack(reg, of->peer, packed, sizeof(packed), &len),
			 0);
	assert_int_equal(shm_transport.key_unpack(at->peer, packed, len, NULL, &key), 0);
	if (!((struct xp_key_base *)(void *)key)->ready)
		WAIT_FOR(at->test, at->keys_ok + at->keys_bad > answers);
	return key;
}

static void shared_new(struct shared *s, struct node *of, struct node *at, uint64_t bytes,
		       bool vm)
{
	*s = (struct shared){0};
	if (vm) {
		s->heap = test_calloc(1, bytes);
		assert_int_equal(memory_import_vm(getpid(), (uintptr_t)s->heap, bytes,
						  &s->memory),
				 0);
	} else {
		assert_int_equal(memory_new_linear(bytes, &s->memory), 0);
	}
	assert_int_equal(shm_transport.mem_reg(of->xp, s->memory, &s->reg), 0);
	if (at)
		s->key = key_of(of, s->reg, at);
}

static void shared_free(struct shared *s)
{
	if (s->key)
		shm_transport.key_drop(s->key);
	shm_transport.mem_dereg(s->reg);
	memory_unref(s->memory);
	test_free(s->heap);
}

static uint8_t *shared_bytes(struct shared *s)
{
	return s->heap ? s->heap : s->memory->base;
}

static struct plan *plan_run(const struct plan_run *run)
{
	struct plan_builder *builder = NULL;
	struct plan *plan = NULL;

	assert_int_equal(plan_builder_new(&builder), 0);
	assert_int_equal(plan_builder_add(builder, run), 0);
	assert_int_equal(plan_builder_finish(builder, &plan), 0);
	plan_builder_free(builder);
	return plan;
}

static struct plan *plan_rows(uint64_t rows, uint64_t len)
{
	const struct plan_run run = {.len = len, .count = rows, .dst = len,
				     .src_stride = (int64_t)(2 * len),
				     .dst_stride = (int64_t)(2 * len)};

	return plan_run(&run);
}

/* Copies the same bytes over and over: what must happen before its end does,
 * however slow the machine is. */
static struct plan *plan_endless(uint64_t bytes)
{
	const struct plan_run run = {.len = bytes, .count = UINT64_C(1) << 40};

	return plan_run(&run);
}

/* ---- one transfer of rows from one node's memory to the other's ---- */
struct transfer {
	struct test *t;
	struct shared src, dst;
	struct plan *plan;
	uint64_t bytes; /* of each memory */
	struct xp_buffer local, remote_src, remote_dst, here;
	struct test_op top;
	enum xp_kind kind;
};

/* a posts, b answers: WRITE a -> b, READ b -> a. */
static void transfer_init(struct transfer *x, struct test *t, enum xp_kind kind,
			  uint64_t rows, uint64_t len, bool src_vm, bool dst_vm)
{
	struct node *from = kind == XP_WRITE ? &t->a : &t->b;
	struct node *to = kind == XP_WRITE ? &t->b : &t->a;

	*x = (struct transfer){.t = t, .kind = kind, .bytes = 2 * rows * len};
	shared_new(&x->src, from, to, x->bytes, src_vm);
	shared_new(&x->dst, to, NULL, x->bytes, dst_vm);
	for (uint64_t i = 0; i < x->bytes; i++)
		shared_bytes(&x->src)[i] = (uint8_t)(i * 7 + i / 251 + 1);
	x->plan = plan_rows(rows, len);
	x->local = (struct xp_buffer){.reg = x->src.reg, .length = x->bytes};
	x->remote_src = (struct xp_buffer){.key = x->src.key, .length = x->bytes};
	x->here = (struct xp_buffer){.reg = x->dst.reg, .length = x->bytes};
	x->remote_dst = (struct xp_buffer){.length = x->bytes};
	x->top = (struct test_op){.test = t};
	x->top.op = (struct xp_op){.kind = kind, .on_done = on_op_done,
				   .header = "mark", .header_len = 4};
	x->top.op.sides = (struct xp_sides){
		.plan = x->plan, .src_count = 1, .dst_count = 1,
		.src = kind == XP_WRITE ? &x->local : &x->remote_src,
		.dst = kind == XP_WRITE ? &x->remote_dst : &x->here};
	t->b.sides = (struct xp_sides){
		.plan = x->plan, .src_count = 1, .dst_count = 1,
		.src = kind == XP_WRITE ? &x->remote_src : &x->local,
		.dst = kind == XP_WRITE ? &x->here : &x->remote_dst};
}

static int post(struct transfer *x)
{
	int r;

	x->t->in_call = true;
	r = shm_transport.post(x->t->a.peer, &x->top.op);
	x->t->in_call = false;
	return r;
}

static void cancel(struct transfer *x)
{
	struct err why;

	err_set(&why, ERR_ABORTED, "the engine said so");
	x->t->in_call = true;
	shm_transport.cancel(&x->top.op, &why);
	shm_transport.cancel(&x->top.op, &why);
	x->t->in_call = false;
}

static void transfer_check(struct transfer *x)
{
	const uint8_t *src = shared_bytes(&x->src), *dst = shared_bytes(&x->dst);
	uint64_t len = x->plan->row_median;

	for (uint64_t i = 0; i < x->bytes; i++) {
		uint8_t want = i / len % 2 ? src[i - len] : 0;

		if (dst[i] != want)
			fail_msg("byte %ju is %u, not %u", (uintmax_t)i, dst[i], want);
	}
}

static bool dst_is_zero(struct transfer *x)
{
	const uint8_t *dst = shared_bytes(&x->dst);

	for (uint64_t i = 0; i < x->bytes; i++)
		if (dst[i])
			return false;
	return true;
}

static void transfer_fini(struct transfer *x)
{
	shared_free(&x->src);
	shared_free(&x->dst);
	plan_free(x->plan);
}

static void assert_done(struct transfer *x, enum err_code code)
{
	assert_int_equal(x->top.calls, 1);
	if (code == ERR_OK) {
		if (x->top.op.result)
			fail_msg("%s: %s", err_name(x->top.op.err.code),
				 x->top.op.err.text);
		assert_int_equal(x->top.op.moved, x->plan->bytes);
	} else {
		assert_int_equal(x->top.op.result, -err_errno(code));
		assert_int_equal(x->top.op.err.code, code);
	}
}

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
	struct test *t = test_pair();

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		struct transfer x;
		unsigned int n = t->b.requests;
		bool direct = !cases[i].src_vm;

		transfer_init(&x, t, cases[i].kind, cases[i].rows, cases[i].len,
			      cases[i].src_vm, cases[i].dst_vm);
		assert_int_equal(post(&x), 0);
		WAIT_FOR(t, x.top.calls && t->b.inbound_dones == n + 1);
		assert_done(&x, ERR_OK);
		assert_int_equal(t->b.seen[n].kind,
				 cases[i].kind == XP_READ && direct ? XP_CHECK
								    : cases[i].kind);
		assert_int_equal(t->b.seen[n].err.code, ERR_OK);
		transfer_check(&x);
		transfer_fini(&x);
	}
	assert_string_equal(((struct xp_peer_base *)(void *)t->a.peer)->path,
			    "memfd + bounce ring");
	test_end(t);
}

static void self_peer_needs_no_socket(void **state)
{
	struct test *t = test_new();
	struct transfer x;

	(void)state;
	assert_int_equal(peer_open(&t->a, t->a.xp, false, TOKEN_A, TOKEN_A), 0);
	WAIT_FOR(t, t->a.ready);
	for (int i = 0; i < 8; i++) {
		bool no_key = i & 4;

		t->b.peer = t->a.peer; /* the fixture's answerer is a itself */
		struct transport *b_xp = t->b.xp;
		t->b.xp = t->a.xp;
		transfer_init(&x, t, i & 1 ? XP_READ : XP_WRITE, 5000, 300, i & 2, false);
		t->b.peer = NULL;
		t->b.xp = b_xp;
		if (no_key) /* then the ring, to itself */
			x.remote_src.key = NULL;
		t->a.sides = t->b.sides;
		assert_int_equal(post(&x), 0);
		WAIT_FOR(t, x.top.calls);
		assert_done(&x, ERR_OK);
		transfer_check(&x);
		transfer_fini(&x);
	}
	WAIT_FOR(t, t->a.inbound_dones == 8);
	test_end(t);
}

static void write_without_bytes_is_a_message(void **state)
{
	struct test *t = test_pair();
	struct test_op top = {.test = t};

	(void)state;
	top.op = (struct xp_op){.kind = XP_WRITE, .on_done = on_op_done,
				.header = "mark", .header_len = 4};
	assert_int_equal(shm_transport.post(t->a.peer, &top.op), 0);
	WAIT_FOR(t, top.calls);
	assert_int_equal(top.op.result, 0);
	assert_memory_equal(&t->b.seen[0].mark, "mark", 4);
	/* the largest header, and one more byte */
	top = (struct test_op){.test = t};
	top.op = (struct xp_op){.kind = XP_WRITE, .on_done = on_op_done,
				.header = test_calloc(1, XP_HEADER_MAX + 1),
				.header_len = XP_HEADER_MAX + 1};
	assert_int_equal(shm_transport.post(t->a.peer, &top.op), -err_errno(ERR_TOOBIG));
	top.op.header_len--;
	assert_int_equal(shm_transport.post(t->a.peer, &top.op), 0);
	WAIT_FOR(t, top.calls);
	assert_int_equal(top.op.result, 0);
	test_free((void *)top.op.header);
	test_end(t);
}

/* ---- order, once, back-pressure ---- */

/* 9000 posts, more than may be open at once, with READs among them. */
static void requests_keep_the_order_of_posts(void **state)
{
	enum { COUNT = 6000 };
	struct test *t = test_pair_threads(1);
	struct test_op *tops = test_calloc(COUNT, sizeof(*tops));
	uint32_t *marks = test_calloc(COUNT, sizeof(*marks));
	struct transfer x;

	(void)state;
	transfer_init(&x, t, XP_READ, 2000, 512, false, false);
	for (uint32_t i = 0; i < COUNT; i++) {
		marks[i] = i;
		tops[i].test = t;
		tops[i].op = (struct xp_op){.kind = XP_WRITE, .on_done = on_op_done,
					    .header = &marks[i], .header_len = 4};
		if (i % 500 == 3) {
			tops[i].op.kind = XP_READ;
			tops[i].op.sides = x.top.op.sides;
		}
		assert_int_equal(shm_transport.post(t->a.peer, &tops[i].op), 0);
	}
	t->b.sides = (struct xp_sides){0};
	WAIT_FOR(t, t->b.inbound_dones == COUNT && tops[COUNT - 1].calls);
	for (uint32_t i = 0; i < COUNT; i++) {
		assert_int_equal(t->b.seen[i].mark, i);
		assert_int_equal(t->b.seen[i].kind, i % 500 == 3 ? XP_CHECK : XP_WRITE);
		assert_int_equal(tops[i].calls, 1);
		assert_int_equal(tops[i].op.result, 0);
	}
	transfer_fini(&x);
	test_free(tops);
	test_free(marks);
	test_end(t);
}

/* Nobody answers: the peer's limit is kept, the rest waits at the caller. */
static void unanswered_requests_are_bounded(void **state)
{
	enum { COUNT = XP_INBOUND_MAX + 100 };
	struct test *t = test_pair();
	struct test_op *tops = test_calloc(COUNT, sizeof(*tops));
	unsigned int done = 0;

	(void)state;
	t->b.answer = HOLD;
	for (uint32_t i = 0; i < COUNT; i++) {
		tops[i].test = t;
		tops[i].op = (struct xp_op){.kind = XP_WRITE, .on_done = on_op_done};
		assert_int_equal(shm_transport.post(t->a.peer, &tops[i].op), 0);
	}
	WAIT_FOR(t, t->b.requests == XP_INBOUND_MAX);
	loop_turn(t->loop, 10 * LOOP_NS_PER_MS);
	assert_int_equal(t->b.requests, XP_INBOUND_MAX);
	assert_int_equal(t->a.lost + t->b.lost, 0);
	t->b.answer = LAND;
	for (uint32_t i = 0; i < XP_INBOUND_MAX; i++)
		shm_transport.land(t->b.seen[i].in, &t->b.sides, NULL);
	WAIT_FOR(t, t->b.inbound_dones == COUNT);
	WAIT_FOR(t, tops[COUNT - 1].calls);
	for (uint32_t i = 0; i < COUNT; i++)
		done += tops[i].calls;
	assert_int_equal(done, COUNT);
	test_free(tops);
	test_end(t);
}

/* Large headers that nobody answers stay under the byte limit. */
static void unanswered_headers_are_bounded(void **state)
{
	enum { COUNT = 12 };
	struct test *t = test_pair();
	struct test_op tops[COUNT] = {0};
	void *header = test_calloc(1, XP_HEADER_MAX);

	(void)state;
	t->b.answer = HOLD;
	for (uint32_t i = 0; i < COUNT; i++) {
		tops[i].test = t;
		tops[i].op = (struct xp_op){.kind = XP_WRITE, .on_done = on_op_done,
					    .header = header,
					    .header_len = XP_HEADER_MAX};
		assert_int_equal(shm_transport.post(t->a.peer, &tops[i].op), 0);
	}
	WAIT_FOR(t, t->b.requests == SHM_HEADER_BYTES_MAX / XP_HEADER_MAX);
	for (int i = 0; i < 20; i++)
		loop_turn(t->loop, LOOP_NS_PER_MS);
	assert_int_equal(t->b.requests, SHM_HEADER_BYTES_MAX / XP_HEADER_MAX);
	t->b.answer = LAND;
	for (uint32_t i = 0; i < SHM_HEADER_BYTES_MAX / XP_HEADER_MAX; i++)
		shm_transport.land(t->b.seen[i].in, &t->b.sides, NULL);
	WAIT_FOR(t, tops[COUNT - 1].calls);
	test_free(header);
	test_end(t);
}

/* Canceled requests count at the peer until it has let go of them: their
 * successors wait for its word, and it never sees more than its limit. */
static void canceled_headers_stay_counted(void **state)
{
	enum { COUNT = 60 };
	struct test *t = test_pair();
	struct test_op tops[COUNT] = {0};
	void *header = test_calloc(1, XP_HEADER_MAX);
	struct err why;

	(void)state;
	err_set(&why, ERR_ABORTED, "the engine said so");
	t->b.answer = HOLD;
	for (uint32_t i = 0; i < COUNT; i++) {
		tops[i].test = t;
		tops[i].op = (struct xp_op){.kind = XP_WRITE, .on_done = on_op_done,
					    .header = header,
					    .header_len = XP_HEADER_MAX};
		assert_int_equal(shm_transport.post(t->a.peer, &tops[i].op), 0);
		if (i % 3)
			loop_turn(t->loop, 0);
		shm_transport.cancel(&tops[i].op, &why);
	}
	for (uint32_t i = 0; i < COUNT; i++)
		WAIT_FOR(t, tops[i].calls);
	WAIT_FOR(t, t->b.inbound_dones == t->b.requests);
	WAIT_FOR(t, ((struct shm_peer *)(void *)t->a.peer)->op_count == 0);
	assert_int_equal(((struct shm_peer *)(void *)t->a.peer)->op_header_bytes, 0);
	assert_int_equal(((struct shm_peer *)(void *)t->b.peer)->in_header_bytes, 0);
	assert_int_equal(t->a.lost + t->b.lost, 0);
	test_free(header);
	test_end(t);
}

/* ---- still ---- */

static const struct {
	enum xp_kind kind;
	bool vm;
} ways[] = {{XP_WRITE, false}, {XP_WRITE, true}, {XP_READ, false}, {XP_READ, true}};

static void transfer_init_endless(struct transfer *x, struct test *t, enum xp_kind kind,
				  bool vm)
{
	transfer_init(x, t, kind, 2048, 256, vm, false);
	plan_free(x->plan);
	x->plan = plan_endless(x->bytes);
	x->top.op.sides.plan = x->plan;
	t->b.sides.plan = x->plan;
}

/* Every byte has landed once, and goes on landing. */
static bool in_flight(struct transfer *x)
{
	return x->top.op.moved >= x->bytes / 2;
}

static void cancel_before_the_answer_is_still(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(ways); i++) {
		struct test *t = test_pair();
		struct transfer x;

		transfer_init(&x, t, ways[i].kind, 1000, 256, ways[i].vm, false);
		t->b.answer = HOLD;
		assert_int_equal(post(&x), 0);
		WAIT_FOR(t, t->b.requests == 1);
		cancel(&x);
		assert_int_equal(x.top.calls, 0);
		WAIT_FOR(t, x.top.calls && t->b.inbound_dones);
		assert_done(&x, ERR_ABORTED);
		assert_int_equal(t->b.seen[0].err.code, ERR_ABORTED);
		if (ways[i].kind == XP_WRITE)
			assert_true(dst_is_zero(&x));
		transfer_fini(&x);
		test_end(t);
	}
}

/* The bytes are in flight; after each side's done, its promise is looked at. */
static void cancel_in_flight_is_still(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(ways); i++) {
		struct test *t = test_pair_threads(1);
		struct transfer x, y;

		transfer_init_endless(&x, t, ways[i].kind, ways[i].vm);
		assert_int_equal(post(&x), 0);
		WAIT_FOR(t, in_flight(&x));
		assert_int_equal(x.top.calls, 0);
		cancel(&x);
		WAIT_FOR(t, x.top.calls && t->b.inbound_dones == t->b.requests);
		assert_done(&x, ERR_ABORTED);
		if (t->b.requests)
			assert_int_equal(t->b.seen[0].err.code, ERR_ABORTED);
		memset(shared_bytes(&x.dst), 0, x.bytes);
		/* the peer lives on, and carries another transfer meanwhile */
		transfer_init(&y, t, ways[i].kind, 3000, 256, ways[i].vm, false);
		assert_int_equal(post(&y), 0);
		WAIT_FOR(t, y.top.calls);
		assert_done(&y, ERR_OK);
		transfer_check(&y);
		assert_true(dst_is_zero(&x));
		assert_int_equal(t->a.lost + t->b.lost, 0);
		transfer_fini(&x);
		transfer_fini(&y);
		test_end(t);
	}
}

/* The answerer withdraws while bytes are in flight. */
static void revoke_in_flight_is_still(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(ways); i++) {
		struct test *t = test_pair_threads(1);
		struct transfer x, y;
		struct err why;

		err_set(&why, ERR_REVOKED, "gone");
		/* the source of a direct READ has nothing in flight but the check */
		t->b.answer = ways[i].kind == XP_READ && !ways[i].vm ? HOLD : LAND;
		if (t->b.answer == HOLD)
			transfer_init(&x, t, ways[i].kind, 2048, 256, ways[i].vm, false);
		else
			transfer_init_endless(&x, t, ways[i].kind, ways[i].vm);
		assert_int_equal(post(&x), 0);
		WAIT_FOR(t, in_flight(&x) && t->b.requests);
		assert_int_equal(t->b.inbound_dones, 0);
		t->in_call = true;
		shm_transport.revoke(t->b.seen[0].in, &why);
		shm_transport.revoke(t->b.seen[0].in, &why);
		t->in_call = false;
		WAIT_FOR(t, t->b.inbound_dones);
		if (ways[i].kind == XP_WRITE)
			memset(shared_bytes(&x.dst), 0, x.bytes);
		assert_int_equal(t->b.seen[0].err.code, ERR_REVOKED);
		WAIT_FOR(t, x.top.calls);
		assert_done(&x, ERR_REVOKED);
		t->b.answer = LAND;
		transfer_init(&y, t, ways[i].kind, 3000, 256, ways[i].vm, false);
		assert_int_equal(post(&y), 0);
		WAIT_FOR(t, y.top.calls);
		assert_done(&y, ERR_OK);
		if (ways[i].kind == XP_WRITE)
			assert_true(dst_is_zero(&x));
		transfer_fini(&x);
		transfer_fini(&y);
		test_end(t);
	}
}

/* The receiver says COPIED, the initiator has canceled: nothing counts. */
static void copied_after_cancel_does_not_count(void **state)
{
	struct test *t = test_pair();
	_Atomic uint64_t *copied;
	struct transfer x;

	(void)state;
	transfer_init(&x, t, XP_WRITE, 4, 64, false, false);
	assert_int_equal(post(&x), 0);
	WAIT_FOR(t, t->b.requests == 1);
	/* until the destination has all bytes; both loops are this one, and
	 * neither has a turn meanwhile */
	copied = &container_of(t->b.seen[0].in, struct shm_in, base)->flow.job.copied;
	while (atomic_load(copied) < x.plan->bytes)
		sched_yield();
	cancel(&x);
	WAIT_FOR(t, x.top.calls && t->b.inbound_dones);
	assert_done(&x, ERR_ABORTED);
	assert_int_equal(t->b.seen[0].err.code, ERR_ABORTED);
	transfer_fini(&x);
	test_end(t);
}

static void close_in_flight_ends_both_sides(void **state)
{
	(void)state;
	for (size_t i = 0; i < 2 * ARRAY_LEN(ways); i++) {
		struct test *t = test_pair_threads(1);
		struct node *closer = i & 1 ? &t->a : &t->b;
		struct node *other = i & 1 ? &t->b : &t->a;
		struct transfer x;

		transfer_init_endless(&x, t, ways[i / 2].kind, ways[i / 2].vm);
		assert_int_equal(post(&x), 0);
		WAIT_FOR(t, in_flight(&x));
		shm_transport.peer_close(closer->peer, on_closed, closer);
		WAIT_FOR(t, closer->closed && other->lost);
		assert_int_equal(closer->lost, 0);
		assert_done(&x, ERR_PEER);
		memset(shared_bytes(&x.dst), 0, x.bytes);
		for (int turn = 0; turn < 10; turn++)
			loop_turn(t->loop, LOOP_NS_PER_MS);
		assert_true(dst_is_zero(&x));
		assert_int_equal(shm_transport.post(other->peer, &x.top.op),
				 -err_errno(ERR_PEER));
		/* keys are dropped after their peer is gone, in any order */
		transfer_fini(&x);
		test_end(t);
	}
}

/* ---- refusals ---- */

static void refusal_reaches_the_initiator_in_words(void **state)
{
	struct test *t = test_pair();
	struct transfer x;

	(void)state;
	t->b.answer = REFUSE;
	transfer_init(&x, t, XP_WRITE, 10, 64, false, false);
	assert_int_equal(post(&x), 0);
	WAIT_FOR(t, x.top.calls);
	assert_done(&x, ERR_RANGE);
	assert_string_equal(x.top.op.err.text, "not here");
	assert_true(dst_is_zero(&x));
	transfer_fini(&x);
	test_end(t);
}

static void plans_that_differ_are_refused(void **state)
{
	struct test *t = test_pair();
	struct plan *other = plan_rows(11, 64);
	struct transfer x;

	(void)state;
	transfer_init(&x, t, XP_WRITE, 10, 64, false, false);
	t->b.sides.plan = other;
	assert_int_equal(post(&x), 0);
	WAIT_FOR(t, x.top.calls);
	assert_done(&x, ERR_PLAN);
	x.top.calls = 0;
	t->b.sides.plan = NULL;
	assert_int_equal(post(&x), 0);
	WAIT_FOR(t, x.top.calls);
	assert_done(&x, ERR_PLAN);
	assert_true(dst_is_zero(&x));
	plan_free(other);
	transfer_fini(&x);
	test_end(t);
}

static void rows_outside_a_buffer_are_refused(void **state)
{
	struct test *t = test_pair();
	struct transfer x;

	(void)state;
	/* by the poster, for its own memory */
	transfer_init(&x, t, XP_WRITE, 10, 64, false, false);
	x.local.length--;
	assert_int_equal(post(&x), 0); /* the last source row ends 64 bytes earlier */
	WAIT_FOR(t, x.top.calls);
	x.top.calls = 0;
	x.local.length = 10 * 64;
	assert_int_equal(post(&x), -err_errno(ERR_RANGE));
	x.local = (struct xp_buffer){.reg = x.src.reg, .length = x.bytes, .offset = 1};
	assert_int_equal(post(&x), -err_errno(ERR_RANGE));
	x.local.offset = 0;
	/* by the destination, for both */
	x.here.length = x.bytes - 1;
	assert_int_equal(post(&x), 0);
	WAIT_FOR(t, x.top.calls);
	assert_done(&x, ERR_RANGE);
	x.here.length = x.bytes;
	x.remote_src.offset = 1;
	x.top.calls = 0;
	assert_int_equal(post(&x), 0);
	WAIT_FOR(t, x.top.calls);
	assert_done(&x, ERR_RANGE);
	transfer_fini(&x);
	test_end(t);
}

static void op_kinds_are_checked(void **state)
{
	struct test *t = test_pair();
	struct transfer x;

	(void)state;
	transfer_init(&x, t, XP_WRITE, 10, 64, false, false);
	x.top.op.kind = XP_CHECK;
	assert_int_equal(post(&x), -EINVAL);
	transfer_fini(&x);
	test_end(t);
}

/* ---- keys ---- */

static void key_of_a_gone_registration_is_refused(void **state)
{
	struct test *t = test_pair();
	struct memory *m = NULL;
	struct xp_reg *reg = NULL;
	struct xp_key *key = NULL;
	uint8_t packed[XP_KEY_MAX];
	size_t len = 0;

	(void)state;
	assert_int_equal(memory_new_linear(4096, &m), 0);
	assert_int_equal(shm_transport.mem_reg(t->a.xp, m, &reg), 0);
	assert_int_equal(shm_transport.key_pack(reg, t->a.peer, packed, sizeof(packed), &len),
			 0);
	assert_int_equal(shm_transport.key_pack(reg, t->a.peer, packed, 5, &len),
			 -err_errno(ERR_TOOBIG));
	/* every byte of nonce and number matters */
	for (size_t i = 2; i < 2 + 8 + 16; i++) {
		packed[i] ^= 1;
		assert_int_equal(shm_transport.key_unpack(t->b.peer, packed, len, NULL, &key),
				 0);
		WAIT_FOR(t, t->b.keys_bad == i - 1);
		assert_int_equal(t->b.key_err.code, ERR_REVOKED);
		shm_transport.key_drop(key);
		packed[i] ^= 1;
	}
	/* a length that is not the memory's */
	packed[len - 8] ^= 1;
	assert_int_equal(shm_transport.key_unpack(t->b.peer, packed, len, NULL, &key), 0);
	WAIT_FOR(t, t->b.key_err.code == ERR_RANGE);
	shm_transport.key_drop(key);
	packed[len - 8] ^= 1;
	for (size_t i = 0; i < len; i++)
		assert_int_equal(shm_transport.key_unpack(t->b.peer, packed, i, NULL, &key),
				 -err_errno(ERR_PROTO));
	shm_transport.mem_dereg(reg);
	assert_int_equal(shm_transport.key_unpack(t->b.peer, packed, len, NULL, &key), 0);
	unsigned int bad = t->b.keys_bad;
	WAIT_FOR(t, t->b.keys_bad > bad);
	assert_int_equal(t->b.key_err.code, ERR_REVOKED);
	shm_transport.key_drop(key);
	memory_unref(m);
	test_end(t);
}

/* Dropped in every state of its life, also before the answer and the map. */
static void key_dropped_early_is_freed(void **state)
{
	struct test *t = test_pair();
	struct xp_key *keys[100];
	struct shared s;
	uint8_t packed[XP_KEY_MAX];
	size_t len = 0;

	(void)state;
	shared_new(&s, &t->a, &t->b, 1 * MIB, false);
	assert_int_equal(shm_transport.key_pack(s.reg, t->a.peer, packed, sizeof(packed), &len),
			 0);
	for (unsigned int turns = 0; turns < 12; turns++) {
		unsigned int ok = t->b.keys_ok;

		for (size_t i = 0; i < ARRAY_LEN(keys); i++)
			assert_int_equal(shm_transport.key_unpack(t->b.peer, packed, len,
								  NULL, &keys[i]),
					 0);
		for (unsigned int i = 0; i < turns; i++)
			loop_turn(t->loop, 0);
		for (size_t i = 0; i < ARRAY_LEN(keys); i += 2)
			shm_transport.key_drop(keys[i]);
		WAIT_FOR(t, t->b.keys_ok >= ok + ARRAY_LEN(keys) / 2);
		for (size_t i = 1; i < ARRAY_LEN(keys); i += 2)
			shm_transport.key_drop(keys[i]);
	}
	shared_free(&s);
	test_end(t);
}

static void peer_memory_is_mapped_read_only(void **state)
{
	struct test *t = test_pair();
	struct shared s;
	const struct shm_key *key;

	(void)state;
	shared_new(&s, &t->a, &t->b, 64 * KIB, false);
	key = (const struct shm_key *)(const void *)s.key;
	assert_false(key->memory->writable);
	assert_int_equal(fcntl(key->memory->fd, F_GETFL) & O_ACCMODE, O_RDONLY);
	assert_int_equal(key->memory->kind, MEMORY_SEALED);
	shared_free(&s);
	test_end(t);
}

/* Memory whose mapping is not there yet goes through the ring at once. */
static void write_before_its_key_is_usable_is_staged(void **state)
{
	struct test *t = test_pair();
	struct transfer x;

	(void)state;
	transfer_init(&x, t, XP_WRITE, 3000, 256, false, false);
	x.remote_src.key = NULL;
	assert_int_equal(post(&x), 0);
	WAIT_FOR(t, x.top.calls);
	assert_done(&x, ERR_OK);
	transfer_check(&x);
	transfer_fini(&x);
	test_end(t);
}

/* The source's memory is cut while the destination copies it. */
static void cut_source_fails_its_transfer_only(void **state)
{
	struct test *t = test_pair();
	struct transfer x, y;
	int fd = memfd_create("cut", MFD_CLOEXEC);

	(void)state;
	transfer_init(&x, t, XP_WRITE, 1000, 256, false, false);
	shared_free(&x.src);
	assert_int_equal(ftruncate(fd, (off_t)x.bytes), 0);
	x.src = (struct shared){0};
	assert_int_equal(memory_import_shm_fd(fd, 0, x.bytes, true, &x.src.memory), 0);
	assert_int_equal(shm_transport.mem_reg(t->a.xp, x.src.memory, &x.src.reg), 0);
	x.src.key = key_of(&t->a, x.src.reg, &t->b);
	x.local.reg = x.src.reg;
	x.remote_src.key = x.src.key;
	assert_int_equal(ftruncate(fd, 8192), 0);
	assert_int_equal(post(&x), 0);
	WAIT_FOR(t, x.top.calls);
	assert_done(&x, ERR_FAULT);
	assert_int_equal(t->b.seen[0].err.code, ERR_FAULT);
	transfer_init(&y, t, XP_WRITE, 1000, 256, false, false);
	assert_int_equal(post(&y), 0);
	WAIT_FOR(t, y.top.calls);
	assert_done(&y, ERR_OK);
	transfer_fini(&x);
	transfer_fini(&y);
	close(fd);
	test_end(t);
}

/* ---- connecting ---- */

static void wrong_token_is_not_a_peer(void **state)
{
	struct test *t = test_new();

	(void)state;
	/* the welcome's token: the dialer notices */
	assert_int_equal(peer_open(&t->b, t->a.xp, false, TOKEN_A, "not the token..."), 0);
	assert_int_equal(peer_open(&t->a, t->b.xp, true, TOKEN_B, TOKEN_A), 0);
	WAIT_FOR(t, t->a.lost && t->b.lost);
	assert_int_equal(t->a.why.code, ERR_AUTH);
	assert_int_equal(t->a.ready, 0);
	test_end(t);
}

static void unknown_token_waits_and_is_closed(void **state)
{
	struct test *t = test_new();

	(void)state;
	((struct shm *)(void *)t->a.xp)->connect_ns = 300 * LOOP_NS_PER_MS;
	((struct shm *)(void *)t->b.xp)->connect_ns = 300 * LOOP_NS_PER_MS;
	assert_int_equal(peer_open(&t->b, t->a.xp, false, TOKEN_A, TOKEN_B), 0);
	assert_int_equal(peer_open(&t->a, t->b.xp, true, TOKEN_B, "not the token..."), 0);
	WAIT_FOR(t, ((struct shm *)(void *)t->b.xp)->guest_count == 1);
	WAIT_FOR(t, t->a.lost && t->b.lost);
	assert_int_equal(t->a.ready + t->b.ready, 0);
	WAIT_FOR(t, ((struct shm *)(void *)t->b.xp)->guest_count == 0);
	test_end(t);
}

static void dialer_first_waits_for_the_other(void **state)
{
	struct test *t = test_new();

	(void)state;
	assert_int_equal(peer_open(&t->a, t->b.xp, true, TOKEN_B, TOKEN_A), 0);
	WAIT_FOR(t, ((struct shm *)(void *)t->b.xp)->guest_count == 1);
	loop_turn(t->loop, LOOP_NS_PER_MS);
	assert_int_equal(t->a.ready, 0);
	assert_int_equal(peer_open(&t->b, t->a.xp, false, TOKEN_A, TOKEN_B), 0);
	WAIT_FOR(t, t->a.ready && t->b.ready);
	test_end(t);
}

static void address_nobody_listens_on_loses_the_peer(void **state)
{
	struct test *t = test_new();
	struct transport gone = *t->b.xp;

	(void)state;
	gone.address[gone.address_len - 4] ^= 1; /* in the abstract name */
	assert_int_equal(peer_open(&t->a, &gone, true, TOKEN_B, TOKEN_A), 0);
	assert_int_equal(t->a.lost, 0);
	WAIT_FOR(t, t->a.lost);
	assert_int_equal(t->a.why.code, ERR_TRANSPORT);
	test_end(t);
}

static void address_of_another_machine_is_refused(void **state)
{
	struct test *t = test_new();
	struct transport far = *t->b.xp;

	(void)state;
	far.address[5] ^= 1;
	assert_int_equal(peer_open(&t->a, &far, true, TOKEN_B, TOKEN_A),
			 -err_errno(ERR_REQUIRE));
	for (size_t len = 0; len < t->b.xp->address_len; len++) {
		far = *t->b.xp;
		far.address_len = len;
		assert_int_equal(peer_open(&t->a, &far, true, TOKEN_B, TOKEN_A),
				 -err_errno(ERR_PROTO));
	}
	t->a.peer = NULL;
	test_end(t);
}

/* ---- a hostile peer ---- */

static int fd_count(void)
{
	int n = 0;

	for (int fd = 0; fd < 512; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

struct raw {
	uint8_t bytes[256];
	size_t len;
};

static void raw_frame(struct raw *raw, uint8_t type, uint8_t flags, uint64_t id,
		      const void *body, uint32_t len)
{
	struct cursor c;

	cursor_write(&c, raw->bytes + raw->len, sizeof(raw->bytes) - raw->len);
	cursor_put_u32(&c, len);
	cursor_put_u8(&c, type);
	cursor_put_u8(&c, flags);
	cursor_put_u16(&c, 0);
	cursor_put_u64(&c, id);
	cursor_put_bytes(&c, body, len);
	assert_false(c.bad);
	raw->len += c.pos;
}

static void raw_hello(struct raw *raw)
{
	uint8_t body[24];
	struct cursor c;

	cursor_write(&c, body, sizeof(body));
	cursor_put_u32(&c, SHM_MAGIC);
	cursor_put_u16(&c, SHM_VERSION);
	cursor_put_u16(&c, 0);
	cursor_put_bytes(&c, TOKEN_A, XP_TOKEN_BYTES);
	raw_frame(raw, SHM_HELLO, 0, 0, body, sizeof(body));
}

static void raw_send(int fd, const struct raw *raw, const int *fds, size_t fd_count_)
{
	char control[CMSG_SPACE(16 * sizeof(int))] = {0};
	struct iovec iov = {(void *)raw->bytes, raw->len};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

	if (fd_count_) {
		struct cmsghdr *h = (struct cmsghdr *)(void *)control;

		msg.msg_control = control;
		msg.msg_controllen = CMSG_SPACE(fd_count_ * sizeof(int));
		h->cmsg_level = SOL_SOCKET;
		h->cmsg_type = SCM_RIGHTS;
		h->cmsg_len = CMSG_LEN(fd_count_ * sizeof(int));
		memcpy(CMSG_DATA(h), fds, fd_count_ * sizeof(int));
	}
	assert_int_equal(sendmsg(fd, &msg, MSG_NOSIGNAL), raw->len);
}

/* A bare socket that b takes for its peer. */
static int hostile(struct test *t)
{
	struct shm_address address;
	struct sockaddr_un sa;
	struct raw raw = {.len = 0};
	socklen_t len;
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_int_equal(peer_open(&t->b, t->a.xp, false, TOKEN_A, TOKEN_B), 0);
	assert_int_equal(shm_address_parse(t->b.xp->address, t->b.xp->address_len, &address),
			 0);
	assert_int_equal(shm_sockaddr(address.names[0], &sa, &len), 0);
	assert_int_equal(connect(fd, (struct sockaddr *)&sa, len), 0);
	raw_hello(&raw);
	raw_send(fd, &raw, NULL, 0);
	WAIT_FOR(t, t->b.ready);
	return fd;
}

static const uint8_t request_ok[] = {XP_WRITE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
#define ID(serial, slot) ((uint64_t)(serial) << SHM_SLOT_BITS | (slot))

struct attack {
	const char *name;
	struct {
		uint8_t type, flags;
		uint64_t id;
		uint8_t body[32];
		uint32_t len;
	} frames[4];
	unsigned int fds;
	uint32_t claim; /* body length to claim instead, of the last frame */
};

#define REQUEST_FRAME(serial, slot)                                                \
	{                                                                          \
		SHM_REQUEST, 0, ID(serial, slot), {XP_WRITE}, 13                   \
	}

static const struct attack attacks[] = {
	{"type 0", {{0, 0, 0, {0}, 1}}, 0, 0},
	{"unknown type", {{99, 0, 0, {0}, 1}}, 0, 0},
	{"a second HELLO", {{SHM_HELLO, 0, 0, {0}, 24}}, 0, 0},
	{"WELCOME", {{SHM_WELCOME, 0, 0, {0}, 24}}, 0, 0},
	{"short", {{SHM_REQUEST, 0, ID(1, 0), {0}, 12}}, 0, 0},
	{"length 4 GiB", {{SHM_REQUEST, 0, ID(1, 0), {0}, 13}}, 0, UINT32_MAX},
	{"length over the cap", {{SHM_REQUEST, 0, ID(1, 0), {0}, 13}}, 0, SHM_BODY_MAX + 1},
	{"kind", {{SHM_REQUEST, 0, ID(1, 0), {3}, 13}}, 0, 0},
	{"header longer than frame", {{SHM_REQUEST, 0, ID(1, 0), {0, 0, 0, 0, 0, 0, 0, 0, 0, 9}, 13}}, 0, 0},
	{"frame longer than header", {{SHM_REQUEST, 0, ID(1, 0), {0}, 20}}, 0, 0},
	{"number 0", {{SHM_REQUEST, 0, 5, {0}, 13}}, 0, 0},
	{"number again", {REQUEST_FRAME(1, 0), REQUEST_FRAME(1, 1)}, 0, 0},
	{"number falls", {REQUEST_FRAME(9, 0), REQUEST_FRAME(8, 1)}, 0, 0},
	{"slot in use", {REQUEST_FRAME(1, 0), REQUEST_FRAME(2, 0)}, 0, 0},
	{"CONFIRM of nothing", {{SHM_CONFIRM, 0, ID(7, 0), {0}, 0}}, 0, 0},
	{"CONFIRM before COPIED", {REQUEST_FRAME(1, 0), {SHM_CONFIRM, 0, ID(1, 0), {0}, 0}}, 0, 0},
	{"CANCEL of nothing", {{SHM_CANCEL, 0, ID(7, 0), {1}, 6}}, 0, 0},
	{"CANCEL without a reason", {REQUEST_FRAME(1, 0), {SHM_CANCEL, 0, ID(1, 0), {0}, 6}}, 0, 0},
	{"DONE of nothing", {{SHM_DONE, 0, ID(1, 0), {0}, 6}}, 0, 0},
	{"COPIED of nothing", {{SHM_COPIED, 0, ID(1, 0), {0}, 0}}, 0, 0},
	{"STAGE of nothing", {{SHM_STAGE, 0, ID(1, 0), {0}, 0}}, 0, 0},
	{"PROGRESS of nothing", {{SHM_PROGRESS, 0, ID(1, 0), {0}, 8}}, 0, 0},
	{"DATA without a ring", {{SHM_DATA, 0, ID(1, 0), {0}, 16}}, 0, 0},
	{"FREE without a ring", {{SHM_FREE, 0, 0, {0}, 0}}, 0, 0},
	{"FREE far away", {{SHM_FREE, 0, UINT64_MAX, {0}, 0}}, 0, 0},
	{"RING without an fd", {{SHM_RING, 0, 0, {1, 0, 0, 0, 0, 16}, 8}}, 0, 0},
	{"RING of 0 slots", {{SHM_RING, 0, 0, {0, 0, 0, 0, 0, 16}, 8}}, 1, 0},
	{"RING too large", {{SHM_RING, 0, 0, {0, 1, 0, 0, 0, 16}, 8}}, 1, 0},
	{"RING that is no memfd", {{SHM_RING, 0, 0, {1, 0, 0, 0, 0, 16}, 8}}, 1, 0},
	{"KEY_GIVE not asked for", {{SHM_KEY_GIVE, 0, 1, {0}, 17}}, 1, 0},
	{"KEY_DENY not asked for", {{SHM_KEY_DENY, 0, 1, {0}, 6}}, 0, 0},
	{"an fd with a frame that carries none", {REQUEST_FRAME(1, 0)}, 1, 0},
	{"fds with a frame that carries none", {REQUEST_FRAME(1, 0)}, 8, 0},
	{"more fds than anybody takes", {REQUEST_FRAME(1, 0)}, 12, 0},
};

static void hostile_frames_lose_that_peer_only(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(attacks); i++) {
		struct test *t = test_new();
		int before = fd_count(), fd = hostile(t), fds[12];
		struct raw raw = {.len = 0};
		size_t last = 0;

		t->b.answer = HOLD;
		for (size_t k = 0; k < 4 && attacks[i].frames[k].len +
						    attacks[i].frames[k].type; k++) {
			last = raw.len;
			raw_frame(&raw, attacks[i].frames[k].type,
				  attacks[i].frames[k].flags, attacks[i].frames[k].id,
				  attacks[i].frames[k].body, attacks[i].frames[k].len);
		}
		if (attacks[i].claim)
			memcpy(raw.bytes + last, &attacks[i].claim, 4);
		for (unsigned int k = 0; k < attacks[i].fds; k++)
			fds[k] = 0;
		raw_send(fd, &raw, fds, attacks[i].fds);
		WAIT_FOR(t, t->b.lost);
		if (t->b.why.code != ERR_PROTO && t->b.why.code != ERR_IMPORT)
			fail_msg("%s: %s %s", attacks[i].name, err_name(t->b.why.code),
				 t->b.why.text);
		close(fd);
		/* no fd is left of it, and the transport serves others */
		assert_int_equal(fd_count(), before);
		shm_transport.peer_close(t->b.peer, on_closed, &t->b);
		WAIT_FOR(t, t->b.closed);
		t->b.closed = t->b.ready = 0;
		t->b.answer = LAND;
		assert_int_equal(peer_open(&t->a, t->b.xp, true, TOKEN_B, TOKEN_A), 0);
		assert_int_equal(peer_open(&t->b, t->a.xp, false, TOKEN_A, TOKEN_B), 0);
		WAIT_FOR(t, t->a.ready && t->b.ready);
		test_end(t);
	}
}

/* A frame byte by byte, then the connection ends in the middle of one. */
static void frames_in_pieces_are_put_together(void **state)
{
	struct test *t = test_new();
	int fd = hostile(t);
	struct raw raw = {.len = 0}, one = {.len = 1};

	(void)state;
	raw_frame(&raw, SHM_REQUEST, 0, ID(1, 0), request_ok, sizeof(request_ok));
	raw_frame(&raw, SHM_REQUEST, 0, ID(2, 1), request_ok, sizeof(request_ok));
	for (size_t i = 0; i < raw.len - 1; i++) {
		one.bytes[0] = raw.bytes[i];
		raw_send(fd, &one, NULL, 0);
		loop_turn(t->loop, 0);
	}
	WAIT_FOR(t, t->b.inbound_dones == 1);
	close(fd);
	WAIT_FOR(t, t->b.lost);
	assert_int_equal(t->b.why.code, ERR_PEER);
	assert_int_equal(t->b.requests, 1);
	test_end(t);
}

/* It asks and never reads: bounded, and the loop stays free. */
static void peer_that_never_reads_is_lost(void **state)
{
	struct test *t = test_new();
	int fd = hostile(t);
	struct raw raw = {.len = 0};
	uint64_t serial = 0;

	(void)state;
	assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
	while (!t->b.lost) {
		raw.len = 0;
		for (int i = 0; i < 8; i++, serial++)
			raw_frame(&raw, SHM_REQUEST, 0, ID(serial + 1, serial % 4096),
				  request_ok, sizeof(request_ok));
		if (send(fd, raw.bytes, raw.len, MSG_NOSIGNAL) < (ssize_t)raw.len)
			break; /* a part: enough sent for one turn */
		loop_turn(t->loop, 0);
		assert_true(((struct shm_peer *)(void *)t->b.peer)->wire.out_len <=
			    SHM_OUT_HARD);
		if (serial > 2000000)
			fail_msg("never lost");
	}
	close(fd);
	WAIT_FOR(t, t->b.lost);
	test_end(t);
}

/* ---- memory ---- */

/* Each allocation of a transfer fails once: it costs the op, never the peer. */
static void transfer_out_of_memory_fails_alone(void **state)
{
	struct test *t = test_pair();
	bool failed = true;

	(void)state;
	for (uint64_t n = 1; failed; n++) {
		struct transfer x, y;
		int r;

		transfer_init(&x, t, XP_WRITE, 1000, 64, n & 1, false);
		mem_fail_at(n);
		r = post(&x);
		if (r == 0)
			for (int i = 0; i < 1000 && !x.top.calls && !t->a.lost && !t->b.lost;
			     i++)
				loop_turn(t->loop, LOOP_NS_PER_MS);
		failed = mem_count() >= n;
		mem_fail_at(0);
		if (r < 0)
			assert_int_equal(r, -ENOMEM);
		assert_int_equal(t->a.lost + t->b.lost, 0);
		if (r == 0) {
			WAIT_FOR(t, x.top.calls);
			if (x.top.op.result < 0)
				assert_int_equal(x.top.op.err.code, ERR_NOMEM);
			else
				transfer_check(&x);
		}
		transfer_init(&y, t, XP_WRITE, 10, 64, false, false);
		assert_int_equal(post(&y), 0);
		WAIT_FOR(t, y.top.calls);
		assert_done(&y, ERR_OK);
		transfer_fini(&x);
		transfer_fini(&y);
	}
	test_end(t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(bytes_of_each_kind_cross_exactly),
		cmocka_unit_test(self_peer_needs_no_socket),
		cmocka_unit_test(write_without_bytes_is_a_message),
		cmocka_unit_test(requests_keep_the_order_of_posts),
		cmocka_unit_test(unanswered_requests_are_bounded),
		cmocka_unit_test(unanswered_headers_are_bounded),
		cmocka_unit_test(canceled_headers_stay_counted),
		cmocka_unit_test(cancel_before_the_answer_is_still),
		cmocka_unit_test(cancel_in_flight_is_still),
		cmocka_unit_test(revoke_in_flight_is_still),
		cmocka_unit_test(copied_after_cancel_does_not_count),
		cmocka_unit_test(close_in_flight_ends_both_sides),
		cmocka_unit_test(refusal_reaches_the_initiator_in_words),
		cmocka_unit_test(plans_that_differ_are_refused),
		cmocka_unit_test(rows_outside_a_buffer_are_refused),
		cmocka_unit_test(op_kinds_are_checked),
		cmocka_unit_test(key_of_a_gone_registration_is_refused),
		cmocka_unit_test(key_dropped_early_is_freed),
		cmocka_unit_test(peer_memory_is_mapped_read_only),
		cmocka_unit_test(write_before_its_key_is_usable_is_staged),
		cmocka_unit_test(cut_source_fails_its_transfer_only),
		cmocka_unit_test(wrong_token_is_not_a_peer),
		cmocka_unit_test(unknown_token_waits_and_is_closed),
		cmocka_unit_test(dialer_first_waits_for_the_other),
		cmocka_unit_test(address_nobody_listens_on_loses_the_peer),
		cmocka_unit_test(address_of_another_machine_is_refused),
		cmocka_unit_test(hostile_frames_lose_that_peer_only),
		cmocka_unit_test(frames_in_pieces_are_put_together),
		cmocka_unit_test(peer_that_never_reads_is_lost),
		cmocka_unit_test(transfer_out_of_memory_fails_alone),
	};

	return cmocka_run_group_tests_name("shm", tests, NULL, NULL);
}
