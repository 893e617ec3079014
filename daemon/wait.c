/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Why polling: the word is written by a GPU stream or another process, which
 * cannot wake us without a system call of the engine's. One timer looks at all
 * words while there are any, and does not exist otherwise.
 */
#include "daemon/wait.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/region.h"
#include "proto/json.h"

/* A step of an engine takes milliseconds; 50 µs of delay is not seen. */
#define POLL_NS UINT64_C(50000)

struct waits {
	struct loop *loop;
	struct list armed;
	struct loop_timer timer;
};

bool wait_passed(const struct wait_spec *spec)
{
	const uint64_t *word;

	if (!spec->region)
		return true;
	word = (const void *)(spec->region->memory->base + spec->offset);
	return le64toh(__atomic_load_n(word, __ATOMIC_ACQUIRE)) >= spec->value;
}

static void on_timer(struct loop_timer *timer)
{
	struct waits *waits = container_of(timer, struct waits, timer);
	struct list ripe;
	struct wait *wait;

	list_init(&ripe);
	list_foreach_safe(wait, &waits->armed, link) {
		if (!wait_passed(&wait->spec))
			continue;
		list_remove(&wait->link);
		list_push_back(&ripe, &wait->link);
	}
	/* a callback may stop other waits, ripe ones too */
	while (!list_empty(&ripe)) {
		wait = list_entry(list_pop_front(&ripe), struct wait, link);
		wait->armed = false;
		wait->on_passed(wait);
	}
	/* a timer that just ran restarts in its own heap place: cannot fail */
	if (!list_empty(&waits->armed))
		(void)loop_timer_start(&waits->timer, POLL_NS);
}

int waits_new(struct loop *loop, struct waits **waits_p)
{
	struct waits *waits = mem_zalloc(sizeof(*waits));

	if (!waits)
		return err_pass(-ENOMEM);
	waits->loop = loop;
	list_init(&waits->armed);
	loop_timer_init(&waits->timer, loop, on_timer);
	*waits_p = waits;
	return 0;
}

void waits_free(struct waits *waits)
{
	if (!waits)
		return;
	loop_timer_stop(&waits->timer);
	mem_free(waits);
}

static int check_place(const struct wait_spec *spec)
{
	const struct region *region = spec->region;

	if (region->memory->kind != MEMORY_SEALED)
		return err_raise(ERR_INVAL, "wait.region: a memfd region is wanted, %llu "
				 "is %s", (unsigned long long)region->id,
				 region_kind_name(region->kind));
	if (spec->offset > region->length || region->length - spec->offset < 8)
		return err_raise(ERR_RANGE, "wait.offset: 8 bytes at %llu are not inside "
				 "the region's %llu", (unsigned long long)spec->offset,
				 (unsigned long long)region->length);
	if (((uintptr_t)region->memory->base + spec->offset) % 8 != 0)
		return err_raise(ERR_INVAL, "wait.offset: %llu is not 8-byte aligned",
				 (unsigned long long)spec->offset);
	return 0;
}

int wait_spec_parse(const cJSON *json, struct session *session, struct wait_spec *spec)
{
	static const char *const names[] = {"kind", "region", "offset", "value", NULL};
	const char *kind = NULL;
	int64_t id = 0, offset = 0;
	int r;

	*spec = (struct wait_spec){0};
	if (!json)
		return 0;
	r = json_only(json, names);
	if (r >= 0)
		r = json_get_str(json, "kind", true, 16, &kind);
	if (r >= 0 && strcmp(kind, "seq") != 0)
		r = err_raise(ERR_INVAL, "kind: '%s'; only \"seq\" is known", kind);
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
	if (r < 0) {
		spec->region = NULL;
		return r;
	}
	region_pin(spec->region);
	return 0;
}

void wait_spec_fini(struct wait_spec *spec)
{
	if (spec->region)
		region_unpin(spec->region);
	spec->region = NULL;
}

int wait_start(struct waits *waits, struct wait *wait, const struct wait_spec *spec,
	       void (*on_passed)(struct wait *wait))
{
	int r = loop_timer_start(&waits->timer, 0);

	if (r < 0)
		return err_pass(r);
	wait->spec = *spec;
	wait->on_passed = on_passed;
	wait->armed = true;
	list_push_back(&waits->armed, &wait->link);
	return 0;
}

void wait_stop(struct wait *wait)
{
	if (!wait->armed)
		return;
	wait->armed = false;
	list_remove(&wait->link);
}
