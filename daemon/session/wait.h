/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wait: invariant 8. A chunk is not read, and bound pages are not written,
 * before the engine's stream has passed a point. The engine names the point by a word:
 * its stream stores a rising 64-bit sequence word (little-endian, 8-byte aligned) in a
 * registered region; kvd continues when word >= value (examples/timeline.h).
 *
 * Words are polled from one timer that runs only while there are waits, with a bounded
 * number of polls a pass, sessions in turn. Reads are acquire loads of mapped memory;
 * guarded memory (hugetlbfs too) and vm memory is refused, because the loop must not
 * fault or call into another process.
 *
 * A word cannot fail. A wait that does not pass is ended by the room's timeouts.
 */
#ifndef KVD_WAIT_H
#define KVD_WAIT_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/loop/loop.h"

struct region;
struct session;
struct waits;

#define WAIT_WORDS_MAX 16384u /* limit of pending waits of a session */

struct wait_spec {
	struct region *region; /* of the word; pinned. NULL: nothing to wait for */
	uint64_t offset;
	uint64_t value;
};

struct wait {
	struct list link;
	struct waits *waits;
	struct wait_spec spec;		    /* borrowed from its owner */
	void (*on_over)(struct wait *wait); /* from the loop's timer */
	uint64_t seen;			    /* the word's value at the last poll */
	bool armed;
	bool listed; /* in the list of polled words */
};

int waits_new(struct loop *loop, struct waits **waits_p);
void waits_free(struct waits *waits);
/* Parse "wait" of a command: {kind:"seq", region, offset, value}. Pins the region. */
int wait_spec_parse(const cJSON *json, struct session *session, struct wait_spec *spec);
void wait_spec_fini(struct wait_spec *spec);
bool wait_passed(const struct wait_spec *spec);
/* It has a word. on_over follows, never from inside this call. */
void wait_start(struct waits *waits, struct wait *wait, const struct wait_spec *spec,
		void (*on_over)(struct wait *wait));
void wait_stop(struct wait *wait); /* idempotent */
/* Poll now: in each turn of a loop that does not sleep. */
void waits_look(struct waits *waits);

#endif
