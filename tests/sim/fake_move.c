/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's transfers.
 *
 * One fake_xfer holds both halves of a transfer, the initiator's and the
 * answerer's, but each half decides only on what its side can know: what the
 * other did comes to it as a frame, after a delay. Five frames do:
 *
 *   WRITE         init -> REQUEST; ans -> ACCEPT; slices; ans -> DONE
 *   READ          init -> REQUEST; ans -> ACCEPT; slices; init -> FIN
 *   READ, check   slices; init -> REQUEST (XP_CHECK); ans -> DONE
 *   any           init -> CANCEL; ans -> DONE (bad)
 *
 * Bytes have a reader, which gathers a slice from the source's memory at its
 * own pace, and a lander, which scatters it on arrival. Reader and lander may
 * sit in either half. A slice is copied when it leaves, as on a wire: what
 * changes in the source afterwards does not change it.
 *
 * The fence. A stop (cancel, revoke, a fault) closes the lander to slices that
 * leave later, but those under way still land, and the done callback waits for
 * them: `counted` says how many. That is how a NIC behaves, and it makes a
 * caller visible who takes the stop for the proof. With profile.discard the
 * lander throws them away instead, as tcp and ucx do, and is done at once. A
 * lost or closed peer always discards: its queue pair is dead.
 *
 * Done callbacks are events, so they never come from inside post, land, cancel
 * or revoke. fake_peer_end() alone calls them directly, from an event of its own.
 */
#include <assert.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "tests/sim/fake_impl.h"

#define BUG_LATE_NS (300 * LOOP_NS_PER_MS)

/* ---- lifetime ---- */

static void x_free(struct fake_xfer *x)
{
	fake_table_drop(&x->src);
	fake_table_drop(&x->dst);
	if (x->keep) {
		plan_free((struct plan *)(uintptr_t)x->src_plan);
		plan_free((struct plan *)(uintptr_t)x->dst_plan);
	}
	for (unsigned int i = 0; i < x->slice_count; i++)
		mem_free(x->slices[i].bytes);
	mem_free(x->slices);
	mem_free(x->header);
	list_remove(&x->link);
	x->hub->xfers--;
	fake_conn_unref(x->conn);
	mem_free(x);
}

void fake_x_unref(struct fake_xfer *x)
{
	if (--x->refs == 0)
		x_free(x);
}

struct fake_node *fake_node_at(const struct fake_xfer *x, unsigned int end)
{
	return x->conn->node[end];
}

static struct fake_node *lander_node(const struct fake_xfer *x)
{
	return fake_node_at(x, x->kind == XP_WRITE ? !x->init : x->init);
}

static struct fake_node *reader_node(const struct fake_xfer *x)
{
	return fake_node_at(x, x->kind == XP_WRITE || x->check ? x->init : !x->init);
}

static void x_event(struct fake_xfer *x, struct fake_event *event, uint64_t after_ns,
		    struct fake_node *to)
{
	x->refs++;
	fake_event_at(x->hub, event, loop_now_ns(x->hub->loop) + after_ns, NULL, to);
}

static uint64_t done_delay(struct fake_xfer *x)
{
	return fake_between(x->hub, 0, x->profile.done_max_ns);
}

static struct xp_callbacks *callbacks_at(const struct fake_xfer *x, unsigned int end)
{
	return &fake_node_at(x, end)->base.callbacks;
}

/* A half is done with its memory. */
static void half_drop(struct fake_xfer *x, bool initiator)
{
	bool has_src = x->kind == XP_WRITE ? initiator : x->check == initiator;
	bool has_dst = x->kind == XP_WRITE ? !initiator : initiator;

	if (x->keep)
		return;
	if (has_src)
		fake_table_drop(&x->src);
	if (has_dst)
		fake_table_drop(&x->dst);
}

/* Slices are its descriptors. */
static struct xp_used used_of(const struct fake_xfer *x)
{
	uint64_t slice = x->profile.slice_bytes;

	return (struct xp_used){.descriptors = (x->bytes + slice - 1) / slice};
}

/* ---- the two halves' ends ---- */

void fake_op_finish(struct fake_xfer *x)
{
	struct xp_op *op = x->op;
	struct fake_peer *peer = x->conn->peer[x->init];

	x->op = NULL;
	if (x->hub->bug != FAKE_BUG_SOURCE_STALE)
		x->reading &= x->kind == XP_READ && !x->check;
	half_drop(x, true);
	if (peer)
		peer->unfinished--;
	op->impl = NULL;
	op->result = 0;
	op->used = used_of(x);
	if (x->op_bad) {
		op->err = x->op_err;
		op->result = -err_errno(op->err.code);
	}
	fake_trace(x->hub, fake_node_at(x, x->init), NULL, x->id, "op done",
		   x->op_bad ? x->op_err.code : 0);
	op->on_done(op);
	if (fake_bug_once(x->hub, FAKE_BUG_DONE_TWICE))
		op->on_done(op);
	fake_x_unref(x);
}

static void on_op_done(struct fake_event *event, bool dropped)
{
	struct fake_xfer *x = container_of(event, struct fake_xfer, op_done);

	if (!dropped && x->op)
		fake_op_finish(x);
	fake_x_unref(x);
}

void fake_op_end(struct fake_xfer *x, const struct err *err)
{
	if (!x->op || x->op_ending)
		return;
	if (x->op_canceled && err && fake_bug_once(x->hub, FAKE_BUG_DONE_NEVER))
		return;
	if (x->op_canceled && x->hub->bug == FAKE_BUG_CANCEL_SUCCEEDS)
		err = NULL;
	x->op_ending = true;
	x->op_bad = err != NULL;
	if (err)
		x->op_err = *err;
	if (err && !x->op_canceled && x->hub->bug == FAKE_BUG_WORDS_LOST)
		err_set(&x->op_err, ERR_TRANSPORT, "fake: it failed");
	x_event(x, &x->op_done, done_delay(x), fake_node_at(x, x->init));
}

bool fake_in_live(const struct fake_xfer *x)
{
	return x->in_state == FAKE_IN_ASKED || x->in_state == FAKE_IN_RUNNING ||
	       x->in_state == FAKE_IN_ENDING;
}

void fake_in_finish(struct fake_xfer *x)
{
	struct xp_callbacks *callbacks = callbacks_at(x, !x->init);
	struct err err = x->in_err;

	x->in_state = FAKE_IN_GONE;
	x->in.used = used_of(x);
	x->reading &= x->kind == XP_WRITE || x->check;
	half_drop(x, false);
	fake_trace(x->hub, fake_node_at(x, !x->init), NULL, x->id, "inbound done",
		   x->in_bad ? x->in_err.code : 0);
	if (x->kind == XP_WRITE || x->check || x->in_bad)
		fake_frame_send(x, FAKE_FRAME_DONE, x->in_bad ? &err : NULL);
	callbacks->on_inbound_done(callbacks->owner, &x->in, x->in_bad ? &err : NULL);
	fake_x_unref(x);
}

static void on_in_done(struct fake_event *event, bool dropped)
{
	struct fake_xfer *x = container_of(event, struct fake_xfer, in_done);

	if (!dropped && x->in_state == FAKE_IN_ENDING)
		fake_in_finish(x);
	fake_x_unref(x);
}

void fake_in_end(struct fake_xfer *x, const struct err *err)
{
	if (x->in_state != FAKE_IN_ASKED && x->in_state != FAKE_IN_RUNNING)
		return;
	x->in_state = FAKE_IN_ENDING;
	x->in_bad = err != NULL;
	if (err)
		x->in_err = *err;
	x_event(x, &x->in_done, done_delay(x), fake_node_at(x, !x->init));
}

/* ---- the lander ---- */

/* Planted: a slice that was there already comes again, with other bytes. */
static void plant_late_slice(struct fake_xfer *x)
{
	for (unsigned int i = 0; i < x->slice_count; i++) {
		struct fake_slice *slice = &x->slices[i];

		if (slice->busy || !slice->len)
			continue;
		for (uint64_t b = 0; b < slice->len; b++)
			slice->bytes[b] = (uint8_t)~slice->bytes[b];
		slice->busy = true;
		slice->late = true;
		x_event(x, &slice->event, BUG_LATE_NS, lander_node(x));
		return;
	}
}

static void lander_stopped(struct fake_xfer *x)
{
	x->landing = false;
	if (x->hub->bug == FAKE_BUG_SLICE_AFTER_DONE)
		plant_late_slice(x);
	if (x->kind == XP_WRITE)
		fake_in_end(x, &x->stop_err);
	else
		fake_op_end(x, &x->stop_err);
}

void fake_slices_doom(struct fake_xfer *x)
{
	for (unsigned int i = 0; i < x->slice_count; i++)
		x->slices[i].counted = false;
	x->counted = 0;
}

/* Take nothing that leaves from now on; done when what is under way is here. */
void fake_lander_stop(struct fake_xfer *x, const struct err *err)
{
	if (!x->landing || x->stopping)
		return;
	x->stopping = true;
	x->stop_err = *err;
	if (x->hub->bug == FAKE_BUG_REVOKE_IGNORED) {
		x->stopping = false; /* goes on taking slices */
		if (x->kind == XP_WRITE)
			fake_in_end(x, err);
		else
			fake_op_end(x, err);
		return;
	}
	if (x->profile.discard)
		fake_slices_doom(x);
	if (x->counted == 0)
		lander_stopped(x);
}

void fake_landed_all(struct fake_xfer *x)
{
	x->landing = false;
	if (x->kind == XP_WRITE) {
		fake_in_end(x, NULL);
	} else if (x->check) {
		fake_frame_send(x, FAKE_FRAME_REQUEST, NULL);
	} else {
		fake_frame_send(x, FAKE_FRAME_FIN, NULL);
		fake_op_end(x, NULL);
	}
}

/* The lander cannot write: its own side ends, the other is told. */
static void lander_fail(struct fake_xfer *x, const struct err *err)
{
	if (x->kind == XP_READ && !x->check && !x->op_canceled) {
		x->op_canceled = true;
		fake_frame_send(x, FAKE_FRAME_CANCEL, err);
	}
	fake_lander_stop(x, err);
}

static void slice_land(struct fake_xfer *x, struct fake_slice *slice)
{
	uint64_t *moved_p = x->kind == XP_WRITE ? &x->in.moved
			    : x->op		? &x->op->moved
						: NULL;
	bool last = x->landed + slice->len == x->bytes;
	struct err err;
	int r = 0;

	if (fake_bug_once(x->hub, FAKE_BUG_BYTE_FLIPPED))
		slice->bytes[slice->len / 2] ^= 1;
	if (!last || !fake_bug_once(x->hub, FAKE_BUG_DONE_SHORT))
		r = fake_scatter(x, slice->begin, slice->bytes, slice->len);
	if (r < 0) {
		err_take(&err);
		lander_fail(x, &err);
		return;
	}
	x->landed += slice->len;
	x->hub->stats.landed_bytes += slice->len;
	if (moved_p)
		*moved_p = x->landed;
}

void fake_pump_wake(struct fake_xfer *x, uint64_t after_ns)
{
	if (x->reading && x->sent < x->bytes && !fake_event_queued(&x->pump))
		x_event(x, &x->pump, after_ns, reader_node(x));
}

static void on_slice(struct fake_event *event, bool dropped)
{
	struct fake_slice *slice = container_of(event, struct fake_slice, event);
	struct fake_xfer *x = slice->xfer;
	bool counted = slice->counted;

	slice->busy = false;
	slice->counted = false;
	if (counted)
		x->counted--;
	if (slice->late && !dropped)
		(void)fake_scatter(x, slice->begin, slice->bytes, slice->len);
	else if (!dropped && counted && x->landing)
		slice_land(x, slice);
	else
		x->hub->stats.discarded++;
	if (x->landing && x->stopping && x->counted == 0)
		lander_stopped(x);
	else if (x->landing && !x->stopping && x->landed == x->bytes)
		fake_landed_all(x);
	if (!slice->late)
		fake_pump_wake(x, 0);
	fake_x_unref(x);
}

/* ---- the reader ---- */

/* The reader cannot go on: its own side ends, the other is told. */
static void reader_fail(struct fake_xfer *x, const struct err *err)
{
	x->reading = false;
	if (x->check) {
		fake_lander_stop(x, err);
	} else if (x->kind == XP_READ) {
		fake_in_end(x, err);
	} else if (!x->op_canceled) {
		x->op_canceled = true;
		fake_frame_send(x, FAKE_FRAME_CANCEL, err);
	}
}

/* The scripted fault's moment has come; true: the reader stops here. */
bool fake_fault_apply(struct fake_xfer *x)
{
	struct err err;

	if (x->fault.fault < FAKE_ERROR || x->fault.fault == FAKE_SLOW ||
	    x->fault.fault == FAKE_LATE || x->fault_spent || x->sent < x->fault.at_bytes)
		return false;
	x->fault_spent = x->fault.fault != FAKE_STUCK;
	switch (x->fault.fault) {
	case FAKE_ERROR:
		err_set(&err, ERR_TRANSPORT, "fake: the transfer failed (scripted)");
		reader_fail(x, &err);
		return true;
	case FAKE_CUT:
		fake_conn_break(x->conn, 0, ERR_PEER, "the connection broke (scripted)");
		return false;
	case FAKE_VANISH_FROM:
		fake_node_vanish(&fake_node_at(x, x->init)->base);
		return reader_node(x)->dead;
	case FAKE_VANISH_TO:
		fake_node_vanish(&fake_node_at(x, !x->init)->base);
		return reader_node(x)->dead;
	default:
		return x->fault.fault == FAKE_STUCK;
	}
}

static struct fake_slice *slice_free(struct fake_xfer *x)
{
	for (unsigned int i = 0; i < x->slice_count; i++) {
		if (!x->slices[i].busy)
			return &x->slices[i];
	}
	return NULL;
}

static void slice_send(struct fake_xfer *x, struct fake_slice *slice)
{
	uint64_t delay_ns =
		fake_between(x->hub, x->profile.delay_min_ns, x->profile.delay_max_ns);

	if (x->fault.fault == FAKE_LATE && !x->fault_spent &&
	    x->sent + slice->len > x->fault.at_bytes) {
		delay_ns += x->fault.extra_ns;
		x->fault_spent = true;
	}
	slice->busy = true;
	slice->counted = x->landing && !x->stopping;
	if (slice->counted)
		x->counted++;
	x->refs++;
	fake_event_at(x->hub, &slice->event, loop_now_ns(x->hub->loop) + delay_ns,
		      reader_node(x), lander_node(x));
	x->sent += slice->len;
	x->hub->stats.slices++;
	if (x->kind == XP_WRITE && x->op)
		x->op->moved = x->sent;
	else if (x->kind == XP_READ && !x->check)
		x->in.moved = x->sent;
	fake_trace(x->hub, reader_node(x), lander_node(x), x->id, "slice", slice->begin);
}

static void pump_step(struct fake_xfer *x)
{
	struct fake_slice *slice;
	uint64_t pace_ns = x->profile.slice_ns;
	struct err err;

	if (fake_fault_apply(x))
		return;
	slice = slice_free(x);
	if (!slice)
		return; /* on_slice wakes us */
	slice->begin = x->sent;
	slice->len = x->bytes - x->sent;
	if (slice->len > x->profile.slice_bytes)
		slice->len = x->profile.slice_bytes;
	if (fake_gather(x, slice->begin, slice->bytes, slice->len) < 0) {
		err_take(&err);
		reader_fail(x, &err);
		return;
	}
	slice_send(x, slice);
	if (x->fault.fault == FAKE_SLOW)
		pace_ns *= x->fault.factor;
	fake_pump_wake(x, pace_ns);
}

static void on_pump(struct fake_event *event, bool dropped)
{
	struct fake_xfer *x = container_of(event, struct fake_xfer, pump);

	if (!dropped && x->reading && x->sent < x->bytes)
		pump_step(x);
	fake_x_unref(x);
}

/* ---- frames ---- */

void fake_frame_send(struct fake_xfer *x, enum fake_frame_type type,
		     const struct err *err)
{
	struct fake_frame *frame = &x->frames[type];
	struct fake_conn *conn = x->conn;
	unsigned int to = type <= FAKE_FRAME_FIN ? !x->init : x->init;
	const struct fake_profile *profile =
		fake_profile_of(x->hub, fake_node_at(x, !to), fake_node_at(x, to));
	uint64_t at_ns = loop_now_ns(x->hub->loop) +
			 fake_delay(x->hub, fake_node_at(x, !to), fake_node_at(x, to));
	uint64_t floor_ns = x->lane_ns[to];

	if (conn->broken)
		return;
	assert(!fake_event_queued(&frame->event));
	frame->bad = err != NULL;
	if (err)
		frame->err = *err;
	if (type == FAKE_FRAME_REQUEST && conn->request_ns[to] > floor_ns)
		floor_ns = conn->request_ns[to];
	if (!profile->reorder && conn->any_ns[to] > floor_ns)
		floor_ns = conn->any_ns[to];
	if (at_ns < floor_ns)
		at_ns = floor_ns;
	if (type == FAKE_FRAME_REQUEST) {
		conn->request_ns[to] = at_ns;
		if (x->hub->bug == FAKE_BUG_REQUESTS_SWAPPED && x->id % 2)
			at_ns += profile->delay_max_ns + 1;
	}
	x->lane_ns[to] = at_ns;
	if (conn->any_ns[to] < at_ns)
		conn->any_ns[to] = at_ns;
	x->refs++;
	fake_event_at(x->hub, &frame->event, at_ns, fake_node_at(x, !to),
		      fake_node_at(x, to));
}

static void request_fail(struct fake_xfer *x, enum err_code code, const char *words)
{
	struct err err;

	x->in_state = FAKE_IN_GONE;
	err_set(&err, code, "fake: %s", words);
	fake_frame_send(x, FAKE_FRAME_DONE, &err);
}

static void on_request_frame(struct fake_xfer *x, struct fake_peer *peer)
{
	struct xp_callbacks *callbacks = callbacks_at(x, !x->init);

	if (x->in_state != FAKE_IN_NONE)
		return;
	if (x->fault.fault == FAKE_NOMEM_THERE) {
		request_fail(x, ERR_NOMEM, "no memory for the request (scripted)");
		return;
	}
	if (x->bytes == 0 && x->fault.fault && !x->fault_spent) {
		if (x->fault.fault == FAKE_ERROR)
			request_fail(x, ERR_TRANSPORT, "the message failed (scripted)");
		else if (fake_fault_apply(x) || fake_node_at(x, !x->init)->dead)
			return;
		if (x->in_state == FAKE_IN_GONE)
			return;
	}
	x->in = (struct xp_inbound){.peer = fake_peer_base(peer),
				    .kind = x->check ? XP_CHECK : x->kind,
				    .header = x->header,
				    .header_len = x->header_len,
				    .bytes = x->bytes};
	x->in_state = FAKE_IN_ASKED;
	x->refs++; /* the answerer's half */
	x->hub->stats.requests++;
	fake_trace(x->hub, fake_node_at(x, x->init), fake_node_at(x, !x->init), x->id,
		   "request", x->bytes);
	callbacks->on_request(callbacks->owner, &x->in);
}

static void on_cancel_frame(struct fake_xfer *x, const struct err *err)
{
	switch (x->in_state) {
	case FAKE_IN_NONE: /* a request that got stuck */
		x->in_state = FAKE_IN_GONE;
		fake_frame_send(x, FAKE_FRAME_DONE, err);
		return;
	case FAKE_IN_ASKED:
		fake_in_end(x, err);
		return;
	case FAKE_IN_RUNNING:
		if (x->kind == XP_WRITE) {
			fake_lander_stop(x, err);
		} else {
			x->reading = false;
			fake_in_end(x, err);
		}
		return;
	case FAKE_IN_ENDING:
	case FAKE_IN_GONE:
		return;
	}
}

static void on_accept_frame(struct fake_xfer *x)
{
	bool stale = x->hub->bug == FAKE_BUG_SOURCE_STALE && x->op_canceled;

	if ((!x->op || x->op_ending) && !stale)
		return;
	if (x->kind == XP_READ) {
		if (x->landing && !x->stopping && x->bytes == 0)
			fake_landed_all(x);
	} else if (!x->op_canceled || stale) {
		x->reading = true;
		fake_pump_wake(x, 0);
	}
}

static void on_done_frame(struct fake_xfer *x, const struct fake_frame *frame)
{
	const struct err *err = frame->bad ? &frame->err : NULL;

	if (!x->op || x->op_ending)
		return;
	if (x->kind == XP_READ && !x->check && err) {
		fake_lander_stop(x, err);
		return;
	}
	x->reading = false;
	fake_op_end(x, err);
}

static void frame_deliver(struct fake_xfer *x, enum fake_frame_type type,
			  struct fake_peer *peer)
{
	switch (type) {
	case FAKE_FRAME_REQUEST:
		on_request_frame(x, peer);
		return;
	case FAKE_FRAME_CANCEL:
		on_cancel_frame(x, &x->frames[type].err);
		return;
	case FAKE_FRAME_FIN:
		fake_in_end(x, NULL);
		return;
	case FAKE_FRAME_ACCEPT:
		on_accept_frame(x);
		return;
	case FAKE_FRAME_DONE:
		on_done_frame(x, &x->frames[type]);
		return;
	case FAKE_FRAME_COUNT:
		break;
	}
	assert(false);
}

static void on_frame(struct fake_event *event, bool dropped)
{
	struct fake_frame *frame = container_of(event, struct fake_frame, event);
	struct fake_xfer *x = frame->xfer;
	enum fake_frame_type type = (enum fake_frame_type)(frame - x->frames);
	unsigned int to = type <= FAKE_FRAME_FIN ? !x->init : x->init;
	struct fake_peer *peer = x->conn->peer[to];

	if (!dropped && peer && peer->state == FAKE_READY)
		frame_deliver(x, type, peer);
	fake_x_unref(x);
}

/* ---- making ---- */

void fake_x_init(struct fake_xfer *x)
{
	list_init(&x->op_done.link);
	x->op_done.run = on_op_done;
	list_init(&x->in_done.link);
	x->in_done.run = on_in_done;
	list_init(&x->pump.link);
	x->pump.run = on_pump;
	for (unsigned int i = 0; i < FAKE_FRAME_COUNT; i++) {
		x->frames[i].xfer = x;
		x->frames[i].event.run = on_frame;
		list_init(&x->frames[i].event.link);
	}
}

void fake_slice_init(struct fake_xfer *x, struct fake_slice *slice)
{
	list_init(&slice->event.link);
	slice->event.run = on_slice;
	slice->xfer = x;
}
