/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the fake does in a transfer's life (net.h).
 *
 *   WRITE        REQUEST -> on_request, land() -> GO -> slices … -> DONE
 *   READ         REQUEST -> on_request, land() -> slices … -> DONE
 *   READ, check  slices … -> REQUEST (CHECK) -> on_request, land() -> DONE
 *
 * The DONE of a READ may come before its slices, and slices behind a stop. A lander
 * that is stopped is over when those that count have landed; a WRITE's source when the
 * destination has answered; the source of a READ at once.
 *
 * Being over takes its time, too (profile.done_max_ns), as copy threads and completion
 * queues do: `rest`. With a peer that is lost a side waits for nobody's word, but for
 * what may still land: until that has, or the peer has let go of memory.
 */
#include <errno.h>

#include "daemon/base/mem.h"
#include "tests/sim/fake_impl.h"

/* No invariant: that nothing lands behind a done is for those to see who look. */
static const struct sm_table xfer_table = {
	.name = "fake transfer",
	.states = net_xfer_states,
	.count = NET_XFER_STATES,
};

static struct fake_hub *hub_of(const struct fake_xfer *x)
{
	return x->peer->node->hub;
}

static void fake_xfer_send(struct fake_xfer *x, unsigned int spare,
			   enum fake_frame_type type, const struct err *err)
{
	fake_frame_send(x->peer, mem_steal(x->spare[spare]), type, x->net.id, err,
			&x->lane_ns);
}

/* ---- made and unmade ---- */

static void on_rest(struct fake_event *event, bool dropped)
{
	struct fake_xfer *x = container_of(event, struct fake_xfer, rest);

	if (dropped)
		return;
	x->rested = true;
	net_xfer_check(&x->net);
}

static void fake_xfer_free(struct net_xfer *net)
{
	struct fake_xfer *x = fake_xfer_of(net);

	fake_stream_leave(x);
	fake_event_remove(&x->rest);
	for (size_t i = 0; i < ARRAY_LEN(x->spare); i++)
		fake_frame_free(x->spare[i]);
	mem_free(x->header);
	hub_of(x)->xfers--;
	mem_free(x);
}

/* The profile is that of the requester's direction. */
static int fake_xfer_new(struct net_peer *net, struct net_xfer **xfer_p)
{
	struct fake_peer *peer = fake_peer_of(net);
	struct fake_hub *hub = peer->node->hub;
	struct fake_xfer *x = mem_zalloc(sizeof(*x));
	int r = 0;

	if (!x)
		return err_pass(-ENOMEM);
	x->peer = peer;
	hub->xfers++;
	x->profile = peer->posted ? *fake_profile_of(hub, peer->node, fake_remote(peer))
				  : *fake_profile_of(hub, fake_remote(peer), peer->node);
	x->fault = peer->posted ? *peer->posted : peer->arrived->fault;
	fake_event_init(&x->pump, fake_on_pump);
	fake_event_init(&x->rest, on_rest);
	for (size_t i = 0; r == 0 && i < ARRAY_LEN(x->spare); i++)
		r = fake_frame_new(&x->spare[i]);
	if (r < 0)
		fake_xfer_free(&x->net);
	else
		*xfer_p = &x->net;
	return err_pass(r);
}

static bool fake_xfer_is_check(const struct fake_xfer *x)
{
	return x->net.ours && x->net.kind == XP_READ && x->profile.check;
}

/* Planted: a WRITE's source that was canceled is read on. */
static bool bug_reads_on(const struct fake_xfer *x)
{
	return hub_of(x)->bug == FAKE_BUG_SOURCE_STALE && x->net.ours &&
	       x->net.kind == XP_WRITE && x->sent > 0 && x->net.err.code != ERR_FAULT;
}

static void fake_xfer_drop_sides(struct net_xfer *net)
{
	struct fake_xfer *x = fake_xfer_of(net);

	if (bug_reads_on(x) && net->told && !net->answered)
		return;
	fake_stream_leave(x);
	x->landing = false;
	fake_side_unref(&x->src);
	fake_side_unref(&x->dst);
}

/* On failure net frees the transfer, or ends it: fake_xfer_drop_sides() follows. */
static int fake_xfer_take_sides(struct net_xfer *net, const struct xp_sides *sides)
{
	struct fake_xfer *x = fake_xfer_of(net);
	bool source = net_is_source(net), check = fake_xfer_is_check(x);
	uint64_t slice = x->profile.slice_bytes ? x->profile.slice_bytes : 1;
	int r = 0;

	if (!source && x->profile.need_keys &&
	    !fake_keys_usable(sides->src, sides->src_count))
		return err_raise(ERR_INVAL, "fake: a key of the source is missing");
	r = xp_sides_check(sides, source || check, !source);
	if (r == 0 && (source || check))
		r = fake_side_new(sides->plan, sides->src, sides->src_count, check,
				  &x->src);
	if (r == 0 && !source)
		r = fake_side_new(sides->plan, sides->dst, sides->dst_count, false,
				  &x->dst);
	if (r == 0 && x->src)
		r = fake_stream_new(x);
	net->used.descriptors = (net->bytes + slice - 1) / slice;
	return err_pass(r);
}

/* ---- where it stands ---- */

static bool fake_xfer_is_whole(struct net_xfer *net)
{
	const struct fake_xfer *x = fake_xfer_of(net);

	if (net->kind == XP_CHECK)
		return true;
	return (net_is_source(net) ? x->sent : x->landed) == net->bytes;
}

static bool fake_xfer_stands_still(struct fake_xfer *x)
{
	struct net_xfer *net = &x->net;

	switch (sm_state(&net->sm)) {
	case NET_XFER_STOPPING:
		if (hub_of(x)->bug == FAKE_BUG_REVOKE_IGNORED || bug_reads_on(x))
			return true;
		return x->counted == 0 && (!net->ours || !net->asked || net->answered ||
					   net->kind == XP_READ);
	case NET_XFER_ASKED:
		return net->ours && net->answered;
	case NET_XFER_MOVING:
		return fake_xfer_is_whole(net) && (!net->ours || net->answered);
	default:
		return false;
	}
}

/* Has it rested, too? Some need not. */
static bool fake_xfer_has_rested(struct fake_xfer *x)
{
	struct fake_hub *hub = hub_of(x);
	uint64_t rest_ns;

	if (x->rested || fake_event_queued(&x->rest))
		return x->rested;
	rest_ns = fake_between(hub, 0, x->profile.done_max_ns);
	x->rested = rest_ns <= x->profile.done_max_ns / 8;
	if (!x->rested)
		fake_event_at(hub, &x->rest, loop_now_ns(hub->loop) + rest_ns, NULL,
			      x->peer->node);
	return x->rested;
}

static bool fake_xfer_is_over(struct net_xfer *net)
{
	struct fake_xfer *x = fake_xfer_of(net);
	bool live = net_peer_live(net->peer);
	bool stopped = sm_state(&net->sm) == NET_XFER_STOPPING;

	if (live || !stopped) {
		if (!fake_xfer_stands_still(x) || !fake_xfer_has_rested(x))
			return false;
	} else if (x->counted > 0 && !x->peer->idle &&
		   hub_of(x)->bug != FAKE_BUG_LOST_WRITES) {
		return false;
	}
	fake_lander_close(x);
	if (stopped && x->dst && hub_of(x)->bug == FAKE_BUG_SLICE_AFTER_DONE)
		fake_plant_late(x);
	fake_trace(hub_of(x), x->peer->node, fake_remote(x->peer), net->id,
		   net->ours ? "op over" : "inbound over", net->err.code);
	return true;
}

/* ---- stop, over, told ---- */

static void fake_xfer_halt(struct net_xfer *net)
{
	struct fake_xfer *x = fake_xfer_of(net);

	fake_trace(hub_of(x), x->peer->node, NULL, net->id, "stop", net->err.code);
	if (!bug_reads_on(x)) {
		x->reading = false;
		fake_event_remove(&x->pump);
	}
	if (x->profile.discard)
		fake_lander_close(x);
}

static void fake_xfer_speak(struct net_xfer *net)
{
	if (!net_owes_cancel(net))
		return;
	net->stop_sent = true;
	if (bug_reads_on(fake_xfer_of(net)))
		return;
	fake_xfer_send(fake_xfer_of(net), 1, FAKE_FRAME_CANCEL, &net->err);
}

static int fake_xfer_say_done(struct net_xfer *net, const struct err *err)
{
	fake_xfer_send(fake_xfer_of(net), 1, FAKE_FRAME_DONE, err);
	return 0;
}

/* ---- ours ---- */

int fake_post(struct xp_peer *base, struct xp_op *op)
{
	struct fake_peer *peer = (struct fake_peer *)base;
	struct fake_hub *hub = peer->node->hub;
	struct fake_rule fault = {0};
	int r = 0;

	if (peer->node->dead)
		return err_raise(ERR_PEER, "fake: this node is dead");
	if (fake_peer_works(peer))
		fake_fault_draw(hub, peer->node, fake_remote(peer), op, &fault);
	if (fault.fault == FAKE_REFUSE)
		r = err_raise(ERR_TRANSPORT, "fake: refused (scripted)");
	else if (fault.fault == FAKE_NOMEM)
		r = err_raise(ERR_NOMEM, "fake: no memory (scripted)");
	peer->posted = &fault;
	if (r == 0)
		r = net_post(base, op);
	peer->posted = NULL;
	if (r < 0) {
		hub->stats.refused_posts++;
		return err_pass(r);
	}
	hub->stats.posts++;
	fake_trace(hub, peer->node, fake_remote(peer), peer->net.next_id - 1, "post",
		   op->sides.plan ? op->sides.plan->bytes : 0);
	return 0;
}

/* The bytes of one that checks come before its request. */
static int fake_xfer_prepare(struct net_xfer *net)
{
	struct fake_xfer *x = fake_xfer_of(net);

	if (!fake_xfer_is_check(x))
		return 0;
	x->landing = true;
	fake_reader_start(x);
	return 0;
}

static bool fake_xfer_may_ask(const struct net_xfer *net)
{
	const struct fake_xfer *x = container_of(net, const struct fake_xfer, net);

	return !fake_xfer_is_check(x) || x->landed == net->bytes;
}

static int fake_xfer_ask(struct net_xfer *net)
{
	struct fake_xfer *x = fake_xfer_of(net);
	struct fake_frame *frame = x->spare[0];
	bool read = net->kind == XP_READ && net->bytes > 0;

	frame->header_len = net->op->header_len;
	if (frame->header_len > 0) {
		frame->header = mem_dup(net->op->header, frame->header_len);
		if (!frame->header)
			return err_pass(-ENOMEM);
	}
	frame->kind = fake_xfer_is_check(x) ? XP_CHECK : net->kind;
	frame->bytes = net->bytes;
	frame->fault = x->fault;
	x->landing = read && !fake_xfer_is_check(x);
	fake_xfer_send(x, 0, FAKE_FRAME_REQUEST, NULL);
	return read;
}

static void fake_xfer_take_done(struct fake_xfer *x, const struct fake_frame *frame)
{
	const struct err *err = frame->err.code != ERR_OK ? &frame->err : NULL;
	struct err mute;

	if (err && hub_of(x)->bug == FAKE_BUG_WORDS_LOST) {
		err_set(&mute, ERR_TRANSPORT, "fake: it failed");
		err = &mute;
	}
	if (net_xfer_done(&x->net, err) < 0)
		net_peer_fail_last(&x->peer->net);
}

int fake_take_answer(struct fake_peer *peer, const struct fake_frame *frame)
{
	struct net_xfer *net;
	int r = net_op_find(&peer->net, frame->id, &net);

	if (r < 0)
		return err_pass(r);
	if (frame->type == FAKE_FRAME_DONE) {
		fake_xfer_take_done(fake_xfer_of(net), frame);
	} else if (sm_state(&net->sm) == NET_XFER_ASKED) {
		sm_move(&net->sm, NET_XFER_MOVING);
		fake_reader_start(fake_xfer_of(net));
	}
	return 0;
}

/* ---- theirs ---- */

static int fake_xfer_refuse(struct net_peer *net, uint64_t id, const struct err *err)
{
	(void)id;
	fake_answer_arrived(fake_peer_of(net), err);
	return 0;
}

int fake_take_request(struct fake_peer *peer, const struct fake_frame *frame)
{
	bool no_memory = frame->fault.fault == FAKE_NOMEM_THERE;
	struct fake_hub *hub = peer->node->hub;
	struct net_xfer *net;
	int r;

	if (no_memory)
		err_raise(ERR_NOMEM, "fake: no memory for the request (scripted)");
	r = net_inbound_new(&peer->net, frame->id, frame->kind, frame->bytes, no_memory,
			    &net);
	if (r < 0 || !net)
		return err_pass(r);
	hub->stats.requests++;
	fake_trace(hub, fake_remote(peer), peer->node, frame->id, "request",
		   frame->bytes);
	fake_xfer_of(net)->header = mem_steal(peer->arrived->header);
	net_request(net, fake_xfer_of(net)->header, frame->header_len);
	return 0;
}

static int fake_xfer_begin(struct net_xfer *net)
{
	struct fake_xfer *x = fake_xfer_of(net);

	if (net_is_source(net)) {
		fake_reader_start(x);
	} else {
		x->landing = true;
		fake_xfer_send(x, 0, FAKE_FRAME_GO, NULL);
	}
	return 0;
}

int fake_take_cancel(struct fake_peer *peer, const struct fake_frame *frame)
{
	struct net_xfer *net;
	int r = net_inbound_find(&peer->net, frame->id, &net);

	if (r == 0 && net)
		net_xfer_stop(net, &frame->err);
	return err_pass(r);
}

const struct net_ops fake_net_ops = {
	.peer_table = &fake_peer_table,
	.xfer_table = &xfer_table,
	.checks = true,
	.step = fake_peer_step,
	.peer_free = fake_peer_free,
	.refuse = fake_xfer_refuse,
	.may_ask = fake_xfer_may_ask,
	.xfer_new = fake_xfer_new,
	.xfer_free = fake_xfer_free,
	.take_sides = fake_xfer_take_sides,
	.drop_sides = fake_xfer_drop_sides,
	.prepare = fake_xfer_prepare,
	.ask = fake_xfer_ask,
	.begin = fake_xfer_begin,
	.halt = fake_xfer_halt,
	.speak = fake_xfer_speak,
	.is_over = fake_xfer_is_over,
	.is_whole = fake_xfer_is_whole,
	.say_done = fake_xfer_say_done,
};
