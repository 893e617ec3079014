/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sending side of a transfer.
 *
 * The plan's byte stream is cut into slices (pack.h): of long rows, sent in place, or of
 * short ones. A slice of memory that libucp may not touch, or of rows that are too short,
 * is packed by the copy threads into a bounce buffer first. Slices of a transfer may
 * overtake each other: each carries its offset.
 *
 * A peer's transfers take turns under one window of bytes and slices. A turn is measured
 * in bytes; otherwise a transfer of long rows would get eight times the share of one of
 * pages. Posted slices delay later ones: so a large transfer uses only the part of the
 * window that keeps a fast link busy, and while small ones are active, only as much as
 * keeps both sides busy. A small one is posted as a whole.
 */
#include "daemon/transport/ucx/ucx_impl.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/pack.h"

/* Outcome of post_slice(): every send buffer is in use. */
enum { STARVED = 1 };

struct slice {
	uint64_t offset, length; /* of the stream */
	struct ucx_rows rows;	 /* the bytes, or none: to be packed */
};

static uint64_t ucx_source_least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* How much of it may be posted at once. */
static uint64_t ucx_source_share_of(const struct ucx_xfer *xfer)
{
	const struct ucx_peer *peer = xfer->peer;

	if (!ucx_is_large(xfer))
		return UINT64_MAX;
	return loop_now_ns(peer->net.timer.loop) < peer->beside_until_ns
		       ? UCX_SHARE_BESIDE_BYTES
		       : UCX_SHARE_BYTES;
}

/* May libucp not touch the row of this byte? Then it is packed, regardless of its
 * length. */
static bool ucx_source_is_packed(const struct ucx_xfer *xfer, uint64_t offset)
{
	struct ucx_rows row;

	ucx_side_rows(&xfer->side, true, offset, 1, 1, &row);
	return !row.count;
}

static void ucx_source_cut(const struct ucx_xfer *xfer, struct slice *slice)
{
	uint64_t left = xfer->net.bytes - xfer->next_byte;
	uint64_t max =
		ucx_source_least(left, ucx_source_least(xfer->peer->slice_bytes,
							ucx_source_share_of(xfer) / 2));
	unsigned int rows_max = xfer->peer->rows_max;

	slice->offset = xfer->next_byte;
	slice->rows.count = 0;
	if (!pack_slice(xfer->side.plan, slice->offset, max, rows_max, &slice->length)) {
		/* a long row ends it only if that is sent in place */
		if (slice->length < max &&
		    ucx_source_is_packed(xfer, slice->offset + slice->length))
			slice->length = max;
		return;
	}
	ucx_side_rows(&xfer->side, true, slice->offset, slice->length, rows_max,
		      &slice->rows);
	if (!slice->rows.count)
		slice->length = max; /* it is packed anyway: a full buffer */
}

static void ucx_source_piece_free(struct ucx_piece *piece)
{
	struct ucx_xfer *xfer = piece->xfer;
	struct ucx_peer *peer = xfer->peer;

	if (piece->buffer) {
		ucx_pool_give(piece->buffer);
		ucx_feed_sources(peer->transport);
	}
	list_remove(&piece->xfer_link);
	peer->sending--;
	peer->sending_bytes -= piece->length;
	xfer->sending_bytes -= piece->length;
	mem_free(piece);
	xfer->busy--;
	net_xfer_check(&xfer->net);
	net_peer_kick(&peer->net);
}

static void ucx_source_on_sent(struct ucx_call *call)
{
	struct ucx_piece *piece = container_of(call, struct ucx_piece, call);
	struct ucx_xfer *xfer = piece->xfer;
	struct ucx_peer *peer = xfer->peer;

	if (call->status == UCS_OK) {
		xfer->done_bytes += piece->length;
		xfer->net.used.descriptors++;
		xfer->net.used.staged += piece->packed ? piece->length : 0;
		net_xfer_moved(&xfer->net, xfer->done_bytes, 0);
	} else if (!piece->refused && net_peer_live(&peer->net)) {
		ucx_peer_break(peer, "send bytes", call->status);
	}
	ucx_source_piece_free(piece);
	ucx_call_back(peer);
}

static void ucx_source_start_send(struct ucx_call *call)
{
	struct ucx_piece *piece = container_of(call, struct ucx_piece, call);
	struct ucx_xfer *xfer = piece->xfer;

	piece->refused = atomic_load(&xfer->halted);
	if (piece->refused) {
		ucx_call_over(call, UCS_ERR_CANCELED, 0);
		return;
	}
	ucx_line_send(&xfer->peer->line, call, piece->header, &piece->rows,
		      xfer->net.bytes <= UCX_EAGER_MAX);
}

static void piece_send(struct ucx_piece *piece)
{
	struct ucx_xfer *xfer = piece->xfer;
	struct ucx_peer *peer = xfer->peer;
	struct ucx_frame frame = {
		.type = xfer->net.ours ? UCX_DATA : UCX_SERVE,
		.id = xfer->net.id,
		.offset = piece->offset,
		.length = piece->length,
	};

	memcpy(frame.token, peer->net.token_out, sizeof(frame.token));
	ucx_frame_put(&frame, piece->header);
	piece->call.bytes = piece->length;
	piece->call.heavy = ucx_is_large(xfer);
	ucx_call(peer, &piece->call, ucx_source_start_send, ucx_source_on_sent);
}

static void on_packed(struct copy_job *job)
{
	struct ucx_piece *piece = container_of(job, struct ucx_piece, job);

	piece->copying = false;
	if (job->result < 0)
		net_xfer_stop(&piece->xfer->net, &job->err);
	if (sm_state(&piece->xfer->net.sm) != NET_XFER_MOVING) {
		ucx_source_piece_free(piece);
		return;
	}
	piece_send(piece);
}

static void piece_pack(struct ucx_piece *piece)
{
	struct ucx_xfer *xfer = piece->xfer;
	struct ucx_buffer *buffer = piece->buffer;
	uint8_t *at = buffer ? buffer->base : piece->data;

	piece->rows = ucx_row(at, piece->length, buffer ? buffer->pool->memh : NULL);
	piece->job.plan = xfer->side.plan;
	piece->job.begin = piece->offset;
	piece->job.end = piece->offset + piece->length;
	piece->job.src = (struct copy_end){.buffers = xfer->side.buffers,
					   .buffer_count = xfer->side.count};
	piece->job.dst = (struct copy_end){.linear = at};
	piece->job.on_done = on_packed;
	piece->copying = piece->packed = true;
	if (copier_submit(xfer->peer->transport->net.base.env.copier, &piece->job) < 0) {
		piece->copying = false;
		net_xfer_stop_last(&xfer->net);
		ucx_source_piece_free(piece);
	}
}

static int post_slice(struct ucx_xfer *xfer)
{
	struct ucx_peer *peer = xfer->peer;
	bool eager = xfer->net.bytes <= UCX_EAGER_MAX;
	struct ucx_buffer *buffer = NULL;
	struct ucx_piece *piece;
	struct slice slice;

	ucx_source_cut(xfer, &slice);
	if (!slice.rows.count && !eager) {
		buffer = ucx_pool_take(&peer->transport->send_pool);
		if (!buffer)
			return STARVED;
	}
	piece = mem_zalloc(sizeof(*piece) + (eager ? slice.length : 0));
	if (!piece) {
		if (buffer)
			ucx_pool_give(buffer);
		return err_pass(-ENOMEM);
	}
	piece->xfer = xfer;
	piece->buffer = buffer;
	piece->offset = slice.offset;
	piece->length = slice.length;
	list_init(&piece->link);
	list_push_back(&xfer->pieces, &piece->xfer_link);
	xfer->busy++;
	xfer->next_byte += slice.length;
	peer->sending++;
	peer->sending_bytes += slice.length;
	xfer->sending_bytes += slice.length;
	xfer->turn_bytes += slice.length;
	piece->rows = slice.rows;
	if (slice.rows.count)
		piece_send(piece);
	else
		piece_pack(piece);
	return 0;
}

void ucx_source_start(struct ucx_xfer *xfer)
{
	if (xfer->net.bytes == 0)
		return;
	list_push_back(&xfer->peer->sources, &xfer->source_link);
	net_peer_kick(&xfer->peer->net);
}

void ucx_source_stop(struct ucx_xfer *xfer)
{
	struct ucx_piece *piece;

	list_remove(&xfer->source_link);
	atomic_store(&xfer->halted, true);
	list_foreach(piece, &xfer->pieces, xfer_link)
		if (piece->copying)
			copier_cancel(xfer->peer->transport->net.base.env.copier,
				      &piece->job);
}

/* The next transfer in turn. One that has its share is skipped: at most a window's
 * worth. */
static struct ucx_xfer *next_source(const struct ucx_peer *peer)
{
	struct ucx_xfer *xfer;

	if (!net_peer_live(&peer->net) || peer->sending >= UCX_WINDOW_SLICES ||
	    peer->sending_bytes >= peer->transport->window_bytes)
		return NULL;
	list_foreach(xfer, &peer->sources, source_link) {
		if (xfer->sending_bytes < ucx_source_share_of(xfer))
			return xfer;
	}
	return NULL;
}

static void ucx_source_end_turn(struct ucx_peer *peer, struct ucx_xfer *xfer)
{
	if (xfer->turn_bytes < peer->slice_bytes && xfer->next_byte < xfer->net.bytes)
		return;
	xfer->turn_bytes = 0;
	list_remove(&xfer->source_link);
	if (xfer->next_byte < xfer->net.bytes)
		list_push_back(&peer->sources, &xfer->source_link);
}

void ucx_source_pump(struct ucx_peer *peer)
{
	struct ucx_xfer *xfer;
	int r;

	while ((xfer = next_source(peer))) {
		r = post_slice(xfer);
		if (r == STARVED) {
			peer->starved = true;
			return;
		}
		if (r < 0)
			net_xfer_stop_last(&xfer->net);
		if (!list_empty(&xfer->source_link)) /* else it was stopped */
			ucx_source_end_turn(peer, xfer);
	}
}
