/* SPDX-License-Identifier: Apache-2.0 */
/* handshake_impl: shared by handshake.c (peers), handshake_line.c (data lines),
 * handshake_pools.c (REGISTER) and handshake_keys.c; private to them. */
#ifndef KVD_HANDSHAKE_IMPL_H
#define KVD_HANDSHAKE_IMPL_H

#include "daemon/handshake/handshake.h"
#include "daemon/base/context.h"
#include "daemon/loop/work.h"
#include "daemon/transport/kinds.h"

struct handshake {
	struct kvd *kvd;
	struct handshake_events events;
	struct sched *sched;
	struct list remotes;
	struct idmap published; /* by announcement.number, ascending */
	uint64_t numbers;	/* number of announcements so far */
	/* remotes with complete announcements, and those that lack one or POOLS */
	struct list current, behind;	  /* struct remote.announce */
	struct loop_work announcing;	  /* to those behind */
	struct idmap published_by_id;	  /* by pool */
	uint8_t *scratch;		  /* one message body */
	uint8_t *blob_scratch;		  /* one blob of it */
	struct loop_prepare before_sleep; /* progress and arm the transports */
	struct err transports_why;
	struct peers_callbacks peer_callbacks;
	struct peer_address addresses[TRANSPORTS_MAX]; /* for HELLO */
	bool closing;
};

#define REMOTE_REGIONS_MAX 4096u
enum { OBJECT_POOL = 0, OBJECT_SESSION = 1, OBJECT_OWN_POOL = 2 };

enum share_stage { SHARE_ANNOUNCED, SHARE_WITHDRAWN, SHARE_CUT };

/* A local pool and the peers that know it (pool->handshake). */
struct announcement {
	uint64_t number;
	struct handshake *hs;
	struct pool *pool;
	struct list shares;
	bool going;
	enum share_stage stage;	   /* going: stage that its shares are moved to, */
	struct loop_work bringing; /* each once; finished ones are last */
	/* by combination of POOL_BY_…: number of other pools that agree in these
	 * fields */
	uint32_t alike[POOL_BY_WORDS];
	struct loop_timer patience; /* going: then the peers that use it are cut */
	struct loop_defer gone;
	void (*on_gone)(void *arg);
	void *arg;
};

struct share {
	struct list link; /* in its publication; remote->announce.shares has it by the
			     pool's id */
	struct announcement *pub;
	struct remote *remote;
	enum share_stage stage;
};

/* handshake_announce.c */
extern const struct pool_publisher pools_publisher;
void pools_init(struct handshake *hs);
/* Announce again all pools that it lacks. */
void pools_announce(struct remote *remote);
struct share *share_find(const struct announcement *pub, const struct remote *remote);
void share_end(struct share *share);
/* In a new peering: announce all, then POOLS. */
void pools_begin(struct remote *remote);
/* handshake_pools.c */
void pools_down(struct remote *remote);
/* Messages REGISTER … UNREGISTER_ACK, and POOLS. */
int pools_message(struct handshake *hs, struct remote *remote,
		  const struct wire_header *h, struct cursor *body);
/* handshake_choice.c */
void choice_add(struct announcement *pub);
void choice_remove(struct announcement *pub);
/* handshake_keys.c */
void pools_line_ready(struct remote *remote);
void pools_key_ready(struct xp_key *key, const struct err *err);
void keys_drop(struct remote_pool *pool);
/* `pool` replaces `old`: memory in both keeps its key. */
void keys_carry(struct remote_pool *old, struct remote_pool *pool);
void keys_replacement_release(struct remote_pool *pool); /* no key of it is in use */
/* handshake_express.c */
int express_init(struct remote *remote);  /* for a line that is about to open */
void express_fini(struct remote *remote); /* after its line was closed; idempotent */
void express_line_ready(struct remote *remote);
void express_request(struct remote *remote, struct xp_inbound *in);
static inline bool express_is(const struct xp_inbound *in)
{
	return in->header_len > 0 && *(const uint8_t *)in->header == REQUEST_MESSAGE;
}

/* handshake_line.c */
static inline struct remote *line_remote(struct xp_peer *xp)
{
	return ((struct xp_peer_base *)xp)->owner;
}
bool line_allowed(const struct config *config, const struct transport *t); /* `require` */
void line_start(struct remote *remote); /* the peer is up, and the last line closed */
void line_close(struct remote *remote);
void line_forget(struct remote *remote);		      /* the peering has ended */
int line_message(struct remote *remote, struct cursor *body); /* LINE */
void line_on_again(struct loop_timer *timer);
void line_on_ready(void *owner, struct xp_peer *xp);
void line_on_lost(void *owner, struct xp_peer *xp, const struct err *why);
/* handshake.c */
void remote_try_free(struct remote *remote);
/* The transport of this peering, whose line may not be open yet; NULL: not chosen. */
const struct transport *handshake_transport(const struct remote *remote);

#endif
