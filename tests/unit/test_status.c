/* SPDX-License-Identifier: Apache-2.0 */
/* The status page as its reader finds it: another mapping, read-only. */
#include "daemon/session/status.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"

#define SLOTS 4096u
#define PAGE_BYTES ((SLOTS + 1) * KVD_STATUS_SLOT_BYTES)

static const uint8_t instance[16] = "0123456789abcde";

struct reader {
	struct status_page *page;
	const struct kvd_status_header *header;
	const struct kvd_status_slot *slot;
};

static void reader_open(struct reader *r)
{
	void *map;

	assert_int_equal(status_page_new(SLOTS, instance, &r->page), 0);
	map = mmap(NULL, PAGE_BYTES, PROT_READ, MAP_SHARED, status_page_fd(r->page), 0);
	assert_ptr_not_equal(map, MAP_FAILED);
	r->header = map;
	r->slot = (const struct kvd_status_slot *)(r->header + 1);
}

static void reader_close(struct reader *r)
{
	munmap((void *)(uintptr_t)r->header, PAGE_BYTES);
	status_page_free(r->page);
}

static uint64_t word(const struct reader *r, uint32_t slot)
{
	return __atomic_load_n(&r->slot[slot].word, __ATOMIC_ACQUIRE);
}

static void page_header_describes_it(void **state)
{
	struct reader r;
	struct stat st;

	(void)state;
	reader_open(&r);
	assert_true(r.header->magic == KVD_STATUS_MAGIC);
	assert_memory_equal(r.header->instance, instance, 16);
	assert_int_equal(r.header->slots, SLOTS);
	assert_int_equal(r.header->slot_bytes, 64);
	assert_true(r.header->heartbeat_ns > 0);
	assert_int_equal(r.header->heartbeat_interval_ns, STATUS_HEARTBEAT_NS);
	status_page_silence(r.page, UINT64_C(300000000));
	assert_int_equal(r.header->heartbeat_interval_ns, STATUS_HEARTBEAT_NS);
	status_page_silence(r.page, UINT64_C(5000000000));
	assert_int_equal(r.header->heartbeat_interval_ns, 1250000000);
	assert_int_equal(status_page_slots(r.page), SLOTS);
	status_page_heartbeat(r.page, 77);
	assert_int_equal(r.header->heartbeat_ns, 77);
	assert_int_equal(fstat(status_page_fd(r.page), &st), 0);
	assert_int_equal(st.st_size, PAGE_BYTES);
	reader_close(&r);
}

/* Neither the descriptor nor a new one through /proc lets the engine write. */
static void page_given_away_is_read_only(void **state)
{
	struct reader r;
	char path[40];
	int fd, again;

	(void)state;
	reader_open(&r);
	fd = status_page_fd(r.page);
	assert_ptr_equal(mmap(NULL, 4096, PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
	assert_true(write(fd, "x", 1) < 0);
	assert_true(ftruncate(fd, 0) < 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	again = open(path, O_RDWR | O_CLOEXEC);
	if (again >= 0) { /* same uid: the seals hold */
		assert_ptr_equal(
			mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0),
			MAP_FAILED);
		assert_true(pwrite(again, "x", 1, 0) < 0);
		assert_true(ftruncate(again, 0) < 0);
		assert_true(ftruncate(again, 1 << 20) < 0);
		close(again);
	}
	assert_true(r.header->magic == KVD_STATUS_MAGIC);
	reader_close(&r);
}

static void slot_reused_is_reset(void **state)
{
	uint32_t slot = 99, gen = 0;
	struct reader r;

	(void)state;
	reader_open(&r);
	assert_int_equal(status_slot_take(r.page, 4711, &slot, &gen), 0);
	assert_int_equal(gen, 1);
	assert_int_equal(kvd_word_gen(word(&r, slot)), 1);
	assert_int_equal(kvd_word_state(word(&r, slot)), KVD_BOOTSTRAPPING);
	assert_int_equal(r.slot[slot].object, 4711);
	status_slot_progress(r.page, slot, 10, 20);
	assert_int_equal(r.slot[slot].bytes, 10);
	assert_int_equal(r.slot[slot].total, 20);
	assert_int_equal(r.slot[slot].sequence % 2, 0);
	status_slot_set(r.page, slot, KVD_FAILED, KVD_FLAG_STAGED, ERR_PEER);
	assert_int_equal(kvd_word_gen(word(&r, slot)), 1);
	assert_int_equal(kvd_word_state(word(&r, slot)), KVD_FAILED);
	assert_int_equal(kvd_word_flags(word(&r, slot)), KVD_FLAG_STAGED);
	assert_int_equal(kvd_word_error(word(&r, slot)), ERR_PEER);
	assert_true(r.slot[slot].changed_ns > 0);
	reader_close(&r);
}

/* What no figure holds is cut, never wrapped; the next owner's are unknown again. */
static void slot_of_a_room_has_its_figures(void **state)
{
	struct status_room room = {.bytes = 3, .total = 4, .first_token = UINT64_MAX};
	uint32_t slot, gen;
	struct reader r;

	(void)state;
	reader_open(&r);
	status_page_divide(r.page, 1); /* one slot is the daemon's */
	assert_int_equal(status_slot_take(r.page, 1, &slot, &gen), 0);
	assert_int_equal(kvd_more_first_token(r.slot[slot].more), -1);
	status_slot_room(r.page, slot, &room);
	assert_int_equal(r.slot[slot].bytes, 3);
	assert_int_equal(r.slot[slot].total, 4);
	assert_int_equal(kvd_more_first_token(r.slot[slot].more), -1);
	room = (struct status_room){
		.first_token = 0, .done = 7, .rows = 8, .moved_us = 9};
	status_slot_room(r.page, slot, &room);
	assert_int_equal(kvd_more_first_token(r.slot[slot].more), 0);
	assert_int_equal(kvd_more_done(r.slot[slot].more), 7);
	assert_int_equal(kvd_more_rows(r.slot[slot].more), 8);
	assert_int_equal(kvd_more_moved_us(r.slot[slot].more), 9);
	room = (struct status_room){.first_token = UINT64_C(1) << 32,
				    .done = 65536,
				    .rows = UINT64_C(1) << 32,
				    .moved_us = UINT64_C(1) << 40};
	status_slot_room(r.page, slot, &room);
	assert_int_equal(kvd_more_first_token(r.slot[slot].more), UINT32_MAX - 1);
	assert_int_equal(kvd_more_done(r.slot[slot].more), UINT16_MAX);
	assert_int_equal(kvd_more_rows(r.slot[slot].more), UINT32_MAX);
	assert_int_equal(kvd_more_moved_us(r.slot[slot].more), UINT32_MAX);
	status_slot_release(r.page, slot);
	assert_int_equal(status_slot_take(r.page, 2, &slot, &gen), 0);
	assert_true(r.slot[slot].more[0] == 0 && r.slot[slot].more[1] == 0);
	reader_close(&r);
}

/* A closed room's slot keeps its last word; the next owner has a new generation. */
static void slot_reused_has_new_generation(void **state)
{
	uint32_t slots[SLOTS], slot, gen;
	struct reader r;

	(void)state;
	reader_open(&r);
	for (uint32_t i = 0; i < SLOTS; i++) {
		assert_int_equal(status_slot_take(r.page, i, &slots[i], &gen), 0);
		assert_int_equal(gen, 1);
	}
	assert_int_equal(status_slot_take(r.page, 1, &slot, &gen), -EUSERS);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	status_slot_progress(r.page, slots[7], 1, 2);
	status_slot_set(r.page, slots[7], KVD_SUCCESS, 0, ERR_OK);
	status_slot_release(r.page, slots[7]);
	assert_int_equal(kvd_word_state(word(&r, slots[7])), KVD_SUCCESS);
	assert_int_equal(status_slot_take(r.page, 5, &slot, &gen), 0);
	assert_int_equal(slot, slots[7]);
	assert_int_equal(gen, 2);
	assert_int_equal(kvd_word_gen(word(&r, slot)), 2);
	assert_int_equal(r.slot[slot].object, 5);
	assert_int_equal(r.slot[slot].bytes, 0);
	reader_close(&r);
}

/* Ten thousand rooms one after another: slots come back oldest first, late, and
 * the page stops growing. */
static void slots_churned_are_reused_late(void **state)
{
	uint32_t last_use[SLOTS] = {0}, slot, gen, highest = 0;
	struct reader r;

	(void)state;
	reader_open(&r);
	for (uint32_t i = 1; i <= 10000; i++) {
		assert_int_equal(status_slot_take(r.page, i, &slot, &gen), 0);
		if (last_use[slot])
			assert_true(i - last_use[slot] > 1024);
		last_use[slot] = i;
		highest = slot > highest ? slot : highest;
		status_slot_release(r.page, slot);
	}
	assert_int_equal(highest, 1024);
	assert_int_equal(gen, 10);
	reader_close(&r);
}

struct racer {
	const struct reader *r;
	uint32_t slot;
	bool stop;
	uint64_t reads;
	const char *fault;
};

/* A reader by the rules of kvd_status.h: figures of one moment or none. */
static void *race_read(void *arg)
{
	struct racer *racer = arg;
	const struct kvd_status_slot *s = &racer->r->slot[racer->slot];

	while (!__atomic_load_n(&racer->stop, __ATOMIC_ACQUIRE)) {
		uint64_t w = __atomic_load_n(&s->word, __ATOMIC_ACQUIRE);
		uint64_t before = __atomic_load_n(&s->sequence, __ATOMIC_ACQUIRE);
		uint64_t bytes = __atomic_load_n(&s->bytes, __ATOMIC_ACQUIRE);
		uint64_t total = __atomic_load_n(&s->total, __ATOMIC_ACQUIRE);

		if (kvd_word_state(w) == KVD_SUCCESS && bytes != 50000)
			racer->fault = "terminal word before the final figures";
		if (before % 2 == 0 &&
		    __atomic_load_n(&s->sequence, __ATOMIC_ACQUIRE) == before &&
		    total != 2 * bytes)
			racer->fault = "torn figures";
		__atomic_add_fetch(&racer->reads, 1, __ATOMIC_RELAXED);
	}
	return NULL;
}

static void figures_read_while_written_are_whole(void **state)
{
	struct reader r;
	struct racer racer = {.r = &r};
	pthread_t thread;
	uint32_t gen;

	(void)state;
	reader_open(&r);
	assert_int_equal(status_slot_take(r.page, 1, &racer.slot, &gen), 0);
	assert_int_equal(pthread_create(&thread, NULL, race_read, &racer), 0);
	while (__atomic_load_n(&racer.reads, __ATOMIC_RELAXED) < 1000)
		status_slot_progress(r.page, racer.slot, 0, 0);
	for (uint64_t i = 1; i <= 50000; i++)
		status_slot_progress(r.page, racer.slot, i, 2 * i);
	status_slot_set(r.page, racer.slot, KVD_SUCCESS, 0, ERR_OK);
	__atomic_store_n(&racer.stop, true, __ATOMIC_RELEASE);
	pthread_join(thread, NULL);
	if (racer.fault)
		fail_msg("%s", racer.fault);
	reader_close(&r);
}

static void page_without_memory_refused(void **state)
{
	struct status_page *page = NULL;

	(void)state;
	for (uint64_t n = 1; n <= 2; n++) {
		mem_fail_at(n);
		assert_int_equal(status_page_new(SLOTS, instance, &page), -ENOMEM);
	}
	mem_fail_at(0);
	assert_null(page);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(page_header_describes_it),
		cmocka_unit_test(page_given_away_is_read_only),
		cmocka_unit_test(slot_reused_is_reset),
		cmocka_unit_test(slot_of_a_room_has_its_figures),
		cmocka_unit_test(slot_reused_has_new_generation),
		cmocka_unit_test(slots_churned_are_reused_late),
		cmocka_unit_test(figures_read_while_written_are_whole),
		cmocka_unit_test(page_without_memory_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
