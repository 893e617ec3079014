/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/events.h"

#include "daemon/control/commands_peer.h"
#include "daemon/base/context.h"
#include "daemon/room/rooms.h"
#include "daemon/transport/kinds.h"
#include "daemon/xfer/xfer.h"

static void on_change(void *owner, struct remote *remote)
{
	struct kvd *kvd = owner;

	rooms_on_change(kvd->rooms, remote);
	xfers_on_change(kvd->xfers, remote);
	peer_commands_on_change(remote);
}

static void on_down(void *owner, struct remote *remote, const struct err *why)
{
	struct kvd *kvd = owner;

	rooms_on_down(kvd->rooms, remote, why);
	xfers_on_down(kvd->xfers, remote, why);
}

static void on_pool_going(void *owner, struct remote_pool *pool)
{
	struct kvd *kvd = owner;

	if (pool->is_session)
		xfers_on_pool_going(kvd->xfers, pool);
	else
		rooms_on_pool_going(kvd->rooms, pool);
}

static void on_shared(void *owner, struct remote *remote, uint64_t epoch)
{
	struct kvd *kvd = owner;

	xfers_on_shared(kvd->xfers, remote, epoch);
}

static void on_unshared(void *owner, struct remote *remote, uint64_t epoch)
{
	struct kvd *kvd = owner;

	xfers_on_unshared(kvd->xfers, remote, epoch);
}

static void on_retry(void *owner)
{
	struct kvd *kvd = owner;

	xfers_on_retry(kvd->xfers);
}

static int on_message(void *owner, struct remote *remote, const struct wire_header *h,
		      struct cursor *body)
{
	struct kvd *kvd = owner;

	if (h->type >= WIRE_T_ATTACH && h->type <= WIRE_T_ATTACH_NAK)
		return xfers_on_message(kvd->xfers, remote, h, body);
	return rooms_on_message(kvd->rooms, remote, h, body);
}

static int on_lack(void *owner, struct remote *remote, const struct wire_header *h,
		   struct cursor *head)
{
	struct kvd *kvd = owner;

	return rooms_on_lack(kvd->rooms, remote, h, head);
}

static void on_request(void *owner, struct remote *remote, struct xp_inbound *in)
{
	struct kvd *kvd = owner;
	struct cursor header;
	enum request_kind kind;
	struct err why;

	cursor_read(&header, in->header, in->header_len);
	kind = (enum request_kind)cursor_get_u8(&header);
	in->owner = NULL;
	if (header.bad || kind < REQUEST_CHUNK || kind > REQUEST_NOTIF) {
		err_set(&why, ERR_PROTO, "a request of no known kind");
		remote->transport->ops->land(in, NULL, &why);
	} else if (kind <= REQUEST_PULL) {
		rooms_on_request(kvd->rooms, remote, in, kind, &header);
	} else {
		xfers_on_request(kvd->xfers, remote, in, kind, &header);
	}
}

static void on_inbound_done(void *owner, struct xp_inbound *in, const struct err *err)
{
	struct inbound_owner *answerer = in->owner;

	(void)owner;
	if (answerer)
		answerer->on_done(answerer, err);
}

struct handshake_events events_of(struct kvd *kvd)
{
	return (struct handshake_events){
		.owner = kvd,
		.on_change = on_change,
		.on_down = on_down,
		.on_pool_going = on_pool_going,
		.on_shared = on_shared,
		.on_unshared = on_unshared,
		.on_retry = on_retry,
		.on_message = on_message,
		.on_lack = on_lack,
		.on_request = on_request,
		.on_inbound_done = on_inbound_done,
	};
}
