/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sequenced frames: everything but bytes and hellos.
 *
 * libucp keeps no order between messages of different protocols: a request with
 * a large header is fetched by rendezvous and would be overtaken by what was
 * sent after it. So these frames are numbered, wait here for their turn, and
 * are acted on one after the other in ucx_peer_step().
 *
 * What a peer can make us hold is bounded. By count: an honest peer has at most
 * two frames under way for each transfer that either side has unfinished. By
 * bytes: the headers of unfinished requests sum up to NET_HEADERS_MAX at most,
 * the sender keeps to that (ucx_xfer_pump); the rest of UCX_HELD_MAX is for the
 * words of faults.
 */
#include "daemon/transport/ucx/ucx_impl.h"

#include <assert.h>
#include <errno.h>
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

static void send_over(struct ucx_send *send, ucs_status_t status)
{
	struct ucx_peer *peer = send->peer;
	struct ucx_xfer *xfer = send->xfer;
	bool current = send->ep == peer->ep; /* hellos may have had an older one */

	mem_free(send);
	if (status != UCS_OK && current && net_peer_live(&peer->net))
		ucx_peer_break(peer, "send a message", status);
	if (xfer) {
		xfer->busy--;
		net_xfer_check(&xfer->net);
	}
	net_peer_kick(&peer->net);
}

static void on_sent(void *request, ucs_status_t status, void *user_data)
{
	struct ucx_send *send = user_data;

	send->peer->transport->lib->ucp_request_free(request);
	send->peer->busy--;
	send_over(send, status);
}

void ucx_send_frame(struct ucx_send *send, struct ucx_frame *frame, const struct err *err,
		    struct ucx_xfer *xfer, const void *payload, size_t len)
{
	struct ucx_peer *peer = send->peer;
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
				UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
		.memory_type = UCS_MEMORY_TYPE_HOST,
		.cb.send = on_sent,
		.user_data = send,
	};
	int started;

	if (err) {
		ucx_frame_put_err(frame, err);
		len = strnlen(err->text, UCX_TEXT_MAX);
		memcpy(send->text, err->text, len);
		payload = send->text;
	}
	memcpy(frame->token, peer->net.token_out, sizeof(frame->token));
	if (ucx_frame_sequenced(frame))
		frame->seq = ++peer->out_seq;
	ucx_frame_put(frame, send->header);
	param.flags =
		len > UCX_EAGER_MAX ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER;
	send->xfer = xfer;
	send->ep = peer->ep;
	if (xfer)
		xfer->busy++;
	if (!peer->ep) {
		send_over(send, UCS_ERR_CANCELED);
		return;
	}
	started = ucx_started(peer->transport->lib->ucp_am_send_nbx(
		peer->ep, UCX_AM_ID, send->header, UCX_FRAME_BYTES, payload, len,
		&param));
	if (started > 0)
		peer->busy++;
	else
		send_over(send, (ucs_status_t)started);
}

/* ---- in ---- */

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

static int admit(struct ucx_peer *peer, const struct ucx_frame *frame, size_t len)
{
	if (len > payload_max(frame))
		return err_raise(ERR_PROTO, "ucx: a message of type %u with %zu bytes",
				 frame->type, len);
	if (frame->seq < peer->in_seq || frame->seq - peer->in_seq >= UCX_ORDER_MAX)
		return err_raise(ERR_PROTO, "ucx: sequence %llu, %llu expected",
				 (unsigned long long)frame->seq,
				 (unsigned long long)peer->in_seq);
	if (peer->held_bytes + len > UCX_HELD_MAX)
		return err_raise(ERR_PROTO, "ucx: headers of unfinished requests over %u",
				 NET_HEADERS_MAX);
	return 0;
}

static int place(struct ucx_peer *peer, struct ucx_entry *entry)
{
	struct list *at = peer->entries.prev;

	while (at != &peer->entries) {
		const struct ucx_entry *e = list_entry(at, struct ucx_entry, link);

		if (e->frame.seq == entry->frame.seq)
			return err_raise(ERR_PROTO, "ucx: sequence %llu came twice",
					 (unsigned long long)entry->frame.seq);
		if (e->frame.seq < entry->frame.seq)
			break;
		at = at->prev;
	}
	list_push_front(at, &entry->link);
	return 0;
}

static void entry_received(struct ucx_entry *entry, ucs_status_t status, size_t len)
{
	struct ucx_peer *peer = entry->peer;

	entry->receiving = false;
	if (entry->orphan) {
		ucx_entry_free(entry);
	} else if (status != UCS_OK) {
		ucx_peer_break(peer, "receive a message", status);
	} else if (len != entry->len) {
		err_raise(ERR_PROTO, "ucx: %zu bytes of a message, %zu announced", len,
			  entry->len);
		net_peer_fail_last(&peer->net);
	}
	net_peer_kick(&peer->net);
}

static void on_received(void *request, ucs_status_t status, size_t len, void *user_data)
{
	struct ucx_entry *entry = user_data;

	entry->peer->transport->lib->ucp_request_free(request);
	entry->peer->busy--;
	entry_received(entry, status, len);
}

static ucs_status_t fetch(struct ucx_entry *entry, void *desc)
{
	struct ucx_transport *transport = entry->peer->transport;
	size_t got = entry->len;
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
				UCP_OP_ATTR_FIELD_MEMORY_TYPE |
				UCP_OP_ATTR_FIELD_RECV_INFO,
		.memory_type = UCS_MEMORY_TYPE_HOST,
		.cb.recv_am = on_received,
		.user_data = entry,
		.recv_info.length = &got,
	};
	int started;

	entry->receiving = true;
	started = ucx_started(transport->lib->ucp_am_recv_data_nbx(
		transport->worker, desc, entry->payload, entry->len, &param));
	if (started > 0)
		entry->peer->busy++;
	else
		entry_received(entry, (ucs_status_t)started, got);
	return UCS_INPROGRESS;
}

int ucx_order_reserve(struct ucx_peer *peer)
{
	if (!peer->reserve)
		peer->reserve = mem_zalloc(sizeof(*peer->reserve) + UCX_TEXT_MAX);
	return peer->reserve ? 0 : err_pass(-ENOMEM);
}

/* Lack of memory shall cost one transfer: the reserve can hold any frame but a
 * request's header, and that request is refused in its turn. */
static struct ucx_entry *entry_new(struct ucx_peer *peer, const struct ucx_frame *frame,
				   size_t len)
{
	struct ucx_entry *entry = mem_zalloc(sizeof(*entry) + len);

	if (!entry && peer->reserve) {
		entry = mem_steal(peer->reserve);
		entry->starved = frame->type == UCX_REQUEST;
	}
	if (!entry)
		return NULL;
	entry->peer = peer;
	entry->frame = *frame;
	entry->len = entry->starved ? 0 : len;
	list_init(&entry->link);
	return entry;
}

ucs_status_t ucx_order_frame(struct ucx_peer *peer, const struct ucx_frame *frame,
			     void *data, size_t len, bool rndv)
{
	struct ucx_entry *entry = NULL;
	int r = admit(peer, frame, len);

	if (r == 0) {
		entry = entry_new(peer, frame, len);
		r = entry ? place(peer, entry) : -ENOMEM;
	}
	if (r < 0) {
		mem_free(entry);
		net_peer_fail_last(&peer->net);
		return UCS_OK;
	}
	peer->held_bytes += entry->len;
	net_peer_kick(&peer->net);
	if (rndv && !entry->starved)
		return fetch(entry, data);
	if (entry->len)
		memcpy(entry->payload, data, entry->len);
	return UCS_OK;
}

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
	entry->peer->held_bytes -= entry->len;
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
