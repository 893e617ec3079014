/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lane: copies on one device, in order, without waiting for them.
 *
 * A lane is a stream of the lowest priority and a ring of marks (events). One thread uses
 * it at a time, with the device's context current (gpu_enter()). The user of a lane keeps
 * the device in use meanwhile (the memory of the copies does): idle lanes are freed with
 * the context.
 *
 * Queued copies run until lane_drain() returns, whatever the results of calls were: after
 * any fault, drain before the memory is given back.
 */
#ifndef KVD_GPU_LANE_H
#define KVD_GPU_LANE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu/engines.h"

struct cu_function;
struct gpu_device;
struct gpu_kept;
struct gpu_lane;
struct kern_place;

#define GPU_LANE_MARKS 8u /* outstanding at once */
/* The copies between two marks use one set of the lane's own pinned memory: a list for
 * the kernels, and a bounce buffer. So two such stretches can be in flight. */
#define GPU_LANE_SETS 2u

int gpu_lane_take(struct gpu_device *device, struct gpu_lane **lane_p);
/* Nothing is in flight: every mark was waited for, or the lane is drained. */
void gpu_lane_give(struct gpu_lane *lane);

/* Queue: rows shorter than gpu->kernel_row_bytes in one launch with the others of
 * this stretch, if the kernels are there; else by copy engine. Host memory is pinned
 * (gpu_lane_bounce(), pin.h), or the rows are for the engines. Copies of one lane may
 * run in any order among themselves up to the next mark; bytes that are reached twice
 * are undefined. */
int gpu_lane_copy(struct gpu_lane *lane, const struct gpu_rows *rows);
/* The same for rows of `len` bytes without order, which the kernel can take: the caller
 * writes their places, *room_p at most, and passes their number and the OR of all their
 * addresses. NULL: no space, or no kernel: use gpu_lane_copy(). */
struct kern_place *gpu_lane_places(struct gpu_lane *lane, uint64_t len, bool host,
				   uint32_t *room_p);
void gpu_lane_placed(struct gpu_lane *lane, uint64_t len, uint32_t count, uint64_t bits);
/* If all of the stretch that is being queued is for the kernel, keep its list (keep.h),
 * which is the caller's to release when the next mark was waited for. */
void gpu_lane_keep(struct gpu_lane *lane, struct gpu_kept *kept);
/* Queue the rows of a kept list, as a separate stretch. 1: there is no kernel now. */
int gpu_lane_again(struct gpu_lane *lane, const struct gpu_kept *kept);
/* All copies queued before are done when the mark is. */
int gpu_lane_mark(struct gpu_lane *lane, uint64_t *mark_p);
/* Blocks. 0, or the fault of the copies. Marks are waited for in order. */
int gpu_lane_wait(struct gpu_lane *lane, uint64_t mark);
/* Pinned host memory of the lane's own, made when first asked for; `index` below
 * GPU_LANE_SETS. */
#define GPU_LANE_BOUNCE_BYTES (UINT64_C(1) << 20)
int gpu_lane_bounce(struct gpu_lane *lane, unsigned int index, void **bounce_p);
/* Memory of the lane's own for a user's launches, pinned and of the device: at least so
 * many bytes each, until it is asked for again. Nothing is in flight. */
int gpu_lane_room(struct gpu_lane *lane, size_t host_bytes, size_t bytes, void **host_p,
		  uint64_t *address_p);
/* Queue, in order: a copy to or from that memory, a launch of a kernel with one argument
 * of x by y blocks. */
int gpu_lane_bytes(struct gpu_lane *lane, uint64_t dst, uint64_t src, size_t bytes);
int gpu_lane_launch(struct gpu_lane *lane, struct cu_function *kernel, uint32_t x,
		    uint32_t y, uint32_t threads, void *argument);
/* No copy of this lane runs after it. Never fails, and does not return before that is
 * certain; raises no error. */
void gpu_lane_drain(struct gpu_lane *lane);

/* Frees idle lanes, before the context is released (gpu.c, the device's lock held). */
void gpu_lanes_free(struct gpu_device *device);

#endif
