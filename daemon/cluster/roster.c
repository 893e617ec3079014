/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One list holds present and removed entries, ordered by change: the changes after a
 * revision are its tail, so a reply costs only the new ones. An entry that changes moves
 * to the end, so of many changes of one the last is reported. A removed entry stays,
 * without texts, until ROSTER_GONE_MAX newer ones were removed.
 */
#include "daemon/cluster/roster.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/sanitize.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"

#define FEW_ENTRIES 64u /* are freed at once */

const char *const place_axis_names[PLACE_AXES] = {"tp", "pp", "dp", "cp"};

size_t place_key(const struct place *place, struct place_key *key_p)
{
	size_t len = strlen(place->worker);

	memcpy(key_p->rank, place->rank, sizeof(key_p->rank));
	memcpy(key_p->worker, place->worker, len);
	return offsetof(struct place_key, worker) + len;
}

void roster_init(struct roster *roster, uint64_t first)
{
	*roster = (struct roster){.rev = first, .forgotten = first};
	strmap_init(&roster->places);
	strmap_init(&roster->workers);
	list_init(&roster->order);
	list_init(&roster->gone);
}

/* Of a name, the entries that are there. */
struct roster_worker {
	unsigned int entries;
};

static struct roster_worker *worker_take(struct roster *roster, const char *name)
{
	struct roster_worker *worker = strmap_get(&roster->workers, name);

	if (!worker) {
		worker = mem_zalloc(sizeof(*worker));
		if (!worker || strmap_put(&roster->workers, name, worker) < 0) {
			mem_free(worker);
			return NULL;
		}
	}
	worker->entries++;
	return worker;
}

static void worker_drop(struct roster *roster, const char *name,
			struct roster_worker *worker)
{
	if (!worker || --worker->entries > 0)
		return;
	strmap_remove(&roster->workers, name);
	mem_free(worker);
}

const char *roster_only_worker(const struct roster *roster)
{
	struct idmap_cursor at = {0};

	if (strmap_count(&roster->workers) != 1)
		return NULL;
	(void)idmap_next(&roster->workers.map, &at);
	return at.bytes;
}

static void roster_forget(struct roster *roster, struct roster_entry *entry)
{
	struct place_key key;
	size_t len = place_key(&entry->place, &key);

	strmap_remove_bytes(&roster->places, &key, len);
	list_remove(&entry->link);
	list_remove(&entry->gone_link);
	worker_drop(roster, entry->place.worker, entry->worker);
	mem_free(entry->record);
	mem_free(entry->load);
	mem_free(entry);
}

void roster_fini(struct roster *roster)
{
	struct roster_entry *entry;

	list_foreach_safe(entry, &roster->order, link)
		roster_forget(roster, entry);
	strmap_fini(&roster->places);
	strmap_fini(&roster->workers);
	roster->count = roster->gone_count = 0;
}

void roster_move(struct roster *roster, struct roster *from)
{
	*roster = *from;
	list_init(&roster->order);
	list_init(&roster->gone);
	list_append(&roster->order, &from->order);
	list_append(&roster->gone, &from->gone);
	roster_init(from, from->rev);
}

static void roster_free(void *owned)
{
	roster_fini(owned);
	mem_free(owned);
}

void roster_discard(struct roster *roster, struct offload *offload)
{
	struct roster *rest = NULL;

	if (offload && roster->count > FEW_ENTRIES)
		rest = mem_zalloc_quiet(sizeof(*rest));
	if (!rest) {
		roster_fini(roster);
		return;
	}
	roster_move(rest, roster);
	offload_discard(offload, roster_free, rest);
}

static struct roster_entry *roster_look(const struct roster *roster,
					const struct place *place)
{
	struct place_key key;
	size_t len = place_key(place, &key);

	return strmap_get_bytes(&roster->places, &key, len);
}

struct roster_entry *roster_find(const struct roster *roster, const struct place *place)
{
	struct roster_entry *entry = roster_look(roster, place);

	return entry && entry->record ? entry : NULL;
}

static struct roster_entry *roster_add(struct roster *roster, const struct place *place)
{
	struct roster_entry *entry = mem_zalloc(sizeof(*entry));
	struct place_key key;
	size_t len = place_key(place, &key);

	if (!entry)
		return NULL;
	entry->place = *place;
	list_init(&entry->gone_link);
	if (strmap_put_bytes(&roster->places, &key, len, entry) < 0) {
		mem_free(entry);
		return NULL;
	}
	list_push_back(&roster->order, &entry->link);
	list_push_back(&roster->gone, &entry->gone_link);
	roster->gone_count++;
	return entry;
}

static void roster_moved(struct roster *roster, struct roster_entry *entry)
{
	entry->changed = ++roster->rev;
	list_remove(&entry->link);
	list_push_back(&roster->order, &entry->link);
}

/* The oldest removals are forgotten. */
static void roster_trim(struct roster *roster)
{
	while (roster->gone_count > ROSTER_GONE_MAX) {
		struct roster_entry *entry =
			list_first(&roster->gone, struct roster_entry, gone_link);

		roster->forgotten = entry->changed;
		roster->gone_count--;
		roster_forget(roster, entry);
	}
}

/* A copy, unless it is the same. False: no memory. */
static bool text_fresh(const char *text, const char *old, char **fresh_p)
{
	*fresh_p = NULL;
	if (!text || (old && strcmp(text, old) == 0))
		return true;
	*fresh_p = mem_strdup(text);
	return *fresh_p;
}

int roster_put(struct roster *roster, const struct place *place, const char *record,
	       const char *load, struct roster_entry **entry_p)
{
	struct roster_entry *entry = roster_look(roster, place);
	cleanup_free char *fresh_record = NULL;
	cleanup_free char *fresh_load = NULL;
	struct roster_worker *worker = NULL;

	assert(record || (entry && entry->record));
	*entry_p = entry;
	if (!text_fresh(record, entry ? entry->record : NULL, &fresh_record) ||
	    !text_fresh(load, entry ? entry->load : NULL, &fresh_load))
		return err_pass(-ENOMEM);
	if (entry)
		entry->stale = false;
	if (!fresh_record && !fresh_load)
		return 0;
	if (!entry || !entry->record) {
		worker = worker_take(roster, place->worker);
		if (!worker)
			return err_pass(-ENOMEM);
	}
	if (!entry)
		entry = roster_add(roster, place);
	if (!entry) {
		worker_drop(roster, place->worker, worker);
		return err_pass(-ENOMEM);
	}
	roster_moved(roster, entry);
	if (!entry->record) {
		list_remove(&entry->gone_link);
		roster->gone_count--;
		roster->count++;
		entry->worker = worker;
	}
	if (fresh_record) {
		mem_free(entry->record);
		entry->record = mem_steal(fresh_record);
		entry->record_rev = entry->changed;
	}
	if (fresh_load) {
		mem_free(entry->load);
		entry->load = mem_steal(fresh_load);
		entry->load_rev = entry->changed;
	}
	*entry_p = entry;
	return 1;
}

void roster_missing(struct roster *roster, struct roster_entry *entry, uint64_t missing)
{
	roster->missing += missing - entry->missing;
	entry->missing = missing;
}

void roster_drop(struct roster *roster, struct roster_entry *entry)
{
	assert(entry->record);
	mem_free(entry->record);
	mem_free(entry->load);
	entry->record = entry->load = NULL;
	entry->user = NULL;
	entry->stale = false;
	worker_drop(roster, entry->place.worker, entry->worker);
	entry->worker = NULL;
	roster_missing(roster, entry, 0);
	roster_moved(roster, entry);
	entry->record_rev = entry->changed;
	entry->load_rev = 0;
	list_push_back(&roster->gone, &entry->gone_link);
	roster->count--;
	roster->gone_count++;
	roster_trim(roster);
}

void roster_mark(struct roster *roster)
{
	struct roster_entry *entry;

	list_foreach(entry, &roster->order, link)
		entry->stale = entry->record != NULL;
}

void roster_sweep(struct roster *roster,
		  void (*on_gone)(void *arg, const struct place *place), void *arg)
{
	struct list stale = LIST_INIT(stale);
	struct roster_entry *entry;

	/* first, as a drop may free others of the list */
	list_foreach_safe(entry, &roster->order, link) {
		if (!entry->stale)
			continue;
		list_remove(&entry->link);
		list_push_back(&stale, &entry->link);
	}
	while ((entry = list_first(&stale, struct roster_entry, link))) {
		struct place place = entry->place;

		roster_drop(roster, entry);
		if (on_gone)
			on_gone(arg, &place);
	}
}

struct roster_entry *roster_after(const struct roster *roster, uint64_t since)
{
	struct roster_entry *entry =
		list_first(&roster->order, struct roster_entry, link);
	struct roster_entry *found = NULL;

	if (entry && entry->changed > since)
		return entry;
	for (const struct list *at = roster->order.prev; at != &roster->order;
	     at = at->prev) {
		entry = list_entry((struct list *)(uintptr_t)at, struct roster_entry,
				   link);
		if (entry->changed <= since)
			break;
		found = entry;
	}
	return found;
}

struct roster_entry *roster_behind(const struct roster *roster, uint64_t since,
				   const struct place *last)
{
	const struct roster_entry *entry = roster_look(roster, last);

	return entry && entry->changed == since ? roster_next(roster, entry)
						: roster_after(roster, since);
}

struct roster_entry *roster_next(const struct roster *roster,
				 const struct roster_entry *entry)
{
	return entry->link.next == &roster->order
		       ? NULL
		       : list_entry(entry->link.next, struct roster_entry, link);
}

int group_check(const char *group)
{
	if (!*group || strlen(group) >= PLACE_GROUP_MAX)
		return err_raise(ERR_INVAL, "group: must have 1 to %u bytes",
				 PLACE_GROUP_MAX - 1);
	return 0;
}

int place_check(const struct place *place)
{
	size_t group = strnlen(place->group, PLACE_GROUP_MAX);
	size_t worker = strnlen(place->worker, PLACE_WORKER_MAX);

	if (group < 1 || group >= PLACE_GROUP_MAX || !sanitize_is_clean(place->group))
		return err_raise(ERR_INVAL,
				 "group: must have 1 to %u bytes of "
				 "printable text",
				 PLACE_GROUP_MAX - 1);
	if (worker >= PLACE_WORKER_MAX || !sanitize_is_clean(place->worker) ||
	    strcmp(place->worker, "-") == 0)
		return err_raise(ERR_INVAL,
				 "worker: must have at most %u bytes of printable text, "
				 "and not be '-'",
				 PLACE_WORKER_MAX - 1);
	for (unsigned int i = 0; i < PLACE_AXES; i++) {
		if (place->rank[i] >= PLACE_SIZE_MAX)
			return err_raise(ERR_INVAL, "%s_rank: %u, must be under %u",
					 place_axis_names[i], place->rank[i],
					 PLACE_SIZE_MAX);
	}
	return 0;
}

int place_texts_check(const char *record, const char *load)
{
	if (record && strlen(record) > DIRECTORY_RECORD_MAX)
		return err_raise(ERR_LIMIT, "record: %zu bytes (limit %u)",
				 strlen(record), DIRECTORY_RECORD_MAX);
	if (load && strlen(load) > DIRECTORY_LOAD_MAX)
		return err_raise(ERR_LIMIT, "load: %zu bytes (limit %u)", strlen(load),
				 DIRECTORY_LOAD_MAX);
	return 0;
}

const char *place_text(const struct place *place, char text[PLACE_TEXT_MAX])
{
	snprintf(text, PLACE_TEXT_MAX, "group '%s'%s%s%s rank %u.%u.%u.%u", place->group,
		 *place->worker ? " worker '" : "", place->worker,
		 *place->worker ? "'" : "", place->rank[PLACE_TP], place->rank[PLACE_PP],
		 place->rank[PLACE_DP], place->rank[PLACE_CP]);
	return text;
}
