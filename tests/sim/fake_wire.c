/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's messages between two ends of a connection. Each takes its own time; those
 * of one side of one transfer keep their order, so do requests, and with a profile
 * that does not reorder all do. What was sent before the BYE arrives before it.
 *
 * A request without bytes has no slices that a fault could strike, so that is done
 * here: it fails, or gets stuck until its CANCEL comes.
 */
#include <errno.h>

#include "daemon/base/mem.h"
#include "tests/sim/fake_impl.h"

/* ---- frames ---- */

static void on_frame(struct fake_event *event, bool dropped);

int fake_frame_new(struct fake_frame **frame_p)
{
	struct fake_frame *frame = mem_zalloc(sizeof(*frame));

	if (!frame)
		return err_pass(-ENOMEM);
	fake_event_init(&frame->event, on_frame);
	list_init(&frame->stuck);
	*frame_p = frame;
	return 0;
}

void fake_frame_free(struct fake_frame *frame)
{
	if (!frame)
		return;
	list_remove(&frame->stuck);
	if (frame->conn)
		fake_conn_unref(frame->conn);
	mem_free(frame->header);
	mem_free(frame);
}

void fake_frame_send(struct fake_peer *peer, struct fake_frame *frame,
		     enum fake_frame_type type, uint64_t id, const struct err *err,
		     uint64_t *lane_ns)
{
	struct fake_conn *conn = peer->conn;
	struct fake_node *from = peer->node, *node = fake_remote(peer);
	unsigned int to = !peer->end;
	const struct fake_profile *profile = fake_profile_of(conn->hub, from, node);
	uint64_t at_ns = loop_now_ns(conn->hub->loop) + fake_delay(conn->hub, from, node);
	uint64_t floor_ns = *lane_ns;

	if (conn->broken) {
		fake_frame_free(frame);
		return;
	}
	frame->type = type;
	frame->id = id;
	frame->err = err ? *err : (struct err){0};
	frame->to = to;
	if (type == FAKE_FRAME_REQUEST && conn->request_ns[to] > floor_ns)
		floor_ns = conn->request_ns[to];
	if (!profile->reorder && conn->any_ns[to] > floor_ns)
		floor_ns = conn->any_ns[to];
	if (at_ns < floor_ns)
		at_ns = floor_ns;
	if (type == FAKE_FRAME_REQUEST) {
		conn->request_ns[to] = at_ns;
		if (conn->hub->bug == FAKE_BUG_REQUESTS_SWAPPED && id % 2)
			at_ns += profile->delay_max_ns + 1;
	}
	if (conn->any_ns[to] < at_ns)
		conn->any_ns[to] = at_ns;
	*lane_ns = at_ns;
	if (!frame->conn)
		conn->refs++;
	frame->conn = conn;
	fake_event_at(conn->hub, &frame->event, at_ns, from, node);
}

/* ---- requests that become no transfer ---- */

void fake_stuck_drop(struct fake_conn *conn)
{
	struct fake_frame *frame;

	list_foreach_safe(frame, &conn->stuck, stuck)
		fake_frame_free(frame);
}

void fake_answer_arrived(struct fake_peer *peer, const struct err *err)
{
	struct fake_frame *frame = mem_steal(peer->arrived);
	struct err words = *err; /* of this frame, maybe */
	uint64_t lane_ns = 0;

	fake_frame_send(peer, frame, FAKE_FRAME_DONE, frame->id, &words, &lane_ns);
}

/* True: it goes no further. */
static bool request_strikes(struct fake_peer *peer, const struct fake_frame *frame)
{
	const struct fake_rule *fault = &frame->fault;
	struct err err;

	if (frame->bytes > 0 || !fault->fault)
		return false;
	if (fault->fault == FAKE_ERROR) {
		err_set(&err, ERR_TRANSPORT, "fake: the message failed (scripted)");
		fake_answer_arrived(peer, &err);
		return true;
	}
	if (fault->at_bytes > 0 || !fake_fault_strikes(peer, fault, false))
		return false;
	list_push_back(&peer->conn->stuck, &mem_steal(peer->arrived)->stuck);
	return true;
}

static bool cancel_frees(struct fake_peer *peer, const struct fake_frame *cancel)
{
	struct fake_frame *frame;

	list_foreach(frame, &peer->conn->stuck, stuck) {
		if (frame->id != cancel->id || frame->to != cancel->to)
			continue;
		fake_frame_free(frame);
		fake_answer_arrived(peer, &cancel->err);
		return true;
	}
	return false;
}

/* ---- arrival ---- */

static int frame_deliver(struct fake_peer *peer, const struct fake_frame *frame)
{
	switch (frame->type) {
	case FAKE_FRAME_REQUEST:
		if (request_strikes(peer, frame))
			return 0;
		return err_pass(fake_take_request(peer, frame));
	case FAKE_FRAME_CANCEL:
		if (cancel_frees(peer, frame))
			return 0;
		return err_pass(fake_take_cancel(peer, frame));
	case FAKE_FRAME_GO:
	case FAKE_FRAME_DONE:
		return err_pass(fake_take_answer(peer, frame));
	case FAKE_FRAME_BYE:
		peer->net.bye_came = true;
		net_peer_fail(&peer->net, &frame->err);
	}
	return 0;
}

static void on_frame(struct fake_event *event, bool dropped)
{
	struct fake_frame *frame = container_of(event, struct fake_frame, event);
	struct fake_peer *peer = frame->conn->peer[frame->to];

	if (!dropped && peer && fake_peer_works(peer)) {
		peer->arrived = frame;
		if (frame_deliver(peer, frame) < 0)
			net_peer_fail_last(&peer->net);
		frame = mem_steal(peer->arrived);
	}
	fake_frame_free(frame);
}
