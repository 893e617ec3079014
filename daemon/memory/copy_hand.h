/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy_hand: a thread's state for copying, and the copy of a range of a job (copy.h has
 * the rest of its functions, which others use too). Any thread, one at a time.
 */
#ifndef KVD_TRANSPORT_COPY_HAND_H
#define KVD_TRANSPORT_COPY_HAND_H

#include "daemon/memory/copy.h"

/* [begin, end) of the job; `bounce`: by a buffer between its ends. */
int copy_slice(struct copy_hand *hand, const struct copy_job *job, uint64_t begin,
	       uint64_t end, bool bounce);
/* It may have memory of another process. */
bool copy_has_vm(const struct copy_end *end);

#endif
