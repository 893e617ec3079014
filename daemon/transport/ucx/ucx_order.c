/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sequenced frames: everything but bytes and hellos.
 *
 * libucp keeps no order between messages of different protocols: a request with a large
 * header is fetched by rendezvous and would be overtaken by later messages. So these
 * frames are numbered, wait here for their turn, and are acted on one after the other in
 * ucx_peer_step().
 *
 * The memory that a peer can make this daemon hold is bounded. By count: a correct peer
 * has at most two frames in flight for each transfer that either side has unfinished. By
 * bytes: the headers of unfinished requests sum up to NET_HEADERS_MAX at most, the sender
 * keeps to that (ucx_xfer_pump); the rest of UCX_HELD_MAX is for the text of faults.
 */
#include "daemon/transport/ucx/ucx_impl.h"

#include <assert.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

/* ---- out ---- */

struct ucx_send *ucx_send_new(struct ucx_peer *peer)
{
	struct ucx_send *send = mem_zalloc(sizeof(*send));

	if (send)
		send->peer = peer;
	return send;
}

static void ucx_order_on_sent(struct ucx_call *call)
{
	struct ucx_send *send = container_of(call, struct ucx_send, call);
	struct ucx_peer *peer = send->peer;
	struct ucx_xfer *xfer = send->xfer;
	/* hellos may have had an older one */
	bool current = send->ep_number == peer->ep_number && !peer->climbing;
	ucs_status_t status = call->status;

	mem_free(send);
	if (status != UCS_OK && current && net_peer_live(&peer->net))
		ucx_peer_break(peer, "send a message", status);
	if (xfer) {
		xfer->busy--;
		net_xfer_check(&xfer->net);
	}
	ucx_call_back(peer);
}

static void ucx_order_start_send(struct ucx_call *call)
{
	struct ucx_send *send = container_of(call, struct ucx_send, call);
	/* as libucp wants it; it does not write there */
	struct ucx_rows rows =
		ucx_row((uint8_t *)(uintptr_t)send->payload, send->len, NULL);

	ucx_line_send(&send->peer->line, call, send->header, &rows,
		      send->len <= UCX_EAGER_MAX);
}

void ucx_send_frame(struct ucx_send *send, struct ucx_frame *frame, const struct err *err,
		    struct ucx_xfer *xfer, const void *payload, size_t len)
{
	struct ucx_peer *peer = send->peer;

	if (err) {
		frame->code = err->code;
		frame->flags = net_fault_flags(err);
		len = strnlen(err->text, UCX_TEXT_MAX);
		memcpy(send->text, err->text, len);
		payload = send->text;
	}
	memcpy(frame->token, peer->net.token_out, sizeof(frame->token));
	if (ucx_frame_sequenced(frame))
		frame->seq = ++peer->out_seq;
	ucx_frame_put(frame, send->header);
	send->payload = payload;
	send->len = len;
	send->xfer = xfer;
	send->ep_number = peer->ep_number;
	send->call.bytes = len;
	if (xfer)
		xfer->busy++;
	ucx_call(peer, &send->call, ucx_order_start_send, ucx_order_on_sent);
}

/* ---- in: checks of received frames ---- */

static size_t payload_max(const struct ucx_frame *frame)
{
	switch (frame->type) {
	case UCX_REQUEST:
		return XP_HEADER_MAX;
	case UCX_CANCEL:
	case UCX_DONE:
	case UCX_BYE:
		return UCX_TEXT_MAX;
	default:
		return 0;
	}
}

static int ucx_order_admit(struct ucx_peer *peer, const struct ucx_frame *frame,
			   size_t len)
{
	if (len > payload_max(frame))
		return err_raise(ERR_PROTO, "ucx: a message of type %u with %zu bytes",
				 frame->type, len);
	if (frame->seq < peer->in_seq || frame->seq - peer->in_seq >= UCX_ORDER_MAX)
		return err_raise(ERR_PROTO, "ucx: sequence %llu, %llu expected",
				 (unsigned long long)frame->seq,
				 (unsigned long long)peer->in_seq);
	if (peer->held_bytes + len > UCX_HELD_MAX)
		return err_raise(
			ERR_PROTO,
			"ucx: headers of unfinished requests too large (limit %u bytes)",
			NET_HEADERS_MAX);
	return 0;
}

static int ucx_order_place(struct ucx_peer *peer, struct ucx_entry *entry)
{
	struct list *at = peer->entries.prev;

	while (at != &peer->entries) {
		const struct ucx_entry *e = list_entry(at, struct ucx_entry, link);

		if (e->frame.seq == entry->frame.seq)
			return err_raise(ERR_PROTO, "ucx: sequence %llu received twice",
					 (unsigned long long)entry->frame.seq);
		if (e->frame.seq < entry->frame.seq)
			break;
		at = at->prev;
	}
	list_push_front(at, &entry->link);
	return 0;
}

/* ---- payloads ---- */

static void ucx_order_on_fetched(struct ucx_call *call)
{
	struct ucx_entry *entry = container_of(call, struct ucx_entry, call);
	struct ucx_peer *peer = entry->peer;

	entry->receiving = false;
	ucx_call_back(peer);
	if (entry->orphan) {
		ucx_entry_free(entry);
	} else if (call->status != UCS_OK) {
		ucx_peer_break(peer, "receive a message", call->status);
	} else if (!entry->starved && call->length != entry->len) {
		err_raise(ERR_PROTO, "ucx: %zu bytes of a message, %zu announced",
			  call->length, entry->len);
		net_peer_fail_last(&peer->net);
	}
}

static void ucx_order_start_fetch(struct ucx_call *call)
{
	struct ucx_entry *entry = container_of(call, struct ucx_entry, call);
	struct ucx_rows rows = ucx_row(entry->payload, entry->len, NULL);

	ucx_line_fetch(call, mem_steal(entry->desc), &rows, entry->len);
}

static void start_release(struct ucx_call *call)
{
	struct ucx_entry *entry = container_of(call, struct ucx_entry, call);

	call->worker->lib->ucp_am_data_release(call->worker->handle,
					       mem_steal(entry->desc));
	ucx_call_over(call, UCS_OK, 0);
}

static void on_dropped(struct ucx_call *call)
{
	struct ucx_entry *entry = container_of(call, struct ucx_entry, call);
	struct ucx_peer *peer = entry->peer;

	ucx_entry_free(entry);
	ucx_call_back(peer);
}

void ucx_entry_drop(struct ucx_entry *entry)
{
	if (entry->desc)
		ucx_call(entry->peer, &entry->call, start_release, on_dropped);
	else
		ucx_entry_free(entry);
}

/* Lack of memory costs one transfer: its request is refused in order. */
static void entry_fetch(struct ucx_entry *entry)
{
	entry->receiving = true;
	entry->payload = mem_alloc(entry->len);
	if (entry->payload) {
		entry->call.bytes = entry->len;
		ucx_call(entry->peer, &entry->call, ucx_order_start_fetch,
			 ucx_order_on_fetched);
		return;
	}
	err_clear();
	entry->payload = entry->bytes;
	entry->len = 0;
	entry->starved = true;
	ucx_call(entry->peer, &entry->call, start_release, ucx_order_on_fetched);
}

void ucx_order_entry(struct ucx_peer *peer, struct ucx_entry *entry)
{
	int r = ucx_order_admit(peer, &entry->frame, entry->len);

	if (r == 0)
		r = ucx_order_place(peer, entry);
	if (r < 0) {
		net_peer_fail_last(&peer->net);
		ucx_entry_drop(entry);
		return;
	}
	entry->held = entry->starved ? 0 : entry->len;
	peer->held_bytes += entry->held;
	net_peer_kick(&peer->net);
	if (entry->desc)
		entry_fetch(entry);
}

/* ---- in turn ---- */

struct ucx_entry *ucx_order_next(struct ucx_peer *peer)
{
	struct ucx_entry *entry = list_first(&peer->entries, struct ucx_entry, link);

	if (!entry || entry->receiving || entry->frame.seq != peer->in_seq)
		return NULL;
	peer->in_seq++;
	list_remove(&entry->link);
	return entry;
}

void ucx_entry_free(struct ucx_entry *entry)
{
	if (!entry)
		return;
	assert(!entry->receiving);
	entry->peer->held_bytes -= entry->held;
	if (entry->payload != entry->bytes)
		mem_free(entry->payload);
	mem_free(entry);
}

void ucx_order_drop(struct ucx_peer *peer)
{
	struct list *link;

	while ((link = list_pop_front(&peer->entries))) {
		struct ucx_entry *entry = list_entry(link, struct ucx_entry, link);

		entry->orphan = true;
		if (!entry->receiving)
			ucx_entry_free(entry);
	}
}
