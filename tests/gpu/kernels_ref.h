/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels_ref: the kernels on a CPU, lane by lane: what tests hold them against,
 * and what the fake driver runs in their place.
 */
#ifndef KVD_GPU_KERNELS_REF_H
#define KVD_GPU_KERNELS_REF_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu/kern.h"

/* Where `bytes` at an address that a kernel is given lie for this CPU, at an
 * address with the same last 4 bits; NULL: not there, or not to be written. */
struct kernels_reach {
	void *(*at)(void *arg, uint64_t address, uint64_t bytes, bool writing);
	void *arg;
};

/* One entry of a list whose places begin at the address `places`. */
bool kernels_ref_entry(const struct kern_rows *entry, uint64_t places,
		       const struct kernels_reach *reach);
/* All: false when some address is not there; what came before it has been done.
 * `reach` NULL: addresses are this process's. */
bool kernels_ref_rows(const struct kern_rows *rows, const struct kern_place *places,
		      uint32_t count, const struct kernels_reach *reach);

#endif
