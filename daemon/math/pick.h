/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pick: chooses the attention kernel: the fastest that this machine runs, or the one that
 * the option names. Any thread.
 */
#ifndef KVD_MATH_PICK_H
#define KVD_MATH_PICK_H

#include <stdbool.h>

struct attend_shape;
struct attend_kernel;

enum pick_isa { /* slower to faster, except the first */
		PICK_AUTO,
		PICK_REF,    /* scalar, fp64 sums: the reference for the others */
		PICK_VECTOR, /* vectors of the compiler's baseline */
		PICK_AVX2,   /* with FMA */
		PICK_AVX512,
		PICK_BF16, /* AVX512-BF16; bf16 q and kv only, as AMX */
		PICK_AMX,
		PICK_ISAS,
};

/* "auto", "ref", "vector", "avx2", "avx512", "avx512_bf16", "amx"; false: no such name.
 */
const char *pick_name(enum pick_isa isa);
bool pick_by_name(const char *name, enum pick_isa *isa_p);

/* Can this process run it? AMX: the operating system is asked for permission at the first
 * call, for the whole process; a sandbox may refuse it, and so may a thread's small
 * signal stack. */
bool pick_has(enum pick_isa isa);

/* The kernel for such a shape: `isa` (PICK_AUTO: the fastest), else the next slower one
 * that is available and takes the shape. It does not depend on the number of rows:
 * otherwise a row's bits would depend on other requests. */
const struct attend_kernel *pick_kernel(enum pick_isa isa,
					const struct attend_shape *shape);

#endif
