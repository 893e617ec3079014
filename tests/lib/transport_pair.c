/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two transports in one process. The loop's turn does what the daemon does: arm before
 * sleeping, progress when something came in between. Callbacks note what happened; tests
 * wait for that.
 */
#include "tests/lib/file.h"
#include "tests/lib/transport_pair.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/memory/copy.h"

const struct transport_ops *up_transport;
struct up_node up_a, up_b;
struct loop *up_loop;
struct config up_config;
static struct offload *offload;
static struct copier *copier;

/* ---- the world ---- */

static void on_request(void *owner, struct xp_inbound *in)
{
	struct up_node *n = owner;
	uint64_t word = 0;
	struct err err;

	memcpy(&word, in->header, in->header_len < 8 ? in->header_len : 8);
	n->order[n->requests++ % UP_INBOUNDS] = word;
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
	struct up_node *n = owner;

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
	struct up_node *n = owner;

	(void)peer;
	n->ready = true;
}

static void on_peer_lost(void *owner, struct xp_peer *peer, const struct err *why)
{
	struct up_node *n = owner;

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
	struct up_node *n = arg;

	n->closed = true;
	n->peer = NULL;
}

/* An arm that answers busy means: progress again before sleeping. */
static bool busy(const struct up_node *n)
{
	return n->t && ((n->t->ops->progress && n->t->ops->progress(n->t, 16) > 0) ||
			(n->t->ops->arm && n->t->ops->arm(n->t)));
}

bool up_turn(void)
{
	bool a = busy(&up_a), b = busy(&up_b);

	return loop_turn(up_loop, a || b ? 0 : 50 * LOOP_NS_PER_MS);
}

void up_spin_ms(uint64_t ms)
{
	uint64_t end = loop_clock_ns(up_loop) + ms * LOOP_NS_PER_MS;

	while (loop_clock_ns(up_loop) < end)
		up_turn();
}

static void up_config_init(void)
{
	const char *library = getenv("KVD_TEST_UCX_LIBRARY");

	memset(&up_config, 0, sizeof(up_config));
	snprintf(up_config.listen, sizeof(up_config.listen), "tcp://127.0.0.1:7400");
	if (library)
		snprintf(up_config.ucx_library, sizeof(up_config.ucx_library), "%s",
			 library);
	up_config.slice_bytes = 512 * KIB;
	up_config.max_inflight_bytes = 8 * MIB;
	up_config.fence_timeout_ns = 2 * LOOP_NS_PER_S;
	up_config.connect_timeout_ns = 15 * LOOP_NS_PER_S;
	up_config.tcp_streams = 2;
	up_config.tcp_threads = 2;
}

void up_open(struct up_node *n)
{
	struct xp_env env = {.loop = up_loop,
			     .offload = offload,
			     .copier = copier,
			     .config = &up_config};
	struct xp_callbacks up = {
		.owner = n,
		.on_request = on_request,
		.on_inbound_done = on_inbound_done,
		.on_peer_ready = on_peer_ready,
		.on_peer_lost = on_peer_lost,
		.on_key = on_key,
	};

	memset(n, 0, sizeof(*n));
	assert_int_equal(up_transport->open(&env, &up, &n->t), 0);
}

void up_connect(struct up_node *n, const struct up_node *to, uint8_t in, uint8_t out)
{
	struct xp_peer_args args = {
		.address = to->t->address,
		.address_len = to->t->address_len,
		.owner = n,
		.dial = n == &up_a,
	};

	memset(args.token_in, in, sizeof(args.token_in));
	memset(args.token_out, out, sizeof(args.token_out));
	assert_int_equal(n->t->ops->peer_open(n->t, &args, &n->peer), 0);
}

int up_begin(void **state)
{
	(void)state;
	up_config_init();
	assert_int_equal(loop_new(&up_loop), 0);
	assert_int_equal(offload_new(up_loop, 1, &offload), 0);
	assert_int_equal(copier_new(up_loop, 2, up_config.slice_bytes, &copier), 0);
	up_open(&up_a);
	up_open(&up_b);
	return 0;
}

void up_close(struct up_node *n)
{
	if (!n->t)
		return;
	if (n->peer) {
		n->t->ops->peer_close(n->peer, on_closed, n);
		await(n->closed);
	}
}

int up_end(void **state)
{
	(void)state;
	up_close(&up_a);
	up_close(&up_b);
	for (struct up_node *n = &up_a; n; n = n == &up_a ? &up_b : NULL) {
		if (n->t)
			n->t->ops->close(n->t);
		n->t = NULL;
	}
	copier_free(copier);
	offload_free(offload);
	loop_free(up_loop);
	return 0;
}

void up_join(void)
{
	up_connect(&up_a, &up_b, 1, 2);
	up_connect(&up_b, &up_a, 2, 1);
	await(up_a.ready && up_b.ready);
}

void up_rejoin(void)
{
	up_close(&up_a);
	up_close(&up_b);
	up_a.ready = up_b.ready = up_a.lost = up_b.lost = false;
	up_a.closed = up_b.closed = false;
	up_join();
}

int up_begin_pair(void **state)
{
	up_begin(state);
	up_join();
	return 0;
}

/* ---- memory and plans ---- */

static struct memory *shm_memory(uint64_t bytes)
{
	struct memory *memory;
	int fd = memfd_create("guarded", MFD_CLOEXEC);

	assert_true(fd >= 0);
	assert_int_equal(file_fill(fd, bytes), 0);
	assert_int_equal(memory_import_shm_fd(fd, 0, bytes, true, &memory), 0);
	close(fd);
	return memory;
}

void up_place_init(struct up_place *p, struct up_node *n, uint64_t bytes, bool guarded)
{
	if (guarded)
		p->memory = shm_memory(bytes);
	else
		assert_int_equal(memory_new_linear(bytes, &p->memory), 0);
	assert_int_equal(n->t->ops->mem_reg(n->t, p->memory, &p->reg), 0);
	p->buffer = (struct xp_buffer){.reg = p->reg, .length = bytes};
}

void up_place_fini(struct up_place *p, struct up_node *n)
{
	n->t->ops->mem_dereg(p->reg);
	memory_unref(p->memory);
}

void up_fill(struct up_place *p, uint64_t seed)
{
	uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;

	/* words: bytes would take the sanitizers minutes */
	for (uint64_t i = 0; i + 8 <= p->memory->length; i += 8) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		memcpy(p->memory->base + i, &x, 8);
	}
}

struct plan *up_plan(const struct plan_run *runs, size_t count)
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
static void up_assert_moved(const struct plan *plan, const struct up_place *src,
			    const struct up_place *dst, uint8_t background)
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
	container_of(op, struct up_op, op)->done++;
}

void up_op_init(struct up_op *op, enum xp_kind kind, const struct plan *plan,
		struct up_place *src, struct up_place *dst)
{
	static const uint64_t header = 77;

	*op = (struct up_op){.op = {
				     .kind = kind,
				     .sides = {.plan = plan,
					       .src = src ? &src->buffer : NULL,
					       .src_count = src ? 1 : 0,
					       .dst = dst ? &dst->buffer : NULL,
					       .dst_count = dst ? 1 : 0},
				     .header = &header,
				     .header_len = sizeof(header),
				     .on_done = on_done,
			     }};
}

#define SHORT_ROWS                                                          \
	.src = 64, .dst = 0, .len = 256, .count = 10000, .src_stride = 512, \
	.dst_stride = 300
const struct plan_run up_short_rows = {SHORT_ROWS};

static const struct plan_run shapes[] = {
	{.src = 7, .dst = 3, .len = 1, .count = 1},
	{.src = 0, .dst = 4096, .len = 8192, .count = 1},
	{.src = 100, .dst = 200, .len = 8193, .count = 1},
	/* long rows, both scattered */
	{.src = 0,
	 .dst = 8192,
	 .len = 32768,
	 .count = 90,
	 .src_stride = 65536,
	 .dst_stride = 40960},
	/* 256-byte heads */
	{SHORT_ROWS},
	/* gathered at the source, whole at the destination; and the reverse */
	{.src = 0,
	 .dst = 0,
	 .len = 512,
	 .count = 9000,
	 .src_stride = 640,
	 .dst_stride = 512},
	{.src = 0,
	 .dst = 0,
	 .len = 512,
	 .count = 9000,
	 .src_stride = 512,
	 .dst_stride = 640},
	/* one row over several slices */
	{.src = 1, .dst = 2, .len = 5 * MIB + 12345, .count = 1},
	/* 100 000 rows */
	{.src = 0,
	 .dst = 0,
	 .len = 24,
	 .count = 100000,
	 .src_stride = 48,
	 .dst_stride = 56},
};

static void move_shape(enum xp_kind kind, const struct plan *plan, bool guarded_src,
		       bool guarded_dst)
{
	struct up_node *src_node = kind == XP_WRITE ? &up_a : &up_b;
	struct up_node *dst_node = kind == XP_WRITE ? &up_b : &up_a;
	struct up_place src, dst;
	struct up_op op;
	unsigned int dones = up_b.dones;

	up_place_init(&src, src_node, 8 * MIB, guarded_src);
	up_place_init(&dst, dst_node, 8 * MIB, guarded_dst);
	up_fill(&src, 5);
	memset(dst.memory->base, 0xa5, dst.memory->length);
	up_op_init(&op, kind, plan, &src, &dst);
	up_b.sides = op.op.sides;
	assert_int_equal(up_a.t->ops->post(up_a.peer, &op.op), 0);
	assert_int_equal(op.done, 0);
	await(op.done && up_b.dones == dones + 1);
	assert_int_equal(op.op.result, 0);
	assert_int_equal(up_b.failures, 0);
	assert_int_equal(op.op.moved, plan->bytes);
	up_assert_moved(plan, &src, &dst, 0xa5);
	assert_int_equal(op.done, 1);
	up_place_fini(&src, src_node);
	up_place_fini(&dst, dst_node);
}

void up_every_shape(enum xp_kind kind, bool guarded_src, bool guarded_dst)
{
	struct plan *plan;

	for (size_t i = 0; i < ARRAY_LEN(shapes); i++) {
		plan = up_plan(&shapes[i], 1);
		move_shape(kind, plan, guarded_src, guarded_dst);
		plan_free(plan);
	}
}

void up_big_start(struct up_big *big, enum xp_kind kind, bool rows)
{
	struct plan_run run = {.len = 64 * MIB, .count = 1};

	if (rows)
		run = (struct plan_run){.len = 4096,
					.count = 8192,
					.src_stride = 8192,
					.dst_stride = 8000};
	big->src_node = kind == XP_WRITE ? &up_a : &up_b;
	big->dst_node = kind == XP_WRITE ? &up_b : &up_a;
	big->plan = up_plan(&run, 1);
	up_place_init(&big->src, big->src_node, 64 * MIB, false);
	up_place_init(&big->dst, big->dst_node, 64 * MIB, false);
	memset(big->src.memory->base, 0x11, big->src.memory->length);
	up_op_init(&big->op, kind, big->plan, &big->src, &big->dst);
	up_b.sides = big->op.op.sides;
	assert_int_equal(up_a.t->ops->post(up_a.peer, &big->op.op), 0);
}

void up_assert_still(struct up_big *big)
{
	uint8_t *dst = big->dst.memory->base;
	uint64_t bytes = big->dst.memory->length;

	if (!big->op.op.impl) /* else its sender may still read it */
		memset(big->src.memory->base, 0x22, big->src.memory->length);
	memset(dst, 0x33, bytes);
	up_spin_ms(500);
	if (dst[0] != 0x33 || memcmp(dst, dst + 1, bytes - 1) != 0)
		fail_msg("memory was written after the end");
}

void up_big_end(struct up_big *big)
{
	up_place_fini(&big->src, big->src_node);
	up_place_fini(&big->dst, big->dst_node);
	plan_free(big->plan);
}

void up_assert_refused(int r, enum err_code code, const char *words)
{
	assert_int_equal(r, -err_errno(code));
	if (!strstr(err_last()->text, words))
		fail_msg("\"%s\" is not in \"%s\"", words, err_last()->text);
	err_clear();
}
