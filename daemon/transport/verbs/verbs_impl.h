/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs_impl: the interfaces between the files of the verbs backend.
 *
 *   verbs.c       probe, open, close, progress; the table of operations
 *   verbs_dev.c   devices and rails: found, opened, explained
 *   verbs_look.c  the machine's ports, for operators
 *   verbs_topo.c  which adapter is near which memory
 *   verbs_reg.c   registered memory, and keys
 *   verbs_places.c  a transfer's tables of them
 *   verbs_cm.c    the connection manager: dial, accept, refuse
 *   verbs_qp.c    a queue pair: queues, completions, its death
 *   verbs_event.c an adapter's reports, as text and with a scope
 *   verbs_rail.c  loss of one of several rails
 *   verbs_frame.c frames over queue pair 0: credits, order, pieces of headers
 *   verbs_peer.c  a connection: ready, lost, closed
 *   verbs_xfer.c  a transfer's life cycle on either side
 *   verbs_post.c  plans become chains of work requests
 *   verbs_pack.c  or one request a slice: rows that are short, memory that is staged
 *   verbs_loopback.c  reading back writes to GPU memory
 *   verbs_pool, verbs_wire, verbs_lib: parts with separate headers
 *
 * Everything but registration is on the loop's thread. Completions and events change
 * state and kick the peer; only verbs_peer_step() calls up into the daemon (on_request:
 * when its frame is taken, there too).
 */
#ifndef KVD_TRANSPORT_VERBS_IMPL_H
#define KVD_TRANSPORT_VERBS_IMPL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/idmap.h"
#include "daemon/base/list.h"
#include "daemon/base/sm.h"
#include "daemon/loop/loop.h"
#include "daemon/plan/pack.h"
#include "daemon/transport/net.h"
#include "daemon/transport/net_reg.h"
#include "daemon/transport/verbs/verbs.h"
#include "daemon/transport/verbs/verbs_lib.h"
#include "daemon/transport/verbs/verbs_wire.h"

#define VERBS_MSG_BYTES 4096u  /* a frame and the bytes behind it */
#define VERBS_RAIL_QPS 2u      /* requested on each rail; large rooms use all */
#define VERBS_RETRIES 7u       /* of unacknowledged messages; then the peer is lost */
#define VERBS_DEPTH 64u	       /* receives for frames a peer */
#define VERBS_SEND_BUFFERS 32u /* queued frames per peer */
#define VERBS_SQ_DEPTH 512u    /* work requests a queue pair */
#define VERBS_CHAIN_WRS 32u    /* under one doorbell */
#define VERBS_CHAIN_BYTES (1u << 20)
#define VERBS_SGE_MAX PACK_SGE_MAX
#define VERBS_INLINE_MAX 128u
#define VERBS_SPREAD_BYTES (4u << 20) /* from here on over all queue pairs */

struct verbs_device {
	struct verbs_transport *transport;
	struct ibv_context *context; /* librdmacm's */
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct loop_fd cq_watch, async_watch;
	struct ibv_device_attr attr;
	uint32_t index;
	bool fatal; /* lost until the daemon restarts */
	char name[32];
};

struct verbs_rail {
	struct verbs_device *device;
	struct rdma_cm_id *listener;
	struct sockaddr_storage address; /* with the port it listens on */
	uint32_t index;
	uint8_t port;
	bool down; /* reported by the port */
	int node;  /* NUMA; -1: not known, or there is one only */
	int gid;   /* index of its address's; -1: it has none */
	struct verbs_loopback *loopback;
	char name[40];	/* "mlx5_0:1" */
	char text[192]; /* address, GID, MTU, link, NUMA node, and why these */
};

/* work requests being built */
struct verbs_chain {
	struct ibv_send_wr wr[VERBS_CHAIN_WRS];
	struct ibv_sge sge[VERBS_CHAIN_WRS][VERBS_SGE_MAX];
	uint32_t count;
	uint64_t bytes;
};

struct verbs_transport {
	struct net_transport net;
	const struct verbs_lib *lib;
	struct rdma_event_channel *cm;
	struct loop_fd cm_watch;
	struct verbs_device devices[VERBS_RAILS_MAX];
	struct verbs_rail rails[VERBS_RAILS_MAX];
	uint32_t device_count, rail_count;
	struct list active;    /* verbs_qp.active_link: completions may be there */
	struct strmap tokens;  /* token_in -> verbs_peer that waits to be dialled */
	struct list lingering; /* verbs_linger.link: disconnects in progress */
	struct loop_timer linger_timer;
	uint64_t window_max;
	uint64_t spin_ns, spin_until_ns; /* how long an empty queue is polled */
	uint8_t tos, ack_timeout;
	uint32_t sge_max, wr_bytes;
	struct verbs_pool *pack_pool; /* movers' buffers; NULL: nothing is packed */
	uint32_t request_ns;	      /* 0: only what must be is packed */
	struct verbs_chain chain;
};

struct verbs_reg {
	struct net_reg net;
	struct ibv_mr *mr[VERBS_RAILS_MAX][VERBS_PIECES_MAX]; /* by device */
	uint32_t pieces; /* 0: registered with no adapter, staged */
	uint8_t shift;
	uint32_t near;	  /* rails that are nearest to it: bits */
	uint64_t address; /* of byte 0, as keys name it */
	int dmabuf_fd;	  /* while it is registered; -1: none */
	uint64_t dmabuf_offset;
};

struct verbs_key {
	struct xp_key_base base;
	struct verbs_remote remote;
	unsigned int refs;
};

/* ---- queue pairs ---- */

enum verbs_qp_state {
	VERBS_QP_IDLE,	     /* not dialed; no connection received */
	VERBS_QP_CONNECTING, /* the connection manager is using it */
	VERBS_QP_UP,
	VERBS_QP_DYING, /* in state ERR; posted requests are flushed */
	VERBS_QP_DEAD,	/* destroyed: nothing of it moves any more */
};

/* One or more work requests of which the last is signalled. */
struct verbs_sent {
	struct verbs_xfer *xfer; /* NULL: a frame */
	uint32_t wrs;		 /* not accounted for yet */
	int32_t buffer;		 /* a frame's, -1: none */
	uint64_t bytes;
	uint64_t begin;	     /* of its bytes, in the plan's stream */
	struct slice *slice; /* of a packed transfer, NULL: none */
};

struct verbs_qp {
	struct verbs_peer *peer;
	struct verbs_rail *rail;
	uint32_t index; /* 0 carries the frames */
	struct sm sm;
	struct rdma_cm_id *id;
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	struct list active_link;
	/* send queue */
	struct verbs_sent *sent; /* a ring of sq_depth */
	uint32_t sent_head, sent_count;
	uint32_t sq_depth, sq_free, max_inline, max_sge;
	uint64_t inflight_bytes;
	/* receive queue */
	uint32_t rq_depth, rq_posted;
	bool armed;    /* an event will follow */
	bool spinning; /* empty, not armed: polled again soon */
	uint64_t die_deadline_ns;
	uint64_t dial_ns; /* when it started to connect */
};

/* ---- peers ---- */

struct verbs_peer {
	struct net_peer net;
	struct verbs_transport *transport;
	struct verbs_address address; /* the remote's; dial only */
	struct err dial_err;	      /* the last refusal */
	bool waiting;		      /* in transport->tokens */
	struct verbs_qp *qps;	      /* qp_count */
	uint32_t qp_count, qps_up;
	uint32_t rails, bad_rails; /* dial: rails that both sides have; bits of rails
				    * without a path */
	uint64_t dial_deadline_ns, dial_again_ns;

	/* frames */
	uint8_t *buffers;	       /* VERBS_DEPTH receives, then VERBS_SEND_BUFFERS */
	struct ibv_mr *buffer_mr;      /* with queue pair 0's device */
	uint32_t send_free;	       /* a bit for each send buffer */
	uint32_t credits, credits_due; /* frames that may be sent; credits to return */
	uint32_t peer_depth;
	struct list out;	       /* verbs_out.link */
	struct verbs_xfer *assembling; /* its header is being received */
	uint64_t held_bytes;	       /* of request headers held for the peer */
	uint64_t skip_bytes;	       /* of the header of a request without memory */
	bool bye_out;		       /* it was sent, or nothing more can be */

	/* transfers */
	struct list movers;    /* .mover_link: have something to post, in turn */
	struct list ungranted; /* .grant_link: inbound WRITEs without a slot */
	struct list unslotted; /* .grant_link: those whose slices have no pool yet */
	struct verbs_xfer *grants[VERBS_GRANTS];
	uint16_t generations[VERBS_GRANTS];
	uint32_t grant_count, grant_next;

	/* bytes */
	uint64_t inflight_bytes, window_bytes;
	uint64_t rate_begin_ns, rate_bytes;
	uint64_t progress_ns; /* next PROGRESS frames */
	uint64_t knock_ns;    /* next check of the other end */

	/* rails that died, as bits (verbs_rail.c) */
	uint32_t rails_lost;	 /* local queue pairs on them are in ERR, or dead */
	uint32_t rails_dead;	 /* the local ones are dead, and the peer was notified */
	uint32_t rails_reported; /* the peer's are dead, as it has reported */
	bool rails_busy;	 /* some of that is not settled yet */
	uint64_t rails_deadline_ns;
	struct verbs_out *rail_out[VERBS_RAILS_MAX]; /* RAIL, when due */

	/* packed transfers */
	struct verbs_pool *pack_pool; /* the slots that it may write; NULL: not yet */
};

/* A frame to be sent. */
struct verbs_out {
	struct list link;
	struct verbs_frame frame;
	const uint8_t *payload;	 /* a request's header, else NULL: text */
	size_t left;		 /* of it */
	struct verbs_xfer *xfer; /* of the request: it stays until this is out */
	char text[VERBS_TEXT_MAX];
};

/* ---- transfers ---- */

struct verbs_place {
	struct verbs_reg *reg; /* ours … */
	struct verbs_key *key; /* … or the peer's */
	uint64_t offset;       /* of the buffer's byte 0 in it */
};

/* One side's memory of a transfer, as the plan numbers it. */
struct verbs_places {
	struct verbs_place *at;
	uint32_t count;
	/* of those that the plan names: some memory is staged; some is a GPU's; some
	 * may be touched by the adapter alone */
	bool staged, device, guarded;
};

/* A transfer's messages, each sent once. */
enum verbs_spare {
	VERBS_SPARE_FIRST, /* REQUEST; GO */
	VERBS_SPARE_STOP,  /* CANCEL; REVOKE */
	VERBS_SPARE_LAST,  /* MARK or FIN; DONE */
	VERBS_SPARES,
};

struct verbs_xfer {
	struct net_xfer net;
	struct verbs_peer *peer;
	struct list mover_link, grant_link;
	uint64_t digest;
	bool go;    /* GO was sent, or received */
	bool ended; /* the mover's last messages (marks, FIN) are out */
	bool fin_came;
	unsigned int busy; /* entries in send queues, and requests in `out` */
	const struct plan *plan;
	struct verbs_places local, remote;
	struct verbs_out *spare[VERBS_SPARES]; /* so that a message needs no allocation */
	uint8_t *header;		       /* theirs */
	uint32_t header_len, header_have;      /* bytes of it; received bytes */
	/* mover, which posts work requests: the requester; of a packed one the source */
	struct plan_walk walk;
	struct plan_span span; /* cut from the walk, not posted yet */
	uint64_t posted_bytes, done_bytes, announced_bytes;
	uint64_t rewind;    /* the first byte that a lost rail did not confirm, or
			     * UINT64_MAX */
	bool again;	    /* a rail was lost: marks, and maybe bytes, once more */
	uint32_t used;	    /* queue pairs with bytes of it: bits */
	uint32_t used_lost; /* ... that were on rails that are lost */
	uint32_t marked;    /* of those: the mark is posted */
	uint32_t home;	    /* a small one stays there */
	uint32_t near;	    /* queue pairs that it may use: bits */
	bool may_inline;
	struct verbs_pack *pack;       /* NULL: row by row */
	bool pack_agreed;	       /* local: the responder has decided so */
	bool wants_pack;	       /* remote: the requester has requested it */
	bool must_pack;		       /* it is staged: packed, or not at all */
	struct verbs_flushes *flushes; /* to be read before it is over; NULL: none */
	/* a granted inbound WRITE */
	uint32_t slot; /* GO's; VERBS_GRANTS: none */
	uint16_t generation;
	uint8_t rounds; /* of marks, before this one */
	uint32_t marks; /* received: bits */
	uint8_t marks_due;
	bool marks_aborted;
};

/* ---- verbs_dev.c ---- */
int verbs_set_nonblocking(int fd);
/* Finds, opens and listens on the rails. ERR_REQUIRE has the reason if there is none. */
int verbs_rails_open(struct verbs_transport *transport);
void verbs_rails_close(struct verbs_transport *transport);
bool verbs_gid_is(const union ibv_gid *gid, const struct sockaddr_storage *address);
/* "192.168.1.2" or "[fe80::1]". */
void verbs_address_text(const struct sockaddr_storage *address, char *buf, size_t size);
void verbs_address_port(struct sockaddr_storage *address, uint16_t port); /* sets it */

/* ---- verbs_topo.c ---- */
/* A file's first line under the device's folder in sysfs; "?" when there is none. */
void verbs_topo_line(const struct verbs_lib *lib, const char *device, const char *file,
		     char *buf, size_t size);
int verbs_topo_node(const struct verbs_lib *lib, const char *device);
/* Rails that are nearest to that memory, as bits; all, where nothing is known. */
uint32_t verbs_topo_near(const struct verbs_transport *transport,
			 const struct memory *memory);
/* The distance of a PCI device ("0000:3b:00.0") from an adapter: 0 on one switch, 1 on
 * one root complex, 2 on one NUMA node, 3 more, or unknown. */
unsigned int verbs_topo_pci(const struct verbs_lib *lib, const char *pci,
			    const char *device);

/* ---- verbs_reg.c ---- */
int verbs_mem_reg(struct transport *base, struct memory *memory, struct xp_reg **reg_p);
void verbs_reg_release(struct net_reg *reg);
int verbs_key_pack(struct xp_reg *reg, struct xp_peer *peer, void *buf, size_t size,
		   size_t *len_p);
int verbs_key_unpack(struct xp_peer *peer, const void *buf, size_t len, void *owner,
		     struct xp_key **key_p);
void verbs_key_drop(struct xp_key *key);
void verbs_key_put(struct verbs_key *key);

/* ---- verbs_places.c ---- */
/* References on this side's memories, or on the peer's keys; every buffer that a
 * run names must be there. */
int verbs_places_init(struct verbs_places *places, const struct plan *plan,
		      const struct xp_buffer *buffers, uint32_t count, bool is_src,
		      const struct verbs_peer *remote_of);
void verbs_places_fini(struct verbs_places *places); /* idempotent; loop's thread */
/* Of the places that the plan names on that side: equal at both daemons when they
 * mean the same registrations. */
uint64_t verbs_places_digest(const struct verbs_places *places, const struct plan *plan,
			     bool is_src);

/* ---- verbs_cm.c ---- */
void verbs_on_cm(struct loop_fd *watch, int events);
/* Dial every queue pair that is idle. */
void verbs_dial(struct verbs_peer *peer);
/* Queue pairs that are still connecting long after another rail came up: dial them over
 * that one. */
void verbs_dial_elsewhere(struct verbs_peer *peer, uint64_t now);

/* The queue pair is destroyed, but the other side may not have noticed: keeps the id
 * until it has, or LINGER_NS. */
void verbs_linger(struct verbs_transport *transport, struct rdma_cm_id *id);
void verbs_on_linger(struct loop_timer *timer);
void verbs_linger_end(struct verbs_transport *transport); /* all of them, now */

/* ---- verbs_qp.c ---- */
/* An empty request: fails when the other end has ended. */
void verbs_qp_knock(struct verbs_qp *qp);
void verbs_qp_init(struct verbs_qp *qp, struct verbs_peer *peer, uint32_t index);
/* Queues and receives, for the connection qp->id. */
int verbs_qp_make(struct verbs_qp *qp);
void verbs_qp_up(struct verbs_qp *qp);
/* Undo a failed connection. */
void verbs_qp_reset(struct verbs_qp *qp);
/* Moves it to ERR: it neither sends nor receives; posted requests are flushed.
 * Idempotent. */
void verbs_qp_kill(struct verbs_qp *qp);
/* Destroyed; requests that were not flushed are returned here. */
void verbs_qp_reap(struct verbs_qp *qp);
/* Post a chain: `entry` is the account of its last work request. On failure
 * nothing of the chain is accounted and the queue pair is broken. */
int verbs_qp_post(struct verbs_qp *qp, struct ibv_send_wr *first, uint32_t count,
		  const struct verbs_sent *entry);
/* Completions, at most `budget`; returns how many. */
unsigned int verbs_qp_poll(struct verbs_qp *qp, unsigned int budget);
void verbs_qp_activate(struct verbs_qp *qp);
void verbs_on_cq(struct loop_fd *watch, int events);

/* ---- verbs_event.c ---- */
void verbs_on_async(struct loop_fd *watch, int events);
/* A work request failed: its meaning and scope. True: the path to the peer failed, not
 * the request. */
bool verbs_wc_err(const struct verbs_qp *qp, const struct ibv_wc *wc, struct err *err_p);
const char *verbs_wc_text(enum ibv_wc_status status);

/* ---- verbs_rail.c ---- */
/* The queue pair's path to the peer is lost. True: its rail is given up and the
 * connection continues over the others; false: the peer has failed, with `err`. */
bool verbs_rail_fail(struct verbs_qp *qp, const struct err *err);
int verbs_rail_reported(struct verbs_peer *peer, const struct verbs_frame *frame);
/* Queue pairs (bits) on lost rails that are not dead at both sides yet. */
uint32_t verbs_rail_open(const struct verbs_peer *peer);
/* Rails with dying local queue pairs: until they are dead no write counts as landed. */
static inline bool verbs_rail_dying(const struct verbs_peer *peer)
{
	return peer->rails_lost & ~peer->rails_dead;
}
void verbs_rail_step(struct verbs_peer *peer);
void verbs_rail_watch(struct verbs_peer *peer, uint64_t now); /* its deadline */
void verbs_rails_forget(struct verbs_peer *peer);

/* ---- verbs_frame.c ---- */
struct verbs_out *verbs_out_new(void); /* NULL: raised */
/* Queues and owns `out`; `err`'s text follows it. */
void verbs_send(struct verbs_peer *peer, struct verbs_out *out,
		const struct verbs_frame *frame, const struct err *err);
/* With at most VERBS_TEXT_MAX bytes behind it. */
void verbs_send_bytes(struct verbs_peer *peer, struct verbs_out *out,
		      const struct verbs_frame *frame, const void *bytes, size_t len);
void verbs_send_request(struct verbs_peer *peer, struct verbs_out *out,
			const struct verbs_frame *frame, struct verbs_xfer *xfer);
void verbs_frame_pump(struct verbs_peer *peer);
void verbs_frame_in(struct verbs_peer *peer, uint32_t buffer, uint32_t len);
void verbs_frames_drop(struct verbs_peer *peer);

/* ---- verbs_peer.c ---- */
int verbs_peer_open(struct transport *base, const struct xp_peer_args *args,
		    struct xp_peer **peer_p);
void verbs_peer_close(struct xp_peer *base, void (*on_closed)(void *arg), void *arg);
void verbs_peer_path(struct verbs_peer *peer); /* writes down which rails it uses */
/* No queue pair of it can move a byte any more. */
bool verbs_peer_quiet(const struct verbs_peer *peer);
/* Memory of frames, registered with the device of queue pair 0. */
int verbs_peer_buffers(struct verbs_peer *peer, const struct verbs_device *device);
extern const struct sm_table verbs_peer_table;
void verbs_peer_step(struct net_peer *net);
void verbs_peer_free(struct net_peer *net);
void verbs_peer_bye(struct verbs_peer *peer, const struct err *err); /* it arrived */

/* ---- verbs_xfer.c ---- */
extern const struct net_ops verbs_net_ops;
/* A frame that concerns a transfer. */
int verbs_xfer_frame(struct verbs_peer *peer, const struct verbs_frame *frame,
		     const uint8_t *payload);
int verbs_xfer_mark(struct verbs_peer *peer, const struct verbs_qp *qp,
		    const struct verbs_mark *mark);
void verbs_xfer_progress(struct verbs_peer *peer);     /* report the movers' progress */
void verbs_xfer_drop_partial(struct verbs_peer *peer); /* a request not whole yet */
void verbs_xfer_grant(struct verbs_peer *peer);	       /* slots to a waiting one */

/* ---- verbs_pack.c ---- */
/* Without memory for it nothing is packed, and this is logged. */
void verbs_pack_open(struct verbs_transport *transport);
void verbs_pack_close(struct verbs_transport *transport);
void verbs_pack_peer_free(struct verbs_peer *peer);
/* An op that is about to send its request: shall it, or must it, be packed? Fills
 * op->way. */
int verbs_pack_choose(struct verbs_xfer *xfer);
/* An inbound with known places: can it be done as requested? */
int verbs_pack_check(struct verbs_xfer *xfer);
/* An inbound that is about to send GO: it has to wait for slots; the peer is kicked. */
bool verbs_pack_waits(struct verbs_xfer *xfer);
/* It sends GO now: the slots' key (of a WRITE), or false: row by row. */
bool verbs_pack_accept(struct verbs_xfer *xfer, size_t *len_p, uint8_t *key);
/* Handles GO for an op that requested packing. */
int verbs_pack_agree(struct verbs_xfer *xfer, bool agreed, const void *key, size_t len);
/* There will be no slots: a waiting transfer is sent row by row, or is stopped. */
void verbs_pack_no_slots(struct verbs_peer *peer, struct verbs_pool *pool,
			 const struct err *err);
void verbs_pack_stop(struct verbs_xfer *xfer); /* new state: STOPPING */
void verbs_pack_drop(struct verbs_xfer *xfer); /* nothing of it moves; idempotent */
void verbs_pack_feed(struct verbs_peer *peer); /* slots to destinations that wait */
int verbs_pack_slice(struct verbs_xfer *xfer, const struct verbs_frame *frame);
int verbs_pack_slot(struct verbs_xfer *xfer, const struct verbs_frame *frame,
		    const void *payload);
/* Every slice has arrived, or was cut. */
bool verbs_pack_whole(const struct verbs_xfer *xfer);
/* A source's turn: false when it waits. `room` for requests on queue pair 0. */
bool verbs_pack_move(struct verbs_xfer *xfer, uint32_t room);
bool verbs_pack_ended(const struct verbs_xfer *xfer); /* marks may follow */
void verbs_pack_sent(struct slice *slice);	      /* its request is over */

/* ---- verbs_post.c ---- */
void verbs_move_start(struct verbs_xfer *xfer);
/* Post again the bytes that the lost rails did not confirm, or the marks alone. */
int verbs_move_again(struct verbs_xfer *xfer, uint32_t lost);
/* Post as much as fits, of each mover in turn. */
void verbs_move_pump(struct verbs_peer *peer);

#endif
