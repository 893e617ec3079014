/* SPDX-License-Identifier: Apache-2.0 */
/*
 * settle: huge pages for a mapping, as an attempt that nobody waits for too long.
 */
#ifndef KVD_TRANSPORT_SETTLE_H
#define KVD_TRANSPORT_SETTLE_H

#include <stdbool.h>
#include <stddef.h>

/* Any thread but the loop's. The range is present; both ends are multiples of 2 MiB.
 * Returns when it is collapsed, or cannot be, or the kernel takes its time: then it
 * goes on with it alone. The range may be unmapped meanwhile, and is advice then. */
void settle(void *first, size_t bytes);

/* While it is set nothing is collapsed, and nobody waits: the process is to end. */
void settle_hurry(bool hurry);

/* For tests: what is called instead of madvise(); NULL: that again. */
void settle_with(void (*collapse)(void *first, size_t bytes));

#endif
