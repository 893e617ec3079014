/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peer messages on the data line (peer_express.c): each is a WRITE without bytes, which
 * every transport keeps in order, with the frame as its header. They bypass the
 * scheduler: they are few, PEER_EXPRESS_MAX a peer, and latency-critical. A message of
 * query rows is large; it is built where the transport reads it.
 *
 * Acceptance of a message is reported with the next message in that direction, or LATE_NS
 * later: a frame of its own would wake the remote for nothing urgent, as its limit is far
 * above LATE_MAX messages of LATE_BYTES.
 *
 * A message that arrived early is not acknowledged before its delivery, so the sender's
 * limit also bounds the messages that wait here. It waits in a slot that was allocated
 * with the line: accepting a message needs no memory. A message that is lost for lack of
 * memory ends the peering, as any lost message does.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/handshake/handshake_impl.h"

#define LATE_NS (20 * LOOP_NS_PER_MS)
#define LATE_MAX (PEER_EXPRESS_MAX / 4)
#define LATE_BYTES (PEER_EXPRESS_WINDOW / 32)

/* A received message. */
struct express_in {
	struct inbound_owner inbound;
	struct peer_express_in arrived;
	struct xp_inbound *in;
	struct remote *remote;
	struct list free; /* in remote->express.free, or express_late */
};

/* A message being sent. */
struct express_out {
	struct xp_op op;
	struct remote *remote;
	uint64_t epoch;
	size_t frame_len;
	uint8_t header[];
};

/* ---- acknowledgements ---- */

static void express_tell(struct remote *remote)
{
	struct list *link;

	loop_timer_stop(&remote->express.tell);
	remote->express.late_count = 0;
	remote->express.late_bytes = 0;
	while ((link = list_pop_front(&remote->express.late))) {
		struct express_in *slot = list_entry(link, struct express_in, free);
		struct xp_sides nothing = {0};

		remote->transport->ops->land(slot->in, &nothing, NULL);
	}
}

static void express_on_late(struct loop_timer *timer)
{
	express_tell(container_of(timer, struct remote, express.tell));
}

static void on_taken(struct peer_express_in *arrived)
{
	struct express_in *slot = container_of(arrived, struct express_in, arrived);
	struct remote *remote = slot->remote;

	if (remote->express.late_count++ == 0)
		loop_timer_start(&remote->express.tell, LATE_NS);
	list_push_back(&remote->express.late, &slot->free);
	remote->express.late_bytes += slot->in->header_len;
	if (remote->express.late_count >= LATE_MAX ||
	    remote->express.late_bytes > LATE_BYTES)
		express_tell(remote);
}

/* ---- out ---- */

static void handshake_express_on_sent(struct xp_op *op)
{
	struct express_out *out = container_of(op, struct express_out, op);
	struct remote *remote = out->remote;
	struct err why;

	if (op->result < 0) /* as in on_peer_lost(): a room reports its first error */
		err_set(&why, op->err.code, "%.100s: data connection lost: %s",
			remote->label, op->err.text);
	/* its line still carries its peering */
	if (remote->ready && sm_state(&remote->peer->sm) == PEER_UP &&
	    remote->peer->epoch == out->epoch)
		peer_express_done(remote->peer, out->frame_len,
				  op->result < 0 ? &why : NULL);
	mem_free_large(op->owned, op->header_len);
	mem_free(out);
}

/* Send a copy of `frame`, or `made` with the frame in it. */
static int express_post(struct remote *remote, const void *frame, uint8_t *made,
			size_t len)
{
	struct express_out *out;
	int r;

	if (!remote->ready)
		return err_raise(ERR_PEER, "%s: no data connection", remote->label);
	out = mem_alloc(sizeof(*out) + (made ? 0 : 1 + len));
	if (!out)
		return err_pass(-ENOMEM);
	*out = (struct express_out){
		.op = {.kind = XP_WRITE,
		       .header = made ? made + PEER_EXPRESS_LINE : out->header,
		       .header_len = 1 + len,
		       .owned = made,
		       .on_done = handshake_express_on_sent},
		.remote = remote,
		.epoch = remote->peer->epoch,
		.frame_len = len,
	};
	express_tell(remote);
	if (made) {
		made[PEER_EXPRESS_LINE] = REQUEST_MESSAGE;
	} else {
		out->header[0] = REQUEST_MESSAGE;
		memcpy(out->header + 1, frame, len);
	}
	r = remote->transport->ops->post(remote->xp, &out->op);
	if (r < 0)
		mem_free(out);
	return err_pass(r);
}

static int express_send(void *owner, const void *frame, size_t len)
{
	return err_pass(express_post(owner, frame, NULL, len));
}

/* The transport may keep the memory: long messages are not copied here. */
static int express_send_made(void *owner, uint8_t *made, size_t len)
{
	return err_pass(express_post(owner, NULL, made, len));
}

int handshake_send_made(struct remote *remote, enum wire_type type, uint8_t *made,
			size_t len)
{
	assert(made);
	return err_pass(peer_send_express_made(remote->peer, type, made, len));
}

void express_line_ready(struct remote *remote)
{
	struct peer_express express = {
		.owner = remote, .send = express_send, .send_made = express_send_made};

	if (remote->express.in)
		peer_express_open(remote->peer, &express);
}

bool handshake_quiet(const struct handshake *hs)
{
	const struct remote *remote;

	list_foreach(remote, &hs->remotes, link) {
		if (!peer_express_quiet(remote->peer))
			return false;
	}
	return true;
}

/* ---- in ---- */

/* Answered, or its line was lost. */
static void on_gone(struct inbound_owner *inbound, const struct err *err)
{
	struct express_in *slot = container_of(inbound, struct express_in, inbound);

	(void)err;
	list_remove(&slot->arrived.link);
	list_remove(&slot->free); /* not acknowledged yet, and the peer is lost */
	list_push_back(&slot->remote->express.free, &slot->free);
}

int express_init(struct remote *remote)
{
	assert(!remote->express.in);
	if (remote->peer->self)
		return 0;
	remote->express.in = mem_calloc(PEER_EXPRESS_MAX, sizeof(*remote->express.in));
	if (!remote->express.in)
		return err_pass(-ENOMEM);
	loop_timer_init(&remote->express.tell, remote->kvd->loop, express_on_late);
	for (unsigned int i = 0; i < PEER_EXPRESS_MAX; i++) {
		struct express_in *slot = &remote->express.in[i];

		slot->inbound.on_done = on_gone;
		slot->arrived.on_taken = on_taken;
		list_init(&slot->arrived.link);
		slot->remote = remote;
		list_push_back(&remote->express.free, &slot->free);
	}
	return 0;
}

void express_fini(struct remote *remote)
{
	list_init(&remote->express.free);
	list_init(&remote->express.late);
	remote->express.late_count = 0;
	remote->express.late_bytes = 0;
	loop_timer_stop(&remote->express.tell);
	mem_free(remote->express.in);
	remote->express.in = NULL;
}

void express_request(struct remote *remote, struct xp_inbound *in)
{
	struct express_in *slot =
		list_first(&remote->express.free, struct express_in, free);
	const uint8_t *frame = (const uint8_t *)in->header + 1;
	struct err why;
	int r;

	assert(express_is(in));
	if (slot) {
		list_remove(&slot->free);
		slot->in = in;
		in->owner = &slot->inbound;
		r = peer_express_arrived(remote->peer, &slot->arrived, frame,
					 in->header_len - 1);
	} else {
		r = err_raise(ERR_PROTO, "more than %u express messages in flight",
			      PEER_EXPRESS_MAX);
	}
	if (r >= 0)
		return;
	/* from the real peer it ends the peering; a forger gains nothing */
	err_take(&why);
	remote->transport->ops->land(in, NULL, &why);
}
