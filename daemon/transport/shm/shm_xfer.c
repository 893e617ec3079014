/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shm backend's part of a transfer's life cycle (net.h).
 *
 *   WRITE        REQUEST -> on_request, land() -> copy -> COPIED -> CONFIRM -> DONE
 *   READ         copy -> REQUEST (CHECK) -> on_request, land() -> DONE
 *   WRITE, ring  REQUEST -> on_request, land() -> STAGE -> DATA … -> COPIED …
 *   READ, ring   REQUEST -> on_request, land() -> DATA … -> DONE
 *
 * The destination's own threads write, so either side is over when its threads have
 * released its memory; and the bytes read count only if the source was live until the
 * last byte, which it alone knows:
 *
 *   WRITE  The source's CONFIRM states that. Before it, a cancel is over as soon as its
 *          threads have finished (they read for the ring only); the peer may read on in
 *          its mapping, in vain. After it a cancel is too late, and the peer's DONE
 *          decides.
 *   READ   The request that follows the bytes asks; later posts wait behind it,
 *          because requests keep the order of posts. Through the ring, the source's
 *          part is over when the last byte is in it.
 *
 * The peer receives DONE when this side is notified, so a receiver may succeed while its
 * sender fails, never the reverse.
 */
#include "daemon/transport/shm/shm_private.h"

#include <errno.h>

#include "daemon/base/mem.h"

static bool shm_xfer_invariant(const struct sm *sm, unsigned int from)
{
	const struct shm_xfer *xfer = container_of(sm, const struct shm_xfer, net.sm);

	(void)from;
	return sm_state(sm) != NET_XFER_OVER || !shm_flow_busy(xfer); /* "quiesced" */
}

static const struct sm_table xfer_table = {
	.name = "shm transfer",
	.states = net_xfer_states,
	.count = NET_XFER_STATES,
	.invariant = shm_xfer_invariant,
};

static struct shm_xfer *shm_xfer_of(struct net_xfer *net)
{
	return container_of(net, struct shm_xfer, net);
}

static void shm_xfer_say(struct shm_xfer *xfer, enum shm_type type)
{
	shm_send(xfer->peer, &(struct shm_frame){.type = type, .id = xfer->net.id});
}

/* ---- made and unmade ---- */

static int shm_xfer_new(struct net_peer *net, struct net_xfer **xfer_p)
{
	struct shm_xfer *xfer = mem_zalloc(sizeof(*xfer));

	if (!xfer)
		return err_pass(-ENOMEM);
	xfer->peer = container_of(net, struct shm_peer, net);
	list_init(&xfer->link);
	list_init(&xfer->slots);
	*xfer_p = &xfer->net;
	return 0;
}

static void shm_xfer_free(struct net_xfer *net)
{
	struct shm_xfer *xfer = shm_xfer_of(net);

	xfer->peer->held_bytes -= xfer->held;
	mem_free_large(net->in.owned, xfer->held);
	mem_free(xfer);
}

static int shm_xfer_take_sides(struct net_xfer *net, const struct xp_sides *sides)
{
	return err_pass(shm_flow_take(shm_xfer_of(net), sides));
}

static void shm_xfer_drop_sides(struct net_xfer *net)
{
	shm_flow_drop(shm_xfer_of(net));
}

/* ---- state ---- */

/* Local: may it succeed? Remote: has it? */
static bool shm_xfer_is_whole(struct net_xfer *net)
{
	const struct shm_xfer *xfer = shm_xfer_of(net);

	if (net->bytes == 0 || net->kind == XP_CHECK)
		return true;
	return net->kind == XP_WRITE ? xfer->confirmed : shm_flow_complete(xfer);
}

static bool shm_xfer_is_over(struct net_xfer *net)
{
	const struct shm_xfer *xfer = shm_xfer_of(net);

	if (shm_flow_busy(xfer))
		return false;
	switch (sm_state(&net->sm)) {
	case NET_XFER_STOPPING:
		/* the peer may count confirmed bytes */
		return !net->ours || !xfer->confirmed || net->answered ||
		       !net_peer_live(net->peer);
	case NET_XFER_ASKED:
		return net->ours && net->answered;
	case NET_XFER_MOVING:
		return (!net->ours || net->answered) && shm_xfer_is_whole(net);
	default:
		return false;
	}
}

static bool show_moved(struct shm_xfer *xfer)
{
	return net_xfer_moved(&xfer->net, shm_flow_moved(xfer),
			      atomic_load(&xfer->job.first_ns));
}

bool shm_xfer_progress(struct shm_xfer *xfer)
{
	struct shm_peer *peer = xfer->peer;
	uint8_t body[8];
	struct cursor c;

	if (xfer->way == SHM_WAY_NONE || xfer->net.told)
		return false;
	if (show_moved(xfer) && !xfer->net.ours && xfer->net.kind == XP_WRITE &&
	    sm_state(&xfer->net.sm) == NET_XFER_MOVING &&
	    shm_unsent(peer) <= SHM_OUT_SOFT) {
		cursor_write(&c, body, sizeof(body));
		cursor_put_u64(&c, xfer->net.in.moved);
		shm_send(peer, &(struct shm_frame){.type = SHM_PROGRESS,
						   .id = xfer->net.id,
						   .body = body,
						   .body_len = sizeof(body)});
	}
	return true;
}

void shm_xfer_changed(struct shm_xfer *xfer)
{
	(void)show_moved(xfer);
	net_xfer_check(&xfer->net);
	if (sm_state(&xfer->net.sm) == NET_XFER_QUEUED)
		net_peer_kick(&xfer->peer->net); /* its request may be sent */
}

/* ---- stop, over, reported ---- */

static void shm_xfer_speak(struct net_xfer *net)
{
	struct shm_xfer *xfer = shm_xfer_of(net);

	if (net_owes_cancel(net)) {
		net->stop_sent = true;
		shm_send_err(xfer->peer, SHM_CANCEL, net->id, &net->err);
	} else if (!net->ours && net->kind == XP_WRITE && net->bytes > 0 &&
		   sm_state(&net->sm) == NET_XFER_MOVING && !xfer->copied &&
		   shm_flow_complete(xfer)) {
		xfer->copied = true;
		shm_xfer_say(xfer, SHM_COPIED);
	}
}

static void shm_xfer_halt(struct net_xfer *net)
{
	struct shm_xfer *xfer = shm_xfer_of(net);

	if (xfer->copying)
		copier_cancel(net->peer->transport->base.env.copier, &xfer->job);
	shm_ring_leave(xfer);
}

static int shm_xfer_say_done(struct net_xfer *net, const struct err *err)
{
	shm_send_err(shm_xfer_of(net)->peer, SHM_DONE, net->id, err);
	return 0;
}

/* ---- ours ---- */

/* The destination copies by itself where it can; else it has the ring filled. */
static int shm_xfer_pull(struct shm_xfer *xfer)
{
	return err_pass(xfer->way == SHM_WAY_DIRECT ? shm_flow_direct(xfer)
						    : shm_ring_scatter(xfer));
}

static int shm_xfer_prepare(struct net_xfer *net)
{
	return net->kind == XP_READ ? err_pass(shm_xfer_pull(shm_xfer_of(net))) : 0;
}

static bool shm_xfer_may_ask(const struct net_xfer *net)
{
	const struct shm_xfer *xfer = container_of(net, const struct shm_xfer, net);

	return shm_unsent(xfer->peer) < SHM_OUT_SOFT &&
	       (xfer->way != SHM_WAY_DIRECT || shm_flow_complete(xfer));
}

static int shm_xfer_ask(struct net_xfer *net)
{
	struct shm_xfer *xfer = shm_xfer_of(net);
	uint8_t body[SHM_REQUEST_BYTES], *owned = NULL;
	struct xp_op *op = net->op;
	struct cursor c;

	if (op->header_len > SHM_TAIL_MIN)
		owned = mem_steal(op->owned);
	cursor_write(&c, body, sizeof(body));
	cursor_put_u8(&c, xfer->way == SHM_WAY_DIRECT ? XP_CHECK : (uint8_t)net->kind);
	cursor_put_u64(&c, net->bytes);
	cursor_put_u32(&c, (uint32_t)op->header_len);
	shm_send(xfer->peer, &(struct shm_frame){.type = SHM_REQUEST,
						 .id = net->id,
						 .body = body,
						 .body_len = sizeof(body),
						 .tail = op->header,
						 .tail_len = op->header_len,
						 .owned = owned});
	return net->bytes > 0; /* they have arrived, or the peer may start */
}

/* The WRITE of this daemon that a frame names. */
static int write_of(struct shm_peer *peer, const struct shm_frame *f,
		    struct shm_xfer **xfer_p)
{
	struct net_xfer *net;
	int r = net_op_find(&peer->net, f->id, &net);

	if (r < 0)
		return err_pass(r);
	*xfer_p = shm_xfer_of(net);
	if (!net->asked || net->kind != XP_WRITE || net->bytes == 0 ||
	    (*xfer_p)->confirmed)
		return err_raise(ERR_PROTO, "not possible for this request");
	return 0;
}

int shm_on_stage(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_xfer *xfer;
	int r = write_of(peer, f, &xfer);

	(void)c;
	if (r == 0 && xfer->way != SHM_WAY_NONE)
		r = err_raise(ERR_PROTO, "twice");
	if (r < 0 || sm_state(&xfer->net.sm) != NET_XFER_MOVING)
		return err_pass(r); /* 0: our CANCEL was sent */
	if (shm_ring_gather(xfer) < 0)
		net_xfer_stop_last(&xfer->net);
	return 0;
}

int shm_on_progress(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	uint64_t bytes = cursor_get_u64(c);
	struct shm_xfer *xfer;
	int r = write_of(peer, f, &xfer);

	if (r == 0 && bytes > xfer->net.bytes)
		r = err_raise(ERR_PROTO, "%ju bytes of %ju", (uintmax_t)bytes,
			      (uintmax_t)xfer->net.bytes);
	if (r == 0)
		net_xfer_moved(&xfer->net, bytes, 0);
	return err_pass(r);
}

int shm_on_copied(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_xfer *xfer;
	int r = write_of(peer, f, &xfer);

	(void)c;
	if (r < 0 || sm_state(&xfer->net.sm) != NET_XFER_MOVING)
		return err_pass(r); /* 0: it must not count, our CANCEL was sent */
	if (xfer->way == SHM_WAY_GATHER && !shm_flow_complete(xfer))
		return err_raise(ERR_PROTO, "before all bytes were sent");
	xfer->confirmed = true;
	xfer->net.stop_sent = true; /* it cannot be undone */
	shm_xfer_say(xfer, SHM_CONFIRM);
	return 0;
}

int shm_on_done(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct net_xfer *net;
	struct err err;
	int r = net_op_find(&peer->net, f->id, &net);

	if (r < 0)
		return err_pass(r);
	shm_get_err(c, &err);
	r = cursor_check(c, "DONE");
	if (r < 0)
		return err_pass(r);
	if (err.code != ERR_OK)
		return err_pass(net_xfer_done(net, &err));
	if (net->kind == XP_WRITE && !shm_xfer_is_whole(net))
		return err_raise(ERR_PROTO,
				 "success reported for bytes that were not confirmed");
	if (sm_state(&net->sm) == NET_XFER_MOVING &&
	    shm_xfer_of(net)->way == SHM_WAY_SCATTER &&
	    shm_xfer_of(net)->next < net->bytes)
		return err_raise(ERR_PROTO,
				 "success reported for bytes that did not arrive");
	return err_pass(net_xfer_done(net, NULL));
}

/* ---- theirs ---- */

static int shm_xfer_refuse(struct net_peer *net, uint64_t id, const struct err *err)
{
	shm_send_err(container_of(net, struct shm_peer, net), SHM_DONE, id, err);
	return 0;
}

int shm_on_request(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	uint8_t kind = cursor_get_u8(c);
	uint64_t bytes = cursor_get_u64(c);
	size_t len;
	const void *header = cursor_get_blob(c, XP_HEADER_MAX, &len);
	cleanup_free uint8_t *memory = NULL;
	struct net_xfer *net;
	int r = cursor_check(c, "REQUEST");

	if (r == 0 && cursor_left(c) > 0)
		r = err_raise(ERR_PROTO, "%zu bytes too many", cursor_left(c));
	if (r == 0 && peer->held_bytes + len > NET_HEADERS_MAX)
		r = err_raise(ERR_PROTO, "too many bytes of headers at once (limit %u)",
			      NET_HEADERS_MAX);
	if (r < 0)
		return err_pass(r);
	memory = shm_wire_take_frame(peer, f->body_len);
	if (!memory)
		header = memory = mem_dup(header, len);
	r = net_inbound_new(&peer->net, f->id, kind, bytes, !memory, &net);
	if (r < 0 || !net)
		return err_pass(r);
	peer->held_bytes += len;
	shm_xfer_of(net)->held = len;
	net->in.owned = mem_steal(memory);
	if (kind == XP_CHECK)
		net->used.path = "read by the peer";
	net_request(net, header, len);
	return 0;
}

static int shm_xfer_begin(struct net_xfer *net)
{
	struct shm_xfer *xfer = shm_xfer_of(net);
	int r;

	if (net_is_source(net))
		return err_pass(shm_ring_gather(xfer));
	r = shm_xfer_pull(xfer);
	if (r == 0 && xfer->way == SHM_WAY_SCATTER)
		shm_xfer_say(xfer, SHM_STAGE);
	return err_pass(r);
}

int shm_on_confirm(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct net_xfer *net;
	int r = net_inbound_find(&peer->net, f->id, &net);

	(void)c;
	if (r < 0 || !net)
		return err_pass(r);
	if (!shm_xfer_of(net)->copied || shm_xfer_of(net)->confirmed)
		return err_raise(ERR_PROTO, "of a transfer that is not copied");
	shm_xfer_of(net)->confirmed = true;
	net_xfer_check(net);
	return 0;
}

int shm_on_cancel(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct net_xfer *net;
	struct err err;
	int r = net_inbound_find(&peer->net, f->id, &net);

	shm_get_err(c, &err);
	if (r == 0)
		r = cursor_check(c, "CANCEL");
	if (r < 0 || !net)
		return err_pass(r);
	if (err.code == ERR_OK || shm_xfer_of(net)->confirmed)
		return err_raise(ERR_PROTO, "of a transfer that is not open");
	net_xfer_stop(net, &err);
	return 0;
}

const struct net_ops shm_net_ops = {
	.peer_table = &shm_peer_table,
	.xfer_table = &xfer_table,
	.checks = true,
	.step = shm_peer_step,
	.flush = shm_peer_flush,
	.peer_free = shm_peer_free,
	.refuse = shm_xfer_refuse,
	.may_ask = shm_xfer_may_ask,
	.xfer_new = shm_xfer_new,
	.xfer_free = shm_xfer_free,
	.take_sides = shm_xfer_take_sides,
	.drop_sides = shm_xfer_drop_sides,
	.prepare = shm_xfer_prepare,
	.ask = shm_xfer_ask,
	.begin = shm_xfer_begin,
	.halt = shm_xfer_halt,
	.speak = shm_xfer_speak,
	.is_over = shm_xfer_is_over,
	.is_whole = shm_xfer_is_whole,
	.say_done = shm_xfer_say_done,
};
