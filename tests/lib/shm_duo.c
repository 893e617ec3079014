/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two nodes, one loop. Waiting is always for a condition, through the loop; a
 * transfer that must be caught in the middle is endless, so that no speed of the
 * machine lets it end first.
 */
#include "tests/lib/shm_duo.h"

#include <stdio.h>
#include <unistd.h>

#include "daemon/gate/gate.h"
#include "tests/lib/gates.h"

struct gpu *duo_gpu;

/* ---- callbacks ---- */

static void on_request(void *owner, struct xp_inbound *in)
{
	struct duo_node *n = owner;
	unsigned int i = n->requests++ % DUO_REQUESTS_MAX;

	assert_null(n->seen[i].in);
	n->seen[i].in = in;
	n->seen[i].kind = in->kind;
	if (in->header_len >= 4)
		memcpy(&n->seen[i].mark, in->header, 4);
	in->owner = &n->seen[i];
	for (uint64_t end_ns = loop_clock_ns(n->test->loop) + n->slow_ns;
	     loop_clock_ns(n->test->loop) < end_ns;)
		;
	if (n->answer == DUO_HOLD)
		return;
	n->test->in_call = true;
	if (n->answer == DUO_LAND) {
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
	struct duo_node *n = owner;
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
	struct duo_node *n = owner;

	assert_ptr_equal(peer, n->peer);
	n->ready++;
}

static void on_peer_lost(void *owner, struct xp_peer *peer, const struct err *why)
{
	struct duo_node *n = owner;

	assert_ptr_equal(peer, n->peer);
	assert_int_equal(n->inbound_dones, n->requests);
	n->lost++;
	n->why = *why;
}

static void on_key(void *owner, struct xp_key *key, const struct err *err)
{
	struct duo_node *n = owner;

	(void)key;
	if (err) {
		n->keys_bad++;
		n->key_err = *err;
	} else {
		n->keys_ok++;
	}
}

void duo_on_closed(void *arg)
{
	((struct duo_node *)arg)->closed++;
}

void duo_on_op_done(struct xp_op *op)
{
	struct duo_op *top = container_of(op, struct duo_op, op);

	assert_false(top->test->in_call);
	assert_null(op->impl);
	top->calls++;
}

/* ---- fixture ---- */

static void node_open(struct duo *t, struct duo_node *n)
{
	struct xp_env env = {.loop = t->loop,
			     .offload = t->offload,
			     .gates = t->gates,
			     .copier = t->copier,
			     .config = &t->config,
			     .gpu = duo_gpu};
	struct xp_callbacks cb = {.owner = n,
				  .on_request = on_request,
				  .on_inbound_done = on_inbound_done,
				  .on_peer_ready = on_peer_ready,
				  .on_peer_lost = on_peer_lost,
				  .on_key = on_key};

	n->test = t;
	assert_int_equal(shm_transport.open(&env, &cb, &n->xp), 0);
}

int duo_peer_open(struct duo_node *n, const struct transport *remote, bool dial,
		  const char *in, const char *out)
{
	struct xp_peer_args args = {.dial = dial, .self = remote == n->xp};

	memcpy(args.token_in, in, XP_TOKEN_BYTES);
	memcpy(args.token_out, out, XP_TOKEN_BYTES);
	args.address = remote->address;
	args.address_len = remote->address_len;
	return shm_transport.peer_open(n->xp, &args, &n->peer);
}

struct duo *duo_new_threads(unsigned int threads)
{
	struct duo *t = test_calloc(1, sizeof(*t));

	assert_int_equal(memory_guard_install(), 0);
	t->config.slice_bytes = COPY_SLICE_BYTES;
	t->config.fence_timeout_ns = DUO_WAIT_NS;
	t->config.connect_timeout_ns = 15 * LOOP_NS_PER_S;
	assert_int_equal(loop_new(&t->loop), 0);
	gates_begin(t->loop, &t->gates);
	assert_int_equal(offload_new(t->loop, 1, &t->offload), 0);
	assert_int_equal(copier_new(t->loop, threads, 64 * DUO_KIB, &t->copier), 0);
	node_open(t, &t->a);
	node_open(t, &t->b);
	return t;
}

struct duo *duo_new(void)
{
	return duo_new_threads(2);
}

struct duo *duo_pair_threads(unsigned int threads)
{
	struct duo *t = duo_new_threads(threads);

	assert_int_equal(duo_peer_open(&t->a, t->b.xp, true, DUO_TOKEN_B, DUO_TOKEN_A),
			 0);
	assert_int_equal(duo_peer_open(&t->b, t->a.xp, false, DUO_TOKEN_A, DUO_TOKEN_B),
			 0);
	DUO_WAIT(t, t->a.ready && t->b.ready);
	return t;
}

struct duo *duo_pair(void)
{
	return duo_pair_threads(2);
}

static void node_close(struct duo *t, struct duo_node *n)
{
	if (n->peer && !n->closed) {
		shm_transport.peer_close(n->peer, duo_on_closed, n);
		DUO_WAIT(t, n->closed);
	}
	assert_int_equal(n->inbound_dones, n->requests);
	for (unsigned int i = 0; i < n->requests && n->requests <= DUO_REQUESTS_MAX; i++)
		assert_int_equal(n->seen[i].done, 1);
	shm_transport.close(n->xp);
}

void duo_end(struct duo *t)
{
	node_close(t, &t->a);
	node_close(t, &t->b);
	copier_free(t->copier);
	offload_free(t->offload);
	gates_free(t->gates);
	loop_free(t->loop);
	test_free(t);
}

struct xp_key *duo_key_of(struct duo_node *of, struct xp_reg *reg, struct duo_node *at)
{
	uint8_t packed[XP_KEY_MAX];
	struct xp_key *key = NULL;
	unsigned int answers = at->keys_ok + at->keys_bad;
	size_t len = 0;

	assert_int_equal(
		shm_transport.key_pack(reg, of->peer, packed, sizeof(packed), &len), 0);
	assert_int_equal(shm_transport.key_unpack(at->peer, packed, len, NULL, &key), 0);
	if (!((struct xp_key_base *)(void *)key)->ready)
		DUO_WAIT(at->test, at->keys_ok + at->keys_bad > answers);
	return key;
}

void duo_shared_new(struct duo_shared *s, struct duo_node *of, struct duo_node *at,
		    uint64_t bytes, bool vm)
{
	*s = (struct duo_shared){0};
	if (vm) {
		s->heap = test_calloc(1, bytes);
		assert_int_equal(
			vm_import_pid(getpid(), (uintptr_t)s->heap, bytes, &s->memory),
			0);
	} else {
		assert_int_equal(memory_new_linear(bytes, &s->memory), 0);
	}
	assert_int_equal(shm_transport.mem_reg(of->xp, s->memory, &s->reg), 0);
	if (at)
		s->key = duo_key_of(of, s->reg, at);
}

void duo_shared_free(struct duo_shared *s)
{
	if (s->key)
		shm_transport.key_drop(s->key);
	shm_transport.mem_dereg(s->reg);
	memory_unref(s->memory);
	test_free(s->heap);
}

uint8_t *duo_shared_bytes(struct duo_shared *s)
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

struct plan *duo_plan_rows(uint64_t rows, uint64_t len)
{
	const struct plan_run run = {.len = len,
				     .count = rows,
				     .dst = len,
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

void duo_transfer_init(struct duo_transfer *x, struct duo *t, enum xp_kind kind,
		       uint64_t rows, uint64_t len, bool src_vm, bool dst_vm)
{
	struct duo_node *from = kind == XP_WRITE ? &t->a : &t->b;
	struct duo_node *to = kind == XP_WRITE ? &t->b : &t->a;

	*x = (struct duo_transfer){.t = t, .kind = kind, .bytes = 2 * rows * len};
	duo_shared_new(&x->src, from, to, x->bytes, src_vm);
	duo_shared_new(&x->dst, to, NULL, x->bytes, dst_vm);
	for (uint64_t i = 0; i < x->bytes; i++)
		duo_shared_bytes(&x->src)[i] = (uint8_t)(i * 7 + i / 251 + 1);
	x->plan = duo_plan_rows(rows, len);
	x->local = (struct xp_buffer){.reg = x->src.reg, .length = x->bytes};
	x->remote_src = (struct xp_buffer){.key = x->src.key, .length = x->bytes};
	x->here = (struct xp_buffer){.reg = x->dst.reg, .length = x->bytes};
	x->remote_dst = (struct xp_buffer){.length = x->bytes};
	x->top = (struct duo_op){.test = t};
	x->top.op = (struct xp_op){.kind = kind,
				   .on_done = duo_on_op_done,
				   .header = "mark",
				   .header_len = 4};
	x->top.op.sides =
		(struct xp_sides){.plan = x->plan,
				  .src_count = 1,
				  .dst_count = 1,
				  .src = kind == XP_WRITE ? &x->local : &x->remote_src,
				  .dst = kind == XP_WRITE ? &x->remote_dst : &x->here};
	t->b.sides =
		(struct xp_sides){.plan = x->plan,
				  .src_count = 1,
				  .dst_count = 1,
				  .src = kind == XP_WRITE ? &x->remote_src : &x->local,
				  .dst = kind == XP_WRITE ? &x->here : &x->remote_dst};
}

int duo_post(struct duo_transfer *x)
{
	int r;

	x->t->in_call = true;
	r = shm_transport.post(x->t->a.peer, &x->top.op);
	x->t->in_call = false;
	return r;
}

void duo_cancel(struct duo_transfer *x)
{
	struct err why;

	err_set(&why, ERR_ABORTED, "the engine said so");
	x->t->in_call = true;
	shm_transport.cancel(&x->top.op, &why);
	shm_transport.cancel(&x->top.op, &why);
	x->t->in_call = false;
}

void duo_transfer_check(struct duo_transfer *x)
{
	const uint8_t *src = duo_shared_bytes(&x->src), *dst = duo_shared_bytes(&x->dst);
	uint64_t len = x->plan->row_median;

	for (uint64_t i = 0; i < x->bytes; i++) {
		uint8_t want = i / len % 2 ? src[i - len] : 0;

		if (dst[i] != want)
			fail_msg("byte %ju is %u, not %u", (uintmax_t)i, dst[i], want);
	}
}

bool duo_dst_is_zero(struct duo_transfer *x)
{
	const uint8_t *dst = duo_shared_bytes(&x->dst);

	for (uint64_t i = 0; i < x->bytes; i++)
		if (dst[i])
			return false;
	return true;
}

void duo_transfer_fini(struct duo_transfer *x)
{
	duo_shared_free(&x->src);
	duo_shared_free(&x->dst);
	plan_free(x->plan);
}

void duo_assert_done(struct duo_transfer *x, enum err_code code)
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

void duo_transfer_init_endless(struct duo_transfer *x, struct duo *t, enum xp_kind kind,
			       bool vm)
{
	duo_transfer_init(x, t, kind, 2048, 256, vm, false);
	plan_free(x->plan);
	x->plan = plan_endless(x->bytes);
	x->top.op.sides.plan = x->plan;
	t->b.sides.plan = x->plan;
}

bool duo_in_flight(struct duo_transfer *x)
{
	return x->top.op.moved >= x->bytes / 2;
}
