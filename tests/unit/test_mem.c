/* SPDX-License-Identifier: Apache-2.0 */
/* Allocations, their injected failures, the cleanup attributes. */
#include "daemon/base/mem.h"

#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/clock.h"
#include "daemon/base/err.h"

static void calloc_is_zeroed_and_overflow_is_refused(void **state)
{
	volatile size_t half = SIZE_MAX / 2; /* hidden from the compiler's own check */
	uint64_t *p = mem_calloc(100, sizeof(*p));

	(void)state;
	assert_non_null(p);
	for (int i = 0; i < 100; i++)
		assert_int_equal(p[i], 0);
	mem_free(p);
	assert_null(mem_calloc(half, 3));
	assert_int_equal(err_last()->code, ERR_NOMEM);
	assert_null(mem_regrow(NULL, half, 3));
	p = mem_calloc(0, 8);
	assert_non_null(p);
	mem_free(p);
	mem_free(NULL);
}

static void regrow_failed_keeps_the_old_block(void **state)
{
	char *p = mem_strdup("kept"), *q;

	(void)state;
	mem_fail_at(1);
	assert_null(mem_regrow(p, 4096, 1));
	assert_string_equal(p, "kept");
	q = mem_regrow(p, 4096, 1);
	assert_non_null(q);
	assert_string_equal(q, "kept");
	mem_free(q);
}

static void failures_from_some_point_on_last_until_switched_off(void **state)
{
	(void)state;
	mem_fail_from(2);
	mem_free(mem_zalloc(1));
	assert_null(mem_zalloc(1));
	assert_null(mem_strdup("x"));
	assert_int_equal(mem_count(), 3);
	mem_fail_at(0);
	mem_free(mem_zalloc(1));
}

static void blocks_are_counted_once_however_they_grow(void **state)
{
	int64_t before = mem_live();
	char *a = mem_zalloc(8), *b = NULL, *c;

	(void)state;
	b = mem_regrow(b, 1, 8);
	b = mem_regrow(b, 100, 8);
	mem_fail_at(1);
	assert_null(mem_regrow(b, 200, 8));
	mem_fail_at(0);
	c = mem_printf("%d", 7);
	assert_int_equal(mem_live() - before, 3);
	mem_free(a);
	mem_free(b);
	mem_free(c);
	mem_free(NULL);
	assert_int_equal(mem_live(), before);
}

static void copies_are_exact(void **state)
{
	const char bytes[] = {1, 0, 2, 0};
	cleanup_free char *dup = mem_dup(bytes, sizeof(bytes));
	cleanup_free char *text = mem_printf("%s-%d", "room", 7);
	cleanup_free char *none = mem_dup(NULL, 0);

	(void)state;
	assert_memory_equal(dup, bytes, sizeof(bytes));
	assert_string_equal(text, "room-7");
	assert_non_null(none);
}

/* The n-th of a row fails, once, whatever kind it is. */
static void fail_at_hits_the_nth_of_every_kind(void **state)
{
	(void)state;
	for (uint64_t n = 1; n <= 6; n++) {
		void *p[6];

		mem_fail_at(n);
		p[0] = mem_zalloc(1);
		p[1] = mem_calloc(2, 2);
		p[2] = mem_regrow(NULL, 2, 2);
		p[3] = mem_strdup("x");
		p[4] = mem_dup("x", 1);
		p[5] = mem_printf("%d", 1);
		assert_int_equal(mem_count(), 6);
		for (uint64_t i = 0; i < 6; i++) {
			assert_int_equal(p[i] == NULL, i + 1 == n);
			mem_free(p[i]);
		}
		assert_int_equal(err_last()->code, ERR_NOMEM);
		err_clear();
	}
	mem_fail_at(0);
}

static void *other_thread(void *arg)
{
	void *p = mem_zalloc(1);

	*(int *)arg = p != NULL;
	mem_free(p);
	return NULL;
}

static void fail_at_concerns_one_thread(void **state)
{
	pthread_t tid;
	int worked = 0;

	(void)state;
	mem_fail_at(1);
	assert_int_equal(pthread_create(&tid, NULL, other_thread, &worked), 0);
	pthread_join(tid, NULL);
	assert_true(worked);
	assert_null(mem_zalloc(1));
	mem_fail_at(0);
}

static int scoped_open(int keep)
{
	cleanup_close int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

	assert_true(fd >= 0);
	return keep ? mem_steal_fd(&fd) : fd;
}

/* A second close would be of whoever has that number by then. */
static void close_clears_the_number(void **state)
{
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC), other;

	(void)state;
	assert_true(fd >= 0);
	mem_closep(&fd);
	assert_int_equal(fd, -1);
	other = open("/dev/null", O_RDONLY | O_CLOEXEC);
	mem_closep(&fd);
	assert_true(fcntl(other, F_GETFD) >= 0);
	mem_closep(&other);
}

static void cleanup_closes_unless_stolen(void **state)
{
	char *p = mem_strdup("x"), *q;
	int fd = scoped_open(0);

	(void)state;
	assert_int_equal(fcntl(fd, F_GETFD), -1);
	fd = scoped_open(1);
	assert_true(fcntl(fd, F_GETFD) >= 0);
	close(fd);
	q = mem_steal(p);
	assert_null(p);
	assert_string_equal(q, "x");
	mem_free(q);
}

static void block_adopted_is_counted_and_freed_as_others(void **state)
{
	int64_t live = mem_live();
	void *p = mem_adopt(malloc(10));

	(void)state;
	assert_null(mem_adopt(NULL));
	assert_int_equal(mem_live(), live + 1);
	mem_free(p);
	assert_int_equal(mem_live(), live);
}

static void map_is_zeroed_and_counted_as_a_block(void **state)
{
	const size_t size = 3 << 20;
	int64_t live = mem_live();
	uint8_t *p = mem_map(size);

	(void)state;
	assert_non_null(p);
	assert_int_equal(p[0] | p[size / 2] | p[size - 1], 0);
	p[size - 1] = 1;
	assert_int_equal(mem_live(), live + 1);
	mem_unmap(p, size);
	assert_int_equal(mem_live(), live);
	mem_fail_at(1);
	assert_null(mem_map(size));
	mem_fail_at(0);
	mem_unmap(NULL, size);
}

static void keep_first(void *arg, void *owned)
{
	void **kept = arg;

	assert_null(*kept);
	*kept = owned;
}

static void *free_elsewhere(void *arg)
{
	mem_free_large(arg, MEM_LARGE_BYTES); /* this thread has named nobody */
	return NULL;
}

static void block_large_is_handed_over_by_its_thread(void **state)
{
	void *small = mem_alloc(MEM_LARGE_BYTES - 1), *large = mem_alloc(MEM_LARGE_BYTES);
	void *other = mem_alloc(MEM_LARGE_BYTES), *kept = NULL;
	pthread_t thread;

	(void)state;
	mem_large_to(keep_first, &kept);
	mem_free_large(NULL, MEM_LARGE_BYTES);
	mem_free_large(small, MEM_LARGE_BYTES - 1);
	assert_null(kept);
	assert_int_equal(pthread_create(&thread, NULL, free_elsewhere, other), 0);
	pthread_join(thread, NULL);
	assert_null(kept);
	mem_free_large(large, MEM_LARGE_BYTES);
	assert_ptr_equal(kept, large);
	mem_large_to(NULL, NULL);
	mem_free_large(mem_steal(kept), MEM_LARGE_BYTES); /* at once again */
	assert_null(kept);
}

/* CPU time of the first malloc() after 20 000 blocks were freed. */
static uint64_t first_alloc_ns(bool settles)
{
	enum { BLOCKS = 40000 };
	void **blocks = calloc(BLOCKS, sizeof(*blocks));
	void *p, *guard;
	uint64_t ns;

	for (unsigned int i = 0; i < BLOCKS; i++)
		blocks[i] = mem_alloc(40 + i * 37 % 29 * 48);
	p = mem_alloc(2048); /* leaves a hole that fits exactly, once */
	guard = mem_alloc(64);
	mem_free(p);
	for (unsigned int i = 0; i < BLOCKS; i += 2) {
		mem_free(blocks[i]);
		if (settles && i % 128 == 0)
			mem_settle();
	}
	ns = clock_of(CLOCK_THREAD_CPUTIME_ID);
	p = mem_alloc(300);
	ns = clock_of(CLOCK_THREAD_CPUTIME_ID) - ns;
	mem_free(p);
	mem_free(guard);
	for (unsigned int i = 1; i < BLOCKS; i += 2)
		mem_free(blocks[i]);
	free(blocks);
	return ns;
}

static void blocks_freed_do_not_slow_a_later_alloc(void **state)
{
	uint64_t least = UINT64_MAX;

	(void)state;
	mem_tune();
	if (first_alloc_ns(false) < 200000)
		skip(); /* an allocator that sorts nothing: a sanitizer's */
	for (int tries = 0; tries < 3; tries++) {
		uint64_t ns = first_alloc_ns(true);

		least = ns < least ? ns : least;
	}
	if (least > 50000)
		fail_msg("%ju us", (uintmax_t)least / 1000);
}

static void free_end_of_the_heap_is_returned_in_steps(void **state)
{
	enum { BLOCKS = 20000, BYTES = 1000 };
	void **blocks = calloc(BLOCKS, sizeof(*blocks));
	const char *begin, *end;
	void *pin;

	(void)state;
	mem_tune();
	if (!mallopt(M_MXFAST, 0))
		skip();	     /* a sanitizer's allocator */
	while (mem_return()) /* at most the free end */
		;
	begin = sbrk(0);
	for (unsigned int i = 0; i < BLOCKS; i++)
		blocks[i] = mem_alloc(BYTES);
	pin = mem_alloc(BYTES); /* joins all below it with the end when it is freed */
	for (unsigned int i = 0; i < BLOCKS; i++)
		mem_free(blocks[i]);
	end = sbrk(0);
	assert_true(end - begin > BLOCKS * BYTES - (1 << 20));
	mem_free(pin);
	assert_ptr_equal(sbrk(0), end);
	while (mem_return()) { /* at most the free end */
		assert_in_range(end - (const char *)sbrk(0), 1, MEM_RETURN_BYTES);
		end = sbrk(0);
	}
	for (unsigned int i = 0; i < 10; i++) {
		assert_false(mem_return());
		assert_ptr_equal(sbrk(0), end);
	}
	assert_true(end - begin < 1 << 20);
	free(blocks);
}

static void *use_much(void *arg)
{
	enum { BLOCKS = 15000, BYTES = 3000 };
	void **blocks = arg;

	for (unsigned int i = 0; i < BLOCKS; i++)
		blocks[i] = memset(malloc(BYTES), 1, BYTES);
	for (unsigned int i = 0; i < BLOCKS; i++)
		free(blocks[i]);
	return NULL;
}

static long resident_pages(void)
{
	FILE *f = fopen("/proc/self/statm", "r");
	long size, resident = -1;

	assert_non_null(f);
	assert_int_equal(fscanf(f, "%ld %ld", &size, &resident), 2);
	fclose(f);
	return resident;
}

/* mem_return() does not reach the heap of another thread. */
static void free_end_of_a_helpers_heap_is_returned(void **state)
{
	void **blocks = calloc(15000, sizeof(*blocks));
	pthread_t thread;
	long before;

	(void)state;
	mem_tune();
	if (!mallopt(M_MXFAST, 0))
		skip(); /* a sanitizer's allocator */
	before = resident_pages();
	assert_int_equal(pthread_create(&thread, NULL, use_much, blocks), 0);
	pthread_join(thread, NULL);
	assert_true(resident_pages() - before < 34 << 8);
	free(blocks);
}

static void secrets_are_equal_or_not(void **state)
{
	uint8_t a[16], b[16];

	(void)state;
	memset(a, 0xa5, sizeof(a));
	memcpy(b, a, sizeof(b));
	assert_true(mem_equal(a, b, sizeof(a)));
	assert_true(mem_equal(a, b + 1, 0));
	for (size_t i = 0; i < 8 * sizeof(b); i++) {
		b[i / 8] ^= (uint8_t)(1u << i % 8);
		assert_false(mem_equal(a, b, sizeof(a)));
		b[i / 8] ^= (uint8_t)(1u << i % 8);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		/* first: its heap has no holes yet */
		cmocka_unit_test(free_end_of_the_heap_is_returned_in_steps),
		cmocka_unit_test(calloc_is_zeroed_and_overflow_is_refused),
		cmocka_unit_test(regrow_failed_keeps_the_old_block),
		cmocka_unit_test(failures_from_some_point_on_last_until_switched_off),
		cmocka_unit_test(blocks_are_counted_once_however_they_grow),
		cmocka_unit_test(copies_are_exact),
		cmocka_unit_test(fail_at_hits_the_nth_of_every_kind),
		cmocka_unit_test(fail_at_concerns_one_thread),
		cmocka_unit_test(blocks_freed_do_not_slow_a_later_alloc),
		cmocka_unit_test(free_end_of_a_helpers_heap_is_returned),
		cmocka_unit_test(secrets_are_equal_or_not),
		cmocka_unit_test(close_clears_the_number),
		cmocka_unit_test(cleanup_closes_unless_stolen),
		cmocka_unit_test(block_adopted_is_counted_and_freed_as_others),
		cmocka_unit_test(map_is_zeroed_and_counted_as_a_block),
		cmocka_unit_test(block_large_is_handed_over_by_its_thread),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
