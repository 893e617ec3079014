/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rooms: all rooms of the daemon: by (session, role, number), by generation; messages
 * that arrived before their room (orphans) and after it (tombstones).
 */
#ifndef KVD_ROOMS_H
#define KVD_ROOMS_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/context.h"
#include "daemon/handshake/handshake.h"
#include "daemon/room/room.h"
#include "daemon/transport/kinds.h"

struct rooms;

extern const struct module room_module;
static inline struct rooms *rooms_of(const struct kvd *kvd)
{
	return kvd->part[MODULE_ROOM];
}

/* Accept no new rooms: partners that wait for a room are notified. */
void rooms_drain(void *rooms);
/* Fail every room of the daemon (shutdown), in later turns when they are many. */
void rooms_fail_all(void *rooms, const struct err *why);
unsigned int rooms_count(const struct rooms *rooms);
unsigned int rooms_live(const struct rooms *rooms); /* not terminal */
unsigned int rooms_orphans(const struct rooms *rooms);
/* Since when the oldest room in that state has been in it; 0: no room is. */
uint64_t rooms_oldest_ns(const struct rooms *rooms, enum room_state state);

/* The hooks of the module. If there are many rooms, some process an event of a remote
 * in later turns, but each before its next event of the remote. */
void rooms_on_change(struct remote *remote);
void rooms_on_up(struct remote *remote);
void rooms_on_down(struct remote *remote, const struct err *why);
void rooms_on_pool_going(struct remote_pool *pool);
int rooms_on_message(struct remote *remote, const struct wire_header *h,
		     struct cursor *body);
/* REQUEST_CHUNK and REQUEST_PULL. */
void rooms_on_request(struct remote *remote, struct xp_inbound *in, unsigned int kind,
		      struct cursor *header);

/* ---- for commands and the roles ---- */
struct room_args {
	struct session *session;
	enum room_role role;
	uint64_t number;
	struct pool *pool;
	uint64_t limits_ns[3];	     /* bootstrap, waiting, stall; 0 = the options' */
	uint32_t receivers;	     /* offer, recv, pull; 0 = not given */
	bool receivers_from_pullers; /* offer: by the pullers */
	uint64_t lease_ns;	     /* offer */
	struct room_leg *leg;	     /* owner of an internal room; else NULL */
	bool slotted;		     /* its slot is claimed already: */
	uint32_t slot, slot_gen;
};
/* ERR_EXIST, ERR_LIMIT, ERR_DRAIN, ERR_NOMEM. */
int rooms_open(struct rooms *rooms, const struct room_args *args, struct room **room_p);
/* Undo a room that its command cannot finish opening: no other part knows it yet. A
 * slot that its engine chose stays claimed. */
void rooms_discard(struct room *room);
/* Start an open room that is complete: delivers the messages that waited for it. */
void rooms_begin(struct room *room);
/* ERR_STATE unless terminal. */
int rooms_close(struct room *room);
/* Its engine releases it: its number may be opened again at once. It fails if it has
 * not ended, and is removed afterwards. */
void rooms_drop(struct room *room);
struct room *rooms_find(struct rooms *rooms, const struct session *session,
			enum room_role role, uint64_t number);
/* The room in this slot of the session's status page, if the generation matches; else
 * NULL. */
struct room *rooms_by_slot(struct rooms *rooms, const struct session *session,
			   uint32_t slot, uint32_t gen);
bool rooms_has_slot(struct rooms *rooms, const struct session *session, uint32_t slot);
struct room *rooms_by_gen(struct rooms *rooms, uint64_t gen);
/* The open room of a local pool, in any session. */
struct room *rooms_by_pool(struct rooms *rooms, uint64_t pool, enum room_role role,
			   uint64_t number);
struct waits *rooms_waits(const struct rooms *rooms);

/* Requests of peers for rooms that are not open here, oldest first; a struct
 * room_cursor may be in the list. */
struct room_request {
	const struct remote *remote;
	uint64_t number, pool; /* here */
	enum room_role role;   /* of the room that is to open here */
	uint64_t since_ns, until_ns;
};
struct room_request rooms_request_at(const struct rooms *rooms, const struct list *at);

unsigned int rooms_moving(const struct rooms *rooms); /* transferring */

/* Keep an ABORT for a source that is not connected: sent once it is, or dropped after
 * connect_timeout. Charged to the account. */
void rooms_defer_abort(struct rooms *rooms, struct remote *remote,
		       const struct wire_abort *msg, struct account *account);
/* Its TRANSFER_INFO is invalid. */
void rooms_refuse_info(const struct party *party, const struct err *why);
/* Acknowledge the party's TRANSFER_INFO at the end of this turn, or now. */
void rooms_ack_later(struct party *party);
void rooms_ack(struct party *party);

#endif
