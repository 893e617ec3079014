/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu_owner: an engine's process with memory on a GPU of the fake driver, and a
 * way for the test to look into that memory. Any program that calls
 * gpu_owner_main() first thing in main() can be such a process.
 */
#ifndef TESTS_LIB_GPU_OWNER_H
#define TESTS_LIB_GPU_OWNER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "gpu/import.h"

struct gpu_owner {
	pid_t pid;
	int sock;
	int file;      /* behind the memory; pread and pwrite see what the GPU does */
	uint8_t *view; /* mapped */
	uint64_t bytes;
	uint64_t address;	  /* in its own process */
	struct gpu_handle handle; /* its fd is ours to close */
};

/* The fake libcuda.so.1 of this build ("" or "old/" in front). */
const char *gpu_fake_path(const char *variant, char path[256]);
/* What gpu_tune() takes for the fake to have kernels, also in a build without nvcc. */
const char *gpu_fake_kernels(void);
/* A symbol of the fake's, which must be loaded; never NULL. */
void *gpu_fake_symbol(const char *name);

/* Returns if this is no such process; call it before anything else. */
void gpu_owner_main(int argc, char **argv);
/* `device` as the process counts them. False: errno. */
bool gpu_owner_start(struct gpu_owner *owner, enum gpu_handle_kind kind,
		     unsigned int device, uint64_t bytes);
void gpu_owner_kill(struct gpu_owner *owner); /* kill -9, reaped */
void gpu_owner_end(struct gpu_owner *owner);  /* in peace; idempotent */

#endif
