/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk_sim: a disk behind daemon/store/disk.h that lives in memory and in the time of a
 * virtual loop. What happens follows from the seed and from what is asked of it.
 *
 * The image is what outlives a loss of power; disk_sim_open() opens it. Of each sector
 * (4 KiB) it knows what is read now and what is on the medium. A written sector reaches
 * the medium by a SYNC, or at any time before, whole or torn (its first blocks of 512
 * bytes new), or not at all. What is made, renamed or removed is on the medium when its
 * op is done; at a loss of power before that it is, or it is not.
 */
#ifndef KVD_TESTS_DISK_SIM_H
#define KVD_TESTS_DISK_SIM_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/store/disk.h"

struct disk_sim;
struct loop;

/* Slab files and named files have `capacity` bytes together. */
int disk_sim_new(uint64_t seed, uint64_t capacity, struct disk_sim **sim_p);
void disk_sim_free(struct disk_sim *sim); /* no disk is open on it; NULL is fine */
/* As disk_open(), on a virtual loop; path, way, cached and stop_ns mean nothing. */
int disk_sim_open(struct disk_sim *sim, struct loop *loop, const struct disk_args *args,
		  struct disk **disk_p);

/*
 * At once. The disk that was open on it is dead: all of its ops, and those that come,
 * end with ERR_IO; it is to be freed. Another can be opened before that.
 */
void disk_sim_power_loss(struct disk_sim *sim);

/* Each piece and each other op takes so long (20 us to 2 ms), hence they end in any
 * order. */
void disk_sim_delays(struct disk_sim *sim, uint64_t least_ns, uint64_t most_ns);

enum disk_sim_trouble {
	DISK_SIM_EIO,
	DISK_SIM_FULL,	/* ENOSPC */
	DISK_SIM_FLIP,	/* READ: a bit of what is read; WRITE: of what is kept */
	DISK_SIM_SHORT, /* READ, WRITE: a part of the piece is moved */
	DISK_SIM_HANG,	/* it never ends */
};
/* Of the pieces of READs or WRITEs, or of the ops of another kind: the first `skip` are
 * spared, the next `count` (0: all) are struck, each with a chance of 1 in `one_in`
 * (0: always). */
struct disk_sim_fault {
	enum disk_sim_trouble trouble;
	enum disk_what what;
	uint64_t skip, count;
	unsigned int one_in;
};
void disk_sim_fault(struct disk_sim *sim, const struct disk_sim_fault *fault);
void disk_sim_heal(struct disk_sim *sim); /* no more faults; what hangs goes on hanging */
uint64_t disk_sim_struck(const struct disk_sim *sim); /* by any fault, ever */

#endif
