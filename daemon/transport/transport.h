/* SPDX-License-Identifier: Apache-2.0 */
/*
 * transport: moves bytes between two daemons. One contract, one conformance suite
 * (tests/conform), several backends.
 *
 * Everything runs on the loop's thread except mem_reg / mem_dereg (helper threads) and a
 * backend's internal threads.
 *
 * A transfer has a header (opaque to the transport, at most XP_HEADER_MAX) and a plan.
 * Its two sides each hand the transport their own checked copy of that plan; no address
 * is ever taken from a message. The plan's rows in order are one byte stream, so a
 * backend may gather it on one side and scatter it on the other.
 *
 *   WRITE  post() on the source side -> on_request(WRITE) at the destination,
 *          which answers land() -> bytes -> on_inbound_done() there, then
 *          on_done() at the initiator.
 *   READ   post() on the destination side -> on_request(READ) at the source, which
 *          answers land(): the source serves from its plan; or, where the destination
 *          reads the source's memory by itself, on_request(CHECK) after the bytes: land()
 *          without a plan confirms the bytes that were read -> on_done() at the
 *          initiator.
 *
 * Promises of every backend:
 *   order    on_request()s of a peer are called in the order of its post()s. A WRITE with
 *            no bytes is an ordered message.
 *   once     on_done() and on_inbound_done() are called exactly once for each
 *            accepted post / request, never from inside post(), land() or
 *            cancel().
 *   still    after on_inbound_done() of a WRITE, or on_done() of a READ, no byte
 *            of that transfer is written by this daemon or a peer; after
 *            on_done() of a WRITE or on_inbound_done() of a READ nothing read
 *            from the source will count. That holds for success, failure,
 *            cancel and a lost peer alike.
 *   all      success means every byte of the plan, as the source had it while
 *            its side of the transfer was live; never a part.
 *   bounds   the destination's daemon checks every header and length from a peer before
 *            it acts; a peer that breaks the protocol is lost (ERR_PROTO), nothing else
 *            is.
 *   visible  data is in the destination's memory before on_inbound_done /
 *            on_done.
 *
 * Ownership: ops, inbounds' answers and buffer tables belong to the caller and
 * must stay valid until done; the transport takes its own reference on each
 * memory. Plans are immutable and outlive the op.
 */
#ifndef KVD_TRANSPORT_TRANSPORT_H
#define KVD_TRANSPORT_TRANSPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/account.h"
#include "daemon/base/err.h"
#include "daemon/plan/plan.h"
#include "daemon/memory/memory.h"

struct loop;
struct offload;
struct copier;
struct config;
struct gates;
struct gpu;
struct transport;
struct xp_peer; /* the backend's; starts with struct xp_peer_base */
struct xp_reg;	/* memory registered with one backend */
struct xp_key;	/* a peer's registered memory, as this daemon may use it */

#define XP_HEADER_MAX (2u << 20) /* bytes: a 1 MiB notification and its frame */
#define XP_ADDRESS_MAX 4096u	 /* bytes of a backend's address in HELLO */
#define XP_KEY_MAX 512u		 /* bytes of a packed key */
#define XP_TOKEN_BYTES 16u
#define XP_INBOUND_MAX                                                  \
	4096u /* unfinished inbound transfers a peer; more is ERR_PROTO \
	       */

/* The result of probe() on this machine. */
enum {
	XP_CAP_SAME_HOST = 1 << 0, /* only between daemons of one boot id */
	XP_CAP_RDMA = 1 << 1,	   /* a NIC writes: counts as class "rdma" */
	XP_CAP_SELF = 1 << 2,	   /* can connect to this daemon itself */
	/* A peer can neither change memory here nor complete a transfer without this
	 * daemon: no peer has to be asked before memory is released. Not of a GPU's
	 * memory, which the other process has mapped. */
	XP_CAP_ALONE = 1 << 3,
};

/* resources of all backends; outlives them */
struct xp_env {
	struct loop *loop;
	struct offload *offload;
	struct gates *gates; /* for descriptors of peers */
	struct copier *copier;
	const struct config *config;
	struct gpu *gpu;     /* NULL: none */
	uint8_t boot_id[16]; /* of this kernel: an address of XP_CAP_SAME_HOST holds it */
};

enum xp_kind { XP_WRITE, XP_READ, XP_CHECK };

/* A plan buffer's place on this side, and on the other. */
struct xp_buffer {
	struct xp_reg *reg; /* local: registered memory */
	struct xp_key *key; /* remote: usable key, or NULL where unknown */
	uint64_t offset;    /* of the buffer's byte 0 in that memory */
	uint64_t length;    /* of the buffer */
};

struct xp_sides {
	const struct plan *plan; /* NULL: no bytes */
	/* as the plan's src_buffer / dst_buffer name them */
	const struct xp_buffer *src, *dst;
	uint32_t src_count, dst_count;
};

/* Of a transfer that chose: row by row, or packed; or that had to be packed, because an
 * adapter cannot register its memory. All zero if there was no choice. */
struct xp_way {
	uint32_t row_bytes;  /* of one request, on average */
	uint32_t request_ns; /* the cost of one; the mover's */
	uint32_t copy_ns;    /* the cost of copying it, at each end */
	bool packed;
	bool staged; /* packed because no other path exists */
};

/* A transfer's statistics on this side; final in its done callback. Zero where the other
 * side's daemon, or its adapter, moved all bytes. */
struct xp_used {
	/* bytes that passed through a buffer of this daemon; copies in the kernel and in
	 * libraries do not count */
	uint64_t staged;
	/* stretches of memory submitted for transfer: iovecs of system calls, work
	 * requests, messages of libucp, rows or slots for the copy threads */
	uint64_t descriptors;
	const char *path; /* if not the peer's path: a literal; else NULL */
};

struct xp_op {
	enum xp_kind kind; /* XP_WRITE or XP_READ */
	struct xp_sides sides;
	const void *header;
	size_t header_len;
	/* The memory that the header lies in, or NULL. A backend may take it (sets NULL,
	 * mem_free()) instead of copying: copying a long one takes a whole turn. */
	uint8_t *owned;
	void (*on_done)(struct xp_op *op); /* result and err are set */
	/* Once, when this side knows that bytes have moved, and before on_done: the first
	 * did at `at_ns` (CLOCK_MONOTONIC). Must only observe; NULL: none. */
	void (*on_first)(struct xp_op *op, uint64_t at_ns);
	int result; /* 0; negative: the fault in err (the peer's text when it
		       refused, ERR_CANCELED, ERR_PEER, ERR_TRANSPORT …) */
	struct err err;
	uint64_t moved; /* bytes moved (a WRITE: sent), for progress and stalls */
	struct xp_way way;
	struct xp_used used;
	void *impl;  /* the backend's, NULL when not posted */
	void *owner; /* the caller's */
};

/* Made by the backend when a request arrives; freed after on_inbound_done(). */
struct xp_inbound {
	struct xp_peer *peer;
	enum xp_kind kind;
	const void *header; /* valid until on_inbound_done */
	size_t header_len;
	/* The memory that the header lies in, or NULL. The answerer may take it (sets
	 * NULL, mem_free()) instead of copying. */
	uint8_t *owned;
	uint64_t bytes; /* the initiator's claim; land() checks it against the plan */
	uint64_t moved; /* progress */
	/* as an op's; set before land() */
	void (*on_first)(struct xp_inbound *in, uint64_t at_ns);
	struct xp_way way;
	struct xp_used used;
	void *owner; /* the answerer's */
};

struct xp_callbacks {
	void *owner;
	/* Answer once with land(), now or later. */
	void (*on_request)(void *owner, struct xp_inbound *in);
	/* Once for every request, whatever land() returned. err NULL: landed / served /
	 * checked; else the refusal, the revocation or the loss. */
	void (*on_inbound_done)(void *owner, struct xp_inbound *in,
				const struct err *err);
	/* The connection is usable / is dead. After on_peer_lost all its ops and
	 * inbounds have had their done; only peer_close() is left to call. */
	void (*on_peer_ready)(void *owner, struct xp_peer *peer);
	void (*on_peer_lost)(void *owner, struct xp_peer *peer, const struct err *why);
	/* A key became usable (err NULL) or will never be. */
	void (*on_key)(void *owner, struct xp_key *key, const struct err *err);
};

struct xp_peer_args {
	bool self; /* the peer is this daemon: no connection */
	uint8_t instance[16];
	uint8_t token_in[XP_TOKEN_BYTES];  /* the remote must present it here */
	uint8_t token_out[XP_TOKEN_BYTES]; /* we present it */
	bool dial; /* this side connects (the lower instance id); else it is connected
		    * to */
	const void *address; /* the remote's, from HELLO/WELCOME */
	size_t address_len;
	struct account *account; /* of its principal; NULL: none */
	void *owner;
};

/* Backends' xp_peer, xp_reg and xp_key start with these. */
struct xp_peer_base {
	struct transport *transport;
	void *owner;
	bool ready;
	/* filled by the backend for `health` and room records, e.g.
	 * "tcp lo" or "memfd"; never empty once ready */
	char path[64];
	/* the protection of its bytes in transit; NULL: none */
	const char *crypto;
	bool encrypts; /* that keeps them from being read */
};
struct xp_reg_base {
	struct transport *transport;
	struct memory *memory;
	void *owner;
};
struct xp_key_base {
	struct xp_peer *peer;
	bool ready;
	void *owner; /* the caller's, for on_key */
};

struct transport_ops {
	const char *name; /* as in the option `transports` */

	/* 1. Probe this machine. 0 and caps, or ERR_REQUIRE with the reason. */
	int (*probe)(const struct config *config, uint32_t *caps_p);
	/* 2. Create it. Fills transport->address; callbacks outlive it. */
	int (*open)(const struct xp_env *env, const struct xp_callbacks *callbacks,
		    struct transport **transport_p);
	/* 3. All peers are closed, all memory deregistered by then. */
	void (*close)(struct transport *transport);
	/* 4. Before the loop sleeps: arm the wake-up. True = not yet, progress
	 * again first. NULL when the backend needs none. */
	bool (*arm)(struct transport *transport);
	/* 5. Do at most `budget` units of work; returns units done. NULL: none. */
	unsigned int (*progress)(struct transport *transport, unsigned int budget);
	/* 6., 7. Helper threads. reg holds a memory reference. */
	int (*mem_reg)(struct transport *transport, struct memory *memory,
		       struct xp_reg **reg_p);
	void (*mem_dereg)(struct xp_reg *reg);
	/* 8. The key a peer needs for `reg`: bytes for REGISTER. */
	int (*key_pack)(struct xp_reg *reg, struct xp_peer *peer, void *buf, size_t size,
			size_t *len_p);
	/* 9. A key from the wire. Usable at once or after on_key(); freed by key_drop
	 * (slot 10), which waits for nothing: ops hold references. */
	int (*key_unpack)(struct xp_peer *peer, const void *buf, size_t len, void *owner,
			  struct xp_key **key_p);
	void (*key_drop)(struct xp_key *key);
	/* 11., 12. Connect / tear down. ERR_REQUIRE: it cannot serve this pair of
	 * daemons, another transport may. peer_close ends every op and inbound first
	 * (their done callbacks are called before on_closed). */
	int (*peer_open)(struct transport *transport, const struct xp_peer_args *args,
			 struct xp_peer **peer_p);
	void (*peer_close)(struct xp_peer *peer, void (*on_closed)(void *arg), void *arg);
	/* 13. Start a transfer. 0: on_done follows. Negative: nothing happened. */
	int (*post)(struct xp_peer *peer, struct xp_op *op);
	/* 14. Answer a request: sides (plan may be NULL when bytes are 0 or kind
	 * is CHECK), or refuse with err (then on_inbound_done follows too). */
	void (*land)(struct xp_inbound *in, const struct xp_sides *sides,
		     const struct err *err);
	/* 15. Stop an op; on_done follows when it is quiesced. Idempotent. */
	void (*cancel)(struct xp_op *op, const struct err *why);
	/* 16. Stop accepting for an inbound: on_inbound_done follows (with `why`) when
	 * nothing more can land. The stream and the peer stay connected. */
	void (*revoke)(struct xp_inbound *in, const struct err *why);
};

struct transport {
	const struct transport_ops *ops;
	struct xp_env env;
	struct xp_callbacks callbacks;
	uint32_t caps;
	uint8_t address[XP_ADDRESS_MAX]; /* sent in HELLO/WELCOME */
	size_t address_len;
	char about[512]; /* for `health`: devices and why they were chosen; may be
			  * empty */
};

/* Built-in backends, NULL-terminated, in default order of preference. */
extern const struct transport_ops *const transport_table[];
/* By name, or NULL. */
const struct transport_ops *transport_find(const char *name);
/* Registers one more for transport_find(), two at most (tests: fake). Not built in, so no
 * configuration can name it. */
void transport_add(const struct transport_ops *ops);

/* Shared by backends: are the plan's rows inside the tables (ERR_RANGE)? */
int xp_sides_check(const struct xp_sides *sides, bool check_src, bool check_dst);
/* A table may have holes where this plan has no rows: ERR_INVAL for others. */
int xp_holes_check(const struct plan *plan, const struct xp_buffer *buffers, bool is_src);

#endif
