/* SPDX-License-Identifier: Apache-2.0 */
/* homes_impl: shared by homes.c (updates) and homes_find.c (queries). */
#ifndef KVD_STORE_HOMES_IMPL_H
#define KVD_STORE_HOMES_IMPL_H

#include "daemon/base/breaker.h"
#include "daemon/base/idmap.h"
#include "daemon/handshake/handshake.h"
#include "daemon/loop/loop.h"
#include "daemon/store/dial.h"
#include "daemon/store/home_key.h"
#include "daemon/store/homes.h"
#include "daemon/store/homes_group.h"
#include "daemon/store/members.h"

#define HOMES_QUEUE_MAX 1024u /* notes queued for one index node */
#define HOMES_NEW_MAX 16u     /* holders of one reply: a peer may invent some */
#define HOMES_PUT (UINT64_C(1) << 63)

enum homes_again { /* of INDEX_DIGEST_ACK */
		   HOMES_SAME,
		   HOMES_TELL_ALL,
		   HOMES_NO_INDEX, /* the daemon keeps no index */
};

struct homes_one {
	struct dial dial;
	struct breaker breaker; /* of answers: homes_find.c */
	bool up;
	bool anew;	     /* the next note starts a full resynchronization */
	bool asked;	     /* a digest was sent and not answered */
	uint64_t walk_at;    /* chunks of buckets before this one were sent */
	uint64_t count, sum; /* of the sent notes */
	unsigned int note_count;
	struct home_key
		notes[HOMES_QUEUE_MAX]; /* space as in INDEX_UPDATE, with HOMES_PUT */
};

struct homes {
	struct store *store;
	struct members *members;
	struct homes_one ones[MEMBERS_MAX];
	unsigned int count;
	struct loop_defer walk;	 /* a slice */
	struct loop_timer flush; /* notes are queued */
	struct loop_timer sums;
	struct idmap asks; /* struct homes_ask: homes_find.c */
	struct store_homes figures;
	struct homes_group group; /* chunk_index = cluster */
};

/* It replied that it keeps no index: it counts as down until it connects again. */
void homes_absent(struct homes *homes, const struct remote *remote);
void homes_answers(struct homes *homes, const struct remote *remote); /* in time or not */
int homes_on_found(struct homes *homes, const struct remote *remote, struct cursor *body);
void homes_asks_on_down(struct homes *homes, const struct remote *remote);

#endif
