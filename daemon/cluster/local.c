/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each group has two rosters: `now`, the one for readers, and `lines` of the file. An
 * entry of `now` is a session's (its user is the publication) or has the record of the
 * line at its place.
 *
 * Readers get changes in a later turn, some entries each, from their own revision on: of
 * many changes of one entry, the last. A reader keeps its reported entries in a roster of
 * its own, so a reader whose revision is older than the remembered removals gets all
 * entries again and sweeps the rest.
 */
#include "daemon/cluster/local.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/endpoint.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/cluster_file.h"
#include "daemon/cluster/record.h"
#include "daemon/cluster/roster.h"
#include "daemon/loop/loop.h"

struct local_group {
	struct list link; /* in local.list */
	char name[PLACE_GROUP_MAX];
	struct roster now, lines;
	struct list readers;
};

struct local_published {
	struct publication *publication;
	struct local *local;
	struct list link; /* in local.said, or, before its result, in local.answers */
	struct place place;
};

struct local_reader {
	struct watch *watch; /* NULL: ended, during its callback */
	struct local *local;
	struct local_group *group;
	struct list of_group, link; /* link: in local.due, or alone */
	struct roster roster;	    /* entries reported to its owner */
	uint64_t rev;		    /* of the group: reported up to it */
	struct place last;	    /* changed at `rev` */
	uint64_t forgotten;	    /* of the group, at the last full report */
	bool loads, synced;
	bool sweeps; /* a full report is in progress; other entries are then removed */
	bool again;  /* no memory for an entry: all is reported once more */
};

struct local {
	struct directory base;
	struct loop *loop;
	struct offload *offload;
	char own[LINK_ENDPOINT_MAX];
	struct strmap groups; /* by name */
	struct list list;     /* the same */
	struct list said, answers;
	struct list due;	      /* readers with pending reports */
	struct local_reader *telling; /* whose owner is being called */
	bool closing;
	struct loop_defer tell;
	struct directory_state state;
};

static const struct directory_ops local_ops;

static struct local *local_of(const struct directory *directory)
{
	assert(directory->ops == &local_ops);
	return container_of((struct directory *)(uintptr_t)directory, struct local, base);
}

/* ---- groups ---- */

static struct local_group *group_get(struct local *local, const char *name)
{
	struct local_group *group = strmap_get(&local->groups, name);

	if (group)
		return group;
	group = mem_zalloc(sizeof(*group));
	if (!group)
		return NULL;
	snprintf(group->name, sizeof(group->name), "%s", name);
	roster_init(&group->now, 1);
	roster_init(&group->lines, 1);
	list_init(&group->readers);
	if (strmap_put(&local->groups, name, group) < 0) {
		mem_free(group);
		return NULL;
	}
	list_push_back(&local->list, &group->link);
	return group;
}

static void group_free(struct local_group *group)
{
	roster_fini(&group->now);
	roster_fini(&group->lines);
	list_remove(&group->link);
	mem_free(group);
}

/* It has no entries and no readers. */
static void group_idle(struct local *local, struct local_group *group)
{
	if (local->closing || !list_empty(&group->readers) || group->now.count ||
	    group->lines.count)
		return;
	strmap_remove(&local->groups, group->name);
	group_free(group);
}

static void reader_due(struct local_reader *reader)
{
	if (list_empty(&reader->link))
		list_push_back(&reader->local->due, &reader->link);
	loop_defer(reader->local->loop, &reader->local->tell);
}

static void group_changed(const struct local_group *group)
{
	struct local_reader *reader;

	list_foreach(reader, &group->readers, of_group)
		reader_due(reader);
}

static int group_put(struct local *local, struct local_group *group,
		     const struct place *place, const char *record, const char *load,
		     struct roster_entry **entry_p)
{
	int r = roster_put(&group->now, place, record, load, entry_p);

	if (r > 0)
		group_changed(group);
	local->state.puts += r > 0;
	return err_pass(r);
}

static void group_drop(struct local_group *group, struct roster_entry *entry)
{
	roster_drop(&group->now, entry);
	group_changed(group);
}

/* ---- calls of sessions ---- */

/* Does the line at a place name this daemon? */
static int line_check(const struct local *local, const struct local_group *group,
		      const struct place *place)
{
	const struct roster_entry *line = roster_find(&group->lines, place);
	const char *key = strchr(local->own, '#');
	cleanup_free struct record *record = NULL;
	char endpoint[LINK_ENDPOINT_MAX], text[PLACE_TEXT_MAX];
	int r;

	if (!line)
		return 0;
	record = mem_alloc(sizeof(*record));
	r = record ? record_read(line->record, record) : -ENOMEM;
	if (r < 0)
		return err_pass(r);
	record_dial(record, endpoint);
	/* a key has one daemon, which may be named by several hosts */
	if (*record->key && key ? strcmp(record->key, key + 1) == 0
				: endpoint_same(endpoint, local->own))
		return 0;
	return err_raise(ERR_EXIST,
			 "%s: the members file has it at %s; correct the line, or "
			 "publish another place",
			 place_text(place, text), endpoint);
}

static void published_end(struct local_published *said)
{
	struct local *local = said->local;
	struct local_group *group = strmap_get(&local->groups, said->place.group);
	struct roster_entry *entry = roster_find(&group->now, &said->place);
	const struct roster_entry *line = roster_find(&group->lines, &said->place);

	said->publication->impl = NULL;
	group_drop(group, entry);
	/* if memory was short when the file was read again */
	if (line && group_put(local, group, &said->place, line->record, NULL, &entry) < 0)
		err_clear();
	group_idle(local, group);
	list_remove(&said->link);
	mem_free(said);
}

static void local_withdraw(struct publication *publication)
{
	if (publication->impl)
		published_end(publication->impl);
}

static int published_put(struct local_published *said, struct local_group *group,
			 const char *record, const char *load)
{
	struct roster_entry *entry = roster_find(&group->now, &said->place);
	int r;

	if (!entry || entry->user != said)
		r = line_check(said->local, group, &said->place);
	else
		r = 0;
	if (r == 0)
		r = group_put(said->local, group, &said->place, record, load, &entry);
	if (r < 0)
		return err_pass(r);
	entry->user = said;
	return 0;
}

static int published_new(struct local *local, struct publication *publication,
			 const struct place *place, const char *record, const char *load)
{
	struct local_published *said = mem_zalloc(sizeof(*said));
	struct local_group *group = said ? group_get(local, place->group) : NULL;
	int r;

	if (!group) {
		mem_free(said);
		return err_pass(-ENOMEM);
	}
	said->publication = publication;
	said->local = local;
	said->place = *place;
	r = published_put(said, group, record, load);
	if (r < 0) {
		group_idle(local, group);
		mem_free(said);
		return err_pass(r);
	}
	publication->impl = said;
	list_push_back(&local->answers, &said->link);
	loop_defer(local->loop, &local->tell);
	return 0;
}

static int local_publish(struct directory *directory, struct publication *publication,
			 const struct place *place, const char *record, const char *load)
{
	struct local *local = local_of(directory);
	struct local_group *group = strmap_get(&local->groups, place->group);
	const struct roster_entry *entry = NULL;
	char text[PLACE_TEXT_MAX];
	int r = place_check(place);

	if (r == 0)
		r = place_texts_check(record, load);
	if (r < 0)
		return err_pass(r);
	if (group)
		entry = roster_find(&group->now, place);
	if (entry && entry->user && entry->user != publication->impl)
		return err_raise(ERR_EXIST, "%s: the rank is published already",
				 place_text(place, text));
	local_withdraw(publication);
	return err_pass(published_new(local, publication, place, record, load));
}

static int local_update(struct publication *publication, const char *record,
			const char *load)
{
	struct local_published *said = publication->impl;
	int r = place_texts_check(record, load);

	if (r < 0)
		return err_pass(r);
	return err_pass(published_put(
		said, strmap_get(&said->local->groups, said->place.group), record, load));
}

static void answer_all(struct local *local)
{
	struct local_published *said;

	for (unsigned int i = 0;
	     (said = list_first(&local->answers, struct local_published, link)); i++) {
		struct publication *publication = said->publication;

		if (i && loop_enough(local->loop)) {
			loop_defer(local->loop, &local->tell);
			return;
		}
		list_remove(&said->link);
		list_push_back(&local->said, &said->link);
		if (publication->on_done)
			publication->on_done(publication, NULL);
	}
}

/* ---- reading ---- */

static void reader_free(struct local_reader *reader)
{
	struct local *local = reader->local;

	list_remove(&reader->of_group);
	list_remove(&reader->link);
	group_idle(local, reader->group);
	roster_discard(&reader->roster, local->offload);
	mem_free(reader);
}

static void local_unwatch(struct watch *watch)
{
	struct local_reader *reader = watch->impl;

	if (!reader)
		return;
	watch->impl = NULL;
	reader->watch = NULL;
	if (reader->local->telling != reader)
		reader_free(reader);
}

static int local_watch(struct directory *directory, struct watch *watch,
		       const char *group, bool loads)
{
	struct local *local = local_of(directory);
	struct local_reader *reader;
	int r = group_check(group);

	assert(!watch->impl);
	if (r < 0)
		return err_pass(r);
	reader = mem_zalloc(sizeof(*reader));
	if (reader)
		reader->group = group_get(local, group);
	if (!reader || !reader->group) {
		mem_free(reader);
		return err_pass(-ENOMEM);
	}
	reader->watch = watch;
	reader->local = local;
	reader->loads = loads;
	roster_init(&reader->roster, 1);
	list_init(&reader->link);
	list_push_back(&reader->group->readers, &reader->of_group);
	watch->impl = reader;
	reader_due(reader);
	return 0;
}

static void reader_call(struct local_reader *reader, const struct place *place,
			const char *record, const char *load)
{
	reader->local->state.events++;
	if (reader->watch)
		reader->watch->on_entry(reader->watch, place, record, load);
}

static void reader_on_gone(void *arg, const struct place *place)
{
	reader_call(arg, place, NULL, NULL);
}

static void reader_tell(struct local_reader *reader, const struct roster_entry *entry)
{
	struct roster_entry *known = roster_find(&reader->roster, &entry->place);
	int r;

	reader->rev = entry->changed;
	reader->last = entry->place;
	if (!entry->record) {
		if (known)
			roster_drop(&reader->roster, known);
		if (known)
			reader_on_gone(reader, &reader->last);
		return;
	}
	/* a load that was removed with its entry, which was added again at once */
	if (known && known->load && !entry->load)
		roster_drop(&reader->roster, known);
	r = roster_put(&reader->roster, &entry->place, entry->record,
		       reader->loads ? entry->load : NULL, &known);
	if (r < 0) {
		err_clear();
		reader->again = true;
	}
	if (r > 0)
		reader_call(reader, &known->place, known->record, known->load);
}

/* False: there is more for a later turn. */
static bool reader_step(struct local_reader *reader)
{
	const struct roster *now = &reader->group->now;
	const struct roster_entry *entry;

	if (reader->again ||
	    (reader->rev < now->forgotten && reader->forgotten != now->forgotten)) {
		reader->again = false;
		reader->sweeps = true;
		reader->rev = 0;
		reader->forgotten = now->forgotten;
		roster_mark(&reader->roster);
	}
	while (reader->watch &&
	       (entry = reader->rev ? roster_behind(now, reader->rev, &reader->last)
				    : roster_after(now, 0))) {
		reader_tell(reader, entry);
		if (loop_enough(reader->local->loop))
			return false;
	}
	if (reader->again)
		return false;
	reader->rev = now->rev;
	if (reader->sweeps)
		roster_sweep(&reader->roster, reader_on_gone, reader);
	reader->sweeps = false;
	if (!reader->watch || reader->synced)
		return true;
	reader->synced = true;
	if (reader->watch->on_synced)
		reader->watch->on_synced(reader->watch);
	return true;
}

static void reader_run(struct local_reader *reader)
{
	struct local *local = reader->local;

	local->telling = reader;
	if (!reader_step(reader))
		reader_due(reader);
	local->telling = NULL;
	if (!reader->watch)
		reader_free(reader);
}

static void on_tell(struct loop_defer *defer)
{
	struct local *local = container_of(defer, struct local, tell);
	struct local_reader *reader;

	answer_all(local);
	while ((reader = list_first(&local->due, struct local_reader, link))) {
		list_remove(&reader->link);
		reader_run(reader);
		if (!list_empty(&local->due) && loop_enough(local->loop)) {
			loop_defer(local->loop, defer);
			return;
		}
	}
}

/* ---- the file ---- */

static int line_put(struct local *local, const struct cluster_line *line)
{
	struct local_group *group = group_get(local, line->place.group);
	struct roster_entry *entry;
	int r = group ? roster_put(&group->lines, &line->place, line->record, NULL,
				   &entry)
		      : -ENOMEM;

	if (r < 0)
		return err_pass(r);
	entry = roster_find(&group->now, &line->place);
	if (entry && entry->user)
		return 0;
	r = group_put(local, group, &line->place, line->record, NULL, &entry);
	return r < 0 ? err_pass(r) : 0;
}

static void on_line_gone(void *arg, const struct place *place)
{
	struct local_group *group = arg;
	struct roster_entry *entry = roster_find(&group->now, place);

	if (entry && !entry->user)
		group_drop(group, entry);
}

int local_lines(struct directory *directory, const struct cluster_file *file)
{
	struct local *local = local_of(directory);
	struct local_group *group;

	list_foreach(group, &local->list, link)
		roster_mark(&group->lines);
	for (unsigned int i = 0; i < file->count; i++) {
		if (line_put(local, &file->lines[i]) < 0)
			return err_pass(-ENOMEM);
	}
	list_foreach_safe(group, &local->list, link) {
		roster_sweep(&group->lines, on_line_gone, group);
		group_idle(local, group);
	}
	return 0;
}

/* ---- the whole ---- */

static void local_state(const struct directory *directory,
			struct directory_state *state_p)
{
	*state_p = local_of(directory)->state;
}

static void local_free(struct directory *directory)
{
	struct local *local = local_of(directory);
	struct local_reader *reader;
	struct local_group *group;
	struct local_published *said;

	local->closing = true;
	list_foreach(group, &local->list, link) {
		while ((reader = list_first(&group->readers, struct local_reader,
					    of_group)))
			local_unwatch(reader->watch);
	}
	while ((said = list_first(&local->answers, struct local_published, link)) ||
	       (said = list_first(&local->said, struct local_published, link)))
		published_end(said);
	list_foreach_safe(group, &local->list, link)
		group_free(group);
	strmap_fini(&local->groups);
	loop_defer_cancel(&local->tell);
	mem_free(local);
}

static const struct directory_ops local_ops = {
	.name = "local",
	.publish = local_publish,
	.update = local_update,
	.withdraw = local_withdraw,
	.watch = local_watch,
	.unwatch = local_unwatch,
	.state = local_state,
	.free = local_free,
};

int local_new(struct loop *loop, struct offload *offload, const char *own,
	      struct directory **directory_p)
{
	struct local *local = mem_zalloc(sizeof(*local));

	*directory_p = NULL;
	if (!local)
		return err_pass(-ENOMEM);
	local->base.ops = &local_ops;
	local->loop = loop;
	local->offload = offload;
	snprintf(local->own, sizeof(local->own), "%s", own);
	strmap_init(&local->groups);
	list_init(&local->list);
	list_init(&local->said);
	list_init(&local->answers);
	list_init(&local->due);
	loop_defer_init(&local->tell, on_tell);
	local->state =
		(struct directory_state){.up = true, .since_ns = loop_now_ns(loop)};
	*directory_p = &local->base;
	return 0;
}
