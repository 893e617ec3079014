/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/math/pick.h"

#include <pthread.h>
#include <string.h>

#include "daemon/math/attend_impl.h"

static const char *const names[PICK_ISAS] = {
	[PICK_AUTO] = "auto", [PICK_REF] = "ref",	[PICK_VECTOR] = "vector",
	[PICK_AVX2] = "avx2", [PICK_AVX512] = "avx512", [PICK_BF16] = "avx512_bf16",
	[PICK_AMX] = "amx",
};

static bool has[PICK_ISAS];
static pthread_once_t asked = PTHREAD_ONCE_INIT;

const char *pick_name(enum pick_isa isa)
{
	return names[isa];
}

bool pick_by_name(const char *name, enum pick_isa *isa_p)
{
	uint32_t i;

	for (i = 0; i < PICK_ISAS; i++)
		if (!strcmp(name, names[i])) {
			*isa_p = (enum pick_isa)i;
			return true;
		}
	return false;
}

/* Checks each set that mk/math.mk lets the compiler use in a kernel's file: the first
 * processors with AVX-512F have no other part of it, and a virtual machine may hide any.
 * The compiler's library knows which registers the operating system saves. */
static void pick_ask(void)
{
	has[PICK_AUTO] = has[PICK_REF] = has[PICK_VECTOR] = true;
#if defined(__x86_64__)
	has[PICK_AVX2] = attend_avx2 && __builtin_cpu_supports("avx2") &&
			 __builtin_cpu_supports("fma");
	has[PICK_AVX512] =
		attend_avx512 && has[PICK_AVX2] && __builtin_cpu_supports("avx512f") &&
		__builtin_cpu_supports("avx512bw") &&
		__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
	has[PICK_BF16] =
		attend_bf16 && has[PICK_AVX512] && __builtin_cpu_supports("avx512bf16");
#endif
	has[PICK_AMX] = attend_amx && has[PICK_AVX512] && attend_amx_ready();
}

bool pick_has(enum pick_isa isa)
{
	pthread_once(&asked, pick_ask);
	return has[isa];
}

static const struct attend_kernel *pick_of(enum pick_isa isa)
{
	const struct attend_kernel *const kernels[PICK_ISAS] = {
		[PICK_REF] = &attend_ref,  [PICK_VECTOR] = &attend_vector,
		[PICK_AVX2] = attend_avx2, [PICK_AVX512] = attend_avx512,
		[PICK_BF16] = attend_bf16, [PICK_AMX] = attend_amx,
	};

	return pick_has(isa) ? kernels[isa] : NULL;
}

const struct attend_kernel *pick_kernel(enum pick_isa isa,
					const struct attend_shape *shape)
{
	const struct attend_kernel *kernel;

	if (isa == PICK_AUTO)
		isa = PICK_ISAS - 1;
	for (; isa > PICK_REF; isa--) {
		kernel = pick_of(isa);
		if (kernel && kernel->takes(shape))
			return kernel;
	}
	return &attend_ref;
}
