/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend_plan: an attention job (daemon/math/attend.h) as the launches of attend.cu that
 * do it. One image holds all inputs of the kernels except the KV: tiles, turns,
 * selections and q; it is written here and copied to the device unchanged. One block of
 * planes holds their output: o, m and l of each split, and of their merge. The last plane
 * is the result, copied back and returned.
 *
 * The job's pointers are to host memory, except kv: its bases and its page table are
 * device addresses, which are not read here. Pure; any thread, each with its own scratch.
 */
#ifndef KVD_GPU_ATTEND_PLAN_H
#define KVD_GPU_ATTEND_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/math/attend.h"
#include "gpu/attend_kern.h"

struct attend_row;

struct attend_plan {
	const struct attend_job *job;
	uint32_t splits, tiles, rows;
	const struct attend_row
		*taken;	    /* rows in the order of the tiles; in the scratch */
	const char *kernel; /* its name: a launch of tiles by splits blocks … */
	struct attend_kern kern;
	struct attend_kern_merge
		merge; /* … and, with several splits, kvd_merge of these */
};

struct attend_plan_bytes {
	size_t image, planes, scratch;
};

/* Why the kernels reject a job that attend_job_fault() accepts: a text that names the
 * member. NULL: they accept it. */
const char *attend_plan_fault(const struct attend_job *job);
/* Its maximum needs; 1 to MERGE_PARTS_MAX splits. */
struct attend_plan_bytes attend_plan_size(const struct attend_job *job, uint32_t splits);
/* `image` and `scratch` are 64-byte aligned, so are `image_at` and `planes_at`, where
 * image and planes are for the device. A job without rows has no tiles: no launch. */
void attend_plan_make(struct attend_plan *plan, const struct attend_job *job,
		      uint32_t splits, void *image, uint64_t image_at, uint64_t planes_at,
		      void *scratch);
/* Where in the planes the result is, and its bytes. */
size_t attend_plan_result(const struct attend_plan *plan, size_t *bytes_p);
/* The result's bytes to the job's spans. */
void attend_plan_take(const struct attend_plan *plan, const void *result);

#endif
