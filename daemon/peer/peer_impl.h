/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer_impl: shared by peer.c (objects, life), peer_hello.c (authentication) and
 * peer_io.c (frames); private to them.
 */
#ifndef KVD_PEER_IMPL_H
#define KVD_PEER_IMPL_H

#include <sys/types.h>

#include "daemon/base/account.h"
#include "daemon/base/idmap.h"
#include "daemon/loop/work.h"
#include "daemon/peer/peer.h"

/* Buckets of a table. The hash is seeded: with the maximum of peers (65536) about 64
 * are in each; of their peerings, two a peer, twice as many. */
#define PEER_BUCKETS 1024u
#define PEER_REFUSALS_MAX 16u
#define PEER_REFUSALS_USER 4u /* of them, for the HELLOs of one user */
#define PEER_PACES 64u
#define PEER_BYE_FRAME_MAX 512u
#define PEER_PART_HEAD 32u /* a PART's fields before its bytes, rounded up */

struct peer_impl;

/*
 * One attempt at a peering and, once proven, the peering itself. The local half
 * (epoch_in, nonce, token_in) is generated at its start; the remote's half arrives with
 * its HELLO or WELCOME.
 */
struct peering {
	struct list link;     /* in peers.epochs, by epoch_in; unlinked when not live */
	struct list by_nonce; /* in peers.nonces, likewise */
	struct peer_impl *owner;
	bool live;
	bool heard; /* the remote's half has arrived */
	uint64_t begun_ns;
	uint64_t nonce, epoch_in;
	uint64_t seq_in;     /* delivered, of both paths */
	uint64_t control_in; /* received on the control line */
	uint8_t token_in[16];
	/* the remote's half */
	uint64_t epoch_out, seq_out, features;
	uint16_t version;
	uint8_t token_out[16], instance[16], boot_id[16];
	char name[64], product[32];
	char endpoint[LINK_ENDPOINT_MAX], user[LINK_USER_MAX];
	struct peer_address addresses[TRANSPORTS_MAX]; /* until it is UP */
	unsigned int address_count;
	/* its HELLO needs (again) a WELCOME with this nonce */
	bool answer_due;
	uint64_t answer_nonce;
};

/* An endpoint under which a peer is found. */
struct peer_name {
	struct list link; /* in peers.endpoints; unlinked: not found */
	struct peer_impl *owner;
	const char *endpoint;
};

enum line_kind { LINE_PEER, LINE_REFUSAL };

/* The object behind the owner pointer of a line. */
struct line_owner {
	enum line_kind kind;
};

struct peer_message {
	struct list link;
	enum wire_type type;
	uint64_t sequence; /* of a frame that arrived early */
	size_t len;
	size_t sent;	/* of a long message: bytes sent as parts */
	uint8_t *owned; /* body of a long message; NULL: it is in `body` */
	uint8_t body[];
};

/* The remote's long message, while its parts arrive. */
struct peer_whole {
	uint32_t total, got; /* total 0: none is being received */
	uint16_t type;
	uint8_t *bytes;
};

struct peer_impl {
	struct line_owner line_owner;
	struct peer peer;
	struct peers *peers;
	struct err line_why;	/* code != OK: why the line does not connect */
	struct link_line *line; /* NULL when hung up */
	bool line_once;		/* opened by dial_once */
	bool line_up;		/* … and is connected */
	uint64_t line_ns;	/* when it was opened */
	bool unauthenticated;	/* only named by a HELLO, nothing is proven */
	bool unreached;		/* dialled, and never up */
	bool for_client;	/* … for this one */
	struct peer_client client;
	bool dialled;	     /* dialled by this side: redial while held */
	bool wanted;	     /* was dialled by this side at some time */
	struct peering cur;  /* live while UP (the self peer has none) */
	struct peering next; /* being set up, possibly while cur is UP */

	struct peer_name named;	 /* peer.endpoint */
	struct peer_name said;	 /* cur.endpoint, while cur is live */
	struct list by_instance; /* in peers.instances, while UP */
	struct list waits;	 /* in peers.waiting: unauthenticated, and next is live */
	struct list reaped;	 /* in peers.reaped: possibly unused */
	struct list dials;	 /* in peers.dials: its line is opened, its HELLO sent */

	/* HELLO, PING or redial; liveness */
	struct loop_timer tick;
	uint64_t retry_ns;    /* of HELLO and redial, doubles */
	unsigned int hellos;  /* sent in this attempt */
	uint64_t received_ns; /* last frame */
	uint64_t window_ns;   /* silence before it does not count */
	uint64_t used_ns;     /* last message except PING and PONG */
	bool quiet;	      /* no message for a while, and nothing waits for it */
	uint64_t pinged_ns, ping_stamp;
	bool ping_open;	       /* no PONG yet */
	uint64_t proven_ns;    /* send time of the latest answered PING */
	uint64_t pong_pending; /* stamp of a PING to answer when the line accepts it */
	bool line_broke; /* since it last connected: must prove its identity again */

	/* reliable messages that the line did not accept; the self peer's inbox */
	struct list queue;
	size_t queue_bytes;
	struct loop_timer flush;

	struct peer_whole whole;
	struct charge kept; /* of `whole`, early_control */
	uint8_t *handed;    /* returned by peer_body_take() */

	/* peer_express.c */
	struct peer_express express; /* send NULL: closed */
	unsigned int express_out;    /* sent by the express path, not accepted yet */
	size_t express_bytes;	     /* of these frames */
	uint32_t express_since;	     /* … since the last frame on the control line */
	struct {
		uint64_t sequence;	  /* of the message before it */
		uint64_t behind;	  /* express_behind then */
	} express_sent[PEER_EXPRESS_MAX]; /* a ring: unacknowledged ones */
	unsigned int express_first;	  /* the oldest of them */
	uint64_t express_behind;	  /* bytes on the control line so far */
	struct list early_express;	  /* struct peer_express_in, in order */
	struct list early_control;	  /* struct peer_message, in order */
	unsigned int early_count;
	size_t early_bytes;
	bool delivering;

	struct err why_down; /* code != OK: taken down in `later` */
	struct loop_defer later;
};

/* A BYE to a daemon that is not a peer: its line lives until it is sent. */
struct peer_refusal {
	struct line_owner line_owner;
	struct peers *peers;
	struct link_line *line; /* NULL: free */
	uint64_t until_ns;
	char user[LINK_USER_MAX]; /* of the HELLO */
	size_t len;
	uint8_t frame[PEER_BYE_FRAME_MAX];
};

/* Rate limit of HELLOs of a user: paid until then. */
struct hello_pace {
	char user[LINK_USER_MAX];
	uint64_t until_ns;
};

struct peers {
	struct loop *loop;
	struct link *link;
	struct peers_callbacks callbacks;
	struct peers_options options;
	struct peers_stats stats;
	uint64_t features; /* of HELLO */
	uint8_t instance[16], boot_id[16];
	char instance_text[33];
	char name[64];
	uint8_t *addresses; /* encoded for HELLO */
	size_t addresses_len;
	uint8_t *frame; /* scratch of options.message_bytes */
	uint8_t *part;	/* scratch for the body of a PART */

	struct list all;  /* struct peer.link */
	struct list past; /* struct peer_past.link */
	unsigned int past_count;
	unsigned int count, unauthenticated; /* all; unauthenticated ones among them */
	unsigned int in_state[PEER_DOWN + 1];
	struct peer_impl *self;
	/* hash tables, each a bucket list: struct peering.link and .by_nonce, struct
	 * peer_name.link, struct peer_impl.by_instance */
	struct list epochs[PEER_BUCKETS], nonces[PEER_BUCKETS];
	struct list endpoints[PEER_BUCKETS], instances[PEER_BUCKETS];
	struct list waiting;	      /* struct peer_impl.waits, oldest first */
	struct idmap users, sessions; /* number of unreachable peers dialled for each */
	unsigned int unreached;	      /* of all */
	uint64_t epochs_minted;

	struct hello_pace paces[PEER_PACES];
	struct peer_refusal refusals[PEER_REFUSALS_MAX];
	struct loop_timer refusal_timer;
	struct list reaped; /* struct peer_impl.reaped */
	struct loop_work reap;
	struct list dials; /* struct peer_impl.dials */
	struct loop_work dial;
	bool closing;
};

static inline struct peer_impl *impl_of(struct peer *peer)
{
	return peer->impl;
}

/* ---- peer.c (objects) ---- */
/* A new object in state DIALING, not held; ERR_NOMEM. */
int peer_create(struct peers *peers, const char *endpoint, struct peer_impl **impl_p);
/* Is another known peer allowed? ERR_LIMIT. */
int peer_check_room(const struct peers *peers);
/* It is dialled here, or proven: counts as known. */
void peer_acquaint(struct peer_impl *impl);
/* Set the shown name: `user` "" or from the allow-list. */
void peer_show(struct peer *peer, const char *user);
struct peer_impl *peer_find_endpoint(struct peers *peers, const char *endpoint);
static inline struct list *peer_bucket(struct list buckets[PEER_BUCKETS], const void *key,
				       size_t len)
{
	return &buckets[idmap_hash(key, len) % PEER_BUCKETS];
}
/* As link_ops.canonical. */
int peer_canonical(struct peers *peers, const char *endpoint,
		   char canonical_p[LINK_ENDPOINT_MAX]);
/* Make it found under that endpoint, until the link is removed. */
void peer_name_put(struct peer_name *name);
/* It was up, or was removed: no longer counted as unreachable for its clients. */
void peer_reached(struct peer_impl *impl);
/* Before it is dialled again: update the form of its endpoint. */
void peer_respell(struct peer_impl *impl);
void peer_reap_later(struct peer_impl *impl); /* removed if unused by then */
void peer_move(struct peer_impl *impl, enum peer_state to);

/* ---- peer_past.c (former peers) ---- */
/* It is up (again): takes over its remembered totals. */
void peer_past_take(struct peer *peer);
void peer_past_add(const struct peer_impl *impl);
void peer_past_free(struct peers *peers);

/* ---- peer_life.c (up, down, the timer) ---- */
/* In a turn of its own, of which a new connection takes half: open its line, unless it
 * has one, and send the HELLO or WELCOME that is due. */
void peer_dial_later(struct peer_impl *impl);
bool peer_dial_step(struct loop_work *work);
void peer_hang_up(struct peer_impl *impl); /* idempotent; nor is it dialled later */
void peer_tick_in(struct peer_impl *impl, uint64_t after_ns);
/* Not UP (any more): redial, wait for the other side, or free it. */
void peer_plan_next(struct peer_impl *impl);
void peer_on_tick(struct loop_timer *timer);
void peer_on_flush(struct loop_timer *timer);
void peer_on_line(void *owner, void *line_owner, bool connected);
void peer_on_diagnosis(void *owner, void *line_owner, const struct err *why, bool final);
void peer_on_later(struct loop_defer *defer);
/* `next` is proven: take an older peering down, become UP, on_up. False when it did
 * not come up. */
bool peer_bring_up(struct peer_impl *impl);
/* UP only. BYE when `bye`; then on_down. */
void peer_bring_down(struct peer_impl *impl, const struct err *why, bool bye);
/* The attempt has failed (refused, not accepted): retry later while held. */
void peer_attempt_failed(struct peer_impl *impl, const struct err *why);
/* The reason that names both instances, the old and the new one. */
void peer_restarted(const struct peer_impl *impl, const uint8_t instance[16],
		    struct err *why_p);
/* It is this daemon: UP in the next turn. */
void peer_become_self(struct peer_impl *impl);
void peer_mark_down(struct peer_impl *impl, const struct err *why);

/* ---- peering.c (one attempt; addresses) ---- */
void peering_begin(struct peer_impl *impl); /* mint `next` */
void peering_end(struct peering *peering);  /* idempotent */
/* Make cur of next. */
void peering_promote(struct peer_impl *impl);
struct peering *peering_find(struct peers *peers, uint64_t epoch_in);
struct peering *peering_find_nonce(struct peers *peers, uint64_t nonce);
int peer_addresses_encode(struct peers *peers, const struct peer_address *addresses,
			  unsigned int count);
/* Keeps at most TRANSPORTS_MAX. */
int peer_addresses_decode(const struct wire_blob *blob, struct peer_address *addresses,
			  unsigned int *count_p);
void peer_addresses_free(struct peer_address *addresses, unsigned int *count);

/* ---- peer_hello.c (HELLO, WELCOME, BYE) ---- */
int peering_begin_self(struct peer_impl *impl); /* with both halves ours */
void peer_hello_send(struct peer_impl *impl);
/* UP: check which daemon is there, with the HELLO of the current peering. */
void peer_hello_probe(struct peer_impl *impl);
void peer_answer(struct peer_impl *impl, struct peering *peering);
void peer_on_hello(struct peers *peers, const struct wire_header *h, struct cursor *body,
		   const char *user);
void peer_on_welcome(struct peers *peers, const struct wire_header *h,
		     struct cursor *body, const char *user);
void peer_on_bye(struct peers *peers, const struct wire_header *h, struct cursor *body,
		 const char *user);

/* ---- peer_refuse.c (BYE to a daemon that is not a peer) ---- */
void peer_refuse(struct peers *peers, const struct wire_header *h, const char *endpoint,
		 const char *user, enum err_code code, const char *text);
void peer_refusals_close(struct peers *peers);
void peer_refusal_send(struct peer_refusal *refusal);
void peer_on_refusal_timer(struct loop_timer *timer);

/* ---- peer_io.c (frames) ---- */
void peer_vouch(struct peers *peers); /* the current frame is authenticated */
void peer_on_frame(void *owner, const struct link_frame *frame);
/* Header fields known to the peering are filled in here. */
int peer_frame_send(struct peer_impl *impl, const struct peering *peering,
		    const struct wire_header *h, const void *body);
/* PING, PONG: bypass the queue. */
int peer_send_now(struct peer_impl *impl, enum wire_type type, const void *body,
		  size_t len);
/* `peering`: the one that ends; NULL: a refusal, in the epoch of a HELLO. */
size_t peer_bye_frame(struct peers *peers, const struct peering *peering,
		      const uint8_t target[16], uint64_t epoch, uint32_t code,
		      const char *text, uint8_t frame[PEER_BYE_FRAME_MAX]);
void peer_flush(struct peer_impl *impl);
/* With the epoch: drop the queued messages. */
void peer_queue_drop(struct peer_impl *impl);
void peer_self_deliver(struct peer_impl *impl);
/* Deliver one message of cur, in order, to the layer above. */
void peer_deliver(struct peer_impl *impl, const struct wire_header *h,
		  struct cursor *body);
/* The same; `owned`, which may be NULL, is the body's memory. */
void peer_deliver_owned(struct peer_impl *impl, const struct wire_header *h,
			struct cursor *body, uint8_t *owned);
int peer_check_send(const struct peer_impl *impl, enum wire_type type, size_t len);
void peer_note_use(struct peer_impl *impl);
void peer_wake(struct peer_impl *impl); /* it was quiet */
void peer_rest(struct peer_impl *impl); /* it is: until its next PING */
/* Build the frame of a message of `peering`; `frame` may contain the body already.
 * Returns its length. ERR_TOOBIG. */
ssize_t peer_frame_make(struct peer_impl *impl, const struct peering *peering,
			const struct wire_header *h, const void *body, uint8_t *frame);

/* ---- peer_parts.c (long messages) ---- */
size_t peer_part_bytes(const struct peers *peers);
/* Send the next part of the queue's first message. 1: that was its last. */
int peer_part_send(struct peer_impl *impl, struct peer_message *msg);
/* Is the message sent in parts? */
bool peer_goes_in_parts(const struct peer_impl *impl, const struct peer_message *msg);
/* A PART of cur. */
void peer_part_take(struct peer_impl *impl, const struct wire_header *h,
		    struct cursor *body);
void peer_whole_drop(struct peer_impl *impl); /* with the epoch */
/* Account for memory of messages that cannot be delivered yet, charged to the peer's
 * principal; ERR_LIMIT beyond its share. */
int peer_keep(struct peer_impl *impl, size_t bytes, bool must);
void peer_unkeep(struct peer_impl *impl, size_t bytes);

/* ---- peer_express.c (two paths, one order) ---- */
/* Must the control line wait, while earlier express frames are not accepted? */
bool peer_express_full(const struct peer_impl *impl);
/* A checked frame of cur arrived on the control line. */
void peer_in_order(struct peer_impl *impl, const struct wire_header *h,
		   struct cursor *body);
bool peer_early_pending(const struct peer_impl *impl);
void peer_early_deliver(struct peer_impl *impl); /* frames now in order */
void peer_express_end(struct peer_impl *impl);	 /* with the epoch */

#endif
