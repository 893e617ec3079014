/* SPDX-License-Identifier: Apache-2.0 */
/* The vector kernel for AVX2 and FMA: mk/math.mk enables them, on x86-64. */
#include "daemon/math/attend_impl.h"

#if defined(__AVX2__) && defined(__FMA__)
#define VEC_BYTES 32
#define VEC_ROWS 2
#include "daemon/math/attend_vec.h"

static const struct attend_kernel kernel = VEC_TABLE("avx2");
const struct attend_kernel *const attend_avx2 = &kernel;
#else
const struct attend_kernel *const attend_avx2 = NULL;
#endif
