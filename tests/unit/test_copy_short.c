/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs that the loop's own thread copies: which, when, and what their owner sees; and
 * copiers that are not made. */
#include "daemon/memory/copy.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/loop/loop.h"
#include "tests/lib/file.h"

#define PAGE_BYTES (UINT64_C(64) << 10)
#define ROW_BYTES 256u
#define LARGE_BYTES (UINT64_C(64) << 20)
#define WAIT_NS (20 * LOOP_NS_PER_S)

struct short_job {
	struct copy_job job;
	struct copy_buffer src, dst;
	struct plan *plan;
	unsigned int calls;
};

struct test {
	struct loop *loop;
	struct copier *copier; /* one thread */
	struct memory *memory; /* a page of 5, and two pages to write to */
	struct short_job a, b, large;
};

static void on_done(struct copy_job *job)
{
	container_of(job, struct short_job, job)->calls++;
}

/* A page in rows, to the nth page of the memory. */
static void job_set(struct test *t, struct short_job *it, uint64_t row, unsigned int n)
{
	struct plan_builder *builder = NULL;
	uint64_t count = PAGE_BYTES / row;

	assert_int_equal(plan_builder_new(&builder), 0);
	for (uint64_t i = 0; i < count; i++) {
		/* two by two the wrong way round: they are no longer rows */
		struct plan_run one = {.len = row,
				       .count = 1,
				       .src = (i ^ (count > 1)) * row,
				       .dst = i * row};

		assert_int_equal(plan_builder_add(builder, &one), 0);
	}
	assert_int_equal(plan_builder_finish(builder, &it->plan), 0);
	plan_builder_free(builder);
	it->src = (struct copy_buffer){.memory = t->memory, .length = PAGE_BYTES};
	it->dst = (struct copy_buffer){
		.memory = t->memory, .offset = n * PAGE_BYTES, .length = PAGE_BYTES};
	it->job = (struct copy_job){.plan = it->plan,
				    .end = PAGE_BYTES,
				    .src = {.buffers = &it->src, .buffer_count = 1},
				    .dst = {.buffers = &it->dst, .buffer_count = 1},
				    .on_done = on_done};
}

static int setup(void **state)
{
	static struct test t;

	t = (struct test){0};
	assert_int_equal(loop_new(&t.loop), 0);
	assert_int_equal(copier_new(t.loop, 1, 0, &t.copier), 0);
	assert_int_equal(memory_new_linear(3 * PAGE_BYTES, &t.memory), 0);
	memset(t.memory->base, 5, PAGE_BYTES);
	*state = &t;
	return 0;
}

static int teardown(void **state)
{
	struct test *t = *state;

	copier_free(t->copier);
	loop_free(t->loop);
	memory_unref(t->memory);
	plan_free(t->a.plan);
	plan_free(t->b.plan);
	plan_free(t->large.plan);
	memory_unref(t->large.src.memory);
	memory_unref(t->large.dst.memory);
	return 0;
}

static bool is_copied(const struct test *t, unsigned int n)
{
	const uint8_t *page = t->memory->base + n * PAGE_BYTES;

	for (uint64_t i = 0; i < PAGE_BYTES; i++)
		if (page[i] != 5)
			return false;
	return true;
}

static void until_done(struct test *t, const struct short_job *it)
{
	uint64_t end = loop_clock_ns(t->loop) + WAIT_NS;

	while (it->calls == 0) {
		assert_true(loop_clock_ns(t->loop) < end);
		loop_turn(t->loop, 10 * LOOP_NS_PER_MS);
	}
}

/* In a turn that has time left: who loses the core for so long that its turn is over
 * leaves the copy to the threads. */
static void submit_in_time(struct test *t, struct short_job *it)
{
	uint64_t end = loop_clock_ns(t->loop) + WAIT_NS;
	bool late;

	do {
		if (loop_clock_ns(t->loop) > end) {
			print_message(
				"[  SKIPPED ] needs a core for the length of a turn\n");
			skip();
		}
		it->calls = 0;
		loop_turn(t->loop, 0);
		late = loop_enough(t->loop);
		assert_int_equal(copier_submit(t->copier, &it->job), 0);
		late |= loop_enough(t->loop);
		if (late)
			until_done(t, it);
	} while (late);
}

static void job_short_is_copied_by_submitter(void **state)
{
	struct test *t = *state;

	job_set(t, &t->a, ROW_BYTES, 1);
	submit_in_time(t, &t->a);
	assert_true(is_copied(t, 1));
	assert_int_equal(atomic_load(&t->a.job.copied), PAGE_BYTES);
	assert_int_equal(t->a.calls, 0);     /* never from inside submit */
	copier_cancel(t->copier, &t->a.job); /* too late */
	assert_int_equal(t->a.calls, 0);
	loop_turn(t->loop, 0);
	assert_int_equal(t->a.calls, 1);
	assert_int_equal(t->a.job.result, 0);
}

/* The only thread has a large job of another engine's: a short one overtakes it, and
 * a second one of the same turn takes its place among the threads' work. */
static void job_short_is_one_a_turn(void **state)
{
	static const struct plan_run run = {.len = LARGE_BYTES, .count = 1};
	struct plan_builder *builder = NULL;
	struct test *t = *state;
	struct short_job *large = &t->large;

	assert_int_equal(plan_builder_new(&builder), 0);
	assert_int_equal(plan_builder_add(builder, &run), 0);
	assert_int_equal(plan_builder_finish(builder, &large->plan), 0);
	plan_builder_free(builder);
	assert_int_equal(memory_new_linear(LARGE_BYTES, &large->src.memory), 0);
	assert_int_equal(memory_new_linear(LARGE_BYTES, &large->dst.memory), 0);
	large->src.length = large->dst.length = LARGE_BYTES;
	large->job = (struct copy_job){.plan = large->plan,
				       .end = LARGE_BYTES,
				       .src = {.buffers = &large->src, .buffer_count = 1},
				       .dst = {.buffers = &large->dst, .buffer_count = 1},
				       .on_done = on_done};
	job_set(t, &t->a, ROW_BYTES, 1);
	job_set(t, &t->b, PAGE_BYTES, 2);
	loop_turn(t->loop, 0);
	assert_int_equal(copier_submit(t->copier, &large->job), 0);
	assert_int_equal(copier_submit(t->copier, &t->a.job), 0);
	assert_int_equal(copier_submit(t->copier, &t->b.job), 0);
	if (!loop_enough(t->loop)) /* kept from its core, the loop leaves both */
		assert_true(is_copied(t, 1));
	until_done(t, large);
	until_done(t, &t->b);
	assert_true(is_copied(t, 2));
	assert_int_equal(t->a.calls, 1);
	assert_int_equal(t->b.calls, 1);
	/* a turn later the loop has time again */
	t->b.calls = 0;
	memset(t->memory->base + 2 * PAGE_BYTES, 0, PAGE_BYTES);
	submit_in_time(t, &t->b);
	assert_true(is_copied(t, 2));
	until_done(t, &t->b);
}

static struct {
	uint8_t *base;
	pthread_t by;
	atomic_int hits;
} touched;

static void on_touch(int signal)
{
	(void)signal;
	touched.by = pthread_self();
	atomic_fetch_add(&touched.hits, 1);
	mprotect(touched.base, PAGE_BYTES, PROT_READ | PROT_WRITE);
}

/* Its owner can make an access fault, or wait: no thread of the loop's may be there. */
static void job_short_of_guarded_memory_is_left_to_the_threads(void **state)
{
	struct sigaction before, action = {.sa_handler = on_touch};
	struct test *t = *state;
	struct memory *guarded = NULL;
	int fd = memfd_create("guarded", MFD_CLOEXEC);

	assert_int_equal(file_fill(fd, PAGE_BYTES), 0);
	assert_int_equal(memory_import_shm_fd(fd, 0, PAGE_BYTES, true, &guarded), 0);
	assert_int_equal(guarded->kind, MEMORY_GUARDED);
	memset(guarded->base, 5, PAGE_BYTES);
	touched.base = guarded->base;
	assert_int_equal(mprotect(guarded->base, PAGE_BYTES, PROT_NONE), 0);
	assert_int_equal(sigaction(SIGSEGV, &action, &before), 0);
	job_set(t, &t->a, ROW_BYTES, 1);
	t->a.src.memory = guarded;
	loop_turn(t->loop, 0);
	assert_int_equal(copier_submit(t->copier, &t->a.job), 0);
	until_done(t, &t->a);
	assert_int_equal(sigaction(SIGSEGV, &before, NULL), 0);
	assert_int_equal(t->a.job.result, 0);
	assert_true(is_copied(t, 1));
	assert_int_equal(atomic_load(&touched.hits), 1);
	assert_false(pthread_equal(touched.by, pthread_self()));
	memory_unref(guarded);
	close(fd);
}

static void job_short_of_cut_memory_fails(void **state)
{
	struct test *t = *state;
	struct memory *cut = NULL;
	int fd = memfd_create("cut", MFD_CLOEXEC);

	assert_int_equal(memory_guard_install(), 0); /* cmocka has its own handler */
	assert_int_equal(file_fill(fd, PAGE_BYTES), 0);
	assert_int_equal(memory_import_shm_fd(fd, 0, PAGE_BYTES, true, &cut), 0);
	assert_int_equal(ftruncate(fd, 0), 0);
	job_set(t, &t->a, ROW_BYTES, 1);
	t->a.src.memory = cut;
	loop_turn(t->loop, 0);
	assert_int_equal(copier_submit(t->copier, &t->a.job), 0);
	until_done(t, &t->a);
	assert_int_equal(t->a.job.err.code, ERR_FAULT);
	memory_unref(cut);
	close(fd);
	job_set(t, &t->b, ROW_BYTES, 2);
	submit_in_time(t, &t->b); /* or the test ends here */
	assert_true(is_copied(t, 2));
	until_done(t, &t->b);
}

/* While the rest is copied, and for the loop to find later. */
static void first_slice_has_its_time(void **state)
{
	struct test *t = *state;
	uint64_t slice = PAGE_BYTES / 64, begun_ns, first_ns;
	struct copier *copier;

	assert_int_equal(copier_new(t->loop, 1, slice, &copier), 0);
	job_set(t, &t->a, ROW_BYTES, 1);
	begun_ns = loop_clock_ns(t->loop);
	assert_int_equal(copier_submit(copier, &t->a.job), 0);
	while (atomic_load(&t->a.job.copied) < 2 * slice)
		assert_true(loop_clock_ns(t->loop) < begun_ns + WAIT_NS);
	first_ns = atomic_load(&t->a.job.first_ns);
	assert_in_range(first_ns, begun_ns, loop_clock_ns(t->loop));
	until_done(t, &t->a);
	assert_int_equal(atomic_load(&t->a.job.first_ns), first_ns);
	copier_free(copier);
}

static void copier_without_memory_is_not_made_and_leaks_nothing(void **state)
{
	struct copier *copier = NULL;
	struct loop *loop = NULL;
	uint64_t n = 1;
	int r;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	do {
		mem_fail_at(n++);
		r = copier_new(loop, 2, 0, &copier);
		mem_fail_at(0);
		if (r < 0)
			assert_int_equal(r, -ENOMEM);
	} while (r < 0);
	assert_true(n > 5);
	copier_free(copier);
	assert_int_equal(copier_new(loop, 0, 0, &copier), -EINVAL);
	loop_free(loop);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(job_short_is_copied_by_submitter),
		CASE(job_short_is_one_a_turn),
		CASE(job_short_of_guarded_memory_is_left_to_the_threads),
		CASE(job_short_of_cut_memory_fails),
		CASE(first_slice_has_its_time),
		cmocka_unit_test(copier_without_memory_is_not_made_and_leaks_nothing),
	};

	return cmocka_run_group_tests_name("copy_short", tests, NULL, NULL);
}
