/* SPDX-License-Identifier: Apache-2.0 */
/* gates: the gates of a daemon that lives in a test, with a process of their own. */
#ifndef KVD_TESTS_LIB_GATES_H
#define KVD_TESTS_LIB_GATES_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct gates;
struct loop;
struct memory;
struct warden;

void gates_begin(struct loop *loop, struct gates **gates_p);
/* One for a whole test program, never freed. Its first call opens descriptors. */
struct warden *test_warden(void);
/* Private memory of a process, by a /proc/PID/mem of our own. */
int vm_import_pid(pid_t pid, uint64_t address, uint64_t length, struct memory **memory_p);
int vm_import_fd(int fd, pid_t pid, uint64_t address, uint64_t length,
		 struct memory **memory_p);
/* The byte at `address` is written, or read. As vm_move(). */
ssize_t vm_byte(const struct memory *memory, bool reading, uint8_t *byte,
		uint64_t address);

#endif
