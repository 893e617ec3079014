/* SPDX-License-Identifier: Apache-2.0 */
/* disk_sim_impl: the image (disk_sim_image.c) as disks that are open on it (disk_sim.c)
 * see it. Functions give 0 or a negative errno. */
#ifndef KVD_TESTS_DISK_SIM_IMPL_H
#define KVD_TESTS_DISK_SIM_IMPL_H

#include "daemon/base/idmap.h"
#include "daemon/store/disk_name.h"
#include "tests/lib/disk_sim.h"

#define FAULTS_MAX 16u
#define SECTOR 4096u

struct sim_file {
	struct list link;
	char name[DISK_FILE_NAME_BYTES];
	struct disk_file file;	       /* slot_bytes 0: a named file */
	char named[DISK_NAME_MAX + 1]; /* its name */
	uint8_t *content;	       /* its content */
	uint64_t bytes;
	struct idmap sectors; /* of a slab file; one that is not there is zeros */
	unsigned int refs;
	bool gone;
};

struct disk_sim {
	uint64_t random, capacity, used;
	uint64_t least_ns, most_ns;
	struct list files;
	struct sim_disk *disk; /* that has its lock */
	struct disk_sim_fault faults[FAULTS_MAX];
	unsigned int fault_count;
	uint64_t struck;
};

uint64_t sim_random(struct disk_sim *sim);
bool sim_toss(struct disk_sim *sim);
uint64_t sim_delay(struct disk_sim *sim);
/* Is this one struck? */
bool sim_strikes(struct disk_sim *sim, enum disk_sim_trouble trouble,
		 enum disk_what what);

int sector_write(struct disk_sim *sim, struct sim_file *file, uint64_t number,
		 const uint8_t *bytes);
void sector_read(const struct sim_file *file, uint64_t number, uint8_t *bytes);
void file_flush(struct sim_file *file);
/* A SYNC with a fault; with `crash` what is read is what is on the medium. */
void file_settle(struct disk_sim *sim, struct sim_file *file, bool crash);

struct sim_file *file_find(struct disk_sim *sim, const struct disk_op *op); /* or NULL */
void file_let(struct disk_sim *sim, struct sim_file *file);

/* An op that is none of READ, WRITE, SYNC. */
int image_do(struct disk_sim *sim, struct disk_op *op);

#endif
