/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard: how tensor-parallel ranks share a model's heads, as the engines do. The plan
 * works on the intervals in the layouts, even or not.
 */
#ifndef KVD_TESTS_LIB_SHARD_H
#define KVD_TESTS_LIB_SHARD_H

#include <stdint.h>

/*
 * The units (heads, channels, groups) of one rank: total / size each if total is
 * divisible by size; one each, shared by size / total neighbouring ranks, if size
 * is divisible by total. All else is refused (ERR_INVAL), as both engines
 * do: 6 heads on 4 ranks, 4 heads on 6.
 */
int shard_units(uint32_t total, uint32_t size, uint32_t rank, uint32_t *first_p,
		uint32_t *units_p);

#endif
