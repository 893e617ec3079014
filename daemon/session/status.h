/* SPDX-License-Identifier: Apache-2.0 */
/*
 * status: a session's status page, as the daemon writes it. The layout is in
 * proto/kvd_status.h (readers need nothing else). One slot a room or transfer;
 * other fields are final before a terminal word, which is stored last with
 * release order.
 */
#ifndef KVD_STATUS_H
#define KVD_STATUS_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "proto/kvd_status.h"

struct charge;
struct status_page;

/* Values of a room; first_token UINT64_MAX: not known. */
struct status_room {
	uint64_t bytes, total;
	uint64_t first_token, done, rows, moved_us;
};

#define STATUS_HEARTBEAT_NS UINT64_C(200000000) /* between heartbeats */

/* A sealed memfd with `slots` slots; its size is fixed. */
int status_page_new(uint32_t slots, const uint8_t instance[16],
		    struct status_page **page_p);
/* Any thread. Of 10^4 slots it takes longer than a turn: offload_discard(). */
void status_page_free(void *page);
/* A read-only fd of the page; owned by the page. */
int status_page_fd(const struct status_page *page);
uint32_t status_page_slots(const struct status_page *page);

/* Slots from `first` on are numbered by the engine (proto/kvd_ring.h):
 * status_slot_take() does not use them. Once, before any slot is taken. */
void status_page_divide(struct status_page *page, uint32_t first);
/* Further use of the page is charged to it; it outlives the page. */
void status_page_charge(struct status_page *page, struct charge *charge);
/* A notification has arrived; the session takes no more requests. */
void status_page_notified(struct status_page *page);
void status_page_ended(struct status_page *page);

/* ERR_LIMIT when all slots are in use, or the account is full. The slot's generation
 * is incremented. */
int status_slot_take(struct status_page *page, uint64_t object, uint32_t *slot_p,
		     uint32_t *gen_p);
/* Claim a slot that the engine chose, with the generation that must follow. ERR_PROTO
 * when it does not belong to the engine, is in use, or has another generation. */
int status_slot_claim(struct status_page *page, uint32_t slot, uint32_t gen,
		      uint64_t object);
/* Is the slot chosen by the engine, and in use? */
bool status_slot_claimed(const struct status_page *page, uint32_t slot);
uint32_t status_slot_gen(const struct status_page *page, uint32_t slot);
/* The same object starts again, under the next generation, which is returned. */
uint32_t status_slot_renew(struct status_page *page, uint32_t slot);
void status_slot_release(struct status_page *page, uint32_t slot);
/* Progress values (sequence-guarded). */
void status_slot_progress(struct status_page *page, uint32_t slot, uint64_t bytes,
			  uint64_t total);
void status_slot_room(struct status_page *page, uint32_t slot,
		      const struct status_room *room);
/* The word: state, flags, error. Terminal states are stored after all other fields. */
void status_slot_set(struct status_page *page, uint32_t slot, unsigned int state,
		     unsigned int flags, enum err_code error);
/* Wake the waiters of the slot's word: a system call. For results that are too late
 * for a busy poll and too early for sleep. */
void status_slot_call(const struct status_page *page, uint32_t slot);
/* The heartbeat time (CLOCK_MONOTONIC ns) of the header. */
void status_page_heartbeat(struct status_page *page, uint64_t now_ns);
/* Silence after which the engine takes this daemon for frozen, if that is more than
 * four heartbeats: libkvd counts four of the header's intervals. */
void status_page_silence(struct status_page *page, uint64_t silence_ns);

#endif
