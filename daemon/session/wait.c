/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Polling is needed because the word is written by a GPU stream or another process, which
 * cannot wake us without a system call of the engine's. One timer polls words while there
 * are any, and does not exist otherwise.
 *
 * The cost does not depend on the number of waits: a pass polls LOOKS words at most, some
 * of each session in turn, and the next one continues after them. So a session with
 * thousands of words waits longer for its own, and the words of others are seen as soon
 * as before. While no word changes passes become rarer, by a share of the time without
 * changes, so the delay is a hundredth of the wait that it ends. Between the callbacks of
 * passed waits the loop's time is checked.
 */
#include "daemon/session/wait.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "proto/json.h"

/* A step of an engine takes milliseconds; a delay of 50 µs is negligible. */
#define POLL_NS UINT64_C(50000)
#define POLL_MOST_NS LOOP_NS_PER_MS
#define POLL_SHARE 128u /* of the time without a change */
#define LOOKS 512u	/* some 12 ns each */
#define LOOKS_IN_TURN 32u

struct waits {
	struct loop *loop;
	struct list sessions; /* with words: struct session.words_link, in turn */
	struct list due;      /* on_over is to be called */
	unsigned int words;
	uint64_t changed_ns; /* last time that a word changed, or a wait started */
	struct loop_timer timer;
};

static uint64_t word_of(const struct wait_spec *spec)
{
	const uint64_t *word = (const void *)(spec->region->memory->base + spec->offset);

	return le64toh(__atomic_load_n(word, __ATOMIC_ACQUIRE));
}

bool wait_passed(const struct wait_spec *spec)
{
	return !spec->region || word_of(spec) >= spec->value;
}

/* Remove it from the polled words. */
static void word_leave(struct wait *wait)
{
	struct session *session = wait->spec.region->session;

	wait->listed = false;
	list_remove(&wait->link);
	session->words--;
	wait->waits->words--;
	if (list_empty(&session->waiting))
		list_remove(&session->words_link);
}

/* A callback may stop other waits, including due ones. */
static void waits_call(struct waits *waits)
{
	struct list *link;

	while ((link = list_pop_front(&waits->due))) {
		struct wait *wait = list_entry(link, struct wait, link);

		wait->armed = false;
		wait->on_over(wait);
		if (loop_enough(waits->loop))
			break;
	}
}

static void wait_next(struct waits *waits)
{
	uint64_t still = loop_now_ns(waits->loop) - waits->changed_ns;
	uint64_t after = still / POLL_SHARE;

	if (!list_empty(&waits->due)) {
		loop_timer_start(&waits->timer, 0);
	} else if (waits->words) {
		after = after < POLL_NS ? POLL_NS : after;
		loop_timer_start(&waits->timer,
				 after < POLL_MOST_NS ? after : POLL_MOST_NS);
	}
}

/* Each polled word moves to the end of its list: the next pass polls the others first. */
static unsigned int session_look(struct waits *waits, struct session *session,
				 unsigned int most)
{
	unsigned int looks = session->words < most ? session->words : most;

	for (unsigned int i = 0; i < looks; i++) {
		struct wait *wait = list_first(&session->waiting, struct wait, link);
		uint64_t word = word_of(&wait->spec);

		if (word != wait->seen)
			waits->changed_ns = loop_now_ns(waits->loop);
		wait->seen = word;
		if (word >= wait->spec.value) {
			word_leave(wait);
			list_push_back(&waits->due, &wait->link);
		} else {
			list_remove(&wait->link);
			list_push_back(&session->waiting, &wait->link);
		}
	}
	return looks;
}

static void words_look(struct waits *waits)
{
	unsigned int looks = 0;
	unsigned int most = waits->words < LOOKS ? waits->words : LOOKS;

	while (looks < most && waits->words) {
		struct session *session =
			list_first(&waits->sessions, struct session, words_link);

		list_remove(&session->words_link);
		list_push_back(&waits->sessions, &session->words_link);
		looks += session_look(waits, session, LOOKS_IN_TURN);
		if (loop_enough(waits->loop))
			break;
	}
}

static void wait_on_timer(struct loop_timer *timer)
{
	struct waits *waits = container_of(timer, struct waits, timer);

	words_look(waits);
	waits_call(waits);
	wait_next(waits);
}

void waits_look(struct waits *waits)
{
	if (waits->words)
		wait_on_timer(&waits->timer);
}

int waits_new(struct loop *loop, struct waits **waits_p)
{
	struct waits *waits = mem_zalloc(sizeof(*waits));

	if (!waits)
		return err_pass(-ENOMEM);
	waits->loop = loop;
	list_init(&waits->sessions);
	list_init(&waits->due);
	loop_timer_init(&waits->timer, loop, wait_on_timer);
	*waits_p = waits;
	return 0;
}

void waits_free(struct waits *waits)
{
	if (!waits)
		return;
	assert(list_empty(&waits->sessions) && list_empty(&waits->due));
	loop_timer_stop(&waits->timer);
	mem_free(waits);
}

static int check_place(const struct wait_spec *spec)
{
	const struct region *region = spec->region;

	if (region->memory->sealed && region->memory->kind == MEMORY_GUARDED)
		return err_raise(ERR_INVAL,
				 "wait.region: %llu has huge pages that its owner can "
				 "remove (MFD_HUGETLB); put the word into a memfd of "
				 "ordinary pages",
				 (unsigned long long)region->id);
	if (region->memory->kind != MEMORY_SEALED)
		return err_raise(
			ERR_INVAL, "wait.region: must be a memfd region, %llu is %s",
			(unsigned long long)region->id, region_kind_name(region->kind));
	if (spec->offset > region->length || region->length - spec->offset < 8)
		return err_raise(ERR_RANGE,
				 "wait.offset: 8 bytes at %llu exceed the region (%llu "
				 "bytes)",
				 (unsigned long long)spec->offset,
				 (unsigned long long)region->length);
	if (((uintptr_t)region->memory->base + spec->offset) % 8 != 0)
		return err_raise(ERR_INVAL, "wait.offset: %llu is not 8-byte aligned",
				 (unsigned long long)spec->offset);
	return 0;
}

static int parse_word(const cJSON *json, struct session *session, struct wait_spec *spec)
{
	static const char *const names[] = {"kind", "region", "offset", "value", NULL};
	int64_t id = 0, offset = 0;
	int r = json_only(json, names);

	if (r >= 0)
		r = json_get_int(json, "region", true, 0, JSON_INT_MAX, &id);
	if (r >= 0)
		r = json_get_int(json, "offset", true, 0, JSON_INT_MAX, &offset);
	if (r >= 0)
		r = json_get_u64(json, "value", true, &spec->value);
	if (r < 0)
		return err_prefix(r, "wait");
	spec->region = region_find(session, (uint64_t)id);
	spec->offset = (uint64_t)offset;
	if (!spec->region)
		return err_prefix(-ENOENT, "wait.region");
	r = check_place(spec);
	if (r == 0 && session->words >= WAIT_WORDS_MAX)
		r = err_raise(ERR_LIMIT,
			      "wait: too many pending waits: %u (limit of a session "
			      "%u); send later chunks when earlier ones have finished",
			      session->words, WAIT_WORDS_MAX);
	if (r < 0) {
		spec->region = NULL;
		return err_pass(r);
	}
	region_pin(spec->region);
	return 0;
}

int wait_spec_parse(const cJSON *json, struct session *session, struct wait_spec *spec)
{
	const char *kind = NULL;
	int r;

	*spec = (struct wait_spec){0};
	if (!json)
		return 0;
	r = json_get_str(json, "kind", true, 16, &kind);
	if (r < 0)
		return err_prefix(r, "wait");
	if (strcmp(kind, "seq") != 0)
		return err_raise(ERR_INVAL,
				 "wait.kind: '%s' is unknown; allowed: \"seq\"", kind);
	return err_pass(parse_word(json, session, spec));
}

void wait_spec_fini(struct wait_spec *spec)
{
	if (spec->region)
		region_unpin(spec->region);
	spec->region = NULL;
}

void wait_start(struct waits *waits, struct wait *wait, const struct wait_spec *spec,
		void (*on_over)(struct wait *wait))
{
	struct session *session = spec->region->session;

	assert(on_over && !wait->armed);
	wait->waits = waits;
	wait->spec = *spec;
	wait->on_over = on_over;
	wait->armed = true;
	if (list_empty(&session->waiting))
		list_push_back(&waits->sessions, &session->words_link);
	/* the newest first: the next pass sees a change of the meantime at once */
	list_push_front(&session->waiting, &wait->link);
	wait->listed = true;
	session->words++;
	waits->words++;
	wait->seen = word_of(spec);
	waits->changed_ns = loop_now_ns(waits->loop);
	loop_timer_start(&waits->timer, 0);
}

void wait_stop(struct wait *wait)
{
	if (!wait->armed)
		return;
	wait->armed = false;
	if (wait->listed)
		word_leave(wait);
	else
		list_remove(&wait->link);
}
