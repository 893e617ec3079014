/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rooms_set: the tables of rooms, shared by rooms.c (life), rooms_set.c (look-ups),
 * room_answer.c (answers to peers), rooms_msg.c (messages from peers), rooms_late.c
 * (orphans, tombstones), rooms_early.c (receivers that never connected),
 * rooms_deferred_abort.c (deferred aborts, until their sources are connected),
 * rooms_generation.c (which receivers belong to another room), and the commands and ring
 * entries of rooms.
 */
#ifndef KVD_ROOMS_SET_H
#define KVD_ROOMS_SET_H

#include "daemon/base/idmap.h"
#include "daemon/request/ring_ops.h"
#include "daemon/room/room_cursor.h"
#include "daemon/room/rooms.h"
#include "daemon/room/rooms_history.h"

struct room_message;

struct rooms {
	struct kvd *kvd;
	struct waits *waits;
	/* Callbacks from a room to the sources above. */
	void (*on_terminal)(struct room *room);
	void (*on_over)(struct room *room); /* terminal and not held: remove it */
	void (*on_clock)(struct loop_timer *timer);
	/* A message of type TRANSFER_INFO or OFFER_QUERY for an open room. */
	void (*deliver)(struct rooms *rooms, struct room *room, struct remote *remote,
			enum wire_type type, struct room_message *msg);
	struct list all;		   /* struct room.all_link */
	struct list in_state[ROOM_STATES]; /* struct room.state_link */
	struct list cursors;		   /* struct room_cursor.link */
	struct room_sweep change; /* rooms_on_change() of `changed`; NULL: of several */
	const struct remote *changed;
	/* rooms_loss.c */
	struct room_sweep loss;
	uint64_t losses;      /* number of lost peers, withdrawn pools and stops so far */
	struct err stopping;  /* code != OK: of all rooms */
	struct strmap by_key; /* {session id, role, number} */
	struct strmap by_pool; /* {pool id, role, number} */
	struct strmap by_slot; /* {session id, slot} */
	struct idmap by_gen;
	uint64_t version;
	unsigned int live;
	struct history history;
	struct trace_ring trace;
	struct list acks; /* struct party.ack_link */
	struct loop_defer acks_go;
	/* rooms_late.c */
	struct list orphans; /* oldest first */
	struct strmap orphan_groups;
	unsigned int orphan_count;
	struct loop_timer orphan_timer;
	/* rooms_early.c */
	struct list early; /* oldest first */
	struct strmap early_by_key;
	unsigned int early_count;
	struct loop_timer early_timer;
	struct room_sweep early_sweep;
	/* rooms_deferred_abort.c */
	struct list deferred_aborts; /* oldest first */
	unsigned int deferred_abort_count;
	struct loop_timer deferred_abort_timer;
	struct loop_defer deferred_abort_scan;
	struct tombstone *tombs; /* ring of config->tombstones_max */
	struct strmap tomb_by_pool;
	size_t tomb_next, tomb_cap;
};

/* remote->part[MODULE_ROOM] */
struct room_remote {
	struct list orphans; /* its requests for future rooms: rooms_late.c */
	unsigned int orphan_count;
	struct list early; /* its receivers that never connected: rooms_early.c */
};

static inline struct room_remote *room_remote(const struct remote *remote)
{
	return remote->part[MODULE_ROOM];
}

struct number_key {
	uint64_t owner, role, number;
};
struct slot_key {
	uint64_t session, slot;
};

struct tombstone {
	bool used;
	struct number_key key; /* owner: pool id */
	uint64_t ended_ns;
	uint64_t gen;
	enum err_code code;
	char text[120];
	bool open; /* it had neither ticket nor peers */
	uint8_t ticket[TICKET_BYTES];
	struct room_generations known; /* send: its receivers */
};

/* ---- rooms.c ---- */
int rooms_new(struct kvd *kvd, void **part_p);
void rooms_free(void *part);
/* A live room without an owner: its session stays until the room is closed. */
void rooms_keep_session(struct room *room, enum room_hold how);

/* ---- rooms_late.c ---- */
int late_init(struct rooms *rooms);
void late_fini(struct rooms *rooms);
/* Keep a message until its room opens. ERR_LIMIT. */
int orphan_keep(struct rooms *rooms, struct remote *remote, enum wire_type type,
		const struct number_key *key, uint64_t gen,
		const uint8_t ticket[TICKET_BYTES], struct room_message *msg);
/* Deliver the requests that waited for this room and are authorized, oldest first; the
 * others are refused in later turns. */
void orphans_take(struct rooms *rooms, struct room *room);
/* Refuse all waiting requests. */
void orphans_refuse(struct rooms *rooms, const struct err *why);
/* Of a partner that has ended (its ABORT), or 0: of all. */
void orphans_drop(struct rooms *rooms, const struct remote *remote, uint64_t gen);
void tomb_put(struct rooms *rooms, const struct room *room);
/* May this peer learn the end of the room? */
bool tomb_admits(const struct tombstone *tomb, const struct peer *peer,
		 const uint8_t ticket[TICKET_BYTES]);
struct tombstone *tomb_find(const struct rooms *rooms, const struct number_key *key);
void tomb_remove(struct rooms *rooms, const struct number_key *key);

/* ---- rooms_early.c ---- */
void early_init(struct rooms *rooms);
void early_fini(struct rooms *rooms);
/* An ABORT of a receiver that no room knows, for `room` or (NULL) one that may be
 * opened. It may fail the room. False: it is of an older room, or no room is meant. */
bool early_abort(struct rooms *rooms, struct remote *remote, struct room *room,
		 const struct wire_abort *m, const struct err *why);
/* A sending room opens; `before`: the last room of its number, NULL: not remembered. */
void early_take(struct rooms *rooms, struct room *room, const struct tombstone *before);
/* Of a receiver that has opened its number again, or 0: of all. */
void early_drop(struct rooms *rooms, struct remote *remote, uint64_t gen);

/* ---- rooms_generation.c ---- */
/* A receiver: the pool that it fills, and the opening of its number. */
struct receiver_generation {
	uint64_t who, gen;
};
/* pool: of the receiver; 0: not given. */
struct receiver_generation receiver_generation(const struct remote *remote, uint64_t pool,
					       uint64_t gen);
void room_generations_add(struct room_generations *known, struct receiver_generation one);
/* All of a sending room's. */
void room_generations_get(const struct room *room, struct room_generations *known_p);
/* Has this receiver contacted the room? */
bool room_generations_has(const struct room_generations *known,
			  struct receiver_generation one);
/* Does the receiver belong to a later room of the number than the one that these
 * contacted? */
bool room_generations_before(const struct room_generations *known,
			     struct receiver_generation one);
/* The same of a room. */
bool room_is_before(const struct room *room, struct receiver_generation one);

/* ---- rooms_deferred_abort.c ---- */
void deferred_aborts_init(struct rooms *rooms);
void deferred_aborts_fini(struct rooms *rooms);
/* The receiver of this generation opens its number again. */
void deferred_abort_revoke(struct rooms *rooms, uint64_t gen);

/* ---- rooms_msg.c ---- */
void msg_init(struct rooms *rooms);

/* ---- ring_room.c: verbs of the submission ring; hooks of the same names (module.h) ----
 */
extern const struct ring_verb room_verbs[];
bool rooms_ring_has(const struct session *session, uint64_t id);
bool rooms_ring_cancel(struct session *session, uint64_t id);
bool rooms_ring_release(struct session *session, uint64_t id);

/* ---- room_answer.c ---- */
void answer_init(struct rooms *rooms);
void answer_fini(struct rooms *rooms);
/* May the sender of this ticket take part in the room? If not (ERR_AUTH), it is
 * counted and logged. */
int answer_admit(const struct room *room, const struct remote *remote,
		 const uint8_t ticket[TICKET_BYTES]);
/* The refusal of a message of type TRANSFER_INFO or OFFER_QUERY. */
void answer_refuse(struct remote *remote, enum wire_type type,
		   const struct room_message *msg, const struct err *why);
void answer_abort(struct remote *remote, uint64_t number, uint64_t gen);

#endif
