/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages between rooms, as they arrive: which message met a room in which
 * state is noted (the only place of the simulation that looks inside), and the
 * last ones are kept, to come again when they are not wanted any more. A lie is
 * a message that the true partner of a room could send, with the right numbers,
 * at a moment when none would.
 */
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/handshake/handshake_impl.h"
#include "daemon/room/rooms_set.h"
#include "proto/wire.h"
#include "tests/sim/sim.h"

#define KEPT 64u
#define STATE_NONE ROOM_STATES
#define MESSAGE_CHUNK 62u /* requests on the data line */
#define MESSAGE_PULL 63u

_Static_assert(WIRE_T_END <= MESSAGE_CHUNK, "pairs[] has no place for the messages");

static struct sim_kept past[KEPT];
static struct sim *playing;
static unsigned int past_count;
static struct handshake_events real;

/* ---- pairs ---- */

/* Who is spoken to by what. */
static const struct {
	enum wire_type type;
	unsigned int roles; /* 1 << enum room_role */
} spoken[] = {
	{WIRE_T_TRANSFER_INFO, 1 << ROOM_SEND},
	{WIRE_T_TRANSFER_INFO_ACK, 1 << ROOM_RECV},
	{WIRE_T_TRANSFER_INFO_NAK, 1 << ROOM_RECV},
	{WIRE_T_ROOM_DONE, 1 << ROOM_SEND},
	{WIRE_T_ABORT, 15},
	{WIRE_T_ABORT_ACK, 15},
	{WIRE_T_OFFER_QUERY, 1 << ROOM_OFFER},
	{WIRE_T_OFFER, 1 << ROOM_PULL},
	{WIRE_T_OFFER_NAK, 1 << ROOM_PULL},
	{WIRE_T_PULL_DONE, 1 << ROOM_OFFER},
	{WIRE_T_PULL_ACK, 1 << ROOM_PULL},
	{WIRE_T_LEASE, 1 << ROOM_OFFER},
	{(enum wire_type)MESSAGE_CHUNK, 1 << ROOM_RECV},
	{(enum wire_type)MESSAGE_PULL, 1 << ROOM_OFFER},
};

static void note(const struct room *room, enum room_role role, unsigned int type)
{
	unsigned int state = room ? (unsigned int)sm_state(&room->sm) : STATE_NONE;

	sim_totals->pairs[room ? room->role : role][state][type] = 1;
}

static struct room *addressee(struct rooms *rooms, unsigned int type, struct cursor in,
			      enum room_role *role_p)
{
	uint64_t first = cursor_get_u64(&in), second, third;

	if (type == WIRE_T_ABORT) {
		*role_p = (enum room_role)(cursor_get_u8(&in) ^ 1); /* the other end's */
		cursor_get_u64(&in);
		return rooms_by_gen(rooms, cursor_get_u64(&in));
	}
	second = cursor_get_u64(&in);
	third = cursor_get_u64(&in);
	switch (type) {
	case WIRE_T_TRANSFER_INFO:
	case WIRE_T_ROOM_DONE:
		*role_p = ROOM_SEND;
		return rooms_by_pool(rooms, third, ROOM_SEND, first);
	case WIRE_T_OFFER_QUERY:
		*role_p = ROOM_OFFER;
		return rooms_by_pool(rooms, third, ROOM_OFFER, first);
	case WIRE_T_PULL_DONE:
	case WIRE_T_LEASE:
		*role_p = ROOM_OFFER;
		return rooms_by_gen(rooms, third);
	case WIRE_T_OFFER:
	case WIRE_T_OFFER_NAK:
	case WIRE_T_PULL_ACK:
		*role_p = ROOM_PULL;
		return rooms_by_gen(rooms, second);
	case WIRE_T_ABORT_ACK:
		*role_p = ROOM_SEND;
		return rooms_by_gen(rooms, second);
	default:
		*role_p = ROOM_RECV;
		return rooms_by_gen(rooms, second);
	}
}

static void note_message(struct kvd *kvd, unsigned int type, const struct cursor *body)
{
	enum room_role role = ROOM_SEND;
	struct room *room = addressee(rooms_of(kvd), type, *body, &role);

	note(room, role, type);
}

static bool possible(unsigned int role, unsigned int type)
{
	for (unsigned int i = 0; i < ARRAY_LEN(spoken); i++) {
		if (spoken[i].type == type)
			return spoken[i].roles >> role & 1;
	}
	return false;
}

/* A room that is not there has no role but the one that the message names. Before
 * its first turn nobody has been told the generation of an offer, nor, until its
 * sources are there, that of a receiver or puller: what carries it cannot come. */
static bool counts(unsigned int role, unsigned int state, unsigned int type)
{
	if (state == STATE_NONE && type == WIRE_T_ABORT_ACK)
		return role == ROOM_SEND;
	if (state == ROOM_BOOT && ((role == ROOM_OFFER && type != WIRE_T_OFFER_QUERY) ||
				   (role == ROOM_RECV && type == MESSAGE_CHUNK) ||
				   (role == ROOM_PULL && type == WIRE_T_OFFER)))
		return false;
	return possible(role, type);
}

unsigned int sim_pairs_missing(void)
{
	unsigned int missing = 0;

	for (unsigned int role = 0; role < 4; role++)
		for (unsigned int state = 0; state <= STATE_NONE; state++)
			for (unsigned int type = 0; type < 64; type++)
				missing += counts(role, state, type) &&
					   !sim_totals->pairs[role][state][type];
	return missing;
}

void sim_pairs_print(void)
{
	static const char *const roles[] = {"send", "recv", "offer", "pull"};
	unsigned int taken = 0, all = 0;

	for (unsigned int role = 0; role < 4; role++)
		for (unsigned int state = 0; state <= STATE_NONE; state++)
			for (unsigned int type = 0; type < 64; type++) {
				bool met = sim_totals->pairs[role][state][type];

				if (!counts(role, state, type))
					continue;
				all++;
				taken += met;
				if (!met)
					printf("  not met: %s room %s, %s\n", roles[role],
					       state == STATE_NONE
						       ? "closed"
						       : room_state_names[state],
					       type == MESSAGE_CHUNK ? "CHUNK"
					       : type == MESSAGE_PULL
						       ? "PULL"
						       : wire_type_name(type));
			}
	printf("pairs of room state and message: %u of %u met\n", taken, all);
}

/* ---- what arrives ---- */

bool sim_past_keep(struct sim_kept *kept, struct kvd *kvd, struct remote *remote,
		   const struct wire_header *h, const struct cursor *body)
{
	size_t len = cursor_left(body);

	if (len > SIM_KEPT_BYTES)
		return false;
	kept->kvd = kvd;
	kept->remote = remote;
	memcpy(kept->instance, remote->peer->instance, 16);
	kept->header = *h;
	memcpy(kept->body, body->base + body->pos, len);
	kept->len = len;
	return true;
}

int sim_past_pass(struct kvd *kvd, struct remote *remote, const struct wire_header *h,
		  struct cursor *body)
{
	return real.on_message(kvd, remote, h, body);
}

static int on_message(void *owner, struct remote *remote, const struct wire_header *h,
		      struct cursor *body)
{
	struct kvd *kvd = owner;

	if (playing->script->asks && h->type >= WIRE_T_ATTEND &&
	    h->type <= WIRE_T_ATTENTION_CANCEL)
		return sim_ask_message(playing, kvd, remote, h, body);
	if (h->type < WIRE_T_TRANSFER_INFO ||
	    (h->type >= WIRE_T_ATTACH && h->type != WIRE_T_OFFER_NAK))
		return real.on_message(owner, remote, h, body);
	note_message(kvd, h->type, body);
	past_count += sim_past_keep(&past[past_count % KEPT], kvd, remote, h, body);
	return real.on_message(owner, remote, h, body);
}

static void on_request(void *owner, struct remote *remote, struct xp_inbound *in)
{
	struct kvd *kvd = owner;
	struct cursor header;
	enum request_kind kind;

	cursor_read(&header, in->header, in->header_len);
	kind = (enum request_kind)cursor_get_u8(&header);
	cursor_get_u64(&header);
	if (kind == REQUEST_CHUNK)
		note(rooms_by_gen(rooms_of(kvd), cursor_get_u64(&header)), ROOM_RECV,
		     MESSAGE_CHUNK);
	else if (kind == REQUEST_PULL)
		note(rooms_by_gen(rooms_of(kvd), cursor_get_u64(&header)), ROOM_OFFER,
		     MESSAGE_PULL);
	real.on_request(owner, remote, in);
}

static void wrap(struct kvd *kvd, struct handshake_events *events)
{
	(void)kvd;
	real = *events; /* the same functions for every daemon */
	events->on_message = on_message;
	events->on_request = on_request;
}

#define MISLED 64u
#define ORPHANS_NS (2000 * SIM_MS) /* early_request_ttl, and some */

static struct {
	uint64_t number, until_ns;
} misled[MISLED];
static unsigned int misled_next;

void sim_past_begin(struct sim *sim)
{
	playing = sim;
	memset(misled, 0, sizeof(misled));
	past_count = 0;
	cluster_wrap_events(wrap);
}

void sim_past_end(void)
{
	past_count = 0;
}

/* ---- the past again ---- */

static bool has_remote(const struct kvd *kvd, const struct remote *wanted)
{
	const struct remote *remote;

	list_foreach(remote, &kvd->handshake->remotes, link) {
		if (remote == wanted)
			return true;
	}
	return false;
}

bool sim_past_still_there(struct sim *sim, const struct sim_kept *kept)
{
	for (unsigned int p = 0; p < sim->script->places; p++) {
		struct kvd *kvd = sim_kvd(sim, p);

		if (kvd == kept->kvd)
			return has_remote(kvd, kept->remote) &&
			       sm_state(&kept->remote->peer->sm) == PEER_UP &&
			       kept->remote->ready &&
			       memcmp(kept->remote->peer->instance, kept->instance, 16) ==
				       0;
	}
	return false;
}

static uint64_t get_le(const uint8_t *p)
{
	struct cursor c;

	cursor_read(&c, p, 8);
	return cursor_get_u64(&c);
}

bool sim_past_misleads(const struct sim *sim, uint64_t number)
{
	for (unsigned int i = 0; i < MISLED; i++) {
		if (misled[i].number == number &&
		    loop_now_ns(sim->c.loop) < misled[i].until_ns)
			return true;
	}
	return false;
}

static void mislead(struct sim *sim, uint64_t number, uint64_t until_ns)
{
	unsigned int at = misled_next;

	/* it waits for its room, too: opened soon, that room hears it first */
	for (unsigned int i = 0; i < MISLED; i++) {
		if (misled[i].number == number)
			at = i;
	}
	if (at == misled_next)
		misled_next = (misled_next + 1) % MISLED;
	if (misled[at].number != number || misled[at].until_ns < until_ns)
		misled[at].until_ns = until_ns;
	misled[at].number = number;
	for (unsigned int r = 0; r < SIM_REQUESTS_MAX; r++) {
		if (sim->requests[r].used && sim->requests[r].number == number)
			sim->requests[r].misled = true;
	}
}

bool sim_past_replay(struct sim *sim, struct sim_draw *d)
{
	unsigned int have = past_count < KEPT ? past_count : KEPT;
	const struct sim_kept *kept;
	struct cursor body;

	if (have == 0)
		return false;
	kept = &past[sim_below(d, have)];
	if (!sim_past_still_there(sim, kept))
		return false;
	cursor_read(&body, kept->body, kept->len);
	/* these two open an acquaintance, by number: that an old one never comes on
	 * a line is the peer layer's promise (sequence and epoch), not the rooms' */
	if (kept->header.type == WIRE_T_TRANSFER_INFO ||
	    kept->header.type == WIRE_T_OFFER_QUERY)
		mislead(sim, get_le(kept->body), loop_now_ns(sim->c.loop) + ORPHANS_NS);
	note_message(kept->kvd, kept->header.type, &body);
	if (real.on_message(kept->kvd, kept->remote, &kept->header, &body) < 0)
		err_clear();
	return true;
}

/* ---- lies ---- */

static size_t write_lie(struct sim_draw *d, const struct room *room,
			const struct party *party, unsigned int type, uint8_t *buf,
			size_t size)
{
	uint32_t code = sim_chance(d, 50) ? ERR_OK : ERR_ABORTED;
	struct cursor out;

	cursor_write(&out, buf, size);
	switch (type) {
	case WIRE_T_TRANSFER_INFO_ACK: {
		struct wire_transfer_info_ack m = {room->number, room->gen,
						   party->pool ? party->pool->id : 0,
						   party->gen ? party->gen : sim_next(d)};

		wire_transfer_info_ack_put(&out, &m);
		break;
	}
	case WIRE_T_TRANSFER_INFO_NAK: {
		struct wire_transfer_info_nak m = {
			.room = room->number,
			.recv_gen = room->gen,
			.src_pool = party->pool ? party->pool->id : 0,
			.code = ERR_STATE,
			.text = "a lie"};

		wire_transfer_info_nak_put(&out, &m);
		break;
	}
	case WIRE_T_ROOM_DONE: {
		struct wire_room_done m = {room->number, party->gen, room->pool->id};

		wire_room_done_put(&out, &m);
		break;
	}
	case WIRE_T_ABORT: {
		struct wire_abort m = {.room = room->number,
				       .from_role = (uint8_t)(room->role ^ 1),
				       .from_gen = party->gen,
				       .to_gen = room->gen,
				       .pool = party->pool ? party->pool->id : 0,
				       .code = ERR_ABORTED,
				       .text = "a lie"};

		wire_abort_put(&out, &m);
		break;
	}
	case WIRE_T_ABORT_ACK: {
		struct wire_abort_ack m = {room->number, room->gen};

		wire_abort_ack_put(&out, &m);
		break;
	}
	case WIRE_T_OFFER_NAK: {
		struct wire_offer_nak m = {.room = room->number,
					   .pull_gen = room->gen,
					   .src_pool = party->pool ? party->pool->id : 0,
					   .code = ERR_STATE,
					   .text = "a lie"};

		wire_offer_nak_put(&out, &m);
		break;
	}
	case WIRE_T_PULL_DONE: {
		struct wire_pull_done m = {.room = room->number,
					   .pull_gen = party->gen,
					   .offer_gen = room->gen,
					   .lease_epoch = room->offer.lease_epoch,
					   .code = code,
					   .text = "a lie"};

		wire_pull_done_put(&out, &m);
		break;
	}
	case WIRE_T_PULL_ACK: {
		struct wire_pull_ack m = {.room = room->number,
					  .pull_gen = room->gen,
					  .offer_gen = party->gen,
					  .code = code,
					  .text = "a lie"};

		wire_pull_ack_put(&out, &m);
		break;
	}
	case WIRE_T_LEASE: {
		struct wire_lease m = {room->number, party->gen, room->gen,
				       room->offer.lease_epoch};

		wire_lease_put(&out, &m);
		break;
	}
	default:
		return 0;
	}
	return out.bad ? 0 : out.pos;
}

static struct sim_request *request_of(struct sim *sim, const struct room *room)
{
	for (unsigned int r = 0; r < SIM_REQUESTS_MAX; r++) {
		if (sim->requests[r].used && sim->requests[r].number == room->number)
			return &sim->requests[r];
	}
	return NULL;
}

static const struct party *any_party(const struct room *room)
{
	const struct party *party;

	list_foreach(party, &room->parties, link) {
		if (party->remote && sm_state(&party->remote->peer->sm) == PEER_UP)
			return party;
	}
	return NULL;
}

struct sim_request *sim_past_lie(struct sim *sim, struct sim_draw *d)
{
	struct kvd *kvd = sim_kvd(sim, sim_below(d, sim->script->places));
	unsigned int n = rooms_count(rooms_of(kvd)), at = n ? sim_below(d, n) : 0;
	struct wire_header header = {0};
	const struct party *party = NULL;
	const struct room *room = NULL, *r;
	struct sim_request *req;
	struct cursor body;
	uint8_t buf[2048];
	size_t len;
	unsigned int type;

	list_foreach(r, &rooms_of(kvd)->all, all_link) {
		if (at-- == 0)
			room = r;
	}
	party = room ? any_party(room) : NULL;
	req = party ? request_of(sim, room) : NULL;
	if (!req)
		return NULL;
	do
		type = spoken[sim_below(d, ARRAY_LEN(spoken))].type;
	while (!possible(room->role, type));
	len = write_lie(d, room, party, type, buf, sizeof(buf));
	if (len == 0)
		return NULL;
	/* who believes it does not tell who really is there, and what that one has
	 * asked, whenever it comes, waits for the next room of the number */
	mislead(sim, req->number, UINT64_MAX);
	header.type = (uint16_t)type;
	cursor_read(&body, buf, len);
	note_message(kvd, type, &body);
	if (real.on_message(kvd, party->remote, &header, &body) < 0)
		err_clear();
	return req;
}

/* ---- strangers ---- */

struct remote *sim_past_remote(const struct kvd *kvd, struct sim_draw *d)
{
	struct remote *remote, *found = NULL;
	unsigned int seen = 0;

	list_foreach(remote, handshake_remotes(kvd->handshake), link) {
		if (sm_state(&remote->peer->sm) == PEER_UP && sim_below(d, ++seen) == 0)
			found = remote;
	}
	return found;
}

/* Of a number that is or will be in use, with another ticket or none. */
static size_t write_stranger(struct sim_draw *d, uint64_t number, uint64_t pool,
			     unsigned int type, uint8_t *buf, size_t size)
{
	uint64_t gen = sim_next(d);
	uint8_t ticket[16] = {0};
	struct cursor out;

	if (sim_chance(d, 50))
		ticket[0] = 1;
	cursor_write(&out, buf, size);
	if (type == WIRE_T_TRANSFER_INFO) {
		struct wire_transfer_info m = {.room = number,
					       .recv_gen = gen,
					       .src_pool = pool,
					       .dst_pool = 1 + sim_below(d, 4),
					       .receivers = 1};

		memcpy(m.ticket, ticket, sizeof(ticket));
		wire_transfer_info_put(&out, &m);
	} else if (type == WIRE_T_OFFER_QUERY) {
		struct wire_offer_query m = {.room = number,
					     .pull_gen = gen,
					     .src_pool = pool,
					     .dst_pool = 1 + sim_below(d, 4)};

		memcpy(m.ticket, ticket, sizeof(ticket));
		wire_offer_query_put(&out, &m);
	} else {
		struct wire_abort m = {.room = number,
				       .from_role = ROOM_RECV,
				       .from_gen = gen,
				       .pool = sim_chance(d, 50) ? pool : 0,
				       .code = ERR_ABORTED,
				       .text = SIM_STRANGERS_WORDS};

		memcpy(m.ticket, ticket, sizeof(ticket));
		wire_abort_put(&out, &m);
	}
	return out.bad ? 0 : out.pos;
}

void sim_past_stranger(struct sim *sim, struct sim_draw *d)
{
	static const unsigned int types[] = {WIRE_T_TRANSFER_INFO, WIRE_T_OFFER_QUERY,
					     WIRE_T_ABORT};
	const struct sim_engine *engine =
		&sim->engines[sim_below(d, sim->script->sources)];
	struct kvd *kvd = sim_kvd(sim, engine->place);
	struct remote *remote = sim_past_remote(kvd, d);
	uint64_t number = sim->next_number + 3 - sim_below(d, 12);
	unsigned int type = types[sim_below(d, ARRAY_LEN(types))];
	struct wire_header header = {.type = (uint16_t)type};
	struct cursor body;
	uint8_t buf[512];
	size_t len =
		write_stranger(d, number, engine->cache.pool, type, buf, sizeof(buf));

	if (!remote || !sim_has_ticket(number) || len == 0)
		return;
	cursor_read(&body, buf, len);
	note_message(kvd, type, &body);
	if (real.on_message(kvd, remote, &header, &body) < 0)
		err_clear();
}
