/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A libcuda.so.1 that knows one registered range, which the test sets. Answers as
 * the driver does: CUDA_ERROR_INVALID_VALUE for what it does not know.
 */
#include <stdint.h>

int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer);

uint64_t fake_cuda_begin, fake_cuda_end;
int fake_cuda_answer = 1;

int cuPointerGetAttribute(void *data, int attribute, uint64_t pointer)
{
	if (attribute != 2)
		return 1;
	if (pointer < fake_cuda_begin || pointer >= fake_cuda_end)
		return fake_cuda_answer;
	*(unsigned int *)data = 1; /* CU_MEMORYTYPE_HOST */
	return 0;
}
