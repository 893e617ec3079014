/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mem: heap memory, and the cleanup attributes of owning locals.
 *
 * Every allocation of kvd is made here so that tests can make the n-th one fail. A failed
 * allocation raises ERR_NOMEM and returns NULL: it costs an op or a room, never the
 * daemon.
 */
#ifndef KVD_BASE_MEM_H
#define KVD_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Zeroed. count * size is overflow-checked; a count of 0 gives a valid pointer. */
void *mem_alloc(size_t size); /* not zeroed: for bytes that are written, then read */
void *mem_zalloc(size_t size);
/* The next size of memory that grows by doubling: from some size on it has a map of its
 * own (mem_tune()), which grows without a copy. */
size_t mem_grown(size_t bytes);
void *mem_zalloc_quiet(size_t size); /* leaves the error record as it is */
void *mem_calloc(size_t count, size_t size);
/* Like reallocarray; on failure the old block stays. New bytes are not zeroed. */
void *mem_regrow(void *old, size_t count, size_t size);
char *mem_strdup(const char *s);
void *mem_dup(const void *p, size_t len);
/* Of secrets and tokens: takes the same time wherever they differ. */
bool mem_equal(const void *a, const void *b, size_t len);
char *mem_printf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void mem_free(void *p);
/* A library's block, from malloc(): it is counted like kvd's own from now on. */
void *mem_adopt(void *p);

/* Zeroed; pages are allocated when touched: for tables with few used entries. Freed with
 * the same size. */
void *mem_map(size_t size);
void mem_unmap(void *p, size_t size); /* NULL is allowed */

/* Returning megabytes to the kernel takes milliseconds. For this thread: mem_free_large()
 * passes blocks from MEM_LARGE_BYTES on to `take` (which frees them elsewhere); NULL: are
 * freed at once, as on every other thread. */
#define MEM_LARGE_BYTES (UINT64_C(256) << 10)
void mem_large_to(void (*take)(void *arg, void *owned), void *arg);
void mem_free_large(void *p, uint64_t size); /* size: about; NULL is allowed */

/* Tests: the n-th allocation from now on fails (1 = the next one), once;
 * 0 switches it off. Counts in the calling thread only. */
void mem_fail_at(uint64_t n);
/* The same, but from the n-th on all fail, until mem_fail_at(0). */
void mem_fail_from(uint64_t n);
/* Tests: allocations of this thread since the last mem_fail_at() or _from(). */
uint64_t mem_count(void);
/* Tests: blocks allocated minus blocks freed by this thread. */
int64_t mem_live(void);

#define mem_cleanup(fn) __attribute__((cleanup(fn)))

static inline void mem_freep(void *pp)
{
	mem_free(*(void **)pp);
}
void mem_closep(int *fd); /* closes an fd >= 0, and sets it -1 */
#define cleanup_free mem_cleanup(mem_freep)
#define cleanup_close mem_cleanup(mem_closep)

/* Move ownership out of a cleanup variable. */
#define mem_steal(p)                      \
	({                                \
		__auto_type steal_ = (p); \
		(p) = NULL;               \
		steal_;                   \
	})
static inline int mem_steal_fd(int *fd)
{
	int r = *fd;

	*fd = -1;
	return r;
}

#define ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define container_of(ptr, type, member) \
	((type *)(void *)((char *)(ptr)-offsetof(type, member)))

/*
 * For the daemon, once. By default glibc adapts to frees: its thresholds rise to 32 MiB,
 * then large buffers grow by copying and one free() gives megabytes back to the kernel;
 * and the next free() may merge thousands of small freed blocks. Each of these blocks the
 * loop for milliseconds. From here on free() returns memory of a heap only if more than
 * 32 MiB are free at its end.
 */
void mem_tune(void);
/* After mem_tune(), by the main thread (glibc's heap is its own): return at most
 * MEM_RETURN_BYTES of the free memory at the heap's end. True: it did; there may be more.
 */
#define MEM_RETURN_BYTES (128u << 10) /* more, if that is below a 256th of the heap */
bool mem_return(void);
/*
 * For the loop, in each turn. A freed block is sorted by a later malloc(), which sorts up
 * to 10 000 at once: after the end of many rooms one of a few bytes takes a millisecond.
 * This one has only those of a turn to sort.
 */
void mem_settle(void);

#endif
