/* SPDX-License-Identifier: Apache-2.0 */
/* What is published goes to one directory of daemon/cluster/local.h, which all members
 * read; leases and claims of places that others have are added here. */
#include "tests/lib/directory_hub.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/cluster/local.h"
#include "daemon/cluster/roster.h"
#include "daemon/loop/loop.h"
#include "tests/lib/cluster.h"

struct directory_hub {
	struct loop *loop;
	struct directory *table;
	uint64_t lease_ns;
	struct list said, members;
	struct loop_timer tick;
	bool away;
};

struct hub_member {
	struct directory base;
	struct directory_hub *hub;
	struct list link;
	bool dead;
};

struct hub_said {
	struct publication inner;  /* in the table, if it has the place */
	struct publication *outer; /* NULL: its daemon has died */
	struct hub_member *member;
	struct directory_hub *hub;
	struct list link;
	struct place place;
	char record[DIRECTORY_RECORD_MAX + 1], load[DIRECTORY_LOAD_MAX + 1];
	bool has_load;
	uint64_t until_ns; /* of a claim, or of what a dead daemon published */
};

static char unheard; /* impl of watches that began while the hub was away */
/* Of the table, whichever it is. */
static void (*table_unwatch)(struct watch *watch);

static struct hub_member *member_of(const struct directory *directory)
{
	return container_of((struct directory *)(uintptr_t)directory, struct hub_member,
			    base);
}

static void said_free(struct hub_said *said)
{
	said->hub->table->ops->withdraw(&said->inner);
	if (said->outer)
		said->outer->impl = NULL;
	list_remove(&said->link);
	free(said);
}

static void on_taken(struct publication *inner, const struct err *err)
{
	const struct hub_said *said = container_of(inner, struct hub_said, inner);

	if (said->outer && said->outer->on_done)
		said->outer->on_done(said->outer, err);
}

static bool place_equal(const struct place *a, const struct place *b)
{
	return strcmp(a->group, b->group) == 0 && strcmp(a->worker, b->worker) == 0 &&
	       memcmp(a->rank, b->rank, sizeof(a->rank)) == 0;
}

static bool is_held(const struct hub_said *of)
{
	const struct hub_said *said;

	list_foreach(said, &of->hub->said, link) {
		if (said->inner.impl && place_equal(&said->place, &of->place))
			return true;
	}
	return false;
}

/* It gets the place, if nobody has it. */
static int said_claim(struct hub_said *said)
{
	struct directory *table = said->hub->table;

	if (said->hub->away || is_held(said))
		return 0;
	return table->ops->publish(table, &said->inner, &said->place, said->record,
				   said->has_load ? said->load : NULL);
}

static void claim_all(struct directory_hub *hub)
{
	struct hub_said *said;

	list_foreach(said, &hub->said, link) {
		if (!said->inner.impl && said_claim(said) < 0)
			err_clear(); /* no memory: at the next tick */
	}
}

static void on_tick(struct loop_timer *timer)
{
	struct directory_hub *hub = container_of(timer, struct directory_hub, tick);
	struct hub_said *said;
	struct err err;

	/* before others go: their end is told, too */
	claim_all(hub);
	err_set(&err, ERR_EXIST, "the rank is published by another daemon");
	list_foreach_safe(said, &hub->said, link) {
		struct publication *outer = said->outer;

		if (outer && (said->inner.impl || hub->away))
			continue;
		if (said->until_ns > loop_now_ns(hub->loop))
			continue;
		said_free(said);
		if (outer && outer->on_done)
			outer->on_done(outer, &err);
	}
	loop_timer_start(timer, hub->lease_ns / 8);
}

static void hub_withdraw(struct publication *publication)
{
	struct hub_said *said = publication->impl;
	struct directory_hub *hub = said ? said->hub : NULL;

	if (!said)
		return;
	said_free(said);
	claim_all(hub);
}

static int hub_check(const struct place *place, const char *record, const char *load)
{
	int r = place_check(place);

	if (r == 0 && ((record && strlen(record) > DIRECTORY_RECORD_MAX) ||
		       (load && strlen(load) > DIRECTORY_LOAD_MAX)))
		r = err_raise(ERR_LIMIT, "too long");
	return err_pass(r);
}

static void said_texts(struct hub_said *said, const char *record, const char *load)
{
	if (record)
		strcpy(said->record, record);
	if (load)
		strcpy(said->load, load);
	said->has_load |= load != NULL;
}

static int hub_publish(struct directory *directory, struct publication *publication,
		       const struct place *place, const char *record, const char *load)
{
	struct hub_member *member = member_of(directory);
	struct directory_hub *hub = member->hub;
	struct hub_said *said;
	int r = hub_check(place, record, load);

	if (r < 0 || member->dead)
		return err_pass(r);
	list_foreach(said, &hub->said, link) {
		if (said->member == member && said->outer != publication &&
		    place_equal(&said->place, place))
			return err_raise(ERR_EXIST, "the rank is published already");
	}
	hub_withdraw(publication);
	said = calloc(1, sizeof(*said));
	assert_non_null(said);
	said->hub = hub;
	said->member = member;
	said->place = *place;
	said->inner.on_done = on_taken;
	said->until_ns = loop_now_ns(hub->loop) + 2 * hub->lease_ns;
	said_texts(said, record, load);
	list_push_back(&hub->said, &said->link);
	r = said_claim(said);
	if (r < 0) {
		said_free(said);
		return err_pass(r);
	}
	said->outer = publication;
	publication->impl = said;
	return 0;
}

static int hub_update(struct publication *publication, const char *record,
		      const char *load)
{
	struct hub_said *said = publication->impl;
	int r = said ? hub_check(&said->place, record, load) : 0;

	if (r < 0 || !said)
		return err_pass(r);
	said_texts(said, record, load);
	if (!said->inner.impl)
		return 0;
	return err_pass(said->hub->table->ops->update(&said->inner, record, load));
}

static int hub_watch(struct directory *directory, struct watch *watch, const char *group,
		     bool loads)
{
	struct directory_hub *hub = member_of(directory)->hub;
	struct directory *table = hub->table;

	if (hub->away) { /* who reads it later watches it again */
		watch->impl = &unheard;
		return 0;
	}
	return err_pass(table->ops->watch(table, watch, group, loads));
}

static void hub_unwatch(struct watch *watch)
{
	if (watch->impl == &unheard)
		watch->impl = NULL;
	table_unwatch(watch);
}

static void hub_state(const struct directory *directory, struct directory_state *state_p)
{
	const struct directory_hub *hub = member_of(directory)->hub;

	hub->table->ops->state(hub->table, state_p);
	state_p->up = !hub->away;
	if (hub->away)
		err_set(&state_p->why, ERR_PEER, "the hub is away");
}

static void hub_leave(struct directory *directory)
{
	struct hub_member *member = member_of(directory);
	struct hub_said *said;

	list_foreach_safe(said, &member->hub->said, link) {
		if (said->member == member)
			said_free(said);
	}
	claim_all(member->hub);
	list_remove(&member->link);
	free(member);
}

static const struct directory_ops hub_ops = {
	.name = "hub",
	.publish = hub_publish,
	.update = hub_update,
	.withdraw = hub_withdraw,
	.watch = hub_watch,
	.unwatch = hub_unwatch,
	.state = hub_state,
	.free = hub_leave,
};

struct directory *directory_hub_member(struct directory_hub *hub)
{
	struct hub_member *member = calloc(1, sizeof(*member));

	assert_non_null(member);
	member->base.ops = &hub_ops;
	member->hub = hub;
	list_push_back(&hub->members, &member->link);
	return &member->base;
}

void directory_hub_crash(struct directory *directory)
{
	struct hub_member *member = member_of(directory);
	struct hub_said *said;

	member->dead = true;
	list_foreach_safe(said, &member->hub->said, link) {
		if (said->member != member)
			continue;
		if (!said->inner.impl) {
			said_free(said);
			continue;
		}
		said->outer->impl = NULL;
		said->outer = NULL;
		said->member = NULL;
		said->until_ns = loop_now_ns(member->hub->loop) + member->hub->lease_ns;
	}
}

void directory_hub_away(struct directory_hub *hub, bool away)
{
	struct hub_member *member;

	hub->away = away;
	claim_all(hub);
	list_foreach(member, &hub->members, link) {
		if (member->base.on_state)
			member->base.on_state(member->base.arg);
	}
}

struct directory_hub *directory_hub_new(struct loop *loop, uint64_t lease_ns)
{
	struct directory_hub *hub = calloc(1, sizeof(*hub));

	assert_non_null(hub);
	hub->loop = loop;
	hub->lease_ns = lease_ns;
	list_init(&hub->said);
	list_init(&hub->members);
	loop_timer_init(&hub->tick, loop, on_tick);
	assert_int_equal(local_new(loop, NULL, "", &hub->table), 0);
	table_unwatch = hub->table->ops->unwatch;
	loop_timer_start(&hub->tick, lease_ns / 8);
	return hub;
}

void directory_hub_free(struct directory_hub *hub)
{
	struct hub_said *said;

	assert_true(list_empty(&hub->members));
	loop_timer_stop(&hub->tick);
	list_foreach_safe(said, &hub->said, link)
		said_free(said);
	hub->table->ops->free(hub->table);
	free(hub);
}

/* ---- for clusters ---- */

static uint64_t shared_lease_ns;

static struct directory_hub *shared_new(struct loop *loop)
{
	return directory_hub_new(loop, shared_lease_ns);
}

void directory_hub_share(uint64_t lease_ns)
{
	static const struct cluster_sharing sharing = {
		.new = shared_new,
		.free = directory_hub_free,
		.member = directory_hub_member,
		.crash = directory_hub_crash,
	};

	shared_lease_ns = lease_ns;
	cluster_share(lease_ns ? &sharing : NULL);
}
