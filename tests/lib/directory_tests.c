/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The contract of daemon/cluster/directory.h, said by tests that know nothing of what
 * keeps the entries. A reader remembers what it was told and holds each call against
 * that: nobody is gone who was not there, nobody is told without a record.
 */
#include "tests/lib/directory_tests.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/mem.h"

void directory_late(const char *file, int line, const char *condition)
{
	print_error("%s:%d: not in time: %s\n", file, line, condition);
	_fail(file, line);
	abort();
}

struct place directory_place(const char *group, const char *worker, uint32_t tp)
{
	struct place place = {.rank = {tp, 0, 0, 0}};

	snprintf(place.group, sizeof(place.group), "%s", group);
	snprintf(place.worker, sizeof(place.worker), "%s", worker);
	return place;
}

/* ---- reader ---- */

/* Without what may lie behind the texts' ends. */
static struct place place_clean(const struct place *place)
{
	struct place clean = {.group = ""};

	snprintf(clean.group, sizeof(clean.group), "%s", place->group);
	snprintf(clean.worker, sizeof(clean.worker), "%s", place->worker);
	memcpy(clean.rank, place->rank, sizeof(clean.rank));
	return clean;
}

struct seen_entry *seen_find(struct seen *seen, const struct place *place)
{
	struct place clean = place_clean(place);

	return strmap_get_bytes(&seen->places, &clean, sizeof(clean));
}

static void seen_on_entry(struct watch *watch, const struct place *place,
			  const char *record, const char *load)
{
	struct seen *seen = container_of(watch, struct seen, watch);
	struct seen_entry *entry = seen_find(seen, place);

	seen->told++;
	if (!entry) {
		assert_true(seen->count < SEEN_MAX);
		assert_non_null(record);
		entry = &seen->entries[seen->count++];
		entry->place = place_clean(place);
		assert_int_equal(strmap_put_bytes(&seen->places, &entry->place,
						  sizeof(entry->place), entry),
				 0);
	}
	if (!record)
		assert_true(entry->there);
	seen->there += record != NULL;
	seen->there -= entry->there;
	entry->told++;
	entry->gone += !record;
	entry->there = record;
	entry->has_load = load;
	snprintf(entry->record, sizeof(entry->record), "%s", record ? record : "");
	snprintf(entry->load, sizeof(entry->load), "%s", load ? load : "");
	if (seen->then)
		seen->then(seen, entry);
}

static void seen_on_synced(struct watch *watch)
{
	container_of(watch, struct seen, watch)->synced++;
}

struct seen *seen_new(struct directory *directory, const char *group, bool loads)
{
	struct seen *seen = calloc(1, sizeof(*seen));

	assert_non_null(seen);
	seen->entries = calloc(SEEN_MAX, sizeof(*seen->entries));
	assert_non_null(seen->entries);
	seen->watch =
		(struct watch){.on_entry = seen_on_entry, .on_synced = seen_on_synced};
	list_init(&seen->watch.link);
	strmap_init(&seen->places);
	assert_int_equal(directory->ops->watch(directory, &seen->watch, group, loads), 0);
	assert_non_null(seen->watch.impl);
	assert_int_equal(seen->told, 0);
	return seen;
}

void seen_free(struct seen *seen)
{
	assert_null(seen->watch.impl);
	strmap_fini(&seen->places);
	free(seen->entries);
	free(seen);
}

bool seen_has(struct seen *seen, const struct place *place, const char *record,
	      const char *load)
{
	const struct seen_entry *entry = seen_find(seen, place);

	if (!entry || !entry->there || strcmp(entry->record, record) != 0)
		return false;
	return load ? entry->has_load && strcmp(entry->load, load) == 0
		    : !entry->has_load;
}

static bool seen_gone(struct seen *seen, const struct place *place)
{
	const struct seen_entry *entry = seen_find(seen, place);

	return entry && !entry->there;
}

/* ---- publisher ---- */

static void said_on_done(struct publication *publication, const struct err *err)
{
	struct said *said = container_of(publication, struct said, publication);

	said->done++;
	said->err = err ? *err : (struct err){.code = ERR_OK};
	if (err)
		assert_null(publication->impl); /* it is withdrawn already */
}

void said_init(struct said *said)
{
	*said = (struct said){.publication.on_done = said_on_done};
	list_init(&said->publication.link);
}

static void said_publish(struct said *said, struct directory *directory,
			 const struct place *place, const char *record, const char *load)
{
	unsigned int before = said->done;

	assert_int_equal(directory->ops->publish(directory, &said->publication, place,
						 record, load),
			 0);
	assert_non_null(said->publication.impl);
	assert_int_equal(said->done, before); /* never inside the call */
}

static void said_publish_well(struct directory_rig *rig, struct said *said,
			      unsigned int member, const struct place *place,
			      const char *record, const char *load)
{
	unsigned int before = said->done;

	said_publish(said, rig->member(rig, member), place, record, load);
	directory_until(rig, DIRECTORY_SOON_NS, said->done > before);
	assert_int_equal(said->err.code, ERR_OK);
	assert_int_equal(said->done, before + 1);
}

static void seen_end(struct directory_rig *rig, unsigned int member, struct seen *seen)
{
	const struct directory_ops *ops = rig->member(rig, member)->ops;

	ops->unwatch(&seen->watch);
	ops->unwatch(&seen->watch); /* idempotent */
	seen_free(seen);
}

/* ---- tests ---- */

void directory_entry_is_told_with_its_load(void **state)
{
	struct directory_rig *rig = *state;
	struct place place = directory_place("prefill", "w0", 1);
	struct seen *loads = seen_new(rig->member(rig, 1), "prefill", true);
	struct seen *plain = seen_new(rig->member(rig, 1), "prefill", false);
	struct seen *other = seen_new(rig->member(rig, 1), "prefil", true);
	struct directory_state now;
	static struct said said;

	said_init(&said);
	directory_until(rig, DIRECTORY_SOON_NS,
			loads->synced && plain->synced && other->synced);
	said_publish_well(rig, &said, 0, &place, "{\"v\":1}", "{\"seq\":1}");
	directory_until(rig, DIRECTORY_SOON_NS,
			seen_has(loads, &place, "{\"v\":1}", "{\"seq\":1}"));
	directory_until(rig, DIRECTORY_SOON_NS,
			seen_has(plain, &place, "{\"v\":1}", NULL));
	assert_int_equal(other->told, 0);
	assert_int_equal(loads->synced, 1);
	rig->member(rig, 0)->ops->state(rig->member(rig, 0), &now);
	assert_true(now.up);
	assert_int_equal(now.why.code, ERR_OK);
	seen_end(rig, 1, loads);
	seen_end(rig, 1, plain);
	seen_end(rig, 1, other);
}

/* Numbers only grow on their way to the reader. */
static void seen_grows(struct seen *seen, const struct seen_entry *entry)
{
	int *last = seen->arg, number = atoi(entry->load);

	if (!entry->has_load)
		return;
	assert_true(number >= *last);
	*last = number;
}

void directory_update_latest_wins(void **state)
{
	struct directory_rig *rig = *state;
	struct place place = directory_place("decode", "", 0);
	struct seen *seen = seen_new(rig->member(rig, 1), "decode", true);
	const struct directory_ops *ops = rig->member(rig, 0)->ops;
	static struct said said;
	char load[16];
	int last = -1;

	seen->then = seen_grows;
	seen->arg = &last;
	said_init(&said);
	said_publish_well(rig, &said, 0, &place, "r0", NULL);
	for (int i = 0; i < 1000; i++) {
		snprintf(load, sizeof(load), "%d", i);
		assert_int_equal(ops->update(&said.publication, NULL, load), 0);
		if (i % 100 == 0)
			rig->turn(rig);
	}
	assert_int_equal(ops->update(&said.publication, "r1", NULL), 0);
	directory_until(rig, DIRECTORY_SOON_NS, seen_has(seen, &place, "r1", "999"));
	assert_true(seen->told < 500); /* most were never put */
	assert_int_equal(said.done, 1);
	seen_end(rig, 1, seen);
}

void directory_withdrawn_is_gone(void **state)
{
	struct directory_rig *rig = *state;
	struct place place = directory_place("g", "w", 7);
	struct seen *seen = seen_new(rig->member(rig, 1), "g", true);
	const struct directory_ops *ops = rig->member(rig, 0)->ops;
	static struct said said;

	said_init(&said);
	said_publish_well(rig, &said, 0, &place, "r", "l");
	directory_until(rig, DIRECTORY_SOON_NS, seen_has(seen, &place, "r", "l"));
	ops->withdraw(&said.publication);
	assert_null(said.publication.impl);
	ops->withdraw(&said.publication); /* idempotent */
	directory_until(rig, DIRECTORY_SOON_NS, seen_gone(seen, &place));
	/* and at once again, while the first may still be on its way out */
	said_publish_well(rig, &said, 0, &place, "r2", "l2");
	ops->withdraw(&said.publication);
	said_publish_well(rig, &said, 0, &place, "r3", "l3");
	directory_until(rig, DIRECTORY_SOON_NS, seen_has(seen, &place, "r3", "l3"));
	/* withdrawn before it was put: it never stays */
	ops->withdraw(&said.publication);
	said_publish(&said, rig->member(rig, 0), &place, "r4", NULL);
	ops->withdraw(&said.publication);
	said_init(&said);
	directory_until(rig, DIRECTORY_SOON_NS, seen_gone(seen, &place));
	said_publish_well(rig, &said, 2, &place, "r5", NULL); /* free for others */
	directory_until(rig, DIRECTORY_SOON_NS, seen_has(seen, &place, "r5", NULL));
	seen_end(rig, 1, seen);
}

void directory_late_reader_is_told_all(void **state)
{
	struct directory_rig *rig = *state;
	struct place places[3] = {directory_place("g", "a", 0),
				  directory_place("g", "b", 0),
				  directory_place("g", "b", 65535)};
	static struct said said[3];
	struct seen *first, *second;

	for (unsigned int i = 0; i < 3; i++) {
		said_init(&said[i]);
		said_publish_well(rig, &said[i], i, &places[i], "r", "l");
	}
	first = seen_new(rig->member(rig, 1), "g", false);
	directory_until(rig, DIRECTORY_SOON_NS, first->synced);
	assert_int_equal(first->there, 3);
	assert_int_equal(first->told, 3);
	second = seen_new(rig->member(rig, 1), "g", true); /* the first has the records */
	directory_until(rig, DIRECTORY_SOON_NS, second->synced);
	for (unsigned int i = 0; i < 3; i++) {
		assert_true(seen_has(first, &places[i], "r", NULL));
		assert_true(seen_has(second, &places[i], "r", "l"));
	}
	seen_end(rig, 1, first);
	seen_end(rig, 1, second);
	first = seen_new(rig->member(rig, 1), "g", true); /* and none had them */
	directory_until(rig, DIRECTORY_SOON_NS, first->synced);
	assert_int_equal(first->there, 3);
	seen_end(rig, 1, first);
}

void directory_place_of_another_is_refused(void **state)
{
	struct directory_rig *rig = *state;
	struct place place = directory_place("g", "w", 0);
	static struct said holder, rival, brother;
	struct directory *directory = rig->member(rig, 0);

	said_init(&holder);
	said_init(&rival);
	said_init(&brother);
	said_publish_well(rig, &holder, 0, &place, "mine", NULL);
	assert_int_equal(directory->ops->publish(directory, &brother.publication, &place,
						 "r", NULL),
			 -err_errno(ERR_EXIST));
	err_clear();
	assert_null(brother.publication.impl);
	said_publish(&rival, rig->member(rig, 1), &place, "not mine", NULL);
	directory_until(rig, 3 * rig->lease_ns + DIRECTORY_SOON_NS, rival.done);
	assert_int_equal(rival.err.code, ERR_EXIST);
	/* the holder goes: another who comes meanwhile has it then */
	said_publish(&rival, rig->member(rig, 1), &place, "now mine", NULL);
	directory->ops->withdraw(&holder.publication);
	directory_until(rig, DIRECTORY_SOON_NS, rival.done == 2);
	assert_int_equal(rival.err.code, ERR_OK);
}

void directory_place_is_published_again(void **state)
{
	struct directory_rig *rig = *state;
	struct place place = directory_place("g", "w", 0),
		     next = directory_place("g", "w", 1);
	struct seen *seen = seen_new(rig->member(rig, 1), "g", true);
	static struct said said;

	said_init(&said);
	said_publish_well(rig, &said, 0, &place, "r1", "l1");
	said_publish_well(rig, &said, 0, &place, "r2", "l2");
	directory_until(rig, DIRECTORY_SOON_NS, seen_has(seen, &place, "r2", "l2"));
	assert_int_equal(seen_find(seen, &place)->gone, 0);
	/* elsewhere: the first place is given up */
	said_publish_well(rig, &said, 0, &next, "r3", NULL);
	directory_until(rig, DIRECTORY_SOON_NS,
			seen_gone(seen, &place) && seen_has(seen, &next, "r3", NULL));
	seen_end(rig, 1, seen);
}

void directory_crashed_is_gone_after_its_lease(void **state)
{
	struct directory_rig *rig = *state;
	struct place place = directory_place("g", "w", 0);
	struct seen *seen = seen_new(rig->member(rig, 1), "g", true);
	static struct said said, next;
	uint64_t begin_ns;

	said_init(&said);
	said_init(&next);
	said_publish_well(rig, &said, 0, &place, "r", "l");
	directory_until(rig, DIRECTORY_SOON_NS, seen_has(seen, &place, "r", "l"));
	begin_ns = rig->now_ns(rig);
	rig->crash(rig, 0);
	/* who follows it waits for the place */
	said_publish_well(rig, &next, 2, &place, "next", NULL);
	print_message("taken over %ju ms after a crash, lease %ju ms\n",
		      (uintmax_t)((rig->now_ns(rig) - begin_ns) / 1000000),
		      (uintmax_t)(rig->lease_ns / 1000000));
	directory_until(rig, DIRECTORY_SOON_NS, seen_has(seen, &place, "next", NULL));
	assert_int_equal(seen_find(seen, &place)->gone, 1);
	seen_end(rig, 1, seen);
}

void directory_left_is_gone_at_once(void **state)
{
	struct directory_rig *rig = *state;
	struct place place = directory_place("g", "w", 0);
	struct seen *seen = seen_new(rig->member(rig, 1), "g", true);
	static struct said said;
	uint64_t begin_ns;

	said_init(&said);
	said_publish_well(rig, &said, 0, &place, "r", "l");
	directory_until(rig, DIRECTORY_SOON_NS, seen_has(seen, &place, "r", "l"));
	begin_ns = rig->now_ns(rig);
	rig->leave(rig, 0);
	assert_null(said.publication.impl);
	directory_until(rig, DIRECTORY_SOON_NS, seen_gone(seen, &place));
	assert_true(rig->now_ns(rig) - begin_ns < rig->lease_ns);
	seen_end(rig, 1, seen);
}

struct ender {
	struct directory_rig *rig;
	struct seen *other;
	struct said *said;
	unsigned int calls;
};

/* Inside a call: this watch and another end, a publication goes, another comes. */
static void seen_ends_all(struct seen *seen, const struct seen_entry *entry)
{
	struct ender *ender = seen->arg;
	struct directory *directory = ender->rig->member(ender->rig, 1);
	struct place place = directory_place("h", "new", 0);

	(void)entry;
	ender->calls++;
	directory->ops->unwatch(&seen->watch);
	directory->ops->unwatch(&ender->other->watch);
	directory->ops->withdraw(&ender->said->publication);
	said_publish(ender->said, directory, &place, "inside", NULL);
}

void directory_callbacks_may_end_all(void **state)
{
	struct directory_rig *rig = *state;
	struct place place = directory_place("g", "w", 0),
		     fresh = directory_place("h", "new", 0);
	struct seen *seen = seen_new(rig->member(rig, 1), "g", true);
	struct seen *other = seen_new(rig->member(rig, 1), "g", true);
	struct seen *third = seen_new(rig->member(rig, 2), "h", false);
	static struct said said, mine;
	struct ender ender = {.rig = rig, .other = other, .said = &mine};
	unsigned int told;

	said_init(&said);
	said_init(&mine);
	directory_until(rig, DIRECTORY_SOON_NS, seen->synced && other->synced);
	seen->then = seen_ends_all;
	seen->arg = &ender;
	said_publish_well(rig, &mine, 1, &fresh, "before", NULL);
	said_publish_well(rig, &said, 0, &place, "r", "l");
	directory_until(rig, DIRECTORY_SOON_NS, ender.calls);
	told = other->told;
	directory_until(rig, DIRECTORY_SOON_NS, seen_has(third, &fresh, "inside", NULL));
	assert_int_equal(ender.calls, 1);
	assert_int_equal(other->told, told);
	seen_free(seen);
	seen_free(other);
	seen_end(rig, 2, third);
}

void directory_limits_are_named(void **state)
{
	struct directory_rig *rig = *state;
	struct directory *directory = rig->member(rig, 0);
	struct place place = directory_place("g", "w", 0), bad = place;
	static char text[DIRECTORY_RECORD_MAX + 2], load[DIRECTORY_LOAD_MAX + 2];
	struct seen *seen = seen_new(rig->member(rig, 1), "g", true);
	static struct said said;

	said_init(&said);
	memset(text, 'x', sizeof(text) - 1);
	memset(load, 'y', sizeof(load) - 1);
	assert_true(directory->ops->publish(directory, &said.publication, &place, text,
					    NULL) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	assert_true(directory->ops->publish(directory, &said.publication, &place, "r",
					    load) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	bad.rank[PLACE_DP] = PLACE_SIZE_MAX;
	assert_true(directory->ops->publish(directory, &said.publication, &bad, "r",
					    NULL) < 0);
	assert_int_equal(err_last()->code, ERR_INVAL);
	err_clear();
	assert_null(said.publication.impl);
	/* as long as may be */
	text[DIRECTORY_RECORD_MAX] = load[DIRECTORY_LOAD_MAX] = '\0';
	said_publish_well(rig, &said, 0, &place, text, load);
	directory_until(rig, DIRECTORY_SOON_NS, seen_has(seen, &place, text, load));
	text[DIRECTORY_RECORD_MAX] = 'x';
	assert_true(directory->ops->update(&said.publication, text, NULL) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	err_clear();
	seen_end(rig, 1, seen);
}

void directory_many_are_told_once(void **state)
{
	enum { MANY = 600 };
	struct directory_rig *rig = *state;
	struct said *said = calloc(MANY, sizeof(*said));
	struct seen *early = seen_new(rig->member(rig, 1), "many", true), *late;
	char worker[16], record[64];
	unsigned int done = 0;

	assert_non_null(said);
	directory_until(rig, DIRECTORY_SOON_NS, early->synced);
	for (unsigned int i = 0; i < MANY; i++) {
		struct place place;

		snprintf(worker, sizeof(worker), "w%u", i / 8);
		snprintf(record, sizeof(record), "{\"n\":%u}", i);
		place = directory_place("many", worker, i % 8);
		said_init(&said[i]);
		said_publish(&said[i], rig->member(rig, i % 2), &place, record, "l");
	}
	while (done < MANY) {
		directory_until(rig, DIRECTORY_SOON_NS, said[done].done);
		assert_int_equal(said[done++].err.code, ERR_OK);
	}
	directory_until(rig, DIRECTORY_SOON_NS, early->there == MANY);
	late = seen_new(rig->member(rig, 2), "many", true);
	directory_until(rig, DIRECTORY_SOON_NS, late->synced);
	assert_int_equal(late->there, MANY);
	for (unsigned int i = 0; i < MANY; i++) {
		assert_int_equal(early->entries[i].gone, 0);
		assert_true(late->entries[i].told <= 2); /* record, load */
		assert_true(late->entries[i].has_load);
	}
	seen_end(rig, 1, early);
	seen_end(rig, 2, late);
	rig->leave(rig, 0);
	rig->leave(rig, 1);
	for (unsigned int i = 0; i < MANY; i++)
		assert_null(said[i].publication.impl);
	free(said);
}

void directory_names_of_any_characters(void **state)
{
	static const char *const names[] = {"a/b", "%41", "..", "\xc3\xa4 \"x\"\\",
					    "-x",  "A"};
	struct directory_rig *rig = *state;
	struct seen *seen[ARRAY_LEN(names)];
	static struct said said[ARRAY_LEN(names)];
	struct place places[ARRAY_LEN(names)];

	for (unsigned int i = 0; i < ARRAY_LEN(names); i++) {
		seen[i] = seen_new(rig->member(rig, 1), names[i], true);
		places[i] = directory_place(names[i], names[i], i);
		said_init(&said[i]);
		said_publish_well(rig, &said[i], 0, &places[i], names[i], "l");
	}
	for (unsigned int i = 0; i < ARRAY_LEN(names); i++)
		directory_until(rig, DIRECTORY_SOON_NS,
				seen_has(seen[i], &places[i], names[i], "l"));
	for (unsigned int i = 0; i < ARRAY_LEN(names); i++) {
		assert_int_equal(seen[i]->count, 1);
		seen_end(rig, 1, seen[i]);
	}
}
