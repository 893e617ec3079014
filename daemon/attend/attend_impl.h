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

struct remote;
struct region;
struct speeds;

struct attends {
	struct kvd *kvd;
	struct offload *offload; /* of attend_threads; NULL: none */
	struct compute *compute;
	bool closed;
	struct list posts;	   /* struct attend_post.link */
	struct list serving;	   /* struct serve.link */
	struct idmap legs;	   /* at other daemons, by number */
	struct loop_prepare awake; /* keeps the loop looking until awake_ns */
	uint64_t awake_ns, spin_ns;
	uint64_t next_leg;
	struct list waiting;		    /* struct leg.wait: too much is under way */
	struct loop_defer send_next;	    /* of them */
	unsigned int post_count, under_way; /* under_way: legs and serves at compute */
	/* calibrate.c, echo.c, speed.c */
	struct list calibrations;	  /* struct calibration.link */
	struct loop_defer calibrate_next; /* the first of them begins */
	struct list echo_shares, echo_waits;
	struct speeds *speeds; /* from the first one on */
	uint8_t *echo_bytes;
	bool page_used, home_known;
	uint64_t echoes, calibrated, calibrated_bytes, stale, failed;
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
	struct charge charge;
};

/* ---- attend.c ---- */
/* An attend went or came: another is likely soon (option attend_spin). */
void attends_stay_awake(struct attends *attends);

/* ---- ask.c ---- */
void post_fail(struct attend_post *post, const struct err *why);
void ask_on_send_next(struct loop_defer *defer);
int ask_on_attended(struct attends *attends, struct remote *remote, struct cursor *body);
void ask_on_down(struct attends *attends, const struct remote *remote,
		 const struct err *why);

/* ---- serve.c ---- */
int serve_on_attend(struct attends *attends, struct remote *remote, struct cursor *body);
int serve_on_stop(struct attends *attends, struct remote *remote, struct cursor *body);
void serve_on_down(struct attends *attends, const struct remote *remote);
void serves_close(struct attends *attends);

#endif
