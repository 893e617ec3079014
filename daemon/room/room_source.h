/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_source: sources of a room that are named by their group, not by an endpoint. A
 * source is looked up in the directory (names.h); while it is missing the room waits, as
 * for a daemon that is not connected. Once found it is a party like any other: later
 * changes in the directory have no effect.
 */
#ifndef KVD_ROOM_SOURCE_H
#define KVD_ROOM_SOURCE_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/link/names.h"

struct room;

/* One entry of "sources". */
struct source_args {
	const char *endpoint, *group; /* one of the two */
	const char *worker;	      /* NULL: the group's only one */
	uint32_t place[PLACE_AXES];
	const char *pool;
	int64_t rank;
	uint64_t session; /* with endpoint; 0: any */
	uint64_t room;
};

/* `theirs`: pull: the source's entry of "remote", of which the views are taken; NULL:
 * none. It becomes a party, or waits in room->bind.sources. ERR_INVAL: several workers;
 * as names->use(), handshake_reach(). */
int room_source_add(struct room *room, const struct source_args *args, cJSON *theirs);
/* Look up the missing sources. False: some are still missing, or the room has failed. */
bool room_sources_find(struct room *room);
void room_sources_free(struct room *room);
/* The first missing source, and why: "group 'g' …: not in the directory". */
void room_sources_text(const struct room *room, char *text, size_t size);

#endif
