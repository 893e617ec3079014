/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer: the other daemons: HELLO/WELCOME, instances, tokens, liveness.
 *
 * A peer is dialled by endpoint and known, once welcomed, by its instance id. A restart
 * is a new instance: the old one is taken down first (ERR_RESTART). Dead = no frame for
 * `dead_after` plus this loop's own lateness (a busy daemon must not declare healthy
 * peers dead). Dialling the daemon's own endpoint gives the self peer: it is up in the
 * next turn, and its messages are delivered in the next turn.
 *
 * Life: DIALING -> UP -> DOWN. A DOWN peer object exists as long as it is held by
 * `peer_hold()`. A dialled endpoint is redialled with back-off while it is held; when
 * it is UP again it has a new epoch, and state of the old one is invalid. Objects are
 * freed from the loop, never inside a callback or a call.
 */
#ifndef KVD_PEER_H
#define KVD_PEER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/context.h"
#include "daemon/base/err.h"
#include "daemon/base/cursor.h"
#include "daemon/base/list.h"
#include "daemon/base/sm.h"
#include "daemon/link/link.h"
#include "daemon/loop/loop.h"
#include "proto/wire.h"

struct account;
struct config;
struct peers;

/* Feature bits of HELLO; the intersection of both sides is in effect. Bits 1, 2, 3, 5
 * and 7 are retired. */
#define PEER_FEATURE_BASE (UINT64_C(1) << 0)
#define PEER_FEATURE_CHUNKS (UINT64_C(1) << 4)
#define PEER_FEATURE_ATTEND (UINT64_C(1) << 6)

#define PEER_LABEL_MAX 256

enum peer_state { PEER_DIALING, PEER_UP, PEER_DOWN };

struct peer_address {
	char transport[16];
	uint8_t *data; /* owned by the peer */
	size_t len;
};

/* Totals of a daemon, over all of its instances while it is remembered. */
struct peer_totals {
	uint64_t bytes_in, bytes_out; /* of rooms and transfers */
	uint64_t rooms, rooms_failed; /* that ended */
	uint64_t downs;
	struct err error; /* the last one; code OK: none */
	uint64_t error_ns;
	bool away;	      /* it was up and was lost, but not closed for being idle */
	bool dead;	      /* it was silent before */
	enum err_code warned; /* of the last log line for a failed attempt */
	uint64_t warned_ns;
};

/* A former peer: kept for ten minutes, at most 256. */
struct peer_past {
	struct list link;
	char endpoint[LINK_ENDPOINT_MAX], known_as[LINK_USER_MAX];
	char name[64], product[32], instance_text[33];
	uint64_t since_ns, gone_ns; /* not UP; released by all holders */
	struct peer_totals totals;
};

struct peer {
	struct list link; /* in peers */
	char endpoint[LINK_ENDPOINT_MAX];
	char known_as[LINK_USER_MAX]; /* its name in the allow-list; "" = none */
	char name[64];		      /* the remote's instance name */
	char product[32];	      /* its version; "" = not known */
	/* for people: "[NAME ]tcp://HOST:PORT", without the key */
	char shown[LINK_USER_MAX + LINK_ENDPOINT_MAX];
	uint8_t instance[16];
	char instance_text[33]; /* hex, for logs and records */
	struct sm sm;		/* enum peer_state */
	uint64_t epoch;		/* of the peering; incremented with each UP */
	bool self;
	bool same_user; /* this daemon itself, or (keys) one of the same user */
	bool same_host; /* equal boot ids */
	bool lower;	/* our instance id is the lower one: this side dials data lines */
	uint64_t features;
	uint8_t token_in[16];  /* to be presented by the remote on data connections */
	uint8_t token_out[16]; /* presented by this side */
	struct peer_address addresses[TRANSPORTS_MAX];
	unsigned int address_count;
	struct err why;	   /* not UP: the reason, if known */
	uint64_t rtt_ns;   /* last PING */
	uint64_t since_ns; /* UP, or not UP */
	uint64_t up_since_ns, missed_pings, messages_in, messages_out;
	struct peer_totals totals; /* bytes, rooms: by the layers that move them */
	unsigned int holds;
	void *user; /* the handshake layer's */
	void *impl; /* peer.c's */
};

struct peers_callbacks {
	void *owner;
	void (*on_up)(void *owner, struct peer *peer);
	/* No more messages of the peer follow in this epoch. */
	void (*on_down)(void *owner, struct peer *peer);
	/* Optional. A dial was answered with BYE, or no line could be opened (keys,
	 * memory, descriptors): peer->why.
	 * While the peer is held it is dialled again. */
	void (*on_refused)(void *owner, struct peer *peer);
	/* Optional. The account for memory that messages of an UP peer take; NULL:
	 * none. */
	struct account *(*account_of)(void *owner, const struct peer *peer);
	/* Optional; not there: always. Work may wait for the peer, so its death must be
	 * noticed within `dead_after`. */
	bool (*busy)(void *owner, const struct peer *peer);
	/* Every message other than HELLO … BYE, PING, PONG; in order. A negative
	 * result (ERR_PROTO) takes the peer down with BYE. */
	int (*on_message)(void *owner, struct peer *peer,
			  const struct wire_header *header, struct cursor *body);
};

/* Options that peers takes from the configuration; peers_options_default() sets the
 * defaults, tests set small values. */
struct peers_options {
	uint64_t ping_interval_ns, dead_after_ns;
	unsigned int peers_max;
	size_t message_bytes;	 /* one frame, header included */
	size_t part_bytes;	 /* peer_send_owned(): bytes of a body per turn */
	size_t queue_bytes;	 /* peer_send_reliable(), a peer */
	uint64_t hello_retry_ns; /* doubles up to redial_max_ns, so does redialling */
	uint64_t redial_max_ns;
	uint64_t accept_ttl_ns; /* lifetime of a HELLO whose sender proves nothing */
	uint64_t idle_after_ns; /* dialled, not held, no message for this time: BYE */
	/* HELLOs of unknown senders served a second, of each user */
	unsigned int hello_rate;
	/* concurrent attempts of unauthenticated senders; of one user */
	unsigned int unauthenticated_max, unauthenticated_user_max;
};
void peers_options_default(struct peers_options *options);

/* Frames in and out, and why some were dropped. */
struct peers_stats {
	uint64_t frames_in, frames_out;
	uint64_t bad_frames;	/* wire_frame_get() refused them */
	uint64_t stale_frames;	/* another target, an ended epoch, no peer */
	uint64_t replays;	/* a sequence number seen before */
	uint64_t foreign_user;	/* the sender's instance belongs to another key */
	uint64_t forged_hellos; /* contradict a peer that is up */
	uint64_t hellos_limited;
	uint64_t hellos_misplaced; /* named an endpoint that its sender may not use */
	uint64_t unauthenticated_dropped; /* oldest attempts that newer ones replaced */
	uint64_t refused;		  /* dials of others answered with BYE */
};

struct peers_args {
	struct loop *loop;
	struct link *link; /* peers sets its callbacks */
	const struct config *config;
	const struct peers_options *options; /* NULL: from config */
	const struct peers_callbacks *callbacks;
	const char *name;
	uint8_t boot_id[16];
	/* this daemon's transports, for HELLO; borrowed, count <= TRANSPORTS_MAX */
	const struct peer_address *addresses;
	unsigned int address_count;
	uint64_t features; /* in addition to PEER_FEATURE_BASE */
};

int peers_new(const struct peers_args *args, struct peers **peers_p);
/* BYE to all, then DOWN for each that was UP. */
void peers_close(struct peers *peers, enum err_code code, const char *text);
void peers_free(struct peers *peers);
const uint8_t *peers_instance(const struct peers *peers); /* 16 bytes, this daemon's */

/* struct peer_past.link, earliest loss first. */
const struct list *peers_past(struct peers *peers);
void peer_note_error(struct peer *peer, const struct err *why);
static inline void peer_count_bytes(struct peer *peer, bool out, uint64_t bytes)
{
	*(out ? &peer->totals.bytes_out : &peer->totals.bytes_in) += bytes;
}

/* The client that a peer is dialled for. */
struct peer_client {
	uint32_t uid;
	uint64_t session;
};
/* Find or dial. *peer_p is held once for the caller. ERR_INVAL (not an endpoint of the
 * form tcp://host:port), ERR_LIMIT (option `peers`, or the client's share of it:
 * daemons dialled for it that were never up). NULL: for this daemon itself. */
int peers_dial(struct peers *peers, const char *endpoint,
	       const struct peer_client *client, struct peer **peer_p);
void peer_hold(struct peer *peer);
/* Release the last hold: BYE when this side dialled it and it stays idle. */
void peer_release(struct peer *peer);
/* UP, else NULL. No hold taken. */
struct peer *peers_by_instance(struct peers *peers, const uint8_t instance[16]);
/* How many are in a state. */
unsigned int peers_in(const struct peers *peers, enum peer_state state);
/* The link has reloaded its keys: peerings and attempts that are no longer allowed end
 * in the next turn, with BYE. Returns how many of them were UP. */
unsigned int peers_recheck(struct peers *peers);
/* SIGHUP: ping interval and dead_after. */
void peers_reload(struct peers *peers, const struct config *config);

/*
 * Send one message: `body` as written by wire_<name>_put. ERR_PEER when not UP,
 * ERR_TOOBIG, ERR_LIMIT when its queue is full (for messages that may be lost or are sent
 * again anyway; for others use peer_send_reliable). Both kinds keep one order. Messages
 * of one epoch arrive completely and in order, or the peer is lost: a receiver that finds
 * a gap in the sequence ends the peering.
 */
int peer_send(struct peer *peer, enum wire_type type, const void *body, size_t len);
/* Queues (up to `queue_bytes`) when the line is full, and keeps the order. At the
 * limit it returns ERR_LIMIT, and the peer is taken down in the next turn, never
 * inside this call. */
int peer_send_reliable(struct peer *peer, enum wire_type type, const void *body,
		       size_t len);

/* Would `len` more bytes leave half of the queue free? Long messages that can wait
 * (lists of pages) or be dropped (index queries for chunks) are sent only then: those
 * of one user must not end the peering, and with it the rooms of others. */
bool peer_has_spare(const struct peer *peer, size_t len);

/*
 * Send a long message in memory that mem_free() takes; the memory is passed on or freed,
 * also on failure. It is sent like peer_send_reliable() does, but in PARTs of
 * options.part_bytes, one a turn, if the remote supports them; later messages wait for
 * its end. The remote assembles the parts, one message per peer, and delivers the whole.
 */
int peer_send_owned(struct peer *peer, enum wire_type type, uint8_t *owned, size_t len);
/* In on_message: takes the memory of the body, which the caller frees. NULL: it is in
 * a frame that is reused, and must be copied. */
uint8_t *peer_body_take(struct peer *peer);

/*
 * Express. A latency-critical message can use another path than the control line, which
 * passes two threads of libzmq on each side. The layer above provides the path, which
 * keeps its own order (its data line). Both paths share one sequence, and the receiver
 * restores the order.
 */
#define PEER_EXPRESS_MAX 64u	       /* not accepted by the remote yet */
#define PEER_EXPRESS_BYTES (16u << 10) /* of a body */
/* Limit for the bodies of attention messages (query rows and results) in flight; and
 * for all bodies that the remote has not accepted. */
#define PEER_EXPRESS_ROWS_BYTES (640u << 10)
#define PEER_EXPRESS_WINDOW (4u << 20)
/* Space before the body of a prepared message: the line's from PEER_EXPRESS_LINE on, a
 * byte and the frame's header. Bytes before that are not sent; they align the floats
 * in the values of an ATTENTION_RESULT to a multiple of 16, as kernels write them. */
#define PEER_EXPRESS_LINE 1u
#define PEER_EXPRESS_HEAD (PEER_EXPRESS_LINE + 1u + WIRE_HEADER_BYTES)
struct peer_express {
	void *owner;
	/* Copies the frame; peer_express_done() follows. Negative: not now. */
	int (*send)(void *owner, const void *frame, size_t len);
	/* The same with memory that is taken (mem_free()) on success: the frame
	 * follows one byte of the line, at PEER_EXPRESS_LINE. NULL: not supported. */
	int (*send_made)(void *owner, uint8_t *made, size_t len);
};
/* While UP. Ends with the epoch. */
void peer_express_open(struct peer *peer, const struct peer_express *express);
/* The remote has accepted a frame of so many bytes, or (err) never will: then the peer
 * is taken down in the next turn. Of this epoch only. */
void peer_express_done(struct peer *peer, size_t len, const struct err *err);
/* Like peer_send_reliable(), by the express path if it is open. */
int peer_send_express(struct peer *peer, enum wire_type type, const void *body,
		      size_t len);
/* Send a body of `len` bytes at made + PEER_EXPRESS_HEAD in memory that mem_free()
 * takes; the memory is passed on or freed, also on failure. This avoids a copy of long
 * bodies. */
int peer_send_express_made(struct peer *peer, enum wire_type type, uint8_t *made,
			   size_t len);
/* A frame arrived on the express path. It is delivered after the earlier messages;
 * on_taken is called just before. Its bytes stay valid until then, or until the owner
 * removes `link`. Negative (ERR_PROTO): it is not of this peering. */
struct peer_express_in {
	struct list link;
	struct wire_header header;
	struct cursor body;
	void (*on_taken)(struct peer_express_in *in);
};
int peer_express_arrived(struct peer *peer, struct peer_express_in *in, const void *frame,
			 size_t len);
/* All messages sent on the express path have been accepted. */
bool peer_express_quiet(const struct peer *peer);
/* "peer NAME tcp://… instance 3f…", with the parts that are known. */
const char *peer_label(const struct peer *peer, char text[PEER_LABEL_MAX]);
/* The error that the peer sent: its code and its text, quoted. */
void peer_report(const struct peer *peer, uint32_t code, const char *text,
		 struct err *why_p);
/* Take it down now (protocol error, transport lost, its key removed): BYE, and on_down
 * inside this call if it was UP. */
void peer_kill(struct peer *peer, const struct err *why);
/* The same in the next turn. */
void peer_end_later(struct peer *peer, const struct err *why);

#endif
