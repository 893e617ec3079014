/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vm_child: the process that reads and writes other processes' memory, and the messages
 * between it and one thread of the daemon (memory/vm.c). One program, so these are
 * structures as the compiler lays them out.
 */
#ifndef KVD_GATE_VM_CHILD_H
#define KVD_GATE_VM_CHILD_H

#include <stdint.h>

#define VM_WINDOW_ROWS 1024u
#define VM_WINDOW_BYTES (256u << 10)

struct vm_row {
	uint64_t address; /* in the process */
	uint64_t bytes;
};

/* Shared: the rows of one request, and their bytes in sequence. */
struct vm_window {
	struct vm_row rows[VM_WINDOW_ROWS];
	uint8_t bytes[VM_WINDOW_BYTES];
};

/* The first record carries the window's descriptor; all others the /proc/PID/mem to be
 * read or written, which is closed afterwards. */
struct vm_ask {
	uint32_t count; /* of rows */
	uint32_t write; /* into the process */
};

struct vm_answer {
	uint64_t moved; /* bytes, from the first on */
	int32_t error;	/* errno of the error that stopped it, 0 */
	uint32_t zero;
};

void vm_child_serve(int socket);

#endif
