/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/mem.h"

#include <malloc.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/err.h"

static _Thread_local uint64_t fail_at, fail_end;
static _Thread_local uint64_t counted;
static _Thread_local int64_t live;

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

void mem_free(void *p)
{
	live -= p != NULL;
	free(p);
}

void mem_closep(int *fd)
{
	if (*fd >= 0)
		close(*fd);
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
	/* a room's page lists, messages of them: mapped afresh, each page of each would
	 * cost the loop a fault, and again when it goes */
	mallopt(M_MMAP_THRESHOLD, 1 << 20);
	mallopt(M_TRIM_THRESHOLD, 2 << 20);
	mallopt(M_MXFAST, 0);
}
