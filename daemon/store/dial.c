/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/dial.h"

#include <stddef.h>

#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/handshake/handshake.h"
#include "daemon/link/link.h"
#include "daemon/store/store_impl.h"

void dial_end(struct dial *dial)
{
	if (dial->remote)
		handshake_release(dial->remote);
	dial->remote = NULL;
	dial->later = false;
}

void dial_refuse(struct dial *dial, const char *endpoint, const char *lack)
{
	bool known = dial->later;

	dial_end(dial);
	dial->later = err_last()->retryable;
	if (!known || !dial->later)
		log_warn("store", endpoint, lack, "why=\"%s\" again=%d", err_last()->text,
			 dial->later);
	err_clear();
}

bool dial_reach(struct store *store, struct dial *dial, const char *endpoint,
		const char *lack)
{
	const struct peer_client client = {.uid = 0, .session = 0};

	if (handshake_reach(store->kvd->handshake, endpoint, &client, &dial->remote) <
	    0) {
		dial->remote = NULL;
		dial_refuse(dial, endpoint, lack);
		return false;
	}
	dial->later = false;
	return true;
}

bool dial_is_allowed(const struct kvd *kvd, const char *endpoint)
{
	char spelled[LINK_ENDPOINT_MAX], name[LINK_USER_MAX];
	const struct link_ops *ops = kvd->link->ops;
	struct link_keys keys = {.public_key = ""};

	if (ops->keys)
		ops->keys(kvd->link, &keys);
	if (!*keys.public_key)
		return true; /* any peer may */
	return ops->canonical(kvd->link, endpoint, spelled) >= 0 &&
	       ops->name(kvd->link, spelled, name) &&
	       ops->may_answer(kvd->link, spelled, name) >= 0;
}
