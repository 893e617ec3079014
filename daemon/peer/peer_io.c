/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames in and out.
 *
 * In. A sender must know the epoch that this daemon generated for it and sent to no
 * other: the epoch identifies the peering, and then the sender's epoch, its instance and
 * its key's user must agree. So a frame of an unknown sender costs one look-up in a hash
 * chain. Within an epoch the sequence has no gaps: a repeated number is a replay and is
 * dropped; a gap means that the line lost frames when it broke. A peering that lost
 * frames is useless, because operations above wait for them, so it ends, and a new one
 * starts clean.
 *
 * Out. Two kinds of messages keep one order: reliable messages wait in a bounded queue
 * when the line is full, and as long as that queue is not empty unreliable ones are
 * refused. PING and PONG overtake; they have no order.
 *
 * A third path, express, is in peer_express.c. Messages that are too long for a turn use
 * the same queue, part by part (peer_parts.c).
 *
 * The self peer has no line: its messages wait in the same queue and are delivered in the
 * next turn, so that on_message is never entered from peer_send.
 */
#include "daemon/peer/peer_impl.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define FLUSH_RETRY_NS (5 * LOOP_NS_PER_MS)

/* ---- out ---- */

ssize_t peer_frame_make(struct peer_impl *impl, const struct peering *peering,
			const struct wire_header *h, const void *body, uint8_t *frame)
{
	struct peers *peers = impl->peers;
	struct wire_header full = *h;

	if (WIRE_HEADER_BYTES + h->body_len > peers->options.message_bytes)
		return err_raise(ERR_TOOBIG, "%s: frame of %u bytes (limit %zu)",
				 wire_type_name(h->type), WIRE_HEADER_BYTES + h->body_len,
				 peers->options.message_bytes);
	memcpy(full.sender, peers->instance, sizeof(full.sender));
	if (peering->heard && h->type != WIRE_T_HELLO)
		memcpy(full.target, peering->instance, sizeof(full.target));
	if (!full.version)
		full.version = peering->version;
	if (h->type > WIRE_T_WELCOME)
		full.from_epoch = peering->epoch_in;
	wire_frame_put(frame, &full, body);
	return (ssize_t)(WIRE_HEADER_BYTES + full.body_len);
}

int peer_frame_send(struct peer_impl *impl, const struct peering *peering,
		    const struct wire_header *h, const void *body)
{
	struct peers *peers = impl->peers;
	ssize_t len;
	int r;

	if (!impl->line)
		return err_raise(ERR_LIMIT, "peer %s: no connection", impl->peer.shown);
	len = peer_frame_make(impl, peering, h, body, peers->frame);
	if (len < 0)
		return err_pass((int)len);
	r = peers->link->ops->send(impl->line, peers->frame, (size_t)len);
	if (r < 0)
		return err_pass(r);
	peers->stats.frames_out++;
	return 0;
}

int peer_send_now(struct peer_impl *impl, enum wire_type type, const void *body,
		  size_t len)
{
	struct wire_header h = {.type = (uint16_t)type,
				.flags = impl->express_since,
				.epoch = impl->cur.epoch_out,
				.sequence = impl->cur.seq_out + 1,
				.body_len = (uint32_t)len};
	int r = peer_frame_send(impl, &impl->cur, &h, body);

	if (r < 0)
		return err_pass(r);
	impl->cur.seq_out++;
	impl->express_since = 0;
	impl->express_behind += WIRE_HEADER_BYTES + len;
	impl->peer.messages_out++;
	return 0;
}

size_t peer_bye_frame(struct peers *peers, const struct peering *peering,
		      const uint8_t target[16], uint64_t epoch, uint32_t code,
		      const char *text, uint8_t frame[PEER_BYE_FRAME_MAX])
{
	struct wire_header h = {.version = WIRE_VERSION_MIN,
				.type = WIRE_T_BYE,
				.epoch = epoch,
				.from_epoch = peering ? peering->epoch_in : 0};
	struct wire_bye m = {.code = code};
	uint8_t body[PEER_BYE_FRAME_MAX - WIRE_HEADER_BYTES];
	struct cursor c;

	assert(code != ERR_OK);
	memcpy(h.sender, peers->instance, sizeof(h.sender));
	memcpy(h.target, target, sizeof(h.target));
	strncpy(m.text, text, sizeof(m.text) - 1);
	cursor_write(&c, body, sizeof(body));
	if (wire_bye_put(&c, &m) < 0)
		assert(!"a BYE fits: its text is bounded");
	h.body_len = (uint32_t)c.pos;
	wire_frame_put(frame, &h, body);
	return WIRE_HEADER_BYTES + c.pos;
}

void peer_note_use(struct peer_impl *impl)
{
	impl->used_ns = loop_now_ns(impl->peers->loop);
	if (impl->quiet)
		peer_wake(impl);
}

int peer_check_send(const struct peer_impl *impl, enum wire_type type, size_t len)
{
	const struct peer *peer = &impl->peer;

	assert(type > WIRE_T_BYE && type < WIRE_T_END);
	if (sm_state(&peer->sm) != PEER_UP || impl->why_down.code)
		return err_raise(ERR_PEER, "peer %s is not up", peer->shown);
	if (len > wire_body_cap(type) ||
	    WIRE_HEADER_BYTES + len > impl->peers->options.message_bytes)
		return err_raise(ERR_TOOBIG, "%s: body of %zu bytes exceeds the limit",
				 wire_type_name(type), len);
	return 0;
}

static void flush(struct peer_impl *impl, bool paced);

static int peer_io_check_room(struct peer_impl *impl, size_t cost)
{
	const size_t cap = impl->peers->options.queue_bytes;

	/* parts wait for turns, not for the line */
	if (cost > cap - impl->queue_bytes && !impl->peer.self)
		flush(impl, false);
	if (cost <= cap - impl->queue_bytes)
		return 0;
	return err_raise(ERR_LIMIT, "peer %s: %zu bytes queued (limit %zu)",
			 impl->peer.shown, impl->queue_bytes, cap);
}

bool peer_has_spare(const struct peer *peer, size_t len)
{
	const struct peer_impl *impl = impl_of((struct peer *)peer);

	return impl->queue_bytes + len <= impl->peers->options.queue_bytes / 2;
}

/* Bytes charged to the queue. A message to this daemon itself in memory of the sender
 * was allocated before: all of its rooms may send one in one turn, and none of them
 * must fail for that. */
static size_t cost_of(const struct peer_impl *impl, bool owned, size_t len)
{
	return sizeof(struct peer_message) + (owned && impl->peer.self ? 0 : len);
}

/* An owned body belongs to the queue on success. */
static int queue_push(struct peer_impl *impl, enum wire_type type, const void *body,
		      uint8_t *owned, size_t len)
{
	const size_t cost = cost_of(impl, owned != NULL, len);
	struct peer_message *msg;
	int r = peer_io_check_room(impl, cost);

	if (r < 0)
		return err_pass(r);
	msg = mem_zalloc(sizeof(*msg) + (owned ? 0 : len));
	if (!msg)
		return err_pass(-ENOMEM);
	msg->type = type;
	msg->len = len;
	msg->owned = owned;
	if (!owned && len)
		memcpy(msg->body, body, len);
	list_push_back(&impl->queue, &msg->link);
	impl->queue_bytes += cost;
	return 0;
}

static const uint8_t *body_of(const struct peer_message *msg)
{
	return msg->owned ? msg->owned : msg->body;
}

static void message_free(struct peer_message *msg)
{
	mem_free_large(msg->owned, msg->len);
	mem_free(msg);
}

static struct peer_message *queue_pop(struct peer_impl *impl)
{
	struct peer_message *msg = list_first(&impl->queue, struct peer_message, link);

	if (msg) {
		list_remove(&msg->link);
		impl->queue_bytes -= cost_of(impl, msg->owned != NULL, msg->len);
	}
	return msg;
}

void peer_queue_drop(struct peer_impl *impl)
{
	struct peer_message *msg;

	loop_timer_stop(&impl->flush);
	while ((msg = queue_pop(impl)))
		message_free(msg);
}

/* The answer to the latest PING; negative while the line is full. */
static int pong(struct peer_impl *impl)
{
	struct wire_pong m = {.stamp = impl->pong_pending};
	uint8_t buf[16];
	struct cursor c;

	cursor_write(&c, buf, sizeof(buf));
	if (wire_pong_put(&c, &m) < 0 ||
	    peer_send_now(impl, WIRE_T_PONG, buf, c.pos) < 0) {
		err_clear();
		return -EAGAIN;
	}
	impl->pong_pending = 0;
	return 0;
}

/* Until the line is full, or (paced) a part of a long message has been sent, or the turn
 * has no more time. */
static void flush(struct peer_impl *impl, bool paced)
{
	struct peer_message *msg;

	if (impl->pong_pending)
		(void)pong(impl);
	while (!peer_express_full(impl) &&
	       (msg = list_first(&impl->queue, struct peer_message, link))) {
		bool part = peer_goes_in_parts(impl, msg);
		int r = part ? peer_part_send(impl, msg)
			     : peer_send_now(impl, msg->type, body_of(msg), msg->len);

		if (r < 0) {
			err_clear();
			break;
		}
		if (!part || r > 0)
			message_free(queue_pop(impl));
		if (paced && !list_empty(&impl->queue) &&
		    (part || loop_enough(impl->peers->loop))) {
			loop_defer(impl->peers->loop, &impl->later);
			return;
		}
	}
	if (list_empty(&impl->queue) && !impl->pong_pending)
		loop_timer_stop(&impl->flush);
	else
		loop_timer_start(&impl->flush, FLUSH_RETRY_NS);
}

void peer_flush(struct peer_impl *impl)
{
	if (!impl->peer.self && sm_state(&impl->peer.sm) == PEER_UP)
		flush(impl, true);
}

static int peer_self_send(struct peer_impl *impl, enum wire_type type, const void *body,
			  size_t len)
{
	int r = queue_push(impl, type, body, NULL, len);

	if (r < 0)
		return err_pass(r);
	impl->peer.messages_out++;
	loop_defer(impl->peers->loop, &impl->later);
	return 0;
}

int peer_send(struct peer *peer, enum wire_type type, const void *body, size_t len)
{
	struct peer_impl *impl = impl_of(peer);
	int r = peer_check_send(impl, type, len);

	assert(body || len == 0);
	if (r < 0)
		return err_pass(r);
	peer_note_use(impl);
	if (peer->self)
		return err_pass(peer_self_send(impl, type, body, len));
	if (!list_empty(&impl->queue) || peer_express_full(impl))
		return err_raise(ERR_LIMIT, "peer %s: older messages are queued",
				 peer->shown);
	return err_pass(peer_send_now(impl, type, body, len));
}

static int send_or_queue(struct peer_impl *impl, enum wire_type type, const void *body,
			 size_t len)
{
	int r;

	if (impl->peer.self)
		return err_pass(peer_self_send(impl, type, body, len));
	if (list_empty(&impl->queue) && !peer_express_full(impl) &&
	    peer_send_now(impl, type, body, len) == 0)
		return 0;
	err_clear();
	r = queue_push(impl, type, body, NULL, len);
	if (r == 0 && !loop_timer_running(&impl->flush))
		loop_timer_start(&impl->flush, FLUSH_RETRY_NS);
	return err_pass(r);
}

int peer_send_reliable(struct peer *peer, enum wire_type type, const void *body,
		       size_t len)
{
	struct peer_impl *impl = impl_of(peer);
	struct err why;
	int r = peer_check_send(impl, type, len);

	assert(body || len == 0);
	if (r < 0)
		return err_pass(r);
	peer_note_use(impl);
	r = send_or_queue(impl, type, body, len);
	if (r < 0) {
		/* an accepted message cannot be sent: the peering ends */
		why = *err_last();
		peer_mark_down(impl, &why);
	}
	return err_pass(r);
}

static int send_long(struct peer_impl *impl, enum wire_type type, uint8_t *owned,
		     size_t len)
{
	int r = queue_push(impl, type, NULL, owned, len);

	if (r < 0)
		return err_pass(r);
	impl->peer.messages_out += impl->peer.self;
	loop_defer(impl->peers->loop, &impl->later);
	return 0;
}

int peer_send_owned(struct peer *peer, enum wire_type type, uint8_t *owned, size_t len)
{
	struct peer_impl *impl = impl_of(peer);
	struct peer_message long_one = {.owned = owned, .len = len};
	struct err why;
	int r;

	assert(owned);
	if (!peer->self && !peer_goes_in_parts(impl, &long_one)) {
		r = peer_send_reliable(peer, type, owned, len);
		mem_free(owned);
		return err_pass(r);
	}
	r = peer_check_send(impl, type, len);
	if (r >= 0) {
		peer_note_use(impl);
		r = send_long(impl, type, owned, len);
		if (r < 0) {
			why = *err_last();
			peer_mark_down(impl, &why);
		}
	}
	if (r < 0)
		mem_free(owned);
	return err_pass(r);
}

/* ---- in ---- */

static void on_ping(struct peer_impl *impl, struct cursor *body)
{
	struct wire_ping ping;

	if (wire_ping_get(body, &ping) < 0) {
		err_clear();
		return;
	}
	impl->pong_pending = ping.stamp;
	if (pong(impl) < 0 && !loop_timer_running(&impl->flush))
		loop_timer_start(&impl->flush, FLUSH_RETRY_NS);
}

static void on_pong(struct peer_impl *impl, struct cursor *body)
{
	struct wire_pong pong;

	if (wire_pong_get(body, &pong) < 0) {
		err_clear();
		return;
	}
	/* both directions were open then; a ping that was not sent proves nothing */
	if (pong.stamp > impl->proven_ns && pong.stamp <= impl->ping_stamp)
		impl->proven_ns = pong.stamp;
	/* only the stamp of the last PING: the measurement is ours, not the peer's */
	if (!impl->ping_open || pong.stamp != impl->ping_stamp)
		return;
	impl->ping_open = false;
	impl->peer.rtt_ns = loop_clock_ns(impl->peers->loop) - impl->ping_stamp;
	if (impl->quiet)
		peer_rest(impl);
}

uint8_t *peer_body_take(struct peer *peer)
{
	struct peer_impl *impl = impl_of(peer);

	return mem_steal(impl->handed);
}

void peer_deliver_owned(struct peer_impl *impl, const struct wire_header *h,
			struct cursor *body, uint8_t *owned)
{
	assert(!impl->handed);
	impl->handed = owned;
	peer_deliver(impl, h, body);
	mem_free(impl->handed);
	impl->handed = NULL;
}

void peer_deliver(struct peer_impl *impl, const struct wire_header *h,
		  struct cursor *body)
{
	const struct peers_callbacks *callbacks = &impl->peers->callbacks;
	uint64_t epoch = impl->peer.epoch;
	struct err why;

	assert(sm_state(&impl->peer.sm) == PEER_UP);
	impl->peer.messages_in++;
	peer_note_use(impl);
	if (!callbacks->on_message ||
	    callbacks->on_message(callbacks->owner, &impl->peer, h, body) >= 0)
		return;
	err_take(&why);
	if (sm_state(&impl->peer.sm) == PEER_UP && impl->peer.epoch == epoch)
		peer_kill(&impl->peer, &why);
}

void peer_self_deliver(struct peer_impl *impl)
{
	uint64_t epoch = impl->peer.epoch;
	struct list *last = impl->queue.prev;
	struct peer_message *msg;
	bool more = true;

	assert(impl->peer.self);
	/* messages sent by a handler belong to the next turn */
	while (more && sm_state(&impl->peer.sm) == PEER_UP && impl->peer.epoch == epoch &&
	       (msg = queue_pop(impl))) {
		struct wire_header h = {.version = WIRE_VERSION_MAX,
					.type = (uint16_t)msg->type,
					.epoch = epoch,
					.sequence = impl->peer.messages_in + 1,
					.body_len = (uint32_t)msg->len};
		struct cursor body;

		more = &msg->link != last;
		memcpy(h.sender, impl->peers->instance, sizeof(h.sender));
		memcpy(h.target, impl->peers->instance, sizeof(h.target));
		cursor_read(&body, body_of(msg), msg->len);
		peer_deliver_owned(impl, &h, &body, mem_steal(msg->owned));
		message_free(msg);
	}
	if (!list_empty(&impl->queue))
		loop_defer(impl->peers->loop, &impl->later);
}

static void end_for_gap(struct peer_impl *impl, struct peering *peering,
			uint64_t sequence)
{
	char label[PEER_LABEL_MAX];
	struct err why;

	err_set(&why, ERR_TRANSPORT, "%s: the connection broke and lost %llu messages",
		peer_label(&impl->peer, label),
		(unsigned long long)(sequence - peering->control_in - 1));
	if (peering == &impl->cur)
		peer_bring_down(impl, &why, true);
	else
		peer_attempt_failed(impl, &why);
}

/* A frame of a peering's epoch, from its instance and user. */
static void on_peering_frame(struct peer_impl *impl, struct peering *peering,
			     const struct wire_header *h, struct cursor *body)
{
	/* number of express messages just before it: only they may be missing here */
	uint64_t skipped = h->flags;

	if (h->sequence <= peering->control_in) {
		impl->peers->stats.replays++;
		return;
	}
	if (h->sequence != peering->control_in + 1 + skipped) {
		end_for_gap(impl, peering, h->sequence - skipped);
		return;
	}
	peering->control_in = h->sequence;
	/* it knows the contents of our WELCOME: the attempt is proven */
	if (peering == &impl->next && !peer_bring_up(impl))
		return;
	if (sm_state(&impl->peer.sm) != PEER_UP || impl->why_down.code)
		return; /* on_up ended it */
	impl->received_ns = loop_now_ns(impl->peers->loop);
	/* these two have no order; express messages may be slower */
	if (h->type == WIRE_T_PING)
		on_ping(impl, body);
	else if (h->type == WIRE_T_PONG)
		on_pong(impl, body);
	peer_in_order(impl, h, body);
}

static void on_epoch_frame(struct peers *peers, const struct wire_header *h,
			   struct cursor *body, const char *user)
{
	struct peering *peering = peering_find(peers, h->epoch);

	if (!peering || !peering->heard || h->from_epoch != peering->epoch_out ||
	    memcmp(peering->instance, h->sender, sizeof(h->sender)) != 0) {
		peers->stats.stale_frames++;
		return;
	}
	if (strcmp(peering->user, user) != 0) {
		peers->stats.foreign_user++;
		log_warn("peer", peering->endpoint, "frame from the owner of another key",
			 "expected='%s' got='%s'", peering->user, user);
		return;
	}
	if (peers->link->unproven)
		peer_vouch(peers);
	on_peering_frame(peering->owner, peering, h, body);
}

void peer_vouch(struct peers *peers)
{
	if (peers->link->ops->vouch)
		peers->link->ops->vouch(peers->link);
}

void peer_on_frame(void *owner, const struct link_frame *frame)
{
	static const uint8_t nobody[16];
	struct peers *peers = owner;
	struct wire_header h;
	struct cursor body;
	const uint8_t *target;

	peers->stats.frames_in++;
	if (peers->closing)
		return;
	if (wire_frame_get(frame->data, frame->len, &h, &body) < 0) {
		peers->stats.bad_frames++;
		log_warn("peer", frame->user[0] ? frame->user : NULL, "bad frame",
			 "why='%s'", err_last()->text);
		err_clear();
		return;
	}
	target = h.type == WIRE_T_HELLO ? nobody : peers->instance;
	if (memcmp(h.target, target, sizeof(h.target)) != 0) {
		peers->stats.stale_frames++;
		return;
	}
	if (h.type == WIRE_T_HELLO)
		peer_on_hello(peers, &h, &body, frame->user);
	else if (h.type == WIRE_T_WELCOME)
		peer_on_welcome(peers, &h, &body, frame->user);
	else if (h.type == WIRE_T_BYE)
		peer_on_bye(peers, &h, &body, frame->user);
	else
		on_epoch_frame(peers, &h, &body, frame->user);
}
