/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The status page: shared memory that a daemon writes and its engine reads, so
 * that polling thousands of rooms costs no system call.
 *
 * Page = header (64 bytes), then `slots` slots of 64 bytes. Little-endian, as
 * the machine is. Read through the functions of kvd.h (or kvd_status_read()
 * below), never field by field: the word is atomic, the figures are guarded.
 *
 * word: bits 0-31 generation, 32-39 state, 40-47 flags, 48-63 error code.
 * A reader compares the generation with the one that room.open gave, or that its ring
 * entry chose; a slot of another generation belongs to another object.
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
	KVD_FLAG_ABORTING = 1 << 0, /* told to fail, not yet proven quiesced */
	KVD_FLAG_STAGED = 1 << 1,   /* some of its bytes passed a buffer here */
	KVD_FLAG_IDLE = 1 << 2,	    /* this source has nothing to send */
	KVD_FLAG_FREE = 1 << 3,	    /* the engine's own slot is the engine's again */
	KVD_FLAG_REMOTE = 1 << 4,   /* the other side failed it, and said so */
};

struct kvd_status_header {
	uint64_t magic;
	uint8_t instance[16];
	uint64_t heartbeat_ns; /* CLOCK_MONOTONIC of the last heartbeat, atomic */
	uint32_t slots, slot_bytes;
	uint64_t heartbeat_interval_ns; /* the longest: four without one are silence */
	uint64_t notifs; /* notifications that came for this session so far, atomic */
	uint32_t engine_first; /* slots from here on are numbered by the engine */
	uint32_t ended; /* not 0: no request of this session is taken any more, atomic */
};

struct kvd_status_slot {
	uint64_t word;	     /* atomic, stored last */
	uint64_t sequence;   /* odd while the figures change */
	uint64_t object;     /* room number or transfer id */
	uint64_t bytes;	     /* landed or sent so far */
	uint64_t total;	     /* expected; 0 = not known yet */
	uint64_t changed_ns; /* CLOCK_MONOTONIC of the last state change */
	/* Of a room, each figure cut to the largest that it holds; 0 of others:
	 * [0] first token + 1 u32, 0: not known; chunks done u16, 0 u16;
	 * [1] rows u32, moved_us u32 */
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
