/* SPDX-License-Identifier: Apache-2.0 */
/* attend_impl: what attend.c (life, seats), ask.c (posts and their legs) and serve.c
 * (rows of other daemons) share. */
#ifndef KVD_ATTEND_IMPL_H
#define KVD_ATTEND_IMPL_H

#include "daemon/attend/attend.h"
#include "daemon/attend/compute.h"
#include "daemon/base/account.h"
#include "daemon/base/idmap.h"
#include "daemon/base/list.h"
#include "daemon/loop/loop.h"
#include "daemon/loop/offload.h"
#include "proto/wire.h"

struct remote;
struct region;

struct attends {
	struct kvd *kvd;
	struct offload *offload; /* of attend_threads; NULL: none */
	struct compute *compute;
	bool closed;
	struct list posts;   /* struct attend_post.link */
	struct list serving; /* struct serve.link */
	struct idmap legs;   /* at other daemons, by number */
	uint64_t next_leg;
	unsigned int post_count, under_way; /* under_way: legs and serves at compute */
	uint64_t posted, posted_rows, served, served_rows, refused;
};

/* session->attend_part */
struct attend_session {
	struct idmap attends, posts; /* posts by their id */
};

struct attend {
	struct attends *attends;
	struct session *session;
	uint64_t id, region, offset;
	uint32_t rows, seats;
	struct form form;
	struct attend_facts facts;
	struct attend_post **taken; /* of each seat; NULL: free */
	struct charge charge;
};

struct post_merge;
struct post_rows;

/* Under way; what has ended is no more. */
struct attend_post {
	struct list link;
	struct attend *attend;
	uint64_t id;
	uint32_t slot, gen, seat, layer;
	bool own;
	struct region *region; /* pinned */
	struct list legs;      /* struct attend_leg.link, in the order of the parts */
	unsigned int open;     /* legs that are not in */
	unsigned int remotes;
	uint32_t queue_us, attend_us;
	void (*on_failed)(struct session *session, uint32_t slot, uint64_t id,
			  const struct err *why);
	struct loop_timer deadline;
	struct post_merge *merge; /* all legs are in */
	struct post_rows *q;	  /* NULL: no leg is here */
	struct charge charge;
};

/* ---- attend.c ---- */
/* How many bytes of rows (ATTEND) or values (ATTENDED) fit into a message. */
uint64_t attend_message_bytes(const struct attends *attends, enum wire_type type);

/* ---- ask.c ---- */
void post_fail(struct attend_post *post, const struct err *why);
int ask_on_attended(struct attends *attends, struct remote *remote, struct cursor *body);
void ask_on_down(struct attends *attends, const struct remote *remote,
		 const struct err *why);

/* ---- serve.c ---- */
int serve_on_attend(struct attends *attends, struct remote *remote, struct cursor *body);
int serve_on_stop(struct attends *attends, struct remote *remote, struct cursor *body);
void serve_on_down(struct attends *attends, const struct remote *remote);
void serves_close(struct attends *attends);

#endif
