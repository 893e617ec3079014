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
#include "proto/kvd_ring.h"
#include "proto/kvd_status.h"
#include "tests/lib/accounts.h"
#include "tests/lib/xfer_pair.h"

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
	pair_grid(p, true);			    /* there is a layer for them */
	pair_submit(p, &entry, rows, sizeof(rows)); /* and its part of the status page */
	cluster_run(&p->c, LOOP_NS_PER_MS);
	pair_fails(p, KVD_RING_IDS + entry.slot++, "ENOTFOUND", "");
	account_leave(p->me->account, 2000 * sizeof(struct dlist_entry) - 1, &filler);
	pair_submit(p, &entry, rows, sizeof(rows));
	cluster_run(&p->c, LOOP_NS_PER_MS);
	pair_fails(p, KVD_RING_IDS + entry.slot++, "ELIMIT", "");
	charge_less(&filler, 1);
	before = held(p);
	pair_submit(p, &entry, rows, sizeof(rows));
	cluster_run(&p->c, LOOP_NS_PER_MS);
	pair_fails(p, KVD_RING_IDS + entry.slot, "ENOTFOUND", "");
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
	pair_submit(p, &entry, picks, sizeof(picks));
	pair_fails(p, KVD_RING_IDS + entry.slot++, "ELIMIT", "");
	charge_drop(&filler);
	pair_submit(p, &entry, picks, sizeof(picks));
	pair_fails(p, KVD_RING_IDS + entry.slot, "ERANGE", "");
	assert_int_equal(held(p), before);
}

/* A post may carry other words than the one before: they are charged, too. */
static void status_words_over_the_limit_are_refused(void **state)
{
	struct pair *p = *state;
	uint64_t x = pair_start(p, "write", pair_grid(p, true), pair_grid(p, false),
				&(struct pair_args){.notif = "hi"});
	struct charge filler = {0};

	pair_until(p, x, KVD_SUCCESS);
	account_leave(p->me->account, 0, &filler);
	pair_again(p, x, "hi!!");
	pair_fails(p, x, "ELIMIT", "");
	pair_again(p, x, "ho"); /* as long as the last one */
	charge_drop(&filler);
	pair_until(p, x, KVD_SUCCESS);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, pair_setup, pair_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(list_over_the_cap_is_not_read),
		CASE(picks_over_the_cap_are_not_read),
		CASE(status_words_over_the_limit_are_refused),
	};

	return cmocka_run_group_tests_name("ring_ops", tests, NULL, NULL);
}
