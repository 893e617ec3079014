/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xfer: one-sided transfers between engines' registered memory, and the
 * notifications between their sessions: what the `nixl` Python API stands on.
 *
 * A session is reachable by whoever knows its epoch and secret (peer.attach).
 * Descriptor lists are prepared once: a local one names this session's memory, a
 * remote one an attached session's. A transfer picks descriptors of both by
 * index. Prepared lists are sent once to the daemon at the other end and live
 * there as long as here; a transfer sends indices.
 *
 * The owner's daemon checks every descriptor against the regions that the
 * session exports at that moment; memory that was unregistered cannot be
 * reached any more.
 */
#ifndef KVD_XFER_H
#define KVD_XFER_H

#include "daemon/handshake/handshake.h"
#include "daemon/transport/kinds.h"

struct kvd;
struct xfers;

int xfers_new(struct kvd *kvd, struct xfers **xfers_p);
void xfers_free(struct xfers *xfers);
/* Everything of the session ends; held by session_drain_begin() meanwhile. */
void xfers_session_end(struct xfers *xfers, struct session *session);
/* A region of the session is about to close: transfers on it fail, remote
 * sessions are told (its keys go); on_gone when nothing uses it any more. */
void xfers_region_going(struct xfers *xfers, struct region *region);
/* It has one more: remote sessions that are attached are told before a transfer needs
 * it, so that they can map it meanwhile. */
void xfers_region_coming(struct xfers *xfers, struct session *session);
unsigned int xfers_live(const struct xfers *xfers);

void xfers_on_change(struct xfers *xfers, struct remote *remote);
void xfers_on_down(struct xfers *xfers, struct remote *remote, const struct err *why);
void xfers_on_shared(struct xfers *xfers, struct remote *remote, uint64_t epoch);
void xfers_on_unshared(struct xfers *xfers, struct remote *remote, uint64_t epoch,
		       const struct err *why);
void xfers_on_pool_going(struct xfers *xfers, struct remote_pool *pool);
int xfers_on_message(struct xfers *xfers, struct remote *remote,
		     const struct wire_header *h, struct cursor *body);
void xfers_on_request(struct xfers *xfers, struct remote *remote, struct xp_inbound *in,
		      enum request_kind kind, struct cursor *header);

#endif
