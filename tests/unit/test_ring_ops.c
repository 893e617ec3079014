/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Entries of the submission ring, given by the socket (xfer.submit): what a session
 * may have the daemon read is bounded before it is read. integration/live_ring.c has
 * the ring itself.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/session/session.h"
#include "daemon/xfer/xfer_impl.h"
#include "proto/base64.h"
#include "proto/kvd_ring.h"
#include "proto/kvd_status.h"
#include "tests/lib/accounts.h"
#include "tests/lib/xfer_pair.h"

static void submit(struct pair *p, const struct kvd_ring_entry *entry, const void *data,
		   size_t bytes)
{
	char text[BASE64_CHARS(sizeof(*entry)) + 1];
	char *payload = calloc(1, BASE64_CHARS(bytes) + 1);

	base64_encode(entry, sizeof(*entry), text);
	base64_encode(data, bytes, payload);
	cluster_ok(&p->c, p->me, "{'cmd':'xfer.submit','entry':'%s','data':'%s'}", text,
		   payload);
	free(payload);
}

/* What the slot's object came to: the code of its error, "" when there is none. */
static void expect(struct pair *p, uint32_t slot, const char *code)
{
	cJSON *answer = cluster_call(&p->c, p->me, "{'cmd':'xfer.state','xfer':%llu}",
				     (unsigned long long)KVD_RING_IDS + slot);
	const cJSON *error = cJSON_GetObjectItemCaseSensitive(answer, "error");
	const cJSON *got = cJSON_GetObjectItemCaseSensitive(error, "code");

	assert_string_equal(got ? got->valuestring : "", code);
	cJSON_Delete(answer);
}

/* Besides the parts of the status page, which stay. */
static uint64_t held(const struct pair *p)
{
	return p->me->account->total - p->me->account->bytes[ACCOUNT_SESSIONS];
}

/* Both are wrong in a way that only reading shows. */
static void list_over_the_cap_is_not_read(void **state)
{
	uint64_t rows[2000][2];
	struct kvd_ring_entry entry = {.op = KVD_RING_LIST,
				       .slot = SESSION_SLOTS,
				       .gen = 1,
				       .n0 = 2000,
				       .n1 = 2};
	struct pair *p = *state;
	struct charge filler = {0};
	uint64_t before;

	for (unsigned int i = 0; i < 2000; i++) { /* no memory of this session */
		rows[i][0] = 4096 + 1000 * i;
		rows[i][1] = 64;
	}
	pair_grid(p, true);		       /* there is a layer for them */
	submit(p, &entry, rows, sizeof(rows)); /* and its part of the status page */
	cluster_run(&p->c, LOOP_NS_PER_MS);
	expect(p, entry.slot++, "ENOTFOUND");
	account_leave(p->me->account, 2000 * sizeof(struct dlist_entry) - 1, &filler);
	submit(p, &entry, rows, sizeof(rows));
	cluster_run(&p->c, LOOP_NS_PER_MS);
	expect(p, entry.slot++, "ELIMIT");
	charge_less(&filler, 1);
	before = held(p);
	submit(p, &entry, rows, sizeof(rows));
	cluster_run(&p->c, LOOP_NS_PER_MS);
	expect(p, entry.slot, "ENOTFOUND");
	/* what was charged for reading is given back */
	assert_int_equal(held(p), before);
	charge_drop(&filler);
}

static void picks_over_the_cap_are_not_read(void **state)
{
	const uint32_t picks[2] = {0, 1000}; /* of 256 */
	struct pair *p = *state;
	struct kvd_ring_entry entry = {.op = KVD_RING_XFER,
				       .slot = SESSION_SLOTS,
				       .gen = 1,
				       .n0 = 1,
				       .n1 = 1,
				       .a = pair_grid(p, true),
				       .b = pair_grid(p, false)};
	uint64_t before = held(p);
	struct charge filler = {0};

	account_leave(p->me->account, 7, &filler);
	submit(p, &entry, picks, sizeof(picks));
	expect(p, entry.slot++, "ELIMIT");
	charge_drop(&filler);
	submit(p, &entry, picks, sizeof(picks));
	expect(p, entry.slot, "ERANGE");
	assert_int_equal(held(p), before);
}

/* A post may carry other words than the one before: they are charged, too. */
static void words_over_the_cap_are_refused(void **state)
{
	struct pair *p = *state;
	uint64_t x = pair_start(p, "write", pair_grid(p, true), pair_grid(p, false),
				",'notif':'aGk='");
	struct charge filler = {0};

	pair_until(p, x, KVD_SUCCESS);
	account_leave(p->me->account, 0, &filler);
	cluster_refused(&p->c, p->me, "ELIMIT",
			"{'cmd':'xfer.start','xfer':%llu,'notif':'aGkhIQ=='}",
			(unsigned long long)x);
	cluster_ok(&p->c, p->me, "{'cmd':'xfer.start','xfer':%llu,'notif':'aG8='}",
		   (unsigned long long)x); /* as long as the last one */
	charge_drop(&filler);
	pair_until(p, x, KVD_SUCCESS);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, pair_setup, pair_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(list_over_the_cap_is_not_read),
		CASE(picks_over_the_cap_are_not_read),
		CASE(words_over_the_cap_are_refused),
	};

	return cmocka_run_group_tests_name("ring_ops", tests, NULL, NULL);
}
