/* SPDX-License-Identifier: Apache-2.0 */
/* room_cover: shared by the receiving roles (recv, pull): wait for the pools of their
 * sources, make the cover, and account the bytes due from each source. */
#ifndef KVD_ROOM_COVER_H
#define KVD_ROOM_COVER_H

#include "daemon/room/room.h"

/* Leave BOOT when every source's data line and pool are usable: takes uses of the
 * pools and requests their keys. A source that never will be usable fails the room. */
bool room_booted(struct room *room);
/* Compute, for the bound maps, each party's wants, expected bytes and coverage. Outcome
 * 1: the turn's time is over, the room's next step continues. */
int room_cover(struct room *room);
/* All bytes due from it have arrived: count them. */
void room_cover_landed(struct party *party);
/* A source's peer is down: true when the room can continue without it. */
bool room_source_lost(struct party *party);
/* The complete pages of a bound map, as a bitmap: bit p % 8 of byte p / 8 for
 * pages[p]. *bits_p is heap, (page_count + 7) / 8 bytes. */
int room_landed_pages(const struct room *room, size_t map, uint8_t **bits_p);

/* The common entries of struct role_ops for recv and pull. */
void bind_init(struct room *room);
void bind_fini(struct room *room);
void bind_party_fini(struct party *party);

#endif
