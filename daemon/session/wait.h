/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wait: invariant 8. A chunk is not read, and bound pages are not written,
 * before the engine's stream has passed a point. The engine names the point in
 * one of two ways:
 *
 *   word   its stream stores a rising 64-bit sequence word (little-endian, 8-byte
 *          aligned) in a registered region; kvd continues when word >= value
 *          (libkvd: kvd_timeline_open)
 *   event  it records an event that it made for other processes, before it sends
 *          the command, and passes its CUDA IPC handle
 *
 * Words are polled from one timer that runs only while there are waits, with a bounded
 * number of polls a pass, sessions in turn. Reads are acquire loads of mapped memory;
 * guarded memory (hugetlbfs too) and vm memory is refused, because the loop must not
 * fault or call into another process. Events are polled by a thread of their own
 * (gpu/event.h) from the moment of the command.
 *
 * A word cannot fail. An event can: a wrong handle, an engine that has ended, a broken
 * device; its waits fail. A wait that neither passes nor fails is ended by the room's
 * timeouts.
 */
#ifndef KVD_WAIT_H
#define KVD_WAIT_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/loop/loop.h"

struct err;
struct gpu;
struct gpu_event;
struct region;
struct session;
struct waits;

#define WAIT_WORDS_MAX 16384u /* limit of pending waits of a session */

/* neither region nor event: nothing to wait for */
struct wait_spec {
	struct region *region; /* of the word; pinned */
	uint64_t offset;
	uint64_t value;
	struct gpu_event *event; /* ours */
};

struct wait {
	struct list link;
	struct waits *waits;
	struct wait_spec spec; /* borrowed from its owner */
	/* From the loop's timer or a wake-up. `why`: NULL, or why it will never pass. */
	void (*on_over)(struct wait *wait, const struct err *why);
	uint64_t seen; /* of a word: its value at the last poll */
	bool armed;
	bool listed; /* in the list of polled words */
};

/* `gpu` NULL: events are refused. */
int waits_new(struct loop *loop, struct gpu *gpu, struct waits **waits_p);
void waits_free(struct waits *waits);
/* Parse "wait" of a command: {kind:"seq", region, offset, value} or {kind:"event",
 * device, handle}. Pins the region, starts to watch the event. */
int wait_spec_parse(struct waits *waits, const cJSON *json, struct session *session,
		    struct wait_spec *spec);
void wait_spec_fini(struct wait_spec *spec);
/* 1: the point is passed; 0: not yet; negative: it cannot be determined any more. */
int wait_passed(const struct wait_spec *spec);
/* on_over follows, never from inside this call. */
void wait_start(struct waits *waits, struct wait *wait, const struct wait_spec *spec,
		void (*on_over)(struct wait *wait, const struct err *why));
void wait_stop(struct wait *wait); /* idempotent */

/* A handle of CUDA IPC, in base64, to CU_IPC_BYTES; ERR_INVAL. */
int ipc_handle_parse(const char *text, uint8_t *handle);

#endif
