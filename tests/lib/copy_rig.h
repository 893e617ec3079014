/* SPDX-License-Identifier: Apache-2.0 */
/* copy_rig: a copier on a loop of its own, and jobs whose ends are counted. */
#ifndef KVD_TESTS_COPY_RIG_H
#define KVD_TESTS_COPY_RIG_H

#include "daemon/memory/copy.h"

struct loop;

struct copy_rig {
	struct loop *loop;
	struct copier *copier;
	unsigned int done;
};

struct copy_rig_job {
	struct copy_job job; /* its on_done is copy_rig_on_done */
	struct copy_rig *rig;
	unsigned int calls;
	unsigned int order; /* which on_done it was, from 1 */
};

void copy_rig_setup(struct copy_rig *rig, unsigned int threads, uint64_t slice);
void copy_rig_teardown(struct copy_rig *rig);
void copy_rig_on_done(struct copy_job *job);
/* Turn until so many jobs have ended in all. */
void copy_rig_wait(struct copy_rig *rig, unsigned int count);
struct plan *copy_rig_plan(const struct plan_run *runs, size_t count);
/* The byte of a place. */
uint8_t copy_rig_pattern(uint64_t i);

#endif
