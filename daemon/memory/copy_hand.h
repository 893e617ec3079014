/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy_hand: a thread's state for copying, and the copy of a range of a job (copy.h has
 * the rest of its functions, which others use too). Any thread, one at a time.
 */
#ifndef KVD_TRANSPORT_COPY_HAND_H
#define KVD_TRANSPORT_COPY_HAND_H

#include <assert.h>

#include "daemon/memory/copy.h"

/* [begin, end) of the job; `bounce`: by a buffer between its ends. */
int copy_slice(struct copy_hand *hand, const struct copy_job *job, uint64_t begin,
	       uint64_t end, bool bounce);
/* Both ends are memory of one user's processes alone. */
bool copy_in_pairs(const struct copy_job *job);
/* Memory of that kind in the end's table; NULL: none. */
const struct memory *copy_end_find(const struct copy_end *end, enum memory_kind kind);
static inline bool copy_has_vm(const struct copy_end *end)
{
	return copy_end_find(end, MEMORY_VM) != NULL;
}

static inline struct memory *copy_end_memory(const struct copy_end *end, uint32_t buffer)
{
	return end->buffers ? end->buffers[buffer].memory : NULL;
}

/* This process's, or the owner's where the memory is vm. A linear end's is `skipped`
 * bytes past its start. Not of files. */
static inline uint64_t copy_end_address(const struct copy_end *end, uint32_t buffer,
					uint64_t offset, uint64_t skipped)
{
	const struct copy_buffer *b;

	if (!end->buffers)
		return (uintptr_t)end->linear + skipped;
	b = &end->buffers[buffer];
	assert(b->memory->kind != MEMORY_FILE); /* file_rows.c's */
	return (b->memory->base ? (uintptr_t)b->memory->base : b->memory->address) +
	       b->offset + offset;
}

#endif
