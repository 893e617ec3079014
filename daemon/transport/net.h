/* SPDX-License-Identifier: Apache-2.0 */
/*
 * net: the common part of the backends (shm, tcp, ucx, verbs). It implements two life
 * cycles once, so that their fences and limits are the same and are proven in one place;
 * the backend moves bytes and messages. The simulation's transport (tests/sim/fake.h) is
 * one of them.
 *
 * A connection's (net_peer.c): states, the first fault that counts, deadlines, the BYE,
 * the end, and the reports to the daemon.
 *
 * A transfer's (net_xfer.c), on the requester (an op) and on the responder (an inbound):
 *
 *     REQUEST -> on_request, land() -> begin -> bytes … -> DONE
 *
 * A backend whose destination reads the source's memory by itself (shm) has the bytes
 * before a READ's request, which is a CHECK then, and checks at the end of a WRITE
 * whether they count (speak, is_over).
 *
 * Every request sent is answered by exactly one DONE, and with it the id is dead on both
 * sides; ids rise and are never used again, so later messages and bytes match no
 * transfer. Stopping (cancel, revoke, refusal, a fault, a lost peer) takes one path:
 * STOPPING, the backend halts, and when it reports that the transfer is over (`is_over`:
 * nothing of it moves or will count) the side is notified. A transfer not over by the
 * fence's deadline costs the connection.
 *
 * Done callbacks are called by net_peer_tell() only, out of the peer's step: a
 * transfer that is over waits in peer->finished.
 *
 * A backend's transport, peer and transfer start with the structs here. All of it runs on
 * the loop's thread.
 */
#ifndef KVD_TRANSPORT_NET_H
#define KVD_TRANSPORT_NET_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/idmap.h"
#include "daemon/base/list.h"
#include "daemon/base/sm.h"
#include "daemon/loop/loop.h"
#include "daemon/transport/transport.h"

struct net_peer;
struct net_reg;
struct net_xfer;

#define NET_HEADERS_MAX (16u << 20) /* bytes of a peer's unfinished requests */

struct net_ops {
	/* net_peer_states, net_xfer_states, each with the backend's invariant */
	const struct sm_table *peer_table, *xfer_table;
	bool checks;	    /* a request may be a CHECK: it has bytes, but none move */
	uint32_t key_magic; /* of net_key_pack() */
	/* Releases the fabric's registration of a memory, also a partial one; any thread.
	 * NULL: nothing. */
	void (*reg_release)(struct net_reg *reg);

	/* -- of a peer -- */
	void (*step)(struct net_peer *peer); /* it was kicked; may free it */
	/* Write the messages of this turn. NULL: none wait for that. */
	void (*flush)(struct net_peer *peer);
	void (*peer_free)(struct net_peer *peer);
	/* Refuse a request for lack of memory; negative: no memory for that either. */
	int (*refuse)(struct net_peer *peer, uint64_t id, const struct err *err);

	/* -- of a transfer -- */
	/* It is the next: may its request be sent now? NULL: always. */
	bool (*may_ask)(const struct net_xfer *xfer);
	/* Zeroed, with memory for all its messages, so that sending them needs no
	 * allocation. */
	int (*xfer_new)(struct net_peer *peer, struct net_xfer **xfer_p);
	void (*xfer_free)(struct net_xfer *xfer);
	/* References on the memories of a transfer with bytes, its places checked. */
	int (*take_sides)(struct net_xfer *xfer, const struct xp_sides *sides);
	void (*drop_sides)(struct net_xfer *xfer); /* gives them back; idempotent */
	/* A queued local transfer with bytes: they may move before its request. NULL: no.
	 */
	int (*prepare)(struct net_xfer *xfer);
	/* That the peer keeps. NULL: its header. */
	size_t (*request_bytes)(const struct net_xfer *xfer);
	/* Send the REQUEST. 1: its bytes are in flight, or may arrive, without an answer.
	 * Negative: nothing left. */
	int (*ask)(struct net_xfer *xfer);
	/* The responder has accepted a transfer with bytes: send GO, or move them. */
	int (*begin)(struct net_xfer *xfer);
	void (*halt)(struct net_xfer *xfer); /* no new bytes; once */
	/* Sends the messages due in its state: CANCEL … Called repeatedly. */
	void (*speak)(struct net_xfer *xfer);
	/* Is it over? In STOPPING: can nothing of it move, or count, any more? */
	bool (*is_over)(struct net_xfer *xfer);
	bool (*is_whole)(struct net_xfer *xfer); /* local: have all its bytes moved? */
	/* Answer with DONE; negative only for success (err NULL): it was not sent. */
	int (*say_done)(struct net_xfer *xfer, const struct err *err);
};

struct net_transport {
	struct transport base;
	const struct net_ops *ops;
	struct list peers; /* net_peer.link */
	struct list ready; /* net_peer.ready_link: to be stepped */
	struct loop_defer run;
	struct list unflushed; /* net_peer.flush_link */
	struct loop_defer flush;
	uint64_t fence_ns;
	atomic_uint releasing; /* jobs of helpers: net_settle() waits for them */
};

enum net_peer_state {
	NET_PEER_OPENING,
	NET_PEER_JOINING, /* tcp: the control line is up, streams are being connected */
	NET_PEER_READY,
	NET_PEER_FLUSHING, /* BYE leaves */
	NET_PEER_ENDING,   /* all that may touch memory release it */
	NET_PEER_ENDED,	   /* only peer_close() is left */
	NET_PEER_STATES,
};
extern const struct sm_state net_peer_states[NET_PEER_STATES];

struct net_peer {
	struct xp_peer_base base;
	struct net_transport *transport;
	struct list link, ready_link, flush_link;
	struct sm sm;
	uint8_t token_in[XP_TOKEN_BYTES], token_out[XP_TOKEN_BYTES];
	char name[40];	/* for messages and logs */
	struct err err; /* why it is lost */
	bool failed;	/* err is set: end it */
	bool broken;	/* nothing more will be sent on it */
	bool bye_came;	/* the peer has sent BYE */
	bool dial, close_asked, told;
	void (*on_closed)(void *arg);
	void *on_closed_arg;
	struct loop_timer timer; /* the backend's deadlines, by net_peer_watch() */
	uint64_t flush_deadline_ns;

	struct idmap ops, inbounds; /* net_xfer by id: local ones; the peer's */
	struct list xfers;	    /* net_xfer.link: all */
	struct list queued;	    /* .queue_link: requests that wait for space */
	struct list finished;	    /* .queue_link: done is to be reported */
	uint64_t next_id, inbound_high;
	unsigned int asked;   /* local requests without an answer */
	uint64_t asked_bytes; /* that the peer holds for them */

	struct account *account;
	struct charge half; /* of partly received messages */
};

enum net_xfer_state {
	NET_XFER_QUEUED,   /* local: the request waits for space */
	NET_XFER_ASKED,	   /* no answer yet */
	NET_XFER_MOVING,   /* both sides have agreed */
	NET_XFER_STOPPING, /* err is set; no new bytes */
	NET_XFER_OVER,	   /* reported, or about to be */
	NET_XFER_STATES,
};
extern const struct sm_state net_xfer_states[NET_XFER_STATES];

struct net_xfer {
	struct xp_inbound in; /* theirs */
	struct xp_op *op;     /* local; NULL once it is reported */
	struct net_peer *peer;
	struct list link, queue_link;
	struct sm sm;
	uint64_t id, bytes;
	enum xp_kind kind;
	struct xp_used used; /* the backend's to fill */
	bool ours;
	bool asked;	      /* local: the request was sent, an answer must arrive */
	bool answered;	      /* local: it arrived */
	bool refused;	      /* local: it was an error */
	bool stop_sent;	      /* the other side knows, or need not know, that it stops */
	bool finishing;	      /* in peer->finished */
	bool told;	      /* local: only the answer is outstanding */
	struct err err;	      /* ERR_OK while all is well */
	uint64_t deadline_ns; /* of STOPPING */
	uint64_t asked_bytes; /* local: of the peer's asked_bytes */
};

/* ---- a transport ---- */
void net_init(struct net_transport *net, const struct net_ops *ops,
	      const struct transport_ops *base, const struct xp_env *env,
	      const struct xp_callbacks *callbacks);
void net_settle(struct net_transport *net); /* no helper uses it any more */
void net_fini(struct net_transport *net);   /* its peers are closed */
void net_run(struct net_transport *net);    /* step the kicked peers, now */

/* How long one side tries to connect, `most_ns` at most: within connect_timeout each side
 * has its turn, and the second one's result arrives in time. */
uint64_t net_connect_ns(const struct config *config, uint64_t most_ns);

/* ---- a peer ---- */
void net_peer_init(struct net_peer *peer, struct net_transport *net,
		   const struct xp_peer_args *args,
		   void (*on_timer)(struct loop_timer *timer));
void net_peer_fini(struct net_peer *peer);
/* It has started a message of so many bytes; 0: it has completed it. ERR_LIMIT: its
 * principal is at its limit; then nothing has started. */
int net_peer_half(struct net_peer *peer, size_t bytes);
/* transport_ops.peer_close, but only starts it: net_peer_settle() completes it. */
void net_peer_close_ask(struct net_peer *peer, void (*on_closed)(void *arg), void *arg);
static inline bool net_peer_live(const struct net_peer *peer)
{
	return !peer->failed && sm_state(&peer->sm) <= NET_PEER_READY;
}
static inline const char *net_name(const struct net_peer *peer) /* of its transport */
{
	return peer->transport->base.ops->name;
}
/* Has its step called after this callback. */
void net_peer_kick(struct net_peer *peer);
/* Has its flush called when the turn has no other calls left: so one write sends its
 * requests and answers of the turn, after the own engines' status pages. */
void net_peer_flush_soon(struct net_peer *peer);
/* Ends the peer, in its next step. The first fault counts. */
void net_peer_fail(struct net_peer *peer, const struct err *err);
void net_peer_fail_last(struct net_peer *peer); /* with err_last() */
/* The timer runs at that time, or earlier. */
void net_peer_watch(struct net_peer *peer, uint64_t deadline_ns);
/* Fences of stopped transfers: true when one is late, which ends the peer. */
bool net_peer_watch_fences(struct net_peer *peer, uint64_t now);
void net_peer_ready(struct net_peer *peer); /* its path is known: notify the daemon */
/* FLUSHING: transfers stop, and `err_p` is the reason in the BYE, which the
 * backend sends and has `flush_ns` for. */
void net_peer_flush(struct net_peer *peer, uint64_t flush_ns, struct err *err_p);
void net_peer_end(struct net_peer *peer);  /* ENDING: transfers stop */
void net_peer_tell(struct net_peer *peer); /* calls done of finished transfers */
/* Where the step ends. In ENDED: notifies the daemon, or completes a close, which frees
 * the peer. */
void net_peer_settle(struct net_peer *peer);

/* ---- a transfer: transport_ops ---- */
int net_post(struct xp_peer *base, struct xp_op *op);
void net_land(struct xp_inbound *in, const struct xp_sides *sides, const struct err *err);
void net_cancel(struct xp_op *op, const struct err *why);
void net_revoke(struct xp_inbound *in, const struct err *why);

/* ---- a transfer: the backend's ---- */
static inline bool net_is_source(const struct net_xfer *xfer)
{
	return xfer->ours == (xfer->kind == XP_WRITE);
}
void net_xfer_free(struct net_xfer *xfer); /* NULL is allowed */
void net_xfer_stop(struct net_xfer *xfer, const struct err *err);
void net_xfer_stop_last(struct net_xfer *xfer); /* with err_last() */
void net_xfer_check(struct net_xfer *xfer);	/* something of it ended */
/* This many of its bytes have moved by now, the first at `first_ns`; 0: now. False: no
 * more than were known. */
bool net_xfer_moved(struct net_xfer *xfer, uint64_t moved, uint64_t first_ns);
void net_xfer_pump(struct net_peer *peer); /* send queued requests */
/* The end of a step that has reported and asked: kicks of this step need no other one,
 * unless something is left. */
static inline void net_peer_stepped(struct net_peer *peer)
{
	if (net_peer_live(peer) && list_empty(&peer->finished) &&
	    list_empty(&peer->queued))
		list_remove(&peer->ready_link);
}
void net_xfers_stop(struct net_peer *peer); /* all, with peer->err */
void net_xfers_drop(struct net_peer *peer); /* those that only wait for an answer */
/* The local transfer of an answer's id; ERR_PROTO when there is none. */
int net_op_find(struct net_peer *peer, uint64_t id, struct net_xfer **xfer_p);
/* The peer's transfer; NULL when this side's DONE crosses the message; ERR_PROTO when it
 * was never requested. */
int net_inbound_find(struct net_peer *peer, uint64_t id, struct net_xfer **xfer_p);
/* A DONE arrived (err NULL: success). It frees a transfer that was reported before. */
int net_xfer_done(struct net_xfer *xfer, const struct err *err);
/* A REQUEST arrived. Negative: it breaks the protocol. xfer_p NULL: it was refused for
 * allocation failure (so it must be when there was `no_memory` to receive it). Else the
 * backend fills in.header and calls net_request(). */
int net_inbound_new(struct net_peer *peer, uint64_t id, unsigned int kind, uint64_t bytes,
		    bool no_memory, struct net_xfer **xfer_p);
void net_request(struct net_xfer *xfer, const void *header, size_t header_len);
/* Local, stopped, and the other side is not notified yet. */
static inline bool net_owes_cancel(const struct net_xfer *xfer)
{
	return sm_state(&xfer->sm) == NET_XFER_STOPPING && xfer->ours && xfer->asked &&
	       !xfer->answered && !xfer->stop_sent;
}
int net_proto(const struct net_xfer *xfer, const char *word); /* ERR_PROTO, raised */

#endif
