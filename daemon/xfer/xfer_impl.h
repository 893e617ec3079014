/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xfer_impl: shared by xfer.c (sessions, attaching, sharing), xfer_list.c and xfer_post.c
 * (lists and transfers of local engines), xfer_serve.c (requests of other daemons) and
 * commands_xfer.c.
 */
#ifndef KVD_XFER_IMPL_H
#define KVD_XFER_IMPL_H

#include "daemon/handshake/handshake.h"
#include "daemon/base/idmap.h"
#include "daemon/base/sm.h"
#include "daemon/xfer/dlist.h"
#include "daemon/xfer/grant.h"
#include "daemon/loop/offload.h"
#include "daemon/handshake/sched.h"
#include "daemon/request/ring_ops.h"
#include "daemon/xfer/search.h"
#include "daemon/xfer/xfer.h"

#define XFER_ATTACHES_MAX 1024u /* of a session */
#define XFER_DLISTS_MAX 16384u	/* of a session */
/* bytes of one notification: 1 MiB, and the prefix of a client (the nixl package: an
 * agent's name that is longer than a session's, up to 64 KiB) */
#define XFER_NOTIF_MAX ((1u << 20) + (64u << 10) + 16u)
#define XFER_NOTIFS_BYTES_MAX (8u << 20) /* waiting for one session */
#define NOTIF_ANSWER_FRAME 256u		 /* size of the other fields of that answer */
#define NOTIF_COPY_MAX \
	(16u << 10) /* bytes of one; longer ones keep the memory they arrived in */
#define XFER_NOTES_MAX 4096u /* of a session, being sent */
#define XFER_NOTE_BYTES_MAX (8u << 20)
#define XFER_EAGER_REGIONS 64u /* of a session; more are sent on demand */
#define XFER_PLAN_INLINE 2048u /* rows planned on the loop */
#define XFER_KEPT_BYTES_MAX (UINT64_C(64) << 20) /* plans for a next time */

struct xfers {
	struct kvd *kvd;
	struct list sessions; /* struct xfer_session.link */
	struct list shadows;
	struct strmap shadow_by_key; /* {remote, gid} */
	struct idmap attach_by_cookie;
	struct list serving; /* struct serve.link */
	struct list kept;    /* struct kept_plan.link, oldest first */
	size_t kept_bytes;
	unsigned int live;
};

/* one session's regions, as one remote knows them */
struct share {
	struct list link, at_remote;
	struct remote *remote; /* held */
	uint64_t version;      /* of session->regions_version when last sent */
	unsigned int sent, acked;
	bool all; /* all regions; else those of its grants, each held */
	struct grant **grants;
	size_t grant_count;
};

struct notif {
	struct list link;
	struct charge charge; /* to the daemon that sent it */
	char from[POOL_NAME_MAX];
	size_t len;
	const uint8_t *data;
	uint8_t *owned; /* it lies there, or (NULL) here: */
	uint8_t bytes[];
};

/* session->part[MODULE_XFER] */
struct xfer_session {
	struct list link;
	struct xfers *xfers;
	struct session *session;
	struct idmap attaches, dlists, transfers;
	struct list prepared; /* struct prepared.link: also those without a number */
	uint64_t sendings;    /* serials of struct sent_list */
	struct list shares;
	struct list notifs; /* oldest first */
	size_t notif_bytes;
	unsigned int notes; /* struct note, and struct xfer_op, in progress */
	size_t note_bytes;
	struct list grants;
	unsigned int grant_count;
	bool ring_waits; /* until notes have left */
	bool draining;
};

/* remote->part[MODULE_XFER] */
struct xfer_remote {
	struct list attaches; /* to its sessions */
	struct list shares;   /* struct share.at_remote: shares with it */
	struct list sent;     /* struct sent_list.at_remote: lists that it has */
	struct list shadows;  /* lists of it that are kept here: xfer_serve.c */
};

static inline struct xfer_remote *xfer_remote(const struct remote *remote)
{
	return remote->part[MODULE_XFER];
}

enum attach_state { ATTACH_REACHING, ATTACH_ASKED, ATTACH_READY, ATTACH_LOST };
enum xfer_state { XFER_PLANNING, XFER_SHARING, XFER_POSTED, XFER_ENDED };

/* The caller of an operation that takes time; on_end NULL: none. */
struct xfer_waiter {
	/* once; why NULL: done, `id` is the new object, if any */
	void (*on_end)(void *arg, const struct err *why, uint64_t id);
	void *arg;
};

static inline void xfer_waiter_end(struct xfer_waiter *waiter, const struct err *why,
				   uint64_t id)
{
	struct xfer_waiter once = *waiter;

	*waiter = (struct xfer_waiter){NULL, NULL};
	if (once.on_end)
		once.on_end(once.arg, why, id);
}

/* a remote session, by its secret */
struct attach {
	struct list at_remote; /* in its remote's */
	uint64_t id, cookie;
	struct xfer_session *xs;
	struct remote *remote; /* held; NULL: LOST, and unused */
	unsigned int users;    /* prepared lists, and notes in progress */
	uint64_t epoch;	       /* of the remote session */
	uint8_t secret[16];
	struct sm sm;		  /* enum attach_state */
	struct remote_pool *pool; /* its regions; in use */
	struct share *share;	  /* our session's regions there */
	struct charge charge;
	struct sched_flow flow;
	struct list waiting;	   /* struct transfer.link, until the share is acked */
	struct xfer_waiter waiter; /* until it is attached, or fails */
	struct loop_timer timer;
	uint64_t until_ns; /* its time to be answered */
	struct err why;	   /* of LOST */
};

/* a local list that a remote's daemon knows */
struct sent_list {
	struct list link; /* in its prepared's */
	struct list at_remote;
	struct remote *remote;
	uint64_t peer_epoch;
	uint64_t serial; /* of this transmission: its parts carry it */
};

/* dlist.prep */
struct prepared {
	struct list link; /* in xs->prepared */
	uint64_t id;
	struct xfer_session *xs;
	struct attach *attach; /* NULL: local */
	struct dlist *dlist;
	struct list sent;
	unsigned int refs; /* the id, and transfers */
	struct charge charge;
};

enum { LOCAL, REMOTE };

/* of two lists; the engine chooses its number and slot */
struct transfer {
	struct list link; /* in attach->waiting */
	uint64_t id;
	struct xfer_session *xs;
	struct attach *attach;
	enum xp_kind kind;
	struct prepared *lists[2]; /* LOCAL, REMOTE; so are all pairs here */
	uint32_t *index[2];
	uint64_t count;
	uint8_t *notif;
	size_t notif_len;
	bool has_notif;
	struct located at[2];
	struct list parts[2]; /* of a long list that must be sent */
	bool parts_wanted[2];
	struct plan *plan;   /* kept for the next post; made from these: */
	uint64_t plan_of[2]; /* places.serial */
	uint64_t plan_most;  /* bytes: rest of its account */
	bool plan_lacks;     /* more of them */
	struct offload_job job;
	struct sched_op op;
	bool files;		/* a list of it is of files */
	struct xfer_file *file; /* while such a one is POSTED */
	uint8_t *picks;		/* both index lists in wire form; made with the plan */
	size_t picks_bytes;
	uint8_t *header;
	struct sm sm; /* enum xfer_state */
	bool failed, release;
	struct err err;
	uint64_t bytes;
	struct charge charge;	   /* indices and notification */
	struct charge plan_charge; /* plan and picks */
	uint32_t slot, slot_gen;
	bool fresh;  /* the next post has the slot's current generation */
	bool posted; /* ever */
};

/* A message of ours on the data line: list parts, bare notifications. */
struct note {
	struct list link;
	struct sched_op op;
	struct xfer_session *xs;
	struct attach *attach; /* in use */
	bool notif;
	uint64_t dlist, serial; /* a part of this list, of that transmission; else 0 */
	size_t bytes;
	uint8_t *tail; /* of a notification: its own bytes */
};

/* ---- xfer.c ---- */
/* Raise the refusal of its account: a plan needed more than `most` bytes, the rest of
 * the account. */
void xfer_plan_lacks(struct account *account, uint64_t most, struct err *err_p);
struct xfer_session *xfer_session_of(struct session *session); /* NULL + ERR_NOMEM */
struct session *xfer_session_by_epoch(struct xfers *xfers, uint64_t epoch);
/* The session of this epoch, if the secret gives the remote access; NULL: raised
 * (ERR_AUTH). *grant_p as of grant_check(). */
struct session *xfer_admit(struct xfers *xfers, const struct remote *remote,
			   uint64_t epoch, const uint8_t secret[16],
			   struct grant **grant_p);
struct attach *attach_find(struct xfer_session *xs, uint64_t id);
static inline void attach_use(struct attach *attach)
{
	attach->users++;
}
void attach_unuse(struct attach *attach);
/* The waiter receives the number of the attachment, or the error. A session that is
 * attached already keeps its number, and has sent its current regions by then. */
int attach_open(struct xfer_session *xs, const char *endpoint, uint64_t epoch,
		const uint8_t secret[16], uint64_t timeout_ns, struct xfer_waiter waiter);
/* Maximum bytes of a notification in an answer. */
size_t notif_answer_bytes(const char *from, size_t len);
/* A notification with a reserved place in the session's queue; then queue it, or drop
 * it (session NULL: it has ended), or, once it is off the queue, free it. ERR_LIMIT. Of a
 * long one, the memory that `data` lies in is taken instead of copied, if owned_p has it.
 */
int notif_new(const struct remote *remote, struct session *session, const char *from,
	      const void *data, size_t len, uint8_t **owned_p, struct notif **notif_p);
void notif_queue(struct xfers *xfers, struct session *session, struct notif *notif);
void notif_drop(struct session *session, struct notif *notif);
void notif_free(struct notif *notif);
void xfer_session_try_free(struct xfer_session *xs);

/* ---- xfer_share.c ---- */
/* Share the regions of the grant with the remote, too; NULL: all regions. */
int share_open(struct xfer_session *xs, struct remote *remote, struct grant *grant,
	       struct share **share_p);
/* Send the allowed current regions to the remote. 1: wait for the ack. */
int share_update(struct xfer_session *xs, struct share *share);
void share_free(struct share *share);
void shares_without(struct xfer_session *xs); /* a region is being unregistered */
/* The grant was extended or revoked. */
void shares_regrant(struct xfer_session *xs, const struct grant *grant);

/* ---- xfer_list.c ---- */
int notif_post(struct attach *attach, const void *data, size_t len);
/* The same in steps: fill `len` bytes at (*note_p)->tail, then post or free it. */
int note_begin(struct attach *attach, size_t len, struct note **note_p);
void note_post(struct note *note, struct attach *attach);
void note_free(struct note *note); /* NULL is allowed */
/* Memory for a list and its search result, for so many entries. */
uint64_t xfer_list_bytes(uint64_t entries);
bool list_is_sent(const struct prepared *prepared, const struct attach *attach);
/* Make the parts of a list (struct note.link); any thread, while `prepared` and
 * `attach` stay. */
int list_parts(const struct prepared *prepared, const struct attach *attach,
	       struct list *parts);
void parts_free(struct list *parts);
/* Send this list to the daemon there, once a peering. Takes the parts, or makes them
 * when there are none. */
int list_send(struct prepared *prepared, struct attach *attach, struct list *parts);
void lists_forget_remote(const struct remote *remote);
/* Takes dlist. `id` 0: the next number of the session. *search_p has run on it, and
 * is taken. */
int prepared_add(struct xfer_session *xs, struct attach *attach, struct dlist *dlist,
		 uint64_t id, struct search **search_p, struct prepared **prepared_p);
/* Release its number; transfers keep it. */
void prepared_release(struct prepared *prepared);
/* Are the lists own and remote, as a transfer requires? */
int lists_fit(const struct prepared *local, const struct prepared *remote);
struct prepared *prepared_find(struct xfer_session *xs, uint64_t id);
void prepared_unref(struct prepared *prepared);

/* ---- xfer_file.c ---- */
/* Does it attach a session to itself, by the session's own secret? */
bool attach_is_own(const struct attach *attach);
/* For a transfer with files: locate the rows of both its lists. */
int xfer_file_look(struct transfer *transfer);
/* It is planned: transfer_done() follows, not from within. */
int xfer_file_post(struct transfer *transfer);
void xfer_file_cancel(struct transfer *transfer);
uint64_t xfer_file_moved(const struct transfer *transfer);

/* ---- xfer_post.c ---- */
/* The transfer of its bytes has ended. */
void transfer_done(struct transfer *transfer, int result, const struct err *why);
struct xfer_op;
/* Make a transfer of an op whose lists and indices were checked; takes their
 * ownership. */
int transfer_new(struct xfer_op *op, struct transfer **transfer_p);
int transfer_post(struct transfer *transfer); /* also again, when it has ended */
struct transfer *transfer_find(struct xfer_session *xs, uint64_t id);
/* A post that could not start: it fails like one that has started. */
void transfer_refuse(struct transfer *transfer, const struct err *why);
/* Post it again, with another notification (heap, taken; NULL: the same). */
int transfer_again(struct transfer *transfer, uint8_t *notif, size_t len);
void transfer_cancel(struct transfer *transfer, const struct err *why);
void transfer_cancel_asked(struct transfer *transfer); /* by its engine */
/* Release its number; freed when it has ended, canceled if necessary. */
void transfer_release(struct transfer *transfer);
void transfer_free(struct transfer *transfer); /* ended */
void transfers_go(struct attach *attach);      /* the share was acknowledged */

/* ---- xfer_serve.c ---- */
void serve_on_change(struct xfers *xfers, struct remote *remote);
void serve_remote_down(struct xfers *xfers, struct remote *remote);
void serve_session_end(struct xfers *xfers, struct session *session);
void serve_region_going(struct xfers *xfers, struct region *region);
void serve_pool_going(struct xfers *xfers, struct remote_pool *pool);

/* ---- ring_xfer.c: verbs of the submission ring; hooks of the same names (module.h) ----
 */
extern const struct ring_verb xfer_verbs[];
bool xfers_ring_has(const struct session *session, uint64_t id);
bool xfers_ring_cancel(struct session *session, uint64_t id);
bool xfers_ring_release(struct session *session, uint64_t id);

/* ---- xfer_share.c: hooks ---- */
/* The session has a new region: attached remote sessions are notified before a
 * transfer needs it, so that they can map it in advance. */
void xfers_region_coming(struct session *session);
void xfers_on_shared(struct remote *remote, uint64_t epoch, const struct err *why);

#endif
