/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp_impl: the interfaces between the files of the tcp backend.
 *
 *   tcp.c        probe, open, close, the tick; the table of operations
 *   tcp_accept.c the data port: accepting, and addresses
 *   tcp_crypto.c a connection's protection, and its seals
 *   tcp_peer.c   a connection's life cycle (net.h)
 *   tcp_dial.c   making its control line and streams, from either side
 *   tcp_line.c   the control line: frames out and in, on the loop
 *   tcp_xfer.c   a transfer's life cycle (net.h)
 *   tcp_flow.c   a transfer's bytes as loop and I/O threads share them
 *   tcp_io.c     the I/O threads
 *   tcp_tx.c     a stream's sending half, tcp_rx.c its receiving one
 *   tcp_wire, tcp_keys, tcp_seal, spans, daemon/stage: parts that do not include this
 *
 * Two worlds. The loop's thread owns peers, transfers and control lines. I/O threads own
 * the streams; shared state, flows and the halves' pins on them, is under the peer's
 * lock, which no thread holds over a system call that moves bytes or over a copy. A
 * thread with events puts them into the peer's lists and wakes the loop; the loop with
 * work kicks a stream's thread.
 */
#ifndef KVD_TRANSPORT_TCP_IMPL_H
#define KVD_TRANSPORT_TCP_IMPL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "daemon/base/idmap.h"
#include "daemon/base/list.h"
#include "daemon/base/sm.h"
#include "daemon/loop/loop.h"
#include "daemon/loop/mailbox.h"
#include "daemon/memory/stage.h"
#include "daemon/memory/copy.h"
#include "daemon/transport/net.h"
#include "daemon/transport/net_acceptor.h"
#include "daemon/transport/spans.h"
#include "daemon/transport/tcp/tcp.h"
#include "daemon/transport/tcp/tcp_keys.h"
#include "daemon/transport/tcp/tcp_seal.h"
#include "daemon/transport/tcp/tcp_wire.h"
#include "daemon/transport/transport.h"

#define TCP_ROWS_MAX PACK_FRAME_ROWS
#define TCP_IOVS (TCP_ROWS_MAX + 3u) /* and head, trailer, the next head */
#define TCP_HELD_MAX (NET_HEADERS_MAX + 2u * (XP_HEADER_MAX + TCP_EAGER_MAX))
#define TCP_BOUNCE_BYTES (TCP_DATA_MAX + 64u)
#define TCP_OUT_SOFT (1u << 20) /* requests wait while this much is unsent */
#define TCP_OUT_HARD (64u << 20)
#define TCP_PENDING_MAX 32u /* of each kind */
#define TCP_CONNECT_NS (5 * LOOP_NS_PER_S)
#define TCP_TICK_NS (50 * LOOP_NS_PER_MS)
#define TCP_BEAT_TICKS 4u

struct tcp_peer;
struct tcp_xfer;
struct tcp_thread;

struct tcp_transport {
	struct net_transport net;
	struct net_acceptor acceptor; /* the data port */
	struct loop_timer tick;	      /* runs only while needed */
	unsigned int ticks;
	struct mailbox events; /* tcp_peer.event_link: I/O threads have some */
	struct tcp_thread *threads;
	unsigned int thread_count, next_thread;
	unsigned int stream_count; /* wanted of a peer */
	enum tcp_crypto crypto;	   /* END: as the addresses of a connection are */
	unsigned int timeout_ms;   /* unacknowledged bytes end a connection */
	struct copy_hand *hand;	   /* the loop's */
};

/* ---- bytes of one transfer ---- */
struct tcp_flow {
	struct tcp_peer *peer;
	uint64_t id;
	bool ours; /* the id is */
	struct stage_side side;
	struct copy_buffer *buffers; /* side.buffers; with a reference on each memory */
	uint64_t bytes;
	bool direct;  /* system calls may name its rows */
	bool guarded; /* some of its memory may be truncated by its owner */
	/* under the peer's lock */
	bool open;	   /* threads may pin it */
	bool spoiled;	   /* source: some of its bytes will not count */
	unsigned int pins; /* system calls and copies that touch its memory */
	uint64_t next;	   /* source: claimed */
	uint64_t moved;	   /* source: sent; sink: landed */
	uint64_t first_ns; /* when the first of them were */
	struct xp_used used;
	struct spans came;  /* sink: announced */
	struct err err;	    /* a thread's fault; it is closed then */
	struct list turn;   /* source: in peer->sources */
	struct list events; /* in peer->flow_events */
};

/* ---- one direction of a stream ---- */
struct tcp_bounce {
	struct tcp_bounce *next;
	struct gpu_pin *pin; /* of `bytes`, NULL: no GPU reaches it */
	uint8_t *bytes;	     /* whole pages; a record's end may follow (tcp_rx.c) */
};

struct tcp_half {
	/* under the peer's lock */
	struct tcp_flow *flow; /* the current frame's; NULL: none, or released */
	bool busy;	       /* a call or copy touches its memory right now */
	/* the thread's */
	bool active; /* in a frame */
	struct tcp_head head;
	uint64_t pos;	   /* of the frame: head, payload, trailer */
	bool direct, over; /* over: payload is padding, or is discarded */
	struct tcp_bounce *bounce;
	struct tcp_seal *seal;	   /* NULL: the socket's bytes are as they are */
	struct tcp_bounce *record; /* the seal's buffer, while it needs one */
	unsigned int named;	   /* rows of the frame that the kernel was given */
	size_t got;		   /* receiving: bytes of the head */
	uint8_t head_bytes[TCP_HEAD_BYTES], trailer_bytes[TCP_TRAILER_BYTES];
};

struct tcp_stream {
	struct tcp_peer *peer;
	unsigned int index;
	int fd;
	struct tcp_thread *thread;
	struct list kick_link;		 /* under the thread's lock */
	struct list busy_link;		 /* the thread's */
	bool added, can_read, can_write; /* the thread's */
	bool failed;			 /* the thread's: no further input is accepted */
	/* under the peer's lock */
	bool closing, gone, idle; /* idle: sending, wants a kick when there is work */
	bool said, beat; /* a frame was sent, and none after it; a BEAT must follow it */
	struct tcp_half tx, rx;
	/* the loop's, while it is being made */
	struct loop_fd watch;
	struct tcp_dial *dial;
	bool up;
};

struct tcp_thread {
	struct tcp_transport *transport;
	pthread_t thread;
	bool started;
	int epoll_fd, event_fd;
	pthread_mutex_t lock;
	struct list kicked;
	bool stopping;
	struct list busy;
	struct copy_hand *hand;
	struct tcp_bounce *bounces; /* free ones, warm first */
	struct iovec iov[TCP_IOVS];
};

/* ---- the control line ---- */
/* A frame, or other bytes, to be sent. */
struct tcp_chunk {
	struct list link;
	size_t len, pos;     /* pos: of both together */
	const uint8_t *tail; /* the following bytes, in separate memory: `owned`; or
			      * NULL */
	uint8_t *owned;
	size_t tail_len;
	uint8_t bytes[];
};

/* A received frame's payload. A request's is kept by its transfer. */
struct tcp_entry {
	struct tcp_peer *peer;
	struct tcp_head head;
	size_t got;
	uint8_t payload[];
};

struct tcp_line {
	int fd; /* -1: none */
	struct loop_fd watch;
	int events; /* watched */
	struct list out;
	size_t unsent;
	struct tcp_seal *seal, *open; /* of sent and of received bytes; or NULL */
	uint8_t *records;	      /* their buffers, a record each */
	uint8_t *in;		      /* TCP_IN_BYTES */
	size_t in_len;
	struct tcp_entry *entry; /* being received */
	size_t skip;		 /* of a payload without memory */
	bool more;		 /* whole frames wait in `in`: the turn's time was used
				  * up */
	bool said;		 /* as a stream's */
};

struct tcp_peer {
	struct net_peer net;
	struct tcp_transport *transport;
	struct list event_link;	    /* transport->events */
	struct tcp_address address; /* of the dialed side */
	uint32_t address_at;
	char place[64];		/* address of the other end */
	char refused[160];	/* why the last connection attempt failed, or "" */
	uint64_t dial_until_ns; /* for the current address */
	bool shut;
	uint64_t join_deadline_ns, again_ns;
	struct tcp_dial *dial; /* of the control line */
	struct tcp_line line;
	enum tcp_crypto crypto; /* of all its connections */
	struct tcp_keys keys;
	struct tcp_stream *streams;
	unsigned int stream_count, streams_up;
	uint64_t held_bytes; /* of the peer's requests */

	/* shared with the I/O threads */
	pthread_mutex_t lock;
	struct list sources;   /* tcp_flow.turn */
	struct idmap sinks[2]; /* tcp_flow by id: [0] the peer's, [1] ours */
	uint64_t sink_high[2]; /* ids up to here may be named by late frames */
	struct list flow_events;
	struct err io_err; /* a stream's fault */
};

struct tcp_xfer {
	struct net_xfer net;
	struct tcp_peer *peer;
	bool eager; /* its bytes are in the request, or in the answer */
	bool flows; /* its flow was opened: threads know it */
	struct tcp_flow flow;
	struct tcp_entry *entry; /* theirs: the request; ours: an eager answer */
	struct copy_job job;	 /* an eager transfer that the loop may not place */
	bool copying, placed;
	struct tcp_chunk *spare[2]; /* so that an answer needs no allocation */
};

/* ---- tcp.c ---- */
void tcp_tick_want(struct tcp_transport *transport);
/* No delay, keep-alives, the user timeout; `stream`: buffers, too. */
void tcp_socket_tune(const struct tcp_transport *transport, int fd, bool stream);

/* ---- tcp_accept.c ---- */
int tcp_port_open(struct tcp_transport *transport);
/* Connections with its token that arrived before the peer was opened join it now. */
void tcp_accept_match(struct tcp_peer *peer);

/* ---- tcp_crypto.c ---- */
/* This side's requirement for a connected socket. */
enum tcp_crypto tcp_crypto_wish(const struct tcp_transport *transport, int fd);
const char *tcp_crypto_word(enum tcp_crypto crypto);
/* The line's, once both hellos are there; a stream's. */
int tcp_crypto_line(struct tcp_peer *peer);
int tcp_crypto_stream(struct tcp_stream *stream, const struct tcp_traffic *traffic);
/* Sends a BEAT after data sent since the last call; true: there was some. */
bool tcp_crypto_beat(struct tcp_peer *peer);
/* Takes a half's buffer from its thread; false: none, raised. And returns it, when
 * empty. */
bool tcp_half_lend(struct tcp_thread *thread, struct tcp_half *half);
void tcp_half_reclaim(struct tcp_thread *thread, struct tcp_half *half);

/* ---- tcp_dial.c ---- */
/* Start to connect the control line (the dialer). */
void tcp_dial_start(struct tcp_peer *peer);
/* A connection has proven to be this peer's. Takes the fd. */
void tcp_join_control(struct tcp_peer *peer, int owned_fd, const struct tcp_hello *hello);
void tcp_join_stream(struct tcp_stream *stream, int owned_fd,
		     const uint8_t asked[TCP_HELLO_BYTES]);
void tcp_dial_stop(struct tcp_peer *peer);		 /* every attempt; idempotent */
void tcp_dial_look(struct tcp_peer *peer, uint64_t now); /* another attempt, if one is
							  * due */
/* Why there was no control line at the deadline. */
void tcp_dial_why(const struct tcp_peer *peer, struct err *why_p);

/* ---- tcp_peer.c ---- */
int tcp_peer_open(struct transport *base, const struct xp_peer_args *args,
		  struct xp_peer **peer_p);
void tcp_peer_close(struct xp_peer *base, void (*on_closed)(void *arg), void *arg);
/* The control line, or a stream, was lost. */
void tcp_peer_break(struct tcp_peer *peer, const char *what, int no);
void tcp_peer_joined(struct tcp_peer *peer); /* all its streams are up */
extern const struct sm_table tcp_peer_table;
void tcp_peer_step(struct net_peer *net);
void tcp_peer_flush(struct net_peer *net);
void tcp_peer_free(struct net_peer *net);

/* ---- tcp_line.c ---- */
void tcp_line_init(struct tcp_line *line);
void tcp_line_fini(struct tcp_peer *peer); /* closes it; idempotent */
int tcp_line_open(struct tcp_peer *peer, int owned_fd);
/* Read frames as they arrive; before that, its bytes belong to tcp_dial.c. */
void tcp_line_listen(struct tcp_peer *peer);
void tcp_line_resume(struct tcp_peer *peer);  /* frames left over from the last turn */
struct tcp_chunk *tcp_chunk_new(size_t size); /* NULL: raised */
/* Queue a frame; owns the chunk, which has room for it. The payload is `err`'s text, or
 * the bytes that the caller has put at tcp_chunk_payload() and into the tail, together
 * `head->length` long. */
void tcp_line_send(struct tcp_peer *peer, struct tcp_chunk *owned, struct tcp_head *head,
		   const struct err *err);
static inline uint8_t *tcp_chunk_payload(struct tcp_chunk *chunk)
{
	return chunk->bytes + TCP_HEAD_BYTES;
}
void tcp_line_flush(struct tcp_peer *peer);
bool tcp_line_sent(const struct tcp_line *line); /* the socket has all of it */
void tcp_entry_free(struct tcp_entry *entry);	 /* NULL is allowed */

/* ---- tcp_xfer.c ---- */
extern const struct net_ops tcp_net_ops;
/* A frame arrived. REQUESTs and eager answers have their payload in an entry, which is
 * taken; without memory for one it is NULL, and the error recorded. */
void tcp_xfer_frame(struct tcp_peer *peer, const struct tcp_head *head,
		    const uint8_t *payload, struct tcp_entry *owned);
void tcp_xfer_progress(struct tcp_xfer *xfer);

/* ---- tcp_flow.c ---- */
/* References on this side's memories. The rows are inside the tables
 * (xp_sides_check). */
int tcp_flow_init(struct tcp_flow *flow, struct tcp_peer *peer, const struct plan *plan,
		  const struct xp_buffer *buffers, uint32_t count, bool is_src);
void tcp_flow_fini(struct tcp_flow *flow); /* quiesced, or never started; idempotent */
int tcp_flow_send(struct tcp_flow *flow);
int tcp_flow_receive(struct tcp_flow *flow);
void tcp_flow_stop(struct tcp_flow *flow); /* idempotent */
struct tcp_flow_view {
	bool quiesced; /* closed, and not pinned by a thread */
	bool spoiled;
	uint64_t next, moved, first_ns;
	uint64_t came; /* sink: announced bytes */
	struct xp_used used;
	struct err err;
};
void tcp_flow_look(struct tcp_flow *flow, struct tcp_flow_view *view_p);
/* Next of the flows that have events, or NULL. */
struct tcp_flow *tcp_flow_next_event(struct tcp_peer *peer);
/* Was a buffer's memory lost? Then its bytes are not the engine's. */
bool tcp_flow_dead(const struct tcp_flow *flow);

/* For I/O threads, with the peer's lock held: */
/* Pin the half's flow for a call or a copy; false: it is closed, and the half has
 * released it. */
bool tcp_half_hold(struct tcp_half *half, bool sending);
/* Unpin after the call; false: the flow was closed meanwhile, and is released. */
bool tcp_half_release(struct tcp_half *half, bool sending);
/* The frame is done with it. */
void tcp_half_leave(struct tcp_half *half);
void tcp_flow_fault(struct tcp_flow *flow); /* with this thread's error */
void tcp_flow_moved(struct tcp_flow *flow, const struct tcp_half *half); /* its frame */
/* The next stretch to send, of the flow whose turn it is: 0 when there is none. */
uint32_t tcp_flow_claim(struct tcp_peer *peer, struct tcp_half *half);
/* A head arrived: find its flow and record its bytes. Positive: its flow has ended. */
#define TCP_NOBODYS 1
int tcp_flow_admit(struct tcp_peer *peer, struct tcp_half *half);

/* ---- tcp_io.c ---- */
int tcp_io_open(struct tcp_transport *transport);
void tcp_io_close(struct tcp_transport *transport);
/* The stream's fd is ready: a thread takes it. */
void tcp_io_add(struct tcp_stream *stream);
/* Asks the thread to release the stream; stream->gone is set, with events, when it
 * has. */
void tcp_io_remove(struct tcp_stream *stream);
void tcp_io_kick(struct tcp_stream *stream);
void tcp_io_notify(struct tcp_peer *peer); /* have the loop check it; lock held */
struct tcp_bounce *tcp_bounce_take(struct tcp_thread *thread); /* NULL: raised */
void tcp_bounce_give(struct tcp_thread *thread, struct tcp_bounce **bounce);
/* The stream is broken, with this thread's error. */
void tcp_stream_fail(struct tcp_stream *stream);

/* ---- tcp_tx.c, tcp_rx.c: true when there is more to do at once ---- */
bool tcp_tx_work(struct tcp_stream *stream);
bool tcp_rx_work(struct tcp_stream *stream);

#endif
