/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A transfer's bytes, as the loop and the I/O threads share them.
 *
 * A flow is one side of a transfer's plan. While it is open, threads claim stretches of
 * it to send, or find it by the id that a frame names, and hold it for the time of one
 * system call or copy: that is a pin. Closing a flow releases it from every half of a
 * stream that does not hold it at that moment; the others release it when their call
 * ends, and calls here never block. So a flow is quiesced as soon as its pins are
 * released, regardless of the peer: that is the fence.
 *
 * The half then completes the frame: a sender pads it with zeros and marks it void, a
 * receiver discards the rest. The stream continues. A source notes when bytes of it
 * cannot count any more, because they were never claimed or their frame was void: then no
 * answer of the peer is needed to know that the transfer cannot succeed there.
 *
 * Sources of a peer take turns, a frame each, over all of its streams: a large room
 * starves no small one, and a single room uses them all.
 */
#include "daemon/transport/tcp/tcp_impl.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>

#include "daemon/base/clock.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/memory/release.h"

#define STREAMING_BYTES (UINT64_C(2) << 20) /* larger than a core's cache */

/* ---- made and unmade, on the loop ---- */

static int take_buffer(struct tcp_flow *flow, const struct xp_buffer *buffer)
{
	struct copy_buffer *own = &flow->buffers[flow->side.count];
	const struct xp_reg_base *reg = (const void *)buffer->reg;

	*own = (struct copy_buffer){.offset = buffer->offset, .length = buffer->length};
	if (!reg) {
		own->length = 0;
		flow->side.count++;
		return 0;
	}
	if (!flow->side.is_src && reg->memory->kind != MEMORY_VM &&
	    !reg->memory->writable)
		return err_raise(ERR_PERM, "buffer %u is read-only", flow->side.count);
	own->memory = memory_ref(reg->memory);
	flow->guarded |= own->memory->kind == MEMORY_GUARDED;
	flow->side.count++;
	return 0;
}

int tcp_flow_init(struct tcp_flow *flow, struct tcp_peer *peer, const struct plan *plan,
		  const struct xp_buffer *buffers, uint32_t count, bool is_src)
{
	int r = xp_holes_check(plan, buffers, is_src);

	*flow = (struct tcp_flow){.peer = peer, .bytes = plan->bytes};
	list_init(&flow->turn);
	list_init(&flow->events);
	if (r < 0)
		return err_pass(r);
	flow->buffers = mem_calloc(count, sizeof(*flow->buffers));
	if (!flow->buffers)
		return err_pass(-ENOMEM);
	flow->side = (struct stage_side){
		.plan = plan,
		.buffers = flow->buffers,
		.is_src = is_src,
		.streaming = plan->bytes >= STREAMING_BYTES,
	};
	while (r == 0 && flow->side.count < count)
		r = take_buffer(flow, &buffers[flow->side.count]);
	if (r < 0) {
		tcp_flow_fini(flow);
		return err_pass(r);
	}
	/* this daemon's reads of memory that may be truncated need the copy's guard */
	flow->direct = stage_mapped(&flow->side) &&
		       !(flow->guarded && peer->crypto != TCP_CRYPTO_NONE);
	return 0;
}

void tcp_flow_fini(struct tcp_flow *flow)
{
	if (!flow->peer)
		return;
	pthread_mutex_lock(&flow->peer->lock);
	assert(!flow->open && flow->pins == 0);
	list_remove(&flow->turn);
	list_remove(&flow->events);
	pthread_mutex_unlock(&flow->peer->lock);
	for (uint32_t i = 0; i < flow->side.count; i++)
		if (flow->buffers[i].memory)
			memory_release(flow->peer->transport->net.base.env.offload,
				       flow->buffers[i].memory);
	spans_fini(&flow->came);
	mem_free(flow->buffers);
	flow->buffers = NULL;
	flow->peer = NULL;
}

/* ---- start and stop, on the loop ---- */

int tcp_flow_send(struct tcp_flow *flow)
{
	struct tcp_peer *peer = flow->peer;
	uint64_t frames = (flow->bytes + TCP_DATA_MAX - 1) / TCP_DATA_MAX;

	pthread_mutex_lock(&peer->lock);
	flow->open = true;
	list_push_back(&peer->sources, &flow->turn);
	for (unsigned int i = 0; i < peer->stream_count && frames > 0; i++) {
		struct tcp_stream *stream = &peer->streams[i];

		if (!stream->idle)
			continue;
		stream->idle = false;
		tcp_io_kick(stream);
		frames--;
	}
	pthread_mutex_unlock(&peer->lock);
	return 0;
}

int tcp_flow_receive(struct tcp_flow *flow)
{
	struct tcp_peer *peer = flow->peer;
	int r;

	pthread_mutex_lock(&peer->lock);
	r = idmap_put(&peer->sinks[flow->ours], flow->id, flow);
	flow->open = r == 0;
	pthread_mutex_unlock(&peer->lock);
	return err_pass(r);
}

/* The lock is held. */
static void flow_close(struct tcp_flow *flow)
{
	struct tcp_peer *peer = flow->peer;

	flow->open = false;
	list_remove(&flow->turn);
	if (flow->side.is_src)
		flow->spoiled |= flow->next < flow->bytes;
	else
		idmap_remove(&peer->sinks[flow->ours], flow->id);
}

void tcp_flow_stop(struct tcp_flow *flow)
{
	struct tcp_peer *peer = flow->peer;

	pthread_mutex_lock(&peer->lock);
	if (flow->open)
		flow_close(flow);
	for (unsigned int i = 0; i < peer->stream_count; i++) {
		struct tcp_stream *stream = &peer->streams[i];
		struct tcp_half *half = flow->side.is_src ? &stream->tx : &stream->rx;

		if (half->flow == flow && !half->busy)
			(void)tcp_half_hold(half, flow->side.is_src);
	}
	pthread_mutex_unlock(&peer->lock);
}

void tcp_flow_look(struct tcp_flow *flow, struct tcp_flow_view *view_p)
{
	pthread_mutex_lock(&flow->peer->lock);
	*view_p = (struct tcp_flow_view){
		.quiesced = !flow->open && flow->pins == 0,
		.spoiled = flow->spoiled,
		.next = flow->next,
		.moved = flow->moved,
		.first_ns = flow->first_ns,
		.came = flow->came.bytes,
		.used = flow->used,
		.err = flow->err,
	};
	pthread_mutex_unlock(&flow->peer->lock);
}

struct tcp_flow *tcp_flow_next_event(struct tcp_peer *peer)
{
	struct list *link;

	pthread_mutex_lock(&peer->lock);
	link = list_pop_front(&peer->flow_events);
	pthread_mutex_unlock(&peer->lock);
	return link ? list_entry(link, struct tcp_flow, events) : NULL;
}

/* ---- for I/O threads ---- */

bool tcp_flow_dead(const struct tcp_flow *flow)
{
	if (!flow->guarded)
		return false;
	for (uint32_t i = 0; i < flow->side.count; i++)
		if (flow->buffers[i].memory &&
		    atomic_load(&flow->buffers[i].memory->dead))
			return true;
	return false;
}

static void tcp_flow_tell(struct tcp_flow *flow)
{
	if (list_empty(&flow->events))
		list_push_back(&flow->peer->flow_events, &flow->events);
	tcp_io_notify(flow->peer);
}

static void tcp_flow_let_go(struct tcp_half *half, bool sending)
{
	if (!sending) {
		half->over = true;
	} else if (half->pos < half->head.length + TCP_HEAD_BYTES) {
		half->over = true;
		half->flow->spoiled = true;
	}
	half->flow = NULL;
}

bool tcp_half_hold(struct tcp_half *half, bool sending)
{
	if (!half->flow)
		return false;
	if (!half->flow->open) {
		tcp_flow_let_go(half, sending);
		return false;
	}
	half->busy = true;
	half->flow->pins++;
	return true;
}

bool tcp_half_release(struct tcp_half *half, bool sending)
{
	struct tcp_flow *flow = half->flow;

	half->busy = false;
	flow->pins--;
	if (flow->open)
		return true;
	tcp_flow_let_go(half, sending);
	if (flow->pins == 0)
		tcp_flow_tell(flow);
	return false;
}

void tcp_half_leave(struct tcp_half *half)
{
	half->flow = NULL;
}

void tcp_flow_fault(struct tcp_flow *flow)
{
	if (flow->open)
		flow_close(flow);
	if (flow->err.code == ERR_OK)
		err_take(&flow->err);
	else
		err_clear();
	tcp_flow_tell(flow);
}

void tcp_flow_moved(struct tcp_flow *flow, const struct tcp_half *half)
{
	const bool staged = half->bounce || half->seal;

	if (!flow->moved)
		flow->first_ns = clock_ns();
	flow->moved += half->head.length;
	flow->used.staged += staged ? half->head.length : 0;
	flow->used.descriptors += staged ? 1 : half->named;
	if (flow->moved == flow->bytes) {
		if (flow->open)
			flow_close(flow); /* nothing more of it will be sent or
					   * received */
		tcp_flow_tell(flow);
	}
}

uint32_t tcp_flow_claim(struct tcp_peer *peer, struct tcp_half *half)
{
	struct tcp_flow *flow = list_first(&peer->sources, struct tcp_flow, turn);
	uint64_t left;

	if (!flow)
		return 0;
	left = flow->bytes - flow->next;
	half->head = (struct tcp_head){
		.type = flow->ours ? TCP_DATA : TCP_SERVE,
		.id = flow->id,
		.at = flow->next,
		.length = (uint32_t)(left < TCP_DATA_MAX ? left : TCP_DATA_MAX),
	};
	half->flow = flow;
	half->over = false;
	half->pos = 0;
	flow->next += half->head.length;
	list_remove(&flow->turn);
	if (flow->next < flow->bytes)
		list_push_back(&peer->sources, &flow->turn);
	return half->head.length;
}

int tcp_flow_admit(struct tcp_peer *peer, struct tcp_half *half)
{
	const struct tcp_head *head = &half->head;
	bool ours = head->type == TCP_SERVE;
	struct tcp_flow *flow = idmap_get(&peer->sinks[ours], head->id);
	int r;

	half->flow = NULL;
	half->over = true;
	half->pos = 0;
	if (!flow && head->id > peer->sink_high[ours])
		return err_raise(ERR_PROTO,
				 "tcp: bytes for transfer %" PRIu64
				 ", which was never requested",
				 head->id);
	if (!flow)
		return TCP_NOBODYS;
	if (head->at > flow->bytes || head->length > flow->bytes - head->at)
		return err_raise(ERR_PROTO, "tcp: %u bytes at %" PRIu64 ", past %" PRIu64,
				 head->length, head->at, flow->bytes);
	r = spans_add(&flow->came, head->at, head->length);
	if (r == -ENOMEM) {
		tcp_flow_fault(flow);
		return TCP_NOBODYS;
	}
	if (r < 0)
		return err_pass(r);
	half->flow = flow;
	half->over = false;
	return 0;
}
