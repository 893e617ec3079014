/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection's life cycle (net.h).
 *
 * Every fault only marks the peer (net_peer_fail): nothing ends inside the callback that
 * found it. From then on it is not live, takes nothing in and starts nothing; its step,
 * which is called soon, ends it. While messages can be sent, it passes through FLUSHING:
 * transfers stop, the last answers and BYE with the reason are sent. In ENDING the
 * backend revokes all access to memory (queue pairs, endpoints, threads). Only when that
 * is proven are the transfers over, the state is ENDED, and the daemon is notified, after
 * the done callback of every transfer.
 */
#include "daemon/transport/net.h"

#include <assert.h>
#include <inttypes.h>
#include <sched.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "daemon/base/log.h"
#include "daemon/config/config.h"

const struct sm_state net_peer_states[NET_PEER_STATES] = {
	[NET_PEER_OPENING] = {"opening", SM_TO(NET_PEER_JOINING) | SM_TO(NET_PEER_READY) |
						 SM_TO(NET_PEER_ENDING)},
	[NET_PEER_JOINING] = {"joining", SM_TO(NET_PEER_READY) | SM_TO(NET_PEER_ENDING)},
	[NET_PEER_READY] = {"ready", SM_TO(NET_PEER_FLUSHING) | SM_TO(NET_PEER_ENDING)},
	[NET_PEER_FLUSHING] = {"flushing", SM_TO(NET_PEER_ENDING)},
	[NET_PEER_ENDING] = {"ending", SM_TO(NET_PEER_ENDED)},
	[NET_PEER_ENDED] = {"ended", 0},
};

/* ---- the transport ---- */

/* Those that are kicked meanwhile wait for the next round. */
void net_run(struct net_transport *net)
{
	struct list batch, *link;

	list_init(&batch);
	while ((link = list_pop_front(&net->ready)))
		list_push_back(&batch, link);
	while ((link = list_pop_front(&batch))) {
		net->ops->step(list_entry(link, struct net_peer, ready_link));
		if (list_empty(&batch) || !loop_enough(net->base.env.loop))
			continue;
		while ((link = list_pop_front(&batch)))
			list_push_back(&net->ready, link);
	}
	if (list_empty(&net->ready))
		loop_defer_cancel(&net->run);
	else
		loop_defer(net->base.env.loop, &net->run);
}

static void on_flush(struct loop_defer *defer)
{
	struct net_transport *net = container_of(defer, struct net_transport, flush);
	struct list *link;

	while ((link = list_pop_front(&net->unflushed))) {
		struct net_peer *peer = list_entry(link, struct net_peer, flush_link);

		net->ops->flush(peer);
		if (!list_empty(&peer->queued)) /* there may be space for it now */
			net_peer_kick(peer);
		if (!list_empty(&net->unflushed) && loop_enough(net->base.env.loop)) {
			loop_defer(net->base.env.loop, defer);
			return;
		}
	}
	loop_defer_cancel(defer); /* a flush has flushed its own peer */
}

static void on_run(struct loop_defer *defer)
{
	net_run(container_of(defer, struct net_transport, run));
}

void net_init(struct net_transport *net, const struct net_ops *ops,
	      const struct transport_ops *base, const struct xp_env *env,
	      const struct xp_callbacks *callbacks)
{
	assert(ops->step && ops->peer_free && ops->is_over);
	net->base.ops = base;
	net->base.env = *env;
	net->base.callbacks = *callbacks;
	net->ops = ops;
	net->fence_ns = env->config->fence_timeout_ns;
	list_init(&net->peers);
	list_init(&net->ready);
	list_init(&net->unflushed);
	loop_defer_init(&net->run, on_run);
	loop_defer_init(&net->flush, on_flush);
	net->flush.rank = LOOP_TO_PEER;
}

void net_settle(struct net_transport *net)
{
	while (atomic_load(&net->releasing))
		sched_yield();
}

void net_fini(struct net_transport *net)
{
	assert(list_empty(&net->peers));
	loop_defer_cancel(&net->run);
	loop_defer_cancel(&net->flush);
}

/* ---- loss ---- */

void net_peer_kick(struct net_peer *peer)
{
	struct net_transport *net = peer->transport;

	if (list_empty(&peer->ready_link))
		list_push_back(&net->ready, &peer->ready_link);
	loop_defer(net->base.env.loop, &net->run);
}

void net_peer_flush_soon(struct net_peer *peer)
{
	struct net_transport *net = peer->transport;

	if (list_empty(&peer->flush_link))
		list_push_back(&net->unflushed, &peer->flush_link);
	loop_defer(net->base.env.loop, &net->flush);
}

void net_peer_fail(struct net_peer *peer, const struct err *err)
{
	assert(err->code != ERR_OK);
	if (!peer->failed) {
		peer->failed = true;
		peer->err = *err;
	}
	net_peer_kick(peer);
}

void net_peer_fail_last(struct net_peer *peer)
{
	struct err err;

	err_take(&err);
	err.scope = ERR_SCOPE_PEER;
	net_peer_fail(peer, &err);
}

/* ---- deadlines ---- */

void net_peer_watch(struct net_peer *peer, uint64_t deadline_ns)
{
	uint64_t now = loop_now_ns(peer->timer.loop);

	if (loop_timer_running(&peer->timer) && peer->timer.at_ns <= deadline_ns)
		return;
	loop_timer_start(&peer->timer, deadline_ns > now ? deadline_ns - now : 0);
}

bool net_peer_watch_fences(struct net_peer *peer, uint64_t now)
{
	uint64_t next = UINT64_MAX;
	struct net_xfer *xfer;
	struct err err;

	list_foreach(xfer, &peer->xfers, link) {
		if (sm_state(&xfer->sm) != NET_XFER_STOPPING || xfer->finishing)
			continue;
		if (xfer->deadline_ns <= now) {
			err_set(&err, ERR_FENCE,
				"%s: a stopped transfer with %s was not quiesced after "
				"%" PRIu64 " ms; closing the connection",
				net_name(peer), peer->name,
				peer->transport->fence_ns / LOOP_NS_PER_MS);
			net_peer_fail(peer, &err);
			return true;
		}
		if (xfer->deadline_ns < next)
			next = xfer->deadline_ns;
	}
	if (next != UINT64_MAX)
		net_peer_watch(peer, next);
	return false;
}

/* ---- a life ---- */

uint64_t net_connect_ns(const struct config *config, uint64_t most_ns)
{
	uint64_t part_ns = config->connect_timeout_ns / 3;

	return part_ns < most_ns ? part_ns : most_ns;
}

void net_peer_init(struct net_peer *peer, struct net_transport *net,
		   const struct xp_peer_args *args,
		   void (*on_timer)(struct loop_timer *timer))
{
	assert(net->ops);
	peer->base.transport = &net->base;
	peer->base.owner = args->owner;
	peer->transport = net;
	memcpy(peer->token_in, args->token_in, sizeof(peer->token_in));
	memcpy(peer->token_out, args->token_out, sizeof(peer->token_out));
	hex_write(args->instance, 8, peer->name);
	peer->dial = args->dial;
	peer->account = args->account;
	account_ref(peer->account);
	peer->next_id = 1;
	list_init(&peer->link);
	list_init(&peer->ready_link);
	list_init(&peer->flush_link);
	list_init(&peer->xfers);
	list_init(&peer->queued);
	list_init(&peer->finished);
	idmap_init(&peer->ops);
	idmap_init(&peer->inbounds);
	loop_timer_init(&peer->timer, net->base.env.loop, on_timer);
	sm_init(&peer->sm, net->ops->peer_table, NET_PEER_OPENING);
}

void net_peer_fini(struct net_peer *peer)
{
	assert(list_empty(&peer->xfers));
	loop_timer_stop(&peer->timer);
	list_remove(&peer->ready_link);
	list_remove(&peer->flush_link);
	list_remove(&peer->link);
	idmap_fini(&peer->ops);
	idmap_fini(&peer->inbounds);
	charge_drop(&peer->half);
	account_unref(peer->account);
	explicit_bzero(peer->token_in, sizeof(peer->token_in));
	explicit_bzero(peer->token_out, sizeof(peer->token_out));
}

int net_peer_half(struct net_peer *peer, size_t bytes)
{
	charge_drop(&peer->half);
	if (bytes == 0)
		return 0;
	return err_pass(
		charge_parts(&peer->half, peer->account, bytes, 2 * XP_HEADER_MAX));
}

void net_peer_ready(struct net_peer *peer)
{
	const struct xp_callbacks *up = &peer->transport->base.callbacks;

	assert(sm_state(&peer->sm) == NET_PEER_READY && !peer->base.ready);
	peer->base.ready = true;
	log_debug(net_name(peer), peer->name, "peer ready", "path=\"%s\"",
		  peer->base.path);
	up->on_peer_ready(up->owner, (struct xp_peer *)peer);
}

/* Closed in peace, unless it failed before. */
static void set_closed(struct net_peer *peer)
{
	if (!peer->failed)
		err_set(&peer->err, ERR_PEER, "%s: connection to %s closed",
			net_name(peer), peer->name);
	peer->failed = true;
	peer->base.ready = false;
}

void net_peer_flush(struct net_peer *peer, uint64_t flush_ns, struct err *err_p)
{
	assert(sm_state(&peer->sm) < NET_PEER_FLUSHING && flush_ns > 0);
	err_set(err_p, ERR_PEER, "%s: the remote daemon closed the connection%s%s",
		net_name(peer), peer->failed ? ": " : "",
		peer->failed ? peer->err.text : "");
	set_closed(peer);
	sm_move(&peer->sm, NET_PEER_FLUSHING);
	net_xfers_stop(peer);
	peer->flush_deadline_ns = loop_now_ns(peer->timer.loop) + flush_ns;
	net_peer_watch(peer, peer->flush_deadline_ns);
}

void net_peer_end(struct net_peer *peer)
{
	set_closed(peer);
	sm_move(&peer->sm, NET_PEER_ENDING);
	loop_timer_stop(&peer->timer); /* fences are decided */
	if (!peer->close_asked)
		log_debug(net_name(peer), peer->name, "peer lost", "why=\"%s\"",
			  peer->err.text);
	net_xfers_stop(peer);
}

void net_peer_close_ask(struct net_peer *peer, void (*on_closed)(void *arg), void *arg)
{
	assert(on_closed);
	assert(!peer->close_asked);
	peer->close_asked = true;
	peer->on_closed = on_closed;
	peer->on_closed_arg = arg;
	net_peer_kick(peer);
}

void net_peer_settle(struct net_peer *peer)
{
	const struct xp_callbacks *up = &peer->transport->base.callbacks;
	void (*on_closed)(void *arg) = peer->on_closed;
	void *arg = peer->on_closed_arg;

	if (sm_state(&peer->sm) != NET_PEER_ENDED)
		return;
	if (peer->close_asked) {
		peer->transport->ops->peer_free(peer);
		on_closed(arg);
	} else if (!peer->told) {
		peer->told = true;
		up->on_peer_lost(up->owner, (struct xp_peer *)peer, &peer->err);
	}
}
