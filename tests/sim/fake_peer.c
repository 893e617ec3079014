/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's peers: keys, dialing, loss and closing.
 *
 * The side that dials finds the other by the address (node number and
 * incarnation: a node that was closed and opened again is another one) and
 * tries again until the other side has opened its peer or the time is over;
 * both check the other's token. A waiting peer hears nothing of a dialer that
 * was refused.
 *
 * Two ways end a peer. Loss: every op and inbound gets its done, then
 * on_peer_lost() is called, and the peer waits for peer_close(). Closing: an
 * event does the same without on_peer_lost(), tells the other end, frees the
 * peer and calls on_closed(). Either may happen inside the callbacks of the
 * other, so both look at `closing` and `lost_told` again after each callback.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/cursor.h"
#include "daemon/base/mem.h"
#include "tests/sim/fake_impl.h"

#define ADDRESS_MAGIC UINT32_C(0x65646f6e) /* "node" */
#define KEY_MAGIC UINT32_C(0x2079656b)	   /* "key " */
#define KEY_BYTES 24u

void fake_address_put(const struct fake_node *node, struct cursor *out)
{
	cursor_put_u32(out, ADDRESS_MAGIC);
	cursor_put_u32(out, node->id);
	cursor_put_u64(out, node->incarnation);
}

int fake_key_pack(struct xp_reg *xreg, struct xp_peer *peer, void *buf, size_t size,
		  size_t *len_p)
{
	struct fake_reg *reg = fake_reg_of(xreg);
	struct fake_node *node = fake_node_of(reg->base.transport);
	struct cursor out;

	(void)peer;
	cursor_write(&out, buf, size);
	cursor_put_u32(&out, KEY_MAGIC);
	cursor_put_u32(&out, node->id);
	cursor_put_u64(&out, node->incarnation);
	cursor_put_u64(&out, reg->id);
	*len_p = out.pos;
	return cursor_check(&out, "fake key");
}

/* The memory of a registration at this node, with a reference, or NULL. */
static struct memory *reg_memory(struct fake_hub *hub, const struct fake_node *node,
				 uint64_t id)
{
	struct memory *memory = NULL;
	struct fake_reg *reg;

	pthread_mutex_lock(&hub->regs_lock);
	list_foreach(reg, &hub->regs, link) {
		if (reg->id == id && reg->node == node->id)
			memory = memory_ref(reg->base.memory);
	}
	pthread_mutex_unlock(&hub->regs_lock);
	return memory;
}

static void on_key_usable(struct fake_event *event, bool dropped)
{
	struct fake_key *key = container_of(event, struct fake_key, usable);
	struct fake_peer *peer;

	if (dropped)
		return;
	peer = fake_peer_of(key->base.peer);
	key->base.ready = true;
	peer->node->base.callbacks.on_key(peer->node->base.callbacks.owner,
					  (struct xp_key *)(void *)key, NULL);
}

static int key_new(struct fake_peer *peer, struct memory *memory, void *owner,
		   struct xp_key **key_p)
{
	struct fake_hub *hub = peer->node->hub;
	uint64_t key_ns = hub->profile.key_ns;
	struct fake_key *key = mem_zalloc(sizeof(*key));

	if (!key)
		return err_pass(-ENOMEM);
	key->base = (struct xp_key_base){
		.peer = fake_peer_base(peer), .ready = key_ns == 0, .owner = owner};
	key->memory = memory;
	list_init(&key->usable.link);
	key->usable.run = on_key_usable;
	list_push_back(&peer->keys, &key->link);
	if (key_ns)
		fake_event_at(hub, &key->usable, loop_now_ns(hub->loop) + key_ns, NULL,
			      peer->node);
	*key_p = (struct xp_key *)(void *)key;
	return 0;
}

int fake_key_unpack(struct xp_peer *xpeer, const void *buf, size_t len, void *owner,
		    struct xp_key **key_p)
{
	struct fake_peer *peer = fake_peer_of(xpeer);
	struct fake_node *remote;
	struct memory *memory;
	struct cursor in;

	if (peer->state != FAKE_READY || peer->closing)
		return err_raise(ERR_STATE, "fake key: the peer is not connected");
	if (fake_fault_local(peer->node->hub, FAKE_NOMEM_KEY, peer->node))
		return err_raise(ERR_NOMEM, "fake: no memory for the key (scripted)");
	remote = peer->self ? peer->node : peer->conn->node[!peer->end];
	cursor_read(&in, buf, len);
	if (len != KEY_BYTES || cursor_get_u32(&in) != KEY_MAGIC)
		return err_raise(ERR_PROTO, "fake key: %zu bytes that are no key", len);
	if (remote->dead || cursor_get_u32(&in) != remote->id ||
	    cursor_get_u64(&in) != remote->incarnation)
		return err_raise(ERR_PROTO, "fake key: not a key of this peer");
	memory = reg_memory(peer->node->hub, remote, cursor_get_u64(&in));
	if (!memory)
		return err_raise(ERR_REVOKED, "fake key: the memory is not registered");
	int r = key_new(peer, memory, owner, key_p);

	if (r < 0)
		memory_unref(memory);
	return err_pass(r);
}

void fake_key_drop(struct xp_key *xkey)
{
	struct fake_key *key = fake_key_of(xkey);

	fake_event_remove(&key->usable);
	list_remove(&key->link);
	memory_unref(key->memory);
	mem_free(key);
}

static struct fake_key *key_waiting(struct fake_peer *peer)
{
	struct fake_key *key;

	list_foreach(key, &peer->keys, link) {
		if (fake_event_queued(&key->usable))
			return key;
	}
	return NULL;
}

/* The peer is lost: tell who waits for a key. */
static void keys_end(struct fake_peer *peer, const struct err *why)
{
	struct xp_callbacks *callbacks = &peer->node->base.callbacks;
	struct fake_key *key;

	while ((key = key_waiting(peer))) {
		fake_event_remove(&key->usable);
		callbacks->on_key(callbacks->owner, (struct xp_key *)(void *)key, why);
	}
}

/* ---- connections ---- */

void fake_conn_unref(struct fake_conn *conn)
{
	if (--conn->refs == 0)
		mem_free(conn);
}

static void peer_lose(struct fake_peer *peer, uint64_t after_ns, enum err_code code,
		      const char *words)
{
	struct fake_hub *hub = peer->node->hub;

	if (peer->lost_told || peer->closing || fake_event_queued(&peer->lost))
		return;
	err_set(&peer->why, code, "fake: %s", words);
	fake_event_at(hub, &peer->lost, loop_now_ns(hub->loop) + after_ns, NULL,
		      peer->node);
}

void fake_conn_break(struct fake_conn *conn, uint64_t after_ns, enum err_code code,
		     const char *words)
{
	conn->broken = true;
	for (unsigned int end = 0; end < 2; end++) {
		struct fake_peer *peer = conn->peer[end];

		if (peer && (end == 0 || peer != conn->peer[0]))
			peer_lose(peer,
				  after_ns + fake_delay(conn->hub, conn->node[!end],
							conn->node[end]),
				  code, words);
	}
}

static void peer_attach(struct fake_peer *peer, struct fake_conn *conn, unsigned int end,
			uint64_t at_ns)
{
	peer->conn = conn;
	peer->end = end;
	conn->peer[end] = peer;
	conn->node[end] = peer->node;
	conn->refs++;
	fake_event_at(peer->node->hub, &peer->ready, at_ns, NULL, peer->node);
}

/* `b` may be `a`. Requests arrive after the later of the two is ready. */
static int peers_join(struct fake_peer *a, struct fake_peer *b)
{
	struct fake_hub *hub = a->node->hub;
	uint64_t now_ns = loop_now_ns(hub->loop);
	uint64_t at_ns[2] = {now_ns + fake_delay(hub, b->node, a->node),
			     now_ns + fake_delay(hub, a->node, b->node)};
	uint64_t later_ns = at_ns[0] > at_ns[1] ? at_ns[0] : at_ns[1];
	struct fake_conn *conn = mem_zalloc(sizeof(*conn));

	if (!conn)
		return err_pass(-ENOMEM);
	conn->hub = hub;
	list_init(&conn->xfers);
	for (unsigned int end = 0; end < 2; end++) {
		conn->request_ns[end] = later_ns;
		conn->any_ns[end] = later_ns;
	}
	peer_attach(a, conn, 0, at_ns[0]);
	if (b != a) {
		peer_attach(b, conn, 1, at_ns[1]);
	} else {
		conn->peer[1] = a;
		conn->node[1] = a->node;
	}
	return 0;
}

static void on_peer_ready_event(struct fake_event *event, bool dropped)
{
	struct fake_peer *peer = container_of(event, struct fake_peer, ready);
	struct fake_node *node = peer->node;

	if (dropped || peer->closing || peer->lost_told)
		return;
	peer->state = FAKE_READY;
	peer->base.ready = true;
	snprintf(peer->base.path, sizeof(peer->base.path), "fake n%u-n%u", node->id,
		 peer->conn->node[!peer->end]->id);
	fake_trace(node->hub, node, peer->conn->node[!peer->end], 0, "ready", 0);
	node->base.callbacks.on_peer_ready(node->base.callbacks.owner,
					   fake_peer_base(peer));
}

/* Does the waiting peer know this dialer? */
static bool tokens_match(const struct fake_peer *waiting, const struct fake_peer *dialer)
{
	if (waiting->node->hub->bug == FAKE_BUG_TOKEN_UNCHECKED)
		return true;
	return memcmp(waiting->token_in, dialer->token_out, XP_TOKEN_BYTES) == 0 &&
	       memcmp(waiting->token_out, dialer->token_in, XP_TOKEN_BYTES) == 0;
}

static struct fake_node *dial_target(struct fake_peer *peer)
{
	struct fake_pair *pair;
	struct fake_node *node;

	list_foreach(node, &peer->node->hub->nodes, link) {
		if (node->id != peer->dial_node ||
		    node->incarnation != peer->dial_incarnation)
			continue;
		pair = fake_pair_find(node->hub, peer->node, node);
		return node->dead || node->frozen || (pair && pair->down) ? NULL : node;
	}
	return NULL;
}

/* One try of a dial; the other side may not have opened its peer yet. */
static void on_connect_event(struct fake_event *event, bool dropped)
{
	struct fake_peer *peer = container_of(event, struct fake_peer, connect), *other;
	struct fake_hub *hub = peer->node->hub;
	uint64_t now_ns = loop_now_ns(hub->loop);
	struct fake_node *target;
	bool refused = false;

	if (dropped || peer->closing || peer->lost_told)
		return;
	if (peer->self) {
		if (peers_join(peer, peer) < 0)
			peer_lose(peer, 0, ERR_NOMEM, "no memory to connect");
		return;
	}
	target = dial_target(peer);
	if (target) {
		list_foreach(other, &target->peers, link) {
			if (other->dial || other->self || other->conn || other->closing)
				continue;
			if (tokens_match(other, peer)) {
				if (peers_join(peer, other) < 0)
					peer_lose(peer, 0, ERR_NOMEM,
						  "no memory to connect");
				return;
			}
			refused = true;
		}
	}
	if (now_ns < peer->dial_until_ns)
		fake_event_at(hub, event, now_ns + hub->profile.connect_ns + 1, NULL,
			      peer->node);
	else if (refused)
		peer_lose(peer, 0, ERR_AUTH, "the remote refused the token");
	else
		peer_lose(peer, 0, ERR_TRANSPORT, "nobody answers at the address");
}

static void on_lost_event(struct fake_event *event, bool dropped)
{
	struct fake_peer *peer = container_of(event, struct fake_peer, lost);
	struct fake_node *node = peer->node;
	struct err why = peer->why;

	if (dropped || peer->closing)
		return;
	if (!peer->lost_told)
		fake_peer_end(peer, &why);
	keys_end(peer, &why);
	if (peer->closing)
		return; /* a callback did it: he needs no news */
	if (!peer->lost_told && node->hub->bug == FAKE_BUG_LOST_TWICE)
		fake_event_at(node->hub, event, loop_now_ns(node->hub->loop) + 1000, NULL,
			      node);
	peer->lost_told = true;
	node->hub->stats.lost++;
	fake_trace(node->hub, node, NULL, 0, "lost", why.code);
	node->base.callbacks.on_peer_lost(node->base.callbacks.owner,
					  fake_peer_base(peer), &why);
}

static void peer_free(struct fake_peer *peer)
{
	struct fake_key *key;

	fake_event_remove(&peer->connect);
	fake_event_remove(&peer->ready);
	fake_event_remove(&peer->lost);
	fake_event_remove(&peer->close);
	list_foreach_safe(key, &peer->keys, link) {
		fake_event_remove(&key->usable);
		list_remove(&key->link);
		key->base.peer = NULL;
		key->base.ready = false;
	}
	list_remove(&peer->link);
	mem_free(peer);
}

static void on_close_event(struct fake_event *event, bool dropped)
{
	struct fake_peer *peer = container_of(event, struct fake_peer, close);
	void (*on_closed)(void *arg) = peer->on_closed;
	void *arg = peer->on_closed_arg;
	struct fake_conn *conn = peer->conn;
	struct err why;

	if (dropped)
		return;
	err_set(&why, ERR_CANCELED, "fake: the peer was closed here");
	fake_peer_end(peer, &why);
	keys_end(peer, &why);
	if (conn) {
		conn->peer[peer->end] = NULL;
		if (peer->self)
			conn->peer[1] = NULL;
		fake_conn_break(conn, 0, ERR_PEER, "the remote closed the connection");
		fake_conn_unref(conn);
	}
	peer_free(peer);
	if (on_closed)
		on_closed(arg);
}

void fake_peer_close(struct xp_peer *xpeer, void (*on_closed)(void *arg), void *arg)
{
	struct fake_peer *peer = fake_peer_of(xpeer);
	struct fake_hub *hub = peer->node->hub;

	if (peer->closing)
		return;
	peer->closing = true;
	peer->on_closed = on_closed;
	peer->on_closed_arg = arg;
	/* to NULL: also a dead or frozen node's peers can be torn down */
	fake_event_at(hub, &peer->close,
		      loop_now_ns(hub->loop) +
			      fake_between(hub, 0, hub->profile.done_max_ns),
		      NULL, NULL);
}

static int address_parse(struct fake_peer *peer, const void *address, size_t len)
{
	struct cursor in;

	cursor_read(&in, address, len);
	if (cursor_get_u32(&in) != ADDRESS_MAGIC)
		return err_raise(ERR_PROTO, "fake address: not one");
	peer->dial_node = cursor_get_u32(&in);
	peer->dial_incarnation = cursor_get_u64(&in);
	return cursor_check(&in, "fake address");
}

static void peer_init(struct fake_peer *peer, struct fake_node *node,
		      const struct xp_peer_args *args)
{
	peer->base =
		(struct xp_peer_base){.transport = &node->base, .owner = args->owner};
	peer->node = node;
	peer->self = args->self;
	peer->dial = args->dial && !args->self;
	memcpy(peer->token_in, args->token_in, XP_TOKEN_BYTES);
	memcpy(peer->token_out, args->token_out, XP_TOKEN_BYTES);
	list_init(&peer->keys);
	list_init(&peer->connect.link);
	list_init(&peer->ready.link);
	list_init(&peer->lost.link);
	list_init(&peer->close.link);
	peer->connect.run = on_connect_event;
	peer->ready.run = on_peer_ready_event;
	peer->lost.run = on_lost_event;
	peer->close.run = on_close_event;
}

int fake_peer_open(struct transport *transport, const struct xp_peer_args *args,
		   struct xp_peer **peer_p)
{
	struct fake_node *node = fake_node_of(transport);
	uint64_t now_ns = loop_now_ns(node->hub->loop);
	struct fake_peer *peer;
	int r = 0;

	if (node->dead)
		return err_raise(ERR_TRANSPORT, "fake: this node is dead");
	peer = mem_zalloc(sizeof(*peer));
	if (!peer)
		return err_pass(-ENOMEM);
	peer_init(peer, node, args);
	if (!args->self)
		r = address_parse(peer, args->address, args->address_len);
	if (r < 0) {
		mem_free(peer);
		return err_pass(r);
	}
	list_push_back(&node->peers, &peer->link);
	peer->dial_until_ns = now_ns + node->hub->profile.connect_try_ns;
	if (peer->dial || peer->self)
		fake_event_at(node->hub, &peer->connect,
			      now_ns + node->hub->profile.connect_ns, NULL, node);
	*peer_p = fake_peer_base(peer);
	return 0;
}
