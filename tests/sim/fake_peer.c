/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's connections: how they come about, break and say goodbye. Their life is
 * net's.
 *
 * The side that dials finds the other by the address (node number and
 * incarnation: a node that was closed and opened again is another one) and
 * tries again until the other side has opened its peer or the time is over;
 * both check the other's token. A waiting peer hears nothing of a dialer that
 * was refused.
 *
 * A peer in trouble that can still speak says BYE with the reason, and ends when that
 * had time to leave. A broken connection tells both ends, each after a delay. Letting
 * go of memory takes its time (profile.done_max_ns): until then what is under way to
 * an end that is lost still lands; from then on it is thrown away, its queue pair is
 * dead.
 *
 * A frozen node's peers take no step until it thaws. Those of a dead one take the
 * steps of peer_close() only, so that the caller can tear it down.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "tests/sim/fake_impl.h"

#define ADDRESS_MAGIC UINT32_C(0x65646f6e) /* "node" */
#define FLUSH_NS (250 * LOOP_NS_PER_MS)

static bool fake_peer_invariant(const struct sm *sm, unsigned int from)
{
	const struct fake_peer *peer = container_of(sm, const struct fake_peer, net.sm);

	(void)from;
	return sm_state(sm) != NET_PEER_ENDED ||
	       (peer->idle && list_empty(&peer->net.xfers));
}

const struct sm_table fake_peer_table = {
	.name = "fake peer",
	.states = net_peer_states,
	.count = NET_PEER_STATES,
	.invariant = fake_peer_invariant,
};

void fake_address_put(const struct fake_node *node, struct cursor *out)
{
	cursor_put_u32(out, ADDRESS_MAGIC);
	cursor_put_u32(out, node->id);
	cursor_put_u64(out, node->incarnation);
}

/* ---- loss ---- */

void fake_conn_unref(struct fake_conn *conn)
{
	if (--conn->refs == 0)
		mem_free(conn);
}

static void fake_peer_lose(struct fake_peer *peer, uint64_t after_ns, enum err_code code,
			   const char *words)
{
	struct fake_hub *hub = peer->node->hub;

	if (!net_peer_live(&peer->net) || fake_event_queued(&peer->lost))
		return;
	err_set(&peer->why, code, "fake: %s", words);
	fake_event_at(hub, &peer->lost, loop_now_ns(hub->loop) + after_ns, NULL,
		      peer->node);
}

static void on_lost(struct fake_event *event, bool dropped)
{
	struct fake_peer *peer = container_of(event, struct fake_peer, lost);

	if (dropped)
		return;
	peer->net.broken = true;
	net_peer_fail(&peer->net, &peer->why);
}

void fake_conn_break(struct fake_conn *conn, uint64_t after_ns, enum err_code code,
		     const char *words)
{
	conn->broken = true;
	for (unsigned int end = 0; end < 2; end++) {
		struct fake_peer *peer = conn->peer[end];

		if (peer && (end == 0 || peer != conn->peer[0]))
			fake_peer_lose(peer,
				       after_ns + fake_delay(conn->hub, conn->node[!end],
							     conn->node[end]),
				       code, words);
	}
}

/* ---- connecting ---- */

static void fake_peer_attach(struct fake_peer *peer, struct fake_conn *conn,
			     unsigned int end, uint64_t at_ns)
{
	peer->conn = conn;
	peer->end = end;
	conn->peer[end] = peer;
	conn->node[end] = peer->node;
	conn->refs++;
	fake_event_at(peer->node->hub, &peer->ready, at_ns, NULL, peer->node);
}

/* `b` may be `a`. Requests arrive after the later of the two is ready. */
static int fake_peers_join(struct fake_peer *a, struct fake_peer *b)
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
	list_init(&conn->stuck);
	for (unsigned int end = 0; end < 2; end++) {
		conn->request_ns[end] = later_ns;
		conn->any_ns[end] = later_ns;
	}
	fake_peer_attach(a, conn, 0, at_ns[0]);
	if (b != a) {
		fake_peer_attach(b, conn, 1, at_ns[1]);
	} else {
		conn->peer[1] = a;
		conn->node[1] = a->node;
	}
	return 0;
}

static void on_ready(struct fake_event *event, bool dropped)
{
	struct fake_peer *peer = container_of(event, struct fake_peer, ready);
	struct fake_node *node = peer->node;

	if (dropped || !net_peer_live(&peer->net))
		return;
	snprintf(peer->net.base.path, sizeof(peer->net.base.path), "fake n%u-n%u",
		 node->id, fake_remote(peer)->id);
	sm_move(&peer->net.sm, NET_PEER_READY);
	fake_trace(node->hub, node, fake_remote(peer), 0, "ready", 0);
	net_peer_ready(&peer->net);
}

/* Does the waiting peer know this dialer? */
static bool tokens_match(const struct fake_peer *waiting, const struct fake_peer *dialer)
{
	if (waiting->node->hub->bug == FAKE_BUG_TOKEN_UNCHECKED)
		return true;
	return memcmp(waiting->net.token_in, dialer->net.token_out, XP_TOKEN_BYTES) ==
		       0 &&
	       memcmp(waiting->net.token_out, dialer->net.token_in, XP_TOKEN_BYTES) == 0;
}

static struct fake_node *dial_target(struct fake_peer *peer)
{
	struct fake_hub *hub = peer->node->hub;
	struct fake_node *node = idmap_get(&hub->nodes, peer->dial_node);
	struct fake_pair *pair;

	if (!node || node->incarnation != peer->dial_incarnation)
		return NULL;
	pair = fake_pair_find(hub, peer->node, node);
	return node->dead || node->frozen || (pair && pair->down) ? NULL : node;
}

/* The peer at the target that waits for this one. */
static struct fake_peer *dial_find(struct fake_peer *peer, bool *refused_p)
{
	struct fake_node *target = dial_target(peer);
	struct fake_peer *other;

	*refused_p = false;
	if (!target)
		return NULL;
	list_foreach(other, &target->net.peers, net.link) {
		if (other->net.dial || other->self || other->conn ||
		    !net_peer_live(&other->net))
			continue;
		if (tokens_match(other, peer))
			return other;
		*refused_p = true;
	}
	return NULL;
}

/* One try of a dial; the other side may not have opened its peer yet. */
static void on_connect(struct fake_event *event, bool dropped)
{
	struct fake_peer *peer = container_of(event, struct fake_peer, connect), *other;
	struct fake_hub *hub = peer->node->hub;
	uint64_t now_ns = loop_now_ns(hub->loop);
	bool refused = false;

	if (dropped || !net_peer_live(&peer->net))
		return;
	other = peer->self ? peer : dial_find(peer, &refused);
	if (other) {
		if (fake_peers_join(peer, other) < 0)
			fake_peer_lose(peer, 0, ERR_NOMEM, "no memory to connect");
	} else if (now_ns < peer->dial_until_ns) {
		fake_event_at(hub, event, now_ns + hub->profile.connect_ns + 1, NULL,
			      peer->node);
	} else if (refused) {
		fake_peer_lose(peer, 0, ERR_AUTH, "the remote refused the token");
	} else {
		fake_peer_lose(peer, 0, ERR_TRANSPORT, "nobody answers at the address");
	}
}

/* ---- the end ---- */

static void on_let_go(struct fake_event *event, bool dropped)
{
	struct fake_peer *peer = container_of(event, struct fake_peer, let_go);
	struct net_xfer *xfer;

	if (dropped)
		return;
	peer->idle = true;
	list_foreach(xfer, &peer->net.xfers, link)
		net_xfer_check(xfer);
	net_peer_kick(&peer->net);
}

static void fake_peer_begin_end(struct fake_peer *peer)
{
	struct fake_hub *hub = peer->node->hub;

	fake_event_remove(&peer->connect);
	fake_event_remove(&peer->ready);
	fake_event_remove(&peer->lost);
	fake_event_remove(&peer->flushed);
	net_peer_end(&peer->net);
	/* to NULL: closing does not wait for a node that is frozen or dead */
	fake_event_at(hub, &peer->let_go,
		      loop_now_ns(hub->loop) +
			      fake_between(hub, 0, hub->profile.done_max_ns),
		      NULL, NULL);
	if (peer->conn && peer->bye && !peer->net.bye_came) /* without a word */
		fake_conn_break(peer->conn, 0, ERR_PEER,
				"the remote closed the connection");
}

static void fake_peer_begin_flush(struct fake_peer *peer)
{
	struct fake_conn *conn = peer->conn;
	struct fake_hub *hub = conn->hub;
	struct err err;

	net_peer_flush(&peer->net, FLUSH_NS, &err);
	if (!peer->net.bye_came)
		fake_frame_send(peer, mem_steal(peer->bye), FAKE_FRAME_BYE, 0, &err,
				&conn->any_ns[!peer->end]);
	fake_event_at(hub, &peer->flushed,
		      loop_now_ns(hub->loop) +
			      fake_delay(hub, peer->node, fake_remote(peer)),
		      NULL, NULL);
}

static void on_flushed(struct fake_event *event, bool dropped)
{
	struct fake_peer *peer = container_of(event, struct fake_peer, flushed);

	if (!dropped)
		net_peer_kick(&peer->net);
}

static bool can_speak(const struct fake_peer *peer)
{
	return sm_state(&peer->net.sm) == NET_PEER_READY && !peer->net.broken &&
	       !peer->conn->broken && !peer->node->dead && !peer->node->frozen;
}

static void fake_peer_end(struct fake_peer *peer)
{
	if (can_speak(peer))
		fake_peer_begin_flush(peer);
	else
		fake_peer_begin_end(peer);
}

/* Its last words may be under way for longer than this took. */
static bool is_flushed(const struct fake_peer *peer)
{
	return !fake_event_queued(&peer->flushed) ||
	       loop_now_ns(peer->net.timer.loop) >= peer->net.flush_deadline_ns;
}

static void end_step(struct fake_peer *peer)
{
	struct fake_hub *hub = peer->node->hub;
	struct net_peer *net = &peer->net;

	net_xfers_drop(net);
	if (!list_empty(&net->xfers) || !peer->idle)
		return;
	fake_keys_end(peer);
	sm_move(&net->sm, NET_PEER_ENDED);
	if (net->close_asked)
		return;
	hub->stats.lost++;
	fake_trace(hub, peer->node, NULL, 0, "lost", net->err.code);
}

void fake_peer_step(struct net_peer *net)
{
	struct fake_peer *peer = fake_peer_of(net);

	if ((peer->node->dead || peer->node->frozen) && !net->close_asked)
		return;
	if (net->failed && sm_state(&net->sm) < NET_PEER_FLUSHING)
		fake_peer_end(peer);
	net_peer_tell(net);
	if (fake_peer_works(peer))
		net_xfer_pump(net);
	if (sm_state(&net->sm) == NET_PEER_FLUSHING && is_flushed(peer))
		fake_peer_begin_end(peer);
	if (sm_state(&net->sm) == NET_PEER_ENDING)
		end_step(peer);
	net_peer_settle(net);
}

static void fake_peer_on_timer(struct loop_timer *timer)
{
	struct fake_peer *peer = container_of(timer, struct fake_peer, net.timer);

	if (peer->node->dead || (peer->node->frozen && !peer->net.close_asked))
		return;
	if (net_peer_live(&peer->net))
		(void)net_peer_watch_fences(&peer->net, loop_now_ns(timer->loop));
	else
		net_peer_kick(&peer->net);
}

void fake_peer_thaw(struct fake_peer *peer)
{
	net_peer_watch(&peer->net, 0);
	net_peer_kick(&peer->net);
}

/* ---- open and close ---- */

void fake_peer_free(struct net_peer *net)
{
	struct fake_peer *peer = fake_peer_of(net);
	struct fake_conn *conn = peer->conn;

	fake_event_remove(&peer->connect);
	fake_event_remove(&peer->ready);
	fake_event_remove(&peer->lost);
	fake_event_remove(&peer->flushed);
	fake_event_remove(&peer->let_go);
	fake_keys_detach(peer);
	net_peer_fini(net);
	fake_frame_free(peer->bye);
	if (conn) {
		fake_stuck_drop(conn);
		conn->peer[peer->end] = NULL;
		if (peer->self)
			conn->peer[1] = NULL;
		fake_conn_unref(conn);
	}
	mem_free(peer);
}

void fake_peer_close(struct xp_peer *base, void (*on_closed)(void *arg), void *arg)
{
	struct fake_peer *peer = (struct fake_peer *)base;

	net_peer_close_ask(&peer->net, on_closed, arg);
	if (net_peer_live(&peer->net))
		fake_peer_end(peer);
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

static void fake_peer_init(struct fake_peer *peer, struct fake_node *node,
			   const struct xp_peer_args *args)
{
	net_peer_init(&peer->net, &node->net, args, fake_peer_on_timer);
	peer->node = node;
	peer->self = args->self;
	list_init(&peer->keys);
	fake_event_init(&peer->connect, on_connect);
	fake_event_init(&peer->ready, on_ready);
	fake_event_init(&peer->lost, on_lost);
	fake_event_init(&peer->flushed, on_flushed);
	fake_event_init(&peer->let_go, on_let_go);
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
	fake_peer_init(peer, node, args);
	if (!args->self)
		r = address_parse(peer, args->address, args->address_len);
	if (r == 0)
		r = fake_frame_new(&peer->bye);
	if (r < 0) {
		fake_peer_free(&peer->net);
		return err_pass(r);
	}
	list_push_back(&node->net.peers, &peer->net.link);
	peer->dial_until_ns = now_ns + node->hub->profile.connect_try_ns;
	if (args->dial || args->self)
		fake_event_at(node->hub, &peer->connect,
			      now_ns + node->hub->profile.connect_ns, NULL, node);
	*peer_p = (struct xp_peer *)peer;
	return 0;
}
