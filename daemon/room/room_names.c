/* SPDX-License-Identifier: Apache-2.0 */
/* Names of roles, states, peers and parties. */
#include <stdio.h>
#include <string.h>

#include "daemon/room/room.h"

const char *const room_role_names[ROOM_ROLES + 1] = {"send", "recv", "offer", "pull",
						     NULL};
const char *const room_state_names[ROOM_STATES] = {"bootstrapping", "waiting_for_input",
						   "transferring",  "aborting",
						   "failed",	    "success"};

const char *room_peer_name(const struct remote *remote, char *buf, size_t size)
{
	const char *endpoint = remote->peer->endpoint;

	if (remote->peer->name[0]) /* its key is not shown */
		snprintf(buf, size, "peer %.63s", remote->peer->name);
	else
		snprintf(buf, size, "peer %.*s", (int)strcspn(endpoint, "#"), endpoint);
	return buf;
}

const char *party_label(const struct party *party, char *buf, size_t size)
{
	snprintf(buf, size, "%.190s pool '%.63s'", party->remote->label,
		 party->pool_name);
	return buf;
}
