/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The cost page: rows come and go, readers of another mapping see each row whole while a
 * writer works, cannot write, and are not held by a writer that died.
 */
#include "daemon/cost/page.h"

#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/base/seqlock.h"

static struct cost_peer peer_of(uint8_t n, double value)
{
	struct cost_peer peer = {.key = {n}, .link_count = COST_LINKS_MAX};

	for (unsigned int i = 0; i < COST_LINKS_MAX; i++)
		peer.links[i].probe = peer.links[i].bandwidth = cost_known(value);
	peer.requesters[COST_HOST] = value;
	return peer;
}

static void key_of(unsigned int n, uint8_t key[COST_KEY_BYTES])
{
	memset(key, 0, COST_KEY_BYTES);
	memcpy(key, &n, sizeof(n));
}

static void peer_is_found_replaced_and_dropped(void **state)
{
	struct cost_peer a = peer_of(1, 5), b = peer_of(2, 7), seen;
	struct cost_page *page;

	(void)state;
	assert_int_equal(cost_page_new(false, &page), 0);
	assert_int_equal(cost_page_fd(page), -1);
	assert_int_equal(cost_page_peer(page, a.key, &seen), COST_PAGE_NONE);
	assert_int_equal(cost_page_set_peer(page, &a), 0);
	assert_int_equal(cost_page_set_peer(page, &b), 0);
	assert_int_equal(cost_page_peer(page, a.key, &seen), 0);
	assert_memory_equal(&seen, &a, sizeof(a));
	a = peer_of(1, 9);
	assert_int_equal(cost_page_set_peer(page, &a), 0);
	assert_int_equal(cost_page_peer(page, a.key, &seen), 0);
	assert_memory_equal(&seen, &a, sizeof(a));
	cost_page_drop(page, a.key);
	assert_int_equal(cost_page_peer(page, a.key, &seen), COST_PAGE_NONE);
	assert_int_equal(cost_page_peer(page, b.key, &seen), 0);
	assert_memory_equal(&seen, &b, sizeof(b));
	cost_page_free(page);
	cost_page_free(NULL);
}

static void speed_is_of_a_shape_or_of_any(void **state)
{
	struct cost_speed any = {.key = {3}}, mla = {.key = {3}}, seen;
	struct cost_shape gqa = cost_shape_gqa(32, 8, 128, 128, 2, 2);
	struct cost_page *page;

	(void)state;
	mla.shape = cost_shape_mla(16, 576, 512, 2, 2);
	mla.compute.fixed = cost_known(4);
	any.compute.fixed = cost_known(8);
	assert_int_equal(cost_page_new(false, &page), 0);
	assert_int_equal(cost_page_set_speed(page, &mla), 0);
	assert_int_equal(cost_page_speed(page, mla.key, &mla.shape, COST_HOST, &seen), 0);
	assert_true(seen.compute.fixed.value == 4);
	assert_int_equal(cost_page_speed(page, mla.key, &gqa, COST_HOST, &seen),
			 COST_PAGE_NONE);
	assert_int_equal(cost_page_speed(page, cost_self, &mla.shape, COST_HOST, &seen),
			 COST_PAGE_NONE);
	assert_int_equal(cost_page_set_speed(page, &any), 0);
	assert_int_equal(cost_page_speed(page, mla.key, &gqa, COST_HOST, &seen), 0);
	assert_true(seen.compute.fixed.value == 8);
	assert_int_equal(cost_page_speed(page, mla.key, &mla.shape, COST_HOST, &seen), 0);
	assert_true(seen.compute.fixed.value == 4);
	mla.kind = COST_GPU;
	mla.compute.fixed = cost_known(2);
	assert_int_equal(cost_page_set_speed(page, &mla), 0);
	assert_int_equal(cost_page_speed(page, mla.key, &mla.shape, COST_GPU, &seen), 0);
	assert_true(seen.compute.fixed.value == 2);
	assert_int_equal(cost_page_speed(page, mla.key, &mla.shape, COST_HOST, &seen), 0);
	assert_true(seen.compute.fixed.value == 4);
	cost_page_drop(page, mla.key);
	for (uint32_t kind = 0; kind < COST_KINDS; kind++)
		assert_int_equal(cost_page_speed(page, mla.key, &mla.shape, kind, &seen),
				 COST_PAGE_NONE);
	assert_int_equal(cost_page_speed(page, mla.key, &gqa, COST_HOST, &seen),
			 COST_PAGE_NONE);
	cost_page_free(page);
}

static void full_page_refuses_peers_and_reuses_speeds(void **state)
{
	struct cost_speed speed = {.kind = COST_HOST};
	struct cost_peer peer = peer_of(0, 1);
	struct cost_page *page;

	(void)state;
	assert_int_equal(cost_page_new(false, &page), 0);
	for (unsigned int i = 0; i < COST_PAGE_PEERS; i++) {
		key_of(i, peer.key);
		assert_int_equal(cost_page_set_peer(page, &peer), 0);
	}
	for (unsigned int i = 0; i < COST_PAGE_SPEEDS; i++) {
		key_of(i, speed.key);
		speed.compute.fixed.at_s = 1000 - i; /* the later ones are older */
		speed.attend.at_s = i == COST_PAGE_SPEEDS - 1 ? 2000 : 0; /* and used */
		assert_int_equal(cost_page_set_speed(page, &speed), 0);
	}
	assert_int_equal(cost_page_set_peer(page, &peer), 0); /* it has its row */
	key_of(1000, peer.key);
	key_of(1000, speed.key);
	assert_int_equal(cost_page_set_peer(page, &peer), -err_errno(ERR_LIMIT));
	speed.compute.fixed.at_s = speed.attend.at_s = 3000;
	assert_int_equal(cost_page_set_speed(page, &speed), 0);
	assert_int_equal(cost_page_reused(page), 1);
	for (unsigned int i = 0; i < COST_PAGE_SPEEDS; i++) {
		key_of(i, peer.key);
		assert_int_equal(
			cost_page_speed(page, peer.key, &speed.shape, COST_HOST, &speed),
			i == COST_PAGE_SPEEDS - 2 ? COST_PAGE_NONE : 0);
	}
	key_of(77, peer.key);
	cost_page_drop(page, peer.key);
	key_of(1000, peer.key);
	assert_int_equal(cost_page_set_peer(page, &peer), 0);
	key_of(1001, speed.key);
	assert_int_equal(cost_page_set_speed(page, &speed), 0);
	assert_int_equal(cost_page_reused(page), 1); /* the dropped one's was free */
	assert_int_equal(cost_page_peer(page, peer.key, &peer), 0);
	cost_page_free(page);
}

/* As the table of a daemon whose peers come and go: no row gets lost on the way. */
static void rows_are_found_after_many_insertions_and_removals(void **state)
{
	bool there[3 * COST_PAGE_PEERS] = {false};
	unsigned int count = 0;
	struct cost_page *page;
	uint64_t dice = 88172645463325252u;

	(void)state;
	assert_int_equal(cost_page_new(false, &page), 0);
	for (unsigned int round = 0; round < 20000; round++) {
		struct cost_speed speed = {.kind = COST_HOST}, seen_speed;
		struct cost_peer peer = peer_of(0, round), seen;
		unsigned int n;

		dice ^= dice << 13;
		dice ^= dice >> 7;
		dice ^= dice << 17;
		n = (unsigned int)(dice >> 33) % ARRAY_LEN(there);
		key_of(n, peer.key);
		key_of(n, speed.key);
		assert_int_equal(cost_page_peer(page, peer.key, &seen),
				 there[n] ? 0 : COST_PAGE_NONE);
		assert_int_equal(cost_page_speed(page, peer.key, &speed.shape, COST_HOST,
						 &seen_speed),
				 there[n] ? 0 : COST_PAGE_NONE);
		if (there[n]) {
			cost_page_drop(page, peer.key);
			count--;
			there[n] = false;
		} else if (count < COST_PAGE_PEERS) {
			assert_int_equal(cost_page_set_peer(page, &peer), 0);
			assert_int_equal(cost_page_set_speed(page, &speed), 0);
			count++;
			there[n] = true;
		} else {
			assert_int_equal(cost_page_set_peer(page, &peer),
					 -err_errno(ERR_LIMIT));
		}
	}
	cost_page_free(page);
}

static void page_is_read_only_for_others(void **state)
{
	struct cost_peer peer = peer_of(1, 5), seen;
	struct cost_page *page, *view;
	char path[32];
	int fd, again;

	(void)state;
	assert_int_equal(cost_page_new(true, &page), 0);
	assert_int_equal(cost_page_set_peer(page, &peer), 0);
	fd = cost_page_fd(page);
	assert_true(fd >= 0);
	assert_true(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) ==
		    MAP_FAILED);
	assert_int_equal(ftruncate(fd, 0), -1);
	/* one of the same user may open it anew */
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	again = open(path, O_RDWR);
	if (again >= 0) {
		assert_true(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, again,
				 0) == MAP_FAILED);
		assert_int_equal(write(again, "x", 1), -1);
		assert_int_equal(ftruncate(again, 0), -1);
		close(again);
	}
	assert_int_equal(cost_page_map(fd, &view), 0);
	assert_int_equal(cost_page_peer(view, peer.key, &seen), 0);
	assert_memory_equal(&seen, &peer, sizeof(peer));
	peer = peer_of(1, 6);
	assert_int_equal(cost_page_set_peer(page, &peer), 0);
	assert_int_equal(cost_page_peer(view, peer.key, &seen), 0);
	assert_true(seen.requesters[COST_HOST] == 6);
	cost_page_free(page); /* a reader keeps what it has mapped */
	assert_int_equal(cost_page_peer(view, peer.key, &seen), 0);
	cost_page_free(view);
}

static void page_invalid_is_refused(void **state)
{
	struct cost_page *page, *view;
	int fd = memfd_create("test", MFD_ALLOW_SEALING),
	    null = open("/dev/null", O_RDONLY);
	off_t bytes;

	(void)state;
	assert_int_equal(cost_page_new(true, &page), 0);
	bytes = lseek(cost_page_fd(page), 0, SEEK_END);
	assert_int_equal(cost_page_map(-1, &view), -err_errno(ERR_PROTO));
	assert_int_equal(cost_page_map(null, &view), -err_errno(ERR_PROTO));
	assert_int_equal(cost_page_map(fd, &view), -err_errno(ERR_PROTO));
	assert_int_equal(ftruncate(fd, bytes), 0);
	assert_int_equal(cost_page_map(fd, &view), -err_errno(ERR_PROTO)); /* no seal */
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
	assert_int_equal(cost_page_map(fd, &view), -err_errno(ERR_PROTO)); /* no magic */
	assert_null(view);
	cost_page_free(page);
	close(fd);
	close(null);
}

/* The first words of a page: its magic, its version, its bytes. */
static void page_of_another_version_is_refused(void **state)
{
	struct cost_page *page, *view;
	uint32_t words[2];

	(void)state;
	assert_int_equal(cost_page_new(true, &page), 0);
	for (int more = 0; more < 2; more++) {
		int fd = memfd_create("test", MFD_ALLOW_SEALING);
		off_t bytes = lseek(cost_page_fd(page), 0, SEEK_END), at = 0;

		while (at < bytes)
			assert_true(sendfile(fd, cost_page_fd(page), &at,
					     (size_t)(bytes - at)) > 0);
		assert_int_equal(pread(fd, words, sizeof(words), 0), sizeof(words));
		words[1] += (uint32_t)more;
		assert_int_equal(pwrite(fd, words, sizeof(words), 0), sizeof(words));
		assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
		assert_int_equal(cost_page_map(fd, &view),
				 more ? -err_errno(ERR_PROTO) : 0);
		cost_page_free(view);
		close(fd);
	}
	cost_page_free(page);
}

/* A page is input: nothing beyond a row is read, whatever the row says. */
static void row_of_too_many_links_is_none(void **state)
{
	struct cost_peer peer = peer_of(1, 5), seen[2];
	struct cost_page *page;

	(void)state;
	memset(&seen[1], 0x5a, sizeof(seen[1]));
	peer.link_count = 2 * COST_LINKS_MAX;
	assert_int_equal(cost_page_new(false, &page), 0);
	assert_int_equal(cost_page_set_peer(page, &peer), 0);
	assert_int_equal(cost_page_peer(page, peer.key, &seen[0]), COST_PAGE_BUSY);
	for (size_t i = 0; i < sizeof(seen[1]); i++)
		assert_int_equal(((const uint8_t *)&seen[1])[i], 0x5a);
	cost_page_free(page);
}

/* ---- a writer at work ---- */

struct work {
	struct cost_page *page;
	bool stop;
};

static void *write_on(void *arg)
{
	struct work *work = arg;
	struct cost_peer other = peer_of(2, 1);

	for (double n = 1; !__atomic_load_n(&work->stop, __ATOMIC_ACQUIRE); n++) {
		struct cost_peer peer = peer_of(1, n);

		cost_page_set_peer(work->page, &peer);
		if ((uint64_t)n % 3 == 0) { /* rows that change hands */
			cost_page_set_peer(work->page, &other);
			cost_page_drop(work->page, peer.key);
			cost_page_drop(work->page, other.key);
		}
	}
	return NULL;
}

static void rows_are_read_whole_during_writes(void **state)
{
	struct work work = {0};
	struct cost_peer seen;
	unsigned int whole = 0;
	struct cost_page *view;
	pthread_t thread;
	uint8_t key[COST_KEY_BYTES] = {1};

	(void)state;
	assert_int_equal(cost_page_new(true, &work.page), 0);
	assert_int_equal(cost_page_map(cost_page_fd(work.page), &view), 0);
	assert_int_equal(pthread_create(&thread, NULL, write_on, &work), 0);
	while (whole < 20000) {
		if (cost_page_peer(view, key, &seen) != 0)
			continue;
		whole++;
		assert_int_equal(seen.key[0], 1);
		for (unsigned int i = 0; i < COST_LINKS_MAX; i++)
			if (seen.links[i].probe.value != seen.requesters[COST_HOST] ||
			    seen.links[i].bandwidth.value != seen.requesters[COST_HOST])
				fail_msg("a row of two moments");
	}
	__atomic_store_n(&work.stop, true, __ATOMIC_RELEASE);
	pthread_join(thread, NULL);
	cost_page_free(view);
	cost_page_free(work.page);
}

static void writer_dead_does_not_block_readers(void **state)
{
	uint64_t sequence = 0, words[2] = {0}, row[2] = {3, 4}, seen[2] = {0};

	(void)state;
	seqlock_write(&sequence, words, row, 2);
	assert_int_equal(sequence, 2);
	assert_true(seqlock_read(&sequence, words, seen, 2));
	assert_memory_equal(seen, row, sizeof(row));
	sequence++; /* it died in the middle */
	assert_false(seqlock_read(&sequence, words, seen, 2));
	seqlock_write(&sequence, words, row, 2); /* the next writer mends it */
	assert_true(seqlock_read(&sequence, words, seen, 2));
}

static void preset_page_has_remote_and_home(void **state)
{
	struct cost_shape shape = cost_shape_mla(16, 576, 512, 2, 2);
	struct cost_speed speed;
	struct cost_page *page;
	struct cost_peer peer;
	struct cost_home home;

	(void)state;
	for (const struct cost_preset *p = cost_presets; p->name; p++) {
		assert_int_equal(cost_page_preset(p->name, &page), 0);
		assert_int_equal(cost_page_peer(page, cost_self, &peer), 0);
		assert_true(peer.links[0].bandwidth.value == p->bandwidth);
		assert_int_equal(
			cost_page_speed(page, cost_self, &shape, COST_HOST, &speed), 0);
		assert_int_equal(cost_page_home(page, &home), 0);
		assert_true(home.splice.value > 0);
		cost_page_free(page);
	}
	assert_int_equal(cost_page_preset("tin-cans", &page), -err_errno(ERR_NOTFOUND));
	assert_null(page);
}

static void refused_memory_leaks_nothing(void **state)
{
	struct cost_page *page;
	int64_t live = mem_live();

	(void)state;
	for (unsigned int n = 1; n <= 2; n++) {
		mem_fail_at(n);
		assert_int_equal(cost_page_preset("a40-pcie4", &page),
				 -err_errno(ERR_NOMEM));
		assert_null(page);
	}
	mem_fail_at(1);
	assert_int_equal(cost_page_new(true, &page), -err_errno(ERR_NOMEM));
	mem_fail_at(0);
	assert_true(mem_live() == live);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(peer_is_found_replaced_and_dropped),
		cmocka_unit_test(speed_is_of_a_shape_or_of_any),
		cmocka_unit_test(full_page_refuses_peers_and_reuses_speeds),
		cmocka_unit_test(rows_are_found_after_many_insertions_and_removals),
		cmocka_unit_test(page_is_read_only_for_others),
		cmocka_unit_test(page_invalid_is_refused),
		cmocka_unit_test(page_of_another_version_is_refused),
		cmocka_unit_test(row_of_too_many_links_is_none),
		cmocka_unit_test(rows_are_read_whole_during_writes),
		cmocka_unit_test(writer_dead_does_not_block_readers),
		cmocka_unit_test(preset_page_has_remote_and_home),
		cmocka_unit_test(refused_memory_leaks_nothing),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
