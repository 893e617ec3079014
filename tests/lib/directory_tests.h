/* SPDX-License-Identifier: Apache-2.0 */
/*
 * directory_tests: what any directory must do (daemon/cluster/directory.h), whatever
 * keeps it. A program brings a rig, and runs them:
 *
 *   static const struct CMUnitTest tests[] = {DIRECTORY_TESTS(rig_new, rig_free)};
 *
 * where rig_new() puts a struct directory_rig into *state, for each test.
 */
#ifndef KVD_TESTS_DIRECTORY_TESTS_H
#define KVD_TESTS_DIRECTORY_TESTS_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/idmap.h"
#include "daemon/cluster/directory.h"

#define DIRECTORY_MEMBERS 3u

struct directory_rig {
	uint64_t lease_ns;
	/* Member i's directory; made when it is asked for first, or after its end. */
	struct directory *(*member)(struct directory_rig *rig, unsigned int i);
	/* Ends without a word, as a daemon that is killed. */
	void (*crash)(struct directory_rig *rig, unsigned int i);
	/* Ends in good order. */
	void (*leave)(struct directory_rig *rig, unsigned int i);
	/* Some of what is to happen happens; time passes, if nothing is to. */
	void (*turn)(struct directory_rig *rig);
	uint64_t (*now_ns)(const struct directory_rig *rig);
};

/* ---- a reader that remembers ---- */

struct seen_entry {
	struct place place;
	char record[DIRECTORY_RECORD_MAX + 1], load[DIRECTORY_LOAD_MAX + 1];
	bool there, has_load;
	unsigned int told, gone;
};

#define SEEN_MAX 4096u

struct seen {
	struct watch watch; /* its first member */
	struct seen_entry *entries;
	struct strmap places; /* place -> entry */
	unsigned int count;   /* places of which it heard */
	unsigned int there, synced, told;
	void (*then)(struct seen *seen, const struct seen_entry *entry); /* NULL */
	void *arg;
};

struct seen *seen_new(struct directory *directory, const char *group, bool loads);
void seen_free(struct seen *seen);
/* NULL: never heard of. */
struct seen_entry *seen_find(struct seen *seen, const struct place *place);
bool seen_has(struct seen *seen, const struct place *place, const char *record,
	      const char *load);

/* ---- a publisher ---- */

struct said {
	struct publication publication; /* its first member */
	unsigned int done;
	struct err err;
};

void said_init(struct said *said);

struct place directory_place(const char *group, const char *worker, uint32_t tp);
/* Turns until it holds; fails the test after so much time. */
#define directory_until(rig, limit_ns, condition)                               \
	do {                                                                    \
		uint64_t end_ns_ = (rig)->now_ns(rig) + (limit_ns);             \
		while (!(condition)) {                                          \
			if ((rig)->now_ns(rig) > end_ns_)                       \
				directory_late(__FILE__, __LINE__, #condition); \
			(rig)->turn(rig);                                       \
		}                                                               \
	} while (0)
void directory_late(const char *file, int line, const char *condition)
	__attribute__((noreturn));
#define DIRECTORY_SOON_NS UINT64_C(20000000000)

void directory_entry_is_told_with_its_load(void **state);
void directory_update_latest_wins(void **state);
void directory_withdrawn_is_gone(void **state);
void directory_late_reader_is_told_all(void **state);
void directory_place_of_another_is_refused(void **state);
void directory_place_is_published_again(void **state);
void directory_crashed_is_gone_after_its_lease(void **state);
void directory_left_is_gone_at_once(void **state);
void directory_callbacks_may_end_all(void **state);
void directory_limits_are_named(void **state);
void directory_many_are_told_once(void **state);
void directory_names_of_any_characters(void **state);

#define DIRECTORY_TEST(fn, rig_new, rig_free) \
	cmocka_unit_test_setup_teardown(fn, rig_new, rig_free)
/* Of any directory; its members may be one. */
#define DIRECTORY_TESTS_ALONE(n, f)                                       \
	DIRECTORY_TEST(directory_entry_is_told_with_its_load, n, f),      \
		DIRECTORY_TEST(directory_update_latest_wins, n, f),       \
		DIRECTORY_TEST(directory_withdrawn_is_gone, n, f),        \
		DIRECTORY_TEST(directory_late_reader_is_told_all, n, f),  \
		DIRECTORY_TEST(directory_place_is_published_again, n, f), \
		DIRECTORY_TEST(directory_callbacks_may_end_all, n, f),    \
		DIRECTORY_TEST(directory_limits_are_named, n, f),         \
		DIRECTORY_TEST(directory_many_are_told_once, n, f),       \
		DIRECTORY_TEST(directory_names_of_any_characters, n, f)
/* And of one that several daemons have. */
#define DIRECTORY_TESTS(n, f)                                                    \
	DIRECTORY_TESTS_ALONE(n, f),                                             \
		DIRECTORY_TEST(directory_place_of_another_is_refused, n, f),     \
		DIRECTORY_TEST(directory_crashed_is_gone_after_its_lease, n, f), \
		DIRECTORY_TEST(directory_left_is_gone_at_once, n, f)

#endif
