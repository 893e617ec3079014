/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room: one request's handover, on one side. The roles are in room_send.c, room_recv.c,
 * room_offer.c and room_pull.c. This header has the shared parts: the state machine, the
 * parties, failure and the fence.
 *
 * Life: BOOT -> WAITING -> MOVING -> SUCCESS, or from any of the first three ABORTING ->
 * FAILED. A room stays ABORTING while any of its operations is in flight (`busy` > 0):
 * that is invariant 1. Only room_move() writes a state.
 */
#ifndef KVD_ROOM_H
#define KVD_ROOM_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/base/sm.h"
#include "daemon/plan/coverage.h"
#include "daemon/handshake/handshake.h"
#include "daemon/base/metrics.h"
#include "daemon/loop/offload.h"
#include "daemon/plan/cover.h"
#include "daemon/plan/plan.h"
#include "daemon/room/room_admit.h"
#include "daemon/room/room_map.h"
#include "daemon/room/room_party.h"
#include "daemon/room/room_trace.h"
#include "daemon/handshake/sched.h"
#include "daemon/session/wait.h"
#include "daemon/transport/kinds.h"

struct mail;
struct room_message;
struct rooms;
struct session;

enum room_role { ROOM_SEND, ROOM_RECV, ROOM_OFFER, ROOM_PULL, ROOM_ROLES };

/* names in room_names.c */
enum room_state {
	ROOM_BOOT,
	ROOM_WAITING,
	ROOM_MOVING,
	ROOM_ABORTING,
	ROOM_FAILED,
	ROOM_SUCCESS,
	ROOM_STATES,
};

#define ROOM_PARTIES_MAX 1024u
#define ROOM_CHUNKS_MAX 65536u /* that have not ended */

#define ROOM_GENERATIONS_MAX 8u
/* Receivers that have contacted a sending room, and their number: rooms_generation.c. */
struct room_generations {
	struct {
		uint64_t who, gen;
	} by[ROOM_GENERATIONS_MAX];
	unsigned int count;
};

/* names in room_move.c */
enum move_phase {
	MOVE_READING,  /* reads the request's pages; initial state without one, too */
	MOVE_PLANNING, /* here, or on a helper */
	MOVE_WAITING,  /* for the engine's stream */
	MOVE_POSTED,   /* posted to the transport, which reports its end */
	MOVE_ENDED,    /* over: room_move.c frees it */
};

/* An operation in flight: a chunk to one receiver, a read, an inbound. Holds plan,
 * maps and header until the transport and helpers have finished with them. Owned by
 * its room. */
struct move {
	struct list link; /* in room->moves; when unused, in ended */
	struct sm sm;
	struct room *room;
	struct party *party;
	struct chunk *chunk;	   /* send */
	struct room_maps maps;	   /* recv: the chunk's pages at the source */
	struct room_maps maps_dst; /* offer: the puller's pages */
	struct plan_map *pairs;	   /* borrowed pages of both sides */
	size_t pair_count;
	struct plan_want *wants; /* offer: the puller's wants */
	size_t want_count;
	struct plan *plan;
	struct charge charge; /* of the plan */
	uint8_t *header;
	size_t header_len;
	int (*encode)(struct move *move); /* makes the header after the plan; or NULL */
	struct sched_op op;
	struct inbound_owner inbound; /* inbound ones */
	struct xp_inbound *in;
	struct offload_job job; /* planning off the loop, from these: */
	const struct layout *plan_src, *plan_dst;
	const struct plan_want *plan_wants;
	size_t plan_want_count;
	uint64_t plan_most; /* bytes: rest of its account */
	void (*planned)(struct move *move);
	struct wait wait;
	struct err refused;
	uint64_t digest, bytes; /* of the other side, from the header */
	uint64_t seq;
	uint64_t seen_ns; /* posted, as first seen by room_clock.c */
	bool last, reserved;
	struct mail *mail;		    /* reads its pages */
	void (*on_free)(struct move *move); /* or NULL */
};
static inline enum move_phase move_phase(const struct move *move)
{
	return (enum move_phase)sm_state(&move->sm);
}

/* one room.send */
struct chunk {
	struct list link; /* in room->send.chunks */
	struct room *room;
	uint64_t seq;
	struct room_maps maps;
	bool last;
	struct wait_spec wait;
	unsigned int moves; /* parties it is being sent to; freed when none is left */
	bool dispatched;
	struct charge charge;
};

/* The owner of a room that no engine opened: the daemon moves its own data with it.
 * Engines can neither name nor poll it; it has no slot and is removed when it has
 * ended. */
struct room_leg {
	struct room *room; /* NULL: none, or it has ended */
	/* It is terminal: its error and bytes are final. It is removed after this
	 * call; the owner must not end other rooms in it. */
	void (*on_end)(struct room_leg *leg, const struct room *room);
};

/* The owner of a room. */
enum room_hold {
	ROOM_HELD,    /* its engine's */
	ROOM_CLOSING, /* its engine has ended: freed at its end, as the session */
	ROOM_DROPPED, /* the same; its number may be in use again */
};

/* State of the bound pages of recv, pull and offer. */
enum pages_phase {
	PAGES_UNBOUND,
	PAGES_BOUND,
	PAGES_PLANNED, /* recv, pull: the cover is made */
};

#define ROOM_NO_SLOT UINT32_MAX

enum room_limit { LIMIT_BOOTSTRAP, LIMIT_WAITING, LIMIT_STALL, LIMITS };

struct room {
	struct rooms *rooms;
	struct session *session;
	struct room_leg *leg; /* NULL: an engine's */
	const struct role_ops *ops;
	struct list session_link, all_link;
	struct list state_link; /* in rooms->in_state: longest in this state first */
	enum room_role role;
	enum room_hold hold;
	uint64_t number;
	uint64_t gen;
	struct pool *pool;
	struct sm sm;
	uint32_t slot, slot_gen; /* ROOM_NO_SLOT: none */
	struct list parties;
	unsigned int party_count;
	unsigned int busy; /* moves that are not freed */
	struct list moves;
	struct list ended;    /* moves that are over, to be freed by the next step */
	struct list mails;    /* struct mail: while it is live */
	struct charge charge; /* itself and its parties */
	uint32_t receivers;   /* expected parties; 0 = not known yet */
	bool fail_requested;  /* the other side did */
	uint64_t bytes, expected;
	uint64_t surplus; /* send, recv: tokens of chunks that no receiver had bound */
	struct room_used used;	 /* the parties' sum */
	const struct err *error; /* of ABORTING and FAILED; else its code is OK */
	struct loop_timer timer;
	uint64_t limits_ns[LIMITS];
	uint64_t opened_ns, waiting_ns, moving_ns, ended_ns, moved_ns;
	uint64_t state_ns;    /* time of its last change of state */
	uint64_t progress;    /* at the last check, for stalls */
	uint64_t version;     /* rooms->version at the last change */
	uint64_t losses_seen; /* of rooms->losses */
	struct room_trace trace;
	struct room_names *names; /* NULL: none were given */
	struct room_admit admit;
	struct loop_defer step;
	union {
		struct {
			struct list chunks; /* waiting or moving, in order of room.send */
			struct coverage given; /* numbers of all chunks, as tokens */
			unsigned int chunks_open, chunks_given; /* in `chunks`; ever */
			uint64_t latest_seq;			/* of the last one */
			bool last_given;
			/* First token that receivers want, of the pool's first view,
			 * or of any if none wants that one; UINT64_MAX: not known */
			uint64_t first_token;
			struct room_generations early; /* ended without being a party */
		} send;
		struct { /* the others */
			struct {
				struct room_maps maps;
				enum pages_phase phase;
				/* recv, pull: passed before any byte is written;
				 * offer: before it is read; empty once it is passed */
				struct wait_spec wait;
				struct wait wait_bind;
			} pages;
			union {
				struct {		     /* recv, pull */
					struct list sources; /* named, and not found yet:
							      * room_source.h */
					/* until all parties have their part */
					struct cover_work *covering;
					struct loop_timer heartbeat; /* pull: of leases */
				} bind;
				struct {
					uint64_t lease_ns, lease_epoch, lease_end_ns;
					/* of the first puller that gave up; NULL: none */
					const struct err *gave_up_why;
					bool receivers_from_pullers; /* by the pullers */
				} offer;
			};
		};
	};
};

/* ---- room_state.c ---- */
extern const char *const room_role_names[ROOM_ROLES + 1]; /* the last is NULL */
extern const char *const room_state_names[ROOM_STATES];
extern const struct sm_table room_table;
unsigned int room_poll_state(const struct room *room); /* enum kvd_state */
unsigned int room_flags(const struct room *room);
void room_move(struct room *room, enum room_state to);
static inline bool room_terminal(const struct room *room)
{
	enum room_state s = (enum room_state)sm_state(&room->sm);

	return s == ROOM_FAILED || s == ROOM_SUCCESS;
}
static inline bool room_live(const struct room *room)
{
	return (enum room_state)sm_state(&room->sm) < ROOM_ABORTING;
}
/* recv, pull, offer: bind the pages to move, after `wait` is passed. Takes both. */
void room_bind_pages(struct room *room, struct room_maps *maps, struct wait_spec *wait);
static inline bool room_bound(const struct room *room)
{
	return room->role != ROOM_SEND && room->pages.phase != PAGES_UNBOUND;
}
static inline bool room_planned(const struct room *room)
{
	return room->role != ROOM_SEND && room->pages.phase == PAGES_PLANNED;
}
/* Do its pages wait for its engine's stream? */
static inline bool room_awaits_point(const struct room *room)
{
	return room->role != ROOM_SEND && room->pages.wait_bind.armed;
}
/* send: first token that receivers want; UINT64_MAX: not known, or another role. */
static inline uint64_t room_first_token(const struct room *room)
{
	return room->role == ROOM_SEND ? room->send.first_token : UINT64_MAX;
}
/* Fail with this error: notify every party (except `but`), stop everything, become
 * terminal when all operations have ended. Idempotent: the first error stays. */
void room_fail(struct room *room, const struct err *why, const struct party *but);
/* The answer to a command for a room that has ended: the room's own error. Negative. */
int room_refuse_over(const struct room *room);
void room_fail_last(struct room *room); /* err_last() */
/* The same for an error that a transport reports: its text names no peer. */
void room_fail_moving(struct room *room, const struct party *party,
		      const struct err *why);
/* Schedule a step of the room in the next turn. */
void room_kick(struct room *room);
void room_progress(struct room *room); /* bytes moved: status page */
/* Has its engine's stream passed the room's `wait`? If not, a step is scheduled when it
 * has. */
bool room_await(struct room *room);
void room_figures(struct room *room); /* the same for the other fields of its slot */
/* The other side ended it: room_fail(), with that in its flags. */
void room_fail_remote(struct room *room, const struct err *why, const struct party *but);

/* Has it not processed all losses (rooms_loss.c)? Process them now: this may fail the
 * room, end its moves and drop its mails. */
bool rooms_behind(const struct room *room);
void rooms_catch_up(struct room *room);
/* Set the timer of the room's next check, as its phase requires. */
void room_clock_set(struct room *room);
/* Until when does the room wait for a connection to the party's daemon? UINT64_MAX: it
 * does not wait. A daemon with only a control line is not connected, however often
 * that line is lost and up again. */
uint64_t party_connected_until(const struct party *party);
/* ---- room_clock.c ---- */
void room_on_clock(struct loop_timer *timer); /* the check */
void room_count(const struct room *room, enum metric metric, uint64_t n);

/* ---- room_counts.c: when it is in the tables, after a move, before it leaves them ----
 */
void room_counts_enter(struct room *room, uint64_t now_ns);
void room_counts_move(struct room *room, unsigned int from, uint64_t now_ns);
void room_counts_leave(struct room *room, unsigned int state);
void room_counts_bytes(struct room *room, uint64_t bytes); /* have moved */

/* ---- room_move.c ---- */
struct move *move_new(struct room *room, struct party *party);
/* End a move: no callback of its plan, wait or mail follows. Idempotent. The room
 * frees it in its next step, so the caller may still read it. */
void move_end(struct move *move);
void move_to(struct move *move, enum move_phase phase);
void move_arrived(struct move *move); /* its request is received and accepted */
/* The transport has moved its bytes: update the counts of room, party and daemon. */
void move_done(struct move *move, const struct xp_used *used, const struct xp_way *way);
static inline bool room_sends(const struct room *room)
{
	return room->role == ROOM_SEND || room->role == ROOM_OFFER;
}
/* Answer an inbound move's request: its bytes may be written (`why` NULL), or not. The
 * first answer counts, any later one is ignored. */
void move_answer(struct move *move, const struct xp_sides *sides, const struct err *why);
/* For the step: free ended moves. */
void moves_free_ended(struct room *room);
/* Pair the pages of both sides; they must outlive the move. */
int move_pair(struct move *move, const struct room_maps *src,
	      const struct room_maps *dst);
/* Make move->plan from the pairs and wants, on a helper when large, then call `then`
 * (possibly before this returns). Failure is in move->refused. */
void move_plan(struct move *move, const struct plan_want *wants, size_t want_count,
	       void (*then)(struct move *move));
/* The memory of both sides for its plan; for move_post() and move_answer(). */
int move_sides(const struct move *move, struct xp_sides *sides);
/* Post its header and plan to the transport. Negative: nothing was posted. */
int move_post(struct move *move, enum xp_kind kind, void (*on_done)(struct sched_op *op));
/* All moves of the room: posted ones are told to stop, others end. */
void moves_stop(struct room *room, const struct err *why);

void room_init(struct room *room);
void room_fini(struct room *room);	/* its parties and its role's part */
void room_open_done(struct room *room); /* first publication and timer */

/* ---- the roles ---- */
struct role_ops {
	/* Initialise the role's part of the room, and its parties. */
	void (*init)(struct room *room);
	void (*fini)(struct room *room);
	void (*party_fini)(struct party *party);
	/* From room_kick: the parties' peers or pools changed, or a move ended. */
	void (*step)(struct room *room);
	void (*on_clock)(struct room *room); /* while it is live; NULL: by its state */
	/* Start and end of a step, in any state. NULL: nothing. */
	void (*free_ended)(struct room *room);
	void (*stepped)(struct room *room);
	/* Stop all operations in flight (called once, on the way to ABORTING). */
	void (*stop)(struct room *room, const struct err *why);
	/* The party was lost; true: the room continues without it, and ignores its
	 * messages. */
	bool (*without)(struct party *party, const struct err *why);
};
/* for rooms_open() */
extern const struct role_ops room_send_ops, room_recv_ops, room_offer_ops, room_pull_ops;

/* room_send.c */
struct wire_transfer_info;
int send_on_info(struct room *room, struct remote *remote,
		 const struct wire_transfer_info *info, struct room_message *msg);
void send_on_done(struct room *room, struct party *party);
int send_chunk(struct room *room, struct chunk *chunk); /* takes it when >= 0 */
/* Was this chunk sent before? A retry is not a new one. */
bool send_was_given(const struct room *room, uint64_t seq);
/* room_recv.c; also of a pull that was opened without pages */
int recv_bind(struct room *room, struct room_maps *maps, struct wait_spec *wait);
void recv_on_request(struct room *room, struct remote *remote, struct xp_inbound *in,
		     struct cursor *header);
/* room_offer.c */
int offer_on_query(struct room *room, struct remote *remote,
		   const struct wire_offer_query *query);
void offer_on_request(struct room *room, struct remote *remote, struct xp_inbound *in,
		      struct cursor *header);
int offer_on_pull_done(struct room *room, struct party *party,
		       const struct wire_pull_done *done, enum err_code *answer_p);
void offer_on_lease(struct room *room, struct party *party, uint64_t lease_epoch);
/* Set the duration of the lease, from now on and for each extension. ERR_STATE. */
int offer_extend(struct room *room, uint64_t lease_ns);
/* room_pull.c */
int pull_on_offer(struct room *room, struct party *party, const struct wire_offer *offer,
		  struct room_message *msg);
void pull_on_ack(struct room *room, struct party *party, const struct wire_pull_ack *ack);

#endif
