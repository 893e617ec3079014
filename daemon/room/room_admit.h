/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_admit: which daemons may take part in a room: those that present the ticket that
 * room.open was given on both sides, and (`peers`) only those with one of these names in
 * the allow-list. A room with neither admits the daemons of this daemon's own user
 * (peer->same_user).
 *
 * The ticket is a secret of the two engines and their daemons: it is in no record, log or
 * trace. A receiver presents it to its sources; if it names `peers`, only to those.
 */
#ifndef KVD_ROOM_ADMIT_H
#define KVD_ROOM_ADMIT_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#define TICKET_BYTES 16u
#define ADMIT_PEERS_MAX 1024u

struct peer;
struct text;

struct room_admit {
	uint8_t ticket[TICKET_BYTES]; /* zeroes: none */
	char **peers;		      /* names; NULL: none are named */
	unsigned int peer_count;
};

/* `ticket` (hex) and `peers` of room.open, each may be NULL. ERR_INVAL. */
int room_admit_parse(const char *ticket, const cJSON *peers, struct room_admit *admit_p);
void room_admit_fini(struct room_admit *admit);
bool ticket_given(const uint8_t ticket[TICKET_BYTES]);
/* Is the room open to all daemons of the user: neither ticket nor names? */
bool room_admit_is_open(const struct room_admit *admit);
/* May this peer, which presented `ticket` (zeroes: none), request room `number`?
 * ERR_AUTH, with a text for its engine. */
int room_admit_check(const struct room_admit *admit, uint64_t number,
		     const struct peer *peer, const uint8_t ticket[TICKET_BYTES]);
/* May the ticket be sent to it, and may it be a source? ERR_AUTH, with a text for the
 * own engine. */
int room_admit_source(const struct room_admit *admit, const struct peer *peer);
/* Add `ticket`: whether there is one, and `admits`: the names, if any. False: no
 * memory. */
void room_admit_record(const struct room_admit *admit, struct text *out);

#endif
