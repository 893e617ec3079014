/* SPDX-License-Identifier: Apache-2.0 */
/*
 * home_key: the key of a chunk in the index of other daemons: 64 bits of its id and 48 of
 * its space's digest, which includes the user's name. A collision costs one useless
 * query: the queried daemon compares ids.
 */
#ifndef KVD_STORE_HOME_KEY_H
#define KVD_STORE_HOME_KEY_H

#include <stdint.h>
#include <string.h>

#include <xxhash.h>

#define HOME_SPACE_BITS 48u
#define HOME_SPACE_MASK ((UINT64_C(1) << HOME_SPACE_BITS) - 1)

struct home_key {
	uint64_t id, space; /* of space only HOME_SPACE_BITS */
};

static inline uint64_t home_key_space(const uint8_t digest[16])
{
	uint64_t space = 0;

	for (unsigned int i = 0; i < HOME_SPACE_BITS / 8; i++)
		space |= (uint64_t)digest[i] << (8 * i);
	return space;
}

static inline struct home_key home_key_make(uint64_t space, const uint8_t id[32])
{
	return (struct home_key){.id = XXH3_64bits_withSeed(id, 32, space),
				 .space = space};
}

static inline uint64_t home_mix(uint64_t x)
{
	x ^= x >> 30;
	x *= UINT64_C(0xbf58476d1ce4e5b9);
	x ^= x >> 27;
	x *= UINT64_C(0x94d049bb133111eb);
	return x ^ x >> 31;
}

/* Sums of keys are made of this, in the same way at all daemons. */
static inline uint64_t home_key_mix(const struct home_key *key)
{
	return home_mix(key->id ^ home_mix(key->space + 1));
}

#endif
