/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One query is sent to all, and its reply is a hold: finding first and holding afterwards
 * would cost a second round trip, and the chunks could be evicted in between. The two
 * with most chunks are kept, so that a fetch continues when one of them fails; the others
 * are released at once, and so are late ones.
 *
 * Holders that index nodes name get the same query, up to CANDIDATES_MAX. One that is not
 * a peer is dialled, if engines could name it, too, and at most DIALS_MAX of them a
 * second, for an index node may name any endpoint. It is a peer for as long as the query
 * or a hold needs it. Its reply may arrive before its pools are known, and then waits for
 * them.
 *
 * A late daemon is paused for a while (breaker.h): late with its reply to a query with
 * enough time, or with the bytes of a fetch. So one slow holder costs one fetch, and not
 * each of them. No hold waits for the trial query. A daemon without a data connection is
 * not queried: it could not send, and the fetch would wait.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/breaker.h"
#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/handshake/handshake.h"
#include "daemon/link/link.h"
#include "daemon/store/dial.h"
#include "daemon/store/far_impl.h"
#include "daemon/store/homes.h"
#include "daemon/store/store_figures.h"

#define STORES_MAX 16u
#define CANDIDATES_MAX 4u /* of those that homes name */
#define DIALS_MAX 8u	  /* a second */
#define OVER_NS (10 * LOOP_NS_PER_S)
#define SICK_MAX 32u
/* A slower reply is late. If this loop's own turn is late, it proves nothing. */
#define PATIENT_NS (200 * LOOP_NS_PER_MS)
#define LOOKUP_HEAD (8u + 16u + 8u + 8u + 4u) /* before the ids */

/* To one daemon. */
struct far_one {
	struct far_query *query;
	struct remote *remote;
	uint64_t ask;
	bool open;    /* not answered */
	bool held;    /* the remote, by this: a home named it */
	bool waiting; /* not sent yet: it is being connected, or not its turn */
	bool trial;   /* it was late before: no hold waits for it */
};

struct far_query {
	struct list link; /* in far->over */
	struct far *far;
	struct store_hold *hold; /* NULL: it is over, and counts until it is answered */
	struct store_space *space;
	struct far_one ones[STORES_MAX + CANDIDATES_MAX];
	unsigned int count, open; /* open: of these, and of `find` */
	unsigned int trials;	  /* of those that are open */
	bool patient;		  /* time enough for an answer */
	uint32_t asked;		  /* chunks */
	struct homes_query *find; /* in progress */
	struct wire_chunk_lookup msg;
	struct loop_work asking; /* of those that are ready, one a step */
	struct loop_timer timer;
	struct loop_defer done;
	void (*on_done)(void *arg);
	void *arg;
};

/* A holder that was late. */
struct far_sick {
	char endpoint[LINK_ENDPOINT_MAX];
	struct breaker breaker;
};

struct far {
	struct store *store;
	struct far_sick sick[SICK_MAX];
	unsigned int sick_count;
	struct far_store {
		char endpoint[LINK_ENDPOINT_MAX];
		struct dial dial;
	} stores[STORES_MAX];
	unsigned int count;
	struct loop_timer again; /* some could not be dialled */
	struct idmap asks;	 /* struct far_one */
	struct list over;	 /* struct far_query.link */
	unsigned int waiting;	 /* of them */
	uint64_t dials_from_ns;
	unsigned int dials; /* since then */
};

/* ---- the queried daemons ---- */

static bool far_dial(struct far *far, struct far_store *store)
{
	dial_reach(far->store, &store->dial, store->endpoint,
		   "is not queried for chunks");
	if (store->dial.later && !loop_timer_running(&far->again))
		loop_timer_start(&far->again, DIAL_AGAIN_NS);
	return store->dial.remote || store->dial.later;
}

static void on_again(struct loop_timer *timer)
{
	struct far *far = container_of(timer, struct far, again);

	for (unsigned int i = 0; i < far->count; i++) {
		if (far->stores[i].dial.later)
			far_dial(far, &far->stores[i]);
	}
}

static void far_store_add(struct far *far, const char *endpoint)
{
	struct far_store *store = &far->stores[far->count];

	if (far->count == STORES_MAX || strlen(endpoint) >= sizeof(store->endpoint)) {
		log_warn("store", endpoint, "is not queried for chunks",
			 "limit=%u why=\"limit reached or endpoint too long\"",
			 STORES_MAX);
		return;
	}
	snprintf(store->endpoint, sizeof(store->endpoint), "%s", endpoint);
	far->count += far_dial(far, store);
}

int far_new(struct store *store, struct far **far_p)
{
	char words[sizeof(store->kvd->config->chunk_peers)], *word, *state = NULL;
	struct far *far;

	*far_p = NULL;
	if (!*store->kvd->config->chunk_peers && !store->homes)
		return 0;
	far = mem_zalloc(sizeof(*far));
	if (!far)
		return err_pass(-ENOMEM);
	far->store = store;
	idmap_init(&far->asks);
	list_init(&far->over);
	loop_timer_init(&far->again, store->kvd->loop, on_again);
	snprintf(words, sizeof(words), "%s", store->kvd->config->chunk_peers);
	for (word = strtok_r(words, " ,", &state); word;
	     word = strtok_r(NULL, " ,", &state))
		far_store_add(far, word);
	*far_p = far;
	return 0;
}

/* ---- those that were late ---- */

static struct far_sick *sick_find(struct far *far, const char *endpoint)
{
	for (unsigned int i = 0; i < far->sick_count; i++) {
		if (strcmp(far->sick[i].endpoint, endpoint) == 0)
			return &far->sick[i];
	}
	return NULL;
}

/* If all are in use: replaces the one that is due first. */
static struct far_sick *sick_get(struct far *far, const char *endpoint)
{
	struct far_sick *sick = sick_find(far, endpoint);

	if (sick)
		return sick;
	if (far->sick_count < SICK_MAX) {
		sick = &far->sick[far->sick_count++];
	} else {
		sick = far->sick;
		for (unsigned int i = 1; i < SICK_MAX; i++) {
			if (far->sick[i].breaker.until_ns < sick->breaker.until_ns)
				sick = &far->sick[i];
		}
	}
	*sick = (struct far_sick){.breaker = {0}};
	snprintf(sick->endpoint, sizeof(sick->endpoint), "%s", endpoint);
	return sick;
}

static enum breaker_state far_state(struct far *far, const char *endpoint)
{
	const struct far_sick *sick = sick_find(far, endpoint);

	return sick ? breaker_state(&sick->breaker, loop_now_ns(far->store->kvd->loop))
		    : BREAKER_CLOSED;
}

bool far_is_left_out(struct far *far, const struct remote *remote)
{
	return far && far_state(far, remote->peer->endpoint) != BREAKER_CLOSED;
}

void far_late(struct far *far, const struct remote *remote, const char *what)
{
	const char *endpoint = remote->peer->endpoint;
	struct far_sick *sick;
	uint64_t now_ns;

	if (!far)
		return;
	sick = sick_get(far, endpoint);
	now_ns = loop_now_ns(far->store->kvd->loop);
	if (breaker_state(&sick->breaker, now_ns) == BREAKER_OPEN)
		return;
	breaker_trip(&sick->breaker, now_ns);
	log_info("store", endpoint, "chunk queries are paused", "seconds=%llu why=\"%s\"",
		 (unsigned long long)((sick->breaker.until_ns - now_ns) / LOOP_NS_PER_S),
		 what);
}

void far_serves(struct far *far, const struct remote *remote)
{
	struct far_sick *sick =
		far && far->sick_count ? sick_find(far, remote->peer->endpoint) : NULL;

	if (sick)
		*sick = far->sick[--far->sick_count];
}

void far_attends(const struct kvd *kvd, const struct remote *remote)
{
	struct far *far = store_of(kvd)->far;

	if (!far_is_left_out(far, remote))
		far_serves(far, remote);
}

/* A trial query was answered. The speed of its bytes is not known yet. */
static void far_answers(struct far *far, const struct remote *remote)
{
	struct far_sick *sick = sick_find(far, remote->peer->endpoint);

	if (sick)
		breaker_close(&sick->breaker);
}

static void query_free(struct far_query *query);

/* It could send chunks now. A reply names pools, so one that is asked before its pools
 * are known (POOLS) would count as having nothing. */
static bool far_ready(const struct remote *remote)
{
	return far_up(remote) && remote->ready && remote->pools.listed;
}

void far_count(const struct far *far, struct store_remote_figures *figures_p)
{
	figures_p->stores = far ? far->count : 0;
	for (unsigned int i = 0; far && i < far->count; i++)
		figures_p->up += far_ready(far->stores[i].dial.remote);
	for (unsigned int i = 0; far && i < far->sick_count; i++)
		figures_p->left_out += far->sick[i].breaker.open;
}

void far_close(struct far *far)
{
	if (!far)
		return;
	loop_timer_stop(&far->again);
	while (!list_empty(&far->over))
		query_free(list_first(&far->over, struct far_query, link));
	while (far->count > 0)
		dial_end(&far->stores[--far->count].dial);
}

void far_free(struct far *far)
{
	if (!far)
		return;
	assert(far->count == 0);
	idmap_fini(&far->asks);
	mem_free(far);
}

/* ---- asking ---- */

static void one_close(struct far_one *one)
{
	if (!one->open)
		return;
	one->query->far->waiting -= one->waiting;
	one->open = one->waiting = false;
	one->query->open--;
	one->query->trials -= one->trial;
	idmap_remove(&one->query->far->asks, one->ask);
}

static void query_free(struct far_query *query)
{
	for (unsigned int i = 0; i < query->count; i++) {
		one_close(&query->ones[i]);
		if (query->ones[i].held)
			handshake_release(query->ones[i].remote);
	}
	loop_work_stop(&query->asking);
	loop_timer_stop(&query->timer);
	loop_defer_cancel(&query->done);
	list_remove(&query->link);
	query->space->tenant->asking--;
	store_space_let_go(query->space);
	mem_free(query);
}

static void query_look(struct far_query *query)
{
	if (loop_work_running(&query->asking))
		return; /* query_asked() follows */
	if (query->open == 0 || (query->hold && query->open == query->trials))
		loop_defer(query->far->store->kvd->loop, &query->done);
}

/* The hold waits no more. The query may be in the peer's send queue: until it is answered
 * it counts, or a client that queries and cancels would fill that queue. A trial that is
 * being dialled continues until it is connected. */
void far_cancel(struct far_query *query)
{
	for (unsigned int i = 0; i < query->count; i++) {
		struct far_one *one = &query->ones[i];

		if (one->waiting && !(one->trial && !far_ready(one->remote)))
			one_close(one);
		else if (one->open && !one->waiting)
			far_release(one->remote, one->ask); /* behind the question */
	}
	if (query->find) {
		homes_query_end(mem_steal(query->find));
		query->open--;
	}
	memset(&query->msg.ids, 0, sizeof(query->msg.ids)); /* the hold's */
	query->hold = NULL;
	list_push_back(&query->far->over, &query->link);
	loop_defer_cancel(&query->done);
	loop_timer_start(&query->timer, OVER_NS);
	query_look(query);
}

static void on_query_done(struct loop_defer *defer)
{
	struct far_query *query = container_of(defer, struct far_query, done);

	if (!query->hold) {
		query_free(query);
		return;
	}
	far_cancel(query);
	query->on_done(query->arg);
}

static void on_query_late(struct loop_timer *timer)
{
	struct far_query *query = container_of(timer, struct far_query, timer);
	struct loop *loop = query->far->store->kvd->loop;
	bool judges = query->hold && query->patient &&
		      loop_now_ns(loop) < timer->at_ns + PATIENT_NS / 2;

	for (unsigned int i = 0; i < query->count && judges; i++) {
		const struct far_one *one = &query->ones[i];

		if (one->open && !one->trial)
			far_late(query->far, one->remote,
				 one->waiting ? "connecting timed out"
					      : "the query timed out");
	}
	loop_defer(loop, &query->done);
}

/* 128 KiB take most of a turn to send: in parts, from memory of its own. */
static int one_ask(struct far_one *one)
{
	struct wire_chunk_lookup *msg = &one->query->msg;
	const size_t most = LOOKUP_HEAD + msg->ids.len;
	cleanup_free uint8_t *body = NULL;
	struct cursor out;

	msg->ask = one->ask;
	one->query->far->waiting -= one->waiting;
	one->waiting = false;
	if (!peer_has_spare(one->remote->peer, most))
		return err_raise(ERR_LIMIT, "%s: its send queue is full",
				 one->remote->peer->shown);
	body = mem_alloc(most);
	if (!body)
		return err_pass(-ENOMEM);
	cursor_write(&out, body, most);
	if (wire_chunk_lookup_put(&out, msg) < 0)
		assert(!"a CHUNK_LOOKUP fits");
	return err_pass(handshake_send_owned(one->remote, WIRE_T_CHUNK_LOOKUP,
					     mem_steal(body), out.pos));
}

/* One that waits is queried once it is ready. A trial without a waiting hold needs only
 * the connection. False: it does not wait, or goes on waiting. */
static bool one_step(struct far_one *one)
{
	bool ready = far_ready(one->remote);

	if (!one->waiting || (!ready && !one->remote->refused))
		return false;
	if (ready && one->query->hold) {
		if (one_ask(one) >= 0)
			return true;
		err_clear(); /* it is going down, or much waits for it */
	} else if (ready) {
		far_answers(one->query->far, one->remote);
	}
	one_close(one);
	query_look(one->query);
	return true;
}

static bool query_step(struct loop_work *work)
{
	struct far_query *query = container_of(work, struct far_query, asking);

	for (unsigned int i = 0; i < query->count; i++)
		if (one_step(&query->ones[i]))
			return true;
	return false;
}

static void query_asked(struct loop_work *work)
{
	query_look(container_of(work, struct far_query, asking));
}

/* `held`: owned by the query until it ends, if this succeeds. */
static int one_add(struct far_query *query, struct remote *remote, bool held)
{
	struct far *far = query->far;
	struct far_one *one = &query->ones[query->count];
	bool trial = far_state(far, remote->peer->endpoint) == BREAKER_TRIAL;
	int r;

	assert(query->count < ARRAY_LEN(query->ones));
	*one = (struct far_one){
		.query = query, .remote = remote, .held = held, .trial = trial};
	do
		one->ask = loop_random_u64(far->store->kvd->loop);
	while (idmap_get(&far->asks, one->ask));
	r = idmap_put(&far->asks, one->ask, one);
	if (r < 0)
		return err_pass(r);
	one->open = true;
	query->count++;
	query->open++;
	query->trials += trial;
	if (trial)
		far_late(far, remote, "it was slow; one trial query follows");
	one->waiting = true;
	far->waiting++;
	loop_work_defer(&query->asking);
	return 0;
}

/* ---- those that homes name ---- */

static bool may_dial(struct far *far, const char *endpoint)
{
	uint64_t now_ns = loop_now_ns(far->store->kvd->loop);

	if (now_ns - far->dials_from_ns >= LOOP_NS_PER_S) {
		far->dials_from_ns = now_ns;
		far->dials = 0;
	}
	if (far->dials == DIALS_MAX || !dial_is_allowed(far->store->kvd, endpoint))
		return false;
	far->dials++;
	return true;
}

static struct remote *remote_at(const struct kvd *kvd, const char *endpoint)
{
	struct remote *remote;

	list_foreach(remote, handshake_remotes(kvd->handshake), link) {
		if (far_up(remote) && strcmp(remote->peer->endpoint, endpoint) == 0)
			return remote;
	}
	return NULL;
}

static struct remote *candidate_reach(struct far *far, const char *endpoint)
{
	const struct peer_client client = {.uid = 0, .session = 0};
	struct store *store = far->store;
	struct remote *remote = remote_at(store->kvd, endpoint);

	if (remote) {
		remote->reaches++;
		return remote;
	}
	if (!may_dial(far, endpoint) ||
	    handshake_reach(store->kvd->handshake, endpoint, &client, &remote) < 0) {
		err_clear();
		store->far_dials_refused++;
		return NULL;
	}
	store->far_dials++;
	return remote;
}

static void candidate_ask(struct far_query *query, const char *endpoint)
{
	struct far *far = query->far;
	struct remote *remote;

	if (strcmp(endpoint, far->store->kvd->link->endpoint) == 0 ||
	    far_state(far, endpoint) == BREAKER_OPEN)
		return;
	remote = candidate_reach(far, endpoint);
	if (!remote)
		return;
	for (unsigned int i = 0; i < query->count; i++) {
		if (query->ones[i].remote != remote)
			continue;
		handshake_release(remote); /* one of chunk_peers, or twice */
		return;
	}
	if (remote->peer->self || one_add(query, remote, true) < 0) {
		err_clear();
		handshake_release(remote);
	}
}

static void on_homes_done(void *arg)
{
	struct far_query *query = arg;
	const char *endpoints[CANDIDATES_MAX];
	unsigned int count = homes_query_best(query->find, endpoints, CANDIDATES_MAX);

	for (unsigned int i = 0; i < count; i++)
		candidate_ask(query, endpoints[i]);
	homes_query_end(query->find);
	query->find = NULL;
	query->open--;
	query_look(query);
}

/* Half of the time is for index nodes, the rest for holders. */
static int query_homes(struct far_query *query, uint64_t wait_ns)
{
	struct homes *homes = query->far->store->homes;
	int r;

	if (!homes)
		return 0;
	r = homes_find(homes, query->hold->handle->space, query->msg.ids.data,
		       query->asked, wait_ns / 2, on_homes_done, query, &query->find);
	query->open += r == 0;
	return r < 0 ? err_pass(r) : 0;
}

int far_ask(struct far *far, struct store_hold *hold, const uint8_t *ids, uint32_t count,
	    uint64_t wait_ns, void (*on_done)(void *arg), void *arg,
	    struct far_query **query_p)
{
	struct store_space *space = hold->handle->space;
	struct far_query *query;

	if (space->tenant->asking == STORE_ASKING_MAX)
		return err_raise(ERR_LIMIT, "%u queries of %s are open (limit)",
				 STORE_ASKING_MAX, space->tenant->account->name);
	query = mem_zalloc(sizeof(*query));
	if (!query)
		return err_pass(-ENOMEM);
	list_init(&query->link);
	query->space = space;
	space->handles++;
	space->tenant->asking++;
	query->msg = (struct wire_chunk_lookup){
		.first = (hold->first + hold->count) |
			 (hold->anywhere ? CHUNK_LOOKUP_ANYWHERE : 0),
		.lease_ms = hold->lease_ns / LOOP_NS_PER_MS + FAR_LEASE_MORE_MS,
		.ids = {.data = ids, .len = (size_t)count * STORE_ID_BYTES}};
	memcpy(query->msg.space, space->digest, sizeof(query->msg.space));
	query->far = far;
	query->hold = hold;
	query->asked = count;
	query->on_done = on_done;
	query->arg = arg;
	loop_work_init(&query->asking, far->store->kvd->loop, query_step, query_asked);
	loop_timer_init(&query->timer, far->store->kvd->loop, on_query_late);
	loop_defer_init(&query->done, on_query_done);
	for (unsigned int i = 0; i < far->count; i++) {
		struct remote *remote = far->stores[i].dial.remote;

		if (far_up(remote) &&
		    far_state(far, remote->peer->endpoint) != BREAKER_OPEN &&
		    one_add(query, remote, false) < 0)
			err_clear();
	}
	if (query_homes(query, wait_ns) < 0)
		err_clear(); /* no daemon is found by them */
	query->patient = wait_ns >= PATIENT_NS;
	loop_timer_start(&query->timer, wait_ns);
	query_look(query);
	*query_p = query;
	return 0;
}

/* ---- answers ---- */

static int ack_read(struct far_one *one, const struct wire_chunk_lookup_ack *msg)
{
	const struct far_asked asked = {.space = one->query->space,
					.remote = one->remote,
					.ask = one->ask,
					.lease_ms = one->query->msg.lease_ms,
					.chunks = one->query->asked};
	struct far_grant *grant;
	struct far_hold *far;
	int r = far_grant_new(&asked, msg, &grant);

	if (r < 0)
		return err_pass(r);
	r = far_hold_new(grant, one->query->hold->handle, one->query->hold->count,
			 one->query->asked, &far);
	far_grant_unref(grant);
	if (far)
		far_hold_add(&one->query->hold->far, far);
	return err_pass(r);
}

int far_on_lookup_ack(struct store *store, struct remote *remote, struct cursor *body)
{
	struct wire_chunk_lookup_ack msg;
	struct far_one *one;
	int r = wire_chunk_lookup_ack_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	one = store->far ? idmap_get(&store->far->asks, msg.ask) : NULL;
	if (!one || one->remote != remote || one->waiting) {
		if (msg.code == ERR_OK)
			far_release(remote, msg.ask); /* late */
		return 0;
	}
	if (one->trial)
		far_answers(store->far, remote);
	if (msg.code == ERR_OK && one->query->hold)
		r = ack_read(one, &msg);
	else if (msg.code == ERR_OK)
		far_release(remote, msg.ask); /* late */
	if (r < 0)
		err_clear();
	one_close(one);
	query_look(one->query);
	return 0;
}

void far_on_down(struct far *far, const struct remote *remote)
{
	struct idmap_cursor it;

	if (!far)
		return;
	idmap_foreach(&far->asks, it) {
		struct far_one *one = it.value;

		if (one->remote != remote)
			continue;
		one_close(one);
		query_look(one->query);
	}
}

void far_on_change(struct far *far, struct remote *remote)
{
	struct idmap_cursor it;

	if (!far || !far->waiting)
		return;
	idmap_foreach(&far->asks, it) {
		struct far_one *one = it.value;

		if (one->remote == remote && one->waiting)
			loop_work_defer(&one->query->asking);
	}
}
