/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage: the stream of a plan as a sender gathers it and a receiver scatters it.
 *
 * One side of a plan, and any stretch [begin, end) of its byte stream, can be
 * packed into linear memory, unpacked from it, or named as iovecs for a system
 * call that moves it without a copy of ours. Which of the two pays is a matter
 * of how many rows the stretch has.
 *
 * Any thread, with a copy_hand of its own; memory of other processes and memory that its
 * owner may truncate are supported too, by packing.
 */
#ifndef KVD_STAGE_STAGE_H
#define KVD_STAGE_STAGE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/uio.h>

#include "daemon/plan/plan.h"
#include "daemon/memory/copy.h"

struct stage_side {
	const struct plan *plan;
	const struct copy_buffer *buffers; /* as the plan's buffer numbers name them */
	uint32_t count;
	bool is_src;	/* the plan's source side; else the destination */
	bool streaming; /* unpack past the caches: the transfer is larger than they */
};

/* Both: 0, or ERR_FAULT when the memory was lost. The creator of the side has checked
 * that the rows are inside the buffers. */
int stage_pack(struct copy_hand *hand, const struct stage_side *side, uint64_t begin,
	       uint64_t end, void *to);
int stage_unpack(struct copy_hand *hand, const struct stage_side *side, uint64_t begin,
		 uint64_t end, const void *from);

/* Can a system call address every buffer of the side? */
bool stage_mapped(const struct stage_side *side);
/* Has [begin, end) at most `rows_max` rows, neighbours in memory counted as one?
 * Takes time with the runs of the stretch, and no more than rows_max of them. */
bool stage_few_rows(const struct stage_side *side, uint64_t begin, uint64_t end,
		    unsigned int rows_max);
/* Name the bytes from `begin` on, up to `end` or as many as `max` iovecs hold; returns
 * their number. Only for a side that is mapped. */
uint64_t stage_iov(const struct stage_side *side, uint64_t begin, uint64_t end,
		   struct iovec *iov, unsigned int max, unsigned int *count_p);

#endif
