/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The link to etcd: one endpoint at a time, which all requests and the watch stream use.
 *
 * A new link reads the store's number, a key with random content that the first daemon
 * puts. Another number, or a lower revision, means that the store was reset: its entries
 * are then read again, and those that do not return in the time of a lease are removed.
 * Without the number an etcd with an emptied disk may look like the one before: its
 * cluster's id is derived from its configuration.
 *
 * Pauses between tries are random: ten thousand daemons lose etcd in the same moment.
 */
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "daemon/base/log.h"
#include "daemon/cluster/etcd_impl.h"
#include "daemon/loop/resolve.h"

#define LINK_FIRST_NS LOOP_NS_PER_S	   /* after a loss, at most */
#define LINK_NEXT_NS (50 * LOOP_NS_PER_MS) /* to another endpoint not tried yet */
#define LINK_LOOKUP_NS (5 * LOOP_NS_PER_S) /* for the resolver */

static const struct sm_state link_states[] = {
	[LINK_WAITS] = {"waits",
			SM_TO(LINK_LOOKS_UP) | SM_TO(LINK_LOGS_IN) | SM_TO(LINK_ASKS)},
	[LINK_LOOKS_UP] = {"looks_up",
			   SM_TO(LINK_WAITS) | SM_TO(LINK_LOGS_IN) | SM_TO(LINK_ASKS)},
	[LINK_LOGS_IN] = {"logs_in", SM_TO(LINK_WAITS) | SM_TO(LINK_ASKS)},
	[LINK_ASKS] = {"asks", SM_TO(LINK_WAITS) | SM_TO(LINK_UP)},
	[LINK_UP] = {"up", SM_TO(LINK_WAITS)},
};
static const struct sm_table link_table = {
	.name = "etcd_link", .states = link_states, .count = ARRAY_LEN(link_states)};

/* ---- states ---- */

static void link_log_in(struct etcd *e);
static void link_ask(struct etcd *e);

static void link_fail(struct etcd *e)
{
	struct err err;

	err_take(&err);
	etcd_link_broken(e, &err);
}

static void link_resolve_drop(struct etcd_link *link)
{
	resolve_drop(link->resolve);
	link->resolve = NULL;
}

static void link_on_wake(struct loop_wake *wake)
{
	struct etcd_link *link = container_of(wake, struct etcd_link, wake);
	struct etcd *e = container_of(link, struct etcd, link);
	const struct cluster_endpoint *at = &e->url.endpoints[link->endpoint];
	const char *why;

	if (!link->resolve || !resolve_done(link->resolve))
		return;
	loop_timer_stop(&link->timer);
	link->addresses =
		resolve_numbers(link->resolve, link->numbers, ETCD_ADDRESSES_MAX, &why);
	link_resolve_drop(link);
	if (link->addresses == 0)
		err_raise(ERR_IO, "etcd %s: cannot resolve the name: %s", at->host, why);
	if (link->addresses)
		link_log_in(e);
	else
		link_fail(e);
}

static void link_log_in(struct etcd *e)
{
	struct etcd_link *link = &e->link;
	struct text body = {NULL};

	if (!e->user || link->token[0]) {
		link_ask(e);
		return;
	}
	sm_move(&link->sm, LINK_LOGS_IN);
	out_object(&body, NULL);
	out_text(&body, "name", e->user);
	out_text(&body, "password", e->password);
	out_close(&body, '}');
	if (etcd_request_start(&link->request, "auth/authenticate", &body) < 0)
		link_fail(e);
}

static void link_store_key(const struct etcd *e, char key[ETCD_NAME_MAX])
{
	snprintf(key, ETCD_NAME_MAX, "%s/store", e->url.prefix);
}

static void link_ask(struct etcd *e)
{
	struct etcd_link *link = &e->link;
	struct text body = {NULL};
	char key[ETCD_NAME_MAX];

	if (sm_state(&link->sm) != LINK_ASKS)
		sm_move(&link->sm, LINK_ASKS);
	link_store_key(e, key);
	link->asked[0] = '\0';
	out_object(&body, NULL);
	etcd_put_key(&body, "key", key);
	out_close(&body, '}');
	if (etcd_request_start(&link->request, "kv/range", &body) < 0)
		link_fail(e);
}

/* If another daemon is faster, its number counts. */
static void link_make_store(struct etcd *e)
{
	struct etcd_link *link = &e->link;
	struct text body = {NULL};
	char key[ETCD_NAME_MAX], number[ETCD_STORE_MAX];
	uint8_t bytes[(ETCD_STORE_MAX - 1) / 2];

	link->making = link->made = true;
	loop_random(e->loop, bytes, sizeof(bytes));
	hex_write(bytes, sizeof(bytes), number);
	link_store_key(e, key);
	text_puts(&body,
		  "{\"compare\":[{\"target\":\"CREATE\",\"create_revision\":\"0\"");
	etcd_put_key(&body, "key", key);
	text_puts(&body, "}],\"success\":[{\"request_put\":{");
	etcd_put_key(&body, "key", key);
	etcd_put_key(&body, "value", number);
	text_puts(&body, "}}]}");
	if (etcd_request_start(&link->request, "kv/txn", &body) < 0)
		link_fail(e);
}

static void link_store_lost(struct etcd *e, const char *why)
{
	struct etcd_group *group;

	log_warn("etcd", e->url.prefix, "the store was reset", "why='%s'", why);
	e->grace_ns = loop_now_ns(e->loop) + e->lease_s * LOOP_NS_PER_S;
	list_foreach(group, &e->groups, link)
		for (int side = 0; side < ETCD_SIDES; side++)
			if (group->half[side].follow != FOLLOW_NOT)
				etcd_half_again(e, &group->half[side], 0);
	if (e->lease.id)
		etcd_lease_lost(e, "the store was reset");
}

static void link_is_up(struct etcd *e)
{
	struct etcd_link *link = &e->link;
	const struct cluster_endpoint *at = &e->url.endpoints[link->endpoint];

	sm_move(&link->sm, LINK_UP);
	link->failures = 0;
	link->made = false;
	log_info("etcd", e->url.prefix, "connected", "endpoint=%s:%s revision=%ju",
		 at->host, at->port, (uintmax_t)link->revision);
	if (e->store[0] && strcmp(e->store, link->asked) != 0)
		link_store_lost(e, "another store number");
	else if (link->revision < e->revision)
		link_store_lost(e, "its revision decreased");
	memcpy(e->store, link->asked, sizeof(e->store));
	e->revision = link->revision;
	e->stream.stale = true;
	etcd_kick(e);
	etcd_state_check(e, NULL);
}

static void link_on_login(struct etcd *e, enum etcd_outcome outcome)
{
	struct etcd_link *link = &e->link;
	const struct etcd_message *answer = &link->request.answer;
	struct err err;

	if (outcome == ETCD_REFUSED && !strstr(answer->error, "not enabled")) {
		etcd_refusal(answer, "cluster_user_file", &err);
		etcd_link_broken(e, &err);
		return;
	}
	memcpy(link->token, answer->token, sizeof(link->token));
	link_ask(e);
}

static void link_on_store(struct etcd *e, enum etcd_outcome outcome)
{
	struct etcd_link *link = &e->link;
	const struct etcd_message *answer = &link->request.answer;
	bool made = link->making;
	struct err err;

	link->making = false;
	if (outcome == ETCD_REFUSED && !made) {
		etcd_refusal(answer, "prefix", &err);
		etcd_link_broken(e, &err);
	} else if (outcome == ETCD_REFUSED) {
		link_is_up(e); /* a store that is full has no number yet */
	} else if (made) {
		link_ask(e);
	} else {
		link->revision = answer->revision;
		if (link->asked[0]) {
			link_is_up(e);
		} else if (!link->made) {
			link_make_store(e);
		} else {
			err_set(&err, ERR_PROTO,
				"etcd %s:%s: key %.200s/store was put but is missing; "
				"is it etcd?",
				e->url.endpoints[link->endpoint].host,
				e->url.endpoints[link->endpoint].port, e->url.prefix);
			etcd_link_broken(e, &err);
		}
	}
}

static void link_on_done(struct etcd_request *request, enum etcd_outcome outcome)
{
	struct etcd *e = request->etcd;

	if (outcome == ETCD_BROKEN)
		e->link.making = false;
	else if (sm_state(&e->link.sm) == LINK_LOGS_IN)
		link_on_login(e, outcome);
	else
		link_on_store(e, outcome);
}

static void link_on_kv(struct etcd_request *request, const struct etcd_kv *kv)
{
	struct etcd_link *link = &request->etcd->link;

	if (kv->bad || kv->value_len != ETCD_STORE_MAX - 1 ||
	    strlen((const char *)kv->value) != kv->value_len)
		snprintf(link->asked, sizeof(link->asked), "foreign");
	else
		memcpy(link->asked, kv->value, ETCD_STORE_MAX);
}

static void link_start(struct etcd *e)
{
	struct etcd_link *link = &e->link;
	const struct cluster_endpoint *at = &e->url.endpoints[link->endpoint];

	loop_timer_stop(&link->timer);
	if (link->address < link->addresses) { /* the name's next one */
		link_log_in(e);
		return;
	}
	link->address = 0;
	if (at->literal) {
		link->addresses = 1;
		snprintf(link->numbers[0], sizeof(link->numbers[0]),
			 strchr(at->host, ':') ? "[%.45s]" : "%.45s", at->host);
		link_log_in(e);
		return;
	}
	sm_move(&link->sm, LINK_LOOKS_UP);
	link->addresses = 0;
	loop_timer_start(&link->timer, LINK_LOOKUP_NS);
	if (resolve_start(at->host, at->port, &link->wake, &link->resolve) < 0)
		link_fail(e);
}

static void link_on_timer(struct loop_timer *timer)
{
	struct etcd_link *link = container_of(timer, struct etcd_link, timer);
	struct etcd *e = container_of(link, struct etcd, link);
	struct err err;

	if (sm_state(&link->sm) == LINK_WAITS) {
		link_start(e);
		return;
	}
	err_set(&err, ERR_TIMEOUT, "etcd %s: the resolver timed out",
		e->url.endpoints[link->endpoint].host);
	etcd_link_broken(e, &err);
}

/* The next address of its name, or the next endpoint. */
static bool link_next(struct etcd *e)
{
	struct etcd_link *link = &e->link;

	if (++link->address < link->addresses)
		return true;
	link->address = link->addresses = 0;
	link->endpoint = (link->endpoint + 1) % e->url.count;
	return link->failures < e->url.count;
}

void etcd_link_broken(struct etcd *e, const struct err *why)
{
	struct etcd_link *link = &e->link;
	bool was_up = etcd_link_up(link), more;
	uint64_t pause_ns;

	if (sm_state(&link->sm) == LINK_WAITS)
		return;
	if (was_up) {
		log_warn("etcd", e->url.prefix, "connection lost", "why='%s'", why->text);
		e->state.reconnects++;
	}
	sm_move(&link->sm, LINK_WAITS);
	link_resolve_drop(link);
	link->failures++;
	link->made = false;
	more = link_next(e);
	if (was_up)
		pause_ns = loop_random_u64(e->loop) % LINK_FIRST_NS;
	else if (more)
		pause_ns = etcd_jitter(e, LINK_NEXT_NS);
	else
		pause_ns = etcd_pause(e, link->failures / e->url.count);
	loop_timer_start(&link->timer, pause_ns);
	etcd_requests_break(e);
	etcd_state_check(e, why);
}

int etcd_link_init(struct etcd *e)
{
	struct etcd_link *link = &e->link;

	sm_init(&link->sm, &link_table, LINK_WAITS);
	link->endpoint = (unsigned int)(loop_random_u64(e->loop) % e->url.count);
	loop_timer_init(&link->timer, e->loop, link_on_timer);
	etcd_request_init(e, &link->request, link_on_done);
	link->request.on_kv = link_on_kv;
	return err_pass(loop_wake_init(&link->wake, e->loop, link_on_wake));
}

void etcd_link_fini(struct etcd *e)
{
	loop_timer_stop(&e->link.timer);
	link_resolve_drop(&e->link);
	loop_wake_fini(&e->link.wake);
}
