/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xfer: one-sided transfers between the registered memory of engines, and notifications
 * between their sessions: the base of the `nixl` Python API.
 *
 * A session can be reached with its epoch and secret (peer.attach). Descriptor lists are
 * prepared once: a local one names memory of this session, a remote one that of an
 * attached session. A transfer selects descriptors of both by index. Prepared lists are
 * sent once to the daemon at the other end and exist there as long as here; a transfer
 * sends indices.
 *
 * The owner's daemon checks every descriptor against the regions that the session exports
 * at that moment; unregistered memory cannot be accessed any more.
 */
#ifndef KVD_XFER_H
#define KVD_XFER_H

#include "daemon/base/context.h"
#include "daemon/handshake/handshake.h"
#include "daemon/transport/kinds.h"

struct xfers;

extern const struct module xfer_module;
static inline struct xfers *xfers_of(const struct kvd *kvd)
{
	return kvd->part[MODULE_XFER];
}
unsigned int xfers_live(const struct xfers *xfers);
void xfers_on_request(struct remote *remote, struct xp_inbound *in, unsigned int kind,
		      struct cursor *header);

#endif
