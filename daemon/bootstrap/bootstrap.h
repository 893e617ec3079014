/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bootstrap: which endpoints serve which rank of a group. Any kvd can be the
 * meeting point of a group: each rank's engine publishes where it is reached
 * there, and a client of the group asks there once.
 *
 * A rank belongs to its publisher: to a session of this daemon (gone with
 * it) or to a remote daemon (gone with the peer, or when it is not published
 * again in time). The same place in a group is held by one owner; another's
 * claim is refused with ERR_EXIST until the holder is gone.
 *
 * A publication at another daemon is a standing one: it is renewed, and made
 * again when that daemon comes back, until the session ends. Its first answer
 * goes to the caller. A query waits for the meeting point to come up, up to
 * `call_timeout_ns`. Both are said again while nobody answers: an answer is sent
 * without a promise.
 *
 * The owner of the peers' callbacks hands peer events and the ROUTE messages on.
 */
#ifndef KVD_BOOTSTRAP_H
#define KVD_BOOTSTRAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "daemon/loop/loop.h"
#include "daemon/peer/peer.h"

#define BOOTSTRAP_GROUP_MAX 128u /* bytes of a group's name with its NUL */
#define BOOTSTRAP_POOL_MAX 64u
#define BOOTSTRAP_SUMMARY_MAX 1024u
#define BOOTSTRAP_SIZE_MAX 65536u /* ranks along one axis */
#define BOOTSTRAP_RANKS_MAX 8192u /* of one group */

struct bootstrap;

enum bootstrap_axis {
	BOOTSTRAP_TP,
	BOOTSTRAP_PP,
	BOOTSTRAP_DP,
	BOOTSTRAP_CP,
	BOOTSTRAP_AXES
};

struct bootstrap_rank {
	uint32_t rank[BOOTSTRAP_AXES];
	uint32_t size[BOOTSTRAP_AXES];	     /* of the group along each axis, >= 1 */
	char endpoint[LINK_ENDPOINT_MAX];    /* "" when published: the publisher's own */
	char pool[BOOTSTRAP_POOL_MAX];	     /* the name of its pool, may be "" */
	char summary[BOOTSTRAP_SUMMARY_MAX]; /* of the pool, for people and engines */
};

struct bootstrap_options {
	unsigned int ranks_max;	      /* kept here for all groups */
	unsigned int owner_ranks_max; /* of one session or daemon */
	unsigned int calls_max;	      /* waiting, all sessions */
	unsigned int session_calls_max;
	size_t message_bytes; /* what a peer message may be */
	uint64_t ttl_ns;      /* of what other daemons publish here */
	uint64_t call_timeout_ns;
};
void bootstrap_options_default(struct bootstrap_options *options);

struct bootstrap_args {
	struct loop *loop;
	struct peers *peers;
	const char *endpoint;			 /* this daemon's, as others dial it */
	const struct bootstrap_options *options; /* NULL: the defaults */
};

/* A publish or query that waits for its answer; lives in its owner. */
struct bootstrap_call {
	/* Once, from the loop, never inside the call that made it. `err` NULL: good;
	 * ranks: of a query, valid during the call, in no particular order. */
	void (*on_done)(struct bootstrap_call *call, const struct err *err,
			const struct bootstrap_rank *ranks, unsigned int count);
	/* private */
	struct list link;
	struct bootstrap *bootstrap;
	struct peer *peer; /* held; NULL: local */
	uint64_t session, cookie;
	char group[BOOTSTRAP_GROUP_MAX];
	bool waiting; /* between its start and on_done */
	bool query, sent;
	uint64_t end_ns; /* when it has waited long enough */
	struct err err;
	struct loop_timer timer;
	struct loop_defer done;
};

int bootstrap_new(const struct bootstrap_args *args, struct bootstrap **bootstrap_p);
/* Answer all calls that wait with this, and make no new ones. Idempotent. */
void bootstrap_close(struct bootstrap *bootstrap, const struct err *why);
/* Before the peers are freed. Closes first. */
void bootstrap_free(struct bootstrap *bootstrap);

/*
 * Publish one rank of a group for a session; again with the same place replaces
 * it. `at`: the meeting point's endpoint, NULL or "" for this daemon. Negative:
 * not begun, on_done is not called (ERR_INVAL naming the field, ERR_LIMIT,
 * ERR_EXIST). call NULL: nobody waits.
 */
int bootstrap_publish(struct bootstrap *bootstrap, uint64_t session, const char *group,
		      const char *at, const struct bootstrap_rank *rank,
		      struct bootstrap_call *call);
/* All ranks of a group that are known at the meeting point now. ERR_NOTFOUND
 * (in on_done) when there is none. */
int bootstrap_query(struct bootstrap *bootstrap, uint64_t session, const char *group,
		    const char *at, struct bootstrap_call *call);
/* on_done is not called any more. Idempotent on a finished call. */
void bootstrap_cancel(struct bootstrap_call *call);
/* Does the answer hold every place of the group? */
bool bootstrap_complete(const struct bootstrap_rank *ranks, unsigned int count);

/* The session is gone: its ranks are taken back here and elsewhere, its calls
 * are answered with ERR_SESSION. */
void bootstrap_session_gone(struct bootstrap *bootstrap, uint64_t session);

/* From the owner of the peers' callbacks. */
void bootstrap_peer_up(struct bootstrap *bootstrap, struct peer *peer);
void bootstrap_peer_down(struct bootstrap *bootstrap, struct peer *peer);
/* A dial that failed: peer->why. */
void bootstrap_peer_refused(struct bootstrap *bootstrap, struct peer *peer);
static inline bool bootstrap_handles(unsigned int type)
{
	return type == WIRE_T_ROUTE_QUERY || type == WIRE_T_ROUTE ||
	       (type >= WIRE_T_ROUTE_PUBLISH && type <= WIRE_T_ROUTE_WITHDRAW);
}
/* Negative: the peer broke the protocol. */
int bootstrap_on_message(struct bootstrap *bootstrap, struct peer *peer,
			 const struct wire_header *header, struct cursor *body);

#endif
