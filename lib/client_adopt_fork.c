/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Adopted memory in a child of fork().
 *
 * What was moved behind a memfd is a shared mapping: a child that had it would write
 * into its parent's memory, and give it to a peer. So the kernel leaves it out of the
 * child (MADV_DONTFORK). But the child still has every pointer into it: an allocator
 * reads the words in front of a chunk that it frees, and a child that only ends frees
 * much. So the child gets a mapping of its own in the same place: private, of the same
 * file. What it writes is its own; what it has not written shows what its parent writes,
 * which is all that may be expected by code that uses memory after fork() that the parent
 * goes on with. (Rejected: a copy, gigabytes in a moment; nothing, and the child dies.)
 *
 * The ranges are noted before the fork, because the registry is not in the child
 * either, and its lock is not held over the fork: what is adopted in between is not in
 * the child. An exec() needs nothing of it; vfork() and posix_spawn() do not call this.
 */
#include "lib/client_adopt.h"

#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/mem.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/* Of this thread's fork: others that fork at the same time have their own. */
static _Thread_local struct adopt_range *noted;
static _Thread_local uint32_t noted_count;

static void before(void)
{
	noted = adopt_registry_note(&noted_count);
}

static void forget(void)
{
	mem_free(noted);
	noted = NULL;
	noted_count = 0;
}

static void in_child(void)
{
	for (uint32_t i = 0; i < noted_count; i++) {
		const struct adopt_range *r = &noted[i];
		void *wanted = (void *)(uintptr_t)r->begin, *at;

		/* where another handler put something, that stays */
		at = mmap(wanted, r->done, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED_NOREPLACE, r->fd,
			  (off_t)r->file_begin);
		if (at != MAP_FAILED && at != wanted) /* a kernel before 4.17 */
			munmap(at, r->done);
	}
	forget();
}

static void watch_forks(void)
{
	(void)pthread_atfork(before, forget, in_child);
}

void adopt_fork_watch(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, watch_forks);
}
