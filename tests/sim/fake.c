/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's world: the hub and its events, and nodes.
 *
 * Everything that takes time is an event in one list of the hub, ordered by
 * (time, order of making) and driven by one loop timer. That is what makes a
 * run repeatable, and what lets a test stop the world at a node: a dead node
 * drops its events, a frozen one keeps them in their order until it thaws, a
 * link that is down keeps what would pass it. Events are embedded in the
 * objects they are about, so nothing but the making of objects allocates, and
 * a fake under memory pressure fails where a real backend would: in post(),
 * mem_reg(), key_unpack(), peer_open().
 *
 * Two fake peers (fake_peer.c) meet in a fake_conn, which outlives both as long
 * as messages or slices of it are under way. Whatever arrives looks up
 * conn->peer[end] and is dropped when nobody lives there.
 */
#include "tests/sim/fake.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/cursor.h"
#include "daemon/base/mem.h"
#include "tests/sim/fake_impl.h"

static _Thread_local struct list hubs;

/* ---- events ---- */

static void hub_arm(struct fake_hub *hub)
{
	struct fake_event *first = list_first(&hub->events, struct fake_event, link);
	uint64_t now_ns = loop_now_ns(hub->loop);

	if (!first) {
		loop_timer_stop(&hub->timer);
		return;
	}
	loop_timer_start(&hub->timer, first->at_ns > now_ns ? first->at_ns - now_ns : 0);
}

static struct list *hubs_of_thread(void)
{
	if (!hubs.next)
		list_init(&hubs);
	return &hubs;
}

static bool event_before(const struct fake_event *a, const struct fake_event *b)
{
	return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

static void event_insert(struct fake_hub *hub, struct fake_event *event)
{
	/* most go behind the one before them */
	struct list *at = hub->last ? &hub->last->link : hub->events.prev;

	while (at->next != &hub->events &&
	       !event_before(event, list_entry(at->next, struct fake_event, link)))
		at = at->next;
	while (at != &hub->events &&
	       event_before(event, list_entry(at, struct fake_event, link)))
		at = at->prev;
	list_insert_between(&event->link, at, at->next);
	hub->last = event;
	if (at == &hub->events)
		hub_arm(hub);
}

void fake_event_init(struct fake_event *event,
		     void (*run)(struct fake_event *event, bool dropped))
{
	list_init(&event->link);
	event->run = run;
}

void fake_event_at(struct fake_hub *hub, struct fake_event *event, uint64_t at_ns,
		   struct fake_node *from, struct fake_node *to)
{
	assert(!fake_event_queued(event));
	event->at_ns = at_ns;
	event->order = ++hub->next_order;
	event->from = from;
	event->to = to;
	event_insert(hub, event);
}

static void event_take(struct fake_hub *hub, struct fake_event *event)
{
	if (hub->last == event)
		hub->last = NULL;
	list_remove(&event->link);
}

void fake_event_remove(struct fake_event *event)
{
	struct fake_hub *hub;

	list_foreach(hub, hubs_of_thread(), link) {
		if (hub->last == event)
			hub->last = NULL;
	}
	list_remove(&event->link);
}

struct fake_pair *fake_pair_find(struct fake_hub *hub, const struct fake_node *from,
				 const struct fake_node *to)
{
	struct fake_pair *pair;

	list_foreach(pair, &hub->pairs, link) {
		if (pair->from == from && pair->to == to)
			return pair;
	}
	return NULL;
}

static struct fake_pair *pair_get(struct fake_hub *hub, const struct fake_node *from,
				  const struct fake_node *to)
{
	struct fake_pair *pair = fake_pair_find(hub, from, to);

	if (pair)
		return pair;
	pair = mem_zalloc(sizeof(*pair));
	if (!pair)
		return NULL;
	pair->from = from;
	pair->to = to;
	list_push_back(&hub->pairs, &pair->link);
	return pair;
}

static bool event_held(struct fake_hub *hub, const struct fake_event *event)
{
	struct fake_pair *pair;

	if (!event->to)
		return false;
	if (event->to->frozen)
		return true;
	pair = event->from ? fake_pair_find(hub, event->from, event->to) : NULL;
	return pair && pair->down;
}

static void on_hub_timer(struct loop_timer *timer)
{
	struct fake_hub *hub = container_of(timer, struct fake_hub, timer);
	uint64_t batch = hub->next_order, now_ns = loop_now_ns(hub->loop);
	struct fake_event *event;

	while ((event = list_first(&hub->events, struct fake_event, link)) &&
	       event->at_ns <= now_ns && event->order <= batch) {
		event_take(hub, event);
		if (event->to && event->to->dead)
			event->run(event, true);
		else if (event_held(hub, event))
			list_push_back(&hub->held, &event->link);
		else
			event->run(event, false);
	}
	hub_arm(hub);
}

/* What was held may pass again; it keeps its time and so its place. */
static void hub_release_held(struct fake_hub *hub)
{
	struct list again;
	struct fake_event *event;

	list_init(&again);
	list_foreach_safe(event, &hub->held, link) {
		if (event_held(hub, event))
			continue;
		list_remove(&event->link);
		list_push_back(&again, &event->link);
	}
	while ((event = list_first(&again, struct fake_event, link))) {
		list_remove(&event->link);
		event_insert(hub, event);
	}
}

static struct fake_event *event_of_node(struct list *list, const struct fake_node *node)
{
	struct fake_event *event;

	list_foreach(event, list, link) {
		if (!node || event->to == node)
			return event;
	}
	return NULL;
}

/* A node goes away (NULL: all): nothing may name it any more. */
static void events_forget(struct fake_hub *hub, const struct fake_node *node)
{
	struct list *const lists[] = {&hub->events, &hub->held};

	for (size_t i = 0; i < ARRAY_LEN(lists); i++) {
		struct fake_event *event;

		/* dropping one may remove others */
		while ((event = event_of_node(lists[i], node))) {
			event_take(hub, event);
			event->run(event, true);
		}
		list_foreach(event, lists[i], link) {
			if (event->from == node)
				event->from = NULL;
		}
	}
}

/* ---- the hub ---- */

static const struct fake_profile default_profile = {
	.delay_min_ns = 5000,
	.delay_max_ns = 50000,
	.done_max_ns = 20000,
	.connect_ns = 100000,
	.connect_try_ns = LOOP_NS_PER_S,
	.detect_ns = 50 * LOOP_NS_PER_MS,
	.slice_ns = 1000,
	.slice_bytes = 4096,
	.window = 8,
	.reorder = true,
};

int fake_hub_new(struct loop *loop, uint64_t seed, struct fake_hub **hub_p)
{
	struct fake_hub *hub = mem_zalloc(sizeof(*hub));

	if (!hub)
		return err_pass(-ENOMEM);
	hub->loop = loop;
	hub->rng = seed;
	hub->profile = default_profile;
	hub->digest = UINT64_C(0xcbf29ce484222325);
	list_init(&hub->pairs);
	list_init(&hub->rules);
	idmap_init(&hub->nodes);
	list_init(&hub->events);
	list_init(&hub->held);
	list_init(&hub->regs);
	loop_timer_init(&hub->timer, loop, on_hub_timer);
	pthread_mutex_init(&hub->regs_lock, NULL);
	list_push_back(hubs_of_thread(), &hub->link);
	*hub_p = hub;
	return 0;
}

void fake_hub_free(struct fake_hub *hub)
{
	struct fake_pair *pair;

	if (!hub)
		return;
	assert(idmap_count(&hub->nodes) == 0);
	idmap_fini(&hub->nodes);
	events_forget(hub, NULL);
	loop_timer_stop(&hub->timer);
	fake_script_clear(hub);
	list_foreach_safe(pair, &hub->pairs, link)
		mem_free(pair);
	assert(list_empty(&hub->regs) && hub->xfers == 0);
	pthread_mutex_destroy(&hub->regs_lock);
	list_remove(&hub->link);
	mem_free(hub);
}

struct fake_profile *fake_hub_profile(struct fake_hub *hub)
{
	return &hub->profile;
}

struct fake_profile *fake_profile_of(struct fake_hub *hub, const struct fake_node *from,
				     const struct fake_node *to)
{
	struct fake_pair *pair = fake_pair_find(hub, from, to);

	return pair && pair->has_profile ? &pair->profile : &hub->profile;
}

uint64_t fake_delay(struct fake_hub *hub, const struct fake_node *from,
		    const struct fake_node *to)
{
	const struct fake_profile *profile = fake_profile_of(hub, from, to);

	return fake_between(hub, profile->delay_min_ns, profile->delay_max_ns);
}

struct fake_profile *fake_pair_profile(struct fake_hub *hub, const struct transport *from,
				       const struct transport *to)
{
	struct fake_pair *pair = pair_get(hub, fake_node_of(from), fake_node_of(to));

	if (!pair)
		return NULL;
	if (!pair->has_profile)
		pair->profile = hub->profile;
	pair->has_profile = true;
	return &pair->profile;
}

struct transport *fake_hub_node(struct fake_hub *hub, unsigned int n)
{
	struct idmap_cursor it;

	idmap_foreach(&hub->nodes, it) {
		if (n-- == 0)
			return &((struct fake_node *)it.value)->net.base;
	}
	return NULL;
}

bool fake_hub_quiet(const struct fake_hub *hub)
{
	return hub->xfers == 0 && list_empty(&hub->events) && list_empty(&hub->held);
}

const struct fake_stats *fake_hub_stats(const struct fake_hub *hub)
{
	return &hub->stats;
}

/* ---- nodes ---- */

static int fake_probe(const struct config *config, uint32_t *caps_p)
{
	(void)config;
	*caps_p = XP_CAP_SELF;
	return 0;
}

static int fake_open(const struct xp_env *env, const struct xp_callbacks *callbacks,
		     struct transport **transport_p)
{
	struct fake_hub *hub = NULL, *it;
	struct fake_node *node;
	struct cursor address;

	list_foreach(it, hubs_of_thread(), link) {
		if (it->loop == env->loop)
			hub = it;
	}
	if (!hub)
		return err_raise(ERR_REQUIRE, "transport fake: no hub on this loop");
	node = mem_zalloc(sizeof(*node));
	if (!node || idmap_put(&hub->nodes, hub->next_node, node) < 0) {
		mem_free(node);
		return err_pass(-ENOMEM);
	}
	net_init(&node->net, &fake_net_ops, &fake_ops, env, callbacks);
	fake_probe(env->config, &node->net.base.caps);
	node->hub = hub;
	node->id = hub->next_node++;
	node->incarnation = fake_rand(hub);
	cursor_write(&address, node->net.base.address, sizeof(node->net.base.address));
	fake_address_put(node, &address);
	node->net.base.address_len = address.pos;
	*transport_p = &node->net.base;
	return 0;
}

static void fake_close(struct transport *transport)
{
	struct fake_node *node = fake_node_of(transport);
	struct fake_hub *hub = node->hub;
	struct fake_pair *pair;

	net_fini(&node->net);
	events_forget(hub, node);
	fake_script_forget(hub, node);
	list_foreach_safe(pair, &hub->pairs, link) {
		if (pair->from == node || pair->to == node) {
			list_remove(&pair->link);
			mem_free(pair);
		}
	}
	idmap_remove(&hub->nodes, node->id);
	hub_release_held(hub);
	mem_free(node);
}

void fake_node_vanish(struct transport *transport)
{
	struct fake_node *node = fake_node_of(transport);
	struct fake_peer *peer;

	if (node->dead)
		return;
	fake_trace(node->hub, node, NULL, 0, "vanish", 0);
	node->dead = true;
	node->frozen = false;
	list_foreach(peer, &node->net.peers, net.link) {
		if (peer->conn && !peer->self)
			fake_conn_break(peer->conn, node->hub->profile.detect_ns,
					ERR_PEER, "the remote daemon is gone");
	}
	hub_release_held(node->hub);
}

void fake_node_freeze(struct transport *transport, bool frozen)
{
	struct fake_node *node = fake_node_of(transport);
	struct fake_peer *peer;

	fake_trace(node->hub, node, NULL, 0, frozen ? "freeze" : "thaw", 0);
	if (node->frozen == frozen)
		return;
	node->frozen = frozen;
	if (frozen)
		return;
	hub_release_held(node->hub);
	list_foreach(peer, &node->net.peers, net.link)
		fake_peer_thaw(peer);
}

void fake_link_cut(struct transport *a, struct transport *b)
{
	struct fake_node *node = fake_node_of(a);
	struct fake_peer *peer;

	fake_trace(node->hub, node, fake_node_of(b), 0, "cut", 0);
	list_foreach(peer, &node->net.peers, net.link) {
		if (peer->conn && !peer->self &&
		    peer->conn->node[!peer->end] == fake_node_of(b))
			fake_conn_break(peer->conn, 0, ERR_PEER, "the connection broke");
	}
}

void fake_link_down(struct transport *a, struct transport *b, bool down)
{
	struct fake_node *ends[2] = {fake_node_of(a), fake_node_of(b)};
	struct fake_hub *hub = ends[0]->hub;

	fake_trace(hub, ends[0], ends[1], 0, down ? "down" : "up", 0);
	for (unsigned int i = 0; i < 2; i++) {
		struct fake_pair *pair = pair_get(hub, ends[i], ends[!i]);

		assert(pair); /* a test without 500 bytes cannot go on */
		pair->down = down;
	}
	if (!down)
		hub_release_held(hub);
}

const struct transport_ops fake_ops = {
	.name = "fake",
	.probe = fake_probe,
	.open = fake_open,
	.close = fake_close,
	.mem_reg = fake_mem_reg,
	.mem_dereg = fake_mem_dereg,
	.key_pack = fake_key_pack,
	.key_unpack = fake_key_unpack,
	.key_drop = fake_key_drop,
	.peer_open = fake_peer_open,
	.peer_close = fake_peer_close,
	.post = fake_post,
	.land = net_land,
	.cancel = net_cancel,
	.revoke = net_revoke,
};
