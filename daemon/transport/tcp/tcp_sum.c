/* SPDX-License-Identifier: Apache-2.0 */
/*
 * CRC-32C by the SSE4.2 instruction takes three cycles for eight bytes when each
 * waits for the one before. Three independent chains over neighbouring blocks
 * keep its pipeline full; two of them are then moved behind the other's end by
 * multiplying with x^(8 · BLOCK) modulo the polynomial, which is a table lookup
 * of four bytes here (tables made at first use, 8 KiB). Elsewhere the plain
 * table serves, byte by byte: slow, and right.
 *
 * XXH3 is the library's; its streaming state joins the pieces.
 */
#include "daemon/transport/tcp/tcp_sum.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY /* the state on the stack */
#include <xxhash.h>

#ifdef __x86_64__
#include <nmmintrin.h>
#endif

#define POLYNOMIAL UINT32_C(0x82f63b78) /* reflected */
#define BLOCK 1024u			/* bytes of one chain at a time */

static uint32_t byte_table[256];
static uint32_t shift_one[4][256], shift_two[4][256]; /* by BLOCK, by 2 BLOCK */
#ifdef __x86_64__
static bool has_instruction;
#endif
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t crc_bytes(uint32_t crc, const uint8_t *p, size_t len)
{
	while (len-- > 0)
		crc = crc >> 8 ^ byte_table[(crc ^ *p++) & 255];
	return crc;
}

/* The register's value after `zeros` zero bytes, for each byte of it. */
static void shift_make(uint32_t table[4][256], size_t zeros)
{
	uint32_t bit[32];

	for (unsigned int i = 0; i < 32; i++) {
		bit[i] = UINT32_C(1) << i;
		for (size_t n = 0; n < zeros; n++)
			bit[i] = bit[i] >> 8 ^ byte_table[bit[i] & 255];
	}
	for (unsigned int byte = 0; byte < 4; byte++)
		for (unsigned int v = 0; v < 256; v++)
			for (unsigned int i = 0; i < 8; i++)
				if (v >> i & 1)
					table[byte][v] ^= bit[8 * byte + i];
}

static void tables_make(void)
{
	for (uint32_t i = 0; i < 256; i++) {
		uint32_t crc = i;

		for (unsigned int bit = 0; bit < 8; bit++)
			crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
		byte_table[i] = crc;
	}
	shift_make(shift_one, BLOCK);
	shift_make(shift_two, 2 * (size_t)BLOCK);
#ifdef __x86_64__
	has_instruction = __builtin_cpu_supports("sse4.2");
#endif
}

uint32_t crc32c_table(uint32_t crc, const void *buf, size_t len)
{
	pthread_once(&once, tables_make);
	return ~crc_bytes(~crc, buf, len);
}

#ifdef __x86_64__
static uint32_t shifted(uint32_t table[4][256], uint64_t crc)
{
	return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^
	       table[2][crc >> 16 & 255] ^ table[3][crc >> 24 & 255];
}

static inline uint64_t word_at(const uint8_t *p)
{
	uint64_t v;

	memcpy(&v, p, sizeof(v));
	return v;
}

__attribute__((target("sse4.2"))) static uint32_t crc_sse(uint32_t begin,
							  const uint8_t *p, size_t len)
{
	uint64_t crc = begin, b, c;

	while (len >= 3 * (size_t)BLOCK) {
		b = c = 0;
		for (size_t i = 0; i < BLOCK; i += 8) {
			crc = _mm_crc32_u64(crc, word_at(p + i));
			b = _mm_crc32_u64(b, word_at(p + BLOCK + i));
			c = _mm_crc32_u64(c, word_at(p + 2 * (size_t)BLOCK + i));
		}
		crc = shifted(shift_two, crc) ^ shifted(shift_one, b) ^ c;
		p += 3 * (size_t)BLOCK;
		len -= 3 * (size_t)BLOCK;
	}
	for (; len >= 8; p += 8, len -= 8)
		crc = _mm_crc32_u64(crc, word_at(p));
	for (; len > 0; p++, len--)
		crc = _mm_crc32_u8((uint32_t)crc, *p);
	return (uint32_t)crc;
}
#endif

uint32_t crc32c(uint32_t crc, const void *buf, size_t len)
{
	pthread_once(&once, tables_make);
#ifdef __x86_64__
	if (has_instruction)
		return ~crc_sse(~crc, buf, len);
#endif
	return ~crc_bytes(~crc, buf, len);
}

static uint64_t sum_xxh3(const struct iovec *iov, unsigned int count)
{
	XXH3_state_t state;

	if (count == 1)
		return XXH3_64bits(iov[0].iov_base, iov[0].iov_len);
	XXH3_INITSTATE(&state);
	XXH3_64bits_reset(&state);
	for (unsigned int i = 0; i < count; i++)
		XXH3_64bits_update(&state, iov[i].iov_base, iov[i].iov_len);
	return XXH3_64bits_digest(&state);
}

uint64_t tcp_sum(enum tcp_verify kind, const struct iovec *iov, unsigned int count)
{
	uint32_t crc = 0;

	switch (kind) {
	case TCP_VERIFY_CRC32C:
		for (unsigned int i = 0; i < count; i++)
			crc = crc32c(crc, iov[i].iov_base, iov[i].iov_len);
		return crc;
	case TCP_VERIFY_XXH3:
		return sum_xxh3(iov, count);
	default:
		return 0;
	}
}
