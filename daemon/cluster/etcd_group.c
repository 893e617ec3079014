/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The known entries of the groups with readers, and the state of each reader.
 *
 * A group's entries are in one list, in order of arrival. A new reader walks along it,
 * some entries a turn; a change is reported at once to those readers that have passed its
 * entry, the others will reach its later state. So each reader sees each entry's states
 * in order, and no reader needs a copy.
 *
 * A range marks the entries that it sees, and the stream those that it reports since; a
 * sweep then removes entries without a mark. When a store was reset the sweep waits for a
 * lease's time, in which the other members return.
 *
 * Foreign keys under our prefix only increment a counter: a key in another form, a value
 * that is too long or not text, a key without a lease, which no member would keep alive.
 * A good entry that becomes bad is removed.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/cluster/etcd_impl.h"
#include "daemon/cluster/roster.h"
#include "proto/json.h"

static const size_t text_max[ETCD_SIDES] = {
	[ETCD_RECORDS] = DIRECTORY_RECORD_MAX,
	[ETCD_LOADS] = DIRECTORY_LOAD_MAX,
};

/* ---- reports ---- */

static bool entry_known(const struct etcd_group *group, const struct etcd_entry *entry,
			enum etcd_side side)
{
	return entry->text[side] && entry->mark[side] >= group->half[side].born;
}

static void reader_tell(struct etcd_reader *reader, const struct etcd_entry *entry)
{
	const struct etcd_group *group = reader->group;
	const char *record = entry->text[ETCD_RECORDS], *load = NULL;
	struct place place;

	memcpy(place.group, group->name, sizeof(place.group));
	memcpy(place.worker, entry->spot.worker, sizeof(place.worker));
	memcpy(place.rank, entry->spot.rank, sizeof(place.rank));
	if (record && reader->loads && entry_known(group, entry, ETCD_LOADS))
		load = entry->text[ETCD_LOADS];
	reader->watch->on_entry(reader->watch, &place, record, load);
}

/* Readers are freed by the step only, so one that on_entry() ends stays in the list. */
static void group_tell(struct etcd_group *group, const struct etcd_entry *entry,
		       enum etcd_side side)
{
	struct etcd_reader *reader;

	group->etcd->state.events++;
	list_foreach(reader, &group->readers, link)
		if (reader->watch && reader->told >= entry->number &&
		    (side == ETCD_RECORDS || reader->loads))
			reader_tell(reader, entry);
}

/* ---- entries ---- */

static void entry_set(struct etcd_group *group, struct etcd_entry *entry,
		      enum etcd_side side, char *text)
{
	struct etcd *e = group->etcd;

	if (entry->text[side])
		e->bytes -= strlen(entry->text[side]) + 1;
	if (text)
		e->bytes += strlen(text) + 1;
	mem_free(entry->text[side]);
	entry->text[side] = text;
}

static void entry_free(struct etcd_group *group, struct etcd_entry *entry)
{
	struct etcd_reader *reader;

	for (int side = 0; side < ETCD_SIDES; side++) {
		entry_set(group, entry, (enum etcd_side)side, NULL);
		if (group->half[side].sweep == &entry->link)
			group->half[side].sweep = entry->link.next;
	}
	list_foreach(reader, &group->readers, link)
		if (reader->at == &entry->link)
			reader->at = entry->link.prev;
	strmap_remove_bytes(&group->spots, &entry->spot, sizeof(entry->spot));
	list_remove(&entry->link);
	group->etcd->entries--;
	mem_free(entry);
}

static int entry_new(struct etcd_group *group, const struct etcd_spot *spot,
		     struct etcd_entry **entry_p)
{
	struct etcd *e = group->etcd;
	struct etcd_entry *entry = mem_zalloc(sizeof(*entry));
	int r;

	if (!entry)
		return err_pass(-ENOMEM);
	entry->spot = *spot;
	r = strmap_put_bytes(&group->spots, &entry->spot, sizeof(entry->spot), entry);
	if (r < 0) {
		mem_free(entry);
		return err_pass(r);
	}
	entry->number = ++e->numbers;
	list_push_back(&group->entries, &entry->link);
	e->entries++;
	*entry_p = entry;
	return 0;
}

/* Its record or load was removed. */
static void entry_drop(struct etcd_group *group, struct etcd_entry *entry,
		       enum etcd_side side)
{
	bool shown = entry->text[ETCD_RECORDS];

	if (!entry->text[side])
		return;
	entry_set(group, entry, side, NULL);
	if (shown)
		group_tell(group, entry, side);
	if (!entry->text[ETCD_RECORDS] && !entry->text[ETCD_LOADS])
		entry_free(group, entry);
}

static void group_refuse(struct etcd *e, const struct etcd_kv *kv, const char *why)
{
	char key[128];

	snprintf(key, sizeof(key), "%.100s", (const char *)kv->key);
	json_sanitize(key);
	if (e->state.refused++ == 0)
		log_warn("etcd", key, "ignored a foreign entry",
			 "why='%s' further='only counted'", why);
	else
		log_debug("etcd", key, "ignored a foreign entry", "why='%s'", why);
}

static struct etcd_group *group_find(struct etcd *e, const char *name)
{
	struct etcd_group *group;

	list_foreach(group, &e->groups, link)
		if (strcmp(group->name, name) == 0)
			return group;
	return NULL;
}

static const char *group_fault(const struct etcd_kv *kv, enum etcd_side side)
{
	if (kv->bad || kv->value_len > text_max[side])
		return "the value is too long or not in etcd's encoding";
	if (!json_utf8((const char *)kv->value, kv->value_len))
		return "the value is not UTF-8, or contains a NUL";
	if (kv->lease == 0)
		return "the key has no lease";
	return NULL;
}

static void group_put(struct etcd_group *group, enum etcd_side side,
		      const struct etcd_spot *spot, const struct etcd_kv *kv)
{
	struct etcd_half *half = &group->half[side];
	struct etcd_entry *entry = strmap_get_bytes(&group->spots, spot, sizeof(*spot));
	const char *value = (const char *)kv->value;
	char *copy;

	if (entry && entry_known(group, entry, side) &&
	    strcmp(entry->text[side], value) == 0) {
		entry->mark[side] = half->mark;
		return;
	}
	if (!entry && (group->etcd->entries >= ETCD_ENTRIES_MAX ||
		       group->etcd->bytes >= ETCD_BYTES_MAX)) {
		group_refuse(group->etcd, kv, "limit of known entries reached");
		return;
	}
	copy = mem_strdup(value);
	if (!copy || (!entry && entry_new(group, spot, &entry) < 0)) {
		err_clear();
		mem_free(copy);
		etcd_half_again(group->etcd, half, ETCD_AGAIN_NS);
		return;
	}
	entry_set(group, entry, side, copy);
	entry->mark[side] = half->mark;
	if (entry->text[ETCD_RECORDS])
		group_tell(group, entry, side);
}

void etcd_group_take(struct etcd *e, const struct etcd_kv *kv, struct etcd_half *range)
{
	enum etcd_side side;
	struct place place;
	struct etcd_spot spot = {.worker = ""};
	struct etcd_entry *entry;
	struct etcd_group *group;
	struct etcd_half *half;
	const char *fault;

	if (kv->key_cut || kv->key_len == 0 ||
	    !etcd_key_read(e->url.prefix, (const char *)kv->key, kv->key_len, &side,
			   &place)) {
		if (!kv->deleted)
			group_refuse(e, kv, "not a key of kvd");
		return;
	}
	group = group_find(e, place.group);
	if (!group)
		return;
	half = &group->half[side];
	if (range ? range != half
		  : half->follow != FOLLOW_STREAM || kv->revision < half->next)
		return;
	if (!range && kv->revision > half->seen)
		half->seen = kv->revision;
	memcpy(spot.worker, place.worker, sizeof(spot.worker));
	memcpy(spot.rank, place.rank, sizeof(spot.rank));
	fault = kv->deleted ? NULL : group_fault(kv, side);
	if (fault)
		group_refuse(e, kv, fault);
	if (!kv->deleted && !fault) {
		group_put(group, side, &spot, kv);
		return;
	}
	entry = strmap_get_bytes(&group->spots, &spot, sizeof(spot));
	if (entry)
		entry_drop(group, entry, side);
}

/* ---- work of several turns ---- */

/* False: there is more. */
static bool group_sweep(struct etcd_group *group, enum etcd_side side)
{
	struct etcd_half *half = &group->half[side];
	struct loop *loop = group->etcd->loop;

	if (half->follow != FOLLOW_STREAM || half->sweep_at_ns == 0)
		return true;
	if (half->sweep_at_ns > loop_now_ns(loop)) {
		etcd_kick_later(group->etcd);
		return true;
	}
	if (!half->sweep)
		half->sweep = group->entries.next;
	while (half->sweep != &group->entries) {
		struct etcd_entry *entry =
			list_entry(half->sweep, struct etcd_entry, link);

		half->sweep = half->sweep->next;
		if (entry->mark[side] != half->mark)
			entry_drop(group, entry, side);
		if (loop_enough(loop))
			return false;
	}
	half->sweep = NULL;
	half->sweep_at_ns = 0;
	return true;
}

static bool reader_walk(struct etcd_reader *reader)
{
	struct etcd_group *group = reader->group;

	while (reader->watch && reader->at) {
		const struct etcd_entry *entry =
			list_entry(reader->at->next, struct etcd_entry, link);

		if (reader->at->next == &group->entries) {
			reader->at = NULL;
			reader->told = UINT64_MAX;
			break;
		}
		reader->at = reader->at->next;
		reader->told = entry->number;
		if (entry->text[ETCD_RECORDS])
			reader_tell(reader, entry);
		if (loop_enough(group->etcd->loop))
			return false;
	}
	return true;
}

static bool half_settled(const struct etcd_half *half)
{
	return half->follow == FOLLOW_STREAM && half->stands && half->sweep_at_ns == 0 &&
	       !half->again;
}

static void reader_check(struct etcd_reader *reader)
{
	struct etcd_group *group = reader->group;

	if (!reader->watch || reader->synced || reader->at ||
	    !half_settled(&group->half[ETCD_RECORDS]) ||
	    (reader->loads && !half_settled(&group->half[ETCD_LOADS])))
		return;
	reader->synced = true;
	if (reader->watch->on_synced)
		reader->watch->on_synced(reader->watch);
}

static void group_free(struct etcd_group *group)
{
	struct etcd *e = group->etcd;
	struct etcd_entry *entry;
	struct etcd_reader *reader;

	for (int side = 0; side < ETCD_SIDES; side++)
		etcd_half_stop(e, &group->half[side]);
	list_foreach_safe(reader, &group->readers, link) {
		list_remove(&reader->link);
		mem_free(reader);
	}
	list_foreach_safe(entry, &group->entries, link)
		entry_free(group, entry);
	strmap_fini(&group->spots);
	list_remove(&group->link);
	e->group_count--;
	mem_free(group);
}

/* Frees ended readers, and unused halves. False: the group was freed. */
static bool group_wants(struct etcd_group *group)
{
	bool wants[ETCD_SIDES] = {false, false};
	struct etcd_reader *reader;

	list_foreach_safe(reader, &group->readers, link) {
		if (!reader->watch) {
			list_remove(&reader->link);
			mem_free(reader);
			continue;
		}
		wants[ETCD_RECORDS] = true;
		wants[ETCD_LOADS] |= reader->loads;
	}
	if (!wants[ETCD_RECORDS]) {
		group_free(group);
		return false;
	}
	for (int side = 0; side < ETCD_SIDES; side++) {
		struct etcd_half *half = &group->half[side];

		if (wants[side] && half->follow == FOLLOW_NOT) {
			half->follow = FOLLOW_WANTED;
			half->born = half->mark + 1;
		} else if (!wants[side] && half->follow != FOLLOW_NOT) {
			etcd_half_stop(group->etcd, half);
		}
	}
	return true;
}

void etcd_group_step(struct etcd *e)
{
	struct etcd_reader *reader;
	struct etcd_group *group;
	bool all = true;

	list_foreach_safe(group, &e->groups, link) {
		if (!group_wants(group))
			continue;
		for (int side = 0; all && side < ETCD_SIDES; side++)
			all = group_sweep(group, (enum etcd_side)side);
		list_foreach(reader, &group->readers, link) {
			all = all && reader_walk(reader);
			if (all)
				reader_check(reader);
		}
	}
	if (!all)
		etcd_kick(e);
}

/* ---- readers ---- */

static int group_get(struct etcd *e, const char *name, struct etcd_group **group_p)
{
	struct etcd_group *group = group_find(e, name);

	*group_p = group;
	if (group)
		return 0;
	if (e->group_count >= ETCD_GROUPS_MAX)
		return err_raise(ERR_LIMIT, "%u groups are watched, the cap",
				 e->group_count);
	group = mem_zalloc(sizeof(*group));
	if (!group)
		return err_pass(-ENOMEM);
	group->etcd = e;
	snprintf(group->name, sizeof(group->name), "%s", name);
	strmap_init(&group->spots);
	list_init(&group->entries);
	list_init(&group->readers);
	for (int side = 0; side < ETCD_SIDES; side++) {
		group->half[side].side = (enum etcd_side)side;
		etcd_half_init(e, &group->half[side]);
	}
	list_push_back(&e->groups, &group->link);
	e->group_count++;
	*group_p = group;
	return 0;
}

int etcd_group_watch(struct directory *directory, struct watch *watch, const char *name,
		     bool loads)
{
	struct etcd *e = etcd_of(directory);
	struct place place = {.worker = ""};
	struct etcd_reader *reader;
	struct etcd_group *group;
	int r = group_check(name);

	if (r < 0)
		return err_pass(r);
	memcpy(place.group, name, strlen(name));
	r = place_check(&place);
	if (r == 0)
		r = group_get(e, name, &group);
	if (r != 0)
		return err_pass(r);
	etcd_kick(e); /* frees a group without readers */
	reader = mem_zalloc(sizeof(*reader));
	if (!reader)
		return err_pass(-ENOMEM);
	reader->group = group;
	reader->watch = watch;
	reader->loads = loads;
	reader->at = &group->entries;
	list_push_back(&group->readers, &reader->link);
	watch->impl = reader;
	return 0;
}

void etcd_group_unwatch(struct watch *watch)
{
	struct etcd_reader *reader = watch->impl;

	if (!reader)
		return;
	watch->impl = NULL;
	reader->watch = NULL;
	etcd_kick(reader->group->etcd);
}

void etcd_groups_fini(struct etcd *e)
{
	struct etcd_group *group;
	struct etcd_reader *reader;

	list_foreach_safe(group, &e->groups, link) {
		list_foreach(reader, &group->readers, link)
			if (reader->watch)
				reader->watch->impl = NULL;
		group_free(group);
	}
}
