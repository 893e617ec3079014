/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MADV_COLLAPSE starts with a visit to each core (lru_add_drain_all(), under one lock of
 * the whole machine), even if there is nothing to do. Where each core has other work that
 * takes seconds, in which a room would wait for the key of its peer's pool. So a separate
 * thread does it, and the caller waits only briefly: long enough that a mapping usually
 * has its huge pages before an adapter pins it.
 */
#include "daemon/memory/settle.h"

#include <assert.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/cpu.h"
#include "daemon/base/err.h"
#include "daemon/base/thread.h"

/* Debian 12's libc headers are older than supported kernels. */
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define RANGES_MAX 256u /* more are left as they are */
#define PIECE_BYTES ((size_t)64 << 20)
#define WAIT_NS UINT64_C(300000000)
#define WAIT_NS_PER_BYTE 2u /* 2 s a GiB; twice the usual time */

static struct {
	pthread_mutex_t lock;
	pthread_cond_t more, done;
	struct {
		void *first;
		size_t bytes;
	} ranges[RANGES_MAX];
	uint64_t given, taken; /* how many, in all */
	void (*collapse)(void *first, size_t bytes);
	bool running, hurry;
} all = {.lock = PTHREAD_MUTEX_INITIALIZER,
	 .more = PTHREAD_COND_INITIALIZER,
	 .done = PTHREAD_COND_INITIALIZER};

static void *settle_main(void *arg)
{
	cpu_bulk();
	pthread_mutex_lock(&all.lock);
	for (;;) {
		void (*collapse)(void *, size_t) = all.collapse;
		void *first = all.ranges[all.taken % RANGES_MAX].first;
		size_t bytes = all.ranges[all.taken % RANGES_MAX].bytes;
		bool hurry = all.hurry;

		if (all.taken == all.given) {
			pthread_cond_wait(&all.more, &all.lock);
			continue;
		}
		pthread_mutex_unlock(&all.lock);
		if (collapse && !hurry)
			collapse(first, bytes);
		else if (!hurry)
			(void)madvise(first, bytes, MADV_COLLAPSE);
		pthread_mutex_lock(&all.lock);
		all.taken++;
		pthread_cond_broadcast(&all.done);
	}
	return arg;
}

/* It lives as long as the process. */
static bool settle_start(void)
{
	pthread_t tid;

	if (thread_start("kvd-settle", settle_main, NULL, &tid) < 0) {
		err_clear(); /* slower, no fault */
		return false;
	}
	pthread_detach(tid);
	return true;
}

/* False: callers must not wait any more. */
static bool settle_piece(void *first, size_t bytes)
{
	const struct timespec until = clock_after(WAIT_NS + bytes * WAIT_NS_PER_BYTE);
	uint64_t mine;
	bool hurry;
	int no = 0;

	assert(bytes > 0);
	pthread_mutex_lock(&all.lock);
	if (!all.running)
		all.running = settle_start();
	if (!all.hurry && all.running && all.given - all.taken < RANGES_MAX) {
		all.ranges[all.given % RANGES_MAX].first = first;
		all.ranges[all.given % RANGES_MAX].bytes = bytes;
		mine = ++all.given;
		pthread_cond_signal(&all.more);
		while (all.taken < mine && no == 0 && !all.hurry)
			no = pthread_cond_clockwait(&all.done, &all.lock, CLOCK_MONOTONIC,
						    &until);
	}
	hurry = all.hurry;
	pthread_mutex_unlock(&all.lock);
	return !hurry;
}

/* In pieces, between which those of others have their turn. */
void settle(void *first, size_t bytes)
{
	size_t piece;

	for (size_t at = 0; at < bytes; at += piece) {
		piece = bytes - at < PIECE_BYTES ? bytes - at : PIECE_BYTES;
		if (!settle_piece((char *)first + at, piece))
			break;
	}
}

void settle_hurry(bool hurry)
{
	pthread_mutex_lock(&all.lock);
	all.hurry = hurry; /* pending ranges are left unchanged */
	pthread_cond_broadcast(&all.done);
	pthread_mutex_unlock(&all.lock);
}

void settle_with(void (*collapse)(void *first, size_t bytes))
{
	pthread_mutex_lock(&all.lock);
	all.collapse = collapse;
	pthread_mutex_unlock(&all.lock);
}
