/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_party: a room's counterpart in one peer: a source, a receiver, an offerer, a
 * puller. Its room owns it; it holds its peer, and the peer's pool while it uses it.
 */
#ifndef KVD_ROOM_PARTY_H
#define KVD_ROOM_PARTY_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/account.h"
#include "daemon/base/list.h"
#include "daemon/base/sm.h"
#include "daemon/handshake/handshake.h"
#include "daemon/handshake/sched.h"
#include "daemon/plan/coverage.h"
#include "daemon/plan/plan.h"
#include "daemon/room/room_map.h"

struct room;

#define ROOM_ANY_RANK (-1)

/* Work done for a room on this side, as the transports report it at the end. */
struct room_used {
	uint64_t bytes, staged; /* staged: the part of them that used a buffer */
	uint64_t rows;		/* of the plans made here */
	uint64_t descriptors;
};

/*
 * State of a party; each role has its own transitions (room_party.c). A party of
 *
 *   recv    NEW -> ASKED -> ANSWERED -> CLOSING -> DONE, each but ASKED may be left out
 *   pull    NEW -> ASKED -> (READING ->) ANSWERED -> CLOSING -> DONE
 *   send    READING -> TAKEN -> ANSWERED -> DONE
 *   offer   NEW -> ANSWERED -> DONE, or AWAY instead
 */
enum party_state {
	PARTY_NEW,	/* recv, pull: no message sent yet; offer: no answer sent yet */
	PARTY_ASKED,	/* recv, pull: TRANSFER_INFO or OFFER_QUERY is sent or written */
	PARTY_READING,	/* pull: its OFFER, send: its TRANSFER_INFO is read (room_mail.h)
			 */
	PARTY_TAKEN,	/* send: read completely, not acknowledged yet */
	PARTY_ANSWERED, /* recv, pull: by it; send, offer: by this side */
	PARTY_CLOSING,	/* recv: its last chunk has arrived; pull: PULL_ACK is due */
	PARTY_DONE,	/* no more messages of it are expected */
	PARTY_AWAY,	/* offer: it failed in a way that allows another attempt */
	PARTY_STATES,
};

/* State of the connection to it, as the room has seen it: rooms_loss.c. */
enum party_line {
	PARTY_UP,
	PARTY_LOST,	  /* its peer was lost; use party_lost() */
	PARTY_POOL_GOING, /* its pool is withdrawn */
};

/* bits of `abort` */
#define PARTY_ABORT_RECEIVED 0x1u /* it waits for our ABORT_ACK */
#define PARTY_QUIESCED 0x2u	  /* its ABORT_ACK has arrived */

/* recv, pull: bytes due from it, and bytes received. */
struct party_due {
	struct coverage
		*coverage; /* one for each bound view, in the order of room->pages.maps */
	uint64_t expected, got; /* bytes */
	uint64_t last_seq;	/* recv: of its last chunk */
	/* pull */
	uint64_t lease_epoch, lease_ns;
	bool reads;		   /* the read has begun, or it has nothing to read */
	struct cJSON *theirs_json; /* pages named by the engine; read when the pool of
				      the source is known */
	size_t json_bytes;	   /* charged to the room for it */
};

struct party {
	struct list link; /* in room->parties */
	struct room *room;
	struct remote *remote;	  /* held (reaches) */
	struct remote_pool *pool; /* in use (handshake_pool_use) or NULL */
	struct sm sm;		  /* enum party_state */
	uint8_t line;		  /* enum party_line */
	uint8_t abort;		  /* PARTY_… bits */
	uint8_t named;		  /* POOL_BY_…: how the pool was named */
	uint16_t index;		  /* in the order of joining */
	uint64_t pool_id;	  /* of the last pool in use; 0: none was */
	/* As requested; once a pool was in use, the name of that one, and no other is
	 * used later. */
	char pool_name[POOL_NAME_MAX]; /* "" = any */
	int64_t rank;		       /* ROOM_ANY_RANK */
	uint64_t session;	       /* its engine's epoch; 0 = any */
	uint64_t pool_asked;  /* number of the wanted pool; 0: by the fields above */
	uint8_t instance[16]; /* instance whose pool was in use */
	uint64_t gen;	      /* the other side's generation; 0 = not known yet */
	uint64_t room_there;  /* the room's number there (a pull may name another) */
	struct sched_flow flow;
	struct room_maps theirs; /* send: receiver's pages; pull: source's pages */
	struct plan_want *wants; /* units that this source sends / must send */
	size_t want_count;
	uint64_t downs; /* remote->downs, as processed by the room */
	uint64_t joined_ns;
	struct room_used used;
	char path[64];	   /* path of its bytes; "": none so far */
	struct xp_way way; /* of its last chunk for which there was a choice */
	union {
		struct party_due due; /* recv, pull */
		struct {
			struct list ack_link;	    /* in rooms->acks */
			struct charge wants_charge; /* on the receiver */
		} send;
		struct {
			uint64_t answered_ns; /* when its query was, last */
			unsigned int answers; /* so often */
		} offer;
	};
};
static inline enum party_state party_state(const struct party *party)
{
	return (enum party_state)sm_state(&party->sm);
}
/* Was its peer lost, even if the room has not processed that (rooms_loss.c)? */
static inline bool party_lost(const struct party *party)
{
	return party->line == PARTY_LOST || party->downs != party->remote->downs;
}
/* recv, pull: does its peer know of this room from our messages? */
bool party_asked(const struct party *party);
static inline bool party_unasked(const struct party *party)
{
	return !party_asked(party);
}
/* No more messages of it are expected: a receiver that wants nothing is done once its
 * wants are read. */
bool party_done(const struct party *party);

struct party *room_party_add(struct room *room, struct remote *remote);
/* The party with this pool, or this generation, of the remote; or NULL. */
struct party *room_party_by_pool(struct room *room, const struct remote *remote,
				 uint64_t pool);
struct party *room_party_by_gen(struct room *room, const struct remote *remote,
				uint64_t gen);
/* `act` for each party that is `due`, in order, for as many as the turn has time. Outcome
 * 1: the room's next step continues. It ends with the room. */
int room_parties_act(struct room *room, bool (*due)(const struct party *party),
		     int (*act)(struct party *party));
/* Is party_done() each of them? */
bool room_parties_done(const struct room *room);
void party_use_pool(struct party *party, struct remote_pool *pool);
void party_drop(struct party *party); /* frees it */
/* "source tcp://… pool 'kv'" for messages. */
const char *party_label(const struct party *party, char *buf, size_t size);
/* "peer p0": by its name, once known, else by its endpoint. */
const char *room_peer_name(const struct remote *remote, char *buf, size_t size);
/* Release its use of the peer's pool; moves keep their own. */
void party_release_pool(struct party *party);

#endif
