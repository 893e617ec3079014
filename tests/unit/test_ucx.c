/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ucx: two transports in this process, one loop, real sockets on lo. Also what
 * a peer may do to us: frames are forged with the backend's own sender. A lost
 * process and another library run this program again as a child.
 */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/transport/ucx_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/config.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define WAIT_NS (20 * LOOP_NS_PER_S)
#define INBOUNDS 2048u

enum answer { ANSWER_LAND, ANSWER_REFUSE, ANSWER_HOLD };

struct node {
	struct transport *t;
	struct xp_peer *peer;
	bool ready, lost, closed;
	struct err lost_why;
	enum answer answer;
	struct xp_sides sides; /* for ANSWER_LAND */
	struct xp_inbound *held;
	unsigned int requests, dones, failures;
	uint64_t order[INBOUNDS]; /* first 8 bytes of the headers, as they came */
	struct err done_err;
};

struct op {
	struct xp_op op;
	unsigned int done;
};

static struct loop *loop;
static struct offload *offload;
static struct copier *copier;
static struct config config;
static struct node a, b;

/* ---- the world ---- */

static void on_request(void *owner, struct xp_inbound *in)
{
	struct node *n = owner;
	uint64_t word = 0;
	struct err err;

	memcpy(&word, in->header, in->header_len < 8 ? in->header_len : 8);
	n->order[n->requests++ % INBOUNDS] = word;
	if (n->answer == ANSWER_REFUSE) {
		err_set(&err, ERR_REVOKED, "not this time");
		n->t->ops->land(in, NULL, &err);
	} else if (n->answer == ANSWER_LAND) {
		n->t->ops->land(in, in->bytes ? &n->sides : NULL, NULL);
	} else {
		n->held = in;
	}
}

static void on_inbound_done(void *owner, struct xp_inbound *in, const struct err *err)
{
	struct node *n = owner;

	n->dones++;
	if (err) {
		n->failures++;
		n->done_err = *err;
	}
	if (n->held == in)
		n->held = NULL;
}

static void on_peer_ready(void *owner, struct xp_peer *peer)
{
	struct node *n = owner;

	(void)peer;
	n->ready = true;
}

static void on_peer_lost(void *owner, struct xp_peer *peer, const struct err *why)
{
	struct node *n = owner;

	(void)peer;
	n->lost = true;
	n->lost_why = *why;
}

static void on_key(void *owner, struct xp_key *key, const struct err *err)
{
	(void)owner;
	(void)key;
	(void)err;
}

static void on_closed(void *arg)
{
	struct node *n = arg;

	n->closed = true;
	n->peer = NULL;
}

/* one turn; true while `*flag` has not reached `want` */
static bool turn(void)
{
	bool busy = false;

	if (a.t)
		busy |= a.t->ops->arm(a.t);
	if (b.t)
		busy |= b.t->ops->arm(b.t);
	if (busy) {
		if (a.t)
			a.t->ops->progress(a.t, 16);
		if (b.t)
			b.t->ops->progress(b.t, 16);
	}
	return loop_turn(loop, busy ? 0 : 50 * LOOP_NS_PER_MS);
}

#define await(condition)                                                           \
	do {                                                                       \
		uint64_t end_ = loop_clock_ns(loop) + WAIT_NS;                     \
		while (!(condition)) {                                             \
			if (loop_clock_ns(loop) > end_)                            \
				fail_msg("never: %s", #condition);                 \
			turn();                                                    \
		}                                                                  \
	} while (0)

static void spin_ms(uint64_t ms)
{
	uint64_t end = loop_clock_ns(loop) + ms * LOOP_NS_PER_MS;

	while (loop_clock_ns(loop) < end)
		turn();
}

static void config_init(void)
{
	const char *library = getenv("KVD_TEST_UCX_LIBRARY");

	memset(&config, 0, sizeof(config));
	snprintf(config.listen, sizeof(config.listen), "tcp://127.0.0.1:7400");
	if (library)
		snprintf(config.ucx_library, sizeof(config.ucx_library), "%s", library);
	config.slice_bytes = 512 * KIB;
	config.max_inflight_bytes = 8 * MIB;
	config.fence_timeout_ns = 2 * LOOP_NS_PER_S;
}

static void node_open(struct node *n)
{
	struct xp_env env = {.loop = loop, .offload = offload, .copier = copier,
			     .config = &config};
	struct xp_callbacks up = {
		.owner = n,
		.on_request = on_request,
		.on_inbound_done = on_inbound_done,
		.on_peer_ready = on_peer_ready,
		.on_peer_lost = on_peer_lost,
		.on_key = on_key,
	};

	memset(n, 0, sizeof(*n));
	assert_int_equal(ucx_transport.open(&env, &up, &n->t), 0);
}

static void node_connect(struct node *n, const struct node *to, uint8_t in, uint8_t out)
{
	struct xp_peer_args args = {
		.address = to->t->address,
		.address_len = to->t->address_len,
		.owner = n,
	};

	memset(args.token_in, in, sizeof(args.token_in));
	memset(args.token_out, out, sizeof(args.token_out));
	assert_int_equal(n->t->ops->peer_open(n->t, &args, &n->peer), 0);
}

static int world_up(void **state)
{
	(void)state;
	config_init();
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(offload_new(loop, 1, &offload), 0);
	assert_int_equal(copier_new(loop, 2, config.slice_bytes, &copier), 0);
	node_open(&a);
	node_open(&b);
	return 0;
}

static void node_close(struct node *n)
{
	if (!n->t)
		return;
	if (n->peer) {
		n->t->ops->peer_close(n->peer, on_closed, n);
		await(n->closed);
	}
}

static int world_down(void **state)
{
	(void)state;
	node_close(&a);
	node_close(&b);
	for (struct node *n = &a; n; n = n == &a ? &b : NULL) {
		if (n->t)
			n->t->ops->close(n->t);
		n->t = NULL;
	}
	copier_free(copier);
	offload_free(offload);
	loop_free(loop);
	return 0;
}

static void connect_both(void)
{
	node_connect(&a, &b, 1, 2);
	node_connect(&b, &a, 2, 1);
	await(a.ready && b.ready);
}

static int pair_up(void **state)
{
	world_up(state);
	connect_both();
	return 0;
}

/* ---- memory and plans ---- */

struct place {
	struct memory *memory;
	struct xp_reg *reg;
	struct xp_buffer buffer;
};

static struct memory *shm_memory(uint64_t bytes)
{
	struct memory *memory;
	int fd = memfd_create("guarded", MFD_CLOEXEC);

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
	assert_int_equal(memory_import_shm_fd(fd, 0, bytes, true, &memory), 0);
	close(fd);
	return memory;
}

static void place_init(struct place *p, struct node *n, uint64_t bytes, bool guarded)
{
	if (guarded)
		p->memory = shm_memory(bytes);
	else
		assert_int_equal(memory_new_linear(bytes, &p->memory), 0);
	assert_int_equal(n->t->ops->mem_reg(n->t, p->memory, &p->reg), 0);
	p->buffer = (struct xp_buffer){.reg = p->reg, .length = bytes};
}

static void place_fini(struct place *p, struct node *n)
{
	n->t->ops->mem_dereg(p->reg);
	memory_unref(p->memory);
}

static void fill(struct place *p, uint64_t seed)
{
	uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;

	for (uint64_t i = 0; i < p->memory->length; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		p->memory->base[i] = (uint8_t)(x >> 32);
	}
}

static struct plan *plan_of(const struct plan_run *runs, size_t count)
{
	struct plan_builder *builder;
	struct plan *plan;

	assert_int_equal(plan_builder_new(&builder), 0);
	for (size_t i = 0; i < count; i++)
		assert_int_equal(plan_builder_add(builder, &runs[i]), 0);
	assert_int_equal(plan_builder_finish(builder, &plan), 0);
	plan_builder_free(builder);
	return plan;
}

/* What the destination must hold afterwards, byte for byte, gaps included. */
static void assert_moved(const struct plan *plan, const struct place *src,
			 const struct place *dst, uint8_t background)
{
	uint64_t bytes = dst->memory->length;
	uint8_t *want = mem_zalloc(bytes);
	struct plan_walk walk;
	struct plan_span span;

	memset(want, background, bytes);
	plan_walk_begin(&walk, plan);
	while (plan_walk_next(&walk, UINT64_MAX, &span))
		memcpy(want + span.dst, src->memory->base + span.src, span.len);
	assert_memory_equal(want, dst->memory->base, bytes);
	mem_free(want);
}

static void on_done(struct xp_op *op)
{
	container_of(op, struct op, op)->done++;
}

static void op_init(struct op *op, enum xp_kind kind, const struct plan *plan,
		    struct place *src, struct place *dst)
{
	static const uint64_t header = 77;

	*op = (struct op){.op = {
		.kind = kind,
		.sides = {.plan = plan,
			  .src = src ? &src->buffer : NULL, .src_count = src ? 1 : 0,
			  .dst = dst ? &dst->buffer : NULL, .dst_count = dst ? 1 : 0},
		.header = &header,
		.header_len = sizeof(header),
		.on_done = on_done,
	}};
}

static const struct plan_run shapes[] = {
	{.src = 7, .dst = 3, .len = 1, .count = 1},
	{.src = 0, .dst = 4096, .len = 8192, .count = 1},
	{.src = 100, .dst = 200, .len = 8193, .count = 1},
	/* long rows, both scattered */
	{.src = 0, .dst = 8192, .len = 32768, .count = 90, .src_stride = 65536,
	 .dst_stride = 40960},
	/* 256-byte heads */
	{.src = 64, .dst = 0, .len = 256, .count = 10000, .src_stride = 512,
	 .dst_stride = 300},
	/* gathered at the source, whole at the destination; and the reverse */
	{.src = 0, .dst = 0, .len = 512, .count = 9000, .src_stride = 640,
	 .dst_stride = 512},
	{.src = 0, .dst = 0, .len = 512, .count = 9000, .src_stride = 512,
	 .dst_stride = 640},
	/* one row over several slices */
	{.src = 1, .dst = 2, .len = 5 * MIB + 12345, .count = 1},
	/* 100 000 rows */
	{.src = 0, .dst = 0, .len = 24, .count = 100000, .src_stride = 48,
	 .dst_stride = 56},
};

static void move(enum xp_kind kind, const struct plan *plan, bool guarded_src,
		 bool guarded_dst)
{
	struct node *src_node = kind == XP_WRITE ? &a : &b;
	struct node *dst_node = kind == XP_WRITE ? &b : &a;
	struct place src, dst;
	struct op op;
	unsigned int dones = b.dones;

	place_init(&src, src_node, 8 * MIB, guarded_src);
	place_init(&dst, dst_node, 8 * MIB, guarded_dst);
	fill(&src, 5);
	memset(dst.memory->base, 0xa5, dst.memory->length);
	op_init(&op, kind, plan, &src, &dst);
	b.sides = op.op.sides;
	assert_int_equal(a.t->ops->post(a.peer, &op.op), 0);
	assert_int_equal(op.done, 0);
	await(op.done && b.dones == dones + 1);
	assert_int_equal(op.op.result, 0);
	assert_int_equal(b.failures, 0);
	assert_int_equal(op.op.moved, plan->bytes);
	assert_moved(plan, &src, &dst, 0xa5);
	assert_int_equal(op.done, 1);
	place_fini(&src, src_node);
	place_fini(&dst, dst_node);
}

static void every_shape(enum xp_kind kind, bool guarded_src, bool guarded_dst)
{
	struct plan *plan;

	for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
		plan = plan_of(&shapes[i], 1);
		move(kind, plan, guarded_src, guarded_dst);
		plan_free(plan);
	}
}

/* ---- connection ---- */

static void probe_loopback_is_usable(void **state)
{
	uint32_t caps = 0;

	(void)state;
	assert_int_equal(ucx_transport.probe(&config, &caps), 0);
	assert_false(caps & (XP_CAP_SELF | XP_CAP_RDMA));
}

static void assert_refused(int r, enum err_code code, const char *words)
{
	assert_int_equal(r, -err_errno(code));
	if (!strstr(err_last()->text, words))
		fail_msg("\"%s\" is not in \"%s\"", words, err_last()->text);
	err_clear();
}

static void probe_beyond_loopback_wants_insecure(void **state)
{
	struct config c = config;
	uint32_t caps;

	(void)state;
	snprintf(c.ucx_net_devices, sizeof(c.ucx_net_devices), "eth7");
	assert_refused(ucx_transport.probe(&c, &caps), ERR_REQUIRE, "insecure = yes");
	c.insecure = true; /* then there is no such device */
	assert_refused(ucx_transport.probe(&c, &caps), ERR_REQUIRE, "eth7");
	snprintf(c.ucx_net_devices, sizeof(c.ucx_net_devices), "%s", "");
	snprintf(c.listen, sizeof(c.listen), "tcp://192.0.2.77:7400");
	assert_refused(ucx_transport.probe(&c, &caps), ERR_REQUIRE, "ucx_net_devices");
}

static void probe_shared_memory_transports_are_refused(void **state)
{
	struct config c = config;
	uint32_t caps;

	(void)state;
	snprintf(c.ucx_tls, sizeof(c.ucx_tls), "tcp,cma");
	assert_refused(ucx_transport.probe(&c, &caps), ERR_REQUIRE, "cma");
	snprintf(c.ucx_tls, sizeof(c.ucx_tls), "^ud");
	assert_int_equal(ucx_transport.probe(&c, &caps), 0);
}

static void peers_of_one_pair_become_ready(void **state)
{
	(void)state;
	connect_both();
	assert_string_equal(((struct xp_peer_base *)a.peer)->path, "tcp lo");
	assert_string_equal(((struct xp_peer_base *)b.peer)->path, "tcp lo");
}

static void peer_with_a_wrong_token_is_never_ready(void **state)
{
	(void)state;
	node_connect(&a, &b, 1, 2);
	node_connect(&b, &a, 9, 1); /* expects 9, gets 2 */
	await(a.ready); /* b's token is right */
	spin_ms(300);
	assert_false(b.ready);
	assert_true(container_of(b.t, struct ucx_transport, base)->frames_dropped > 0);
}

static void address_forged_is_refused(void **state)
{
	uint8_t address[64] = {0};
	struct xp_peer_args args = {.address = address, .address_len = 3};
	struct xp_peer *peer;

	(void)state;
	assert_refused(a.t->ops->peer_open(a.t, &args, &peer), ERR_PROTO, "address");
	args.address_len = sizeof(address);
	assert_refused(a.t->ops->peer_open(a.t, &args, &peer), ERR_PROTO, "address");
	memcpy(address, b.t->address, 8); /* the length of another */
	assert_refused(a.t->ops->peer_open(a.t, &args, &peer), ERR_PROTO, "announced");
}

static void peer_closed_tells_the_other(void **state)
{
	(void)state;
	node_close(&a);
	await(b.lost);
	assert_int_equal(b.lost_why.code, ERR_PEER);
	assert_false(a.lost);
	/* and a new connection works */
	node_close(&b);
	memset(&a.ready, 0, 1);
	a.closed = b.closed = b.ready = b.lost = false;
	node_connect(&a, &b, 3, 4);
	node_connect(&b, &a, 4, 3);
	await(a.ready && b.ready);
}

/* ---- bytes ---- */

static void write_of_every_shape_lands(void **state)
{
	(void)state;
	every_shape(XP_WRITE, false, false);
}

static void read_of_every_shape_lands(void **state)
{
	(void)state;
	every_shape(XP_READ, false, false);
}

static void memory_guarded_goes_through_copy_threads(void **state)
{
	(void)state;
	every_shape(XP_WRITE, true, true);
	every_shape(XP_READ, true, false);
	every_shape(XP_READ, false, true);
}

static void write_without_bytes_keeps_order(void **state)
{
	static uint64_t headers[INBOUNDS];
	static struct op ops[INBOUNDS];

	(void)state;
	for (uint64_t i = 0; i < INBOUNDS; i++) {
		headers[i] = i;
		op_init(&ops[i], XP_WRITE, NULL, NULL, NULL);
		ops[i].op.header = &headers[i];
		assert_int_equal(a.t->ops->post(a.peer, &ops[i].op), 0);
	}
	await(ops[INBOUNDS - 1].done);
	assert_int_equal(b.requests, INBOUNDS);
	for (uint64_t i = 0; i < INBOUNDS; i++) {
		assert_int_equal(b.order[i], i);
		assert_int_equal(ops[i].done, 1);
		assert_int_equal(ops[i].op.result, 0);
	}
}

static void headers_of_all_sizes_keep_order(void **state)
{
	static const size_t sizes[] = {0, 8, 8191, 8192, 8193, 70000, XP_HEADER_MAX, 9};
	enum { OPS = 64 };
	static struct op ops[OPS];
	uint8_t *headers[OPS];

	(void)state;
	for (uint64_t i = 0; i < OPS; i++) {
		size_t len = sizes[i % ARRAY_LEN(sizes)];

		headers[i] = mem_zalloc(len < 8 ? 8 : len);
		memcpy(headers[i], &i, 8);
		op_init(&ops[i], XP_WRITE, NULL, NULL, NULL);
		ops[i].op.header = headers[i];
		ops[i].op.header_len = len;
		assert_int_equal(a.t->ops->post(a.peer, &ops[i].op), 0);
	}
	await(ops[OPS - 1].done);
	for (uint64_t i = 0; i < OPS; i++) {
		assert_int_equal(b.order[i], sizes[i % ARRAY_LEN(sizes)] < 8 ? 0 : i);
		assert_int_equal(ops[i].done, 1);
		mem_free(headers[i]);
	}
	op_init(&ops[0], XP_WRITE, NULL, NULL, NULL);
	ops[0].op.header_len = XP_HEADER_MAX + 1;
	assert_refused(a.t->ops->post(a.peer, &ops[0].op), ERR_TOOBIG, "header");
}

static void ops_large_do_not_starve_small(void **state)
{
	static const struct plan_run big = {.len = 64 * MIB, .count = 1};
	static const struct plan_run small = {.src = 0, .dst = 0, .len = 100000, .count = 1};
	struct plan *big_plan = plan_of(&big, 1), *small_plan = plan_of(&small, 1);
	struct op big_op, small_op;
	struct place src, dst;

	(void)state;
	place_init(&src, &a, 64 * MIB, false);
	place_init(&dst, &b, 64 * MIB, false);
	op_init(&big_op, XP_WRITE, big_plan, &src, &dst);
	op_init(&small_op, XP_WRITE, small_plan, &src, &dst);
	b.sides = big_op.op.sides;
	assert_int_equal(a.t->ops->post(a.peer, &big_op.op), 0);
	await(big_op.op.moved > 0);
	b.sides = small_op.op.sides;
	assert_int_equal(a.t->ops->post(a.peer, &small_op.op), 0);
	await(small_op.done);
	assert_int_equal(small_op.op.result, 0);
	assert_int_equal(big_op.done, 0);
	await(big_op.done);
	assert_int_equal(big_op.op.result, 0);
	place_fini(&src, &a);
	place_fini(&dst, &b);
	plan_free(big_plan);
	plan_free(small_plan);
}

/* ---- refusal, stop ---- */

/* A 64 MiB transfer, both sides in one piece or in 4 KiB rows. */
struct big {
	struct plan *plan;
	struct place src, dst;
	struct op op;
	struct node *src_node, *dst_node;
};

static void big_start(struct big *big, enum xp_kind kind, bool rows)
{
	struct plan_run run = {.len = 64 * MIB, .count = 1};

	if (rows)
		run = (struct plan_run){.len = 4096, .count = 8192, .src_stride = 8192,
					.dst_stride = 8000};
	big->src_node = kind == XP_WRITE ? &a : &b;
	big->dst_node = kind == XP_WRITE ? &b : &a;
	big->plan = plan_of(&run, 1);
	place_init(&big->src, big->src_node, 64 * MIB, false);
	place_init(&big->dst, big->dst_node, 64 * MIB, false);
	memset(big->src.memory->base, 0x11, big->src.memory->length);
	op_init(&big->op, kind, big->plan, &big->src, &big->dst);
	b.sides = big->op.op.sides;
	assert_int_equal(a.t->ops->post(a.peer, &big->op.op), 0);
}

/* Done: whatever the other side and libucp still do must not show here. */
static void assert_still(struct big *big)
{
	uint8_t *dst = big->dst.memory->base;
	uint64_t bytes = big->dst.memory->length;

	memset(big->src.memory->base, 0x22, big->src.memory->length);
	memset(dst, 0x33, bytes);
	spin_ms(500);
	for (uint64_t i = 0; i < bytes; i++)
		if (dst[i] != 0x33)
			fail_msg("byte %ju was written after the end", (uintmax_t)i);
}

static void big_end(struct big *big)
{
	place_fini(&big->src, big->src_node);
	place_fini(&big->dst, big->dst_node);
	plan_free(big->plan);
}

static void request_refused_gives_the_words(void **state)
{
	struct big big;

	(void)state;
	b.answer = ANSWER_REFUSE;
	big_start(&big, XP_WRITE, false);
	await(big.op.done && b.dones);
	assert_int_equal(big.op.op.err.code, ERR_REVOKED);
	assert_string_equal(big.op.op.err.text, "not this time");
	assert_int_equal(b.failures, 1);
	big_end(&big);
	big_start(&big, XP_READ, false);
	await(big.op.done && b.dones == 2);
	assert_int_equal(big.op.op.result, -err_errno(ERR_REVOKED));
	big_end(&big);
}

static void plans_that_differ_fail_both_sides(void **state)
{
	static const struct plan_run other = {.len = 4096, .count = 1};
	struct plan *plan = plan_of(&other, 1);
	struct big big;

	(void)state;
	b.answer = ANSWER_HOLD;
	big_start(&big, XP_WRITE, false);
	await(b.held);
	b.sides.plan = plan;
	b.t->ops->land(b.held, &b.sides, NULL);
	await(big.op.done && b.dones);
	assert_int_equal(big.op.op.err.code, ERR_PLAN);
	assert_int_equal(b.done_err.code, ERR_PLAN);
	big_end(&big);
	plan_free(plan);
}

static void cancel(struct op *op)
{
	struct err why;

	err_set(&why, ERR_ABORTED, "an engine said so");
	a.t->ops->cancel(&op->op, &why);
	a.t->ops->cancel(&op->op, &why);
	assert_int_equal(op->done, 0);
}

static void cancel_in_flight(enum xp_kind kind, bool rows)
{
	struct big big;
	unsigned int dones = b.dones;

	big_start(&big, kind, rows);
	await(big.op.op.moved > 0);
	assert_true(big.op.op.moved < big.plan->bytes);
	cancel(&big.op);
	await(big.op.done);
	if (kind == XP_WRITE)
		assert_int_equal(b.dones, dones + 1);
	assert_int_equal(big.op.op.err.code, ERR_ABORTED);
	assert_still(&big);
	assert_int_equal(big.op.done, 1);
	await(b.dones == dones + 1);
	assert_int_equal(b.done_err.code, ERR_ABORTED);
	big_end(&big);
}

static void cancel_in_flight_leaves_memory_still(void **state)
{
	(void)state;
	cancel_in_flight(XP_WRITE, false);
	cancel_in_flight(XP_WRITE, true);
	cancel_in_flight(XP_READ, false);
	cancel_in_flight(XP_READ, true);
	assert_false(a.lost || b.lost);
	b.failures = 0;
	every_shape(XP_WRITE, false, false);
}

static void cancel_before_the_answer_ends_both(void **state)
{
	struct big big;

	(void)state;
	b.answer = ANSWER_HOLD;
	big_start(&big, XP_WRITE, false);
	await(b.held);
	cancel(&big.op);
	await(big.op.done && b.dones);
	assert_int_equal(b.failures, 1);
	assert_null(b.held);
	big_end(&big);
}

static void cancel_before_the_request_left_is_local(void **state)
{
	struct big big;

	(void)state;
	big_start(&big, XP_WRITE, false);
	cancel(&big.op);
	await(big.op.done);
	assert_int_equal(big.op.op.err.code, ERR_ABORTED);
	spin_ms(100);
	assert_int_equal(b.requests, 0);
	big_end(&big);
}

static void revoke_in_flight(enum xp_kind kind, bool rows)
{
	struct big big;
	unsigned int dones = b.dones;
	struct xp_inbound *in;
	struct err why;

	b.answer = ANSWER_HOLD;
	big_start(&big, kind, rows);
	await(b.held);
	in = b.held;
	b.t->ops->land(in, &b.sides, NULL);
	await(in->moved > 0 || b.dones > dones);
	err_set(&why, ERR_SESSION, "engine gone");
	assert_int_equal(b.dones, dones);
	b.t->ops->revoke(in, &why);
	b.t->ops->revoke(in, &why);
	await(b.dones == dones + 1);
	assert_int_equal(b.done_err.code, ERR_SESSION);
	if (kind == XP_READ)
		await(big.op.done);
	assert_still(&big);
	await(big.op.done);
	assert_int_equal(big.op.op.err.code, ERR_SESSION);
	assert_string_equal(big.op.op.err.text, "engine gone");
	big_end(&big);
}

static void revoke_in_flight_leaves_memory_still(void **state)
{
	(void)state;
	revoke_in_flight(XP_WRITE, false);
	revoke_in_flight(XP_WRITE, true);
	revoke_in_flight(XP_READ, false);
	revoke_in_flight(XP_READ, true);
	assert_false(a.lost || b.lost);
}

static void close_in_flight(enum xp_kind kind, bool rows, struct node *closer)
{
	struct big big;

	b.dones = 0;
	big_start(&big, kind, rows);
	await(big.op.op.moved > 0);
	node_close(closer);
	assert_int_equal(closer == &a ? big.op.done : b.dones, 1);
	await(big.op.done && b.dones == 1);
	assert_true(big.op.op.result < 0);
	assert_still(&big);
	await(closer == &a ? b.lost : a.lost);
	big_end(&big);
	node_close(&a);
	node_close(&b);
	a.ready = b.ready = a.lost = b.lost = a.closed = b.closed = false;
	connect_both();
}

static void close_in_flight_ends_everything(void **state)
{
	(void)state;
	close_in_flight(XP_WRITE, false, &a);
	close_in_flight(XP_WRITE, true, &b);
	close_in_flight(XP_READ, true, &a);
	close_in_flight(XP_READ, false, &b);
}

static void memory_faulted_fails_the_transfer_only(void **state)
{
	static const struct plan_run run = {.len = 4096, .count = 100, .src_stride = 8192,
					    .dst_stride = 4096};
	struct plan *plan = plan_of(&run, 1);
	struct place src, dst;
	struct op op;

	(void)state;
	assert_int_equal(memory_guard_install(), 0); /* cmocka took SIGBUS */
	place_init(&src, &a, MIB, true);
	place_init(&dst, &b, MIB, false);
	assert_int_equal(ftruncate(src.memory->fd, 0), 0);
	op_init(&op, XP_WRITE, plan, &src, &dst);
	b.sides = op.op.sides;
	assert_int_equal(a.t->ops->post(a.peer, &op.op), 0);
	await(op.done && b.dones);
	assert_int_equal(op.op.err.code, ERR_FAULT);
	assert_int_equal(b.done_err.code, ERR_FAULT);
	assert_false(a.lost || b.lost);
	place_fini(&src, &a);
	place_fini(&dst, &b);
	plan_free(plan);
}

static void allocation_failing_costs_the_transfer(void **state)
{
	struct plan *plan = plan_of(&shapes[4], 1);
	struct place src, dst;
	struct op op;
	int r;

	(void)state;
	place_init(&src, &a, 8 * MIB, false);
	place_init(&dst, &b, 8 * MIB, false);
	for (uint64_t n = 1; n < 60; n++) {
		op_init(&op, n % 2 ? XP_WRITE : XP_READ, plan, &src, &dst);
		if (n % 2 == 0) { /* a READ: the source is b */
			op.op.sides.dst = &src.buffer;
			op.op.sides.src = &dst.buffer;
		}
		b.sides = op.op.sides;
		mem_fail_at(n);
		r = a.t->ops->post(a.peer, &op.op);
		if (r == 0)
			await(op.done);
		mem_fail_at(0);
		if (r == 0 && op.op.result < 0)
			assert_int_equal(op.op.err.code, ERR_NOMEM);
		if (r == 0)
			await(b.dones == b.requests);
		assert_false(a.lost || b.lost);
	}
	place_fini(&src, &a);
	place_fini(&dst, &b);
	plan_free(plan);
}

/* ---- a hostile peer: a forges, b must lose a and nothing else ---- */

static void forge(struct ucx_frame frame, const void *payload, size_t len)
{
	struct ucx_peer *peer = (struct ucx_peer *)a.peer;

	ucx_send_frame(ucx_send_new(peer), &frame, NULL, NULL, payload, len);
}

static void assert_thrown_out(const char *words)
{
	await(b.lost);
	assert_int_equal(b.lost_why.code, ERR_PROTO);
	if (!strstr(b.lost_why.text, words))
		fail_msg("\"%s\" is not in \"%s\"", words, b.lost_why.text);
	await(a.lost);
	node_close(&a);
	node_close(&b);
	a.ready = b.ready = a.lost = b.lost = a.closed = b.closed = false;
	connect_both();
}

static void frames_out_of_rule_lose_the_peer(void **state)
{
	static uint8_t bytes[20000];

	(void)state;
	forge((struct ucx_frame){.type = UCX_GO, .id = 5}, NULL, 0);
	assert_thrown_out("not there");
	forge((struct ucx_frame){.type = UCX_DONE, .id = 1}, NULL, 0);
	assert_thrown_out("not there");
	forge((struct ucx_frame){.type = UCX_CANCEL, .id = 1}, NULL, 0);
	assert_thrown_out("never asked");
	forge((struct ucx_frame){.type = UCX_GO, .id = 1}, bytes, 100);
	assert_thrown_out("100 bytes");
	forge((struct ucx_frame){.type = UCX_DATA, .id = 1, .length = 9}, bytes, 9);
	assert_thrown_out("never asked");
	forge((struct ucx_frame){.type = UCX_SERVE, .id = 1, .length = 9}, bytes, 9);
	assert_thrown_out("never asked");
	forge((struct ucx_frame){.type = UCX_REQUEST, .id = 1, .code = 9}, NULL, 0);
	assert_thrown_out("kind 9");
	forge((struct ucx_frame){.type = UCX_REQUEST, .id = 0}, NULL, 0);
	assert_thrown_out("request 0");
	forge((struct ucx_frame){.type = UCX_HELLO, .offset = 1}, NULL, 0);
	assert_thrown_out("hello");
	for (int i = 0; i < 9; i++)
		forge((struct ucx_frame){.type = UCX_HELLO, .offset = MIB,
					 .flags = UCX_FLAG_ANSWER}, NULL, 0);
	await(b.lost || !b.lost);
	((struct ucx_peer *)a.peer)->out_seq += 3 * UCX_ORDER_MAX;
	forge((struct ucx_frame){.type = UCX_GO, .id = 1}, NULL, 0);
	assert_thrown_out("");
	((struct ucx_peer *)a.peer)->out_seq += 5;
	forge((struct ucx_frame){.type = UCX_GO, .id = 1}, NULL, 0);
	((struct ucx_peer *)a.peer)->out_seq--;
	forge((struct ucx_frame){.type = UCX_GO, .id = 1}, NULL, 0);
	assert_thrown_out("twice");
}

/* b expects `expect` bytes of transfer 1 from a; a sends one slice. */
static void forge_slice(uint64_t expect, uint64_t offset, uint64_t announced, size_t len,
			unsigned int times)
{
	static uint8_t bytes[200000];
	struct plan_run run = {.len = expect, .count = 1};
	struct plan *plan = plan_of(&run, 1);
	struct place dst;
	unsigned int dones = b.dones;

	place_init(&dst, &b, 4 * MIB, false);
	memset(dst.memory->base, 0, 4 * MIB);
	b.answer = ANSWER_LAND;
	b.sides = (struct xp_sides){.plan = plan, .dst = &dst.buffer, .dst_count = 1};
	forge((struct ucx_frame){.type = UCX_REQUEST, .id = 1, .length = expect}, NULL, 0);
	/* its GO finds no transfer of a's, which would throw b out: not now */
	((struct ucx_peer *)a.peer)->in_seq = 1000;
	await(b.requests);
	for (unsigned int i = 0; i < times; i++)
		forge((struct ucx_frame){.type = UCX_DATA, .id = 1, .offset = offset,
					 .length = announced}, bytes, len);
	await(b.lost || b.dones > dones);
	place_fini(&dst, &b);
	plan_free(plan);
	b.requests = 0;
}

static void slices_out_of_rule_lose_the_peer(void **state)
{
	(void)state;
	forge_slice(100000, 90000, 10001, 10001, 1);
	assert_thrown_out("past 100000");
	forge_slice(100000, UINT64_MAX - 5, 10000, 10000, 1);
	assert_thrown_out("past 100000");
	forge_slice(100000, 0, 10000, 10001, 1);
	assert_thrown_out("announced");
	forge_slice(100000, 0, 10000, 10000, 2);
	assert_thrown_out("twice");
	forge_slice(100000, 0, 100, 100, 1);
	assert_thrown_out("unasked");
	forge_slice(100000, 0, 0, 0, 1);
	assert_thrown_out("slice of 0 bytes");
}

/* ---- children ---- */

static int run_self(const char *how, const char *library)
{
	pid_t pid = fork();
	int status;

	assert_true(pid >= 0);
	if (pid == 0) {
		if (library)
			setenv("KVD_TEST_UCX_LIBRARY", library, 1);
		setenv("KVD_TEST_UCX_CHILD", how, 1);
		execl("/proc/self/exe", "test_ucx", NULL);
		_exit(127);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

/* The remote half of process_killed…: address in by fd 3, out by fd 4, then it
 * takes part until it dies. */
static void __attribute__((noreturn)) child_peer(void)
{
	static struct op op;
	static const struct plan_run run = {.len = 64 * MIB, .count = 1};
	struct plan *plan;
	struct place src;
	uint8_t address[XP_ADDRESS_MAX];
	struct xp_peer_args args = {.address = address, .owner = &a};
	ssize_t n;

	world_up(NULL);
	b.t->ops->close(b.t);
	b.t = NULL;
	memset(args.token_in, 2, sizeof(args.token_in));
	memset(args.token_out, 1, sizeof(args.token_out));
	assert_true(write(4, a.t->address, a.t->address_len) > 0);
	n = read(3, address, sizeof(address));
	assert_true(n > 0);
	args.address_len = (size_t)n;
	assert_int_equal(a.t->ops->peer_open(a.t, &args, &a.peer), 0);
	await(a.ready);
	plan = plan_of(&run, 1);
	place_init(&src, &a, 64 * MIB, false);
	memset(src.memory->base, 0x77, 64 * MIB);
	op_init(&op, XP_WRITE, plan, &src, &src);
	assert_int_equal(a.t->ops->post(a.peer, &op.op), 0);
	for (;;)
		turn();
}

static pid_t start_child_peer(int *to, int *from)
{
	int in[2], out[2];
	pid_t pid;

	assert_int_equal(pipe(in), 0);
	assert_int_equal(pipe(out), 0);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		int r = fcntl(in[0], F_DUPFD, 10), w = fcntl(out[1], F_DUPFD, 10);

		dup2(r, 3);
		dup2(w, 4);
		setenv("KVD_TEST_UCX_CHILD", "peer", 1);
		execl("/proc/self/exe", "test_ucx", NULL);
		_exit(127);
	}
	close(in[0]);
	close(out[1]);
	*to = in[1];
	*from = out[0];
	return pid;
}

static void process_killed_in_flight_loses_the_peer(void **state)
{
	static const struct plan_run run = {.len = 64 * MIB, .count = 1};
	struct plan *plan = plan_of(&run, 1);
	uint8_t address[XP_ADDRESS_MAX];
	struct xp_peer_args args = {.address = address, .owner = &b};
	struct big big = {.plan = plan};
	struct xp_inbound *in;
	uint64_t killed_ns;
	int to, from;
	pid_t pid = start_child_peer(&to, &from);
	ssize_t n = read(from, address, sizeof(address));

	(void)state;
	assert_true(n > 0);
	args.address_len = (size_t)n;
	memset(args.token_in, 1, sizeof(args.token_in));
	memset(args.token_out, 2, sizeof(args.token_out));
	place_init(&big.src, &b, 4096, false);
	place_init(&big.dst, &b, 64 * MIB, false);
	b.answer = ANSWER_HOLD;
	b.sides = (struct xp_sides){.plan = plan, .dst = &big.dst.buffer, .dst_count = 1};
	assert_int_equal(b.t->ops->peer_open(b.t, &args, &b.peer), 0);
	assert_true(write(to, b.t->address, b.t->address_len) > 0);
	await(b.held);
	in = b.held;
	b.t->ops->land(in, &b.sides, NULL);
	await(in->moved > 0 || b.dones);
	assert_int_equal(b.dones, 0);
	kill(pid, SIGKILL);
	killed_ns = loop_clock_ns(loop);
	await(b.lost);
	assert_true(loop_clock_ns(loop) - killed_ns < LOOP_NS_PER_S);
	assert_int_equal(b.dones, 1);
	assert_int_equal(b.failures, 1);
	assert_int_equal(b.lost_why.code, ERR_PEER);
	assert_still(&big);
	waitpid(pid, NULL, 0);
	place_fini(&big.src, &b);
	place_fini(&big.dst, &b);
	plan_free(plan);
	close(to);
	close(from);
}

/* PyPI's libucx, or whatever KVD_TEST_UCX_OTHER names. */
static void library_of_the_operator_passes_the_same(void **state)
{
	const char *other = getenv("KVD_TEST_UCX_OTHER");
	glob_t found = {0};

	(void)state;
	if (!other && glob("/usr/local/lib/python3*/dist-packages/libucx/lib/libucp.so.0",
			   0, NULL, &found) == 0)
		other = found.gl_pathv[0];
	if (!other) {
		print_message("SKIP: needs KVD_TEST_UCX_OTHER=.../libucp.so.0 or an "
			      "installed libucx wheel\n");
		skip();
	}
	assert_int_equal(run_self("all", other), 0);
	globfree(&found);
}

int main(void)
{
	const char *child = getenv("KVD_TEST_UCX_CHILD");
#define PAIR(test) cmocka_unit_test_setup_teardown(test, pair_up, world_down)
#define WORLD(test) cmocka_unit_test_setup_teardown(test, world_up, world_down)
	const struct CMUnitTest tests[] = {
		WORLD(probe_loopback_is_usable),
		WORLD(probe_beyond_loopback_wants_insecure),
		WORLD(probe_shared_memory_transports_are_refused),
		WORLD(peers_of_one_pair_become_ready),
		WORLD(peer_with_a_wrong_token_is_never_ready),
		WORLD(address_forged_is_refused),
		PAIR(peer_closed_tells_the_other),
		PAIR(write_of_every_shape_lands),
		PAIR(read_of_every_shape_lands),
		PAIR(memory_guarded_goes_through_copy_threads),
		PAIR(write_without_bytes_keeps_order),
		PAIR(headers_of_all_sizes_keep_order),
		PAIR(ops_large_do_not_starve_small),
		PAIR(request_refused_gives_the_words),
		PAIR(plans_that_differ_fail_both_sides),
		PAIR(cancel_in_flight_leaves_memory_still),
		PAIR(cancel_before_the_answer_ends_both),
		PAIR(cancel_before_the_request_left_is_local),
		PAIR(revoke_in_flight_leaves_memory_still),
		PAIR(close_in_flight_ends_everything),
		PAIR(memory_faulted_fails_the_transfer_only),
		PAIR(allocation_failing_costs_the_transfer),
		PAIR(frames_out_of_rule_lose_the_peer),
		PAIR(slices_out_of_rule_lose_the_peer),
		WORLD(process_killed_in_flight_loses_the_peer),
	};
	const struct CMUnitTest outer[] = {
		cmocka_unit_test(library_of_the_operator_passes_the_same),
	};

	signal(SIGPIPE, SIG_IGN);
	if (getenv("KVD_TEST_FILTER"))
		cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	if (child && !strcmp(child, "peer"))
		child_peer();
	if (cmocka_run_group_tests_name("ucx", tests, NULL, NULL))
		return 1;
	return child ? 0 : cmocka_run_group_tests_name("ucx library", outer, NULL, NULL);
}
