/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Adopted memory in a child of fork(). Memory moved behind a memfd is a shared mapping: a
 * child with it would write to its parent's memory, which a peer might read. So the
 * kernel leaves it out of the child (MADV_DONTFORK). The child still has every pointer
 * into it, however: an allocator reads the header of a chunk that it frees, and even a
 * child that only exits frees memory.
 *
 * So the child gets its own mapping at the same address: private, of the same file. Its
 * writes are its own; unwritten pages show what its parent writes, as code that shares
 * memory with its parent after fork() must expect. (Rejected: a copy, gigabytes at once;
 * no mapping, because the child crashes.)
 *
 * The ranges are recorded before the fork, because the registry is not in the child
 * either, and its lock is not held over the fork: ranges adopted in between are not in
 * the child. exec() needs none of this; vfork() and posix_spawn() do not call it.
 */
#include "lib/client_adopt.h"

#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/mem.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

/* For this thread's fork: concurrent forks of other threads have their own. */
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

		/* if another handler mapped something there, it stays */
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
