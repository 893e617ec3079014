/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The look-ups are bounded: so many keys at a time, each for some seconds, unless it has
 * an entry; then it is kept for as long as the entry is. Keys that were dialled are kept,
 * the latest of them: their connections are made again automatically.
 */
#include "daemon/cluster/trust.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/hex.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/groups_impl.h"
#include "daemon/cluster/own_groups.h"
#include "daemon/cluster/record.h"

#define KEYS_MAX 4096u
#define LOOKED_MAX 256u /* without an entry */
#define LOOK_NS (10 * LOOP_NS_PER_S)
#define TICK_NS (5 * LOOP_NS_PER_S)

struct trusted {
	struct list link; /* in trust.list: used last at the end */
	struct trust *trust;
	char key[RECORD_KEY_CHARS + 1];
	struct names_user user;		 /* of the key's group; none for dialled ones */
	bool found;			 /* the group has an entry of the key */
	char dialled[LINK_ENDPOINT_MAX]; /* where an entry named it; "" */
	uint64_t since_ns;
};

struct trust {
	struct groups *groups;
	void (*on_change)(void *arg);
	void *arg;
	struct link_vouch vouch;
	struct strmap keys;
	struct list list;
	unsigned int looked; /* with a user and no entry */
	struct loop_timer tick;
};

void trust_group(const char *key, char group[PLACE_GROUP_MAX])
{
	char hex[HEX_CHARS(RECORD_KEY_CHARS) + 1];

	hex_write(key, RECORD_KEY_CHARS, hex);
	snprintf(group, PLACE_GROUP_MAX, "%s%s", OWN_GROUP_KEY, hex);
}

static void trusted_free(struct trusted *t)
{
	struct trust *trust = t->trust;

	if (t->user.cache && !t->found)
		trust->looked--;
	groups_unuse(&t->user);
	strmap_remove(&trust->keys, t->key);
	list_remove(&t->link);
	mem_free(t);
}

static struct trusted *trusted_get(struct trust *trust, const char *key)
{
	struct trusted *t = strmap_get(&trust->keys, key);

	if (t) {
		list_remove(&t->link);
		list_push_back(&trust->list, &t->link);
		return t;
	}
	if (strmap_count(&trust->keys) >= KEYS_MAX)
		trusted_free(list_first(&trust->list, struct trusted, link));
	t = mem_zalloc(sizeof(*t));
	if (!t)
		return NULL;
	snprintf(t->key, sizeof(t->key), "%s", key);
	t->trust = trust;
	t->since_ns = loop_now_ns(trust->groups->loop);
	if (strmap_put(&trust->keys, t->key, t) < 0) {
		mem_free(t);
		return NULL;
	}
	list_push_back(&trust->list, &t->link);
	return t;
}

/* Is there an entry of the key, at this endpoint? NULL: at any. A restarted daemon has
 * two until the lease of the first has expired. */
static bool trusted_entry(const struct trusted *t, const char *endpoint)
{
	static struct record record; /* loop's thread */
	const struct roster_entry *entry;

	if (!t->user.cache)
		return false;
	list_foreach(entry, &groups_roster(&t->user)->order, link) {
		if (!entry->record)
			continue;
		if (record_read(entry->record, &record) == 0 &&
		    strcmp(record.key, t->key) == 0 &&
		    (!endpoint || endpoint_same(record.endpoint, endpoint)))
			return true;
		err_clear();
	}
	return false;
}

static void tick_start(struct trust *trust)
{
	if (!loop_timer_running(&trust->tick))
		loop_timer_start(&trust->tick, TICK_NS);
}

/* ---- queries of the link ---- */

static bool trust_knows(void *owner, const char *key)
{
	struct trust *trust = owner;
	struct trusted *t = strmap_get(&trust->keys, key);

	return t && (*t->dialled || t->found);
}

static bool trust_at(void *owner, const char *key, const char *endpoint)
{
	struct trust *trust = owner;
	struct trusted *t = strmap_get(&trust->keys, key);

	return t && (endpoint_same(t->dialled, endpoint) || trusted_entry(t, endpoint));
}

static void trust_on_change(struct names_user *user)
{
	struct trusted *t = container_of(user, struct trusted, user);
	struct trust *trust = t->trust;
	bool found = trusted_entry(t, NULL);

	if (found == t->found)
		return;
	t->found = found;
	if (found) {
		trust->looked--;
	} else {
		trust->looked++;
		t->since_ns = loop_now_ns(trust->groups->loop);
		tick_start(trust);
	}
	trust->on_change(trust->arg);
}

static bool trust_ask(void *owner, const char *key)
{
	struct trust *trust = owner;
	struct trusted *t = strmap_get(&trust->keys, key);
	char group[PLACE_GROUP_MAX];

	if (!t && trust->looked >= LOOKED_MAX)
		return false;
	t = trusted_get(trust, key);
	if (t && !t->user.cache) {
		trust_group(key, group);
		t->user.on_change = trust_on_change;
		t->since_ns = loop_now_ns(trust->groups->loop);
		if (groups_use(trust->groups, group, false, &t->user) == 0) {
			trust->looked++;
			t->found = false;
			if (groups_known(&t->user)) /* it has other users */
				trust_on_change(&t->user);
		}
	}
	tick_start(trust);
	if (t && t->user.cache)
		return !t->found;
	err_clear();
	return false;
}

/* It is not looked up any more; one that was dialled is kept. */
static void trusted_rest(struct trusted *t)
{
	if (!*t->dialled) {
		trusted_free(t);
		return;
	}
	groups_unuse(&t->user);
	t->trust->looked--;
}

/* Keys without an entry. */
static void trust_on_tick(struct loop_timer *timer)
{
	struct trust *trust = container_of(timer, struct trust, tick);
	uint64_t now_ns = loop_now_ns(timer->loop);
	struct trusted *t;

	list_foreach_safe(t, &trust->list, link) {
		if (t->user.cache && !t->found && now_ns - t->since_ns >= LOOK_NS)
			trusted_rest(t);
	}
	if (trust->looked)
		tick_start(trust);
}

int trust_dial(struct trust *trust, const struct record *record)
{
	struct trusted *t;

	if (!*record->key)
		return 0;
	t = trusted_get(trust, record->key);
	if (!t)
		return err_pass(-ENOMEM);
	memcpy(t->dialled, record->endpoint, sizeof(t->dialled));
	return 0;
}

void trust_counts(const struct trust *trust, unsigned int *keys_p,
		  unsigned int *unknown_p)
{
	*keys_p = (unsigned int)strmap_count(&trust->keys);
	*unknown_p = trust->looked;
}

const struct link_vouch *trust_vouch(const struct trust *trust)
{
	return &trust->vouch;
}

int trust_new(struct groups *groups, void (*on_change)(void *arg), void *arg,
	      struct trust **trust_p)
{
	struct trust *trust = mem_zalloc(sizeof(*trust));

	*trust_p = trust;
	if (!trust)
		return err_pass(-ENOMEM);
	trust->groups = groups;
	trust->on_change = on_change;
	trust->arg = arg;
	trust->vouch = (struct link_vouch){
		.owner = trust, .knows = trust_knows, .at = trust_at, .ask = trust_ask};
	strmap_init(&trust->keys);
	list_init(&trust->list);
	loop_timer_init(&trust->tick, groups->loop, trust_on_tick);
	return 0;
}

void trust_free(struct trust *trust)
{
	struct trusted *t;

	if (!trust)
		return;
	list_foreach_safe(t, &trust->list, link)
		trusted_free(t);
	strmap_fini(&trust->keys);
	loop_timer_stop(&trust->tick);
	mem_free(trust);
}
