/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer: the other daemons: HELLO/WELCOME, instances, tokens, liveness.
 *
 * A peer is dialled by endpoint and known, once welcomed, by its instance id.
 * A restart is a new instance: the old one goes down first (ERR_RESTART). Dead
 * = no frame for `dead_after` plus this loop's own lateness (a busy daemon must
 * not declare healthy peers dead). Dialling one's own endpoint gives the self
 * peer: up in the next turn, its messages loop through the next turn.
 *
 * Life: DIALING -> UP -> DOWN. A DOWN peer object stays while somebody holds it
 * by `peer_hold()`; a dialled endpoint is redialled with back-off as long as it
 * is held, and comes UP again as a new epoch: nothing of the old one is valid.
 * Objects are freed from the loop, never inside a callback or a call.
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

/* Feature bits of HELLO; both sides' intersection is in force. Bits 1, 2, 3, 5 and 7 were
 * in use and are not used again. */
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

/* Of a daemon, over all of its instances as long as it is remembered. */
struct peer_totals {
	uint64_t bytes_in, bytes_out; /* of rooms and transfers */
	uint64_t rooms, rooms_failed; /* that ended */
	uint64_t downs;
	struct err error; /* the last one; code OK: none */
	uint64_t error_ns;
	bool away;	      /* it was up and went away, and not for want of use */
	bool dead;	      /* it was silent before */
	enum err_code warned; /* of the last log line for a failed attempt */
	uint64_t warned_ns;
};

/* A peer that is gone: kept for ten minutes, the last 256. */
struct peer_past {
	struct list link;
	char endpoint[LINK_ENDPOINT_MAX], known_as[LINK_USER_MAX];
	char name[64], product[32], instance_text[33];
	uint64_t since_ns, gone_ns; /* not UP; forgotten by all that held it */
	struct peer_totals totals;
};

struct peer {
	struct list link; /* in peers */
	char endpoint[LINK_ENDPOINT_MAX];
	char known_as[LINK_USER_MAX]; /* its name in the allow-list; "" = none */
	char name[64];		      /* the remote's instance name */
	char product[32];	      /* its version; "" = not told */
	/* for people: "[NAME ]tcp://HOST:PORT", without the key */
	char shown[LINK_USER_MAX + LINK_ENDPOINT_MAX];
	uint8_t instance[16];
	char instance_text[33]; /* hex, for logs and records */
	struct sm sm;		/* enum peer_state */
	uint64_t epoch;		/* of the peering; rises with each UP */
	bool self;
	bool kin;	/* this daemon itself, or (keys) one of the same user */
	bool same_host; /* equal boot ids */
	bool lower;	/* our instance id is the lower one: we dial data lines */
	uint64_t features;
	uint8_t token_in[16];  /* what the remote must present on data connections */
	uint8_t token_out[16]; /* what we present */
	struct peer_address addresses[TRANSPORTS_MAX];
	unsigned int address_count;
	struct err why;	   /* not UP: the reason, as far as it is known */
	uint64_t rtt_ns;   /* last PING */
	uint64_t since_ns; /* UP, or not UP */
	uint64_t up_since_ns, missed_pings, messages_in, messages_out;
	struct peer_totals totals; /* the bytes and rooms: those who move them count */
	unsigned int holds;
	void *user; /* the handshake layer's */
	void *impl; /* peer.c's */
};

struct peers_callbacks {
	void *owner;
	void (*on_up)(void *owner, struct peer *peer);
	/* The peer will send nothing more in this epoch. */
	void (*on_down)(void *owner, struct peer *peer);
	/* Optional. A dial was answered with BYE, or can have no success (keys):
	 * peer->why. While the peer is held it is dialled again. */
	void (*on_refused)(void *owner, struct peer *peer);
	/* Optional. In whose name is kept what a peer that is UP says; NULL: nobody's. */
	struct account *(*account_of)(void *owner, const struct peer *peer);
	/* Every message other than HELLO … BYE, PING, PONG; in order. A negative
	 * result (ERR_PROTO) takes the peer down with BYE. */
	int (*on_message)(void *owner, struct peer *peer,
			  const struct wire_header *header, struct cursor *body);
};

/* What peers takes from the configuration; peers_options_default() gives the
 * defaults, tests set them small. */
struct peers_options {
	uint64_t ping_interval_ns, dead_after_ns;
	unsigned int peers_max;
	size_t message_bytes;	 /* one frame, header included */
	size_t part_bytes;	 /* peer_send_owned(): of a body a turn */
	size_t queue_bytes;	 /* peer_send_reliable(), a peer */
	uint64_t hello_retry_ns; /* doubles up to redial_max_ns, so does redialling */
	uint64_t redial_max_ns;
	uint64_t accept_ttl_ns; /* a HELLO whose sender proves nothing is forgotten */
	uint64_t idle_after_ns; /* dialled, not held, no message for so long: BYE */
	/* HELLOs of unknown senders served a second, of each user */
	unsigned int hello_rate;
	/* attempts at a time of senders that have proven nothing; of one user */
	unsigned int strangers_max, strangers_user_max;
};
void peers_options_default(struct peers_options *options);

/* Frames in and out, and why some were dropped. */
struct peers_stats {
	uint64_t frames_in, frames_out;
	uint64_t bad_frames;	/* wire_frame_get() refused them */
	uint64_t stale_frames;	/* another target, an epoch that is over, no peer */
	uint64_t replays;	/* a sequence number seen before */
	uint64_t foreign_user;	/* the sender's instance belongs to another key */
	uint64_t forged_hellos; /* contradict a peer that is up */
	uint64_t hellos_limited;
	uint64_t hellos_misplaced;  /* named an endpoint that is not their sender's */
	uint64_t strangers_dropped; /* the oldest attempts, for newer ones */
	uint64_t refused;	    /* dials of others answered with BYE */
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
	uint64_t features; /* besides PEER_FEATURE_BASE */
};

int peers_new(const struct peers_args *args, struct peers **peers_p);
/* BYE to all, then DOWN for each that was UP. */
void peers_close(struct peers *peers, enum err_code code, const char *text);
void peers_free(struct peers *peers);
const uint8_t *peers_instance(const struct peers *peers); /* 16 bytes, this daemon's */

/* struct peer_past.link, those that were lost first in front. */
const struct list *peers_past(struct peers *peers);
void peer_note_error(struct peer *peer, const struct err *why);
static inline void peer_count_bytes(struct peer *peer, bool out, uint64_t bytes)
{
	*(out ? &peer->totals.bytes_out : &peer->totals.bytes_in) += bytes;
}

/* For whom a peer is dialled. */
struct peer_client {
	uint32_t uid;
	uint64_t session;
};
/* Find or dial. *peer_p is held once for the caller. ERR_INVAL (not an endpoint
 * of the form tcp://host:port), ERR_LIMIT (option `peers`, or the client's share of it:
 * of daemons that were dialled for it and never came up). */
int peers_dial_for(struct peers *peers, const char *endpoint,
		   const struct peer_client *client, struct peer **peer_p);
/* The same for this daemon itself. */
int peers_dial(struct peers *peers, const char *endpoint, struct peer **peer_p);
void peer_hold(struct peer *peer);
/* The last one: BYE when we dialled it and it stays idle. */
void peer_release(struct peer *peer);
/* UP, else NULL. No hold taken. */
struct peer *peers_by_instance(struct peers *peers, const uint8_t instance[16]);
/* How many are in a state. */
unsigned int peers_in(const struct peers *peers, enum peer_state state);
/* The link has read its keys again: peerings and attempts that it would refuse now end in
 * the next turn, with BYE. How many of them were UP. */
unsigned int peers_recheck(struct peers *peers);
/* SIGHUP: ping interval and dead_after. */
void peers_reload(struct peers *peers, const struct config *config);

/*
 * Send one message: `body` as written by wire_<name>_put. ERR_PEER when not UP,
 * ERR_TOOBIG, ERR_LIMIT when its queue is full (for what may be lost or is sent
 * again anyway; the rest goes by peer_send_reliable). Both kinds keep one order.
 * What is sent in one epoch arrives completely and in order, or the peer goes
 * down: a receiver that finds a gap in the sequence ends the peering.
 */
int peer_send(struct peer *peer, enum wire_type type, const void *body, size_t len);
/* Queues (bounded by `queue_bytes`) when the line is full and keeps order; when
 * the bound is reached it answers ERR_LIMIT and the peer goes down in the next
 * turn, never inside this call. */
int peer_send_reliable(struct peer *peer, enum wire_type type, const void *body,
		       size_t len);

/* Would `len` bytes more leave half of the queue free? Long messages that can wait (lists
 * of pages) or stay unsent (questions for chunks) are sent only then: those of one user
 * must not end the peering, and with it the rooms of others. */
bool peer_has_spare(const struct peer *peer, size_t len);

/*
 * A long message: memory that mem_free() takes, which goes to the peer or is freed, also
 * when this fails. It is sent like peer_send_reliable() does, but in PARTs of
 * options.part_bytes, one a turn, when the remote knows them; what is sent after it waits
 * for its end. The remote puts them together, one message a peer, and hands up the whole.
 */
int peer_send_owned(struct peer *peer, enum wire_type type, uint8_t *owned, size_t len);
/* In on_message: the body's memory for the callback to keep; the caller frees it.
 * NULL: it is in a frame that is used again, and has to be copied. */
uint8_t *peer_body_take(struct peer *peer);

/*
 * Express. A message that somebody waits for may go another way than the control
 * line, which passes two threads of libzmq on each side: the layer above provides one, in
 * order by itself (its data line). One order is kept over both: they share the
 * sequence, and the receiver puts it together again.
 */
#define PEER_EXPRESS_MAX 64u	       /* that the remote has not taken */
#define PEER_EXPRESS_BYTES (16u << 10) /* of a body */
/* Of the body of a message that carries what somebody waits for: query rows and what
 * became of them; and of all bodies that the remote has not taken. */
#define PEER_EXPRESS_ROWS_BYTES (640u << 10)
#define PEER_EXPRESS_WINDOW (4u << 20)
/* Before the body of a made one: the line's from PEER_EXPRESS_LINE on, a byte and the
 * frame's header. What is before that is not sent: floats in an ATTENDED's values lie as
 * a kernel writes them, at a multiple of 16. */
#define PEER_EXPRESS_LINE 1u
#define PEER_EXPRESS_HEAD (PEER_EXPRESS_LINE + 1u + WIRE_HEADER_BYTES)
struct peer_express {
	void *owner;
	/* Copies the frame; peer_express_done() follows. Negative: not now. */
	int (*send)(void *owner, const void *frame, size_t len);
	/* The same with memory that it takes (mem_free()), if this succeeds: the frame
	 * is behind a byte that is the line's, at PEER_EXPRESS_LINE. NULL: it cannot. */
	int (*send_made)(void *owner, uint8_t *made, size_t len);
};
/* While UP. Ends with the epoch. */
void peer_express_open(struct peer *peer, const struct peer_express *express);
/* The remote has taken a frame of so many bytes, or (err) never will: then the peer goes
 * down in the next turn. Of this epoch only. */
void peer_express_done(struct peer *peer, size_t len, const struct err *err);
/* Like peer_send_reliable(), the faster way if that is open. */
int peer_send_express(struct peer *peer, enum wire_type type, const void *body,
		      size_t len);
/* A body of `len` bytes at made + PEER_EXPRESS_HEAD: memory that mem_free() takes, which
 * goes to the peer or is freed, also when this fails. So a long one is not copied. */
int peer_send_express_made(struct peer *peer, enum wire_type type, uint8_t *made,
			   size_t len);
/* A frame came that way. It is handed up when the messages before it have been; then
 * on_taken is called, before that. Its bytes stay until then, or until the owner
 * removes `link`. Negative (ERR_PROTO): it is none of this peering's. */
struct peer_express_in {
	struct list link;
	struct wire_header header;
	struct cursor body;
	void (*on_taken)(struct peer_express_in *in);
};
int peer_express_arrived(struct peer *peer, struct peer_express_in *in, const void *frame,
			 size_t len);
/* Nothing that went that way is still to be taken. */
bool peer_express_quiet(const struct peer *peer);
/* "peer NAME tcp://… instance 3f…", as far as it is known. */
const char *peer_label(const struct peer *peer, char text[PEER_LABEL_MAX]);
/* What the peer told us with an error's code: its words, as its words. */
void peer_told(const struct peer *peer, uint32_t code, const char *text,
	       struct err *why_p);
/* Take it down now (protocol error, transport lost, its key removed): BYE, and
 * on_down inside this call when it was UP. */
void peer_kill(struct peer *peer, const struct err *why);
/* The same in the next turn. */
void peer_end_later(struct peer *peer, const struct err *why);

#endif
