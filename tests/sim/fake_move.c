/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's bytes on their way. A transfer's reader gathers slices from the source's
 * memory at its own pace, and its lander scatters them on arrival. Both may sit on
 * either side, or (a READ that checks) on one. A slice is copied when it leaves, as on
 * a wire: what changes in the source afterwards does not change it.
 *
 * The fence. A stop closes the lander to slices that leave later, but those under way
 * still land, and its side is not over before: `counted` says how many they are. That
 * is how a NIC behaves, and it makes a caller visible who takes the stop for the
 * proof. With profile.discard the lander throws them away instead, as tcp and ucx do.
 *
 * Slices are a stream's, which lives on when the source was told and freed. They find
 * the lander by its number when they leave and when they arrive.
 */
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "tests/sim/fake_impl.h"

#define BUG_LATE_NS (300 * LOOP_NS_PER_MS)

/* ---- streams ---- */

static void on_slice(struct fake_event *event, bool dropped);

static void stream_unref(struct fake_stream *stream)
{
	if (--stream->refs > 0)
		return;
	for (unsigned int i = 0; i < stream->count; i++)
		mem_free(stream->slices[i].bytes);
	fake_conn_unref(stream->conn);
	mem_free(stream);
}

static uint64_t slice_bytes(const struct fake_xfer *x)
{
	uint64_t bytes = x->profile.slice_bytes ? x->profile.slice_bytes : 1;

	return bytes < x->net.bytes ? bytes : x->net.bytes;
}

int fake_stream_new(struct fake_xfer *x)
{
	uint64_t wanted = (x->net.bytes + slice_bytes(x) - 1) / slice_bytes(x);
	unsigned int window =
		x->profile.window > FAKE_WINDOW_MAX ? FAKE_WINDOW_MAX : x->profile.window;
	bool check = x->dst != NULL;
	struct fake_stream *stream;

	if (wanted > window)
		wanted = window;
	stream = mem_zalloc(sizeof(*stream) + wanted * sizeof(stream->slices[0]));
	if (!stream)
		return err_pass(-ENOMEM);
	stream->refs = 1;
	stream->reader = x;
	stream->conn = x->peer->conn;
	stream->conn->refs++;
	stream->lander_end = check ? x->peer->end : !x->peer->end;
	stream->lander_asked = x->net.kind == XP_READ;
	stream->id = x->net.id;
	for (; stream->count < wanted; stream->count++) {
		struct fake_slice *slice = &stream->slices[stream->count];

		fake_event_init(&slice->event, on_slice);
		slice->stream = stream;
		slice->bytes = mem_zalloc(slice_bytes(x));
		if (!slice->bytes) {
			stream_unref(stream);
			return err_pass(-ENOMEM);
		}
	}
	x->stream = stream;
	return 0;
}

void fake_stream_leave(struct fake_xfer *x)
{
	x->reading = false;
	fake_event_remove(&x->pump);
	if (!x->stream)
		return;
	x->stream->reader = NULL;
	stream_unref(mem_steal(x->stream));
}

/* Who takes its slices, if anybody still does. */
static struct fake_xfer *stream_lander(const struct fake_stream *stream)
{
	struct fake_peer *peer = stream->conn->peer[stream->lander_end];
	struct fake_xfer *x = NULL;

	if (peer)
		x = idmap_get(stream->lander_asked ? &peer->net.ops : &peer->net.inbounds,
			      stream->id);
	return x && x->landing ? x : NULL;
}

/* ---- the lander ---- */

void fake_lander_close(struct fake_xfer *x)
{
	if (x->dst)
		x->dst->closed = true;
	x->landing = false;
	x->counted = 0;
}

static void slice_land(struct fake_xfer *x, struct fake_slice *slice)
{
	struct fake_hub *hub = x->peer->node->hub;
	bool last = x->landed + slice->len == x->net.bytes;
	int r = 0;

	if (fake_bug_once(hub, FAKE_BUG_BYTE_FLIPPED))
		slice->bytes[slice->len / 2] ^= 1;
	if (!last || !fake_bug_once(hub, FAKE_BUG_DONE_SHORT))
		r = fake_scatter(x->dst, slice->begin, slice->bytes, slice->len);
	if (r == 0 && hub->bug == FAKE_BUG_BYTE_STRAY)
		r = fake_stray(x->dst, slice->begin);
	if (r < 0) {
		net_xfer_stop_last(&x->net);
		return;
	}
	x->landed += slice->len;
	hub->stats.landed_bytes += slice->len;
	net_xfer_moved(&x->net, x->landed, 0);
}

/* Planted: it lands although its lander was closed. */
static bool bug_lands(const struct fake_stream *stream)
{
	const struct fake_peer *peer = stream->conn->peer[stream->lander_end];
	enum fake_bug bug = stream->conn->hub->bug;

	return bug == FAKE_BUG_REVOKE_IGNORED ||
	       (bug == FAKE_BUG_LOST_WRITES && (!peer || !fake_peer_works(peer)));
}

static void pump_wake(struct fake_xfer *x, uint64_t after_ns);

static void on_slice(struct fake_event *event, bool dropped)
{
	struct fake_slice *slice = container_of(event, struct fake_slice, event);
	struct fake_stream *stream = slice->stream;
	struct fake_xfer *x = dropped || !slice->into ? NULL : stream_lander(stream);

	slice->busy = false;
	if (x) {
		x->counted--;
		slice_land(x, slice);
		net_xfer_check(&x->net);
		net_peer_kick(&x->peer->net); /* its request may wait for it */
	} else if (!dropped && slice->into &&
		   (!slice->into->closed || bug_lands(stream))) {
		/* its side was told too early, and sees it */
		if (fake_scatter(slice->into, slice->begin, slice->bytes, slice->len) < 0)
			err_clear();
	} else {
		stream->conn->hub->stats.discarded++;
	}
	fake_side_unref(&slice->into);
	if (stream->reader)
		pump_wake(stream->reader, 0);
	stream_unref(stream);
}

/* ---- the reader ---- */

static void pump_wake(struct fake_xfer *x, uint64_t after_ns)
{
	struct fake_hub *hub = x->peer->node->hub;

	if (x->reading && x->sent < x->net.bytes && !fake_event_queued(&x->pump))
		fake_event_at(hub, &x->pump, loop_now_ns(hub->loop) + after_ns, NULL,
			      x->peer->node);
}

void fake_reader_start(struct fake_xfer *x)
{
	x->reading = true;
	pump_wake(x, 0);
}

bool fake_fault_strikes(struct fake_peer *peer, const struct fake_rule *fault, bool ours)
{
	switch (fault->fault) {
	case FAKE_STUCK:
		return true;
	case FAKE_CUT:
		fake_conn_break(peer->conn, 0, ERR_PEER,
				"the connection broke (scripted)");
		return false;
	case FAKE_VANISH_FROM:
	case FAKE_VANISH_TO:
		fake_node_vanish(&(ours == (fault->fault == FAKE_VANISH_FROM)
					   ? peer->node
					   : fake_remote(peer))
					  ->net.base);
		return peer->node->dead;
	default:
		return false;
	}
}

/* True: the reader stops here. */
static bool reader_strikes(struct fake_xfer *x)
{
	struct err err;

	if (x->fault_spent || !x->fault.fault || x->sent < x->fault.at_bytes ||
	    x->fault.fault == FAKE_LATE)
		return false;
	x->fault_spent = x->fault.fault != FAKE_STUCK && x->fault.fault != FAKE_SLOW;
	if (x->fault.fault != FAKE_ERROR)
		return fake_fault_strikes(x->peer, &x->fault, x->net.ours);
	err_set(&err, ERR_TRANSPORT, "fake: the transfer failed (scripted)");
	net_xfer_stop(&x->net, &err);
	return true;
}

static struct fake_slice *slice_free(struct fake_stream *stream)
{
	for (unsigned int i = 0; i < stream->count; i++) {
		if (!stream->slices[i].busy)
			return &stream->slices[i];
	}
	return NULL;
}

static void slice_send(struct fake_xfer *x, struct fake_slice *slice)
{
	struct fake_hub *hub = x->peer->node->hub;
	struct fake_stream *stream = x->stream;
	struct fake_xfer *lander = stream_lander(stream);
	struct fake_node *to = stream->conn->node[stream->lander_end];
	uint64_t delay_ns =
		fake_between(hub, x->profile.delay_min_ns, x->profile.delay_max_ns);

	if (x->fault.fault == FAKE_LATE && !x->fault_spent &&
	    x->sent + slice->len > x->fault.at_bytes) {
		delay_ns += x->fault.extra_ns;
		x->fault_spent = true;
	}
	slice->busy = true;
	if (lander && sm_state(&lander->net.sm) != NET_XFER_STOPPING) {
		slice->into = fake_side_ref(lander->dst);
		lander->counted++;
	}
	stream->refs++;
	fake_event_at(hub, &slice->event, loop_now_ns(hub->loop) + delay_ns,
		      x->peer->node, to);
	x->sent += slice->len;
	hub->stats.slices++;
	net_xfer_moved(&x->net, x->sent, 0);
	fake_trace(hub, x->peer->node, to, x->net.id, "slice", slice->begin);
	net_xfer_check(&x->net); /* a READ is served when the last one left */
}

static void pump_step(struct fake_xfer *x)
{
	struct fake_slice *slice;
	uint64_t pace_ns = x->profile.slice_ns;

	if (reader_strikes(x))
		return;
	slice = slice_free(x->stream);
	if (!slice)
		return; /* on_slice wakes us */
	slice->begin = x->sent;
	slice->len = x->net.bytes - x->sent;
	if (slice->len > slice_bytes(x))
		slice->len = slice_bytes(x);
	if (fake_gather(x->src, slice->begin, slice->bytes, slice->len) < 0) {
		net_xfer_stop_last(&x->net);
		return;
	}
	slice_send(x, slice);
	if (x->fault.fault == FAKE_SLOW)
		pace_ns *= x->fault.factor;
	pump_wake(x, pace_ns);
}

void fake_on_pump(struct fake_event *event, bool dropped)
{
	struct fake_xfer *x = container_of(event, struct fake_xfer, pump);

	if (!dropped && x->reading && x->sent < x->net.bytes)
		pump_step(x);
}

/* ---- a planted bug ---- */

struct ghost {
	struct fake_event event;
	struct fake_side *into;
	uint64_t len;
	uint8_t bytes[];
};

static void on_ghost(struct fake_event *event, bool dropped)
{
	struct ghost *ghost = container_of(event, struct ghost, event);

	if (!dropped && fake_scatter(ghost->into, 0, ghost->bytes, ghost->len) < 0)
		err_clear();
	fake_side_unref(&ghost->into);
	mem_free(ghost);
}

void fake_plant_late(struct fake_xfer *x)
{
	struct fake_hub *hub = x->peer->node->hub;
	uint64_t len = slice_bytes(x);
	struct ghost *ghost = x->landed ? mem_zalloc(sizeof(*ghost) + len) : NULL;

	if (!ghost)
		return;
	ghost->into = fake_side_ref(x->dst);
	ghost->len = len;
	memset(ghost->bytes, 0xdb, len);
	fake_event_init(&ghost->event, on_ghost);
	fake_event_at(hub, &ghost->event, loop_now_ns(hub->loop) + BUG_LATE_NS, NULL,
		      x->peer->node);
}
