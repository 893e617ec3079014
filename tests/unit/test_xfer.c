/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transfer layer on the in-process cluster: attach by secret, prepared
 * lists, READ and WRITE by index, notifications, and what must be refused.
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

#include "daemon/session/region.h"
#include "daemon/xfer/xfer_impl.h"
#include "proto/base64.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster.h"

/* the initiator on node 0, the target on node 1 */
struct pair {
	struct cluster c;
	struct session *me, *you;
	struct cache mine, yours;
	uint64_t attach;
};

static uint64_t number(cJSON *answer, const char *name)
{
	const cJSON *n = cJSON_GetObjectItemCaseSensitive(answer, name);
	uint64_t v;

	if (!cJSON_IsNumber(n))
		fail_msg("no %s in %s", name, cJSON_PrintUnformatted(answer));
	v = (uint64_t)n->valuedouble;
	cJSON_Delete(answer);
	return v;
}

static void hex(const uint8_t *bytes, size_t n, char *out)
{
	for (size_t i = 0; i < n; i++)
		snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

static uint64_t attach_to(struct pair *p, struct session *from, struct session *to,
			  unsigned int node)
{
	char secret[33];

	hex(to->secret, 16, secret);
	return number(
		cluster_call(&p->c, from,
			     "{'cmd':'peer.attach','endpoint':'%s','session':'%llu',"
			     "'secret':'%s'}",
			     p->c.nodes[node].endpoint, (unsigned long long)to->epoch,
			     secret),
		"attach");
}

static void setup_on(struct pair *p, unsigned int target)
{
	cluster_new(&p->c, 1, 2);
	p->me = cluster_engine(&p->c, 0, "me");
	p->you = cluster_engine(&p->c, target, "you");
	p->mine = p->yours = (struct cache){.layers = 2,
					    .pages = 64,
					    .page_tokens = 1,
					    .units = 1,
					    .total_units = 1,
					    .unit_bytes = 256};
	cluster_cache(&p->c, p->me, "mine", 0, &p->mine);
	cluster_cache(&p->c, p->you, "yours", 0, &p->yours);
	for (uint64_t i = 0; i < p->mine.bytes; i++)
		p->mine.base[i] = (uint8_t)(1 + i % 251);
	p->attach = attach_to(p, p->me, p->you, target);
}

static int setup(void **state)
{
	struct pair *p = calloc(1, sizeof(*p));

	setup_on(p, 1);
	*state = p;
	return 0;
}

static int setup_one_daemon(void **state)
{
	struct pair *p = calloc(1, sizeof(*p));

	setup_on(p, 0);
	*state = p;
	return 0;
}

static int teardown(void **state)
{
	struct pair *p = *state;

	cluster_free(&p->c);
	cache_close(&p->mine);
	cache_close(&p->yours);
	free(p);
	return 0;
}

static uint64_t rows(struct pair *p, bool local, uint64_t count)
{
	const struct cache *k = local ? &p->mine : &p->yours;
	char peer[40] = "";

	if (!local)
		snprintf(peer, sizeof(peer), "'peer':%llu,",
			 (unsigned long long)p->attach);
	return number(
		cluster_call(&p->c, p->me,
			     "{'cmd':'dlist.prep',%s'descs':[['%llu',256,256,%llu]]}",
			     peer, (unsigned long long)(uintptr_t)k->base,
			     (unsigned long long)count),
		"dlist");
}

/* A grid over the whole cache: 256 rows of 256 bytes. */
static uint64_t grid(struct pair *p, bool local)
{
	return rows(p, local, p->mine.bytes / 256);
}

static uint64_t start(struct pair *p, const char *op, uint64_t local, uint64_t remote,
		      const char *rest)
{
	return number(
		cluster_call(
			&p->c, p->me,
			"{'cmd':'xfer.start','op':'%s','local':%llu,'remote':%llu%s}", op,
			(unsigned long long)local, (unsigned long long)remote, rest),
		"xfer");
}

static unsigned int state_of(struct pair *p, uint64_t xfer)
{
	return (unsigned int)number(cluster_call(&p->c, p->me,
						 "{'cmd':'xfer.state','xfer':%llu}",
						 (unsigned long long)xfer),
				    "state");
}

static void until(struct pair *p, uint64_t xfer, unsigned int state)
{
	for (int i = 0; i < 1000 && state_of(p, xfer) != state; i++)
		cluster_run(&p->c, LOOP_NS_PER_MS);
	assert_int_equal(state_of(p, xfer), state);
}

static bool row_is(const struct pair *p, unsigned int yours, unsigned int mine)
{
	return memcmp(p->yours.base + 256 * yours, p->mine.base + 256 * mine, 256) == 0;
}

static void write_by_index_lands_where_told(void **state)
{
	struct pair *p = *state;
	uint64_t x = start(p, "write", grid(p, true), grid(p, false),
			   ",'local_index':[5,1,9],'remote_index':[0,7,3]");
	uint64_t touched = 0;

	until(p, x, KVD_SUCCESS);
	assert_true(row_is(p, 0, 5) && row_is(p, 7, 1) && row_is(p, 3, 9));
	for (uint64_t i = 0; i < p->yours.bytes; i++)
		touched += p->yours.base[i] != 0;
	assert_int_equal(touched, 3 * 256);
}

static void read_all_brings_everything(void **state)
{
	struct pair *p = *state;
	uint64_t x;

	memset(p->yours.base, 0x5a, p->yours.bytes);
	x = start(p, "read", grid(p, true), grid(p, false), "");
	until(p, x, KVD_SUCCESS);
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
	struct pair *p = *state;
	uint64_t local = grid(p, true), remote;
	uint64_t x;

	remote = number(
		cluster_call(&p->c, p->me,
			     "{'cmd':'dlist.prep','peer':%llu,'descs':[['%llu',256],"
			     "['%llu',256]]}",
			     (unsigned long long)p->attach,
			     (unsigned long long)(uintptr_t)p->yours.base,
			     (unsigned long long)(uintptr_t)p->yours.base + 128),
		"dlist");
	x = start(p, "write", local, remote,
		  ",'local_index':[2,2,2],'remote_index':[0,1,0]");
	until(p, x, KVD_SUCCESS);
	assert_true(row_is(p, 0, 2));
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

static void write_notification_comes_with_its_data(void **state)
{
	struct pair *p = *state;
	uint64_t local = grid(p, true), remote = grid(p, false), x;

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 20 * LOOP_NS_PER_MS;
	x = start(p, "write", local, remote, ",'notif':'aGVsbG8='");
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
		until(p, x, KVD_SUCCESS);
		return;
	}
	fail_msg("no notification");
}

static void read_notification_and_bare_ones_arrive_in_order(void **state)
{
	struct pair *p = *state;
	uint64_t x =
		start(p, "read", grid(p, true), grid(p, false), ",'notif':'cmVhZA=='");

	until(p, x, KVD_SUCCESS);
	cluster_run(&p->c, LOOP_NS_PER_S);
	expect_notif(p, "read");
	cluster_ok(&p->c, p->me, "{'cmd':'notif.send','attach':%llu,'data':''}",
		   (unsigned long long)p->attach);
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

static void notifications_are_handed_over_in_answers_that_fit(void **state)
{
	struct pair *p = *state;
	unsigned int answers;

	p->c.nodes[1].config.client_queue_bytes = 64 << 10;
	for (unsigned int i = 0; i < 3000; i++) {
		cluster_ok(&p->c, p->me, "{'cmd':'notif.send','attach':%llu,'data':''}",
			   (unsigned long long)p->attach);
		if (i % 100 == 0)
			cluster_run(&p->c, 10 * LOOP_NS_PER_MS);
	}
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(drain_all(p, &answers), 3000);
	assert_in_range(answers, 3, 30);
}

/* Success means that the other engine is told: a write that cannot be told moves
 * nothing. */
static void write_whose_notification_finds_no_place_is_refused(void **state)
{
	struct pair *p = *state;
	uint64_t local = grid(p, true), remote = grid(p, false), x;
	const struct metrics *metrics = &p->c.nodes[1].kvd.metrics;
	unsigned int answers, sent = 0;
	char *data = malloc(800001);

	memset(data, 'A', 800000);
	data[800000] = 0;
	while (metrics_get(metrics, METRIC_NOTIFS_DROPPED) == 0) {
		cJSON_Delete(cluster_call(
			&p->c, p->me, "{'cmd':'notif.send','attach':%llu,'data':'%s'}",
			(unsigned long long)p->attach, data));
		cluster_run(&p->c, 10 * LOOP_NS_PER_MS);
		assert_true(++sent < 30);
	}
	data[799996] = 0; /* as little less as makes no difference */
	x = number(cluster_call(&p->c, p->me,
				"{'cmd':'xfer.start','op':'write','local':%llu,"
				"'remote':%llu,'notif':'%s'}",
				(unsigned long long)local, (unsigned long long)remote,
				data),
		   "xfer");
	until(p, x, KVD_FAILED);
	assert_int_equal(metrics_get(metrics, METRIC_NOTIFS_DROPPED), 2);
	for (uint64_t i = 0; i < p->yours.bytes; i++)
		assert_int_equal(p->yours.base[i], 0);
	assert_int_equal(drain_all(p, &answers), sent - 1);
	until(p, start(p, "write", local, remote, ",'notif':'cmVhZA=='"), KVD_SUCCESS);
	expect_notif(p, "read");
	free(data);
}

static void post_again_moves_new_bytes(void **state)
{
	struct pair *p = *state;
	uint64_t x = start(p, "write", grid(p, true), grid(p, false), "");

	until(p, x, KVD_SUCCESS);
	memset(p->mine.base, 0x77, p->mine.bytes);
	cluster_ok(&p->c, p->me, "{'cmd':'xfer.start','xfer':%llu}",
		   (unsigned long long)x);
	until(p, x, KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

static void other_indices_of_the_same_lists_go_elsewhere(void **state)
{
	struct pair *p = *state;
	uint64_t local = grid(p, true), remote = grid(p, false);
	static const char *const picks[] = {",'local_index':[5],'remote_index':[0]",
					    ",'local_index':[6],'remote_index':[1]",
					    ",'local_index':[5],'remote_index':[0]"};

	for (unsigned int i = 0; i < 3; i++) {
		memset(p->yours.base, 0, p->yours.bytes);
		until(p, start(p, "write", local, remote, picks[i]), KVD_SUCCESS);
		assert_int_equal(row_is(p, 0, 5), i != 1);
		assert_int_equal(row_is(p, 1, 6), i == 1);
	}
}

/* The same address is other memory now: a plan of before would read the old. */
static void post_again_after_the_source_moved_reads_the_new(void **state)
{
	struct pair *p = *state;
	uint64_t x = start(p, "write", grid(p, true), grid(p, false), "");
	char name[64];
	uint8_t *shm;
	int fd;

	until(p, x, KVD_SUCCESS);
	cluster_ok(&p->c, p->me, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)p->mine.pool);
	cluster_ok(&p->c, p->me, "{'cmd':'region.unregister','region':%llu}",
		   (unsigned long long)p->mine.region);
	snprintf(name, sizeof(name), "/kvd-test-xfer-%d", (int)getpid());
	fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
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
	cluster_ok(&p->c, p->me, "{'cmd':'xfer.start','xfer':%llu}",
		   (unsigned long long)x);
	until(p, x, KVD_SUCCESS);
	assert_memory_equal(shm + 4096, p->yours.base, p->yours.bytes);
	munmap(shm, p->mine.bytes + 4096);
	close(fd);
}

static void bad_picks_are_refused_in_the_answer(void **state)
{
	struct pair *p = *state;
	unsigned long long l = grid(p, true), r = grid(p, false);

	cluster_refused(&p->c, p->me, "ERANGE",
			"{'cmd':'xfer.start','op':'write','local':%llu,'remote':%llu,"
			"'local_index':[256],'remote_index':[0]}",
			l, r);
	cluster_refused(&p->c, p->me, "EINVAL",
			"{'cmd':'xfer.start','op':'write','local':%llu,'remote':%llu,"
			"'local_index':[1,2],'remote_index':[0]}",
			l, r);
	cluster_refused(&p->c, p->me, "EINVAL",
			"{'cmd':'xfer.start','op':'write','local':%llu,'remote':%llu,"
			"'local_index':[],'remote_index':[]}",
			l, r);
	cluster_refused(&p->c, p->me, "EINVAL",
			"{'cmd':'xfer.start','op':'write','local':%llu,'remote':%llu}", r,
			l);
	cluster_refused(&p->c, p->me, "ENOTFOUND",
			"{'cmd':'xfer.start','op':'write','local':%llu,'remote':%llu}", l,
			r + 1000);
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
	cluster_refused(&p->c, p->me, "EINVAL",
			"{'cmd':'dlist.prep','descs':[['%llu',256,256,0]]}", base);
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

/* "Wrong secret" would send the engine looking where nothing is wrong. */
static void attach_that_cannot_be_served_says_why(void **state)
{
	struct pair *p = *state;
	struct session *third = cluster_engine(&p->c, 1, "third");
	struct transport *transport = p->c.nodes[1].kvd.transports[0];
	const struct transport_ops *ops = transport->ops;
	struct transport_ops broken = *ops;
	struct cache theirs = p->yours;
	char secret[33];

	cluster_cache(&p->c, third, "theirs", 0, &theirs);
	hex(third->secret, 16, secret);
	broken.key_pack = no_key;
	transport->ops = &broken;
	cluster_refused(&p->c, p->me, "EIMPORT",
			"{'cmd':'peer.attach','endpoint':'%s','session':'%llu',"
			"'secret':'%s'}",
			p->c.nodes[1].endpoint, (unsigned long long)third->epoch, secret);
	transport->ops = ops;
	attach_to(p, p->me, third, 1);
	cache_close(&theirs);
}

static void unregistered_memory_cannot_be_written(void **state)
{
	struct pair *p = *state;
	uint64_t local = grid(p, true), remote = grid(p, false), x;

	x = start(p, "write", local, remote, ",'local_index':[0],'remote_index':[0]");
	until(p, x, KVD_SUCCESS);
	cluster_ok(&p->c, p->you, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)p->yours.pool);
	cluster_ok(&p->c, p->you, "{'cmd':'region.unregister','region':%llu}",
		   (unsigned long long)p->yours.region);
	memset(p->yours.base, 0, p->yours.bytes);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cluster_refused(&p->c, p->me, "ENOTFOUND",
			"{'cmd':'xfer.start','op':'write','local':%llu,'remote':%llu}",
			(unsigned long long)local, (unsigned long long)remote);
	assert_int_equal(p->yours.base[0], 0);
}

static void unregister_in_flight_waits_for_quiet(void **state)
{
	struct pair *p = *state;
	uint8_t *before = malloc(p->yours.bytes);
	uint64_t x;

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	cluster_ok(&p->c, p->you, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)p->yours.pool);
	x = start(p, "write", grid(p, true), grid(p, false), "");
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
	assert_int_equal(state_of(p, x), KVD_TRANSFERRING);
	cluster_ok(&p->c, p->you, "{'cmd':'region.unregister','region':%llu}",
		   (unsigned long long)p->yours.region);
	memcpy(before, p->yours.base, p->yours.bytes);
	until(p, x, KVD_FAILED);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_memory_equal(before, p->yours.base, p->yours.bytes);
	free(before);
}

static void cancel_and_release_are_fenced(void **state)
{
	struct pair *p = *state;
	uint8_t *before = malloc(p->mine.bytes);
	uint64_t x;

	memset(p->yours.base, 0x5a, p->yours.bytes);
	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	x = start(p, "read", grid(p, true), grid(p, false), "");
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
	cluster_refused(&p->c, p->me, "EBUSY", "{'cmd':'xfer.release','xfer':%llu}",
			(unsigned long long)x);
	until(p, x, KVD_FAILED);
	memcpy(before, p->mine.base, p->mine.bytes);
	cluster_ok(&p->c, p->me, "{'cmd':'xfer.release','xfer':%llu}",
		   (unsigned long long)x);
	cluster_refused(&p->c, p->me, "ENOTFOUND", "{'cmd':'xfer.state','xfer':%llu}",
			(unsigned long long)x);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_memory_equal(before, p->mine.base, p->mine.bytes);
	free(before);
}

static void target_session_end_fails_transfers(void **state)
{
	struct pair *p = *state;
	uint64_t local = grid(p, true), remote = grid(p, false), x;

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	x = start(p, "write", local, remote, "");
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
	cluster_engine_dies(&p->c, p->you);
	until(p, x, KVD_FAILED);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cluster_refused(&p->c, p->me, "ESESSION",
			"{'cmd':'xfer.start','op':'write','local':%llu,'remote':%llu}",
			(unsigned long long)local, (unsigned long long)remote);
}

static void next_engine(struct pair *p)
{
	cluster_engine_dies(&p->c, p->you);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cache_close(&p->yours);
	p->you = cluster_engine(&p->c, 1, "you");
	cluster_cache(&p->c, p->you, "yours", 0, &p->yours);
	p->attach = attach_to(p, p->me, p->you, 1);
}

/* An own list is sent to a daemon once, for whichever of its engines it was. */
static void own_list_serves_the_next_engine_there(void **state)
{
	struct pair *p = *state;
	uint64_t local = grid(p, true);

	until(p, start(p, "write", local, grid(p, false), ""), KVD_SUCCESS);
	next_engine(p);
	until(p, start(p, "write", local, grid(p, false), ""), KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

static void list_lost_on_its_way_is_sent_again(void **state)
{
	struct pair *p = *state;
	uint64_t local = grid(p, true), x;

	fake_hub_profile(p->c.bytes)->delay_min_ns = 20 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	x = start(p, "write", local, grid(p, false), "");
	cluster_run(&p->c, 5 * LOOP_NS_PER_MS); /* the list has left, and is not there */
	assert_true(list_empty(&p->c.nodes[1].kvd.xfers->shadows));
	next_engine(p);
	assert_int_equal(state_of(p, x), KVD_FAILED);
	assert_true(list_empty(&p->c.nodes[1].kvd.xfers->shadows));
	until(p, start(p, "write", local, grid(p, false), ""), KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

static void initiator_end_leaves_no_lists_there(void **state)
{
	struct pair *p = *state;
	const struct list *kept = &p->c.nodes[1].kvd.xfers->shadows;

	until(p, start(p, "write", grid(p, true), grid(p, false), ""), KVD_SUCCESS);
	assert_false(list_empty(kept));
	cluster_engine_dies(&p->c, p->me);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_true(list_empty(kept));
}

static void initiator_end_in_flight_leaves_nothing(void **state)
{
	struct pair *p = *state;

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	start(p, "write", grid(p, true), grid(p, false), "");
	start(p, "read", grid(p, true), grid(p, false), "");
	cluster_run(&p->c, 60 * LOOP_NS_PER_MS);
	cluster_engine_dies(&p->c, p->me);
	cluster_run(&p->c, 2 * LOOP_NS_PER_S);
	assert_int_equal(p->c.nodes[0].kvd.session_count, 0);
}

/* What was said last is still on its way when the session that said it ends. */
static void end_with_notes_under_way_leaves_nothing(void **state)
{
	struct pair *p = *state;
	uint64_t local = grid(p, true), remote = grid(p, false), x;

	x = start(p, "write", local, remote, "");
	until(p, x, KVD_SUCCESS);
	fake_hub_profile(p->c.bytes)->delay_min_ns = 50 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 90 * LOOP_NS_PER_MS;
	cluster_ok(&p->c, p->me, "{'cmd':'xfer.release','xfer':%llu}",
		   (unsigned long long)x);
	cluster_ok(&p->c, p->me, "{'cmd':'dlist.free','dlist':%llu}",
		   (unsigned long long)local);
	cluster_ok(&p->c, p->me, "{'cmd':'dlist.free','dlist':%llu}",
		   (unsigned long long)remote);
	cluster_engine_dies(&p->c, p->me);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(p->c.nodes[0].kvd.session_count, 0);
}

/* Blocks of memory, on both sides, of a transfer that has been taken there. */
static int64_t blocks_of(struct pair *p, uint64_t local, uint64_t remote,
			 const char *rest)
{
	struct fake_profile *profile = fake_hub_profile(p->c.bytes), was = *profile;
	int64_t blocks = mem_live();
	uint64_t x;

	profile->delay_min_ns = profile->delay_max_ns = 100 * LOOP_NS_PER_MS;
	x = start(p, "write", local, remote, rest);
	cluster_run(&p->c, 150 * LOOP_NS_PER_MS);
	assert_int_equal(state_of(p, x), KVD_TRANSFERRING);
	assert_false(list_empty(&p->c.nodes[1].kvd.xfers->serving));
	blocks = mem_live() - blocks;
	*profile = was;
	until(p, x, KVD_SUCCESS);
	cluster_ok(&p->c, p->me, "{'cmd':'xfer.release','xfer':%llu}",
		   (unsigned long long)x);
	cluster_run(&p->c, LOOP_NS_PER_S);
	return blocks;
}

/* Runs of a few bytes, spelled out, are long: the target has them while it plans. */
static void indices_are_kept_by_who_gave_them_only(void **state)
{
	struct pair *p = *state;
	uint64_t local = rows(p, true, 2), remote = rows(p, false, 2);
	int64_t all, some;

	/* no two alike in a row: the target keeps the last one's plan */
	blocks_of(p, local, remote, ",'local_index':[1,0],'remote_index':[1,0]");
	all = blocks_of(p, local, remote, "");
	some = blocks_of(p, local, remote, ",'local_index':[0,1],'remote_index':[0,1]");
	assert_int_equal(some - all, 2);
}

/* More rows than the loop reads itself: a helper does. */
static void write_by_many_indices_lands_where_told(void **state)
{
	struct pair *p = *state;
	const char *runs = "[[0,256],[0,256],[0,256],[0,256],[0,256],[0,256]]";
	char rest[160];

	snprintf(rest, sizeof(rest), ",'local_index':%s,'remote_index':%s", runs, runs);
	until(p, start(p, "write", grid(p, true), grid(p, false), rest), KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

/* The other daemon has taken its session's regions back, and tells new ones soon. */
static void list_of_unreachable_session_is_refused(void **state)
{
	struct pair *p = *state;
	struct attach *attach = attach_find(p->me->xfers, p->attach);
	struct remote_pool *pool = attach->pool;

	attach->pool = NULL;
	cluster_refused(&p->c, p->me, "EPEER",
			"{'cmd':'dlist.prep','peer':%llu,'descs':[['%llu',256]]}",
			(unsigned long long)p->attach,
			(unsigned long long)(uintptr_t)p->yours.base);
	attach->pool = pool;
	until(p, start(p, "write", grid(p, true), grid(p, false), ""), KVD_SUCCESS);
}

static void descriptor_of_no_rows_is_refused(void **state)
{
	struct pair *p = *state;

	cluster_refused(&p->c, p->me, "EINVAL",
			"{'cmd':'dlist.prep','descs':[['%llu',256,256,0]]}",
			(unsigned long long)(uintptr_t)p->mine.base);
	cluster_refused(&p->c, p->me, "EINVAL", "{'cmd':'dlist.prep','descs':[]}");
}

static void lost_peer_fails_transfers(void **state)
{
	struct pair *p = *state;
	uint64_t x;

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->window = 1;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	x = start(p, "write", grid(p, true), grid(p, false), "");
	cluster_run(&p->c, 60 * LOOP_NS_PER_MS);
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint,
			  true);
	until(p, x, KVD_FAILED);
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint,
			  false);
	cluster_run(&p->c, 5 * LOOP_NS_PER_S);
	p->attach = attach_to(p, p->me, p->you, 1);
	fake_hub_profile(p->c.bytes)->window = 16;
	x = start(p, "write", grid(p, true), grid(p, false), "");
	until(p, x, KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

/* What the target's daemon knows of the initiator's session. */
static struct remote_pool *known_there(const struct pair *p)
{
	struct remote *remote = list_first(handshake_remotes(p->c.nodes[1].kvd.handshake),
					   struct remote, link);

	return handshake_pool_by_id(remote, p->me->epoch);
}

static void add_memory(struct pair *p, struct cache *more)
{
	*more = p->mine;
	cluster_cache(&p->c, p->me, "more", 1, more);
}

static void take_memory(struct pair *p, const struct cache *more)
{
	cluster_ok(&p->c, p->me, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)more->pool);
	cluster_ok(&p->c, p->me, "{'cmd':'region.unregister','region':%llu}",
		   (unsigned long long)more->region);
}

/* So that it is mapped there by the time that a transfer needs it. */
static void region_of_attached_session_is_told_at_once(void **state)
{
	struct pair *p = *state;
	struct cache more;

	assert_int_equal(known_there(p)->region_count, 1);
	add_memory(p, &more);
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
	assert_int_equal(known_there(p)->region_count, 2);
	assert_true(known_there(p)->ready);
	cache_close(&more);
}

static void regions_beyond_a_few_are_told_when_needed(void **state)
{
	struct cache more[XFER_EAGER_REGIONS];
	struct pair *p = *state;

	for (unsigned int i = 0; i < XFER_EAGER_REGIONS; i++) {
		add_memory(p, &more[i]);
		cluster_ok(&p->c, p->me, "{'cmd':'pool.unregister','pool':%llu}",
			   (unsigned long long)more[i].pool);
		cluster_run(&p->c, 20 * LOOP_NS_PER_MS);
	}
	assert_int_equal(known_there(p)->region_count, XFER_EAGER_REGIONS);
	until(p, start(p, "write", grid(p, true), grid(p, false), ""), KVD_SUCCESS);
	assert_int_equal(known_there(p)->region_count, XFER_EAGER_REGIONS + 1);
	for (unsigned int i = 0; i < XFER_EAGER_REGIONS; i++)
		cache_close(&more[i]);
}

/* To make a key usable may mean to map gigabytes. */
static void memory_told_again_keeps_its_key(void **state)
{
	struct pair *p = *state;
	struct cache more;
	uint64_t x;

	add_memory(p, &more);
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->key_ns = 3600 * LOOP_NS_PER_S;
	fake_hub_profile(p->c.bytes)->need_keys = true;
	x = start(p, "write", grid(p, true), grid(p, false), "");
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
	assert_int_equal(state_of(p, x), KVD_TRANSFERRING);
	take_memory(p, &more); /* the transfer holds the pool of before */
	cluster_run(&p->c, 200 * LOOP_NS_PER_MS);
	assert_int_equal(known_there(p)->region_count, 1);
	assert_true(known_there(p)->ready);
	until(p, x, KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
	memset(p->yours.base, 0, p->yours.bytes);
	cluster_ok(&p->c, p->me, "{'cmd':'xfer.start','xfer':%llu}",
		   (unsigned long long)x);
	until(p, x, KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
	cache_close(&more);
}

/* Its answer is for whoever has the key by then. */
static void key_on_its_way_goes_to_the_next_list(void **state)
{
	struct pair *p = *state;
	struct cache more, most;

	fake_hub_profile(p->c.bytes)->key_ns = 10 * LOOP_NS_PER_S;
	add_memory(p, &more);
	cluster_run(&p->c, 6 * LOOP_NS_PER_S);
	assert_false(known_there(p)->ready);
	fake_hub_profile(p->c.bytes)->key_ns = LOOP_NS_PER_MS;
	add_memory(p, &most);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(known_there(p)->region_count, 3);
	assert_false(known_there(p)->ready); /* the first one's is still asked for */
	cluster_run(&p->c, 4 * LOOP_NS_PER_S);
	assert_true(known_there(p)->ready);
	cache_close(&more);
	cache_close(&most);
}

/* All of the lists are held by something when the peer goes. */
static void lists_that_lend_keys_end_with_their_peer(void **state)
{
	struct cache more[4];
	struct pair *p = *state;
	uint64_t x[4];

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 50 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 90 * LOOP_NS_PER_MS;
	for (unsigned int i = 0; i < 4; i++) {
		x[i] = start(p, "write", grid(p, true), grid(p, false), "");
		cluster_run(&p->c, 300 * LOOP_NS_PER_MS);
		add_memory(p, &more[i]);
		cluster_run(&p->c, 300 * LOOP_NS_PER_MS);
	}
	assert_non_null(known_there(p));
	fake_link_cut(p->c.nodes[0].kvd.transports[0], p->c.nodes[1].kvd.transports[0]);
	cluster_run(&p->c, LOOP_NS_PER_S);
	for (unsigned int i = 0; i < 4; i++)
		until(p, x[i], KVD_FAILED);
	for (unsigned int i = 0; i < 4; i++)
		cache_close(&more[i]);
}

/* A helper still searched a list of the past when all else of that peer was gone: with
 * the list goes its heir, and with that the peer. */
static void last_list_that_lends_keys_ends_its_peer_once(void **state)
{
	struct pair *p = *state;
	struct remote_pool *list = known_there(p);
	struct remote *remote = list->remote;
	struct cache more;

	handshake_pool_use(list);
	add_memory(p, &more);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_ptr_equal(list->heir, known_there(p));
	cluster_crash(&p->c, 0, MEM_CRASH_KILLED);
	cluster_run(&p->c, 5 * LOOP_NS_PER_S);
	assert_null(remote->xp);
	assert_int_equal(remote->reaches, 0);
	handshake_pool_unuse(list);
	cache_close(&more);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
#define LOOPBACK(name) cmocka_unit_test_setup_teardown(name, setup_one_daemon, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(write_by_index_lands_where_told),
		LOOPBACK(write_by_index_lands_where_told),
		CASE(read_all_brings_everything),
		LOOPBACK(read_all_brings_everything),
		CASE(read_checked_at_destination_succeeds),
		CASE(repeated_and_overlapping_rows_are_legal),
		CASE(write_notification_comes_with_its_data),
		CASE(read_notification_and_bare_ones_arrive_in_order),
		CASE(notifications_are_handed_over_in_answers_that_fit),
		CASE(write_whose_notification_finds_no_place_is_refused),
		CASE(post_again_moves_new_bytes),
		CASE(other_indices_of_the_same_lists_go_elsewhere),
		LOOPBACK(other_indices_of_the_same_lists_go_elsewhere),
		CASE(post_again_after_the_source_moved_reads_the_new),
		CASE(bad_picks_are_refused_in_the_answer),
		CASE(bad_lists_are_refused_in_the_answer),
		CASE(wrong_secret_is_refused),
		CASE(attach_that_cannot_be_served_says_why),
		CASE(unregistered_memory_cannot_be_written),
		LOOPBACK(unregistered_memory_cannot_be_written),
		CASE(unregister_in_flight_waits_for_quiet),
		CASE(cancel_and_release_are_fenced),
		CASE(target_session_end_fails_transfers),
		CASE(own_list_serves_the_next_engine_there),
		CASE(list_lost_on_its_way_is_sent_again),
		CASE(initiator_end_leaves_no_lists_there),
		CASE(initiator_end_in_flight_leaves_nothing),
		CASE(end_with_notes_under_way_leaves_nothing),
		CASE(indices_are_kept_by_who_gave_them_only),
		CASE(lost_peer_fails_transfers),
		CASE(write_by_many_indices_lands_where_told),
		CASE(list_of_unreachable_session_is_refused),
		CASE(descriptor_of_no_rows_is_refused),
		CASE(region_of_attached_session_is_told_at_once),
		CASE(regions_beyond_a_few_are_told_when_needed),
		CASE(memory_told_again_keeps_its_key),
		CASE(key_on_its_way_goes_to_the_next_list),
		CASE(lists_that_lend_keys_end_with_their_peer),
		CASE(last_list_that_lends_keys_ends_its_peer_once),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
