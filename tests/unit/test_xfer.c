/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transfer layer on the in-process cluster: attach by secret, prepared lists, READ
 * and WRITE by index, notifications, and refusals.
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

#include "daemon/base/hex.h"
#include "daemon/xfer/xfer_impl.h"
#include "proto/base64.h"
#include "proto/kvd_status.h"
#include "tests/lib/tmp.h"
#include "tests/lib/xfer_pair.h"

static void write_by_index_lands_at_its_row(void **state)
{
	static const uint32_t from[] = {5, 1, 9}, to[] = {0, 7, 3};
	struct pair *p = *state;
	uint64_t x =
		pair_start(p, "write", pair_grid(p, true), pair_grid(p, false),
			   &(struct pair_args){.local = from, .remote = to, .count = 3});
	uint64_t touched = 0;

	pair_until(p, x, KVD_SUCCESS);
	assert_true(pair_row_is(p, 0, 5) && pair_row_is(p, 7, 1) && pair_row_is(p, 3, 9));
	for (uint64_t i = 0; i < p->yours.bytes; i++)
		touched += p->yours.base[i] != 0;
	assert_int_equal(touched, 3 * 256);
}

static void read_all_brings_everything(void **state)
{
	struct pair *p = *state;
	uint64_t x;

	memset(p->yours.base, 0x5a, p->yours.bytes);
	x = pair_start(p, "read", pair_grid(p, true), pair_grid(p, false), NULL);
	pair_until(p, x, KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

static void read_checked_at_destination_succeeds(void **state)
{
	struct pair *p = *state;

	fake_hub_profile(p->c.bytes)->check = true;
	read_all_brings_everything(state);
	assert_int_equal(p->mine.base[0], 0x5a);
}

static void repeated_and_overlapping_rows_are_legal(void **state)
{
	static const uint32_t from[] = {2, 2, 2}, to[] = {0, 1, 0};
	struct pair *p = *state;
	uint64_t local = pair_grid(p, true), remote;
	uint64_t x;

	remote = cluster_number(
		cluster_call(&p->c, p->me,
			     "{'cmd':'dlist.prep','peer':%llu,'descs':[['%llu',256],"
			     "['%llu',256]]}",
			     (unsigned long long)p->attach,
			     (unsigned long long)(uintptr_t)p->yours.base,
			     (unsigned long long)(uintptr_t)p->yours.base + 128),
		"dlist");
	x = pair_start(p, "write", local, remote,
		       &(struct pair_args){.local = from, .remote = to, .count = 3});
	pair_until(p, x, KVD_SUCCESS);
	assert_true(pair_row_is(p, 0, 2));
}

static void expect_notif(struct pair *p, const char *text)
{
	cJSON *answer = cluster_call(&p->c, p->you, "{'cmd':'notif.drain'}");
	const cJSON *first =
		cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(answer, "notifs"), 0);
	const char *data = cJSON_GetStringValue(cJSON_GetObjectItem(first, "data"));
	uint8_t bytes[256];
	size_t len;

	if (!text) {
		assert_null(first);
	} else {
		assert_non_null(data);
		assert_true(base64_decode(data, strlen(data), bytes, &len));
		assert_int_equal(len, strlen(text));
		assert_memory_equal(bytes, text, len);
		assert_string_equal(
			cJSON_GetStringValue(cJSON_GetObjectItem(first, "from")), "me");
	}
	cJSON_Delete(answer);
}

static void write_notification_arrives_with_its_data(void **state)
{
	struct pair *p = *state;
	uint64_t local = pair_grid(p, true), remote = pair_grid(p, false), x;

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 20 * LOOP_NS_PER_MS;
	x = pair_start(p, "write", local, remote, &(struct pair_args){.notif = "hello"});
	for (int i = 0; i < 1000; i++) {
		cJSON *answer;
		bool here;

		cluster_run(&p->c, LOOP_NS_PER_MS);
		answer = cluster_call(&p->c, p->you, "{'cmd':'notif.drain'}");
		here = cJSON_GetArraySize(cJSON_GetObjectItem(answer, "notifs")) > 0;
		cJSON_Delete(answer);
		if (!here)
			continue;
		assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
		pair_until(p, x, KVD_SUCCESS);
		return;
	}
	fail_msg("no notification");
}

static void read_notification_and_bare_ones_arrive_in_order(void **state)
{
	struct pair *p = *state;
	uint64_t x = pair_start(p, "read", pair_grid(p, true), pair_grid(p, false),
				&(struct pair_args){.notif = "read"});

	pair_until(p, x, KVD_SUCCESS);
	cluster_run(&p->c, LOOP_NS_PER_S);
	expect_notif(p, "read");
	pair_notify(p, "", 0);
	cluster_run(&p->c, LOOP_NS_PER_S);
	expect_notif(p, "");
	expect_notif(p, NULL);
}

/* Answers in all, each of a size that the session may get; fails if one refuses. */
static unsigned int drain_all(struct pair *p, unsigned int *answers_p)
{
	unsigned int notifs = 0;
	bool more = true;

	for (*answers_p = 0; more; ++*answers_p) {
		cJSON *answer = cluster_call(&p->c, p->you, "{'cmd':'notif.drain'}");
		const cJSON *list = cJSON_GetObjectItemCaseSensitive(answer, "notifs");

		assert_non_null(list);
		notifs += (unsigned int)cJSON_GetArraySize(list);
		more = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(answer, "more"));
		assert_true(cJSON_GetArraySize(list) > 0 || !more);
		cJSON_Delete(answer);
	}
	return notifs;
}

static void notifications_are_split_into_replies(void **state)
{
	struct pair *p = *state;
	unsigned int answers;

	p->c.nodes[1].config.client_queue_bytes = 64 << 10;
	for (unsigned int i = 0; i < 3000; i++) {
		pair_notify(p, "", 0);
		if (i % 100 == 0)
			cluster_run(&p->c, 10 * LOOP_NS_PER_MS);
	}
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(drain_all(p, &answers), 3000);
	assert_in_range(answers, 3, 30);
}

/* Success includes the notification of the other engine: a write that cannot notify
 * moves nothing. */
static void write_without_space_for_notification_is_refused(void **state)
{
	struct pair *p = *state;
	uint64_t local = pair_grid(p, true), remote = pair_grid(p, false), x;
	const struct metrics *metrics = &p->c.nodes[1].kvd.metrics;
	unsigned int answers, sent = 0;
	char *data = malloc(600001);

	memset(data, 'A', 600000);
	data[600000] = 0;
	while (metrics_get(metrics, METRIC_AT(NOTIFS, METRIC_IN, METRIC_NOTIF_DROPPED)) ==
	       0) {
		pair_notify(p, data, 600000);
		cluster_run(&p->c, 10 * LOOP_NS_PER_MS);
		assert_true(++sent < 30);
	}
	data[599997] = 0; /* as little less as makes no difference */
	x = pair_start(p, "write", local, remote, &(struct pair_args){.notif = data});
	pair_until(p, x, KVD_FAILED);
	assert_int_equal(
		metrics_get(metrics, METRIC_AT(NOTIFS, METRIC_IN, METRIC_NOTIF_DROPPED)),
		2);
	for (uint64_t i = 0; i < p->yours.bytes; i++)
		assert_int_equal(p->yours.base[i], 0);
	assert_int_equal(drain_all(p, &answers), sent - 1);
	pair_until(p,
		   pair_start(p, "write", local, remote,
			      &(struct pair_args){.notif = "read"}),
		   KVD_SUCCESS);
	expect_notif(p, "read");
	free(data);
}

static void post_again_moves_new_bytes(void **state)
{
	struct pair *p = *state;
	uint64_t x =
		pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL);

	pair_until(p, x, KVD_SUCCESS);
	memset(p->mine.base, 0x77, p->mine.bytes);
	pair_again(p, x, NULL);
	pair_until(p, x, KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

static void indices_other_of_same_lists_use_other_rows(void **state)
{
	struct pair *p = *state;
	uint64_t local = pair_grid(p, true), remote = pair_grid(p, false);
	static const uint32_t from[] = {5, 6, 5}, to[] = {0, 1, 0};

	for (unsigned int i = 0; i < 3; i++) {
		memset(p->yours.base, 0, p->yours.bytes);
		pair_until(p,
			   pair_start(p, "write", local, remote,
				      &(struct pair_args){.local = &from[i],
							  .remote = &to[i],
							  .count = 1}),
			   KVD_SUCCESS);
		assert_int_equal(pair_row_is(p, 0, 5), i != 1);
		assert_int_equal(pair_row_is(p, 1, 6), i == 1);
	}
}

/* The same address is other memory now: a plan of before would read the old. */
static void post_again_after_the_source_moved_reads_the_new(void **state)
{
	struct pair *p = *state;
	uint64_t x =
		pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL);
	char name[64];
	uint8_t *shm;
	int fd;

	pair_until(p, x, KVD_SUCCESS);
	cluster_ok(&p->c, p->me, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)p->mine.pool);
	cluster_ok(&p->c, p->me, "{'cmd':'region.unregister','region':%llu}",
		   (unsigned long long)p->mine.region);
	fd = shm_open(tmp_name(name, sizeof(name), "/kvd-test"),
		      O_RDWR | O_CREAT | O_EXCL, 0600);
	assert_int_equal(ftruncate(fd, (off_t)p->mine.bytes + 4096), 0);
	shm = mmap(NULL, p->mine.bytes + 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_ptr_not_equal(shm, MAP_FAILED);
	memset(shm, 0x55, p->mine.bytes + 4096);
	for (uint64_t i = 0; i < p->mine.bytes; i++)
		shm[4096 + i] = (uint8_t)(i * 7);
	cluster_ok(&p->c, p->me,
		   "{'cmd':'region.register','kind':'shm','shm_name':'%s',"
		   "'length':%llu,'address':'%llu'}",
		   name, (unsigned long long)p->mine.bytes + 4096,
		   (unsigned long long)(uintptr_t)p->mine.base - 4096);
	shm_unlink(name);
	pair_again(p, x, NULL);
	pair_until(p, x, KVD_SUCCESS);
	assert_memory_equal(shm + 4096, p->yours.base, p->yours.bytes);
	munmap(shm, p->mine.bytes + 4096);
	close(fd);
}

static void bad_picks_are_refused(void **state)
{
	static const uint32_t past[] = {256}, two[] = {1, 2}, zero[] = {0};
	struct pair *p = *state;
	uint64_t l = pair_grid(p, true), r = pair_grid(p, false);

	pair_fails(p,
		   pair_start(p, "write", l, r,
			      &(struct pair_args){
				      .local = past, .remote = zero, .count = 1}),
		   "ERANGE", "");
	pair_fails(p,
		   pair_start(p, "write", l, r,
			      &(struct pair_args){.local = two,
						  .remote = zero,
						  .count = 2,
						  .remote_count = 1}),
		   "EINVAL", "");
	pair_fails(p, pair_start(p, "write", r, l, NULL), "EINVAL", "");
	pair_fails(p, pair_start(p, "write", l, r + 1000, NULL), "ENOTFOUND", "");
	assert_int_equal(p->yours.base[0], 0);
}

static void bad_lists_are_refused_in_the_answer(void **state)
{
	struct pair *p = *state;
	unsigned long long base = (uintptr_t)p->mine.base, bytes = p->mine.bytes;

	cluster_refused(&p->c, p->me, "ENOTFOUND",
			"{'cmd':'dlist.prep','descs':[['%llu',256]]}",
			base + bytes - 255);
	cluster_refused(&p->c, p->me, "EINVAL",
			"{'cmd':'dlist.prep','descs':[['%llu',0]]}", base);
	cluster_refused(&p->c, p->me, "EINVAL",
			"{'cmd':'dlist.prep','descs':[['%llu',256,128,2]]}", base);
	cluster_refused(&p->c, p->me, "ERANGE",
			"{'cmd':'dlist.prep','descs':[['18446744073709551615',2]]}");
	cluster_refused(&p->c, p->me, "ENOTFOUND",
			"{'cmd':'dlist.prep','peer':%llu,'descs':[['%llu',256]]}",
			(unsigned long long)p->attach,
			(unsigned long long)(uintptr_t)p->yours.base + p->yours.bytes);
}

static void wrong_secret_is_refused(void **state)
{
	struct pair *p = *state;

	cluster_refused(&p->c, p->me, "EAUTH",
			"{'cmd':'peer.attach','endpoint':'%s','session':'%llu','secret':"
			"'00000000000000000000000000000000'}",
			p->c.nodes[1].endpoint, (unsigned long long)p->you->epoch);
}

static int no_key(struct xp_reg *reg, struct xp_peer *peer, void *buf, size_t size,
		  size_t *len_p)
{
	(void)reg;
	(void)peer;
	(void)buf;
	(void)size;
	(void)len_p;
	return err_raise(ERR_IMPORT, "the adapter makes no key of it");
}

/* "Wrong secret" would mislead the engine. */
static void attach_refused_has_reason(void **state)
{
	struct pair *p = *state;
	struct session *third = cluster_engine(&p->c, 1, "third");
	struct transport *transport = p->c.nodes[1].kvd.transports[0];
	const struct transport_ops *ops = transport->ops;
	struct transport_ops broken = *ops;
	struct cache theirs = p->yours;
	char secret[33];

	cluster_cache(&p->c, third, "theirs", 0, &theirs);
	hex_write(third->secret, 16, secret);
	broken.key_pack = no_key;
	transport->ops = &broken;
	cluster_refused(&p->c, p->me, "EIMPORT",
			"{'cmd':'peer.attach','endpoint':'%s','session':'%llu',"
			"'secret':'%s'}",
			p->c.nodes[1].endpoint, (unsigned long long)third->epoch, secret);
	transport->ops = ops;
	pair_attach(p, p->me, third, 1);
	cache_close(&theirs);
}

static void unregistered_memory_cannot_be_written(void **state)
{
	static const uint32_t zero[] = {0};
	struct pair *p = *state;
	uint64_t local = pair_grid(p, true), remote = pair_grid(p, false), x;

	x = pair_start(p, "write", local, remote,
		       &(struct pair_args){.local = zero, .remote = zero, .count = 1});
	pair_until(p, x, KVD_SUCCESS);
	cluster_ok(&p->c, p->you, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)p->yours.pool);
	cluster_ok(&p->c, p->you, "{'cmd':'region.unregister','region':%llu}",
		   (unsigned long long)p->yours.region);
	memset(p->yours.base, 0, p->yours.bytes);
	cluster_run(&p->c, LOOP_NS_PER_S);
	pair_fails(p, pair_start(p, "write", local, remote, NULL), "ENOTFOUND", "");
	assert_int_equal(p->yours.base[0], 0);
}

/* More rows than the loop reads itself: a helper does. */
static void write_by_many_indices_lands_at_their_rows(void **state)
{
	struct pair *p = *state;
	uint32_t picks[6 * 256];

	for (uint32_t i = 0; i < 6 * 256; i++)
		picks[i] = i % 256;
	pair_until(p,
		   pair_start(p, "write", pair_grid(p, true), pair_grid(p, false),
			      &(struct pair_args){
				      .local = picks, .remote = picks, .count = 6 * 256}),
		   KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

/* The other daemon has withdrawn its session's regions, and sends new ones soon. */
static void list_of_unreachable_session_is_refused(void **state)
{
	struct pair *p = *state;
	struct attach *attach = attach_find(p->me->part[MODULE_XFER], p->attach);
	struct remote_pool *pool = attach->pool;

	attach->pool = NULL;
	cluster_refused(&p->c, p->me, "EPEER",
			"{'cmd':'dlist.prep','peer':%llu,'descs':[['%llu',256]]}",
			(unsigned long long)p->attach,
			(unsigned long long)(uintptr_t)p->yours.base);
	attach->pool = pool;
	pair_until(p,
		   pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL),
		   KVD_SUCCESS);
}

static void list_of_no_rows_is_refused(void **state)
{
	struct pair *p = *state;

	cluster_refused(&p->c, p->me, "ERANGE", "{'cmd':'dlist.prep','descs':[]}");
	cluster_refused(&p->c, p->me, "EINVAL", "{'cmd':'dlist.prep','count':1}");
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, pair_setup, pair_teardown)
#define LOOPBACK(name) \
	cmocka_unit_test_setup_teardown(name, pair_setup_one_daemon, pair_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(write_by_index_lands_at_its_row),
		LOOPBACK(write_by_index_lands_at_its_row),
		CASE(read_all_brings_everything),
		LOOPBACK(read_all_brings_everything),
		CASE(read_checked_at_destination_succeeds),
		CASE(repeated_and_overlapping_rows_are_legal),
		CASE(write_notification_arrives_with_its_data),
		CASE(read_notification_and_bare_ones_arrive_in_order),
		CASE(notifications_are_split_into_replies),
		CASE(write_without_space_for_notification_is_refused),
		CASE(post_again_moves_new_bytes),
		CASE(indices_other_of_same_lists_use_other_rows),
		LOOPBACK(indices_other_of_same_lists_use_other_rows),
		CASE(post_again_after_the_source_moved_reads_the_new),
		CASE(bad_picks_are_refused),
		CASE(bad_lists_are_refused_in_the_answer),
		CASE(wrong_secret_is_refused),
		CASE(attach_refused_has_reason),
		CASE(unregistered_memory_cannot_be_written),
		LOOPBACK(unregistered_memory_cannot_be_written),
		CASE(write_by_many_indices_lands_at_their_rows),
		CASE(list_of_unreachable_session_is_refused),
		CASE(list_of_no_rows_is_refused),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
