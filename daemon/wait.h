/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wait: invariant 8. A chunk is not read, and bound pages are not written,
 * before the engine's stream has passed a point: it stores a rising 64-bit
 * sequence word (little-endian, 8-byte aligned) in a registered region, and
 * kvd goes on when word >= value.
 *
 * Words are polled from one timer that runs only while somebody waits. Reads
 * are acquire loads of mapped memory; guarded and vm memory is refused, because
 * the loop must not fault or call into another process.
 */
#ifndef KVD_WAIT_H
#define KVD_WAIT_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/loop.h"

struct region;
struct session;
struct waits;

struct wait_spec {
	struct region *region; /* pinned; NULL: nothing to wait for */
	uint64_t offset;
	uint64_t value;
};

struct wait {
	struct list link;
	struct wait_spec spec; /* borrowed from its owner */
	void (*on_passed)(struct wait *wait); /* from the loop's timer or a defer */
	bool armed;
};

int waits_new(struct loop *loop, struct waits **waits_p);
void waits_free(struct waits *waits);
/* "wait" of a command: {kind:"seq", region, offset, value}. Pins the region. */
int wait_spec_parse(const cJSON *json, struct session *session, struct wait_spec *spec);
void wait_spec_fini(struct wait_spec *spec);
bool wait_passed(const struct wait_spec *spec);
/* on_passed follows, never from inside. ERR_NOMEM. */
int wait_start(struct waits *waits, struct wait *wait, const struct wait_spec *spec,
		void (*on_passed)(struct wait *wait));
void wait_stop(struct wait *wait); /* idempotent */

#endif
