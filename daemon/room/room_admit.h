/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_admit: which daemons may take part in a room: who shows the ticket that both
 * sides' room.open were given, and (`peers`) whose name in the allow-list is one of
 * these. A room with neither admits the daemons of this one's own user (peer->kin).
 *
 * The ticket is a secret of the two engines and their daemons: it is in no record, log or
 * trace. A receiver shows it to its sources; where it names `peers`, to no other.
 */
#ifndef KVD_ROOM_ADMIT_H
#define KVD_ROOM_ADMIT_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#define TICKET_BYTES 16u
#define ADMIT_PEERS_MAX 1024u

struct peer;

struct room_admit {
	uint8_t ticket[TICKET_BYTES]; /* zeroes: none */
	char **peers;		      /* names; NULL: none are named */
	unsigned int peer_count;
};

/* `ticket` (hex) and `peers` of room.open, each may be NULL. ERR_INVAL. */
int room_admit_parse(const char *ticket, const cJSON *peers, struct room_admit *admit_p);
void room_admit_fini(struct room_admit *admit);
bool ticket_given(const uint8_t ticket[TICKET_BYTES]);
/* Does neither a ticket nor a name say who may take part? */
bool room_admit_is_open(const struct room_admit *admit);
/* May this peer, which showed `ticket` (zeroes: none), ask for room `number`? ERR_AUTH,
 * in words for its engine. */
int room_admit_check(const struct room_admit *admit, uint64_t number,
		     const struct peer *peer, const uint8_t ticket[TICKET_BYTES]);
/* May it be told the ticket, and be a source? ERR_AUTH, in words for the own engine. */
int room_admit_source(const struct room_admit *admit, const struct peer *peer);
/* `ticket`: whether there is one, and `admits`: the names, if any. False: no memory. */
bool room_admit_record(cJSON *obj, const struct room_admit *admit);

#endif
