/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring_ops: execution of entries of the submission ring (defined in proto/kvd_ring.h):
 * modules provide verbs, one per op. Loop thread.
 */
#ifndef KVD_RING_OPS_H
#define KVD_RING_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/request/ring.h"

/* Location of the bytes that belong to an entry. */
struct ring_payload {
	int fd;	       /* of an arena or a memfd; or: */
	uint8_t *data; /* heap; the function that takes it sets it to NULL */
	uint64_t bytes;
};
/* A copy; a second read may return other contents. */
int ring_payload_read(const struct ring_payload *payload, uint64_t offset, void *to,
		      size_t len);
/* The same, to the heap, with a zero byte after it; on failure *copy_p stays NULL. */
int ring_payload_copy(const struct ring_payload *payload, uint64_t offset, size_t len,
		      uint8_t **copy_p);

enum { RING_OP_LATER = 1 };

struct ring_verb {
	uint32_t op;
	/*
	 * Execute it; `arena` contains its payload, which is inside. RING_OP_LATER: not
	 * finished yet, and no other entry of this ring may start; ring_work_end()
	 * follows when it is done, or ring_resume() to try it again. Negative: a protocol
	 * error (ERR_PROTO). A refused entry shows in its slot and returns 0.
	 */
	int (*run)(struct ring *ring, const struct kvd_ring_entry *entry,
		   struct ring_payload *arena);
};
extern const struct ring_verb ring_verbs[];

/* Runs the verb of the entry's op; ERR_PROTO if no module has the op. */
int ring_op(struct ring *ring, const struct kvd_ring_entry *entry,
	    struct ring_payload *arena);
/* A helper has the entry: RING_OP_LATER. Afterwards it is done and the next one may
 * start. `shared`: its payload was in the ring's arena. */
int ring_work_begin(struct ring *ring, void *work);
void ring_work_end(struct ring *ring, bool shared);

/* A module has an object of this number (KVD_RING_IDS + slot). */
bool ring_has(const struct ring *ring, uint64_t id);
/* The slot, which the entry claimed, fails, for err_last(). */
void ring_refuse(struct ring *ring, uint32_t slot, uint64_t id);
/* Its slot was claimed, and its object has been removed. */
void ring_forget(struct ring *ring, uint64_t id);

/* The text of the refusal under this number; NULL: none is kept. */
const struct err *ring_fault_of(const struct ring *ring, uint64_t id);
void ring_faults_free(struct ring *ring);

#endif
