/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gate_child: the process of a gate, and the records between it and the daemon (gate.c).
 * One program, so they are structures as the compiler lays them out.
 */
#ifndef KVD_GATE_GATE_CHILD_H
#define KVD_GATE_GATE_CHILD_H

#include <stdint.h>

#define GATE_BYTES 4096u      /* of a stream, in one answer */
#define GATE_SLOTS_MAX 65536u /* sockets held by one process */
#define GATE_FDS_MAX 16u      /* descriptors in one answer */

enum gate_op {
	GATE_HOLD = 1, /* + a descriptor: until DROP */
	GATE_DROP,
	GATE_LINES,  /* receive at most `want` bytes, line by line, until some brought
			descriptors */
	GATE_STREAM, /* the same, as received */
};

struct gate_ask {
	uint32_t op, slot;
	uint32_t want;
	uint32_t most; /* descriptors; more are refused */
	uint64_t serial;
};

enum gate_fault {
	GATE_FINE,
	GATE_REFUSED,  /* a descriptor of a kind that is not accepted: `what` */
	GATE_TOO_MANY, /* over `most` */
	GATE_LOST,     /* no descriptor numbers were left for them */
	GATE_NOTHING,  /* the bytes did not arrive */
};

struct gate_answer {
	uint64_t serial;
	uint32_t begun; /* 1: the bytes are about to be taken; the rest is in the next */
	uint32_t fault; /* enum gate_fault */
	uint32_t bytes, at;
	uint32_t fds; /* sent along */
	char what[64];
	/* `bytes` bytes follow; descriptors arrived with the last part of them, `at` is
	 * the one that was refused */
};

void gate_child_serve(int socket);

#endif
