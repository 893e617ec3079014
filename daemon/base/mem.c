/* SPDX-License-Identifier: Apache-2.0 */
/*
 * malloc, with three additions.
 *
 * Failures to order: the n-th allocation of a thread fails, so a test can walk through
 * every one of an operation. Counts are a thread's own: helpers do not disturb them.
 *
 * Memory that costs nothing until it is used (mem_map): a table with 131 072 entries of
 * which a session uses ten. calloc() of half a megabyte clears it, and each of its pages
 * is a fault.
 *
 * Freeing elsewhere. Memory that glibc returns to the kernel (blocks that it had mapped,
 * the top of a heap) takes 50 ns a KiB and more; the loop's thread names a helper for
 * that. It is a thread's choice, not a block's: the same list may end on a helper, which
 * then frees it itself.
 */
#include "daemon/base/mem.h"

#include <limits.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/err.h"

#define GROWS_BYTES (64u << 10) /* not doubled any more, but mapped */
#define MAP_BYTES (1u << 20)
#define SETTLE_BYTES 2048u
#define TOP_PAD (256 << 10)
#define TRIM_BYTES (32 << 20) /* 10 000 rooms end below it */
#define KEPT_BYTES (512u << 10)
#define LOOKS_BYTES (128u << 10) /* free() looks at the heap's end from 64 KiB on */
#define RETURN_TRIES 256u

static const char *heap; /* starts here or above */
static bool tuned;

static _Thread_local uint64_t fail_at, fail_end;
static _Thread_local uint64_t counted;
static _Thread_local int64_t live;
static _Thread_local void (*large_take)(void *arg, void *owned);
static _Thread_local void *large_arg;

static bool must_fail(void)
{
	counted++;
	return counted >= fail_at && counted < fail_end;
}

static void *or_raise(void *p, size_t size)
{
	if (!p)
		err_raise(ERR_NOMEM, "no memory for %zu bytes", size);
	else
		live++;
	return p;
}

void *mem_calloc(size_t count, size_t size)
{
	if (must_fail())
		return or_raise(NULL, count * size);
	return or_raise(calloc(count ? count : 1, size ? size : 1), count * size);
}

void *mem_alloc(size_t size)
{
	return or_raise(must_fail() ? NULL : malloc(size ? size : 1), size);
}

void *mem_zalloc(size_t size)
{
	return mem_calloc(1, size);
}

size_t mem_grown(size_t bytes)
{
	return bytes < GROWS_BYTES || bytes >= MAP_BYTES ? 2 * bytes : MAP_BYTES;
}

void *mem_zalloc_quiet(size_t size)
{
	struct err kept;
	void *p;

	err_take(&kept);
	p = mem_zalloc(size);
	if (kept.code != ERR_OK)
		(void)err_reraise(&kept);
	else
		err_clear();
	return p;
}

void *mem_regrow(void *old, size_t count, size_t size)
{
	bool grown = old != NULL;

	if (must_fail())
		return or_raise(NULL, count * size);
	old = or_raise(reallocarray(old, count ? count : 1, size ? size : 1),
		       count * size);
	live -= grown && old; /* it was counted when it was small */
	return old;
}

void *mem_dup(const void *p, size_t len)
{
	void *copy = must_fail() ? NULL : malloc(len ? len : 1);

	if (copy && len)
		memcpy(copy, p, len);
	return or_raise(copy, len);
}

bool mem_equal(const void *a, const void *b, size_t len)
{
	const uint8_t *x = a, *y = b;
	uint8_t differ = 0;

	for (size_t i = 0; i < len; i++)
		differ |= x[i] ^ y[i];
	return differ == 0;
}

char *mem_strdup(const char *s)
{
	return mem_dup(s, strlen(s) + 1);
}

char *mem_printf(const char *fmt, ...)
{
	char *s = NULL;
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = must_fail() ? -1 : vasprintf(&s, fmt, ap);
	va_end(ap);
	return or_raise(n < 0 ? NULL : s, strlen(fmt));
}

void *mem_adopt(void *p)
{
	live += p != NULL;
	return p;
}

void mem_free(void *p)
{
	live -= p != NULL;
	free(p);
}

void *mem_map(size_t size)
{
	void *p = MAP_FAILED;

	if (!must_fail())
		p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			 -1, 0);
	return or_raise(p == MAP_FAILED ? NULL : p, size);
}

void mem_unmap(void *p, size_t size)
{
	if (!p)
		return;
	live--;
	munmap(p, size);
}

void mem_large_to(void (*take)(void *arg, void *owned), void *arg)
{
	large_take = take;
	large_arg = arg;
}

void mem_free_large(void *p, uint64_t size)
{
	if (p && large_take && size >= MEM_LARGE_BYTES)
		large_take(large_arg, p);
	else
		mem_free(p);
}

void mem_closep(int *fd)
{
	int owned_fd = mem_steal_fd(fd);

	if (owned_fd >= 0)
		close(owned_fd);
}

void mem_fail_at(uint64_t n)
{
	fail_at = n;
	fail_end = n ? n + 1 : 0;
	counted = 0;
}

void mem_fail_from(uint64_t n)
{
	fail_at = n;
	fail_end = UINT64_MAX;
	counted = 0;
}

int64_t mem_live(void)
{
	return live;
}

uint64_t mem_count(void)
{
	return counted;
}

void mem_tune(void)
{
	/* a room's page lists, messages of them: mapped each time, each page would cost
	 * the loop a fault, and again when freed */
	mallopt(M_MMAP_THRESHOLD, MAP_BYTES);
	/* one free() that joins megabytes at the end of the heap returns them all:
	 * mem_return() does that in steps. The limit is for the heaps of other threads,
	 * which it does not reach. */
	mallopt(M_TRIM_THRESHOLD, TRIM_BYTES);
	mallopt(M_TOP_PAD, TOP_PAD);
	heap = (const char *)sbrk(0) - MAP_BYTES;
	tuned = mallopt(M_MXFAST, 0) == 1; /* a sanitizer's malloc: no */
}

bool mem_return(void)
{
	const char *end = sbrk(0);
	size_t kept = (size_t)(end - heap), step = kept / RETURN_TRIES;
	void *volatile p;

	if (!tuned)
		return false;
	if (step < MEM_RETURN_BYTES)
		step = MEM_RETURN_BYTES;
	/* glibc does not tell how much is free there: from the whole heap downwards, the
	 * first padding that makes a free() return something is at most a step too large
	 */
	p = malloc(LOOKS_BYTES);
	while (kept > KEPT_BYTES + step && sbrk(0) == end) {
		kept -= step;
		mallopt(M_TOP_PAD, kept < INT_MAX ? (int)kept : INT_MAX);
		mallopt(M_TRIM_THRESHOLD, 0);
		free(p);
		mallopt(M_TRIM_THRESHOLD, TRIM_BYTES);
		p = malloc(LOOKS_BYTES); /* the same: the heap does not grow */
	}
	mallopt(M_TOP_PAD, TOP_PAD);
	free(p);
	return (const char *)sbrk(0) < end;
}

void mem_settle(void)
{
	/* no freed block ends the search early: that of the last turn has another size,
	 * and all are larger than those that a thread keeps for itself */
	static _Thread_local unsigned int turn;
	void *volatile p = malloc(SETTLE_BYTES + 16 * (turn++ % 64));

	free(p);
}
