/* SPDX-License-Identifier: Apache-2.0 */
/* peer_at: the peer of an endpoint as it is spelled there, NULL when there is none. */
#ifndef KVD_TESTS_PEER_AT_H
#define KVD_TESTS_PEER_AT_H

#include "daemon/peer/peer_impl.h"

static inline struct peer *peer_at(struct peers *peers, const char *endpoint)
{
	struct peer_impl *impl = peer_find_endpoint(peers, endpoint);

	return impl ? &impl->peer : NULL;
}

#endif
