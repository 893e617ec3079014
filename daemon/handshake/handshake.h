/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handshake: the exchange of memory descriptions between two daemons. Chooses the
 * transport of a peer and opens it, sends REGISTER for every local pool once per peering,
 * keeps the remote pools with usable keys, and removes them on UNREGISTER or when the
 * peer is lost.
 */
#ifndef KVD_HANDSHAKE_H
#define KVD_HANDSHAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/idmap.h"
#include "daemon/base/list.h"
#include "daemon/base/module.h"
#include "daemon/loop/work.h"
#include "daemon/peer/peer.h"
#include "daemon/plan/layout.h"
#include "daemon/session/pool.h"
#include "daemon/handshake/sched.h"
#include "daemon/transport/transport.h"

struct kvd;
struct handshake;
struct region_map;

/* How a source's pool was named, as on the wire. */
#define POOL_BY_NAME 1u
#define POOL_BY_RANK 2u
#define POOL_BY_SESSION 4u
#define POOL_BY_WORDS 8u /* number of combinations of these */
#define POOL_BY_ID 8u	 /* of a pool that has no other name */

struct remote_region {
	uint64_t id, address, length;
	uint8_t kind;	    /* enum region_kind: for records */
	struct xp_key *key; /* NULL until wanted */
	bool ready;
	uint8_t *packed; /* the key as received; length 0: not usable on this data line */
	size_t packed_len;
	struct remote_pool *pool; /* set when the key was requested */
	bool borrowed;		  /* the key is the replacement's: handshake_keys.c */
};

struct remote_pool {
	struct list link; /* in remote.pools.list */
	struct remote *remote;
	uint64_t id; /* the owner's pool id (kind pool) or session epoch (kind session) */
	uint64_t session; /* the owner's session epoch */
	bool is_session;
	bool own; /* internal pool of its daemon: no engine's room chooses it */
	char name[POOL_NAME_MAX];
	struct layout *layout; /* pools only */
	struct remote_region *regions;
	uint32_t region_count;
	struct region_map *by_address; /* of them; search.c makes it on demand */
	struct xp_buffer *buffers; /* pools: layout->buffer_count, .key and .offset set */
	uint32_t *buffer_region;   /* pools: index into regions of each buffer */
	bool wanted, want_later;   /* keys are requested, or to be requested */
	struct loop_work unpacking; /* requests them, from then on */
	uint32_t unpacked;	    /* of the regions */
	bool ready;		    /* every key is usable */
	struct err refused;	    /* code != OK: keys cannot be used, with the reason */
	unsigned int uses;	    /* rooms and ops that hold it */
	struct charge charge;	    /* memory of the decoded pool */
	bool going;		    /* UNREGISTER received: acknowledged at zero uses */
	bool dead;		    /* of an earlier epoch of the peer */
	struct remote_pool *replacement; /* the pool that has its keys now: in use */
};

/* Is it memory of GPUs? NULL: no. */
static inline bool handshake_pool_in_gpu(const struct remote_pool *pool)
{
	return pool && pool->region_count &&
	       (pool->regions[0].kind == REGION_CUDA_IPC ||
		pool->regions[0].kind == REGION_CUDA_VMM);
}

/* Which side dialled. */
enum { LINE_HERE, LINE_THERE };

/* Opening the data line (handshake_line.c). */
struct remote_dial {
	int told;		   /* transport that the other side chose; -1: not yet */
	char passed[ERR_TEXT_MAX]; /* transports that could not be opened, and why */
	struct err why[2];	   /* LINE_HERE, LINE_THERE: of the last failure */
	uint32_t turn;		   /* number of failed attempts to connect */
	uint64_t turn_ns;	   /* start of the current turn */
	struct loop_timer again;   /* the next */
	bool closing;		   /* of the last line has not ended, */
	bool start_again;	   /* and then a new one is opened */
	uint64_t down_ns;	   /* since when the data line is down; 0: it is up */
	uint64_t up_ns;		   /* since when it is, or was, up */
};

/* The peer's pools, as known here (handshake_pools.c). */
struct remote_pools {
	struct list list;   /* of this epoch */
	struct idmap by_id; /* those that are not going */
	struct list dead;   /* of earlier epochs */
	unsigned int count; /* in both lists */
	bool listed;	    /* all pools at connection time are known (POOLS) */
};

/* Our pools, as the peer knows them (handshake_announce.c). */
struct remote_announce {
	bool begun;		 /* for `transport`, in this peering */
	bool all;		 /* POOLS was sent */
	bool refuses;		 /* it has refused a pool */
	unsigned int unanswered; /* UNREGISTERs whose answer is not needed */
	uint64_t number;	 /* the last announcement that it knows */
	struct idmap shares;	 /* struct share by pool: local pools that it knows */
	struct list link;	 /* in handshake.current or .behind, once begun */
};

/* Messages on the data line (handshake_express.c). */
struct remote_express {
	struct express_in *in; /* NULL: not agreed */
	struct list free;
	struct list late; /* accepted here; their acknowledgement is pending */
	unsigned int late_count;
	size_t late_bytes;
	struct loop_timer tell;
};

/* A peer as the upper layers see it: the control line and the data line. */
struct remote {
	struct kvd *kvd;
	struct peer *peer;
	struct list link;
	struct transport *transport; /* chosen; NULL until chosen */
	unsigned int transport_index;
	struct xp_peer *xp;
	bool ready;	 /* data line usable, in this epoch of the peer */
	bool refused;	 /* BYE answered our HELLO, or the keys do not match: `why` */
	struct err why;	 /* code != OK: no transport / down */
	uint64_t downs;	 /* number of times its peer was lost, */
	struct err down; /* and the reason of the last loss, */
	bool down_dead;	 /* for it was silent */
	struct remote_dial dial;
	struct remote_pools pools;
	struct remote_announce announce;
	struct remote_express express;
	struct sched_line line;
	unsigned int reaches; /* handshake_reach() minus handshake_release() */
	struct account
		*account; /* set when it is first up; NULL before, and nothing is kept */
	unsigned int figures;	    /* its set in metrics.peers */
	char label[PEER_LABEL_MAX]; /* peer_label(), for reasons */
	void *part[MODULES];	    /* each module's own: remote_bytes */
};

struct handshake_events {
	void *owner;
	void (*on_up)(void *owner, struct remote *remote);
	/* A remote pool became ready or was refused; a data line became ready or was
	 * lost (all its ops are done by then). Waiting rooms check their state. */
	void (*on_change)(void *owner, struct remote *remote);
	/* The peer is down: all its state is invalid after this call. */
	void (*on_down)(void *owner, struct remote *remote, const struct err *why);
	/* The owner withdraws the pool: stop using it (drop `uses`). */
	void (*on_pool_going)(void *owner, struct remote_pool *pool);
	/* The remote has accepted the list of handshake_share_session() for that
	 * epoch, or refuses it (`why`): operations that need it there fail. */
	void (*on_shared)(void *owner, struct remote *remote, uint64_t epoch,
			  const struct err *why);
	/* A room's, attach's or lease's message. */
	int (*on_message)(void *owner, struct remote *remote, const struct wire_header *h,
			  struct cursor *body);
	void (*on_request)(void *owner, struct remote *remote, struct xp_inbound *in);
};
/* The hooks of kvd->modules. */
struct handshake_events handshake_events_of(struct kvd *kvd);

int handshake_new(struct kvd *kvd, const struct handshake_events *events,
		  struct handshake **hs_p);
/* BYE to all. Data lines close by themselves; run the loop until drained. */
void handshake_close(struct handshake *hs);
bool handshake_drained(const struct handshake *hs);
/* No message is in flight on a data line. */
bool handshake_quiet(const struct handshake *hs);
void handshake_free(struct handshake *hs);

/* Dial and hold. Never blocks; watch on_change. */
int handshake_reach(struct handshake *hs, const char *endpoint,
		    const struct peer_client *client, struct remote **remote_p);
void handshake_release(struct remote *remote);

/* When waiting for the data line since `since` becomes pointless: connect_timeout
 * after the start of the wait, or dead_after if the peer was up and was lost.
 * UINT64_MAX: the line is up. */
uint64_t handshake_patience(const struct remote *remote, uint64_t since_ns);
/* Why nothing can be sent to the remote. The text names the remote, or the address
 * that was tried. */
const char *handshake_why_not(const struct remote *remote, char text[ERR_TEXT_MAX]);

/* Pools are announced to remotes in batches, one a turn. Call this before a message
 * that names a pool: announces it at once. */
void handshake_announce(struct remote *remote, const struct pool *pool);

struct pool_wanted {
	const char *name; /* NULL: any */
	int64_t rank;	  /* of its layout; -1: any */
	uint64_t session; /* epoch of its engine's; 0: any */
};
/*
 * The remote pool that matches the request for `local`; there must be exactly one. 0, or
 * outcome 1: no match, or the remote's list of pools is incomplete (watch on_change).
 * Negative: several match (ERR_INVAL), or the layouts are incompatible (ERR_LAYOUT with
 * the difference).
 */
int handshake_pool(struct remote *remote, const struct pool_wanted *wanted,
		   const struct pool *local, struct remote_pool **pool_p);
/* The remote has chosen our pool `id` by the fields in `named`, for its pool `requester`.
 * ERR_INVAL: another local pool matches as well, which the remote may not know yet. */
int handshake_check_choice(const struct handshake *hs, const struct remote *remote,
			   uint64_t id, uint8_t named, uint64_t requester);
struct remote_pool *handshake_pool_by_id(struct remote *remote, uint64_t id);
/* Is it a published pool of this daemon that is not being unregistered? */
bool handshake_pool_is_ours(const struct handshake *hs, uint64_t id);
/* Make the pool's keys usable (a reader needs them); then `ready` or `refused`
 * is set and on_change called. Idempotent. */
void handshake_want_keys(struct remote_pool *pool);
/* Take and drop a use. A pool that is being unregistered is acknowledged at zero uses. */
void handshake_pool_use(struct remote_pool *pool);
void handshake_pool_unuse(struct remote_pool *pool);

/* This side's buffer table of a pool for one transport (layout->buffer_count
 * entries), valid as long as the pool is published. NULL + ERR_IMPORT when a
 * region cannot be used with that transport. */
const struct xp_buffer *handshake_local_buffers(struct pool *pool,
						const struct remote *remote);

/* Register the regions of a session that `tells` selects with one remote (kind
 * session), under its epoch; after a change, again: replaces the list. */
int handshake_share_session(struct handshake *hs, struct remote *remote,
			    struct session *session,
			    bool (*tells)(const struct region *region, const void *arg),
			    const void *arg);
/* The session has ended: the remote may use none of its regions any more. */
void handshake_unshare_session(struct remote *remote, const struct session *session);

/* Send a message of a room or transfer. Messages that an engine waits for take the
 * data line when it is up, in the same order. Secrets do not, if others can read the
 * data line. */
int handshake_send(struct remote *remote, enum wire_type type, const void *body,
		   size_t len);
/* Buffer for one message body of any type; valid until the next call. */
void handshake_body(struct handshake *hs, struct cursor *out);
/* handshake_send_<name>(): the body written, and sent as its type. */
#define HANDSHAKE_TELL(num, NAME, name, owner, cap, text)                                \
	static inline int handshake_send_##name(struct remote *remote,                   \
						const struct wire_##name *msg)           \
	{                                                                                \
		struct cursor out;                                                       \
		int r;                                                                   \
                                                                                         \
		handshake_body(remote->kvd->handshake, &out);                            \
		r = wire_##name##_put(&out, msg);                                        \
		return r < 0 ? r                                                         \
			     : handshake_send(remote, WIRE_T_##NAME, out.base, out.pos); \
	}
WIRE_MESSAGES(HANDSHAKE_TELL)
#undef HANDSHAKE_TELL
/* Send a long message that an engine waits for: the body at made + PEER_EXPRESS_HEAD,
 * which is taken: peer_send_express_made(). */
int handshake_send_made(struct remote *remote, enum wire_type type, uint8_t *made,
			size_t len);
/* Send a long message in its own memory, which is taken: peer_send_owned(). */
int handshake_send_owned(struct remote *remote, enum wire_type type, uint8_t *owned,
			 size_t len);
/* The same for a blob inside a body. */
void handshake_blob(struct handshake *hs, struct cursor *out);
/* Bytes of a room or transfer have moved. */
void handshake_moved(const struct remote *remote, enum metric_direction direction,
		     uint64_t bytes);
/* All remotes (struct remote.link), for lists and records. */
const struct list *handshake_remotes(const struct handshake *hs);

/* Bytes queued for and in flight on the data lines. */
void handshake_bytes(const struct handshake *hs, uint64_t *queued_p, uint64_t *posted_p);

/* Number of peers on other hosts whose data lines are not encrypted. */
unsigned int handshake_plain_peers(const struct handshake *hs);
/* 0: new rooms may be opened; else the reason (option `require`). */
int handshake_transports_ok(const struct handshake *hs);

#endif
