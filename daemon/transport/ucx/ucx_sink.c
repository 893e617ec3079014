/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The receiving side of a transfer.
 *
 * A slice is announced by offset and length; its addresses are looked up in this side's
 * own plan. Few rows that libucp may touch are received in place, others into a bounce
 * buffer and scattered by the copy threads. Each byte counts once. A slice that finds no
 * transfer, or one that is stopping, is answered without taking its bytes: so the fence
 * stops new ones while the connection continues.
 *
 * Slices are fetched by rendezvous, so libucp holds a descriptor, not the bytes, of those
 * that wait for a buffer. Only the single slice of a small transfer arrives unsolicited.
 */
#include "daemon/transport/ucx/ucx_impl.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

static void ucx_sink_feed(struct ucx_transport *transport);

static void ucx_sink_piece_free(struct ucx_piece *piece)
{
	struct ucx_xfer *xfer = piece->xfer;
	struct ucx_buffer *buffer = piece->buffer;

	list_remove(&piece->link);
	list_remove(&piece->xfer_link);
	ucx_entry_free(piece->entry);
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
	net_xfer_moved(&xfer->net, xfer->landed, 0);
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
	ucx_sink_piece_free(piece);
}

static void piece_unpack(struct ucx_piece *piece)
{
	struct ucx_xfer *xfer = piece->xfer;

	piece->job.plan = xfer->side.plan;
	piece->job.begin = piece->offset;
	piece->job.end = piece->offset + piece->length;
	piece->job.src = (struct copy_end){
		.linear = piece->buffer ? piece->buffer->base : piece->entry->payload,
	};
	piece->job.dst = (struct copy_end){.buffers = xfer->side.buffers,
					   .buffer_count = xfer->side.count};
	piece->job.on_done = on_unpacked;
	piece->copying = true;
	if (copier_submit(xfer->peer->transport->net.base.env.copier, &piece->job) < 0) {
		piece->copying = false;
		net_xfer_stop_last(&xfer->net);
		ucx_sink_piece_free(piece);
	}
}

/* ---- fetch ---- */

static void piece_fetched(struct ucx_piece *piece)
{
	const struct ucx_call *call = &piece->call;
	struct ucx_xfer *xfer = piece->xfer;
	struct ucx_peer *peer = xfer->peer;

	if (piece->refused) {
		/* its transfer is stopping */
	} else if (call->status != UCS_OK && net_peer_live(&peer->net)) {
		ucx_peer_break(peer, "receive bytes", call->status);
	} else if (call->status == UCS_OK && call->length != piece->length) {
		err_raise(ERR_PROTO, "ucx: slice of %zu bytes, %" PRIu64 " announced",
			  call->length, piece->length);
		net_peer_fail_last(&peer->net);
	} else if (call->status == UCS_OK && sm_state(&xfer->net.sm) == NET_XFER_MOVING) {
		if (piece->buffer) {
			piece_unpack(piece);
			return;
		}
		landed(xfer, piece->length, false);
	}
	ucx_sink_piece_free(piece);
}

static void ucx_sink_on_fetched(struct ucx_call *call)
{
	struct ucx_piece *piece = container_of(call, struct ucx_piece, call);
	struct ucx_peer *peer = piece->xfer->peer;

	peer->receiving--;
	piece_fetched(piece);
	ucx_call_back(peer);
}

static void ucx_sink_start_fetch(struct ucx_call *call)
{
	struct ucx_piece *piece = container_of(call, struct ucx_piece, call);
	void *desc = mem_steal(piece->entry->desc);

	piece->refused = !piece->rows.count || atomic_load(&piece->xfer->halted);
	if (piece->refused) {
		call->worker->lib->ucp_am_data_release(call->worker->handle, desc);
		ucx_call_over(call, UCS_ERR_CANCELED, 0);
		return;
	}
	ucx_line_fetch(call, desc, &piece->rows, piece->length);
}

/* To its rows, or nowhere. */
static void piece_fetch(struct ucx_piece *piece)
{
	bool wanted = piece->rows.count > 0;

	piece->call.bytes = wanted ? piece->length : 0;
	piece->call.heavy = wanted && ucx_is_large(piece->xfer);
	ucx_call(piece->xfer->peer, &piece->call, ucx_sink_start_fetch,
		 ucx_sink_on_fetched);
}

static void ucx_sink_feed(struct ucx_transport *transport)
{
	struct ucx_buffer *buffer;
	struct ucx_piece *piece;

	while (!list_empty(&transport->hungry) &&
	       (buffer = ucx_pool_take(&transport->recv_pool))) {
		piece = list_entry(list_pop_front(&transport->hungry), struct ucx_piece,
				   link);
		piece->buffer = buffer;
		piece->rows =
			ucx_row(buffer->base, piece->length, transport->recv_pool.memh);
		piece_fetch(piece);
	}
}

void ucx_sink_stop(struct ucx_xfer *xfer)
{
	struct copier *copier = xfer->peer->transport->net.base.env.copier;
	struct ucx_piece *piece;

	atomic_store(&xfer->halted, true);
	list_foreach(piece, &xfer->pieces, xfer_link) {
		if (piece->copying) {
			copier_cancel(copier, &piece->job);
		} else if (!list_empty(&piece->link)) {
			list_remove(&piece->link);
			piece_fetch(piece);
		}
	}
}

/* ---- a slice arrives ---- */

static int ucx_sink_admit(const struct ucx_xfer *xfer, const struct ucx_frame *frame,
			  size_t len, bool rndv)
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
		return err_raise(ERR_PROTO, "ucx: %zu unsolicited bytes (limit %u)", len,
				 UCX_EAGER_MAX);
	if (!rndv && len != xfer->net.bytes)
		return err_raise(ERR_PROTO, "ucx: unsolicited part of a transfer");
	if (xfer->peer->receiving >= UCX_FETCHES_MAX)
		return err_raise(ERR_PROTO, "ucx: too many slices at once (limit %u)",
				 UCX_FETCHES_MAX);
	return 0;
}

static struct ucx_piece *piece_new(struct ucx_xfer *xfer, struct ucx_entry **entry_p)
{
	struct ucx_piece *piece = mem_zalloc(sizeof(*piece));

	if (!piece)
		return NULL;
	piece->xfer = xfer;
	piece->offset = (*entry_p)->frame.offset;
	piece->length = (*entry_p)->frame.length;
	piece->entry = mem_steal(*entry_p);
	list_init(&piece->link);
	list_push_back(&xfer->pieces, &piece->xfer_link);
	xfer->busy++;
	return piece;
}

static int take_eager(struct ucx_xfer *xfer, struct ucx_entry **entry_p)
{
	const struct ucx_entry *entry = *entry_p;
	struct ucx_piece *piece;
	struct ucx_rows rows;

	if (entry->starved)
		return err_raise(ERR_NOMEM, "ucx: no memory for %zu bytes", entry->len);
	ucx_side_rows(&xfer->side, false, entry->frame.offset, entry->len, 1, &rows);
	if (rows.count) {
		memcpy(rows.at[0].buffer, entry->payload, entry->len);
		landed(xfer, entry->len, false);
		net_xfer_check(&xfer->net);
		return 0;
	}
	piece = piece_new(xfer, entry_p);
	if (!piece)
		return err_pass(-ENOMEM);
	piece_unpack(piece);
	return 0;
}

static int take_rndv(struct ucx_xfer *xfer, struct ucx_entry **entry_p)
{
	struct ucx_transport *transport = xfer->peer->transport;
	struct ucx_piece *piece = piece_new(xfer, entry_p);

	if (!piece)
		return err_pass(-ENOMEM);
	xfer->peer->receiving++;
	ucx_side_rows(&xfer->side, false, piece->offset, piece->length,
		      xfer->peer->rows_max, &piece->rows);
	if (piece->rows.count) {
		piece_fetch(piece);
	} else {
		list_push_back(&transport->hungry, &piece->link);
		ucx_sink_feed(transport);
	}
	return 0;
}

static void ucx_sink_take(struct ucx_xfer *xfer, struct ucx_entry **entry_p)
{
	int r = spans_add(&xfer->spans, (*entry_p)->frame.offset, (*entry_p)->len);

	if (r < 0 && r != -ENOMEM) {
		net_peer_fail_last(&xfer->peer->net);
		return;
	}
	if (r == 0)
		r = (*entry_p)->desc ? take_rndv(xfer, entry_p)
				     : take_eager(xfer, entry_p);
	if (r < 0)
		net_xfer_stop_last(&xfer->net);
}

void ucx_sink_entry(struct ucx_peer *peer, struct ucx_entry *entry)
{
	const struct ucx_frame *frame = &entry->frame;
	bool to_inbound = frame->type == UCX_DATA;
	struct ucx_xfer *xfer =
		idmap_get(to_inbound ? &peer->net.inbounds : &peer->net.ops, frame->id);
	bool late = !xfer && frame->id < (to_inbound ? peer->net.inbound_high + 1
						     : peer->net.next_id);
	int r = 0;

	if (xfer && (xfer->net.finishing || sm_state(&xfer->net.sm) == NET_XFER_STOPPING))
		late = true;
	if (!late)
		r = xfer ? ucx_sink_admit(xfer, frame, entry->len, entry->desc)
			 : err_raise(ERR_PROTO,
				     "bytes for transfer %" PRIu64
				     ", which was never requested",
				     frame->id);
	if (r < 0)
		net_peer_fail_last(&peer->net);
	else if (!late)
		ucx_sink_take(xfer, &entry);
	if (entry) /* no transfer */
		ucx_entry_drop(entry);
}
