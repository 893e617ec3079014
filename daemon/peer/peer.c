/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peer objects and the calls of the layers above.
 *
 * A peer is one object for one endpoint, from the first dial or HELLO until it is not
 * held and not up. Its state is written in peer_life.c only (except in peers_close):
 *
 *   DIALING  an attempt is being made, by us (dialled) or towards us
 *   UP       `cur` is proven; a new attempt may run in `next`
 *   DOWN     held; redialled if this side dialled it
 *
 * A peer known only by a HELLO is unauthenticated: it is in a small
 * separate table, in which the newest replaces the oldest (peer_hello.c), and counts for
 * the option `peers` when it has proven itself. Daemons that an engine dials count at
 * once. So one engine, and one user, may have only a share of unreachable ones, and an
 * eighth of all is reserved for incoming peers.
 *
 * Objects are freed by deferred work, so a pointer lives as long as the turn, whatever a
 * callback does to the object. Each look-up has a table whose entries are part of the
 * objects: a lack of memory cannot prevent a peer from coming up.
 */
#include "daemon/peer/peer_impl.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/hex.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"

static const struct peers_options defaults = {
	.ping_interval_ns = 200 * LOOP_NS_PER_MS,
	.dead_after_ns = 800 * LOOP_NS_PER_MS,
	.peers_max = 1024,
	.message_bytes = WIRE_FRAME_MAX,
	.part_bytes = PEER_PART_BYTES,
	.queue_bytes = 8u << 20,
	.hello_retry_ns = 50 * LOOP_NS_PER_MS,
	.redial_max_ns = 2 * LOOP_NS_PER_S,
	.accept_ttl_ns = 5 * LOOP_NS_PER_S,
	.idle_after_ns = 30 * LOOP_NS_PER_S,
	.hello_rate = 256, /* a daemon needs one; a name may be shared by many */
	.unauthenticated_max = 64,
	.unauthenticated_user_max = 16,
};

void peers_options_default(struct peers_options *options)
{
	*options = defaults;
}

static void options_from_config(struct peers_options *options,
				const struct config *config)
{
	*options = defaults;
	options->ping_interval_ns = config->ping_interval_ns;
	options->dead_after_ns = config->dead_after_ns;
	options->peers_max = config->peers_max;
	options->message_bytes = config->peer_message_bytes;
	options->part_bytes = config->peer_part_bytes;
	if (options->message_bytes > WIRE_FRAME_MAX)
		options->message_bytes = WIRE_FRAME_MAX;
	if (options->queue_bytes < 4 * options->message_bytes)
		options->queue_bytes = 4 * options->message_bytes;
}

static void peer_destroy(struct peer_impl *impl)
{
	struct peers *peers = impl->peers;

	peer_past_add(impl);
	peer_queue_drop(impl);
	peer_whole_drop(impl);
	peer_express_end(impl);
	peering_end(&impl->cur);
	peering_end(&impl->next);
	peer_addresses_free(impl->peer.addresses, &impl->peer.address_count);
	loop_timer_stop(&impl->tick);
	loop_defer_cancel(&impl->later);
	peer_hang_up(impl);
	list_remove(&impl->peer.link);
	list_remove(&impl->named.link);
	list_remove(&impl->by_instance);
	list_remove(&impl->reaped);
	peer_reached(impl);
	peers->count--;
	peers->unauthenticated -= impl->unauthenticated;
	peers->in_state[sm_state(&impl->peer.sm)]--;
	if (peers->self == impl)
		peers->self = NULL;
	mem_free(impl);
}

void peer_reap_later(struct peer_impl *impl)
{
	list_remove(&impl->reaped);
	list_push_back(&impl->peers->reaped, &impl->reaped);
	loop_work_defer(&impl->peers->reap);
}

static bool reap_step(struct loop_work *work)
{
	struct peers *peers = container_of(work, struct peers, reap);
	struct peer_impl *impl = list_first(&peers->reaped, struct peer_impl, reaped);

	if (!impl)
		return false;
	list_remove(&impl->reaped);
	if (sm_state(&impl->peer.sm) != PEER_UP && !impl->peer.holds && !impl->next.live)
		peer_destroy(impl);
	return true;
}

/* ---- objects ---- */

static const struct sm_state peer_states[] = {
	[PEER_DIALING] = {"dialing", SM_TO(PEER_UP) | SM_TO(PEER_DOWN)},
	[PEER_UP] = {"up", SM_TO(PEER_DOWN)},
	[PEER_DOWN] = {"down", SM_TO(PEER_DIALING) | SM_TO(PEER_UP)},
};
static const struct sm_table peer_table = {
	.name = "peer", .states = peer_states, .count = ARRAY_LEN(peer_states)};

int peer_check_room(const struct peers *peers)
{
	unsigned int known = peers->count - peers->unauthenticated;

	if (known < peers->options.peers_max)
		return 0;
	return err_raise(ERR_LIMIT, "%u peers are known (limit %u, option peers)", known,
			 peers->options.peers_max);
}

void peer_acquaint(struct peer_impl *impl)
{
	impl->peers->unauthenticated -= impl->unauthenticated;
	impl->unauthenticated = false;
	list_remove(&impl->waits);
}

static void peer_name_init(struct peer_name *name, struct peer_impl *owner,
			   const char *endpoint)
{
	list_init(&name->link);
	name->owner = owner;
	name->endpoint = endpoint;
}

void peer_name_put(struct peer_name *name)
{
	list_remove(&name->link);
	list_push_back(peer_bucket(name->owner->peers->endpoints, name->endpoint,
				   strlen(name->endpoint)),
		       &name->link);
}

int peer_create(struct peers *peers, const char *endpoint, struct peer_impl **impl_p)
{
	struct peer_impl *impl;
	char user[LINK_USER_MAX];

	assert(endpoint && *endpoint);
	impl = mem_zalloc(sizeof(*impl));
	if (!impl)
		return err_pass(-ENOMEM);
	impl->line_owner.kind = LINE_PEER;
	impl->peers = peers;
	impl->peer.impl = impl;
	sm_init(&impl->peer.sm, &peer_table, PEER_DIALING);
	peers->in_state[PEER_DIALING]++;
	snprintf(impl->peer.endpoint, sizeof(impl->peer.endpoint), "%s", endpoint);
	if (!peers->link->ops->name ||
	    !peers->link->ops->name(peers->link, endpoint, user))
		*user = '\0';
	peer_show(&impl->peer, user);
	impl->peer.since_ns = loop_now_ns(peers->loop);
	impl->retry_ns = peers->options.hello_retry_ns;
	list_init(&impl->queue);
	list_init(&impl->early_express);
	list_init(&impl->early_control);
	list_init(&impl->cur.link);
	list_init(&impl->next.link);
	list_init(&impl->cur.by_nonce);
	list_init(&impl->next.by_nonce);
	list_init(&impl->by_instance);
	list_init(&impl->waits);
	list_init(&impl->reaped);
	list_init(&impl->dials);
	peer_name_init(&impl->named, impl, impl->peer.endpoint);
	peer_name_init(&impl->said, impl, impl->cur.endpoint);
	peer_name_put(&impl->named);
	loop_timer_init(&impl->tick, peers->loop, peer_on_tick);
	loop_timer_init(&impl->flush, peers->loop, peer_on_flush);
	loop_defer_init(&impl->later, peer_on_later);
	list_push_back(&peers->all, &impl->peer.link);
	peers->count++;
	peer_past_take(&impl->peer);
	*impl_p = impl;
	return 0;
}

void peer_move(struct peer_impl *impl, enum peer_state to)
{
	unsigned int *in_state = impl->peers->in_state;

	in_state[sm_state(&impl->peer.sm)]--;
	sm_move(&impl->peer.sm, to);
	in_state[to]++;
	list_remove(&impl->by_instance);
	if (to == PEER_UP)
		list_push_back(peer_bucket(impl->peers->instances, impl->peer.instance,
					   sizeof(impl->peer.instance)),
			       &impl->by_instance);
}

unsigned int peers_in(const struct peers *peers, enum peer_state state)
{
	return peers->in_state[state];
}

void peer_show(struct peer *peer, const char *user)
{
	snprintf(peer->known_as, sizeof(peer->known_as), "%s", user);
	snprintf(peer->shown, sizeof(peer->shown), "%s%s%.*s", peer->known_as,
		 *user ? " " : "", (int)strcspn(peer->endpoint, "#"), peer->endpoint);
}

struct peer_impl *peer_find_endpoint(struct peers *peers, const char *endpoint)
{
	struct peer_name *name;
	struct list *bucket;

	bucket = peer_bucket(peers->endpoints, endpoint, strlen(endpoint));
	list_foreach(name, bucket, link) { /* at most 64, about: a bucket */
		if (strcmp(name->endpoint, endpoint) == 0)
			return name->owner;
	}
	return NULL;
}

/* Dial, or soon if it has just failed. */
static void start_dial(struct peer_impl *impl)
{
	struct peers *peers = impl->peers;
	uint64_t soon_ns = peers->options.hello_retry_ns;
	uint64_t now_ns = loop_now_ns(peers->loop);

	if (peers->self == impl) {
		loop_defer(peers->loop, &impl->later);
		return;
	}
	if (sm_state(&impl->peer.sm) == PEER_DOWN) {
		if (!loop_timer_running(&impl->tick) ||
		    impl->tick.at_ns > now_ns + soon_ns)
			peer_tick_in(impl, soon_ns);
		return;
	}
	if (!impl->next.live)
		peering_begin(impl);
	peer_dial_later(impl);
	loop_timer_start(&impl->tick, soon_ns);
}

int peer_canonical(struct peers *peers, const char *endpoint,
		   char canonical_p[LINK_ENDPOINT_MAX])
{
	int r;

	if (peers->link->ops->canonical)
		return err_pass(
			peers->link->ops->canonical(peers->link, endpoint, canonical_p));
	r = endpoint_check(endpoint);
	if (r < 0)
		return err_pass(r);
	snprintf(canonical_p, LINK_ENDPOINT_MAX, "%s", endpoint);
	return 0;
}

void peer_respell(struct peer_impl *impl)
{
	struct peers *peers = impl->peers;
	char name[LINK_ENDPOINT_MAX], user[LINK_USER_MAX];

	if (!peers->link->ops->name || strchr(impl->peer.endpoint, '#'))
		return;
	if (peer_canonical(peers, impl->peer.endpoint, name) < 0) {
		err_clear();
		return;
	}
	if (strcmp(name, impl->peer.endpoint) == 0 || peer_find_endpoint(peers, name))
		return;
	snprintf(impl->peer.endpoint, sizeof(impl->peer.endpoint), "%s", name);
	peer_name_put(&impl->named);
	if (peers->link->ops->name(peers->link, name, user))
		peer_show(&impl->peer, user);
	peer_hang_up(impl);
}

/* A map's values are counts. */
static unsigned int unreached_of(const struct idmap *map, uint64_t key)
{
	return (unsigned int)(uintptr_t)idmap_get(map, key);
}

static int unreached_add(struct idmap *map, uint64_t key)
{
	uintptr_t n = unreached_of(map, key);

	if (idmap_swap(map, key, (void *)(n + 1)))
		return 0;
	return err_pass(idmap_put(map, key, (void *)(n + 1)));
}

static void unreached_drop(struct idmap *map, uint64_t key)
{
	uintptr_t n = unreached_of(map, key);

	assert(n > 0);
	if (n == 1)
		idmap_remove(map, key);
	else
		idmap_swap(map, key, (void *)(n - 1));
}

/* It was dialled and was never up: it counts in all, for the client's user, and for
 * its session. Recent dials count, too: otherwise one burst could exceed the share. */
static int peer_unreached(struct peer_impl *impl, const struct peer_client *client)
{
	struct peers *peers = impl->peers;
	int r = client ? unreached_add(&peers->users, client->uid) : 0;

	if (r == 0 && client) {
		r = unreached_add(&peers->sessions, client->session);
		if (r < 0)
			unreached_drop(&peers->users, client->uid);
	}
	if (r < 0)
		return err_pass(r);
	peers->unreached++;
	impl->unreached = true;
	impl->for_client = client != NULL;
	if (client)
		impl->client = *client;
	return 0;
}

void peer_reached(struct peer_impl *impl)
{
	struct peers *peers = impl->peers;

	if (!impl->unreached)
		return;
	impl->unreached = false;
	peers->unreached--;
	if (!impl->for_client)
		return;
	unreached_drop(&peers->users, impl->client.uid);
	unreached_drop(&peers->sessions, impl->client.session);
}

/* Is one more allowed? An eighth of all is reserved for daemons that dial us; of the
 * rest a user has half, and one session a quarter of that. */
static int check_share(const struct peers *peers, const struct peer_client *client)
{
	const unsigned int max = peers->options.peers_max, all = max - max / 8;
	const unsigned int user = (all + 1) / 2, session = (user + 3) / 4;
	unsigned int of_user = client ? unreached_of(&peers->users, client->uid) : 0;
	unsigned int of_session =
		client ? unreached_of(&peers->sessions, client->session) : 0;

	/* the last eighth is reserved for users with few */
	if (peers->unreached < all && of_user < user && of_session < session &&
	    (peers->unreached < all - all / 8 || of_user < all / 32 + 1))
		return 0;
	return err_raise(ERR_LIMIT,
			 "too many unreachable peers: %u for this session (limit %u), "
			 "%u for its user (limit %u), %u in all (limit %u, of option "
			 "peers)",
			 of_session, session, of_user, user, peers->unreached, all);
}

static int create_dialled(struct peers *peers, const char *name,
			  const struct peer_client *client, struct peer_impl **impl_p)
{
	int r = peer_check_room(peers);

	if (r == 0)
		r = check_share(peers, client);
	if (r == 0)
		r = peer_create(peers, name, impl_p);
	if (r < 0)
		return err_pass(r);
	r = peer_unreached(*impl_p, client);
	if (r < 0) {
		peer_destroy(*impl_p);
		return err_pass(r);
	}
	if (!peers->self && strcmp(name, peers->link->endpoint) == 0)
		peer_become_self(*impl_p);
	return 0;
}

/* A HELLO may have named it before. */
static int take_known(struct peer_impl *impl)
{
	int r = impl->unauthenticated ? peer_check_room(impl->peers) : 0;

	if (r == 0)
		peer_acquaint(impl);
	return err_pass(r);
}

int peers_dial(struct peers *peers, const char *endpoint,
	       const struct peer_client *client, struct peer **peer_p)
{
	char name[LINK_ENDPOINT_MAX];
	struct peer_impl *impl;
	int r;

	if (peers->closing)
		return err_raise(ERR_DRAIN, "the daemon is shutting down");
	r = peer_canonical(peers, endpoint, name);
	if (r < 0)
		return err_pass(r);
	impl = peer_find_endpoint(peers, name);
	r = impl ? take_known(impl) : create_dialled(peers, name, client, &impl);
	if (r < 0)
		return err_pass(r);
	impl->dialled = impl->wanted = true;
	impl->peer.holds++;
	if (sm_state(&impl->peer.sm) != PEER_UP)
		start_dial(impl);
	*peer_p = &impl->peer;
	return 0;
}

void peer_hold(struct peer *peer)
{
	peer->holds++;
}

void peer_release(struct peer *peer)
{
	struct peer_impl *impl = impl_of(peer);

	assert(peer->holds > 0);
	if (--peer->holds || sm_state(&peer->sm) == PEER_UP)
		return; /* the tick ends it when it stays idle */
	impl->dialled = false;
	if (!impl->next.heard) {
		peering_end(&impl->next);
		peer_hang_up(impl);
	}
	peer_plan_next(impl);
}

struct peer *peers_by_instance(struct peers *peers, const uint8_t instance[16])
{
	struct list *bucket = peer_bucket(peers->instances, instance, 16);
	struct peer_impl *impl;

	list_foreach(impl, bucket, by_instance) { /* at most 64, about: a bucket */
		if (memcmp(impl->peer.instance, instance, 16) == 0)
			return &impl->peer;
	}
	return NULL;
}

void peer_end_later(struct peer *peer, const struct err *why)
{
	assert(why->code != ERR_OK);
	peer_mark_down(impl_of(peer), why);
}

void peer_kill(struct peer *peer, const struct err *why)
{
	struct peer_impl *impl = impl_of(peer);

	assert(why->code != ERR_OK);
	if (sm_state(&peer->sm) == PEER_UP)
		peer_bring_down(impl, why, true);
	else if (sm_state(&peer->sm) == PEER_DIALING)
		peer_attempt_failed(impl, why);
}

/* ---- all of them ---- */

int peers_new(const struct peers_args *args, struct peers **peers_p)
{
	struct peers *peers = mem_zalloc(sizeof(*peers));
	int r;

	assert(args->loop && args->link && args->callbacks);
	assert(args->address_count <= TRANSPORTS_MAX);
	if (!peers)
		return err_pass(-ENOMEM);
	peers->loop = args->loop;
	peers->link = args->link;
	peers->callbacks = *args->callbacks;
	peers->features = PEER_FEATURE_BASE | args->features;
	if (args->options)
		peers->options = *args->options;
	else
		options_from_config(&peers->options, args->config);
	snprintf(peers->name, sizeof(peers->name), "%s", args->name);
	memcpy(peers->boot_id, args->boot_id, sizeof(peers->boot_id));
	loop_random(peers->loop, peers->instance, sizeof(peers->instance));
	hex_write(peers->instance, sizeof(peers->instance), peers->instance_text);
	list_init(&peers->all);
	list_init(&peers->past);
	list_init(&peers->waiting);
	list_init(&peers->reaped);
	list_init(&peers->dials);
	for (unsigned int i = 0; i < PEER_BUCKETS; i++) {
		list_init(&peers->epochs[i]);
		list_init(&peers->nonces[i]);
		list_init(&peers->endpoints[i]);
		list_init(&peers->instances[i]);
	}
	for (unsigned int i = 0; i < PEER_REFUSALS_MAX; i++)
		peers->refusals[i].line_owner.kind = LINE_REFUSAL;
	loop_timer_init(&peers->refusal_timer, peers->loop, peer_on_refusal_timer);
	loop_work_init(&peers->reap, peers->loop, reap_step, NULL);
	loop_work_init(&peers->dial, peers->loop, peer_dial_step, NULL);
	peers->frame = mem_alloc(peers->options.message_bytes);
	if (peers->frame) /* touched now, not in a turn of the loop */
		memset(peers->frame, 1, peers->options.message_bytes);
	peers->part = mem_zalloc(peer_part_bytes(peers) + PEER_PART_HEAD);
	r = peers->frame && peers->part
		    ? peer_addresses_encode(peers, args->addresses, args->address_count)
		    : -ENOMEM;
	if (r < 0) {
		peers_free(peers);
		return err_pass(r);
	}
	peers->link->owner = peers;
	peers->link->on_frame = peer_on_frame;
	peers->link->on_line = peer_on_line;
	peers->link->on_diagnosis = peer_on_diagnosis;
	*peers_p = peers;
	return 0;
}

void peers_reload(struct peers *peers, const struct config *config)
{
	peers->options.ping_interval_ns = config->ping_interval_ns;
	peers->options.dead_after_ns = config->dead_after_ns;
}

/* ERR_AUTH. One that was dialled here may be at any host, as when it was dialled. */
static int peer_recheck(struct peer_impl *impl)
{
	struct link *link = impl->peers->link;
	const struct peering *peering = impl->cur.live ? &impl->cur : &impl->next;
	int r = link->ops->recheck(link, impl->peer.endpoint,
				   peering->live && peering->heard ? peering->user : "",
				   !impl->dialled);

	return r < 0 ? err_prefix(r, "peer %s", impl->peer.shown) : 0;
}

unsigned int peers_recheck(struct peers *peers)
{
	unsigned int ended = 0;
	struct peer *peer;
	struct err why;

	list_foreach(peer, &peers->all, link) {
		struct peer_impl *impl = impl_of(peer);

		if (peer->self || !peers->link->ops->recheck || peer_recheck(impl) == 0)
			continue;
		err_take(&why);
		ended += sm_state(&peer->sm) == PEER_UP;
		if (sm_state(&peer->sm) == PEER_UP)
			peer_end_later(peer, &why);
		else if (impl->next.live)
			peer_attempt_failed(impl, &why);
	}
	return ended;
}

void peers_close(struct peers *peers, enum err_code code, const char *text)
{
	struct peer *peer;
	struct err why;

	assert(code != ERR_OK);
	if (peers->closing)
		return;
	peers->closing = true;
	err_set(&why, code, "%s", text);
	peer_refusals_close(peers);
	/* objects are freed later: callbacks cannot break this loop */
	list_foreach(peer, &peers->all, link) {
		struct peer_impl *impl = impl_of(peer);

		peer_reap_later(impl);
		peering_end(&impl->next);
		if (sm_state(&peer->sm) == PEER_UP) {
			peer_bring_down(impl, &why, true);
			continue;
		}
		if (sm_state(&peer->sm) != PEER_DOWN)
			peer_move(impl, PEER_DOWN);
		peer->why = why;
		loop_timer_stop(&impl->tick);
		loop_defer_cancel(&impl->later);
		peer_hang_up(impl);
	}
}

void peers_free(struct peers *peers)
{
	struct peer *peer;

	if (!peers)
		return;
	list_foreach_safe(peer, &peers->all, link)
		peer_destroy(impl_of(peer));
	peer_past_free(peers);
	peer_refusals_close(peers);
	loop_work_stop(&peers->reap);
	loop_work_stop(&peers->dial);
	idmap_fini(&peers->users);
	idmap_fini(&peers->sessions);
	if (peers->link->owner == peers) {
		peers->link->owner = NULL;
		peers->link->on_frame = NULL;
		peers->link->on_line = NULL;
		peers->link->on_diagnosis = NULL;
	}
	mem_free(peers->addresses);
	mem_free(peers->frame);
	mem_free(peers->part);
	mem_free(peers);
}

const uint8_t *peers_instance(const struct peers *peers)
{
	return peers->instance;
}
