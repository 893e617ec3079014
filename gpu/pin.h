/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pin: host memory that a device may reach by itself.
 *
 * Transports have buffers between engine memory and the wire, engines register memfds
 * that cannot be truncated, the chunk store has its memory. All of it is offered here,
 * which costs nothing; with the first copy between a device and such memory it is
 * registered with the driver, as a whole and once a context, and then kernels and copy
 * engines read and write it directly. Memory that is not offered, cannot be registered (a
 * limit on locked memory, a second device's context), or is not registered yet, is
 * reached through the lanes' own pinned memory.
 */
#ifndef KVD_GPU_PIN_H
#define KVD_GPU_PIN_H

#include <stdbool.h>
#include <stdint.h>

struct gpu;
struct gpu_device;
struct gpu_pin;

/* Offer whole pages. Any thread, never blocks. `gpu` NULL: *pin_p is NULL, too. */
int gpu_pin_new(struct gpu *gpu, void *base, uint64_t bytes, bool read_only,
		struct gpu_pin **pin_p);
/* Before the memory is freed; no copy touches it any more. May block. NULL is allowed. */
void gpu_pin_free(struct gpu_pin *pin);

/* Can the device reach all of it? Registers it if that was not tried, much memory behind
 * the caller's back. A user's thread, with the context current; may block. */
bool gpu_pin_here(struct gpu_pin *pin, struct gpu_device *device);
/* The same of the pin that has it; false: none. */
bool gpu_pin_ready(struct gpu_device *device, const void *at, uint64_t bytes);

/* Before the context is released (gpu.c). */
void gpu_pins_drop(struct gpu_device *device);

#endif
