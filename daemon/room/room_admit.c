/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/room/room_admit.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "daemon/base/mem.h"
#include "daemon/peer/peer.h"
#include "proto/out.h"

static const uint8_t no_ticket[TICKET_BYTES];

bool ticket_given(const uint8_t ticket[TICKET_BYTES])
{
	return !mem_equal(ticket, no_ticket, TICKET_BYTES);
}

bool room_admit_is_open(const struct room_admit *admit)
{
	return !ticket_given(admit->ticket) && !admit->peers;
}

static int parse_peers(const cJSON *peers, struct room_admit *admit)
{
	int count = cJSON_GetArraySize(peers);
	const cJSON *item;

	if (count == 0)
		return err_raise(ERR_INVAL, "peers: empty; omit it, or name a peer");
	admit->peers = mem_calloc((size_t)count, sizeof(*admit->peers));
	if (!admit->peers)
		return err_pass(-ENOMEM);
	cJSON_ArrayForEach(item, peers) {
		const char *name = cJSON_GetStringValue(item);

		if (!name || !*name || strlen(name) >= LINK_USER_MAX)
			return err_raise(ERR_INVAL,
					 "peers[%u]: must be a name of the allow-list, 1 "
					 "to %u bytes",
					 admit->peer_count, LINK_USER_MAX - 1);
		admit->peers[admit->peer_count] = mem_strdup(name);
		if (!admit->peers[admit->peer_count])
			return err_pass(-ENOMEM);
		admit->peer_count++;
	}
	return 0;
}

int room_admit_parse(const char *ticket, const cJSON *peers, struct room_admit *admit_p)
{
	struct room_admit admit = {0};
	int r = 0;

	if (ticket && (strlen(ticket) != HEX_CHARS(TICKET_BYTES) ||
		       !hex_read(ticket, admit.ticket, TICKET_BYTES)))
		r = err_raise(ERR_INVAL, "ticket: must be %u hex digits",
			      HEX_CHARS(TICKET_BYTES));
	else if (ticket && !ticket_given(admit.ticket))
		r = err_raise(ERR_INVAL, "ticket: all zeroes; it must be random");
	if (r >= 0 && peers)
		r = parse_peers(peers, &admit);
	if (r < 0) {
		room_admit_fini(&admit);
		return err_pass(r);
	}
	*admit_p = admit;
	return 0;
}

void room_admit_fini(struct room_admit *admit)
{
	for (unsigned int i = 0; i < admit->peer_count; i++)
		mem_free(admit->peers[i]);
	mem_free(admit->peers);
	explicit_bzero(admit, sizeof(*admit));
}

static bool is_named(const struct room_admit *admit, const struct peer *peer)
{
	for (unsigned int i = 0; i < admit->peer_count; i++) {
		if (strcmp(admit->peers[i], peer->known_as) == 0)
			return true;
	}
	return false;
}

int room_admit_check(const struct room_admit *admit, uint64_t number,
		     const struct peer *peer, const uint8_t ticket[TICKET_BYTES])
{
	unsigned long long room = number;

	if (admit->peers && !is_named(admit, peer))
		return err_raise(
			ERR_AUTH,
			"peers: room %llu does not admit daemon '%s'; name it in its "
			"room.open",
			room, peer->known_as);
	if (ticket_given(admit->ticket) &&
	    !mem_equal(admit->ticket, ticket, TICKET_BYTES))
		return err_raise(
			ERR_AUTH,
			"ticket: does not match that of room %llu; pass the same ticket "
			"to room.open on both sides",
			room);
	if (room_admit_is_open(admit) && !peer->same_user)
		return err_raise(ERR_AUTH,
				 "ticket: room %llu has none, and daemon '%s' is of "
				 "another user; pass the same ticket to room.open on "
				 "both sides, or name the daemon in its peers",
				 room, peer->known_as);
	return 0;
}

int room_admit_source(const struct room_admit *admit, const struct peer *peer)
{
	if (!admit->peers || is_named(admit, peer))
		return 0;
	return err_raise(ERR_AUTH,
			 "peers: does not name source %s; add it, or use another source",
			 peer->shown);
}

void room_admit_record(const struct room_admit *admit, struct text *out)
{
	out_bool(out, "ticket", ticket_given(admit->ticket));
	if (!admit->peers)
		return;
	out_array(out, "admits");
	for (unsigned int i = 0; i < admit->peer_count; i++)
		out_text(out, NULL, admit->peers[i]);
	out_close(out, ']');
}
