/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The status page: shared memory that a daemon writes and its engine reads, so that
 * polling thousands of rooms needs no system call.
 *
 * Page = header (64 bytes), then `slots` slots of 64 bytes. Byte order of the machine,
 * little-endian. Read it through the functions of kvd.h (or kvd_status_read() below),
 * never by single fields: the word is atomic, the other values have a sequence lock.
 *
 * word: bits 0-31 generation, 32-39 state, 40-47 flags, 48-63 error code. A reader
 * compares the generation with the one from room.open, or the one that its ring entry
 * chose; a slot with another generation belongs to another object.
 */
#ifndef KVD_STATUS_LAYOUT_H
#define KVD_STATUS_LAYOUT_H

#include <stdint.h>

#define KVD_STATUS_MAGIC UINT64_C(0x3130535441445644) /* "DVDATS01" */
#define KVD_STATUS_SLOT_BYTES 64u

/* SGLang's KVPoll */
enum kvd_state {
	KVD_FAILED = 0,
	KVD_BOOTSTRAPPING = 1,
	KVD_WAITING_FOR_INPUT = 2,
	KVD_TRANSFERRING = 3,
	KVD_SUCCESS = 4,
};

enum {
	KVD_FLAG_ABORTING = 1 << 0, /* aborted, I/O has not stopped yet */
	KVD_FLAG_STAGED = 1 << 1,   /* some bytes were copied through a buffer of this
				     * daemon */
	KVD_FLAG_IDLE = 1 << 2,	    /* this source has nothing to send */
	KVD_FLAG_FREE = 1 << 3,	    /* the engine may reuse this slot */
	KVD_FLAG_REMOTE = 1 << 4,   /* the remote side aborted it */
};

struct kvd_status_header {
	uint64_t magic;
	uint8_t instance[16];
	uint64_t heartbeat_ns; /* CLOCK_MONOTONIC of the last heartbeat, atomic */
	uint32_t slots, slot_bytes;
	uint64_t heartbeat_interval_ns; /* heartbeat interval, at most; four missed
					 * ones mean a failure */
	uint64_t notifs;       /* notifications received for this session, atomic */
	uint32_t engine_first; /* the engine assigns slots from here on */
	uint32_t ended;	       /* not 0: the session accepts no more requests, atomic */
};

struct kvd_status_slot {
	uint64_t word;	     /* atomic, stored last */
	uint64_t sequence;   /* odd while the values change */
	uint64_t object;     /* room number or transfer id */
	uint64_t bytes;	     /* received or sent so far */
	uint64_t total;	     /* expected; 0 = not known yet */
	uint64_t changed_ns; /* CLOCK_MONOTONIC of the last state change */
	/* Of a room, each value limited to its largest number; 0 for other objects:
	 * [0] first token + 1 u32, 0: unknown; chunks done u16, 0 u16; [1] rows u32,
	 * moved_us u32 */
	uint64_t more[2];
};

static inline uint32_t kvd_word_gen(uint64_t w)
{
	return (uint32_t)w;
}
static inline unsigned int kvd_word_state(uint64_t w)
{
	return (unsigned int)(w >> 32) & 0xff;
}
static inline unsigned int kvd_word_flags(uint64_t w)
{
	return (unsigned int)(w >> 40) & 0xff;
}
static inline unsigned int kvd_word_error(uint64_t w)
{
	return (unsigned int)(w >> 48);
}
static inline int64_t kvd_more_first_token(const uint64_t more[2]) /* -1: not known */
{
	return (int64_t)(uint32_t)more[0] - 1;
}
static inline uint32_t kvd_more_done(const uint64_t more[2])
{
	return (uint32_t)(more[0] >> 32) & 0xffff;
}
static inline uint32_t kvd_more_rows(const uint64_t more[2])
{
	return (uint32_t)more[1];
}
static inline uint32_t kvd_more_moved_us(const uint64_t more[2])
{
	return (uint32_t)(more[1] >> 32);
}
static inline uint64_t kvd_word_make(uint32_t gen, unsigned int state, unsigned int flags,
				     unsigned int error)
{
	return (uint64_t)gen | (uint64_t)(state & 0xff) << 32 |
	       (uint64_t)(flags & 0xff) << 40 | (uint64_t)(error & 0xffff) << 48;
}

#endif
