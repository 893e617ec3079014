/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handshake: what two daemons know of each other's memory. Chooses the
 * transport of a peer, opens it, sends REGISTER for every local pool once per
 * peering, keeps the remote pools with usable keys, and takes all of it back
 * on UNREGISTER or when the peer goes down.
 */
#ifndef KVD_HANDSHAKE_H
#define KVD_HANDSHAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/idmap.h"
#include "daemon/base/list.h"
#include "daemon/base/module.h"
#include "daemon/peer/peer.h"
#include "daemon/plan/layout.h"
#include "daemon/session/pool.h"
#include "daemon/handshake/sched.h"
#include "daemon/transport/transport.h"

struct kvd;
struct handshake;

/* By what a source's pool is named, as told on the wire. */
#define POOL_BY_NAME 1u
#define POOL_BY_RANK 2u
#define POOL_BY_SESSION 4u
#define POOL_BY_WORDS 8u /* so many combinations of these */
#define POOL_BY_ID 8u	 /* of a pool that nothing else names */

struct remote_region {
	uint64_t id, address, length;
	uint8_t kind;	    /* enum region_kind: for records */
	struct xp_key *key; /* NULL until wanted */
	bool ready;
	uint8_t *packed; /* the key as it came; length 0: not usable on this line */
	size_t packed_len;
	struct remote_pool *pool; /* set when the key was asked for */
	bool borrowed;		  /* the key is the replacement's: handshake_keys.c */
};

struct remote_pool {
	struct list link; /* in remote.pools */
	struct remote *remote;
	uint64_t id; /* the owner's pool id (kind pool) or session epoch (kind session) */
	uint64_t session; /* the owner's session epoch */
	bool is_session;
	bool own; /* of its daemon's own: no engine's room chooses it */
	char name[POOL_NAME_MAX];
	struct layout *layout; /* pools only */
	struct remote_region *regions;
	uint32_t region_count;
	struct search_span
		*by_address;	   /* search.c: the regions in order, when asked for */
	struct xp_buffer *buffers; /* pools: layout->buffer_count, .key and .offset set */
	uint32_t *buffer_region;   /* pools: index into regions of each buffer */
	bool wanted, want_later;   /* keys are (to be) made usable */
	bool ready;		   /* every key is usable */
	struct err refused;	   /* code != OK: keys cannot be used, with the reason */
	unsigned int uses;	   /* rooms and ops that hold it */
	struct charge charge;	   /* what it takes, decoded */
	bool going;		   /* UNREGISTER came: acked at zero uses */
	bool dead;		   /* of an earlier epoch of the peer */
	struct remote_pool *replacement; /* which has its keys: in use */
};

/* Which side dialled. */
enum { LINE_HERE, LINE_THERE };

/* A peer as the upper layers see it: the control line and the data line. */
struct remote {
	struct kvd *kvd;
	struct peer *peer;
	struct transport *transport; /* chosen; NULL until chosen */
	int told;		     /* the one that the other side chose; -1: not yet */
	char passed[ERR_TEXT_MAX];   /* those that could not be opened, and why */
	unsigned int transport_index;
	struct xp_peer *xp;
	bool ready;	  /* data line usable, in this epoch of the peer */
	bool listed;	  /* `pools` has all that it had when it came up (POOLS) */
	bool announced;	  /* the pools, for `transport`, in this peering */
	uint32_t turn;	  /* attempts to connect that failed in it: handshake_line.c */
	uint64_t turn_ns; /* this one's begin */
	struct loop_timer again; /* the next */
	struct err line_why[2];	 /* LINE_HERE, LINE_THERE: of the last that failed */
	uint64_t lineless_ns;	 /* since when there is no data line; 0: there is one */
	uint64_t ready_ns;	 /* since when there is, or was */
	struct err why;		 /* code != OK: no transport / down */
	uint64_t downs;		 /* so often its peer went down, */
	struct err down;	 /* and why it did the last time, */
	bool down_dead;		 /* for it was silent */
	struct sched_line line;
	struct list pools;	  /* of this epoch */
	struct idmap pools_by_id; /* those that are not going */
	struct list dead_pools;
	struct idmap shares;	 /* struct share by pool: local pools that it knows */
	struct list announcing;	 /* handshake_pools.c; of one with `announced` */
	uint64_t announced_to;	 /* the announcement up to which it knows them */
	bool announced_all;	 /* POOLS was sent */
	bool refuses;		 /* it has refused a pool */
	unsigned int unanswered; /* UNREGISTERs that nothing here waits for */
	unsigned int pool_count; /* in both */
	struct list link;
	unsigned int reaches; /* handshake_reach() minus handshake_release() */
	bool closing_xp, start_again;
	struct express_in *express; /* handshake_express.c; NULL: not agreed */
	struct list express_free;
	/* messages that were taken, and the remote was not told yet */
	struct list express_late;
	unsigned int express_late_count;
	size_t express_late_bytes;
	struct loop_timer express_tell;
	struct account
		*account; /* since it was up first; else NULL, and nothing is kept */
	bool refused; /* our dial was answered with BYE, or keys stand between us: `why`
		       */
	unsigned int figures;	    /* its set in metrics.peers */
	char label[PEER_LABEL_MAX]; /* peer_label(), for reasons */
	void *part[MODULES];	    /* each module's own: remote_bytes */
};

struct handshake_events {
	void *owner;
	void (*on_up)(void *owner, struct remote *remote);
	/* A remote pool became ready or was refused; a data line became ready or
	 * was lost (all its ops are done by then): rooms that wait look again. */
	void (*on_change)(void *owner, struct remote *remote);
	/* The peer is down: everything of it is invalid after this call. */
	void (*on_down)(void *owner, struct remote *remote, const struct err *why);
	/* The owner withdraws the pool: stop using it (drop `uses`). */
	void (*on_pool_going)(void *owner, struct remote_pool *pool);
	/* The remote has taken handshake_share_session()'s list of that epoch, or
	 * refuses it (`why`): what needs it there fails. */
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
/* BYE to all. Data lines close by themselves; turn the loop until drained. */
void handshake_close(struct handshake *hs);
bool handshake_drained(const struct handshake *hs);
/* No message is under way on a data line. */
bool handshake_quiet(const struct handshake *hs);
void handshake_free(struct handshake *hs);

/* Dial and hold. Never blocks; watch on_change. */
int handshake_reach(struct handshake *hs, const char *endpoint,
		    const struct peer_client *client, struct remote **remote_p);
void handshake_release(struct remote *remote);

/* When a wait for its lines that began then is in vain: connect_timeout after they were
 * missed, or dead_after when the daemon was up and went away. UINT64_MAX: they are up. */
uint64_t handshake_patience(const struct remote *remote, uint64_t since_ns);
/* Why nothing goes to it, in words that name the remote, or the address that was tried.
 */
const char *handshake_why_not(const struct remote *remote, char text[ERR_TEXT_MAX]);

/* Remotes are told of a pool some a turn. Before a message that names one: now. */
void handshake_announce(struct remote *remote, const struct pool *pool);

struct pool_wanted {
	const char *name; /* NULL: any */
	int64_t rank;	  /* of its layout; -1: any */
	uint64_t session; /* epoch of its engine's; 0: any */
};
/*
 * The remote's pool that is wanted for `local`; it must be the only one. 0, or outcome 1:
 * there is none, or the remote has not told all of its pools (watch on_change).
 * Negative: several fit (ERR_INVAL), or the layouts contradict (ERR_LAYOUT with
 * the difference).
 */
int handshake_pool(struct remote *remote, const struct pool_wanted *wanted,
		   const struct pool *local, struct remote_pool **pool_p);
/* The remote has chosen our pool `id` by what `named` says, for its pool `asker`.
 * ERR_INVAL: another of ours is meant as well, of which it may not have heard. */
int handshake_check_choice(const struct handshake *hs, const struct remote *remote,
			   uint64_t id, uint8_t named, uint64_t asker);
struct remote_pool *handshake_pool_by_id(struct remote *remote, uint64_t id);
/* Is it a pool of this daemon's, published and not about to go? */
bool handshake_pool_is_ours(const struct handshake *hs, uint64_t id);
/* Make the pool's keys usable (a reader needs them); then `ready` or `refused`
 * is set and on_change called. Idempotent. */
void handshake_want_keys(struct remote_pool *pool);
/* Hold and let go: a pool that is going away is acknowledged at zero uses. */
void handshake_pool_use(struct remote_pool *pool);
void handshake_pool_unuse(struct remote_pool *pool);

/* This side's buffer table of a pool for one transport (layout->buffer_count
 * entries), valid as long as the pool is published. NULL + ERR_IMPORT when a
 * region cannot be used with that transport. */
const struct xp_buffer *handshake_local_buffers(struct pool *pool,
						const struct remote *remote);

/* Register those of a session's regions that `tells` says with one remote (kind session),
 * under its epoch; again after a change: replaces. */
int handshake_share_session(struct handshake *hs, struct remote *remote,
			    struct session *session,
			    bool (*tells)(const struct region *region, const void *arg),
			    const void *arg);
/* The session is over: the remote may use none of it any more. */
void handshake_unshare_session(struct remote *remote, const struct session *session);

/* A message of the rooms' and transfers' own. What engines wait for goes by the data
 * line when that is up, in the same order; not a secret, if others can read it there. */
int handshake_send(struct remote *remote, enum wire_type type, const void *body,
		   size_t len);
/* Room for one message body of any type; valid until the next call. */
void handshake_body(struct handshake *hs, struct cursor *out);
/* handshake_tell_<name>(): the body written, and sent as its type. */
#define HANDSHAKE_TELL(num, NAME, name, owner, cap, text)                                \
	static inline int handshake_tell_##name(struct remote *remote,                   \
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
/* What an engine waits for, of many bytes: the body at made + PEER_EXPRESS_HEAD, which
 * is taken: peer_send_express_made(). */
int handshake_send_made(struct remote *remote, enum wire_type type, uint8_t *made,
			size_t len);
/* A long one, in memory of its own, which is taken: peer_send_owned(). */
int handshake_send_owned(struct remote *remote, enum wire_type type, uint8_t *owned,
			 size_t len);
/* The same for a blob that goes into a body. */
void handshake_blob(struct handshake *hs, struct cursor *out);
/* Bytes of a room or transfer have moved. */
void handshake_moved(const struct remote *remote, enum metric_direction direction,
		     uint64_t bytes);
/* All remotes (struct remote.link), for lists and records. */
const struct list *handshake_remotes(const struct handshake *hs);

/* Bytes that wait for a line to a peer, and that are on their way. */
void handshake_bytes(const struct handshake *hs, uint64_t *queued_p, uint64_t *posted_p);

/* Peers of other hosts to which bytes go in clear. */
unsigned int handshake_plain_peers(const struct handshake *hs);
/* 0: new rooms may be opened; else the reason (option `require`). */
int handshake_transports_ok(const struct handshake *hs);

#endif
