/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel for AMX (attend_tile.h).
 *
 * Two groups of 16 rows at a time share each load (four products for four loads); one
 * group alone waits for memory anyway, and V is then packed piece by piece. The processor
 * prefetches well enough: explicit prefetches made nothing faster.
 *
 * Linux saves tile registers for a process that requested it
 * (Documentation/arch/x86/xstate.rst: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA is 18);
 * without, the first tile instruction is a SIGILL. Products take denormals as 0 (Intel
 * SDM, TDPBF16PS).
 */
#include "daemon/math/attend_impl.h"

/* clang 14 has the name without the underscore */
#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__)
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/math/attend_tile.h"

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
#define STEPS 9u /* of q that stay in L1 while K passes */

/* Palette 1: all eight tiles are whole. */
static void tile_begin(void)
{
	struct {
		uint8_t palette, start, reserved[14];
		uint16_t columns[16];
		uint8_t rows[16];
	} config = {.palette = 1};
	uint32_t i;

	for (i = 0; i < 8; i++) {
		config.columns[i] = 64;
		config.rows[i] = 16;
	}
	_tile_loadconfig(&config);
}

/* The four tiles of results. */
static inline void amx_zero(void)
{
	_tile_zero(0);
	_tile_zero(1);
	_tile_zero(2);
	_tile_zero(3);
}

/* Results of one group, 64 values or 32: tiles one after the other. */
static inline void amx_begin_one(const uint8_t *o, bool first, bool four)
{
	amx_zero();
	if (first)
		return;
	_tile_loadd(0, o, 64);
	_tile_loadd(1, o + TILE, 64);
	if (four) {
		_tile_loadd(2, o + 2 * TILE, 64);
		_tile_loadd(3, o + 3 * TILE, 64);
	}
}

/* The shares p of 32 tokens, times their v. */
static inline void amx_add_one(const uint8_t *p, const uint8_t *v, bool four)
{
	_tile_loadd(4, p, 64);
	_tile_loadd(5, v, 64);
	_tile_loadd(6, v + TILE, 64);
	_tile_dpbf16ps(0, 4, 5);
	_tile_dpbf16ps(1, 4, 6);
	if (four) {
		_tile_loadd(5, v + 2 * TILE, 64);
		_tile_loadd(6, v + 3 * TILE, 64);
		_tile_dpbf16ps(2, 4, 5);
		_tile_dpbf16ps(3, 4, 6);
	}
}

static inline void amx_end_one(uint8_t *o, bool four)
{
	_tile_stored(0, o, 64);
	_tile_stored(1, o + TILE, 64);
	if (four) {
		_tile_stored(2, o + 2 * TILE, 64);
		_tile_stored(3, o + 3 * TILE, 64);
	}
}

/* Logits of 32 tokens and two groups: steps [from, to). */
static void amx_logits_two(const struct tile_block *block, const struct tile_rows *k,
			   const uint8_t *q, float *s, uint32_t from, uint32_t to)
{
	const uint8_t *q2 = q + (size_t)block->steps * TILE;
	float *s2 = s + TOKENS * 16;
	uint32_t i;

	if (from) {
		_tile_loadd(0, s, 64);
		_tile_loadd(1, s + 16 * 16, 64);
		_tile_loadd(2, s2, 64);
		_tile_loadd(3, s2 + 16 * 16, 64);
	} else {
		amx_zero();
	}
	for (i = from; i < to; i++) {
		uint32_t column = block->column[i];

		_tile_loadd(4, k[0].at + column, k[0].stride);
		_tile_loadd(6, q + (size_t)i * TILE, 64);
		_tile_loadd(5, k[1].at + column, k[1].stride);
		_tile_loadd(7, q2 + (size_t)i * TILE, 64);
		_tile_dpbf16ps(0, 4, 6);
		_tile_dpbf16ps(1, 5, 6);
		_tile_dpbf16ps(2, 4, 7);
		_tile_dpbf16ps(3, 5, 7);
	}
	_tile_stored(0, s, 64);
	_tile_stored(1, s + 16 * 16, 64);
	_tile_stored(2, s2, 64);
	_tile_stored(3, s2 + 16 * 16, 64);
}

/* Logits of 64 tokens and one group; of 32 when k[2] is none. */
static void amx_logits_one(const struct tile_block *block, const struct tile_rows *k,
			   bool four, const uint8_t *q, float *s)
{
	uint32_t i;

	amx_zero();
	for (i = 0; i < block->steps; i++, q += TILE) {
		uint32_t column = block->column[i];

		_tile_loadd(7, q, 64);
		_tile_loadd(4, k[0].at + column, k[0].stride);
		_tile_loadd(5, k[1].at + column, k[1].stride);
		_tile_dpbf16ps(0, 4, 7);
		_tile_dpbf16ps(1, 5, 7);
		if (four) {
			_tile_loadd(4, k[2].at + column, k[2].stride);
			_tile_loadd(5, k[3].at + column, k[3].stride);
			_tile_dpbf16ps(2, 4, 7);
			_tile_dpbf16ps(3, 5, 7);
		}
	}
	_tile_stored(0, s, 64);
	_tile_stored(1, s + 16 * 16, 64);
	if (four) {
		_tile_stored(2, s + 32 * 16, 64);
		_tile_stored(3, s + 48 * 16, 64);
	}
}

static void tile_logits(const struct tile_block *block, uint32_t g, uint32_t groups,
			uint32_t padded)
{
	const uint8_t *q = block->q + (size_t)g * block->steps * TILE;
	const struct tile_rows *k = block->tiles;
	uint32_t t, step, from, to;

	for (t = 0; groups == 1 && t < padded; t += step) {
		step = padded - t >= 64 ? 64 : 32;
		amx_logits_one(block, k + t / 16, step == 64, q, block->s + 16 * t);
	}
	for (from = 0; groups == 2 && from < block->steps; from = to) {
		to = block->steps - from > STEPS ? from + STEPS : block->steps;
		for (t = 0; t < padded; t += 32)
			amx_logits_two(block, k + t / 16, q, block->s + 16 * t, from, to);
	}
}

/* o of two groups and 32 values; tile i of v lies `apart` bytes on. */
static void amx_outputs_two(const struct tile_block *block, uint8_t *o, const uint8_t *v,
			    uint32_t padded)
{
	uint8_t *o2 = o + (size_t)block->outs * TILE;
	size_t apart = (size_t)block->outs * TILE;
	const uint8_t *p = block->p;
	uint32_t t;

	if (block->first) {
		amx_zero();
	} else {
		_tile_loadd(0, o, 64);
		_tile_loadd(1, o + TILE, 64);
		_tile_loadd(2, o2, 64);
		_tile_loadd(3, o2 + TILE, 64);
	}
	for (t = 0; t < padded; t += 32, p += TILE, v += apart) {
		_tile_loadd(4, p, 64);
		_tile_loadd(6, v, 64);
		_tile_loadd(7, v + TILE, 64);
		_tile_loadd(5, p + TOKENS / 32 * TILE, 64);
		_tile_dpbf16ps(0, 4, 6);
		_tile_dpbf16ps(1, 4, 7);
		_tile_dpbf16ps(2, 5, 6);
		_tile_dpbf16ps(3, 5, 7);
	}
	_tile_stored(0, o, 64);
	_tile_stored(1, o + TILE, 64);
	_tile_stored(2, o2, 64);
	_tile_stored(3, o2 + TILE, 64);
}

/* 32 tokens' V, 64 values or 32. */
static inline void amx_pack_some(uint8_t *to, const struct attend_batch *batch,
				 uint32_t token, uint32_t at, bool four)
{
	uint32_t i;

	for (i = 0; i < 32; i += 2, to += 64) {
		tile_pack_pair(to, batch, token + i, at);
		if (four)
			tile_pack_pair(to + 2 * TILE, batch, token + i, at + 32);
	}
}

/* o of a single group, 64 values from `at` on, or 32. V is packed as it is used, one
 * piece ahead: packing all of it would write it to L2 and back for one use. */
static void amx_outputs_alone(const struct tile_block *block,
			      const struct attend_batch *batch, uint32_t at, bool four,
			      uint32_t padded)
{
	uint8_t *o = block->o + (size_t)at / 16 * TILE, *v = block->v,
		*ahead = v + 4 * TILE;
	const uint8_t *p = block->p;
	uint32_t t;

	amx_begin_one(o, block->first, four);
	amx_pack_some(v, batch, 0, at, four);
	for (t = 0; t < padded; t += 32, p += TILE) {
		uint8_t *now = v;

		if (t + 32 < padded)
			amx_pack_some(ahead, batch, t + 32, at, four);
		amx_add_one(p, now, four);
		v = ahead;
		ahead = now;
	}
	amx_end_one(o, four);
}

/* o of one group and 64 values, or 32. */
static void amx_outputs_one(const struct tile_block *block, uint8_t *o, const uint8_t *v,
			    bool four, uint32_t padded)
{
	size_t apart = (size_t)block->outs * TILE;
	const uint8_t *p = block->p;
	uint32_t t;

	amx_begin_one(o, block->first, four);
	for (t = 0; t < padded; t += 32, p += TILE, v += apart)
		amx_add_one(p, v, four);
	amx_end_one(o, four);
}

static void tile_outputs(const struct tile_block *block, uint32_t g, uint32_t groups,
			 const struct attend_batch *batch, uint32_t padded)
{
	uint8_t *o = block->o + (size_t)g * block->outs * TILE;
	uint32_t i, step;

	for (i = 0; i < block->outs; i += step) {
		step = groups == 1 && block->outs - i >= 4 ? 4 : 2;
		if (block->groups == 1)
			amx_outputs_alone(block, batch, 16 * i, step == 4, padded);
		else if (groups == 2)
			amx_outputs_two(block, o + i * TILE, block->v + i * TILE, padded);
		else
			amx_outputs_one(block, o + i * TILE, block->v + i * TILE,
					step == 4, padded);
	}
}

static void tile_values(struct tile_block *block, const struct attend_batch *batch,
			uint32_t padded)
{
	if (block->groups > 1)
		tile_pack_v(block, batch, padded);
}

static void tile_finish(void)
{
	_tile_release(); /* else each switch of threads saves 8 KiB more */
}

static const struct attend_kernel kernel = TILE_TABLE("amx");
const struct attend_kernel *const attend_amx = &kernel;

/* CPUID.7.0: EDX bit 22 is AMX-BF16, bit 24 AMX-TILE; CPUID.7.1: EAX bit 5 AVX512_BF16.
 */
bool attend_amx_ready(void)
{
	uint32_t a, b, c, d;

	if (!__builtin_cpu_supports("avx512bf16"))
		return false;
	__asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
	if ((d & 1u << 22) == 0 || (d & 1u << 24) == 0)
		return false;
	return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#else
const struct attend_kernel *const attend_amx = NULL;

bool attend_amx_ready(void)
{
	return false;
}
#endif
