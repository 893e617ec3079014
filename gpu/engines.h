/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engines: rows by the device's copy engines, in as few calls of the driver as their
 * shape allows. Copies of one stretch (up to _flush()) are unordered.
 */
#ifndef KVD_GPU_ENGINES_H
#define KVD_GPU_ENGINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cu_stream;
struct gpu_device;

/* `count` rows, their distances in bytes. Addresses of device or of host memory,
 * as the driver sees them. */
struct gpu_rows {
	uint64_t dst, src;
	uint64_t len, count;
	int64_t dst_stride, src_stride;
	bool flat;    /* the two ends are on different devices: no pitched copies */
	bool host;    /* an end is in host memory */
	bool engines; /* an end is not for kernels: another device without peer access */
};

#define GPU_ENGINES_BATCH 512u

/* in a lane */
struct gpu_engines {
	struct gpu_device *device;
	struct cu_stream *stream;
	bool used; /* since the last _drop() */
	/* pitched rows, and as many more of them at equal distances: not yet queued */
	struct gpu_rows group;
	uint64_t depth; /* 0: none */
	int64_t dst_outer, src_outer;
	/* single copies, not yet queued */
	size_t count;
	uint64_t dsts[GPU_ENGINES_BATCH], srcs[GPU_ENGINES_BATCH];
	size_t sizes[GPU_ENGINES_BATCH];
};

/* Bytes of them that one call of the driver moves, apart from their neighbours. */
uint64_t gpu_engines_at_once(const struct gpu_engines *engines,
			     const struct gpu_rows *rows);
/* The context is current in both. */
int gpu_engines_copy(struct gpu_engines *engines, const struct gpu_rows *rows);
int gpu_engines_flush(struct gpu_engines *engines);
/* Forget unqueued rows and start a stretch. */
void gpu_engines_drop(struct gpu_engines *engines);

#endif
