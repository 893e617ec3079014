/* SPDX-License-Identifier: Apache-2.0 */
/* The vector kernel for AVX-512: mk/math.mk enables it in the compiler, on x86-64. */
#include "daemon/math/attend_impl.h"

#if defined(__AVX512F__)
#define VEC_BYTES 64
#define VEC_ROWS 4
#include "daemon/math/attend_vec.h"

static const struct attend_kernel kernel = VEC_TABLE("avx512");
const struct attend_kernel *const attend_avx512 = &kernel;
#else
const struct attend_kernel *const attend_avx512 = NULL;
#endif
