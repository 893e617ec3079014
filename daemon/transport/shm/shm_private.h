/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm_private: shared by the parts of the shm backend. shm.c has the essay.
 *
 *   shm.c        the transport: listening, pending connections, the tick
 *   shm_reg.c    registered memory, keys, and requests for fds
 *   shm_peer.c   a connection's life cycle (net.h)
 *   shm_wire.c   frames: buffers, fds, the table, checks
 *   shm_xfer.c   a transfer's life cycle (net.h)
 *   shm_flow.c   the bytes of one transfer: buffers, a direct copy
 *   shm_vm.c     private memory of a peer's engine, where this daemon may read it
 *   shm_ring.c   ... and the bounce ring, where fds cannot be used
 */
#ifndef KVD_TRANSPORT_SHM_PRIVATE_H
#define KVD_TRANSPORT_SHM_PRIVATE_H

#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "daemon/base/cursor.h"
#include "daemon/loop/loop.h"
#include "daemon/loop/offload.h"
#include "daemon/loop/work.h"
#include "daemon/gate/gate.h"
#include "daemon/memory/copy.h"
#include "daemon/memory/release.h"
#include "daemon/transport/net.h"
#include "daemon/transport/net_acceptor.h"
#include "daemon/transport/shm/shm.h"
#include "gpu/import.h"

#define SHM_VERSION 2u
#define SHM_MAGIC UINT32_C(0x6d68736b) /* "kshm" */

#define SHM_FRAME_BYTES 16u   /* u32 body, u8 type, u8 flags, u16 0, u64 id */
#define SHM_REQUEST_BYTES 13u /* u8 kind, u64 bytes, u32 header length */
#define SHM_HELLO_BYTES (SHM_FRAME_BYTES + 4u + 4u + XP_TOKEN_BYTES)
#define SHM_BODY_MAX (SHM_REQUEST_BYTES + XP_HEADER_MAX)

/* Requests wait at the caller while this much is unsent; other frames are few per
 * transfer, but a peer that sends requests and never reads is lost at the hard limit. */
#define SHM_OUT_SOFT (1u << 20)
#define SHM_OUT_HARD (32u << 20)
#define SHM_KEYS_ASKED 32u /* fds that a peer may request at once */

#define SHM_REG_BUCKETS 1024u
#define SHM_PENDING_MAX 64u
#define SHM_CONNECT_NS (5 * LOOP_NS_PER_S)
#define SHM_TICK_NS (50 * LOOP_NS_PER_MS)

#define SHM_RING_SLOTS 8u
#define SHM_SLOT_SLICES 4u /* of the copy threads, in a slot */
#define SHM_RING_SLOTS_MAX 64u
#define SHM_SLOT_BYTES_MAX (1u << 20)

enum shm_type {
	SHM_HELLO = 1, /* dialer: token */
	SHM_WELCOME,   /* the answer: token */
	SHM_REQUEST,   /* kind, bytes, header */
	SHM_STAGE,     /* of a WRITE: "I cannot map your memory, use the ring" */
	SHM_DATA,      /* a slot of the sender's ring is full */
	SHM_FREE,      /* ... and empty again; id = slot */
	SHM_PROGRESS,  /* of a WRITE: bytes copied */
	SHM_COPIED,    /* of a WRITE: all bytes are here; do they count? */
	SHM_CONFIRM,   /* they do: the source was live throughout */
	SHM_CANCEL,    /* they do not, and will not */
	SHM_DONE,      /* the last message on a request */
	SHM_RING,      /* + fd: the sender's bounce ring */
	SHM_KEY_ASK,   /* reg and nonce; id = the requester's handle */
	SHM_KEY_GIVE,  /* + fd */
	SHM_KEY_DENY,
	SHM_KEY_GIVE_IPC, /* of GPU memory: the exporter's handle */
	SHM_KEY_GIVE_VMM, /* + fd */
	SHM_KEY_GIVE_VM,  /* + fd of a process's private memory */
	SHM_TYPE_END,
};
enum { SHM_FLAG_YOURS = 1 }; /* DATA: `id` is a request of the receiver's own */

struct shm_peer;
struct shm_xfer;

struct shm {
	struct net_transport net;
	struct net_acceptor acceptor;
	char names[NET_LISTENERS][108]; /* paths, or "@…" for an abstract one; "": none */
	uint64_t device, inode;		/* of the path */
	struct loop_timer tick;		/* runs only while needed */
	pthread_mutex_t regs_lock;
	struct list regs[SHM_REG_BUCKETS]; /* struct shm_reg, by id */
	uint64_t next_reg;
	bool vm_direct;	     /* option: engines of peers are read directly */
	bool gpu;	     /* transport local: handles of GPU memory are passed */
	uint64_t next_owner; /* owners of imports: numbers no session has */
};

/* As HELLO carries it. */
struct shm_address {
	uint8_t boot_id[16];
	char names[2][108];	/* of our listeners; "@…" is an abstract one */
	uint64_t device, inode; /* of the path: the same file in every mount of it */
	uint32_t uid;		/* that the daemon runs as */
};

struct shm_reg {
	struct xp_reg_base base;
	struct list link;
	uint64_t id;
	uint8_t nonce[XP_TOKEN_BYTES];
	int ro_fd; /* the same file or process, opened read-only; -1: cannot be passed */
};

enum shm_key_state {
	SHM_KEY_WAITING, /* to be asked for */
	SHM_KEY_ASKED,
	SHM_KEY_MAPPING,
	SHM_KEY_READY,
	SHM_KEY_DEAD,
	SHM_KEY_STATES,
};

struct shm_key {
	struct xp_key_base base;
	struct shm_peer *peer; /* NULL when it has ended */
	struct list link;      /* one of the peer's four lists */
	struct sm sm;
	bool dropped; /* by its owner, while an answer or a helper holds it */
	bool mapping; /* a helper holds it */
	uint64_t handle, reg_id, length;
	uint8_t nonce[XP_TOKEN_BYTES];
	struct memory *memory; /* NULL: only through the ring */
	struct offload *offload;
	/* for the helper, which may outlive `peer` */
	struct offload_job job;
	enum memory_kind kind;
	uint64_t offset;
	int fd;
	bool vm;		   /* of a process; without `memory` it is staged */
	struct memory_owner owner; /* vm: the peer's daemon answers for it */
	struct gpu *gpus;	   /* the daemon's */
	struct gpu_handle gpu;	   /* kind device; its fd is `fd` */
	uint64_t gpu_owner;
};

/* ---- one transfer ---- */
enum shm_way {
	SHM_WAY_NONE,	/* no byte is moved on this side, or none yet */
	SHM_WAY_DIRECT, /* from their memory into ours */
	SHM_WAY_GATHER, /* into our ring */
	SHM_WAY_SCATTER /* out of their ring */
};

struct shm_xfer {
	struct net_xfer net;
	struct shm_peer *peer;
	size_t held;	/* theirs: bytes of the header, in peer->held_bytes */
	bool copied;	/* their WRITE: COPIED is sent */
	bool confirmed; /* a WRITE: the source reports that its bytes count */
	/* the bytes */
	enum shm_way way;
	const struct plan *plan;
	struct copy_buffer *buffers; /* sources, then destinations; with references */
	uint32_t src_count, dst_count;
	struct copy_job job; /* direct */
	bool copying;
	struct list link;  /* gather: in ring->xfers while slots are wanted */
	struct list slots; /* gather: filled or being filled, in stream order */
	unsigned int slots_busy;
	uint64_t next;	 /* gather: first byte not given a slot; scatter: expected */
	uint64_t landed; /* gather: reported to the peer; else in place */
};

/* ---- the bounce ring ---- */
struct shm_slot {
	struct copy_job job;
	struct shm_peer *peer;
	struct shm_xfer *xfer;
	uint32_t index, len;
	uint64_t offset; /* in the stream */
	bool busy;	 /* ours: until FREE arrives; theirs: until FREE is sent */
	bool running;	 /* a job is submitted */
	bool full;	 /* ours: gathered */
	struct list link;
};

enum shm_ring_state { SHM_RING_NONE, SHM_RING_MAKING, SHM_RING_READY, SHM_RING_STATES };

struct shm_ring {
	struct shm_peer *peer;
	struct sm sm;
	struct memory *memory;
	uint32_t slot_count, slot_bytes;
	struct shm_slot *slots;
	struct list xfers; /* local: those that gather, in turn */
	struct list full;  /* remote: slots that wait for the mapping */
	struct offload_job job;
	int fd; /* for the helper, then for the frame */
};

/* ---- frames ---- */
struct shm_frame {
	enum shm_type type;
	uint8_t flags;
	uint64_t id;
	const void *body, *tail; /* tail: a second part of the body */
	size_t body_len, tail_len;
	uint8_t *owned; /* the tail lies in it, taken instead of copied; or NULL */
	int fd;		/* passed on in every case; only types that carry one */
};

#define SHM_TAILS 16u
#define SHM_TAIL_MIN (16u << 10)

struct shm_wire {
	uint8_t *out;
	size_t out_pos, out_len, out_size;
	struct {
		int fd;
		size_t pos; /* of its frame in `out` */
	} out_fds[SHM_KEYS_ASKED + 2];
	unsigned int out_fd_count;
	struct { /* bytes sent between those of `out`, at `pos` of it */
		uint8_t *owned;
		const uint8_t *bytes; /* in it */
		size_t pos, len, sent;
	} tails[SHM_TAILS];
	unsigned int tail_count;
	size_t tail_bytes; /* unsent ones of all */
	bool urgent; /* an error is queued in `out`: sent before anything is returned */
	uint8_t *in;
	size_t in_pos, in_len, in_size; /* the next frame to handle is at in_pos */
	int in_fds[8]; /* arrived, for frames not yet parsed; -1: out of descriptors
			*/
	unsigned int in_fd_count;
};

struct shm_peer {
	struct net_peer net;
	struct shm *shm;
	bool self;
	struct shm_address address; /* dial */
	uint64_t deadline_ns;	    /* of connecting */
	int fd;
	struct loop_fd watch;
	struct gate_client gate; /* receives messages with fds */
	struct shm_wire wire;
	struct loop_work frames; /* handles received ones; then more are read */
	uint64_t held_bytes;	 /* headers of the peer's requests */

	struct list keys;    /* to be asked for */
	struct list asked;   /* in this order */
	struct list held;    /* being mapped, usable, or refused */
	struct list orphans; /* of a lost peer, not dropped yet */
	unsigned int asked_count;
	uint64_t key_serial;
	uint64_t gpu_owner;	/* of imports of its GPU memory */
	struct shm_ring tx, rx; /* the local ring that the peer reads; the peer's ring
				 * that is read here */
};

/* shm.c */
void shm_tick_want(struct shm *shm);
int shm_probe(const struct config *config, uint32_t *caps_p);
int shm_open_as(const struct transport_ops *ops, const struct xp_env *env,
		const struct xp_callbacks *callbacks, struct transport **transport_p);
void shm_close(struct transport *transport);
/* The common part of shm and local: all but their names and constructors. */
#define SHM_SLOTS                                                               \
	.close = shm_close, .mem_reg = shm_mem_reg, .mem_dereg = shm_mem_dereg, \
	.key_pack = shm_key_pack, .key_unpack = shm_key_unpack,                 \
	.key_drop = shm_key_drop, .peer_open = shm_peer_open,                   \
	.peer_close = shm_peer_close, .post = net_post, .land = net_land,       \
	.cancel = net_cancel, .revoke = net_revoke
void shm_random(void *buf, size_t len);
/* A pending connection with this peer's token: its fd, or -1. */
int shm_pending_claim(struct shm *shm, struct shm_peer *peer);
int shm_address_parse(const void *buf, size_t len, struct shm_address *address_p);
/* -1 with errno; *len_p as bind and connect want it. */
int shm_sockaddr(const char *name, struct sockaddr_un *sa_p, socklen_t *len_p);

/* shm_reg.c */
int shm_mem_reg(struct transport *transport, struct memory *memory,
		struct xp_reg **reg_p);
void shm_mem_dereg(struct xp_reg *xreg);
int shm_key_pack(struct xp_reg *xreg, struct xp_peer *peer, void *buf, size_t size,
		 size_t *len_p);
int shm_key_unpack(struct xp_peer *xpeer, const void *buf, size_t len, void *owner,
		   struct xp_key **key_p);
void shm_key_drop(struct xp_key *xkey);
/* An answer to KEY_ASK has arrived: map on a helper, or record the reason. Takes the
 * fd. */
void shm_key_given(struct shm_key *key, uint64_t length, int fd);
/* The key that the answer is for; answers arrive in the order of the requests. */
int shm_key_answered(struct shm_peer *peer, uint64_t handle, struct shm_key **key_p);
void shm_keys_pump(struct shm_peer *peer);   /* request the waiting keys */
void shm_keys_end(struct shm_peer *peer);    /* the peer is lost: on_key(err) */
void shm_keys_detach(struct shm_peer *peer); /* the peer is freed */
int shm_on_key_ask(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);
int shm_on_key_give(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);
/* shm_vm.c */
/* Its process's memory for a peer to read; -1: may not be passed. */
int shm_vm_open(const struct memory *memory);
void shm_vm_key_give(struct shm_peer *peer, uint64_t id, const struct memory *memory,
		     int owned_fd);
int shm_on_key_give_vm(struct shm_peer *peer, const struct shm_frame *f,
		       struct cursor *c);
void shm_vm_map(struct shm_key *key); /* on a helper; no `memory`: not permitted */
/* local.c */
#define LOCAL_KEY_BYTES (CU_UUID_BYTES + CU_IPC_BYTES + 3u * 8u)
void local_key_give(struct shm_peer *peer, uint64_t id, const struct memory *memory);
int local_on_key_give(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);
int local_key_map(struct shm_key *key);
int shm_on_key_deny(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);

/* shm_peer.c */
extern const struct sm_table shm_peer_table;
int shm_peer_open(struct transport *transport, const struct xp_peer_args *args,
		  struct xp_peer **peer_p);
void shm_peer_close(struct xp_peer *base, void (*on_closed)(void *arg), void *arg);
void shm_peer_step(struct net_peer *net);
void shm_peer_flush(struct net_peer *net);
void shm_peer_free(struct net_peer *net);
/* A pending connection has shown this peer's token. Takes the fd. */
void shm_peer_welcome(struct shm_peer *peer, int fd);
static inline bool shm_peer_ready(const struct shm_peer *peer)
{
	return net_peer_live(&peer->net) && sm_state(&peer->net.sm) == NET_PEER_READY;
}
/* Frames may be exchanged: HELLO was sent or received. */
static inline bool shm_peer_speaks(const struct shm_peer *peer)
{
	return net_peer_live(&peer->net) && sm_state(&peer->net.sm) != NET_PEER_OPENING;
}
int shm_on_welcome(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);

/* shm_wire.c */
/* Memory for receiving, allocated early so that its lack costs no established
 * connection. */
int shm_wire_reserve(struct shm_peer *peer);
void shm_wire_init(struct shm_wire *wire);
int shm_wire_prepare(struct shm_wire *wire); /* self: both buffers at once */
void shm_wire_fini(struct shm_wire *wire);   /* closes fds; idempotent */
/* Queue a frame; an error fails the peer. */
void shm_send(struct shm_peer *peer, const struct shm_frame *frame);
void shm_send_err(struct shm_peer *peer, enum shm_type type, uint64_t id,
		  const struct err *err);
static inline size_t shm_unsent(const struct shm_peer *peer)
{
	return peer->wire.out_len - peer->wire.out_pos + peer->wire.tail_bytes;
}
/* Write until the socket is full / read, and handle frames in this turn and later ones.
 * The peer may be failed afterwards. False: nothing more to do now. */
bool shm_wire_flush(struct shm_peer *peer);
void shm_wire_receive(struct shm_peer *peer);
void shm_wire_on_parcel(struct gate_client *client, struct gate_parcel *parcel);
void shm_wire_frames_init(struct shm_peer *peer);
void shm_wire_loop_back(struct shm_peer *peer); /* self: deliver sent frames */
int shm_wire_take_fd(struct shm_peer *peer);	/* of the frame at hand */
/* The memory of the frame at hand, if it is long and has its own buffer: then owned by
 * the caller. NULL: it must be copied. */
uint8_t *shm_wire_take_frame(struct shm_peer *peer, size_t body_len);
void shm_get_err(struct cursor *c, struct err *err_p);
/* HELLO or WELCOME with this side's token. */
void shm_send_hello(struct shm_peer *peer, enum shm_type type);
/* The body of either: ERR_PROTO, ERR_VERSION. */
int shm_hello_body(struct cursor *c, const void **token_p);
/* The token of a HELLO, or ERR_PROTO / ERR_VERSION. */
int shm_hello_parse(const uint8_t buf[SHM_HELLO_BYTES], uint8_t token_p[XP_TOKEN_BYTES]);

/* shm_xfer.c */
extern const struct net_ops shm_net_ops;
/* Bytes of it have moved, or will not. */
void shm_xfer_changed(struct shm_xfer *xfer);
/* Reports progress, here and to a WRITE's source. False: it is not watched. */
bool shm_xfer_progress(struct shm_xfer *xfer);
int shm_on_request(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);
int shm_on_stage(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);
int shm_on_progress(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);
int shm_on_copied(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);
int shm_on_confirm(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);
int shm_on_cancel(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);
int shm_on_done(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);

/* shm_flow.c */
/* References on the memories that this side's threads touch, and the path. */
int shm_flow_take(struct shm_xfer *xfer, const struct xp_sides *sides);
void shm_flow_drop(struct shm_xfer *xfer); /* not busy; idempotent */
int shm_flow_direct(struct shm_xfer *xfer);
uint64_t shm_flow_moved(const struct shm_xfer *xfer);
static inline bool shm_flow_busy(const struct shm_xfer *xfer)
{
	return xfer->copying || xfer->slots_busy > 0;
}
/* All bytes have arrived (gather: with the peer). */
static inline bool shm_flow_complete(const struct shm_xfer *xfer)
{
	return !shm_flow_busy(xfer) && xfer->landed == xfer->net.bytes;
}

/* shm_ring.c */
void shm_ring_init(struct shm_peer *peer);
int shm_ring_gather(struct shm_xfer *xfer); /* start to send */
/* Start to receive. Memory for the peer's ring is allocated before the peer is asked to
 * fill one: running out of memory for it costs that transfer. */
int shm_ring_scatter(struct shm_xfer *xfer);
void shm_ring_leave(struct shm_xfer *xfer);	  /* no new slots; stop jobs */
bool shm_rings_idle(const struct shm_peer *peer); /* no helper holds them */
void shm_rings_fini(struct shm_peer *peer);
int shm_on_data(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);
int shm_on_free(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);
int shm_on_ring(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c);

#endif
