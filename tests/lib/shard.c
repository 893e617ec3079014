/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Replicated heads: with more ranks than heads the head of a rank is a division
 * (rank / (size / heads)), not a remainder; a remainder gives ranks that share a
 * head different heads (sglang #19086, #30997, #31295).
 */
#include "tests/lib/shard.h"

#include "daemon/base/err.h"

int shard_units(uint32_t total, uint32_t size, uint32_t rank, uint32_t *first_p,
		uint32_t *units_p)
{
	if (total == 0 || size == 0)
		return err_raise(ERR_INVAL, "shard: %s is 0", total ? "size" : "total");
	if (rank >= size)
		return err_raise(ERR_RANGE, "shard: rank %u of %u", rank, size);
	if (total % size == 0) {
		*units_p = total / size;
		*first_p = rank * *units_p;
		return 0;
	}
	if (size % total == 0) {
		*units_p = 1;
		*first_p = rank / (size / total);
		return 0;
	}
	return err_raise(
		ERR_INVAL,
		"shard: %u units not divisible over %u ranks, nor ranks over units",
		total, size);
}
