/* SPDX-License-Identifier: Apache-2.0 */
/*
 * devices: a queue of rows (compute.h) for each GPU, with two threads of its own: one
 * prepares a call while the other's kernel runs. So a device's rows wait neither for the
 * CPU's nor for another device's. It is made with the first rows, or the first
 * measurement, in the memory of the device. Loop thread.
 */
#ifndef KVD_ATTEND_DEVICES_H
#define KVD_ATTEND_DEVICES_H

struct attends;
struct compute;
struct compute_figures;
struct compute_item;
struct gpu_device;

/* compute_submit() to the queue of the memory that has the item's chunks. ERR_REQUIRE:
 * attention_gpu_share is off; and compute_submit()'s. */
int devices_submit(struct attends *attends, struct compute_item *item);
/* A device in use, and its queue. ERR_BUSY: none is. ERR_REQUIRE: as above. */
int devices_any(struct attends *attends, struct gpu_device **device_p,
		struct compute **compute_p);
/* The sums. */
void devices_figures(const struct attends *attends, struct compute_figures *figures_p);
/* Their threads end; then the rest. */
void devices_free(struct attends *attends);

#endif
