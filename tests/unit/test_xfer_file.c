/* SPDX-License-Identifier: Apache-2.0 */
/*
 * xfer_file: transfers between a session's memory and its files, by commands: results,
 * refusals, ends in the middle, lack of memory.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/memory/copy.h"
#include "daemon/session/region.h"
#include "proto/kvd_status.h"
#include "tests/lib/ring_entries.h"
#include "tests/lib/stuck.h"
#include "tests/lib/tmp.h"
#include "tests/lib/xfer_pair.h"

#define ROW 256u
#define FILE_AT (REGION_FILE_ADDRESS + 4096)

/* `me` of a pair on one daemon, attached to itself, with a file as large as its cache. */
struct world {
	struct pair *p;
	struct copier *copier;
	uint64_t self, region;
	int fd;
	uint32_t slots; /* of the engine's own that were used */
};

static uint64_t file_register(struct world *w, uint64_t address)
{
	char text[256];
	cJSON *answer;

	snprintf(
		text, sizeof(text),
		"{\"cmd\":\"region.register\",\"kind\":\"file\",\"fd\":0,\"length\":%llu,"
		"\"address\":\"%llu\"}",
		(unsigned long long)w->p->mine.bytes, (unsigned long long)address);
	answer = cluster_call_fd(&w->p->c, w->p->me, dup(w->fd), NULL, text);
	return cluster_number(answer, "region");
}

static int setup(void **state)
{
	struct world *w = calloc(1, sizeof(*w));
	char path[64];

	pair_setup_one_daemon((void **)&w->p);
	assert_int_equal(copier_new(w->p->c.loop, 1, 0, &w->copier), 0);
	w->p->c.nodes[0].kvd.copier = w->copier;
	w->fd = mkostemp(tmp_path(path, sizeof(path), "kvd-xfer-XXXXXX"), O_CLOEXEC);
	assert_true(w->fd >= 0);
	unlink(path);
	assert_int_equal(ftruncate(w->fd, (off_t)w->p->mine.bytes), 0);
	w->self = pair_attach(w->p, w->p->me, w->p->me, 0);
	w->region = file_register(w, FILE_AT);
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	copier_free(w->copier);
	w->p->c.nodes[0].kvd.copier = NULL;
	close(w->fd);
	pair_teardown((void **)&w->p);
	free(w);
	return 0;
}

/* `count` rows of 256 bytes from there on. peer 0: a local list. */
static uint64_t rows_at(struct world *w, uint64_t peer, uint64_t address, uint64_t count)
{
	char to[40] = "";

	if (peer)
		snprintf(to, sizeof(to), "'peer':%llu,", (unsigned long long)peer);
	return cluster_number(
		cluster_call(&w->p->c, w->p->me,
			     "{'cmd':'dlist.prep',%s'descs':[['%llu',256,256,%llu]]}", to,
			     (unsigned long long)address, (unsigned long long)count),
		"dlist");
}

static uint64_t mine(struct world *w, uint64_t count)
{
	return rows_at(w, 0, (uintptr_t)w->p->mine.base, count);
}

static uint64_t file(struct world *w, uint64_t row, uint64_t count)
{
	return rows_at(w, w->self, FILE_AT + row * ROW, count);
}

static void file_expect(struct world *w, uint64_t row, const uint8_t *bytes, size_t len)
{
	uint8_t *got = malloc(len);

	assert_int_equal(pread(w->fd, got, len, (off_t)(row * ROW)), len);
	assert_memory_equal(got, bytes, len);
	free(got);
}

/* ---- bytes ---- */

static void write_and_read_land_in_both_directions(void **state)
{
	static const uint32_t to[] = {3, 1}, from[] = {60, 61};
	struct world *w = *state;
	struct pair *p = w->p;
	uint8_t *before = malloc(p->mine.bytes);
	uint64_t x = pair_start(p, "write", mine(w, 64), file(w, 8, 64), NULL);

	pair_until(p, x, KVD_SUCCESS);
	file_expect(w, 8, p->mine.base, (size_t)64 * ROW);
	/* the file as the local side: it is the source of a write */
	x = pair_start(p, "write", rows_at(w, 0, FILE_AT + 8 * ROW, 32),
		       rows_at(w, w->self, (uintptr_t)p->mine.base + 64 * ROW, 32), NULL);
	memcpy(before, p->mine.base, p->mine.bytes);
	pair_until(p, x, KVD_SUCCESS);
	memcpy(before + (size_t)64 * ROW, before, (size_t)32 * ROW);
	assert_memory_equal(p->mine.base, before, p->mine.bytes);
	/* picked, and again */
	x = pair_start(p, "read", mine(w, 64), file(w, 8, 64),
		       &(struct pair_args){.local = to, .remote = from, .count = 2});
	pair_until(p, x, KVD_SUCCESS);
	memcpy(before + (size_t)3 * ROW, before + (size_t)60 * ROW, ROW);
	memcpy(before + (size_t)1 * ROW, before + (size_t)61 * ROW, ROW);
	file_expect(w, 8 + 60, before + (size_t)3 * ROW, ROW);
	free(before);
}

static void notification_follows_the_bytes(void **state)
{
	struct world *w = *state;
	struct pair *p = w->p;
	uint64_t x = pair_start(p, "write", mine(w, 4), file(w, 0, 4),
				&(struct pair_args){.notif = "written"});
	cJSON *answer;

	pair_until(p, x, KVD_SUCCESS);
	cluster_run(&p->c, 20 * LOOP_NS_PER_MS);
	answer = cluster_call(&p->c, p->me, "{'cmd':'notif.drain'}");
	assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(answer, "notifs")), 1);
	cJSON_Delete(answer);
}

/* ---- refusals ---- */

static void file_is_of_no_other_session(void **state)
{
	struct world *w = *state;
	struct pair *p = w->p;
	uint64_t to_me = pair_attach(p, p->you, p->me, 0), local;

	cluster_refused(&p->c, p->you, "ENOTFOUND",
			"{'cmd':'dlist.prep','peer':%llu,'descs':[['%llu',256]]}",
			(unsigned long long)to_me, (unsigned long long)FILE_AT);
	/* nor to one */
	local = rows_at(w, 0, FILE_AT, 4);
	pair_fails(p, pair_start(p, "write", local, pair_rows(p, false, 4), NULL),
		   "EINVAL", "");
}

static void list_of_files_and_memory_is_refused(void **state)
{
	struct world *w = *state;

	for (int first = 0; first < 2; first++)
		cluster_refused(
			&w->p->c, w->p->me, first ? "EINVAL" : "EIMPORT",
			"{'cmd':'dlist.prep','descs':[['%llu',256],['%llu',256]]}",
			(unsigned long long)(first ? FILE_AT
						   : (uintptr_t)w->p->mine.base),
			(unsigned long long)(first ? (uintptr_t)w->p->mine.base
						   : FILE_AT));
}

static void addresses_of_files_are_unique(void **state)
{
	struct world *w = *state;
	struct pair *p = w->p;
	char text[256];
	cJSON *answer;

	for (int is_file = 0; is_file < 2; is_file++) {
		uint64_t at = is_file ? 4096 : REGION_FILE_ADDRESS;

		snprintf(text, sizeof(text),
			 "{\"cmd\":\"region.register\",\"kind\":\"%s\",\"fd\":0,"
			 "\"length\":4096,\"address\":\"%llu\"}",
			 is_file ? "file" : "memfd", (unsigned long long)at);
		answer = cluster_call_fd(&p->c, p->me, dup(is_file ? w->fd : p->mine.fd),
					 NULL, text);
		assert_string_equal(
			cJSON_GetObjectItem(cJSON_GetObjectItem(answer, "error"), "code")
				->valuestring,
			"ERANGE");
		cJSON_Delete(answer);
	}
	cluster_refused(&p->c, p->me, "EINVAL",
			"{'cmd':'pool.register','layout':{},'regions':[{'region':%llu}]}",
			(unsigned long long)w->region);
}

/* ---- ends ---- */

static void file_short_fails_and_others_continue(void **state)
{
	struct world *w = *state;
	struct pair *p = w->p;
	uint64_t local = mine(w, 4), remote = file(w, 0, 4), x;

	assert_int_equal(ftruncate(w->fd, 700), 0);
	x = pair_start(p, "read", local, remote, NULL);
	pair_until(p, x, KVD_FAILED);
	assert_int_equal(ftruncate(w->fd, 1024), 0);
	x = pair_start(p, "read", local, remote, NULL);
	pair_until(p, x, KVD_SUCCESS);
	for (size_t i = 700; i < 1024; i++)
		assert_int_equal(p->mine.base[i], 0);
}

/* The kernel sleeps in the middle: no end is reported before it has returned. */
static void unregistered_in_flight_waits_for_the_kernel(void **state)
{
	struct world *w = *state;
	struct pair *p = w->p;
	struct region *region = region_find(p->me, p->mine.region);
	size_t len = p->mine.bytes;
	uint64_t local = mine(w, 64), remote = file(w, 0, 64), x, other;
	int stuck;

	assert_non_null(region);
	assert_int_equal(fallocate(p->mine.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
				   0, (off_t)len),
			 0);
	stuck = stuck_begin(region->memory->base, len);
	if (stuck < 0)
		skip(); /* userfaultfd that waits for the kernel's own accesses */
	x = pair_start(p, "read", local, remote, NULL);
	assert_int_equal(stuck_wait(stuck, 10000), 1);
	/* the loop, and memory of others, continue; so does another file's transfer */
	other = file_register(w, FILE_AT + (UINT64_C(1) << 40));
	pair_give(p, KVD_RING_CANCEL, x);
	cluster_ok(&p->c, p->me, "{'cmd':'region.unregister','region':%llu}",
		   (unsigned long long)other);
	cluster_run(&p->c, 50 * LOOP_NS_PER_MS);
	assert_int_equal(pair_state(p, x), KVD_TRANSFERRING);
	assert_int_equal(stuck_end(stuck, region->memory->base, len), 0);
	pair_until(p, x, KVD_FAILED);
	cluster_ok(&p->c, p->me, "{'cmd':'region.unregister','region':%llu}",
		   (unsigned long long)w->region);
	pair_fails(p, pair_start(p, "read", local, remote, NULL), "ENOTFOUND", "");
}

static void session_ended_in_flight_leaks_nothing(void **state)
{
	struct world *w = *state;
	struct pair *p = w->p;

	for (int i = 0; i < 20; i++)
		pair_start(p, "write", mine(w, 64), file(w, 0, 64), NULL);
	cluster_engine_dies(&p->c, p->me);
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
}

static bool newest_has_ended(void *arg)
{
	const struct world *w = arg;
	unsigned int state =
		kvd_word_state(slot_read(w->p->me, SESSION_SLOTS + w->slots).word);

	return state == KVD_SUCCESS || state == KVD_FAILED;
}

static void no_memory_fails_the_transfer_alone(void **state)
{
	struct world *w = *state;
	struct pair *p = w->p;
	struct cluster_lack lack = {0};
	struct kvd_ring_entry e = {.op = KVD_RING_XFER,
				   .flags = KVD_RING_POSTS | KVD_RING_WRITES,
				   .slot = SESSION_SLOTS,
				   .gen = 1,
				   .a = mine(w, 8),
				   .b = file(w, 0, 8)};

	pair_give(p, KVD_RING_RELEASE, 0); /* there is a ring */
	do {
		char *line = pair_line(&e, NULL, 0);
		cJSON *answer;

		lack.nth++;
		answer = cluster_call_fd(&p->c, p->me, -1, &lack, line);
		if (cJSON_HasObjectItem(answer, "ok")) {
			cluster_until(&p->c, newest_has_ended, w, "the transfer ends");
			pair_give(p, KVD_RING_RELEASE, KVD_RING_IDS + e.slot);
			e.slot = SESSION_SLOTS + ++w->slots;
		}
		cJSON_Delete(answer);
		free(line);
	} while (lack.used >= lack.nth);
	assert_true(lack.nth > 5);
	file_expect(w, 0, p->mine.base, (size_t)8 * ROW);
}

int main(void)
{
#define CASE(fn) cmocka_unit_test_setup_teardown(fn, setup, teardown)
	const struct CMUnitTest tests[] = {
		CASE(write_and_read_land_in_both_directions),
		CASE(notification_follows_the_bytes),
		CASE(file_is_of_no_other_session),
		CASE(list_of_files_and_memory_is_refused),
		CASE(addresses_of_files_are_unique),
		CASE(file_short_fails_and_others_continue),
		CASE(unregistered_in_flight_waits_for_the_kernel),
		CASE(session_ended_in_flight_leaks_nothing),
		CASE(no_memory_fails_the_transfer_alone),
	};

	cluster_real_time();
	assert_int_equal(memory_guard_install(), 0);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
