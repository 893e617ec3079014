/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/rows.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)
#define SWEEP_BYTES_MAX (512 * MIB)

static void *need(void *p)
{
	if (!p || p == MAP_FAILED) {
		fprintf(stderr, "bench: out of memory\n");
		exit(1);
	}
	return p;
}

static void shuffle(uint64_t *v, uint64_t n, uint64_t seed)
{
	for (uint64_t i = n - 1; i > 0; i--) {
		uint64_t j, t;

		seed ^= seed << 13;
		seed ^= seed >> 7;
		seed ^= seed << 17;
		j = seed % (i + 1);
		t = v[i];
		v[i] = v[j];
		v[j] = t;
	}
}

void rows_make(struct rows *rows, uint64_t bytes, uint64_t total, enum rows_places how)
{
	uint64_t places =
		how == ROWS_SCATTERED ? ROWS_REGION_BYTES / bytes : total / bytes;

	rows->bytes = bytes;
	rows->count = total / bytes;
	rows->from = need(calloc(places, sizeof(uint64_t)));
	rows->to = need(calloc(places, sizeof(uint64_t)));
	for (uint64_t i = 0; i < places; i++)
		rows->from[i] = rows->to[i] = i * bytes;
	if (how == ROWS_SCATTERED)
		shuffle(rows->from, places, 88172645463325252);
	if (how != ROWS_FLAT)
		shuffle(rows->to, places, 11400714819323198485u);
}

void rows_free(struct rows *rows)
{
	free(rows->from);
	free(rows->to);
	*rows = (struct rows){0};
}

void caches_sweep(void)
{
	static uint8_t *sweep;
	static size_t bytes;

	if (!sweep) {
		long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);

		bytes = l3 > 0 ? 2 * (size_t)l3 : 64 * MIB;
		if (bytes > SWEEP_BYTES_MAX)
			bytes = SWEEP_BYTES_MAX;
		sweep = need(mmap(NULL, bytes, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
	}
	for (size_t i = 0; i < bytes; i += 64)
		sweep[i]++;
}
