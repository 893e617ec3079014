/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_impl: what fake.c (hub, nodes, connections), fake_script.c (chance,
 * faults, trace) and fake_move.c (transfers) share. Nobody else includes it.
 */
#ifndef KVD_TRANSPORT_FAKE_IMPL_H
#define KVD_TRANSPORT_FAKE_IMPL_H

#include <pthread.h>

#include "daemon/base/cursor.h"
#include "daemon/base/list.h"
#include "daemon/loop/loop.h"
#include "tests/sim/fake.h"

/* Something that happens at `to` at a time. A frozen node and a link that is
 * down hold it back; a dead node drops it. Events lie embedded in what they are
 * about, so nothing but post() and the slices' making allocates. */
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
	struct list pairs, rules, nodes;
	struct list events; /* ascending by (at_ns, order) */
	struct list held;
	struct loop_timer timer;
	uint64_t next_order, next_xfer, xfers;
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
	struct transport base;
	struct list link;
	struct fake_hub *hub;
	uint32_t id;
	uint64_t incarnation;
	struct list peers;
	bool dead, frozen;
};

enum fake_peer_state { FAKE_CONNECTING, FAKE_READY, FAKE_LOST };

struct fake_peer {
	struct xp_peer_base base;
	struct list link; /* node->peers */
	struct fake_node *node;
	struct fake_conn *conn; /* NULL until connected */
	unsigned int end;	/* ours in conn; a self peer is both, posts as 0 */
	bool self, dial, closing, lost_told;
	enum fake_peer_state state;
	uint8_t token_in[XP_TOKEN_BYTES], token_out[XP_TOKEN_BYTES];
	uint32_t dial_node;
	uint64_t dial_incarnation, dial_until_ns;
	struct err why; /* lost */
	struct list keys;
	unsigned int unfinished; /* ops posted here */
	struct fake_event connect, ready, lost, close;
	void (*on_closed)(void *arg);
	void *on_closed_arg;
};

struct fake_conn {
	unsigned int refs;
	struct fake_hub *hub;
	struct fake_peer *peer[2]; /* NULL: that end is closed */
	struct fake_node *node[2];
	struct list xfers;
	bool broken; /* nothing more is sent; the ends are being told */
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
	bool dropped;
};

/* One side's buffers with references of our own. */
struct fake_place {
	struct memory *memory;
	uint64_t offset, length;
};
struct fake_table {
	struct fake_place *places;
	uint32_t count;
};

struct fake_slice {
	struct fake_event event;
	struct fake_xfer *xfer;
	uint64_t begin, len;
	uint8_t *bytes;
	bool busy;
	bool counted; /* was sent before a stop: the fence waits for it */
	bool late;    /* planted: written although all is over */
};

/* The message types between the two halves; each xfer embeds one of each. */
enum fake_frame_type {
	FAKE_FRAME_REQUEST, /* initiator -> answerer */
	FAKE_FRAME_CANCEL,  /* initiator -> answerer: give up, with words */
	FAKE_FRAME_FIN,	    /* initiator -> answerer: a READ has arrived */
	FAKE_FRAME_ACCEPT,  /* answerer -> initiator */
	FAKE_FRAME_DONE,    /* answerer -> initiator: the end, good or bad */
	FAKE_FRAME_COUNT,
};

struct fake_frame {
	struct fake_event event;
	struct fake_xfer *xfer;
	bool bad;
	struct err err;
};

enum fake_in_state {
	FAKE_IN_NONE,
	FAKE_IN_ASKED,
	FAKE_IN_RUNNING,
	FAKE_IN_ENDING,
	FAKE_IN_GONE
};

/* A transfer, both halves. Each half acts only on what its own side knows:
 * what the other did reaches it as a frame. */
struct fake_xfer {
	struct list link;  /* conn->xfers */
	unsigned int refs; /* the halves, and each event under way */
	struct fake_hub *hub;
	struct fake_conn *conn;
	uint64_t id;
	enum xp_kind kind; /* of the post */
	bool check;	   /* READ by the destination's own hands */
	unsigned int init; /* the initiator's end of conn */
	struct fake_profile profile;
	struct fake_rule fault; /* fault 0: none */
	bool fault_spent;

	/* the initiator */
	struct xp_op *op; /* NULL: done */
	bool op_ending;	  /* op_done is queued with op_bad, op_err */
	bool op_canceled;
	bool op_bad;
	struct err op_err;
	struct fake_event op_done;
	uint8_t *header;
	size_t header_len;
	uint64_t bytes;

	/* the answerer */
	struct xp_inbound in;
	enum fake_in_state in_state;
	bool in_bad;
	struct err in_err;
	struct fake_event in_done;

	/* the bytes: a reader gathers slices, a lander scatters them */
	struct fake_table src, dst;
	const struct plan *src_plan, *dst_plan;
	bool reading;
	uint64_t sent, landed;
	unsigned int counted; /* slices that a stop must wait for */
	bool landing;	      /* the lander takes slices */
	bool stopping;	      /* it waits for `counted` to become 0 */
	bool stop_bad;
	struct err stop_err;
	struct fake_event pump;
	struct fake_slice *slices;
	unsigned int slice_count;

	bool keep; /* planted bugs touch memory late: plans and tables are ours */
	bool strayed;
	uint64_t lane_ns[2]; /* when the last frame to that end arrives */
	struct fake_frame frames[FAKE_FRAME_COUNT];
};

static inline struct fake_node *fake_node_of(const struct transport *transport)
{
	return container_of(transport, struct fake_node, base);
}
static inline struct fake_peer *fake_peer_of(struct xp_peer *peer)
{
	return (struct fake_peer *)(void *)peer;
}
static inline struct xp_peer *fake_peer_base(struct fake_peer *peer)
{
	return (struct xp_peer *)(void *)peer;
}
static inline struct fake_reg *fake_reg_of(struct xp_reg *reg)
{
	return (struct fake_reg *)(void *)reg;
}
static inline struct fake_key *fake_key_of(struct xp_key *key)
{
	return (struct fake_key *)(void *)key;
}

/* fake.c */
void fake_event_at(struct fake_hub *hub, struct fake_event *event, uint64_t at_ns,
		   struct fake_node *from, struct fake_node *to);
/* Remove it if queued; true when it was. */
bool fake_event_remove(struct fake_event *event);
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
int fake_key_pack(struct xp_reg *reg, struct xp_peer *peer, void *buf, size_t size,
		  size_t *len_p);
int fake_key_unpack(struct xp_peer *peer, const void *buf, size_t len, void *owner,
		    struct xp_key **key_p);
void fake_key_drop(struct xp_key *key);
void fake_address_put(const struct fake_node *node, struct cursor *out);
void fake_conn_unref(struct fake_conn *conn);
/* The connection breaks: each end that lives is told after its delay. */
void fake_conn_break(struct fake_conn *conn, uint64_t after_ns, enum err_code code,
		     const char *words);

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

/* fake_bytes.c */
/* References of our own on the buffers' memory: registered here, or (remote)
 * behind the peer's keys. On failure what was taken stays for fake_table_drop. */
int fake_table_make(struct fake_table *table, const struct xp_buffer *buffers,
		    uint32_t count, bool remote);
void fake_table_drop(struct fake_table *table);
bool fake_keys_usable(const struct xp_buffer *buffers, uint32_t count);
/* Bytes [begin, begin + len) of the plan's stream; ERR_FAULT. */
int fake_gather(const struct fake_xfer *x, uint64_t begin, uint8_t *bytes, uint64_t len);
int fake_scatter(struct fake_xfer *x, uint64_t begin, uint8_t *bytes, uint64_t len);
/* x->keep: put a copy of our own in the plan's place. */
int fake_plan_keep(struct fake_xfer *x, const struct plan **plan_p);

/* fake_move.c: the halves' ends, the lander, the reader, the frames */
void fake_x_init(struct fake_xfer *x);
void fake_slice_init(struct fake_xfer *x, struct fake_slice *slice);
void fake_x_unref(struct fake_xfer *x);
struct fake_node *fake_node_at(const struct fake_xfer *x, unsigned int end);
void fake_frame_send(struct fake_xfer *x, enum fake_frame_type type,
		     const struct err *err);
/* Done later, from an event (err NULL: success); or now, from an event. */
void fake_op_end(struct fake_xfer *x, const struct err *err);
void fake_in_end(struct fake_xfer *x, const struct err *err);
void fake_op_finish(struct fake_xfer *x);
void fake_in_finish(struct fake_xfer *x);
bool fake_in_live(const struct fake_xfer *x);
/* Take nothing that leaves from now on; done when what is under way is here. */
void fake_lander_stop(struct fake_xfer *x, const struct err *err);
void fake_slices_doom(struct fake_xfer *x); /* what is under way is thrown away */
void fake_landed_all(struct fake_xfer *x);
void fake_pump_wake(struct fake_xfer *x, uint64_t after_ns);
bool fake_fault_apply(struct fake_xfer *x);

/* fake_post.c */
int fake_post(struct xp_peer *peer, struct xp_op *op);
void fake_land(struct xp_inbound *in, const struct xp_sides *sides,
	       const struct err *err);
void fake_cancel(struct xp_op *op, const struct err *why);
void fake_revoke(struct xp_inbound *in, const struct err *why);
/* End every half that lives at this peer, now, with callbacks. */
void fake_peer_end(struct fake_peer *peer, const struct err *why);

#endif
