/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring_ops: what an entry of the submission ring does (proto/kvd_ring.h has the
 * words): modules give verbs, one an op. Loop thread.
 */
#ifndef KVD_RING_OPS_H
#define KVD_RING_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/request/ring.h"

/* Where bytes that belong to an entry lie. */
struct ring_payload {
	int fd;	       /* of an arena or a memfd; or: */
	uint8_t *data; /* heap; who takes it sets it NULL */
	uint64_t bytes;
};
/* A copy; what it says may be another when it is read again. */
int ring_payload_read(const struct ring_payload *payload, uint64_t offset, void *to,
		      size_t len);
/* The same, to the heap, with a zero byte after it; on failure *copy_p stays NULL. */
int ring_payload_copy(const struct ring_payload *payload, uint64_t offset, size_t len,
		      uint8_t **copy_p);

enum { RING_OP_LATER = 1 };

struct ring_verb {
	uint32_t op;
	/*
	 * Do it; `arena` is where its payload lies, which is inside it. RING_OP_LATER:
	 * not done yet, and no other entry of this ring may be begun; ring_work_end()
	 * follows: the entry is done, or ring_resume(): it is tried again. Negative: it
	 * breaks the protocol (ERR_PROTO). What is merely refused shows in its slot, and
	 * is 0.
	 */
	int (*run)(struct ring *ring, const struct kvd_ring_entry *entry,
		   struct ring_payload *arena);
};
extern const struct ring_verb ring_verbs[];

/* As the verb of the entry's op; an op that no module has: ERR_PROTO. */
int ring_op(struct ring *ring, const struct kvd_ring_entry *entry,
	    struct ring_payload *arena);
/* A helper has the entry: RING_OP_LATER. Then it is done: the next one may be taken.
 * `shared`: its payload lay in the ring's arena. */
int ring_work_begin(struct ring *ring, void *work);
void ring_work_end(struct ring *ring, bool shared);

/* A module has an object of this number (KVD_RING_IDS + slot). */
bool ring_has(const struct ring *ring, uint64_t id);
/* The slot, which the entry claimed, fails, for err_last(). */
void ring_refuse(struct ring *ring, uint32_t slot, uint64_t id);
/* Its slot was claimed, and no object has it any more. */
void ring_forget(struct ring *ring, uint64_t id);

/* The text of what was refused under this number; NULL: none is kept. */
const struct err *ring_fault_of(const struct ring *ring, uint64_t id);
void ring_faults_free(struct ring *ring);

#endif
