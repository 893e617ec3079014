/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_impl: what the fake's files share: fake.c (hub, nodes, memory), fake_peer.c
 * (connections), fake_wire.c (messages), fake_xfer.c (transfers), fake_move.c and
 * fake_bytes.c (bytes), fake_script.c (chance, faults, trace). Nobody else
 * includes it.
 */
#ifndef KVD_TRANSPORT_FAKE_IMPL_H
#define KVD_TRANSPORT_FAKE_IMPL_H

#include <pthread.h>

#include "daemon/base/cursor.h"
#include "daemon/base/idmap.h"
#include "daemon/base/list.h"
#include "daemon/loop/loop.h"
#include "daemon/transport/net.h"
#include "tests/sim/fake.h"

/* Something that happens at `to` at a time. A frozen node and a link that is
 * down hold it back; a dead node drops it. Events lie embedded in what they are
 * about. */
struct fake_event {
	struct list link; /* in hub->events or hub->held; list_init()ed when idle */
	uint64_t at_ns, order;
	struct fake_node *from, *to; /* from NULL: a local event */
	/* dropped: it will never happen; only let go of what it holds */
	void (*run)(struct fake_event *event, bool dropped);
};

struct fake_pair {
	struct list link;
	const struct fake_node *from, *to;
	bool has_profile, down;
	struct fake_profile profile;
};

struct fake_hub {
	struct list link; /* this thread's hubs */
	struct loop *loop;
	uint64_t rng;
	struct fake_profile profile;
	struct list pairs, rules;
	struct idmap nodes;	 /* by id */
	struct fake_event *last; /* queued; or NULL */
	struct list events;	 /* ascending by (at_ns, order) */
	struct list held;
	struct loop_timer timer;
	uint64_t next_order, xfers;
	uint32_t next_node;
	enum fake_bug bug;
	uint8_t spared; /* first byte of headers; 0: none */
	bool bug_spent; /* bugs that happen once a hub */
	struct fake_stats stats;
	uint64_t digest;
	void (*on_event)(void *arg, const char *words);
	void *on_event_arg;
	pthread_mutex_t regs_lock; /* mem_reg runs on helper threads */
	struct list regs;
	uint64_t next_reg;
};

struct fake_node {
	struct net_transport net;
	struct fake_hub *hub;
	uint32_t id;
	uint64_t incarnation;
	bool dead, frozen;
};

struct fake_peer {
	struct net_peer net;
	struct fake_node *node;
	struct fake_conn *conn; /* NULL until connected */
	unsigned int end;	/* ours in conn; a self peer is both, posts as 0 */
	bool self;
	bool idle; /* lost, and nothing touches memory for it any more */
	uint32_t dial_node;
	uint64_t dial_incarnation, dial_until_ns;
	struct err why; /* of `lost` */
	struct list keys;
	struct fake_event connect, ready, lost, flushed, let_go;
	struct fake_frame *bye;		/* until it is said */
	struct fake_frame *arrived;	/* that is being delivered, and not taken */
	const struct fake_rule *posted; /* the fault of the post that is being made */
};

struct fake_conn {
	unsigned int refs; /* its ends, and what is under way */
	struct fake_hub *hub;
	struct fake_peer *peer[2]; /* NULL: that end is closed */
	struct fake_node *node[2];
	struct list stuck; /* fake_frame.stuck: requests that never arrive */
	bool broken;	   /* nothing more is sent; the ends are being told */
	uint64_t request_ns[2], any_ns[2]; /* when the last one to that end arrives */
};

struct fake_reg {
	struct xp_reg_base base;
	struct list link; /* hub->regs */
	uint32_t node;
	uint64_t id;
};

struct fake_key {
	struct xp_key_base base;
	struct list link; /* peer->keys, until the peer is closed */
	struct memory *memory;
	struct fake_event usable;
};

enum fake_frame_type {
	FAKE_FRAME_REQUEST,
	FAKE_FRAME_CANCEL, /* by who asked: it stops, with words */
	FAKE_FRAME_GO,	   /* by the destination of a WRITE: bytes may come */
	FAKE_FRAME_DONE,   /* by who was asked: the end, good or bad */
	FAKE_FRAME_BYE,	   /* the connection ends, with words */
};

/* A message between two ends; it owns its header. */
struct fake_frame {
	struct fake_event event;
	struct list stuck;
	struct fake_conn *conn; /* a reference, while it is under way */
	unsigned int to;
	enum fake_frame_type type;
	uint64_t id;
	struct err err; /* ERR_OK: none */
	/* a REQUEST's */
	enum xp_kind kind;
	uint64_t bytes;
	uint8_t *header;
	size_t header_len;
	struct fake_rule fault;
};

/* Where one end of a transfer's bytes lies: a plan of our own, and references on its
 * memories. It may outlive the transfer: who is told too early that nothing lands any
 * more shall see it land. */
struct fake_side {
	unsigned int refs;
	bool closed; /* what arrives is thrown away */
	struct plan *plan;
	uint32_t count;
	struct fake_place {
		struct memory *memory;
		uint64_t offset, length;
	} places[];
};

struct fake_slice {
	struct fake_event event;
	struct fake_stream *stream;
	uint64_t begin, len;
	uint8_t *bytes;
	bool busy;
	struct fake_side *into; /* the lander's, if it was open */
};

/* A transfer's slices, which may be under way when its source is told. */
struct fake_stream {
	unsigned int refs; /* the reader, and slices under way */
	struct fake_conn *conn;
	struct fake_xfer *reader; /* NULL: it is told */
	unsigned int lander_end;
	bool lander_asked; /* the lander is an op of its peer's, not an inbound */
	uint64_t id;
	unsigned int count;
	struct fake_slice slices[];
};

/* One side of a transfer. It knows of the other what frames and slices say. */
struct fake_xfer {
	struct net_xfer net;
	struct fake_peer *peer;
	struct fake_profile profile;
	struct fake_rule fault; /* fault 0: none */
	bool fault_spent;
	uint8_t *header; /* theirs */

	/* A READ of ours that checks has both. */
	struct fake_side *src, *dst;
	/* the reader gathers slices … */
	struct fake_stream *stream;
	struct fake_event pump;
	bool reading;
	uint64_t sent;
	/* … and the lander scatters them */
	bool landing;	      /* it takes slices */
	unsigned int counted; /* under way to it: a stop waits for them */
	uint64_t landed;

	struct fake_event rest; /* it is over when this has passed */
	bool rested;
	uint64_t lane_ns;	     /* when the last frame of this side arrives */
	struct fake_frame *spare[2]; /* REQUEST or GO; CANCEL or DONE */
};

static inline struct fake_node *fake_node_of(const struct transport *transport)
{
	return container_of(transport, struct fake_node, net.base);
}
static inline struct fake_peer *fake_peer_of(struct net_peer *net)
{
	return container_of(net, struct fake_peer, net);
}
static inline struct fake_xfer *fake_xfer_of(struct net_xfer *net)
{
	return container_of(net, struct fake_xfer, net);
}
static inline struct fake_reg *fake_reg_of(struct xp_reg *reg)
{
	return (struct fake_reg *)(void *)reg;
}
static inline struct fake_key *fake_key_of(struct xp_key *key)
{
	return (struct fake_key *)(void *)key;
}
/* Connected, and nothing has gone wrong that this end knows of. */
static inline bool fake_peer_works(const struct fake_peer *peer)
{
	return net_peer_live(&peer->net) && sm_state(&peer->net.sm) == NET_PEER_READY;
}
static inline struct fake_node *fake_remote(const struct fake_peer *peer)
{
	return peer->conn->node[!peer->end];
}

/* fake.c */
void fake_event_init(struct fake_event *event,
		     void (*run)(struct fake_event *event, bool dropped));
void fake_event_at(struct fake_hub *hub, struct fake_event *event, uint64_t at_ns,
		   struct fake_node *from, struct fake_node *to);
void fake_event_remove(struct fake_event *event); /* idempotent */
static inline bool fake_event_queued(const struct fake_event *event)
{
	return !list_empty(&event->link);
}
struct fake_profile *fake_profile_of(struct fake_hub *hub, const struct fake_node *from,
				     const struct fake_node *to);
uint64_t fake_delay(struct fake_hub *hub, const struct fake_node *from,
		    const struct fake_node *to);
struct fake_pair *fake_pair_find(struct fake_hub *hub, const struct fake_node *from,
				 const struct fake_node *to);

/* fake_peer.c */
int fake_peer_open(struct transport *transport, const struct xp_peer_args *args,
		   struct xp_peer **peer_p);
void fake_peer_close(struct xp_peer *peer, void (*on_closed)(void *arg), void *arg);
void fake_peer_step(struct net_peer *net);
void fake_peer_free(struct net_peer *net);
/* A frozen node goes on: what was due meanwhile is. */
void fake_peer_thaw(struct fake_peer *peer);
extern const struct sm_table fake_peer_table;
void fake_address_put(const struct fake_node *node, struct cursor *out);
void fake_conn_unref(struct fake_conn *conn);
/* The connection breaks: each end that lives is told after its delay. */
void fake_conn_break(struct fake_conn *conn, uint64_t after_ns, enum err_code code,
		     const char *words);

/* fake_key.c */
int fake_mem_reg(struct transport *transport, struct memory *memory,
		 struct xp_reg **reg_p);
void fake_mem_dereg(struct xp_reg *reg);
int fake_key_pack(struct xp_reg *reg, struct xp_peer *peer, void *buf, size_t size,
		  size_t *len_p);
int fake_key_unpack(struct xp_peer *peer, const void *buf, size_t len, void *owner,
		    struct xp_key **key_p);
void fake_key_drop(struct xp_key *key);
void fake_keys_end(struct fake_peer *peer);    /* tells who waits for one */
void fake_keys_detach(struct fake_peer *peer); /* the peer goes */

/* fake_wire.c */
int fake_frame_new(struct fake_frame **frame_p);
void fake_frame_free(struct fake_frame *frame); /* NULL is fine */
/* Takes the frame; err NULL: none. It arrives behind *lane_ns, and moves it. */
void fake_frame_send(struct fake_peer *peer, struct fake_frame *frame,
		     enum fake_frame_type type, uint64_t id, const struct err *err,
		     uint64_t *lane_ns);
/* The frame that arrived goes back as a DONE. */
void fake_answer_arrived(struct fake_peer *peer, const struct err *err);
void fake_stuck_drop(struct fake_conn *conn);

/* fake_xfer.c */
extern const struct net_ops fake_net_ops;
int fake_post(struct xp_peer *peer, struct xp_op *op);
int fake_take_request(struct fake_peer *peer, const struct fake_frame *frame);
int fake_take_cancel(struct fake_peer *peer, const struct fake_frame *frame);
int fake_take_answer(struct fake_peer *peer, const struct fake_frame *frame);

/* fake_move.c */
int fake_stream_new(struct fake_xfer *x);
void fake_stream_leave(struct fake_xfer *x); /* no longer the reader; idempotent */
void fake_reader_start(struct fake_xfer *x);
void fake_lander_close(struct fake_xfer *x); /* what is under way is thrown away */
void fake_on_pump(struct fake_event *event, bool dropped);
/* A scripted fault's moment has come; true: nothing moves from here any more. */
bool fake_fault_strikes(struct fake_peer *peer, const struct fake_rule *fault, bool ours);
/* Bugs: a slice that was there already comes again, later, with other bytes. */
void fake_plant_late(struct fake_xfer *x);

/* fake_bytes.c */
/* The buffers' memory is registered here, or (remote) behind the peer's keys. */
int fake_side_new(const struct plan *plan, const struct xp_buffer *buffers,
		  uint32_t count, bool remote, struct fake_side **side_p);
struct fake_side *fake_side_ref(struct fake_side *side);
void fake_side_unref(struct fake_side **side_p); /* sets NULL; that is fine, too */
bool fake_keys_usable(const struct xp_buffer *buffers, uint32_t count);
/* Bytes [begin, begin + len) of the plan's stream; ERR_FAULT. */
int fake_gather(const struct fake_side *side, uint64_t begin, uint8_t *bytes,
		uint64_t len);
int fake_scatter(const struct fake_side *side, uint64_t begin, uint8_t *bytes,
		 uint64_t len);
int fake_stray(const struct fake_side *side, uint64_t begin); /* bugs: past a row */

/* fake_script.c */
uint64_t fake_rand(struct fake_hub *hub);
uint64_t fake_between(struct fake_hub *hub, uint64_t min, uint64_t max);
/* The fault of a post from -> to (fault 0: none). */
void fake_fault_draw(struct fake_hub *hub, const struct fake_node *from,
		     const struct fake_node *to, const struct xp_op *op,
		     struct fake_rule *fault_p);
/* A rule for mem_reg / key_unpack at this node? */
bool fake_fault_local(struct fake_hub *hub, enum fake_fault fault,
		      const struct fake_node *node);
/* True once a hub, when this bug is planted. */
bool fake_bug_once(struct fake_hub *hub, enum fake_bug bug);
void fake_trace(struct fake_hub *hub, const struct fake_node *from,
		const struct fake_node *to, uint64_t xfer, const char *words,
		uint64_t number);
void fake_script_forget(struct fake_hub *hub, const struct fake_node *node);

#endif
