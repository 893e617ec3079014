/* SPDX-License-Identifier: Apache-2.0 */
/* The vector kernel for the baseline of the build's processors. */
#define VEC_BYTES 16
#define VEC_ROWS 2
#include "daemon/math/attend_vec.h"

const struct attend_kernel attend_vector = VEC_TABLE("vector");
