/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy_pipe: slices of copy jobs, queued on the streams of one device.
 *
 * A pipe is a thread's state for a device while it has work there: a user of it, with its
 * context current, and a few lanes. Slices are queued on the lanes in turn, two at most
 * on each, and end in the order in which they started.
 */
#ifndef KVD_TRANSPORT_COPY_PIPE_H
#define KVD_TRANSPORT_COPY_PIPE_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu/gpu.h"
#include "gpu/lane.h"

struct copy_hand;
struct copy_job;
struct gpu_kept;

#define COPY_PIPE_SLICES (GPU_STREAMS_MAX * GPU_LANE_SETS)

/* The path of a slice's bytes. */
enum copy_way {
	COPY_WAY_NONE,
	COPY_WAY_DIRECT, /* the device reaches both ends */
	COPY_WAY_CPU,	 /* no end is device memory */
	COPY_WAY_IN,	 /* to the device, through pinned memory */
	COPY_WAY_OUT,
};

/* a slice that is queued */
struct copy_flight {
	struct copy_job *job;
	uint64_t begin, end;
	uint64_t mark;
	enum copy_way way;
	struct gpu_kept *kept; /* a list that it reads, or makes; NULL: none */
};

struct copy_pipe {
	struct gpu_device *device;
	struct copy_hand *hand;
	uint64_t *bases; /* GPU_KEEP_BASES, where lists are kept; else NULL */
	struct gpu_lane *lanes[GPU_STREAMS_MAX];
	unsigned int lane_count; /* 0: closed */
	struct copy_flight flights[COPY_PIPE_SLICES];
	unsigned int first, count;
};

/* device and hand are set. `streams`: 1 to GPU_STREAMS_MAX. */
int copy_pipe_open(struct copy_pipe *pipe, unsigned int streams);
void copy_pipe_close(struct copy_pipe *pipe); /* nothing is queued */

static inline bool copy_pipe_full(const struct copy_pipe *pipe)
{
	return pipe->count == pipe->lane_count * GPU_LANE_SETS;
}

/* Queue a slice of [begin, end), `most` bytes of it at most. Its end is in *reached_p.
 * After a fault the pipe accepts nothing, and its earlier slices must be waited for. */
int copy_pipe_begin(struct copy_pipe *pipe, struct copy_job *job, uint64_t begin,
		    uint64_t end, uint64_t most, uint64_t *reached_p);
/* Wait for the oldest slice, which is removed from the pipe even on failure. */
int copy_pipe_end(struct copy_pipe *pipe, struct copy_flight *flight_p);

#endif
