/* SPDX-License-Identifier: Apache-2.0 */
/*
 * settle: huge pages for a mapping, as an attempt with a bounded wait.
 */
#ifndef KVD_TRANSPORT_SETTLE_H
#define KVD_TRANSPORT_SETTLE_H

#include <stdbool.h>
#include <stddef.h>

/* Any thread but the loop's. The range is present; both ends are multiples of 2 MiB.
 * Returns when it is collapsed, or cannot be, or the kernel takes its time: then it
 * continues in the background. The range may be unmapped meanwhile, because it is only
 * advice. */
void settle(void *first, size_t bytes);

/* While it is set nothing is collapsed, and no caller waits: the process is ending. */
void settle_hurry(bool hurry);

/* For tests: the function called instead of madvise(); NULL: madvise(). */
void settle_with(void (*collapse)(void *first, size_t bytes));

#endif
