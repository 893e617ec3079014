/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lists that other daemons keep here: each daemon has its limits, and the cost of one
 * more list does not grow with their number. In-process cluster; the lists are injected
 * where requests of a data line arrive.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/handshake/handshake.h"
#include "daemon/xfer/xfer.h"
#include "daemon/xfer/xfer_impl.h"
#include "tests/lib/accounts.h"
#include "tests/lib/cluster.h"

/* nodes 1 and 2 have lists at node 0 */
struct trio {
	struct cluster c;
	struct session *target;
	struct remote *from[2];
};

/* ---- requests without a line ---- */

static enum err_code answered;

static void on_land(struct xp_inbound *in, const struct xp_sides *sides,
		    const struct err *err)
{
	(void)in;
	(void)sides;
	answered = err ? err->code : ERR_OK;
}

static struct transport_ops no_line;

static enum err_code request(struct remote *remote, enum request_kind kind,
			     const struct cursor *written)
{
	const struct transport_ops *ops = remote->transport->ops;
	struct xp_inbound in = {
		.kind = XP_WRITE, .header = written->base, .header_len = written->pos};
	struct cursor header;

	cursor_read(&header, written->base, written->pos);
	remote->transport->ops = &no_line;
	xfers_on_request(remote, &in, kind, &header);
	remote->transport->ops = ops;
	return answered;
}

/* A list of `total` entries, of which the first is sent. */
static enum err_code put_list(struct trio *p, struct remote *remote, uint64_t gid,
			      uint32_t total)
{
	uint8_t buf[128];
	struct cursor out;

	cursor_write(&out, buf, sizeof(buf));
	cursor_put_u64(&out, gid);
	cursor_put_u8(&out, 1);
	cursor_put_u64(&out, 77); /* the initiator's session */
	cursor_put_u64(&out, p->target->epoch);
	cursor_put_bytes(&out, p->target->secret, 16);
	cursor_put_u32(&out, total);
	cursor_put_u32(&out, 0);
	cursor_put_u32(&out, 1);
	cursor_put_u64(&out, 4096);
	cursor_put_u64(&out, 8);
	cursor_put_u64(&out, 8);
	cursor_put_u64(&out, 1);
	assert_false(out.bad);
	return request(remote, REQUEST_DLIST, &out);
}

static enum err_code free_list(struct remote *remote, uint64_t gid)
{
	uint8_t buf[16];
	struct cursor out;

	cursor_write(&out, buf, sizeof(buf));
	cursor_put_u64(&out, gid);
	return request(remote, REQUEST_DLIST_FREE, &out);
}

static int setup(void **state)
{
	struct trio *p = calloc(1, sizeof(*p));
	struct remote *remote;
	unsigned int n = 0;

	no_line = fake_ops;
	no_line.land = on_land;
	cluster_new(&p->c, 1, 3);
	p->target = cluster_engine(&p->c, 0, "target");
	for (unsigned int i = 1; i < 3; i++) {
		struct session *other = cluster_engine(&p->c, i, "other");

		cluster_ok(&p->c, other, "{'cmd':'peer.connect','endpoint':'%s'}",
			   p->c.nodes[0].endpoint);
	}
	cluster_run(&p->c, LOOP_NS_PER_S);
	list_foreach(remote, handshake_remotes(p->c.nodes[0].kvd.handshake), link)
		p->from[n++] = remote;
	assert_int_equal(n, 2);
	*state = p;
	return 0;
}

static int teardown(void **state)
{
	struct trio *p = *state;

	cluster_free(&p->c);
	free(p);
	return 0;
}

/* ---- caps ---- */

static uint64_t lists_of(const struct remote *remote)
{
	return remote->account->objects[ACCOUNT_LISTS];
}

static void lists_are_charged_to_owning_daemon(void **state)
{
	struct trio *p = *state;
	struct charge filler = {0};

	account_leave(p->from[0]->account, 3 * xfer_list_bytes(1) + 8, &filler);
	for (uint64_t gid = 1; gid <= 3; gid++)
		assert_int_equal(put_list(p, p->from[0], gid, 1), ERR_OK);
	assert_int_equal(put_list(p, p->from[0], 4, 1), ERR_LIMIT);
	assert_int_equal(put_list(p, p->from[0], 2, 1), ERR_OK); /* sent again */
	assert_int_equal(put_list(p, p->from[0], 4, 1), ERR_LIMIT);
	assert_int_equal(free_list(p->from[0], 3), ERR_OK);
	assert_int_equal(free_list(p->from[0], 3), ERR_OK); /* twice frees one */
	assert_int_equal(put_list(p, p->from[0], 4, 1), ERR_OK);
	assert_int_equal(put_list(p, p->from[0], 5, 1), ERR_LIMIT);
	assert_int_equal(put_list(p, p->from[1], 4, 1), ERR_OK); /* the last eighth */
	charge_drop(&filler);
	assert_int_equal(lists_of(p->from[0]), 3);
	assert_int_equal(lists_of(p->from[1]), 1);
}

static void entries_are_charged_before_arrival(void **state)
{
	struct trio *p = *state;
	const uint32_t part = DLIST_ENTRIES_MAX;
	struct charge filler = {0};

	account_leave(p->from[0]->account, 2 * xfer_list_bytes(part), &filler);
	assert_int_equal(put_list(p, p->from[0], 1, part), ERR_OK);
	assert_int_equal(put_list(p, p->from[0], 2, part), ERR_OK);
	assert_int_equal(put_list(p, p->from[0], 3, 1), ERR_LIMIT);
	assert_int_equal(free_list(p->from[0], 1), ERR_OK);
	assert_int_equal(put_list(p, p->from[0], 3, part), ERR_OK);
	charge_drop(&filler);
}

/* A lost daemon has no lists here any more, and its next instance has its own limits. */
static void lists_are_freed_with_their_daemon(void **state)
{
	struct trio *p = *state;

	for (uint64_t gid = 1; gid <= 100; gid++) {
		assert_int_equal(put_list(p, p->from[0], gid, 2), ERR_OK);
		assert_int_equal(put_list(p, p->from[1], gid, 2), ERR_OK);
	}
	p->from[0]->reaches++;
	fake_link_cut(p->from[0]->transport, fake_hub_node(p->c.bytes, 1));
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(lists_of(p->from[0]), 0);
	assert_int_equal(lists_of(p->from[1]), 100);
	handshake_release(p->from[0]);
}

/* ---- cost ---- */

/* The least that a list of some cost, each 100 of which are taken together. */
static uint64_t cost_ns(struct trio *p, struct remote *remote, uint64_t first)
{
	uint64_t least = UINT64_MAX;

	for (unsigned int n = 0; n < 10; n++) {
		uint64_t begun = clock_of(CLOCK_THREAD_CPUTIME_ID), took;

		for (uint64_t i = 0; i < 100; i++)
			put_list(p, remote, first + 100 * n + i, 1);
		took = clock_of(CLOCK_THREAD_CPUTIME_ID) - begun;
		least = took < least ? took : least;
	}
	return least;
}

static void list_cost_is_independent_of_count(void **state)
{
	struct trio *p = *state;
	uint64_t few = cost_ns(p, p->from[1], 1), many;

	for (uint64_t gid = 1; gid <= 60000; gid++)
		assert_int_equal(put_list(p, p->from[0], gid, 1), ERR_OK);
	many = cost_ns(p, p->from[1], 5000);
	if (many > 8 * few)
		fail_msg("100 lists take %ju ns beside 60000, %ju ns beside none",
			 (uintmax_t)many, (uintmax_t)few);
}

/* The memory left when planning started is the reason, even if others have freed
 * theirs meanwhile, so that it would fit now. */
static void plan_without_memory_names_it(void **state)
{
	struct trio *p = *state;
	struct account *account = p->from[0]->account;
	struct charge filler = {0};
	struct err err;
	uint64_t left;

	account_leave(account, 1000, &filler);
	left = account_room(account);
	charge_drop(&filler);
	assert_true(account_room(account) > left);
	err_set(&err, ERR_LIMIT, "plan: more than 40 runs");
	xfer_plan_lacks(account, left, &err);
	assert_int_equal(err.code, ERR_LIMIT);
	assert_non_null(strstr(err.text, "plans: 1001 bytes more"));
	err_set(&err, ERR_LIMIT, "plan: more than 40 runs");
	xfer_plan_lacks(account, UINT64_MAX, &err); /* of memory there was any */
	assert_string_equal(err.text, "plan: more than 40 runs");
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(lists_are_charged_to_owning_daemon),
		CASE(entries_are_charged_before_arrival),
		CASE(lists_are_freed_with_their_daemon),
		CASE(list_cost_is_independent_of_count),
		CASE(plan_without_memory_names_it),
	};

	return cmocka_run_group_tests_name("xfer_caps", tests, NULL, NULL);
}
