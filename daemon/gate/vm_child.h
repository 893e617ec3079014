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

/* Rows of one memory that become those of another: bytes stay in the process, in its half
 * of the window. */
#define VM_PAIRS 2u
#define VM_PAIR_ROWS 512u
#define VM_PAIR_BYTES (VM_WINDOW_BYTES / VM_PAIRS)
enum vm_stage { VM_READING, VM_WRITING, VM_GIVEN_UP /* nothing is written any more */ };
struct vm_pair {
	struct vm_row rows[2][VM_PAIR_ROWS]; /* read, written */
	_Atomic uint32_t stage;		     /* enum vm_stage */
};

/* Shared: the rows of one request, and their bytes in sequence. */
struct vm_window {
	struct vm_row rows[VM_WINDOW_ROWS];
	struct vm_pair pairs[VM_PAIRS];
	uint8_t bytes[VM_WINDOW_BYTES];
};

enum vm_op { VM_READ, VM_WRITE, VM_PAIR };

/* The first record carries the window's descriptor; all others the /proc/PID/mem to be
 * read or written, VM_PAIR both, which are closed afterwards. */
struct vm_ask {
	uint32_t op;	   /* enum vm_op */
	uint32_t pair;	   /* its number */
	uint32_t count[2]; /* of rows; VM_PAIR: read, written */
};

struct vm_answer {
	uint64_t moved; /* bytes, from the first on; VM_PAIR: written */
	int32_t error;	/* errno of the error that stopped it, 0 */
	uint32_t zero;
};

void vm_child_serve(int socket);

#endif
