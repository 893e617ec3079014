/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_party: a room's counterpart in one peer: a source, a receiver, an offerer, a
 * puller. Its room owns it; it holds its peer, and the peer's pool while it uses it.
 */
#ifndef KVD_ROOM_PARTY_H
#define KVD_ROOM_PARTY_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/handshake/handshake.h"
#include "daemon/handshake/sched.h"
#include "daemon/plan/coverage.h"
#include "daemon/plan/plan.h"
#include "daemon/room/room_map.h"

struct room;

#define ROOM_ANY_RANK (-1)

/* What was moved for a room on this side, as the transports say when it is done. */
struct room_used {
	uint64_t bytes, staged; /* staged: of them, by way of a buffer */
	uint64_t rows;		/* of the plans made here */
	uint64_t descriptors;
};

/* The counterpart in one peer: a source, a receiver, an offerer, a puller. */
struct party {
	struct list link; /* in room->parties */
	struct room *room;
	struct remote *remote;	  /* held (reaches) */
	struct remote_pool *pool; /* in use (handshake_pool_use) or NULL */
	uint64_t pool_id;	  /* of the one that was in use last; 0: none was */
	/* As asked for; once a pool was in use, that one's, and no other is used later.
	 */
	char pool_name[POOL_NAME_MAX]; /* "" = any */
	int64_t rank;		       /* ROOM_ANY_RANK */
	uint64_t session;	       /* its engine's epoch; 0 = any */
	uint64_t pool_asked;	       /* this pool of it; 0: by what is above */
	uint8_t named;		       /* POOL_BY_…: what was asked for */
	uint8_t instance[16];	       /* whose pool was in use */
	uint64_t gen;	     /* the other side's generation; 0 = not known yet */
	uint64_t room_there; /* the room's number there (a pull may name another) */
	struct sched_flow flow;
	struct room_maps theirs;   /* send: receiver's pages; pull: source's pages */
	struct cJSON *theirs_json; /* pull: pages named by the engine; read when the
				      source's pool is known */
	size_t json_bytes;	   /* of that, charged to the room */
	struct plan_want *wants;   /* what this source sends / must send */
	size_t want_count;
	struct charge wants_charge; /* send: to the receiver, whose they are */
	bool told;	  /* TRANSFER_INFO or OFFER_QUERY is out, or being written */
	bool reading;	  /* TRANSFER_INFO or OFFER is here and being read: room_mail.h */
	bool answered;	  /* acknowledged / OFFER is here */
	bool ack_pending; /* send: its TRANSFER_INFO is taken, but not acknowledged */
	struct list ack_link; /* in rooms->acks: before the loop sleeps */
	bool done;	      /* nothing more is expected of it */
	bool lost;	      /* its peer went down: ask party_lost() */
	bool withdrawn;	      /* `pool` is, and the room has seen it */
	uint64_t downs;	      /* remote->downs, as the room has seen them */
	uint64_t joined_ns;
	uint16_t index;	  /* in the order of joining */
	bool heard_abort; /* it waits for our ABORT_ACK */
	bool quiesced;	  /* its ABORT_ACK is here: quiet on its side too */
	/* recv, pull */
	struct coverage *coverage; /* one a bound view, in the order of room->maps */
	uint64_t expected, got;	   /* bytes */
	bool last_seen;
	uint64_t last_seq;
	struct room_used used;
	char path[64];	   /* by which they went; "": none did yet */
	struct xp_way way; /* of its last chunk for which there was a choice */
	/* offer, pull */
	bool asked_ack; /* pull: told that all was read, PULL_ACK is pending */
	bool away;	/* offer: it could not go on, and may come again as another */
	uint64_t lease_epoch;
	uint64_t lease_ns;
	uint64_t offered_ns; /* offer: when its query was answered last */
	unsigned int offers; /* offer: so often */
};
/* Its peer went down, whether the room has seen it yet (rooms_loss.c) or not. */
static inline bool party_lost(const struct party *party)
{
	return party->lost || party->downs != party->remote->downs;
}

struct party *room_party_add(struct room *room, struct remote *remote);
/* The party that this pool, or this generation, of the remote is; or NULL. */
struct party *room_party_by_pool(struct room *room, const struct remote *remote,
				 uint64_t pool);
struct party *room_party_by_gen(struct room *room, const struct remote *remote,
				uint64_t gen);
/* Is each of them `done`? */
bool room_parties_done(const struct room *room);
void party_use_pool(struct party *party, struct remote_pool *pool);
void party_drop(struct party *party); /* frees it */
/* "source tcp://… pool 'kv'" for messages. */
const char *party_label(const struct party *party, char *buf, size_t size);
/* What it holds of its peer's pool, if no move does. */
void party_release_pool(struct party *party);

#endif
