/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The side of a transfer where its bytes land.
 *
 * A slice announces itself by offset and length; where it goes is looked up in
 * this side's own plan. One stretch of memory that libucp may touch is received
 * in place, anything else into a bounce buffer and spread by the copy threads.
 * Each byte counts once. A slice that finds no transfer, or one that is
 * stopping, is answered without taking its bytes: that is how the fence stops
 * new ones while the connection lives on.
 *
 * Slices are fetched by rendezvous, so libucp holds a note, not the bytes, of
 * those that wait for a buffer. Only the single slice of a small transfer comes
 * unasked.
 */
#include "daemon/transport/ucx/ucx_impl.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/pack.h"

static void piece_free(struct ucx_piece *piece)
{
	struct ucx_xfer *xfer = piece->xfer;
	struct ucx_buffer *buffer = piece->buffer;

	list_remove(&piece->link);
	list_remove(&piece->xfer_link);
	mem_free(piece);
	if (buffer) {
		ucx_pool_give(buffer);
		ucx_sink_feed(xfer->peer->transport);
	}
	xfer->busy--;
	net_xfer_check(&xfer->net);
	net_peer_kick(&xfer->peer->net);
}

static void landed(struct ucx_xfer *xfer, uint64_t bytes, bool packed)
{
	xfer->landed += bytes;
	xfer->net.used.descriptors++;
	xfer->net.used.staged += packed ? bytes : 0;
	if (xfer->net.op)
		xfer->net.op->moved = xfer->landed;
	else
		xfer->net.in.moved = xfer->landed;
}

/* ---- unpack ---- */

static void on_unpacked(struct copy_job *job)
{
	struct ucx_piece *piece = container_of(job, struct ucx_piece, job);

	piece->copying = false;
	if (job->result < 0)
		net_xfer_stop(&piece->xfer->net, &job->err);
	else
		landed(piece->xfer, piece->length, true);
	piece_free(piece);
}

static void piece_unpack(struct ucx_piece *piece)
{
	struct ucx_xfer *xfer = piece->xfer;

	piece->job.plan = xfer->side.plan;
	piece->job.begin = piece->offset;
	piece->job.end = piece->offset + piece->length;
	piece->job.src = (struct copy_end){
		.linear = piece->buffer ? piece->buffer->base : piece->data,
	};
	piece->job.dst = (struct copy_end){.buffers = xfer->side.buffers,
					   .buffer_count = xfer->side.count};
	piece->job.on_done = on_unpacked;
	piece->copying = true;
	if (copier_submit(xfer->peer->transport->net.base.env.copier, &piece->job) < 0) {
		piece->copying = false;
		net_xfer_stop_last(&xfer->net);
		piece_free(piece);
	}
}

/* ---- fetch ---- */

static void piece_fetched(struct ucx_piece *piece, ucs_status_t status, size_t len)
{
	struct ucx_xfer *xfer = piece->xfer;
	struct ucx_peer *peer = xfer->peer;

	peer->receiving--;
	if (status != UCS_OK && net_peer_live(&peer->net)) {
		ucx_peer_break(peer, "receive bytes", status);
	} else if (status == UCS_OK && len != piece->length) {
		err_raise(ERR_PROTO, "ucx: slice of %zu bytes, %" PRIu64 " announced",
			  len, piece->length);
		net_peer_fail_last(&peer->net);
	} else if (status == UCS_OK && sm_state(&xfer->net.sm) == NET_XFER_MOVING) {
		if (piece->buffer) {
			piece_unpack(piece);
			return;
		}
		landed(xfer, piece->length, false);
	}
	piece_free(piece);
}

static void on_fetched(void *request, ucs_status_t status, size_t len, void *user_data)
{
	struct ucx_piece *piece = user_data;
	struct ucx_peer *peer = piece->xfer->peer;

	peer->transport->lib->ucp_request_free(request);
	peer->busy--;
	piece_fetched(piece, status, len);
}

static void piece_fetch(struct ucx_piece *piece, void *desc, void *at, ucp_mem_h memh)
{
	struct ucx_peer *peer = piece->xfer->peer;
	size_t got = piece->length;
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
				UCP_OP_ATTR_FIELD_MEMORY_TYPE |
				UCP_OP_ATTR_FIELD_RECV_INFO |
				(memh ? UCP_OP_ATTR_FIELD_MEMH : 0),
		.memory_type = UCS_MEMORY_TYPE_HOST,
		.memh = memh,
		.cb.recv_am = on_fetched,
		.user_data = piece,
		.recv_info.length = &got,
	};
	int started;

	started = ucx_started(peer->transport->lib->ucp_am_recv_data_nbx(
		peer->transport->worker, desc, at, piece->length, &param));
	if (started > 0)
		peer->busy++;
	else
		piece_fetched(piece, (ucs_status_t)started, got);
}

void ucx_sink_feed(struct ucx_transport *transport)
{
	struct ucx_buffer *buffer;
	struct ucx_piece *piece;

	while (!list_empty(&transport->hungry) &&
	       (buffer = ucx_pool_take(&transport->recv_pool))) {
		piece = list_entry(list_pop_front(&transport->hungry), struct ucx_piece,
				   link);
		piece->buffer = buffer;
		piece_fetch(piece, mem_steal(piece->desc), buffer->base,
			    transport->recv_pool.memh);
	}
}

void ucx_sink_stop(struct ucx_xfer *xfer)
{
	struct ucx_transport *transport = xfer->peer->transport;
	struct ucx_piece *piece;

	list_foreach_safe(piece, &xfer->pieces, xfer_link) {
		if (piece->copying) {
			copier_cancel(transport->net.base.env.copier, &piece->job);
		} else if (piece->desc) {
			transport->lib->ucp_am_data_release(transport->worker,
							    mem_steal(piece->desc));
			xfer->peer->receiving--;
			piece_free(piece);
		}
	}
}

/* ---- a slice arrives ---- */

static int admit(const struct ucx_xfer *xfer, const struct ucx_frame *frame, size_t len,
		 bool rndv)
{
	bool to_inbound = frame->type == UCX_DATA;

	if (to_inbound != (xfer->net.kind == XP_WRITE) ||
	    sm_state(&xfer->net.sm) != NET_XFER_MOVING)
		return err_raise(ERR_PROTO, "bytes for transfer %" PRIu64 " (%s)",
				 xfer->net.id, sm_name(&xfer->net.sm));
	if (len == 0 || len != frame->length || len > xfer->peer->transport->slice_bytes)
		return err_raise(ERR_PROTO,
				 "ucx: slice of %zu bytes, %" PRIu64 " announced", len,
				 frame->length);
	if (frame->offset > xfer->net.bytes || len > xfer->net.bytes - frame->offset)
		return err_raise(ERR_PROTO,
				 "ucx: slice at %" PRIu64 " of %zu bytes, past %" PRIu64,
				 frame->offset, len, xfer->net.bytes);
	if (!rndv && len > UCX_EAGER_MAX)
		return err_raise(ERR_PROTO, "ucx: %zu bytes unasked, at most %u", len,
				 UCX_EAGER_MAX);
	if (!rndv && len != xfer->net.bytes)
		return err_raise(ERR_PROTO, "ucx: part of a transfer unasked");
	if (xfer->peer->receiving >= UCX_FETCHES_MAX)
		return err_raise(ERR_PROTO, "ucx: over %u slices at once",
				 UCX_FETCHES_MAX);
	return 0;
}

/* Where a slice goes when that is one stretch that libucp may touch. */
static uint8_t *place(const struct ucx_xfer *xfer, uint64_t offset, uint64_t len,
		      ucp_mem_h *memh_p)
{
	struct plan_span first;
	struct plan_walk walk;

	if (!pack_few_rows(xfer->side.plan, false, offset, offset + len, 1))
		return NULL;
	plan_walk_seek(&walk, xfer->side.plan, offset);
	plan_walk_next(&walk, len, &first);
	return ucx_side_direct(&xfer->side, first.dst_buffer, first.dst, memh_p);
}

static struct ucx_piece *piece_new(struct ucx_xfer *xfer, const struct ucx_frame *frame,
				   size_t data_len)
{
	struct ucx_piece *piece = mem_zalloc(sizeof(*piece) + data_len);

	if (!piece)
		return NULL;
	piece->xfer = xfer;
	piece->offset = frame->offset;
	piece->length = frame->length;
	list_init(&piece->link);
	list_push_back(&xfer->pieces, &piece->xfer_link);
	xfer->busy++;
	return piece;
}

static ucs_status_t take_eager(struct ucx_xfer *xfer, const struct ucx_frame *frame,
			       const void *data, size_t len)
{
	struct ucx_piece *piece;
	ucp_mem_h memh;
	uint8_t *at = place(xfer, frame->offset, len, &memh);

	if (at) {
		memcpy(at, data, len);
		landed(xfer, len, false);
		net_xfer_check(&xfer->net);
		return UCS_OK;
	}
	piece = piece_new(xfer, frame, len);
	if (!piece) {
		net_xfer_stop_last(&xfer->net);
		return UCS_OK;
	}
	memcpy(piece->data, data, len);
	piece_unpack(piece);
	return UCS_OK;
}

static ucs_status_t take_rndv(struct ucx_xfer *xfer, const struct ucx_frame *frame,
			      void *desc)
{
	struct ucx_transport *transport = xfer->peer->transport;
	struct ucx_piece *piece = piece_new(xfer, frame, 0);
	ucp_mem_h memh;
	uint8_t *at;

	if (!piece) {
		net_xfer_stop_last(&xfer->net);
		return UCS_OK;
	}
	xfer->peer->receiving++;
	at = place(xfer, frame->offset, frame->length, &memh);
	if (at) {
		piece_fetch(piece, desc, at, memh);
	} else {
		piece->desc = desc;
		list_push_back(&transport->hungry, &piece->link);
		ucx_sink_feed(transport);
	}
	return UCS_INPROGRESS;
}

ucs_status_t ucx_sink_frame(struct ucx_peer *peer, const struct ucx_frame *frame,
			    void *data, size_t len, bool rndv)
{
	bool to_inbound = frame->type == UCX_DATA;
	struct ucx_xfer *xfer =
		idmap_get(to_inbound ? &peer->net.inbounds : &peer->net.ops, frame->id);
	int r;

	if (!xfer &&
	    frame->id < (to_inbound ? peer->net.inbound_high + 1 : peer->net.next_id))
		return UCS_OK; /* late: its transfer is over */
	if (xfer && (xfer->net.finishing || sm_state(&xfer->net.sm) == NET_XFER_STOPPING))
		return UCS_OK;
	r = xfer ? admit(xfer, frame, len, rndv)
		 : err_raise(ERR_PROTO,
			     "bytes for transfer %" PRIu64 " that was never asked",
			     frame->id);
	if (r < 0) {
		net_peer_fail_last(&peer->net);
		return UCS_OK;
	}
	r = spans_add(&xfer->spans, frame->offset, len);
	if (r == -ENOMEM) {
		net_xfer_stop_last(&xfer->net);
		return UCS_OK;
	}
	if (r < 0) {
		net_peer_fail_last(&peer->net);
		return UCS_OK;
	}
	return rndv ? take_rndv(xfer, frame, data) : take_eager(xfer, frame, data, len);
}
