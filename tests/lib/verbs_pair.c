/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two verbs transports in one process. The loop's turn does what the daemon's does:
 * arm before sleeping, progress when completions may be there. Callbacks note what
 * happened and check what each of them promises: once, and only to who is live.
 */
#include "tests/lib/verbs_pair.h"

#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/memory/copy.h"

struct vp_node vp_a, vp_b;
struct loop *vp_loop;
struct offload *vp_offload;
static struct copier *vp_copier;
struct gpu *vp_gpu;
struct config vp_config;

/* ---- what the transport says ---- */

static void on_request(void *owner, struct xp_inbound *in)
{
	struct vp_node *node = owner;
	struct err err;

	node->requests++;
	node->in = in;
	assert_true(node->ready);
	if (node->answer == VP_REFUSE) {
		err_set(&err, ERR_REVOKED, "not this time");
		node->xp->ops->land(in, NULL, &err);
	} else if (node->answer == VP_LAND) {
		node->xp->ops->land(in, in->bytes ? &node->sides : NULL, NULL);
	}
}

static void on_inbound_done(void *owner, struct xp_inbound *in, const struct err *err)
{
	struct vp_node *node = owner;

	node->dones++;
	node->used = in->used;
	assert_true(node->dones <= node->requests);
	if (err) {
		node->failures++;
		node->done_err = *err;
	}
	if (node->in == in)
		node->in = NULL;
}

static void on_peer_ready(void *owner, struct xp_peer *peer)
{
	struct vp_node *node = owner;

	(void)peer;
	assert_false(node->ready);
	node->ready = true;
}

static void on_peer_lost(void *owner, struct xp_peer *peer, const struct err *why)
{
	struct vp_node *node = owner;

	(void)peer;
	assert_int_equal(node->dones, node->requests);
	node->lost++;
	node->why = *why;
}

static void on_key(void *owner, struct xp_key *key, const struct err *err)
{
	(void)owner;
	(void)key;
	(void)err;
}

static void on_closed(void *arg)
{
	struct vp_node *node = arg;

	node->closed = true;
	node->peer = NULL;
}

static void on_done(struct xp_op *op)
{
	struct vp_transfer *x = op->owner;

	x->done++;
}

/* ---- the world ---- */

bool vp_turn(void)
{
	struct vp_node *const nodes[] = {&vp_a, &vp_b};
	bool busy = false;

	for (size_t i = 0; i < ARRAY_LEN(nodes); i++) {
		struct transport *xp = nodes[i]->xp;

		if (!xp || !xp->ops->arm(xp))
			continue;
		busy = true;
		xp->ops->progress(xp, 64);
	}
	/* who steps the wire does so between turns */
	busy |= fake_verbs_outstanding() != 0;
	return loop_turn(vp_loop, busy ? 0 : LOOP_NS_PER_MS);
}

void vp_turns(void)
{
	vp_turn();
}

void vp_spin_ms(uint64_t ms)
{
	uint64_t end = loop_clock_ns(vp_loop) + ms * LOOP_NS_PER_MS;

	while (loop_clock_ns(vp_loop) < end)
		vp_turn();
}

struct verbs_peer *vp_peer(const struct vp_node *node)
{
	return (struct verbs_peer *)node->peer;
}

struct verbs_transport *vp_transport(const struct vp_node *node)
{
	return container_of(node->xp, struct verbs_transport, net.base);
}

int vp_begin(void **state)
{
	(void)state;
	vp_config = (struct config){
		.max_inflight_bytes = 64 * VP_MIB,
		.fence_timeout_ns = LOOP_NS_PER_S,
		.connect_timeout_ns = 30 * LOOP_NS_PER_S,
		.verbs_ack_timeout = 14,
	};
	snprintf(vp_config.listen, sizeof(vp_config.listen), "tcp://0.0.0.0:7400");
	memset(&vp_a, 0, sizeof(vp_a));
	memset(&vp_b, 0, sizeof(vp_b));
	fake_verbs_begin();
	fake_verbs_device("mlx5_0", "eth0", "10.9.0.1", 0);
	fake_verbs_device("mlx5_1", "eth1", "10.9.1.1", 1);
	fake_verbs_device("mlx5_2", "eth2", "10.9.0.2", 0);
	fake_verbs_device("mlx5_3", "eth3", "10.9.1.2", 1);
	assert_int_equal(loop_new(&vp_loop), 0);
	assert_int_equal(offload_new(vp_loop, 1, &vp_offload), 0);
	assert_int_equal(copier_new(vp_loop, 1, 0, &vp_copier), 0);
	return 0;
}

int vp_open(struct vp_node *node, const char *rails)
{
	struct xp_env env = {.loop = vp_loop,
			     .offload = vp_offload,
			     .copier = vp_copier,
			     .config = &vp_config,
			     .gpu = vp_gpu};
	struct xp_callbacks up = {
		.owner = node,
		.on_request = on_request,
		.on_inbound_done = on_inbound_done,
		.on_peer_ready = on_peer_ready,
		.on_peer_lost = on_peer_lost,
		.on_key = on_key,
	};

	snprintf(vp_config.verbs_rails, sizeof(vp_config.verbs_rails), "%s", rails);
	return verbs_transport.open(&env, &up, &node->xp);
}

void vp_connect(struct vp_node *node, const struct vp_node *to, uint8_t in, uint8_t out)
{
	struct xp_peer_args args = {
		.address = to->xp->address,
		.address_len = to->xp->address_len,
		.owner = node,
		.dial = node == &vp_a,
	};

	memset(args.token_in, in, sizeof(args.token_in));
	memset(args.token_out, out, sizeof(args.token_out));
	node->ready = node->closed = false;
	node->lost = 0;
	assert_int_equal(node->xp->ops->peer_open(node->xp, &args, &node->peer), 0);
}

void vp_join(void)
{
	vp_connect(&vp_b, &vp_a, 2, 1);
	vp_connect(&vp_a, &vp_b, 1, 2);
	VP_AWAIT(vp_a.ready && vp_b.ready);
}

static int begin(void **state, const char *rails_a, const char *rails_b)
{
	vp_begin(state);
	assert_int_equal(vp_open(&vp_a, rails_a), 0);
	assert_int_equal(vp_open(&vp_b, rails_b), 0);
	vp_join();
	return 0;
}

int vp_begin_pair(void **state)
{
	return begin(state, "mlx5_0", "mlx5_2");
}

int vp_begin_packing(void **state, uint32_t ns_a, uint32_t ns_b)
{
	vp_begin(state);
	vp_config.verbs_request_ns = ns_a;
	assert_int_equal(vp_open(&vp_a, "mlx5_0"), 0);
	vp_config.verbs_request_ns = ns_b;
	assert_int_equal(vp_open(&vp_b, "mlx5_2"), 0);
	vp_join();
	return 0;
}

int vp_begin_two_rails(void **state)
{
	return begin(state, "mlx5_0 mlx5_1", "mlx5_2 mlx5_3");
}

void vp_close_begin(struct vp_node *node)
{
	node->closed = false;
	node->xp->ops->peer_close(node->peer, on_closed, node);
}

void vp_close_peer(struct vp_node *node)
{
	if (!node->peer)
		return;
	vp_close_begin(node);
	VP_AWAIT(node->closed);
}

int vp_end(void **state)
{
	struct vp_node *const nodes[] = {&vp_a, &vp_b};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(nodes); i++)
		vp_close_peer(nodes[i]);
	for (size_t i = 0; i < ARRAY_LEN(nodes); i++)
		if (nodes[i]->xp)
			nodes[i]->xp->ops->close(nodes[i]->xp);
	copier_free(vp_copier);
	offload_free(vp_offload);
	fake_verbs_end();
	loop_free(vp_loop);
	return 0;
}

/* ---- memory and plans ---- */

struct plan *vp_plan(const struct plan_run *runs, size_t count)
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

void vp_place_of(struct vp_place *place, struct vp_node *node, struct memory *memory)
{
	struct vp_node *other = node == &vp_a ? &vp_b : &vp_a;
	const struct transport_ops *ops = node->xp->ops;
	uint8_t key[XP_KEY_MAX];
	size_t len;

	*place = (struct vp_place){.memory = memory, .view = memory->base};
	assert_int_equal(ops->mem_reg(node->xp, memory, &place->reg), 0);
	assert_int_equal(ops->key_pack(place->reg, node->peer, key, sizeof(key), &len),
			 0);
	assert_int_equal(ops->key_unpack(other->peer, key, len, NULL, &place->key), 0);
	place->local = (struct xp_buffer){.reg = place->reg, .length = memory->length};
	place->remote = (struct xp_buffer){.key = place->key, .length = memory->length};
}

void vp_place_init(struct vp_place *place, struct vp_node *node, uint64_t bytes)
{
	struct memory *memory;

	assert_int_equal(memory_new_linear(bytes, &memory), 0);
	vp_place_of(place, node, memory);
}

void vp_place_fini(struct vp_place *place)
{
	verbs_transport.key_drop(place->key);
	verbs_transport.mem_dereg(place->reg);
	memory_unref(place->memory);
}

static void fill(uint8_t *at, uint64_t bytes)
{
	uint64_t x = 88172645463325252ull;

	for (uint64_t i = 0; i + 8 <= bytes; i += 8) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		memcpy(at + i, &x, 8);
	}
}

static void transfer_begin(struct vp_transfer *x, enum xp_kind kind,
			   const struct plan_run *runs, size_t count)
{
	bool write = kind == XP_WRITE;

	*x = (struct vp_transfer){
		.kind = kind,
		.plan = vp_plan(runs, count),
		.src_node = write ? &vp_a : &vp_b,
		.dst_node = write ? &vp_b : &vp_a,
	};
}

static void transfer_ready(struct vp_transfer *x)
{
	static const uint64_t header = 77;
	bool write = x->kind == XP_WRITE;

	fill(x->src.view, x->src.memory->length);
	memset(x->dst.view, 0xa5, x->dst.memory->length);
	x->op = (struct xp_op){
		.kind = x->kind,
		.sides = {.plan = x->plan,
			  .src = write ? &x->src.local : &x->src.remote,
			  .src_count = 1,
			  .dst = write ? &x->dst.remote : &x->dst.local,
			  .dst_count = 1},
		.header = &header,
		.header_len = sizeof(header),
		.on_done = on_done,
		.owner = x,
	};
}

void vp_transfer_init(struct vp_transfer *x, enum xp_kind kind,
		      const struct plan_run *runs, size_t count, uint64_t bytes)
{
	transfer_begin(x, kind, runs, count);
	vp_place_init(&x->src, x->src_node, bytes);
	vp_place_init(&x->dst, x->dst_node, bytes);
	transfer_ready(x);
}

void vp_transfer_with(struct vp_transfer *x, enum xp_kind kind,
		      const struct plan_run *runs, size_t count,
		      const struct vp_place *src, const struct vp_place *dst)
{
	transfer_begin(x, kind, runs, count);
	vp_place_of(&x->src, x->src_node, src->memory);
	vp_place_of(&x->dst, x->dst_node, dst->memory);
	x->src.view = src->view;
	x->dst.view = dst->view;
	transfer_ready(x);
}

void vp_transfer_fini(struct vp_transfer *x)
{
	vp_place_fini(&x->src);
	vp_place_fini(&x->dst);
	plan_free(x->plan);
}

int vp_post(struct vp_transfer *x)
{
	vp_b.sides = (struct xp_sides){
		.plan = x->plan,
		.src = &x->src.local,
		.src_count = 1,
		.dst = &x->dst.local,
		.dst_count = 1,
	};
	x->done = 0;
	return verbs_transport.post(vp_a.peer, &x->op);
}

void vp_says(const struct vp_transfer *x, bool staged, uint64_t requests_a,
	     uint64_t requests_b)
{
	uint64_t bytes = staged ? x->plan->bytes : 0;

	assert_int_equal(x->op.used.staged, bytes);
	assert_int_equal(vp_b.used.staged, bytes);
	assert_int_equal(x->op.used.descriptors, requests_a);
	assert_int_equal(vp_b.used.descriptors, requests_b);
}

void vp_moved(struct vp_transfer *x)
{
	uint64_t bytes = x->dst.memory->length;
	uint8_t *want = mem_zalloc(bytes);
	struct plan_walk walk;
	struct plan_span span;

	VP_AWAIT(x->done);
	if (x->op.result != 0)
		fail_msg("%s", x->op.err.text);
	VP_AWAIT(vp_b.dones == vp_b.requests);
	assert_int_equal(x->done, 1);
	assert_int_equal(x->op.moved, x->plan->bytes);
	assert_int_equal(x->op.used.staged, x->op.way.packed ? x->plan->bytes : 0);
	memset(want, 0xa5, bytes);
	plan_walk_begin(&walk, x->plan);
	while (plan_walk_next(&walk, UINT64_MAX, &span))
		memcpy(want + span.dst, x->src.view + span.src, span.len);
	assert_memory_equal(want, x->dst.view, bytes);
	mem_free(want);
}

void vp_failed(struct vp_transfer *x, enum err_code code, const char *words)
{
	VP_AWAIT(x->done);
	assert_int_equal(x->done, 1);
	assert_int_not_equal(x->op.result, 0);
	if (x->op.err.code != code || !strstr(x->op.err.text, words))
		fail_msg("'%s' (%s), wanted '%s'", x->op.err.text,
			 err_name(x->op.err.code), words);
}

void vp_still(struct vp_transfer *x)
{
	uint8_t *dst = x->dst.view;
	uint64_t bytes = x->dst.memory->length;

	memset(dst, 0x33, bytes);
	fake_verbs_hold(false);
	vp_spin_ms(10);
	fake_verbs_land();
	if (dst[0] != 0x33 || memcmp(dst, dst + 1, bytes - 1) != 0)
		fail_msg("memory was written after the end");
}
