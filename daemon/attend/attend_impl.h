/* SPDX-License-Identifier: Apache-2.0 */
/* attend_impl: shared by attend.c (life, seats), ask.c (posts), leg.c (their
 * subtransfers), gather.c (results) and serve.c (rows of other daemons). */
#ifndef KVD_ATTEND_IMPL_H
#define KVD_ATTEND_IMPL_H

#include "daemon/handshake/handshake.h"
#include "daemon/attend/attend.h"
#include "daemon/attend/calibrate.h"
#include "daemon/attend/compute.h"
#include "daemon/base/account.h"
#include "daemon/base/idmap.h"
#include "daemon/base/list.h"
#include "daemon/loop/loop.h"
#include "daemon/loop/offload.h"
#include "daemon/loop/work.h"
#include "daemon/session/session.h"
#include "daemon/session/wait.h"
#include "gpu/gpu.h"
#include "proto/wire.h"

struct far_hold;
struct kvd_ring_part;
struct leg_line;
struct region;
struct speeds;
struct store_kv;

struct attends {
	struct kvd *kvd;
	struct offload *offload;		  /* of attention_threads; NULL: none */
	struct compute *compute;		  /* of the host's memory */
	struct compute *devices[GPU_DEVICES_MAX]; /* devices.c; NULL: none yet */
	bool closed;
	struct list posts;	   /* struct attend_post.link */
	struct list serving;	   /* struct serve.link */
	struct idmap legs;	   /* at other daemons, by number */
	struct loop_prepare awake; /* keeps the loop polling until awake_ns */
	uint64_t awake_ns, spin_ns;
	uint64_t next_leg;
	unsigned int post_count, under_way; /* under_way: legs and serves at compute */
	/* calibrate.c, echo.c, speed.c */
	struct list calibrations;			 /* struct calibration.link */
	struct loop_defer calibrate_next;		 /* starts the first of them */
	struct loop_timer calibrate_due;		 /* peers are checked again */
	struct attend_shape opened[CALIBRATE_FORMS_MAX]; /* recently */
	unsigned int opened_count;
	struct list echo_shares, echo_waits;
	struct speeds *speeds; /* from the first one on */
	uint8_t *echo_bytes;
	bool page_used, home_known, speeds_again;
	uint32_t home_s;	       /* when home was measured */
	struct attend_figures figures; /* counters; attends_figures() adds the others */
};

/* session->part[MODULE_ATTEND] */
struct attend_session {
	struct idmap attends, posts; /* posts by their id */
	unsigned int legs_sent;	     /* without a reply yet */
};

static inline struct attend_session *attend_session(const struct session *session)
{
	return session->part[MODULE_ATTEND];
}

/* remote->part[MODULE_ATTEND] */
struct attend_remote {
	struct list legs;	  /* struct leg.at_remote: all of it */
	struct list lines;	  /* of posts, queued for it: leg.c */
	struct loop_work sending; /* them; stopped without lines */
	/* of them, sent and not answered */
	uint32_t sent, sent_rows;
	uint64_t sent_bytes;
	struct list serves; /* its rows that are queued here: serve.c */
	uint32_t serve_count, serve_rows;
};

static inline struct attend_remote *attend_remote(const struct remote *remote)
{
	return remote->part[MODULE_ATTEND];
}

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

/* Of a leg's rows. */
struct post_figures {
	uint32_t queue_us, attend_us, together;
};

struct post_merge;

/* In progress; an ended one is freed. */
struct attend_post {
	struct list link;
	struct attend *attend;
	uint64_t id;
	uint32_t slot, seat, layer;
	uint32_t rows; /* up to the last one of a part; those after it are not touched */
	struct region *region; /* pinned */
	/* ordered: the word `ready` and its value; without a region: not ordered */
	struct wait_spec point;
	struct wait wait;
	struct list sides; /* ask.c: of subtransfers that are not made yet */
	struct list legs;  /* struct leg.link, in the order of the parts */
	unsigned int open; /* incomplete subtransfers, made or not */
	struct leg *next;  /* the last one, while it starts; or NULL */
	struct loop_defer begin;
	unsigned int remotes;
	struct post_figures figures; /* the largest of its legs' */
	void (*on_failed)(struct session *session, uint32_t slot, uint64_t id,
			  const struct err *why);
	uint8_t *data; /* source of selections for subtransfers that are not started */
	struct charge data_charge;
	struct loop_timer deadline;
	uint64_t began_ns;
	struct post_merge *merge; /* all subtransfers are complete */
	struct charge charge;
};

struct leg {
	struct list link; /* post->legs, then its merge's */
	struct attends *attends;
	struct attend_post *post; /* NULL: it has ended */
	/* the post's row of its first query token, and the first head; `rows` are those
	 * of the heads of item.form */
	uint32_t row, head, rows;
	float *values; /* o, m, l */
	bool in;
	/* of a received message: the same, and the post has no other subtransfer */
	const uint8_t *received;
	/* a copy of its rows, if it may survive the post or has to wait */
	uint8_t *q;
	uint64_t q_taken; /* bytes so far */
	/* local; item.form: both */
	struct compute_item item;
	bool at_compute;
	/* remote */
	struct remote *remote; /* NULL: local */
	uint64_t number;
	uint64_t bytes; /* of request and reply */
	bool gpu;	/* the chunks are in GPU memory there */
	uint64_t sent_ns;
	struct list at_remote;
	struct leg_line *line; /* until it is sent, if it is queued */
	struct list wait;      /* in `line` */
	bool sent;
	bool among;		/* its post has others at the same daemon */
	struct wire_attend msg; /* but for blobs and the view */
	/* both: per_token for each query token, cut from the post's at the start: tokens
	 * [skip, skip + tokens) of the part are the leg's */
	uint32_t *select;
	const uint32_t *cut_from;
	uint32_t cut_count;
	uint64_t skip, tokens;
	struct charge charge;
};

static inline float *values_m(float *values, uint32_t rows, uint32_t dv)
{
	return values + (size_t)rows * dv;
}

/* o, m and l */
static inline size_t values_count(uint32_t rows, uint32_t dv)
{
	return (size_t)rows * (dv + 2u);
}

/* The limit of requests of one daemon at another; the rest waits for replies. The
 * server's limit is twice that, so a daemon that keeps to it is never refused; and
 * connections between daemons, which are closed when more than 8 MiB are queued, have
 * space for other messages. */
#define ATTEND_SENT_LEGS 128u
#define ATTEND_SENT_ROWS 4096u
#define ATTEND_SENT_BYTES (3u << 20)

/* ---- attend.c ---- */
/* An attention request was opened or closed: another is likely soon (option
 * attention_busy_poll). */
void attends_stay_awake(struct attends *attends);
/* How many bytes of rows (ATTEND) or values (ATTENTION_RESULT) fit into a message. */
uint64_t attend_message_bytes(const struct attends *attends, enum wire_type type);

/* ---- ask.c ---- */
void post_fail(struct attend_post *post, const struct err *why);
void post_succeed(struct attend_post *post);
/* A subtransfer is complete. */
void post_step(struct attend_post *post, const struct leg *leg,
	       const struct post_figures *figures);
uint8_t *post_seat(const struct attend_post *post, uint64_t offset);

/* ---- leg.c ---- */
void legs_init(struct remote *remote);
void leg_free(struct leg *leg);
/* Its post has ended, and drops it. */
void leg_drop(struct leg *leg);
/* The data of the leg except its rows; it is the post's in any case. */
int leg_here(struct leg *leg, struct store_kv *kv, const struct kvd_ring_part *part,
	     uint64_t tokens);
/* The common part of all its messages to that daemon, except the pool: first, count,
 * tokens, delta, per_token are given. ERR_PEER, ERR_REQUIRE. */
int legs_there(const struct attend_post *post, const struct far_hold *far,
	       struct wire_attend *head);
/* Has it all heads of the post? Then its rows are contiguous there. */
bool leg_has_all_heads(const struct leg *leg);
int leg_there(struct leg *leg, struct remote *remote, const struct wire_attend *head);
/* It takes its selection and its rows from the seat and is sent. LEG_AGAIN: some were
 * taken, and there are more. */
enum { LEG_AGAIN = 1 };
int leg_begin(struct leg *leg);
int legs_on_result(struct attends *attends, struct remote *remote, struct cursor *body);
void legs_on_down(const struct remote *remote, const struct err *why);
/* Ends those without a waiting post. */
void legs_close(struct attends *attends);

/* ---- gather.c ---- */
/* All subtransfers of the post are complete: merges them into one result, and ends it. */
void post_gather(struct attend_post *post);
/* Does each row of the post come from this one subtransfer? */
bool gather_is_of(const struct attend_post *post, const struct leg *leg);
/* It has ended meanwhile. */
void gather_forget(struct post_merge *merge);

/* ---- serve.c ---- */
int serve_on_attend(struct attends *attends, struct remote *remote, struct cursor *body);
int serve_on_stop(struct attends *attends, struct remote *remote, struct cursor *body);
void serve_on_down(const struct remote *remote);
void serves_close(struct attends *attends);

#endif
