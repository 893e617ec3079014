/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One question goes to all, and the answer is a hold: finding first and holding then
 * would be a hop more, and what was found could leave between the two. The two that have
 * most are kept, so that a fetch goes on when one of them dies; the others are told to
 * let go at once, and so is whoever answers late.
 *
 * Holders that homes name are asked the same, up to CANDIDATES_MAX. One that is no peer
 * is dialled, if it is one that engines could name, too, and no more than DIALS_MAX of
 * them a second, for a home may name anything. It is a peer for as long as the query or a
 * hold wants it. Its answer may come before its pools are known, and then waits for them.
 *
 * What a holder tells is used as far as it makes sense: pools that it has announced to
 * us, whose layouts give this rank what it needs. A chunk that fails that ends the
 * prefix. Nothing else is believed, for the bytes come by rooms, which check plans and
 * leases as for any other peer.
 */
#include "daemon/store/far.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/handshake/handshake.h"
#include "daemon/link/link.h"
#include "daemon/store/dial.h"
#include "daemon/store/homes.h"
#include "daemon/store/store_impl.h"

#define STORES_MAX 16u
#define FAR_HOLDERS_MAX 2u /* of a hold's chunks */
#define RENEW_MS (FAR_LEASE_MORE_MS / 2)
#define CANDIDATES_MAX 4u /* of those that homes name */
#define DIALS_MAX 8u	  /* a second */
#define OVER_NS (10 * LOOP_NS_PER_S)

struct far_run {
	uint32_t end;  /* chunks before this one are of it, or of those before */
	uint64_t mask; /* pools, as bits */
};

/* What the holder has told, and holds until nobody here wants it any more. */
struct far_lend {
	unsigned int refs;
	struct store *store;
	struct remote *remote; /* held */
	struct loop_timer renew;
	uint64_t ask, tokens;
	uint8_t space[16];
	uint64_t pools[STORE_CLASSES_MAX];
	unsigned int pool_count;
	struct far_run *runs;
	uint32_t run_count, chunks;
};

struct far_hold {
	struct far_hold *next; /* of as many chunks or fewer */
	struct far_lend *lend;
	bool failed;
	uint32_t chunks; /* that serve the hold's rank */
	uint64_t tokens;
	uint64_t *used; /* of each run that does: pools */
};

/* To one daemon. */
struct far_one {
	struct far_query *query;
	struct remote *remote;
	uint64_t ask;
	bool open;		 /* not answered */
	bool held;		 /* the remote, by this: a home named it */
	bool waiting;		 /* not asked: it is being dialled */
	struct far_lend *parked; /* its answer names pools that are not known yet */
};

struct far_query {
	struct list link; /* in far->over */
	struct far *far;
	struct store_hold *hold; /* NULL: it is over, and counts until it is answered */
	struct store_space *space;
	struct far_one ones[STORES_MAX + CANDIDATES_MAX];
	unsigned int count, open; /* open: of these, and of `find` */
	uint32_t asked;		  /* chunks */
	struct homes_query *find; /* under way */
	struct wire_chunk_ask msg;
	struct loop_timer timer;
	struct loop_defer done;
	void (*on_done)(void *arg);
	void *arg;
};

struct far {
	struct store *store;
	struct far_store {
		char endpoint[LINK_ENDPOINT_MAX];
		struct dial dial;
	} stores[STORES_MAX];
	unsigned int count;
	struct loop_timer again; /* some could not be dialled */
	struct idmap asks;	 /* struct far_one */
	struct list over;	 /* struct far_query.link */
	unsigned int held;	 /* of them, those that homes named */
	uint64_t dials_from_ns;
	unsigned int dials; /* since then */
};

/* ---- the daemons that are asked ---- */

static bool far_dial(struct far *far, struct far_store *store)
{
	dial_reach(far->store, &store->dial, store->endpoint, "is not asked for chunks");
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
		log_warn("store", endpoint, "is not asked for chunks",
			 "limit=%u why=\"it is one too many, or too long\"", STORES_MAX);
		return;
	}
	snprintf(store->endpoint, sizeof(store->endpoint), "%s", endpoint);
	far->count += far_dial(far, store);
}

int far_new(struct store *store, struct far **far_p)
{
	char words[sizeof(store->kvd->config->chunk_stores)], *word, *state = NULL;
	struct far *far;

	*far_p = NULL;
	if (!*store->kvd->config->chunk_stores && !store->homes)
		return 0;
	far = mem_zalloc(sizeof(*far));
	if (!far)
		return err_pass(-ENOMEM);
	far->store = store;
	idmap_init(&far->asks);
	list_init(&far->over);
	loop_timer_init(&far->again, store->kvd->loop, on_again);
	snprintf(words, sizeof(words), "%s", store->kvd->config->chunk_stores);
	for (word = strtok_r(words, " ,", &state); word;
	     word = strtok_r(NULL, " ,", &state))
		far_store_add(far, word);
	*far_p = far;
	return 0;
}

static void query_free(struct far_query *query);

static bool far_up(const struct remote *remote)
{
	return remote && sm_state(&remote->peer->sm) == PEER_UP && !remote->peer->self &&
	       (remote->peer->features & PEER_FEATURE_CHUNKS);
}

void far_count(const struct far *far, unsigned int *count_p, unsigned int *up_p)
{
	*count_p = far ? far->count : 0;
	*up_p = 0;
	for (unsigned int i = 0; i < *count_p; i++)
		*up_p += far_up(far->stores[i].dial.remote);
}

void far_close(struct far *far)
{
	if (!far)
		return;
	loop_timer_stop(&far->again);
	while (!list_empty(&far->over))
		query_free(list_first(&far->over, struct far_query, link));
	while (far->count > 0)
		dial_end(far->store, &far->stores[--far->count].dial);
}

void far_free(struct far *far)
{
	if (!far)
		return;
	assert(far->count == 0);
	idmap_fini(&far->asks);
	mem_free(far);
}

/* ---- what is held there ---- */

static void far_release(struct remote *remote, uint64_t ask)
{
	const struct wire_chunk_release msg = {.ask = ask};

	if (sm_state(&remote->peer->sm) == PEER_UP &&
	    handshake_tell_chunk_release(remote, &msg) < 0)
		err_clear(); /* it is going down, and lets go by that */
}

/* What reads it still, or a hold that joined for longer, is not over with the lease that
 * was asked for. */
static void on_renew(struct loop_timer *timer)
{
	struct far_lend *lend = container_of(timer, struct far_lend, renew);
	struct wire_chunk_ask msg = {.ask = lend->ask, .lease_ms = FAR_LEASE_MORE_MS};

	memcpy(msg.space, lend->space, sizeof(msg.space));
	if (far_up(lend->remote) && handshake_tell_chunk_ask(lend->remote, &msg) < 0)
		err_clear(); /* it is going down, and lets go by that */
	loop_timer_start(timer, RENEW_MS * LOOP_NS_PER_MS);
}

static void lend_unref(struct far_lend *lend)
{
	if (--lend->refs)
		return;
	loop_timer_stop(&lend->renew);
	far_release(lend->remote, lend->ask);
	handshake_release(lend->store->kvd->handshake, lend->remote);
	mem_free(lend->runs);
	mem_free(lend);
}

void far_hold_free(struct far_hold *far)
{
	while (far) {
		struct far_hold *next = far->next;

		lend_unref(far->lend);
		mem_free(far->used);
		mem_free(far);
		far = next;
	}
}

uint32_t far_hold_chunks(const struct far_hold *far)
{
	return far ? far->chunks : 0;
}

uint64_t far_hold_tokens(const struct far_hold *far)
{
	return far ? far->tokens : 0;
}

struct far_hold *far_hold_at(struct far_hold *far, uint32_t i)
{
	while (far && (far->failed || far_hold_sources(far, i) == 0))
		far = far->next;
	return far;
}

struct far_hold *far_hold_other(struct far_hold *all, const struct far_hold *far,
				uint32_t i, uint32_t count)
{
	for (; all; all = all->next) {
		if (all != far && !all->failed && i + count <= all->chunks &&
		    far_up(all->lend->remote))
			return all;
	}
	return NULL;
}

struct far_hold *far_hold_next(const struct far_hold *far)
{
	return far->next;
}

void far_hold_fail(struct far_hold *far)
{
	far->failed = true;
}

struct remote *far_hold_remote(const struct far_hold *far)
{
	return far->lend->remote;
}

uint64_t far_hold_ask(const struct far_hold *far)
{
	return far->lend->ask;
}

uint64_t far_hold_sources(const struct far_hold *far, uint32_t i)
{
	const struct far_lend *lend = far->lend;
	uint32_t from = 0, to = lend->run_count;

	if (i >= far->chunks)
		return 0;
	while (to - from > 1) {
		uint32_t at = from + (to - from) / 2;

		if (i < lend->runs[at - 1].end)
			to = at;
		else
			from = at;
	}
	return far->used[from];
}

uint64_t far_hold_pool(const struct far_hold *far, unsigned int bit)
{
	assert(bit < far->lend->pool_count);
	return far->lend->pools[bit];
}

/* ---- asking ---- */

static void one_close(struct far_one *one)
{
	if (!one->open)
		return;
	one->open = one->waiting = false;
	one->query->open--;
	one->query->far->held -= one->held;
	idmap_remove(&one->query->far->asks, one->ask);
	if (one->parked)
		lend_unref(mem_steal(one->parked));
}

static void query_free(struct far_query *query)
{
	struct store *store = query->far->store;

	for (unsigned int i = 0; i < query->count; i++) {
		one_close(&query->ones[i]);
		if (query->ones[i].held)
			handshake_release(store->kvd->handshake, query->ones[i].remote);
	}
	loop_timer_stop(&query->timer);
	loop_defer_cancel(&query->done);
	list_remove(&query->link);
	query->space->tenant->asking--;
	store_space_let_go(query->space);
	mem_free(query);
}

static void query_look(struct far_query *query)
{
	if (query->open == 0)
		loop_defer(query->far->store->kvd->loop, &query->done);
}

/* The hold waits no more. What was asked may lie in the peer's queue still: until it is
 * answered it counts, or whoever asks and lets go would fill that queue. */
void far_cancel(struct far_query *query)
{
	for (unsigned int i = 0; i < query->count; i++) {
		struct far_one *one = &query->ones[i];

		if (one->waiting || one->parked)
			one_close(one);
		else if (one->open)
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

	loop_defer(query->far->store->kvd->loop, &query->done);
}

static int one_ask(struct far_one *one)
{
	one->query->msg.ask = one->ask;
	one->waiting = false;
	return err_pass(handshake_tell_chunk_ask(one->remote, &one->query->msg));
}

/* `held`: the query's until it ends, if this succeeds. */
static int one_add(struct far_query *query, struct remote *remote, bool held)
{
	struct far *far = query->far;
	struct far_one *one = &query->ones[query->count];
	int r;

	assert(query->count < ARRAY_LEN(query->ones));
	*one = (struct far_one){.query = query, .remote = remote, .held = held};
	do
		one->ask = loop_random_u64(far->store->kvd->loop);
	while (idmap_get(&far->asks, one->ask));
	r = idmap_put(&far->asks, one->ask, one);
	if (r < 0)
		return err_pass(r);
	one->open = true;
	query->count++;
	query->open++;
	far->held += held;
	one->waiting = !far_up(remote);
	if (!one->waiting && one_ask(one) < 0) {
		err_clear(); /* it is going down */
		one_close(one);
	}
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
	struct handshake *hs = far->store->kvd->handshake;
	struct remote *remote;

	if (strcmp(endpoint, far->store->kvd->link->endpoint) == 0)
		return;
	remote = candidate_reach(far, endpoint);
	if (!remote)
		return;
	for (unsigned int i = 0; i < query->count; i++) {
		if (query->ones[i].remote != remote)
			continue;
		handshake_release(hs, remote); /* one of chunk_stores, or twice */
		return;
	}
	if (remote->peer->self || one_add(query, remote, true) < 0) {
		err_clear();
		handshake_release(hs, remote);
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

/* Half of the time is theirs, the rest the holders'. */
static int query_homes(struct far_query *query, uint64_t wait_ns)
{
	struct homes *homes = query->far->store->homes;
	int r;

	if (!homes)
		return 0;
	r = homes_find(homes, query->hold->handle->space, query->hold->far_ids,
		       query->asked, wait_ns / 2, on_homes_done, query, &query->find);
	query->open += r == 0;
	return r < 0 ? err_pass(r) : 0;
}

int far_ask(struct far *far, struct store_hold *hold, uint32_t count, uint64_t lease_ns,
	    uint64_t wait_ns, void (*on_done)(void *arg), void *arg,
	    struct far_query **query_p)
{
	struct store_space *space = hold->handle->space;
	struct far_query *query;

	if (space->tenant->asking == STORE_ASKING_MAX)
		return err_raise(ERR_LIMIT, "%u questions of %s are open",
				 STORE_ASKING_MAX, space->tenant->account->name);
	query = mem_zalloc(sizeof(*query));
	if (!query)
		return err_pass(-ENOMEM);
	list_init(&query->link);
	query->space = space;
	space->handles++;
	space->tenant->asking++;
	query->msg = (struct wire_chunk_ask){
		.first = (hold->first + hold->count) |
			 (hold->anywhere ? CHUNK_ASK_ANYWHERE : 0),
		.lease_ms = lease_ns / LOOP_NS_PER_MS + FAR_LEASE_MORE_MS,
		.ids = {.data = hold->far_ids, .len = (size_t)count * STORE_ID_BYTES}};
	memcpy(query->msg.space, space->digest, sizeof(query->msg.space));
	query->far = far;
	query->hold = hold;
	query->asked = count;
	query->on_done = on_done;
	query->arg = arg;
	loop_timer_init(&query->timer, far->store->kvd->loop, on_query_late);
	loop_defer_init(&query->done, on_query_done);
	for (unsigned int i = 0; i < far->count; i++) {
		struct remote *remote = far->stores[i].dial.remote;

		if (far_up(remote) && one_add(query, remote, false) < 0)
			err_clear();
	}
	if (query_homes(query, wait_ns) < 0)
		err_clear(); /* nobody is found by them */
	loop_timer_start(&query->timer, wait_ns);
	query_look(query);
	*query_p = query;
	return 0;
}

/* ---- answers ---- */

static int told_runs(struct far_lend *lend, const struct wire_chunk_told *msg,
		     uint32_t most)
{
	struct cursor in;
	uint32_t count;

	cursor_read(&in, msg->runs.data, msg->runs.len);
	lend->pool_count = cursor_get_count(&in, STORE_CLASSES_MAX, 8);
	for (unsigned int i = 0; i < lend->pool_count; i++)
		lend->pools[i] = cursor_get_u64(&in);
	count = cursor_get_count(&in, STORE_IDS_MAX, 12);
	lend->runs = mem_calloc(count + 1, sizeof(*lend->runs));
	if (!lend->runs)
		return err_pass(-ENOMEM);
	for (; lend->run_count < count && !in.bad; lend->run_count++) {
		struct far_run *run = &lend->runs[lend->run_count];
		uint32_t chunks = cursor_get_u32(&in);

		run->mask = cursor_get_u64(&in);
		if (chunks == 0 || chunks > most - lend->chunks)
			return err_raise(ERR_PROTO,
					 "CHUNK_TOLD: more than was asked for");
		if (!run->mask ||
		    (lend->pool_count < 64 && run->mask >> lend->pool_count) ||
		    (lend->run_count && run->mask == run[-1].mask))
			return err_raise(ERR_PROTO, "CHUNK_TOLD: a run of no pool, or "
						    "the same twice");
		lend->chunks += chunks;
		run->end = lend->chunks;
	}
	return cursor_check(&in, "CHUNK_TOLD.runs");
}

/* Only the last chunk may be short: are so many tokens possible? */
static bool tokens_fit(const struct far_lend *lend, uint64_t tokens, uint32_t chunk)
{
	return lend->chunks == 0 || (tokens > (lend->chunks - 1) * (uint64_t)chunk &&
				     tokens <= lend->chunks * (uint64_t)chunk);
}

static int lend_read(const struct far_one *one, const struct wire_chunk_told *msg,
		     struct far_lend **lend_p)
{
	const struct store_space *space = one->query->space;
	struct far_lend *lend = mem_zalloc(sizeof(*lend));
	int r;

	if (!lend) {
		far_release(one->remote, one->ask); /* nobody else will */
		return err_pass(-ENOMEM);
	}
	lend->refs = 1;
	lend->store = space->store;
	lend->remote = one->remote;
	lend->remote->reaches++;
	lend->ask = one->ask;
	lend->tokens = msg->tokens;
	memcpy(lend->space, space->digest, sizeof(lend->space));
	loop_timer_init(&lend->renew, space->store->kvd->loop, on_renew);
	loop_timer_start(&lend->renew,
			 (one->query->msg.lease_ms - RENEW_MS) * LOOP_NS_PER_MS);
	r = told_runs(lend, msg, one->query->asked);
	if (r >= 0 && !tokens_fit(lend, msg->tokens, space->tokens))
		r = err_raise(ERR_PROTO, "CHUNK_TOLD: %llu tokens of %u chunks",
			      (unsigned long long)msg->tokens, lend->chunks);
	if (r < 0) {
		lend_unref(lend);
		return err_pass(r);
	}
	*lend_p = lend;
	return 0;
}

/* Which of these pools give the rank all it needs; 0: they do not, or are not known. */
static uint64_t lend_cover(const struct far_lend *lend, const struct store_handle *handle,
			   uint64_t mask)
{
	const struct layout *layouts[STORE_CLASSES_MAX] = {NULL};
	bool lack = false; /* then it is a miss */

	for (unsigned int i = 0; i < lend->pool_count; i++) {
		const struct remote_pool *pool =
			mask >> i & 1 ? handshake_pool_by_id(lend->remote, lend->pools[i])
				      : NULL;

		if (pool && !pool->is_session && !pool->going)
			layouts[i] = pool->layout;
	}
	return store_cover_layouts(handle, layouts, lend->pool_count, &lack);
}

/* What was asked of an answer. */
struct far_covers {
	const struct far_lend *lend;
	const struct store_handle *handle;
	struct store_cover of[STORE_COVERS_NEW];
	unsigned int count;
};

/* Thousands of runs have few masks; who has more than that is believed so far. */
static uint64_t far_cover(struct far_covers *covers, uint64_t mask)
{
	struct store_cover *one;

	for (unsigned int i = 0; i < covers->count; i++) {
		one = &covers->of[i];
		if (one->used ? !(one->used & ~mask) : one->mask == mask)
			return one->used;
	}
	if (covers->count == STORE_COVERS_NEW)
		return 0;
	one = &covers->of[covers->count++];
	one->mask = mask;
	one->used = lend_cover(covers->lend, covers->handle, mask);
	return one->used;
}

/* As much of its first `most` chunks as serves the handle: *far_p, or NULL. */
static int far_hold_new(struct far_lend *lend, const struct store_handle *handle,
			uint32_t most, struct far_hold **far_p)
{
	struct far_covers covers = {.lend = lend, .handle = handle};
	struct far_hold *far = mem_zalloc(sizeof(*far));

	*far_p = NULL;
	if (!far)
		return err_pass(-ENOMEM);
	far->used = mem_calloc(lend->run_count + 1, sizeof(*far->used));
	if (!far->used) {
		mem_free(far);
		return err_pass(-ENOMEM);
	}
	far->lend = lend;
	lend->refs++;
	for (uint32_t i = 0; i < lend->run_count && far->chunks < most; i++) {
		far->used[i] = far_cover(&covers, lend->runs[i].mask);
		if (!far->used[i])
			break;
		far->chunks = lend->runs[i].end < most ? lend->runs[i].end : most;
	}
	far->tokens = far->chunks == lend->chunks
			      ? lend->tokens
			      : (uint64_t)far->chunks * handle->space->tokens;
	if (far->chunks)
		*far_p = far;
	else
		far_hold_free(far);
	return 0;
}

/* The two that have most; the others let go. */
static void far_add(struct far_hold **first_p, struct far_hold *far)
{
	struct far_hold **at = first_p;
	unsigned int i;

	while (*at && (*at)->chunks >= far->chunks)
		at = &(*at)->next;
	far->next = *at;
	*at = far;
	for (i = 0, at = first_p; *at && i < FAR_HOLDERS_MAX; i++)
		at = &(*at)->next;
	far_hold_free(mem_steal(*at));
}

int far_hold_join(const struct far_hold *other, const struct store_handle *handle,
		  struct far_hold **far_p)
{
	uint32_t most = far_hold_chunks(other);
	struct far_hold *all = NULL;
	int r = 0;

	for (; other && r >= 0; other = other->next) {
		struct far_hold *far;

		r = far_hold_new(other->lend, handle, most, &far);
		if (far)
			far_add(&all, far);
	}
	if (r < 0) {
		far_hold_free(all);
		return err_pass(r);
	}
	*far_p = all;
	return 0;
}

static bool is_known(const struct far_lend *lend)
{
	for (unsigned int i = 0; i < lend->pool_count; i++) {
		if (!handshake_pool_by_id(lend->remote, lend->pools[i]))
			return false;
	}
	return true;
}

/* Takes `lend`. Outcome 1: it waits for pools of the holder's. */
static int told_use(struct far_one *one, struct far_lend *lend)
{
	struct far_hold *far;
	int r;

	if (one->held && !is_known(lend)) {
		one->parked = lend;
		return 1;
	}
	r = far_hold_new(lend, one->query->hold->handle, one->query->asked, &far);
	lend_unref(lend);
	if (far)
		far_add(&one->query->hold->far, far);
	return err_pass(r);
}

static int told_read(struct far_one *one, const struct wire_chunk_told *msg)
{
	struct far_lend *lend;
	int r = lend_read(one, msg, &lend);

	return r < 0 ? err_pass(r) : err_pass(told_use(one, lend));
}

static int on_told(struct store *store, struct remote *remote, struct cursor *body)
{
	struct wire_chunk_told msg;
	struct far_one *one;
	int r = wire_chunk_told_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	one = store->far ? idmap_get(&store->far->asks, msg.ask) : NULL;
	if (!one || one->remote != remote || one->waiting) {
		if (msg.code == ERR_OK)
			far_release(remote, msg.ask); /* late */
		return 0;
	}
	if (one->parked)
		return 0; /* twice */
	if (msg.code == ERR_OK && one->query->hold)
		r = told_read(one, &msg);
	else if (msg.code == ERR_OK)
		far_release(remote, msg.ask); /* late */
	if (r == 1)
		return 0;
	if (r < 0)
		err_clear();
	one_close(one);
	query_look(one->query);
	return 0;
}

static int on_leg_nak(struct store *store, struct remote *remote, struct cursor *body)
{
	struct wire_chunk_leg_nak msg;
	struct err why;
	int r = wire_chunk_leg_nak_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	peer_told(remote->peer, (enum err_code)msg.code, msg.text, &why);
	store_legs_refused(store, remote, msg.room, &why);
	return 0;
}

int far_on_message(struct store *store, struct remote *remote,
		   const struct wire_header *h, struct cursor *body)
{
	return h->type == WIRE_T_CHUNK_TOLD ? on_told(store, remote, body)
					    : on_leg_nak(store, remote, body);
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

/* A candidate: ask it now that it is up, use its answer now that its pools are known. */
static void candidate_go_on(struct far_one *one)
{
	struct remote *remote = one->remote;
	int r = 1;

	if (one->parked && is_known(one->parked))
		r = told_use(one, mem_steal(one->parked));
	else if (one->waiting && far_up(remote))
		r = one_ask(one) < 0 ? -EIO : 1;
	else if (one->waiting && remote->refused)
		r = 0;
	if (r == 1)
		return;
	if (r < 0)
		err_clear();
	one_close(one);
	query_look(one->query);
}

void far_on_change(struct far *far, struct remote *remote)
{
	struct idmap_cursor it;

	if (!far || !far->held)
		return;
	idmap_foreach(&far->asks, it) {
		struct far_one *one = it.value;

		if (one->remote == remote && one->held)
			candidate_go_on(one);
	}
}
