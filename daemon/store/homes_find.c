/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks of a prompt follow each other, and a daemon that has one has, with few
 * exceptions, those before it. So a query about a prompt of thousands names some of its
 * chunks: the first ones, then fewer and fewer, and the last; in ratios of 2 to 3 and 3
 * to 4, so that a full prefix is distinguished from two thirds of it. The best candidates
 * are then queried themselves.
 *
 * The last chunks are first in a message. The holders that an index node reports for one
 * query are bounded, and so are those that are processed in a reply; a common prefix
 * would use up the bound at the cost of the few daemons that have more.
 *
 * A holder's prefix ends where an index node that replied does not name it, unless the
 * reply has its maximum of names: then nothing is known. An index node without a reply
 * proves nothing either, and costs only its chunks: it is paused for a while, and no
 * query waits for its trial (breaker.h).
 */
#include "daemon/store/homes.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/link/link.h"
#include "daemon/store/homes_impl.h"
#include "daemon/store/store_impl.h"

#define QUERY_HOLDERS_MAX 64u /* processed in a query */
/* A slower reply is late. If this loop's own turn is late, it proves nothing. */
#define PATIENT_NS (100 * LOOP_NS_PER_MS)

struct homes_probe {
	uint32_t at; /* of the ids */
	struct home_key key;
	unsigned int home;
	bool answered, full; /* full: there may be more holders */
};

/* To one home. */
struct homes_ask {
	struct homes_query *query;
	const struct remote *remote;
	uint64_t ask;
	unsigned int home;
	bool trial; /* it was late before: no query waits for it */
};

struct homes_holder {
	char endpoint[LINK_ENDPOINT_MAX];
	uint32_t probes; /* as bits: those that it has */
	uint32_t most;	 /* chunks, as it seems */
	bool told;
};

struct homes_query {
	struct homes *homes;
	struct homes_probe probes[HOMES_PROBES_MAX];
	unsigned int probe_count;
	struct homes_ask asks[MEMBERS_MAX];
	unsigned int ask_count, open; /* open: of them, without trials */
	struct homes_holder holders[QUERY_HOLDERS_MAX];
	unsigned int holder_count;
	struct loop_timer timer;
	bool patient; /* time enough for an answer */
	struct loop_defer done;
	void (*on_done)(void *arg);
	void *arg;
};

/* ---- the end ---- */

static void ask_close(struct homes_ask *ask)
{
	if (!ask->ask)
		return;
	idmap_remove(&ask->query->homes->asks, ask->ask);
	ask->ask = 0;
	ask->query->open -= !ask->trial;
}

void homes_query_end(struct homes_query *query)
{
	for (unsigned int i = 0; i < query->ask_count; i++)
		ask_close(&query->asks[i]);
	loop_timer_stop(&query->timer);
	loop_defer_cancel(&query->done);
	mem_free(query);
}

static void on_find_done(struct loop_defer *defer)
{
	struct homes_query *query = container_of(defer, struct homes_query, done);

	loop_timer_stop(&query->timer);
	query->on_done(query->arg);
}

static void on_find_late(struct loop_timer *timer)
{
	struct homes_query *query = container_of(timer, struct homes_query, timer);
	struct homes *homes = query->homes;
	uint64_t now_ns = loop_now_ns(homes->store->kvd->loop);
	bool judges = query->patient && now_ns < timer->at_ns + PATIENT_NS / 2;

	homes->figures.late += query->open;
	for (unsigned int i = 0; i < query->ask_count && judges; i++) {
		const struct homes_ask *ask = &query->asks[i];
		struct homes_one *one = &homes->ones[ask->home];

		if (ask->ask && !ask->trial && one->dial.remote == ask->remote)
			breaker_trip(&one->breaker, now_ns);
	}
	loop_defer(homes->store->kvd->loop, &query->done);
}

static void find_look(struct homes_query *query)
{
	if (query->open == 0)
		loop_defer(query->homes->store->kvd->loop, &query->done);
}

/* ---- asking ---- */

static void probe_add(struct homes_query *query, const struct store_space *space,
		      const uint8_t *ids, uint32_t at)
{
	struct homes_probe *probe = &query->probes[query->probe_count++];

	*probe = (struct homes_probe){
		.at = at,
		.key = home_key_make(home_key_space(space->digest),
				     ids + (size_t)at * STORE_ID_BYTES)};
	probe->home = members_home(query->homes->members, &probe->key);
}

/* Chunks 1, 2, 3, 4, 6, 8, 12, 16, … and the last. */
unsigned int homes_probes(uint32_t count, uint32_t at[HOMES_PROBES_MAX])
{
	unsigned int probes = 0;

	for (uint32_t n = 1; n < count; n *= 2) {
		at[probes++] = n - 1;
		if (n > 1 && n * 3 / 2 < count)
			at[probes++] = n * 3 / 2 - 1;
	}
	at[probes++] = count - 1;
	assert(probes <= HOMES_PROBES_MAX);
	return probes;
}

static int ask_send(struct homes_query *query, struct homes_ask *ask,
		    struct remote *remote)
{
	struct homes *homes = query->homes;
	uint8_t ids[HOMES_PROBES_MAX * 8], body[sizeof(ids) + 64];
	struct wire_index_query msg;
	struct cursor out;
	int r;

	cursor_write(&out, ids, sizeof(ids));
	for (unsigned int i = query->probe_count; i-- > 0;) {
		if (query->probes[i].home == ask->home)
			cursor_put_u64(&out, query->probes[i].key.id);
	}
	do
		ask->ask = loop_random_u64(homes->store->kvd->loop);
	while (idmap_get(&homes->asks, ask->ask));
	msg = (struct wire_index_query){.ask = ask->ask,
					.space = query->probes[0].key.space,
					.ids = {.data = ids, .len = out.pos}};
	r = idmap_put(&homes->asks, ask->ask, ask);
	if (r < 0) {
		ask->ask = 0;
		return err_pass(r);
	}
	query->open += !ask->trial;
	cursor_write(&out, body, sizeof(body));
	r = wire_index_query_put(&out, &msg);
	if (r >= 0)
		r = peer_send(remote->peer, WIRE_T_INDEX_QUERY, body, out.pos);
	if (r < 0)
		ask_close(ask);
	return r < 0 ? err_pass(r) : 0;
}

static void asks_make(struct homes_query *query)
{
	struct homes *homes = query->homes;
	uint64_t wanted = 0, now_ns = loop_now_ns(homes->store->kvd->loop);

	for (unsigned int i = 0; i < query->probe_count; i++)
		wanted |= UINT64_C(1) << query->probes[i].home;
	for (unsigned int i = 0; i < homes->count; i++) {
		struct homes_ask *ask = &query->asks[query->ask_count];
		struct homes_one *one = &homes->ones[i];
		enum breaker_state state = breaker_state(&one->breaker, now_ns);

		if (!(wanted >> i & 1) || !one->up || state == BREAKER_OPEN)
			continue;
		*ask = (struct homes_ask){.query = query,
					  .remote = one->dial.remote,
					  .home = i,
					  .trial = state == BREAKER_TRIAL};
		if (ask->trial)
			breaker_trip(&one->breaker, now_ns);
		query->ask_count++;
		if (ask_send(query, ask, one->dial.remote) < 0)
			err_clear(); /* as one that does not answer */
		else
			homes->figures.asks++;
	}
}

int homes_find(struct homes *homes, const struct store_space *space, const uint8_t *ids,
	       uint32_t count, uint64_t wait_ns, void (*on_done)(void *arg), void *arg,
	       struct homes_query **query_p)
{
	uint32_t at[HOMES_PROBES_MAX];
	struct homes_query *query;
	unsigned int probes;

	*query_p = NULL;
	if (!homes->count || !count)
		return 1;
	query = mem_zalloc(sizeof(*query));
	if (!query)
		return err_pass(-ENOMEM);
	query->homes = homes;
	query->on_done = on_done;
	query->arg = arg;
	loop_timer_init(&query->timer, homes->store->kvd->loop, on_find_late);
	loop_defer_init(&query->done, on_find_done);
	probes = homes_probes(count, at);
	for (unsigned int i = 0; i < probes; i++)
		probe_add(query, space, ids, at[i]);
	asks_make(query);
	if (!query->open) {
		homes_query_end(query);
		return 1;
	}
	query->patient = wait_ns >= PATIENT_NS;
	loop_timer_start(&query->timer, wait_ns);
	*query_p = query;
	return 0;
}

void homes_asks_on_down(struct homes *homes, const struct remote *remote)
{
	struct idmap_cursor it;

	idmap_foreach(&homes->asks, it) {
		struct homes_ask *ask = it.value;
		struct homes_query *query = ask->query;

		if (ask->remote != remote)
			continue;
		ask_close(ask);
		find_look(query);
	}
}

/* ---- answers ---- */

static struct homes_holder *holder_get(struct homes_query *query, const char *endpoint,
				       unsigned int most)
{
	struct homes_holder *holder;

	for (unsigned int i = 0; i < query->holder_count; i++) {
		if (strcmp(query->holders[i].endpoint, endpoint) == 0)
			return &query->holders[i];
	}
	if (query->holder_count == most)
		return NULL;
	holder = &query->holders[query->holder_count++];
	*holder = (struct homes_holder){.probes = 0};
	memcpy(holder->endpoint, endpoint, strlen(endpoint) + 1);
	return holder;
}

struct found_list {
	struct homes_holder *of[256]; /* by the reply's index; NULL: over the limit */
	uint32_t count;
};

static void found_holders(struct homes_query *query, struct cursor *in,
			  struct found_list *list)
{
	unsigned int most = query->holder_count + HOMES_NEW_MAX;
	char endpoint[LINK_ENDPOINT_MAX];

	most = most < QUERY_HOLDERS_MAX ? most : QUERY_HOLDERS_MAX;
	list->count = cursor_get_count(in, ARRAY_LEN(list->of), 2);
	for (uint32_t i = 0; i < list->count; i++) {
		cursor_get_str(in, endpoint, sizeof(endpoint));
		list->of[i] =
			in->bad || !*endpoint ? NULL : holder_get(query, endpoint, most);
	}
}

static void found_probe(struct homes_query *query, unsigned int i, struct cursor *in,
			const struct found_list *list)
{
	struct homes_probe *probe = &query->probes[i];
	unsigned int n = cursor_get_u8(in);

	probe->answered = !in->bad;
	probe->full = n >= HOMES_HOLDERS_MAX - 1; /* it may omit the requester */
	while (n-- && !in->bad) {
		uint8_t at = cursor_get_u8(in);

		if (!in->bad && at < list->count && list->of[at])
			list->of[at]->probes |= UINT32_C(1) << i;
	}
}

int homes_on_found(struct homes *homes, const struct remote *remote, struct cursor *body)
{
	struct found_list list = {.count = 0};
	struct homes_query *query;
	struct homes_ask *ask;
	struct wire_index_reply msg;
	struct cursor in;
	int r = wire_index_reply_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	homes_answers(homes, remote);
	ask = idmap_get(&homes->asks, msg.ask);
	if (!ask || ask->remote != remote)
		return 0; /* late, or another's */
	query = ask->query;
	if (!msg.holders.len) {
		homes_absent(homes, remote);
		ask_close(ask);
		find_look(query);
		return 0;
	}
	cursor_read(&in, msg.holders.data, msg.holders.len);
	found_holders(query, &in, &list);
	for (unsigned int i = query->probe_count; i-- > 0;) {
		if (query->probes[i].home == ask->home)
			found_probe(query, i, &in, &list);
	}
	ask_close(ask);
	find_look(query);
	return err_pass(cursor_check(&in, "INDEX_REPLY.holders"));
}

static uint32_t holder_most(const struct homes_query *query,
			    const struct homes_holder *holder)
{
	uint32_t most = 0;

	for (unsigned int i = 0; i < query->probe_count; i++) {
		const struct homes_probe *probe = &query->probes[i];

		if (holder->probes >> i & 1)
			most = probe->at + 1;
		else if (probe->answered && !probe->full)
			break;
	}
	return most;
}

unsigned int homes_query_best(struct homes_query *query, const char **endpoints,
			      unsigned int most)
{
	unsigned int count = 0;

	for (unsigned int i = 0; i < query->holder_count; i++)
		query->holders[i].most = holder_most(query, &query->holders[i]);
	while (count < most) {
		struct homes_holder *best = NULL;

		for (unsigned int i = 0; i < query->holder_count; i++) {
			struct homes_holder *holder = &query->holders[i];

			if (!holder->told && holder->most &&
			    (!best || holder->most > best->most))
				best = holder;
		}
		if (!best)
			break;
		best->told = true;
		endpoints[count++] = best->endpoint;
	}
	return count;
}
