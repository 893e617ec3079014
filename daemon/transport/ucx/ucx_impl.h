/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ucx_impl: the interfaces between the files of the ucx backend.
 *
 *   ucx.c        probe, open, close; the table of operations
 *   ucx_worker.c libucp's worker: owned by the loop or by its thread
 *   ucx_line.c   a connection as seen by the owner of the worker: endpoint, received
 *                messages
 *   ucx_reg.c    registered memory
 *   ucx_peer.c   a connection's life cycle: hello, loss, close
 *   ucx_order.c  sequenced frames, out and in
 *   ucx_xfer.c   a transfer's life cycle on either side
 *   ucx_source.c the sending side of a transfer
 *   ucx_sink.c   the receiving side
 *   ucx_pool, spans, ucx_wire, ucx_lib: parts that do not include this
 *
 * All state belongs to the loop, except as struct ucx_line documents. Data that `start`
 * of a call reads does not change until it is done. `done` of a call changes state and
 * kicks the peer; only ucx_peer_step() calls up into the daemon.
 */
#ifndef KVD_TRANSPORT_UCX_IMPL_H
#define KVD_TRANSPORT_UCX_IMPL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/idmap.h"
#include "daemon/base/list.h"
#include "daemon/base/sm.h"
#include "daemon/loop/loop.h"
#include "daemon/memory/copy.h"
#include "daemon/plan/pack.h"
#include "daemon/transport/net.h"
#include "daemon/transport/net_reg.h"
#include "daemon/transport/transport.h"
#include "daemon/transport/ucx/ucx.h"
#include "daemon/transport/ucx/ucx_lib.h"
#include "daemon/transport/ucx/ucx_pool.h"
#include "daemon/transport/spans.h"
#include "daemon/transport/ucx/ucx_wire.h"
#include "daemon/transport/ucx/ucx_worker.h"

/* Slices up to this size are sent eagerly; only the single slice of a small transfer may
 * be, so the unsolicited bytes that a peer can make this daemon hold are bounded. */
#define UCX_EAGER_MAX 8192u
#define UCX_SLICE_MIN 65536u
#define UCX_SLICE_MAX (16u << 20)
#define UCX_WINDOW_SLICES 64u /* posted at once to a peer */
/* A transfer of no more is small. Posted at once of a large one: alone; and for a while
 * after a small one started, next to which it is little. */
#define UCX_SMALL_BYTES (4u << 20)
#define UCX_SHARE_BYTES (4u << 20)
#define UCX_SHARE_BESIDE_BYTES (256u << 10)
#define UCX_BESIDE_NS (50 * LOOP_NS_PER_MS)
#define UCX_FETCHES_MAX (4u * UCX_WINDOW_SLICES) /* as the receiver may see it */
#define UCX_AM_ID 0x6bu				 /* 'k': all our messages */
#define UCX_POOL_BYTES (16u << 20)		 /* bounce buffers, each direction */
#define UCX_HELD_MAX (NET_HEADERS_MAX + 4u * XP_HEADER_MAX)
/* Sequenced frames that wait for an earlier one: two each of the transfers
 * that either side may have unfinished, and a BYE. */
#define UCX_ORDER_MAX (4u * XP_INBOUND_MAX + 1u)
/* Messages of a peer that the loop has not handled: its limit in flight, plus bytes of
 * small transfers. */
#define UCX_UNREAD_MAX (UCX_ORDER_MAX + 2u * XP_INBOUND_MAX + UCX_FETCHES_MAX)
#define UCX_UNREAD_BYTES (UCX_HELD_MAX + 2u * XP_INBOUND_MAX * UCX_EAGER_MAX)

struct ucx_transport {
	struct net_transport net;
	const struct ucx_lib *lib;
	ucp_context_h context;
	struct ucx_worker worker;
	struct strmap tokens;	/* token_in -> ucx_peer; under worker.lock */
	struct strmap pairings; /* remote worker's address -> ucx_pairing */
	struct ucx_pool send_pool, recv_pool;
	struct list hungry; /* ucx_piece.link: wait for a receive buffer */
	uint64_t slice_bytes, window_bytes;
	atomic_ullong frames_dropped; /* from no known peer */
};

/* Endpoints made here to one remote worker. Lives as long as the worker: libucp counts
 * that long. */
struct ucx_pairing {
	atomic_ullong count;
};

/* Unsolicited events of a connection. */
struct ucx_trouble {
	ucs_status_t status; /* of the endpoint */
	uint64_t number;     /* which one; 0: none failed */
	bool flood;	     /* more messages than a peer may send */
	bool no_memory;	     /* for a message */
};

/* A connection, for the owner of the worker. */
struct ucx_line {
	struct ucx_peer *peer;
	struct ucx_pairing *pairing;
	const void *address; /* of the remote worker */
	struct ucx_call climb, flush, end;
	uint64_t wanted; /* by climb: an endpoint of that number, or higher */
	/* its own; and the loop's after a climb is done */
	ucp_ep_h ep;	 /* NULL: none yet, or its close has started */
	uint64_t number; /* of those made here to that worker, from 1 up */
	char path[64];
	unsigned int rows_max; /* of a slice, in place */
	unsigned int closing;  /* endpoints of this line */
	bool ended;
	/* shared */
	struct ucx_call event;
	struct ucx_trouble trouble; /* under worker.lock */
	struct ucx_entry *reserve;  /* under worker.lock: for want of memory */
	atomic_uint unread;	    /* messages queued for the loop */
	atomic_ullong unread_bytes;
};

struct ucx_reg {
	struct net_reg net;
	ucp_mem_h memh; /* NULL: never given to libucp, or it needs none */
};

struct ucx_peer {
	struct net_peer net;
	struct ucx_transport *transport;
	struct ucx_line line;
	uint64_t ep_number;	/* of its endpoint; 0: none yet */
	uint64_t failed_number; /* while opening: the next hello takes another */
	bool climbing;		/* another is being made */
	bool asking;		/* then hellos are sent over it */
	void *address;		/* the remote worker's, from HELLO */
	bool answer_came, answer_due, flushed;
	unsigned int hellos;	 /* received */
	uint64_t hello_again_ns; /* wait before the next one */
	uint64_t hello_number;	 /* the endpoint that the last one names */
	uint64_t slice_bytes;	 /* largest that both sides accept */
	unsigned int rows_max;	 /* of a slice, in place */
	unsigned int busy;	 /* calls that are not done */
	uint64_t hello_deadline_ns, nag_at_ns;

	/* sequenced frames */
	uint64_t out_seq, in_seq; /* last sent; next expected */
	struct list entries;	  /* ucx_entry.link, by seq */
	uint64_t held_bytes;	  /* bytes of request headers held for the peer */

	/* bytes */
	struct list sources; /* ucx_xfer.source_link, in turn */
	uint64_t sending_bytes;
	uint64_t beside_until_ns; /* small transfers start and end */
	unsigned int sending;
	bool starved;		/* a source waits for a send buffer */
	unsigned int receiving; /* pieces of rendezvous not fetched yet */
};

/* A received message. A request's is kept by its transfer. */
struct ucx_entry {
	struct ucx_call call; /* it arrived; then: its payload is fetched, or released */
	struct list link;
	struct ucx_peer *peer;
	struct ucx_frame frame;
	void *desc;	/* libucp's, of a payload not yet fetched */
	bool receiving; /* its payload is being fetched */
	bool orphan;	/* peer ended meanwhile: free when received */
	bool starved;	/* without memory for its payload */
	size_t len, held;
	uint8_t *payload; /* `bytes`, or a separate block */
	uint8_t bytes[];
};

/* A frame to be sent, with a text at most. */
struct ucx_send {
	struct ucx_call call;
	struct ucx_peer *peer;
	uint64_t ep_number;    /* it was sent over */
	struct ucx_xfer *xfer; /* of a request: it stays until this is out */
	const void *payload;
	size_t len;
	uint8_t header[UCX_FRAME_BYTES];
	char text[UCX_TEXT_MAX];
};

/* Where the bytes of a slice are, for libucp. */
struct ucx_rows {
	unsigned int count; /* 0: nowhere */
	ucp_mem_h memh;	    /* of a single one, or NULL */
	ucp_dt_iov_t at[PACK_SLICE_ROWS];
};

/* This side's memory of a transfer. */
struct ucx_side {
	const struct plan *plan;
	struct copy_buffer *buffers; /* as the plan names them */
	struct ucx_reg **regs;
	uint32_t count;
};

struct ucx_xfer {
	struct net_xfer net;
	struct ucx_peer *peer;
	struct list source_link;
	unsigned int busy;  /* pieces, and unsent frames */
	atomic_bool halted; /* pieces not yet passed to libucp are not passed */
	struct ucx_side side;
	struct ucx_entry *entry;   /* theirs: holds the header */
	struct ucx_send *spare[2]; /* so that an answer needs no allocation */
	/* source */
	uint64_t next_byte, done_bytes;
	uint64_t sending_bytes; /* source: posted and not completed */
	uint64_t turn_bytes;	/* source: posted in this turn */
	/* sink */
	struct spans spans; /* received */
	uint64_t landed;    /* done with */
	struct list pieces; /* ucx_piece.xfer_link */
};

/* One slice inside this daemon. */
struct ucx_piece {
	struct ucx_call call;
	struct list link;      /* transport->hungry */
	struct list xfer_link; /* xfer->pieces */
	struct ucx_xfer *xfer;
	uint64_t offset, length;   /* of the stream */
	struct ucx_buffer *buffer; /* bounce, or NULL */
	struct ucx_rows rows;	   /* the memory that libucp sends, or fills */
	bool refused;		   /* libucp was not called: its transfer is halted */
	bool copying;
	bool packed; /* through a buffer, or `data` */
	struct copy_job job;
	struct ucx_entry *entry;	 /* sink: its message */
	uint8_t header[UCX_FRAME_BYTES]; /* source */
	uint8_t data[];			 /* source: an eager slice, packed */
};

/* ---- ucx.c ---- */
/* Peers that wait for a send buffer may try again. */
void ucx_feed_sources(struct ucx_transport *transport);
/* ERR_TRANSPORT "ucx: <what>: <libucp's text>". */
int ucx_fault(const struct ucx_lib *lib, const char *what, ucs_status_t status);

/* ---- ucx_line.c ---- */
/* The message handler: for the owner of the worker. */
ucs_status_t ucx_line_message(void *arg, const void *header, size_t header_len,
			      void *data, size_t len, const ucp_am_recv_param_t *param);
void ucx_line_init(struct ucx_line *line, struct ucx_peer *peer,
		   struct ucx_pairing *pairing, const void *address);
void ucx_line_fini(struct ucx_line *line);
/* Messages with the peer's token are accepted from now on, or not any more. */
int ucx_line_listen(struct ucx_line *line);
void ucx_line_deafen(struct ucx_line *line); /* idempotent */
/* Calls of the peer; their `done`s are in ucx_peer.c. */
void ucx_line_climb(struct ucx_line *line, uint64_t number);
void ucx_line_flush(struct ucx_line *line);
/* For the owner of the worker: the call's message, with these rows behind its header; the
 * bytes of a received one, to the rows. */
void ucx_line_send(struct ucx_line *line, struct ucx_call *call, const uint8_t *header,
		   struct ucx_rows *rows, bool eager);
void ucx_line_fetch(struct ucx_call *call, void *desc, struct ucx_rows *rows,
		    size_t length);
/* Closes the endpoint by force: libucp returns its requests of the line. After that no
 * event of the line arrives. */
void ucx_line_end(struct ucx_line *line);
int ucx_line_reserve(struct ucx_line *line); /* refill it */
/* Submit a call of the peer's. Its `done` starts with ucx_call_back(). */
void ucx_call(struct ucx_peer *peer, struct ucx_call *call,
	      void (*start)(struct ucx_call *call), void (*done)(struct ucx_call *call));
static inline void ucx_call_back(struct ucx_peer *peer)
{
	peer->busy--;
	net_peer_kick(&peer->net);
}

/* ---- ucx_reg.c ---- */
int ucx_mem_reg(struct transport *base, struct memory *memory, struct xp_reg **reg_p);
void ucx_reg_release(struct net_reg *reg);
/* References on this side's memories, and the tables the copy threads want. The
 * plan's rows are inside the tables (xp_sides_check). */
int ucx_side_init(struct ucx_side *side, const struct plan *plan,
		  const struct xp_buffer *buffers, uint32_t count, bool is_src);
void ucx_side_fini(struct ucx_side *side); /* idempotent; loop's thread */
/* A slice's rows, at most rows_max, when libucp may touch them; else none. */
void ucx_side_rows(const struct ucx_side *side, bool is_src, uint64_t offset,
		   uint64_t length, unsigned int rows_max, struct ucx_rows *rows);
static inline struct ucx_rows ucx_row(uint8_t *at, uint64_t length, ucp_mem_h memh)
{
	return (struct ucx_rows){.count = 1, .memh = memh, .at[0] = {at, length}};
}

/* ---- ucx_peer.c ---- */
int ucx_peer_open(struct transport *base, const struct xp_peer_args *args,
		  struct xp_peer **peer_p);
void ucx_peer_close(struct xp_peer *base, void (*on_closed)(void *arg), void *arg);
/* A request of its endpoint failed. */
void ucx_peer_break(struct ucx_peer *peer, const char *what, ucs_status_t status);
extern const struct sm_table ucx_peer_table;
void ucx_peer_step(struct net_peer *net);
void ucx_peer_free(struct net_peer *net);
void ucx_peer_hello(struct ucx_peer *peer, const struct ucx_frame *frame);
void ucx_peer_climbed(struct ucx_call *call); /* `done` of the line's */
void ucx_peer_flushed(struct ucx_call *call);
void ucx_peer_line_ended(struct ucx_call *call);
void ucx_peer_trouble(struct ucx_peer *peer, const struct ucx_trouble *trouble);

/* ---- ucx_order.c ---- */
struct ucx_send *ucx_send_new(struct ucx_peer *peer); /* NULL: raised */
/* Sends and owns `send`. Fills token and seq; the payload is `err`'s text, or
 * `payload`, which must stay until xfer->busy falls. */
void ucx_send_frame(struct ucx_send *send, struct ucx_frame *frame, const struct err *err,
		    struct ucx_xfer *xfer, const void *payload, size_t len);
/* A sequenced frame arrived; owns it. */
void ucx_order_entry(struct ucx_peer *peer, struct ucx_entry *entry);
/* The next entry in order, or NULL. The caller owns it. */
struct ucx_entry *ucx_order_next(struct ucx_peer *peer);
void ucx_entry_free(struct ucx_entry *entry); /* NULL is allowed */
/* Releases libucp's part of its payload, too. */
void ucx_entry_drop(struct ucx_entry *entry);
void ucx_order_drop(struct ucx_peer *peer); /* all that wait */

/* ---- ucx_xfer.c ---- */
extern const struct net_ops ucx_net_ops;
static inline bool ucx_is_large(const struct ucx_xfer *xfer)
{
	return xfer->net.bytes > UCX_SMALL_BYTES;
}
void ucx_xfer_entry(struct ucx_peer *peer, struct ucx_entry *entry); /* owns it */

/* ---- ucx_source.c ---- */
void ucx_source_start(struct ucx_xfer *xfer);
void ucx_source_stop(struct ucx_xfer *xfer);
void ucx_source_pump(struct ucx_peer *peer);
static inline bool ucx_source_complete(const struct ucx_xfer *xfer)
{
	return xfer->done_bytes == xfer->net.bytes;
}

/* ---- ucx_sink.c ---- */
/* A slice arrived; owns it. */
void ucx_sink_entry(struct ucx_peer *peer, struct ucx_entry *entry);
void ucx_sink_stop(struct ucx_xfer *xfer);
static inline bool ucx_sink_complete(const struct ucx_xfer *xfer)
{
	return xfer->landed == xfer->net.bytes;
}

#endif
