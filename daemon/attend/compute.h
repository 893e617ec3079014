/* SPDX-License-Identifier: Apache-2.0 */
/*
 * compute: the queues of rows that wait for a processor: for attention_threads, or for
 * one GPU, whose kernels a thread starts and waits for. A free thread takes all queued
 * rows for one layer of the same chunks, in one call of a kernel: that reads their KV
 * once. Rows of local engines and of other daemons are treated alike, and each principal
 * has a queue of its own: a principal with many requests delays only itself.
 */
#ifndef KVD_ATTEND_COMPUTE_H
#define KVD_ATTEND_COMPUTE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/attend/form.h"
#include "daemon/base/err.h"
#include "daemon/base/list.h"

struct compute;
struct compute_group;
struct compute_queue;
struct gpu_device;
struct kernel;
struct loop;
struct offload;
struct store_kv;

/* Rows with a run of chunks. */
struct compute_item {
	struct list link;
	struct store_kv *kv; /* taken */
	struct form form;
	uint32_t layer;
	const void *q; /* rows of dqk, of the owner until on_done */
	uint32_t rows;
	uint64_t tokens; /* of the chunks', from the first on; at most all */
	int32_t delta;
	const uint32_t *select; /* per_token for each shape.heads rows, or NULL */
	uint32_t per_token;
	uint64_t principal; /* offload.h */
	/* of the owner: o [rows][dv], m and l [rows]; with form.out_bf16 contiguous, and
	 * a reply's values in the end */
	float *o, *m, *l;
	/* Once, on the loop; `why` NULL: complete. If canceled, they are not valid. */
	void (*on_done)(struct compute_item *item, const struct err *why);
	void *owner;
	/* compute's */
	struct compute *compute;
	struct compute_queue *queue;
	struct compute_group *group; /* while it waits */
	struct list joins;	     /* group->items */
	uint64_t queued_ns;
	uint32_t done, now; /* rows: of earlier calls, and of the one that runs */
	/* for on_done; together: principals that had rows for the same KV, of those that
	 * a call scans */
	uint32_t queue_us, attend_us, together;
	bool gpu; /* from compute_submit() on: by a GPU */
	atomic_bool canceled;
	bool running;
};

/* Rows x tokens of a call, about: meanwhile its thread is occupied. */
#define COMPUTE_WORK (UINT64_C(1) << 23)
/* Of an indivisible item: the rows of one query token. */
#define COMPUTE_WORK_MOST (16 * COMPUTE_WORK)

/* Of a call for a GPU, about: an engine's kernels wait for it. */
#define COMPUTE_GPU_US 200.0

struct compute_args {
	struct offload *offload;   /* it serves nothing else */
	unsigned int threads;	   /* of it; 0: nothing can be computed */
	const char *isa;	   /* kernel.h's */
	struct gpu_device *device; /* all items are in its memory; NULL: the host's */
	unsigned int share; /* percent of the device's time; 0: all of the threads' */
};
int compute_new(struct loop *loop, const struct compute_args *args,
		struct compute **compute_p);
bool compute_idle(const struct compute *compute); /* NULL is fine */
void compute_free(struct compute *compute);	  /* it is idle; NULL is fine */

/* ERR_REQUIRE: no threads; ERR_LAYOUT …: the chunks have another shape; ERR_RANGE,
 * ERR_INVAL: tokens out of range. Otherwise on_done is called, in a later turn. */
int compute_submit(struct compute *compute, struct compute_item *item);
/* True: it was queued, and on_done is not called. False: on_done follows soon. */
bool compute_cancel(struct compute_item *item);

struct kernel *compute_kernel(const struct compute *compute);
struct offload *compute_offload(const struct compute *compute);
/* One of its threads waits as long as the share requires after a call of so long. */
void compute_rest(const struct compute *compute, double us);

struct compute_figures {
	uint64_t batches, rows, attend_us;
	unsigned int threads, waiting;
	const char *isa; /* of the kernels; NULL: none */
};
void compute_figures(const struct compute *compute, struct compute_figures *figures_p);

#endif
