/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two paths to a peer and one order.
 *
 * A message on the control line changes threads twice on each side, and each change waits
 * for a core; on the data line the loop writes and the other loop reads. Messages that an
 * engine waits for use the data line when it is open. The layers above must not notice
 * that: REGISTER precedes the TRANSFER_INFO that names its pool, and ABORT follows it. So
 * both paths share one sequence, and the receiver delivers in that order.
 *
 * Each path keeps its own order. So early messages wait in one queue per path, and the
 * queue that starts with the next number is due. A frame of the control line contains in
 * its flags how many messages before it used the other path: a gap that this does not
 * explain is a loss, detected at once, and ends the peering. The data line loses nothing
 * without its own end, and the two lines share one fate (handshake.c).
 *
 * The sender limits the waiting messages: PEER_EXPRESS_MAX messages that the remote has
 * not delivered, of PEER_EXPRESS_WINDOW bytes, and after the oldest of them BEHIND_FRAMES
 * and BEHIND_BYTES on the control line. A peer that sends more is disconnected. Early
 * express messages stay in the data line's memory.
 *
 * A message on this path proves nothing about the control line: liveness is determined by
 * PING.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/peer/peer_impl.h"

#define BEHIND_FRAMES 512u
#define BEHIND_BYTES (4u << 20)
/* PINGs and PONGs are sent beyond the limit */
#define EARLY_FRAMES_MAX (4u * BEHIND_FRAMES)

/* ---- out ---- */

void peer_express_open(struct peer *peer, const struct peer_express *express)
{
	struct peer_impl *impl = impl_of(peer);

	assert(express->send);
	if (sm_state(&peer->sm) == PEER_UP)
		impl->express = *express;
}

bool peer_express_full(const struct peer_impl *impl)
{
	unsigned int oldest = impl->express_first;

	return impl->express_out > 0 &&
	       (impl->cur.seq_out - impl->express_sent[oldest].sequence >=
			BEHIND_FRAMES ||
		impl->express_behind - impl->express_sent[oldest].behind >= BEHIND_BYTES);
}

bool peer_express_quiet(const struct peer *peer)
{
	return impl_of((struct peer *)peer)->express_out == 0;
}

static bool fits(const struct peer_impl *impl, enum wire_type type, size_t len)
{
	const bool rows = type == WIRE_T_ATTEND || type == WIRE_T_ATTENTION_RESULT;

	return impl->express.send &&
	       len <= (rows ? PEER_EXPRESS_ROWS_BYTES : PEER_EXPRESS_BYTES) &&
	       list_empty(&impl->queue) && impl->express_out < PEER_EXPRESS_MAX &&
	       impl->express_bytes + WIRE_HEADER_BYTES + len <= PEER_EXPRESS_WINDOW &&
	       !peer_express_full(impl);
}

static void peer_express_sent(struct peer_impl *impl, size_t size)
{
	unsigned int last =
		(impl->express_first + impl->express_out++) % PEER_EXPRESS_MAX;

	impl->express_sent[last].sequence = impl->cur.seq_out;
	impl->express_sent[last].behind = impl->express_behind;
	impl->express_bytes += size;
	impl->cur.seq_out++;
	impl->express_since++;
	impl->peer.messages_out++;
	impl->peers->stats.frames_out++;
	peer_note_use(impl);
}

/* `made`, if not NULL, contains the body, and is taken on success. */
static int send_express(struct peer_impl *impl, enum wire_type type, const void *body,
			uint8_t *made, size_t len)
{
	struct wire_header h = {.type = (uint16_t)type,
				.flags = made ? WIRE_FLAG_ROWS : 0,
				.epoch = impl->cur.epoch_out,
				.sequence = impl->cur.seq_out + 1,
				.body_len = (uint32_t)len};
	uint8_t *frame =
		made ? made + PEER_EXPRESS_HEAD - WIRE_HEADER_BYTES : impl->peers->frame;
	ssize_t size = peer_frame_make(impl, &impl->cur, &h, body, frame);
	int r = (int)size;

	if (size >= 0)
		r = made ? impl->express.send_made(impl->express.owner, made,
						   (size_t)size)
			 : impl->express.send(impl->express.owner, frame, (size_t)size);
	if (r < 0)
		return err_pass(r);
	peer_express_sent(impl, (size_t)size);
	return 0;
}

/* Sent by the express path; false: not possible, and nothing was changed. */
static bool peer_try_express(struct peer *peer, enum wire_type type, const void *body,
			     uint8_t *made, size_t len)
{
	struct peer_impl *impl = impl_of(peer);

	if (!fits(impl, type, len) || (made && !impl->express.send_made))
		return false;
	if (peer_check_send(impl, type, len) == 0 &&
	    send_express(impl, type, body, made, len) == 0)
		return true;
	err_clear();
	return false;
}

int peer_send_express(struct peer *peer, enum wire_type type, const void *body,
		      size_t len)
{
	if (peer_try_express(peer, type, body, NULL, len))
		return 0;
	return err_pass(peer_send_reliable(peer, type, body, len));
}

int peer_send_express_made(struct peer *peer, enum wire_type type, uint8_t *made,
			   size_t len)
{
	const uint8_t *body = made + PEER_EXPRESS_HEAD;
	int r;

	if (peer_try_express(peer, type, body, made, len))
		return 0;
	r = peer_send_reliable(peer, type, body, len);
	mem_free(made);
	return err_pass(r);
}

void peer_express_done(struct peer *peer, size_t len, const struct err *err)
{
	struct peer_impl *impl = impl_of(peer);
	bool was_full;

	if (sm_state(&peer->sm) != PEER_UP)
		return;
	was_full = peer_express_full(impl);
	if (impl->express_out > 0) { /* they are accepted in the order of sending */
		impl->express_out--;
		impl->express_first = (impl->express_first + 1) % PEER_EXPRESS_MAX;
	}
	impl->express_bytes -= len < impl->express_bytes ? len : impl->express_bytes;
	if (err)
		peer_mark_down(impl, err);
	else if (was_full && !peer_express_full(impl) && !list_empty(&impl->queue))
		peer_flush(impl);
}

/* ---- in ---- */

static bool peer_express_serves(const struct peer_impl *impl, uint64_t epoch)
{
	return sm_state(&impl->peer.sm) == PEER_UP && impl->peer.epoch == epoch &&
	       !impl->why_down.code;
}

static void peer_express_hand_up(struct peer_impl *impl, const struct wire_header *h,
				 struct cursor *body)
{
	struct wire_header up = *h;

	impl->cur.seq_in = h->sequence;
	if (h->type == WIRE_T_PING || h->type == WIRE_T_PONG)
		return;		     /* served on arrival */
	up.epoch = impl->peer.epoch; /* ours: the layers above compare it */
	impl->delivering = true;
	if (h->type == WIRE_T_PART)
		peer_part_take(impl, &up, body);
	else
		peer_deliver(impl, &up, body);
	impl->delivering = false;
}

static void early_free(struct peer_impl *impl, struct peer_message *msg)
{
	list_remove(&msg->link);
	impl->early_count--;
	impl->early_bytes -= sizeof(*msg) + msg->len;
	peer_unkeep(impl, sizeof(*msg) + msg->len);
	mem_free(msg);
}

static bool control_step(struct peer_impl *impl)
{
	struct peer_message *msg =
		list_first(&impl->early_control, struct peer_message, link);
	struct wire_header h = {.version = impl->cur.version};
	struct cursor body;

	if (!msg || msg->sequence != impl->cur.seq_in + 1)
		return false;
	list_remove(&msg->link);
	h.type = (uint16_t)msg->type;
	h.sequence = msg->sequence;
	h.epoch = impl->cur.epoch_in;
	h.body_len = (uint32_t)msg->len;
	memcpy(h.sender, impl->cur.instance, sizeof(h.sender));
	memcpy(h.target, impl->peers->instance, sizeof(h.target));
	cursor_read(&body, msg->body, msg->len);
	peer_express_hand_up(impl, &h, &body);
	early_free(impl, msg);
	return true;
}

static bool express_step(struct peer_impl *impl)
{
	struct peer_express_in *in =
		list_first(&impl->early_express, struct peer_express_in, link);
	struct wire_header h;
	struct cursor body;

	if (!in || in->header.sequence != impl->cur.seq_in + 1)
		return false;
	list_remove(&in->link);
	h = in->header;
	body = in->body;
	/* Called before delivery: the handler may end the peering, and with it the
	 * data line of the message. */
	in->on_taken(in); /* its bytes are valid until the end of this turn's step */
	peer_express_hand_up(impl, &h, &body);
	return true;
}

bool peer_early_pending(const struct peer_impl *impl)
{
	return sm_state(&impl->peer.sm) == PEER_UP &&
	       (!list_empty(&impl->early_control) || !list_empty(&impl->early_express));
}

void peer_early_deliver(struct peer_impl *impl)
{
	uint64_t epoch = impl->peer.epoch;

	assert(!impl->peer.self);
	if (impl->delivering)
		return; /* the active delivery continues */
	while (peer_express_serves(impl, epoch) &&
	       (control_step(impl) || express_step(impl))) {
		if (peer_early_pending(impl) && loop_enough(impl->peers->loop)) {
			loop_defer(impl->peers->loop, &impl->later);
			return;
		}
	}
}

static int peer_express_keep(struct peer_impl *impl, const struct wire_header *h,
			     const struct cursor *body)
{
	bool empty = h->type == WIRE_T_PING || h->type == WIRE_T_PONG;
	size_t len = empty ? 0 : cursor_left(body);
	struct peer_message *msg;
	int r;

	if (impl->early_count >= EARLY_FRAMES_MAX ||
	    impl->early_bytes > BEHIND_BYTES + 2 * impl->peers->options.message_bytes)
		return err_raise(ERR_PROTO, "%u messages wait for an earlier one",
				 impl->early_count);
	r = peer_keep(impl, sizeof(*msg) + len, false);
	if (r < 0)
		return err_pass(r);
	msg = mem_zalloc(sizeof(*msg) + len);
	if (!msg) {
		peer_unkeep(impl, sizeof(*msg) + len);
		return err_pass(-ENOMEM);
	}
	list_init(&msg->link);
	msg->type = (enum wire_type)h->type;
	msg->sequence = h->sequence;
	msg->len = len;
	if (len)
		memcpy(msg->body, body->base + body->pos, len);
	list_push_back(&impl->early_control, &msg->link);
	impl->early_count++;
	impl->early_bytes += sizeof(*msg) + len;
	return 0;
}

void peer_in_order(struct peer_impl *impl, const struct wire_header *h,
		   struct cursor *body)
{
	/* a handler may end this peering, and a new one may be up already */
	uint64_t epoch = impl->peer.epoch;
	struct err why;

	if (h->sequence <= impl->cur.seq_in) {
		err_set(&why, ERR_PROTO, "message %llu received on both connections",
			(unsigned long long)h->sequence);
		peer_bring_down(impl, &why, true);
		return;
	}
	/* While a handler runs the next message waits, too: it must not overtake the
	 * current one. Earlier ones may be due and wait for a turn's time only: no sender
	 * counts those, so each arrival delivers one, or as many as it needs the memory
	 * of: at most EARLY_FRAMES_MAX. */
	while (h->sequence != impl->cur.seq_in + 1 || impl->delivering) {
		if (peer_express_keep(impl, h, body) == 0) {
			peer_early_deliver(impl);
			return;
		}
		err_take(&why);
		if (impl->delivering || !(control_step(impl) || express_step(impl))) {
			peer_bring_down(impl, &why, true);
			return;
		}
		if (!peer_express_serves(impl, epoch))
			return;
	}
	peer_express_hand_up(impl, h, body);
	if (peer_express_serves(impl, epoch))
		peer_early_deliver(impl);
}

/* Does it belong to this peering, and is it the next on that path? */
static int check(struct peer_impl *impl, const struct wire_header *h)
{
	const struct peering *cur = &impl->cur;

	if (h->type <= WIRE_T_BYE)
		return err_raise(ERR_PROTO, "%s is not an express message",
				 wire_type_name(h->type));
	if (h->epoch != cur->epoch_in || h->from_epoch != cur->epoch_out ||
	    memcmp(h->sender, cur->instance, sizeof(h->sender)) != 0 ||
	    memcmp(h->target, impl->peers->instance, sizeof(h->target)) != 0)
		return err_raise(ERR_PROTO, "an express message of another peering");
	if (h->sequence <= cur->seq_in)
		return err_raise(ERR_PROTO, "express message %llu after %llu",
				 (unsigned long long)h->sequence,
				 (unsigned long long)cur->seq_in);
	return 0;
}

/* The data line keeps their order. */
static int line_up(struct peer_impl *impl, struct peer_express_in *in)
{
	const struct peer_express_in *last =
		list_last(&impl->early_express, struct peer_express_in, link);

	if (last && last->header.sequence >= in->header.sequence)
		return err_raise(ERR_PROTO, "express message %llu after %llu",
				 (unsigned long long)in->header.sequence,
				 (unsigned long long)last->header.sequence);
	list_push_back(&impl->early_express, &in->link);
	return 0;
}

int peer_express_arrived(struct peer *peer, struct peer_express_in *in, const void *frame,
			 size_t len)
{
	struct peer_impl *impl = impl_of(peer);
	int r;

	assert(in->on_taken);
	impl->peers->stats.frames_in++;
	if (sm_state(&peer->sm) != PEER_UP || impl->why_down.code)
		return err_raise(ERR_PEER, "peer %s is not up", peer->shown);
	r = wire_frame_get(frame, len, &in->header, &in->body);
	if (r == 0)
		r = check(impl, &in->header);
	if (r == 0)
		r = line_up(impl, in);
	if (r < 0) {
		impl->peers->stats.bad_frames++;
		return err_pass(r);
	}
	peer_early_deliver(impl);
	return 0;
}

/* ---- the end of an epoch ---- */

void peer_express_end(struct peer_impl *impl)
{
	struct peer_message *msg;

	impl->express = (struct peer_express){0};
	impl->express_out = impl->express_since = 0;
	impl->express_bytes = 0;
	impl->express_first = 0;
	while (list_pop_front(&impl->early_express))
		; /* their owner has them */
	while ((msg = list_first(&impl->early_control, struct peer_message, link)))
		early_free(impl, msg);
}
