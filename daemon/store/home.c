/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index contains notes only. A connection keeps their order and loses none, or the
 * peering ends and with it all of the holder's entries. So the sum of all notes is the
 * same on both sides unless one of them has a fault. If it differs, or if notes were
 * refused for lack of space and there is some now, the holder is asked for a full
 * resynchronization. A holder can also start one itself.
 *
 * Entries under an old number of a holder are swept out before it gets a third one, so
 * the table cannot be filled with dead entries. A false note costs a daemon that trusts
 * it one useless query: the daemon it names reports its real contents.
 *
 * Memory is allocated with the first note.
 */
#include "daemon/store/home.h"

#include <errno.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/handshake/handshake.h"
#include "daemon/store/home_table.h"
#include "daemon/store/homes_impl.h"
#include "daemon/store/store_impl.h"

#define FOUND_HOLDERS_MAX 64u /* of one answer */

struct home_peer {
	struct remote *remote;
	unsigned int number; /* of the table; 0: none */
	unsigned int old[2]; /* earlier ones; their entries are swept out, or will be */
	uint64_t count, sum; /* of its notes */
	uint64_t refused;    /* of those: refused for lack of space, or dropped since */
};

struct home {
	struct store *store;
	struct home_table *table; /* NULL: no note yet */
	struct idmap peers;	  /* struct home_peer by remote */
	struct loop_defer sweep;
	struct store_home figures; /* counters; home_figures() adds the others */
};

static void on_sweep(struct loop_defer *defer)
{
	struct home *home = container_of(defer, struct home, sweep);

	if (home_table_sweep(home->table))
		loop_defer(home->store->kvd->loop, &home->sweep);
}

int home_new(struct store *store, struct home **home_p)
{
	struct home *home = mem_zalloc(sizeof(*home));

	*home_p = home;
	if (!home)
		return err_pass(-ENOMEM);
	home->store = store;
	idmap_init(&home->peers);
	loop_defer_init(&home->sweep, on_sweep);
	return 0;
}

void home_free(struct home *home)
{
	struct idmap_cursor it;

	if (!home)
		return;
	idmap_foreach(&home->peers, it)
		mem_free(it.value);
	idmap_fini(&home->peers);
	loop_defer_cancel(&home->sweep);
	home_table_free(home->table);
	mem_free(home);
}

/* ---- holders ---- */

static struct home_peer *peer_of(const struct home *home, const struct remote *remote)
{
	return idmap_get(&home->peers, (uintptr_t)remote);
}

static int peer_make(struct home *home, struct remote *remote, struct home_peer **peer_p)
{
	const struct store *store = home->store;
	struct home_peer *peer;
	int r = 0;

	if (!home->table)
		r = home_table_new(store->kvd->config->chunk_index_bytes,
				   loop_random_u64(store->kvd->loop), &home->table);
	if (r < 0)
		return err_pass(r);
	peer = mem_zalloc(sizeof(*peer));
	if (!peer)
		return err_pass(-ENOMEM);
	peer->remote = remote;
	r = idmap_put(&home->peers, (uintptr_t)remote, peer);
	if (r < 0) {
		mem_free(peer);
		return err_pass(r);
	}
	peer->number = home_holder_new(home->table, peer);
	*peer_p = peer;
	return 0;
}

static void peer_forget(struct home *home, struct home_peer *peer)
{
	if (!peer->number)
		return;
	home_holder_drop(home->table, peer->number);
	loop_defer(home->store->kvd->loop, &home->sweep);
	peer->old[1] = peer->old[0];
	peer->old[0] = peer->number;
	peer->number = 0;
}

/* It resynchronizes. If its entries of the time before last are still being swept out,
 * its notes are ignored until it is asked for all again. */
static void peer_anew(struct home *home, struct home_peer *peer)
{
	bool swept = !home_holder_count(home->table, peer->old[0]) &&
		     !home_holder_count(home->table, peer->old[1]);

	peer_forget(home, peer);
	peer->count = peer->sum = peer->refused = 0;
	if (swept) /* so two old numbers are the most */
		peer->number = home_holder_new(home->table, peer);
}

void home_on_down(struct home *home, const struct remote *remote)
{
	struct home_peer *peer = peer_of(home, remote);

	if (!peer)
		return;
	peer_forget(home, peer);
	idmap_remove(&home->peers, (uintptr_t)remote);
	mem_free(peer);
}

/* ---- INDEX_UPDATE, INDEX_DIGEST ---- */

static void note_take(struct home *home, struct home_peer *peer,
		      const struct home_key *key, bool put)
{
	peer->count += put ? 1 : UINT64_MAX;
	peer->sum ^= home_key_mix(key);
	home->figures.notes++;
	if (!peer->number)
		return;
	if (!put) {
		home_table_remove(home->table, peer->number, key);
	} else if (home_table_put(home->table, peer->number, key) == HOME_FULL) {
		peer->refused++;
		home->figures.refused++;
	}
}

static int on_note(struct home *home, struct remote *remote, struct cursor *body)
{
	struct home_peer *peer = peer_of(home, remote);
	struct wire_index_update msg;
	struct cursor in;
	int r = wire_index_update_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (msg.notes.len % 16 || msg.notes.len / 16 > HOMES_NOTES_MAX)
		return err_raise(ERR_PROTO, "INDEX_UPDATE: %zu bytes of notes",
				 msg.notes.len);
	if (!peer && peer_make(home, remote, &peer) < 0) {
		err_clear(); /* the next digest will show that it is missing */
		return 0;
	}
	if (msg.anew)
		peer_anew(home, peer);
	cursor_read(&in, msg.notes.data, msg.notes.len);
	while (cursor_left(&in)) {
		struct home_key key = {.id = cursor_get_u64(&in)};
		uint64_t space = cursor_get_u64(&in);

		key.space = space & HOME_SPACE_MASK;
		note_take(home, peer, &key, space & HOMES_PUT);
	}
	return 0;
}

/* How many of its chunks were refused and still exist, as far as known: some of the
 * missing ones have enough other holders. */
static uint64_t peer_unknown(const struct home *home, const struct home_peer *peer)
{
	uint64_t here = home_holder_count(home->table, peer->number);
	uint64_t gone = peer->count > here ? peer->count - here : 0;

	return gone < peer->refused ? gone : peer->refused;
}

/* Refused entries may fit now. */
static bool has_room_again(const struct home *home, const struct home_peer *peer)
{
	uint64_t unknown = peer_unknown(home, peer);
	struct home_figures f;

	if (!unknown)
		return false;
	home_table_figures(home->table, &f);
	return f.used + unknown < f.most / 8 * 7 &&
	       home_holder_count(home->table, peer->number) + unknown < f.most / 2;
}

bool home_wants_all(struct home *home, const struct remote *remote,
		    const struct wire_index_digest *msg)
{
	const struct home_peer *peer = peer_of(home, remote);
	const struct home_peer none = {.count = 0};
	bool all;

	if (!peer)
		peer = &none;
	all = peer->count != msg->count || peer->sum != msg->sum ||
	      (peer != &none && (!peer->number || has_room_again(home, peer)));
	home->figures.again += all;
	return all;
}

static int on_sum(struct home *home, struct remote *remote, struct cursor *body)
{
	struct wire_index_digest_ack ack;
	struct wire_index_digest msg;
	int r = wire_index_digest_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	ack.again = HOMES_NO_INDEX;
	if (home)
		ack.again =
			home_wants_all(home, remote, &msg) ? HOMES_TELL_ALL : HOMES_SAME;
	return err_pass(handshake_send_index_digest_ack(remote, &ack));
}

/* ---- INDEX_QUERY ---- */

struct home_found {
	struct cursor holders, ids;
	const struct home_peer *list[FOUND_HOLDERS_MAX];
	unsigned int count;
};

/* Its index in the reply's list; -1: not included. */
static int found_index(struct home_found *found, const struct home_peer *peer,
		       const struct kvd *kvd)
{
	const struct peer *at = peer->remote->peer;
	const char *endpoint = at->self ? kvd->link->endpoint : at->endpoint;

	for (unsigned int i = 0; i < found->count; i++) {
		if (found->list[i] == peer)
			return (int)i;
	}
	if (found->count == FOUND_HOLDERS_MAX || !*endpoint)
		return -1;
	cursor_put_str(&found->holders, endpoint);
	found->list[found->count] = peer;
	return (int)found->count++;
}

static void found_id(struct home *home, const struct remote *requester,
		     const struct home_key *key, struct home_found *found)
{
	uint8_t index[HOMES_HOLDERS_MAX], count = 0;
	void *owners[HOMES_HOLDERS_MAX];
	unsigned int n =
		home_table_find(home->table, key, loop_random_u64(home->store->kvd->loop),
				owners, HOMES_HOLDERS_MAX);

	for (unsigned int i = 0; i < n; i++) {
		const struct home_peer *peer = owners[i];
		int at = peer->remote == requester
				 ? -1
				 : found_index(found, peer, home->store->kvd);

		if (at >= 0)
			index[count++] = (uint8_t)at;
	}
	cursor_put_u8(&found->ids, count);
	cursor_put_bytes(&found->ids, index, count);
}

int home_found(struct home *home, const struct remote *requester,
	       const struct wire_index_query *msg, struct cursor *out)
{
	uint8_t holders[FOUND_HOLDERS_MAX * (LINK_ENDPOINT_MAX + 2)];
	uint8_t ids[HOMES_PROBES_MAX * (1 + HOMES_HOLDERS_MAX)];
	struct home_found found = {.count = 0};
	struct cursor in;

	if (msg->ids.len % 8 || msg->ids.len / 8 > HOMES_PROBES_MAX)
		return err_raise(ERR_PROTO, "INDEX_QUERY: %zu bytes of ids",
				 msg->ids.len);
	home->figures.finds++;
	cursor_write(&found.holders, holders, sizeof(holders));
	cursor_write(&found.ids, ids, sizeof(ids));
	cursor_read(&in, msg->ids.data, msg->ids.len);
	while (cursor_left(&in)) {
		const struct home_key key = {.id = cursor_get_u64(&in),
					     .space = msg->space & HOME_SPACE_MASK};

		if (home->table)
			found_id(home, requester, &key, &found);
		else
			cursor_put_u8(&found.ids, 0);
	}
	cursor_put_u32(out, found.count);
	cursor_put_bytes(out, holders, found.holders.pos);
	cursor_put_bytes(out, ids, found.ids.pos);
	return err_pass(cursor_check(out, "INDEX_REPLY"));
}

static int on_find(struct home *home, struct remote *remote, struct cursor *body)
{
	uint8_t bytes[HOME_FOUND_BYTES_MAX];
	struct wire_index_reply answer;
	struct wire_index_query msg;
	struct cursor out;
	int r = wire_index_query_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	cursor_write(&out, bytes, sizeof(bytes));
	if (home)
		r = home_found(home, remote, &msg, &out);
	if (r < 0)
		return err_pass(r);
	answer.ask = msg.ask;
	answer.holders.data = bytes;
	answer.holders.len = out.pos;
	return err_pass(handshake_send_index_reply(remote, &answer));
}

int home_on_message(struct home *home, struct remote *remote, const struct wire_header *h,
		    struct cursor *body)
{
	int r;

	if (h->type == WIRE_T_INDEX_UPDATE)
		return home ? err_pass(on_note(home, remote, body)) : 0;
	r = h->type == WIRE_T_INDEX_DIGEST ? on_sum(home, remote, body)
					   : on_find(home, remote, body);
	if (r >= 0 || err_last()->code == ERR_PROTO)
		return err_pass(r);
	err_clear(); /* it does not read replies: they are lost, or it disconnects */
	return 0;
}

void home_figures(const struct home *home, struct store_home *figures_p)
{
	struct home_figures f = {.bytes = 0};
	struct idmap_cursor it;
	uint64_t unknown = 0;

	*figures_p = (struct store_home){0};
	if (!home)
		return;
	if (home->table)
		home_table_figures(home->table, &f);
	idmap_foreach(&home->peers, it)
		unknown += peer_unknown(home, it.value);
	*figures_p = home->figures;
	figures_p->bytes = f.bytes;
	figures_p->most = f.most;
	figures_p->used = f.used;
	figures_p->holders = f.holders;
	figures_p->unknown = unknown;
}
