/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peers and sessions do not know what is built on them; this file does. The handshake's
 * events go to rooms, transfers, the directory and the commands that wait; those
 * of sessions and their pools and regions to every holder of something of them.
 * The order of the calls is the order in which the parts hear: a session's rooms
 * before its transfers, both before its pools and regions go.
 */
#include "daemon/events.h"

#include "daemon/attend/attend.h"
#include "daemon/base/context.h"
#include "daemon/cluster/groups.h"
#include "daemon/request/commands.h"
#include "daemon/control/commands_peer.h"
#include "daemon/room/rooms.h"
#include "daemon/session/pool.h"
#include "daemon/store/store.h"
#include "daemon/transport/kinds.h"
#include "daemon/xfer/ring.h"
#include "daemon/xfer/xfer.h"

/* ---- peers ---- */

static void on_peer_up(void *owner, struct peer *peer)
{
	struct kvd *kvd = owner;

	rooms_on_up(kvd->rooms);
	store_on_up(kvd->store, peer->user);
}

static void on_change(void *owner, struct remote *remote)
{
	struct kvd *kvd = owner;

	remote->reaches++; /* it may have been held by what ends now */
	rooms_on_change(kvd->rooms, remote);
	xfers_on_change(kvd->xfers, remote);
	peer_commands_on_change(remote);
	store_on_change(kvd->store, remote);
	attends_on_change(kvd->attends, remote);
	handshake_release(kvd->handshake, remote);
}

static void events_on_down(void *owner, struct remote *remote, const struct err *why)
{
	struct kvd *kvd = owner;

	rooms_on_down(kvd->rooms, remote);
	xfers_on_down(kvd->xfers, remote, why);
	attends_on_down(kvd->attends, remote, why);
	store_on_down(kvd->store, remote);
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

static void on_unshared(void *owner, struct remote *remote, uint64_t epoch,
			const struct err *why)
{
	struct kvd *kvd = owner;

	xfers_on_unshared(kvd->xfers, remote, epoch, why);
}

static int events_on_message(void *owner, struct remote *remote,
			     const struct wire_header *h, struct cursor *body)
{
	struct kvd *kvd = owner;

	switch (wire_owner(h->type)) {
	case WIRE_OWNER_XFER:
		return xfers_on_message(kvd->xfers, remote, h, body);
	case WIRE_OWNER_STORE:
		return store_on_message(kvd, remote, h, body);
	case WIRE_OWNER_ATTEND:
		return attends_on_message(kvd->attends, remote, h, body);
	default:
		return rooms_on_message(kvd->rooms, remote, h, body);
	}
}

static void events_on_request(void *owner, struct remote *remote, struct xp_inbound *in)
{
	struct kvd *kvd = owner;
	struct cursor header;
	enum wire_owner part;
	unsigned int kind;
	struct err why;

	cursor_read(&header, in->header, in->header_len);
	kind = cursor_get_u8(&header);
	part = header.bad ? WIRE_OWNER_NONE : request_owner(kind);
	if (part == WIRE_OWNER_ROOM) {
		rooms_on_request(kvd->rooms, remote, in, kind, &header);
	} else if (part == WIRE_OWNER_XFER) {
		xfers_on_request(kvd->xfers, remote, in, kind, &header);
	} else {
		err_set(&why, ERR_PROTO, "a request of no known kind");
		remote->transport->ops->land(in, NULL, &why);
	}
}

static void events_on_inbound_done(void *owner, struct xp_inbound *in,
				   const struct err *err)
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
		.on_peer_up = on_peer_up,
		.on_change = on_change,
		.on_down = events_on_down,
		.on_pool_going = on_pool_going,
		.on_shared = on_shared,
		.on_unshared = on_unshared,
		.on_message = events_on_message,
		.on_request = events_on_request,
		.on_inbound_done = events_on_inbound_done,
	};
}

/* ---- sessions ---- */

static void on_rooms_told(struct session *session)
{
	struct kvd *kvd = session->kvd;

	store_session_end(session);
	if (kvd->xfers)
		xfers_session_end(kvd->xfers, session);
	if (kvd->groups)
		groups_session_gone(kvd->groups, session->id);
	session_end_rest(session);
}

static void on_session_end(struct session *session, void *conn, const struct err *why)
{
	requests_detach(session);
	ring_stop(session->ring);
	store_session_going(session);
	/* at once, however long its rooms take: seats are the engine's from here on */
	attends_session_end(session);
	if (conn)
		session->conn_ops->hangup(conn, why);
	if (session->kvd->rooms)
		rooms_session_end(session->kvd->rooms, session, on_rooms_told);
	else
		on_rooms_told(session);
}

static void on_session_gone(struct session *session)
{
	ring_free(session->ring);
	attends_session_gone(session);
	store_session_gone(session);
}

static void on_region_going(struct region *region)
{
	struct xfers *xfers = region->session->kvd->xfers;

	attends_region_going(region);
	if (xfers)
		xfers_region_going(xfers, region);
}

static void on_region_coming(struct session *session)
{
	if (session->kvd->xfers)
		xfers_region_coming(session->kvd->xfers, session);
}

static int on_pool(struct pool *pool)
{
	struct handshake *handshake = pool->session->kvd->handshake;

	if (pool->session->kvd->groups)
		groups_pools_changed(pool->session->kvd->groups);
	return handshake ? handshake_publish_pool(handshake, pool) : 0;
}

static void on_own_pool_going(struct pool *pool, void (*on_gone)(void *arg), void *arg)
{
	if (pool->session->kvd->groups)
		groups_pools_changed(pool->session->kvd->groups);
	store_pool_going(pool);
	/* one that no peer can know is gone at once */
	handshake_withdraw_pool(pool->session->kvd->handshake, pool, on_gone, arg);
}

const struct session_events session_events = {
	.on_end = on_session_end,
	.on_gone = on_session_gone,
	.on_region_going = on_region_going,
	.on_region_coming = on_region_coming,
	.on_pool = on_pool,
	.on_pool_going = on_own_pool_going,
};
