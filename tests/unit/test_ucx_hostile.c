/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ucx: what a hostile peer may send. a forges frames with the backend's own
 * sender; b must lose a, by the right rule, and serve the next peer.
 */
#include "tests/lib/ucx_pair.h"

#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define TRIES 50

/* ---- a hostile peer: a forges, b must lose a and nothing else ---- */

static void forge(struct ucx_frame frame, const void *payload, size_t len)
{
	struct ucx_peer *peer = (struct ucx_peer *)up_a.peer;

	ucx_send_frame(ucx_send_new(peer), &frame, NULL, NULL, payload, len);
}

static void assert_thrown_out(const char *words)
{
	await(up_b.lost);
	assert_int_equal(up_b.lost_why.code, ERR_PROTO);
	if (!strstr(up_b.lost_why.text, words))
		fail_msg("\"%s\" is not in \"%s\"", words, up_b.lost_why.text);
	await(up_a.lost);
	up_rejoin();
}

static void frames_out_of_rule_lose_the_peer(void **state)
{
	static uint8_t bytes[20000];

	(void)state;
	forge((struct ucx_frame){.type = UCX_GO, .id = 5}, NULL, 0);
	assert_thrown_out("unknown transfer");
	forge((struct ucx_frame){.type = UCX_DONE, .id = 1}, NULL, 0);
	assert_thrown_out("unknown transfer");
	forge((struct ucx_frame){.type = UCX_CANCEL, .id = 1}, NULL, 0);
	assert_thrown_out("never requested");
	forge((struct ucx_frame){.type = UCX_GO, .id = 1}, bytes, 100);
	assert_thrown_out("100 bytes");
	forge((struct ucx_frame){.type = UCX_DATA, .id = 1, .length = 9}, bytes, 9);
	assert_thrown_out("never requested");
	forge((struct ucx_frame){.type = UCX_SERVE, .id = 1, .length = 9}, bytes, 9);
	assert_thrown_out("never requested");
	forge((struct ucx_frame){.type = UCX_REQUEST, .id = 1, .code = 9}, NULL, 0);
	assert_thrown_out("kind 9");
	forge((struct ucx_frame){.type = UCX_REQUEST, .id = 0}, NULL, 0);
	assert_thrown_out("request 0");
	forge((struct ucx_frame){.type = UCX_HELLO, .offset = 1}, NULL, 0);
	assert_thrown_out("hello");
	for (int i = 0; i < 65; i++)
		forge((struct ucx_frame){.type = UCX_HELLO, .offset = MIB}, NULL, 0);
	assert_thrown_out("number 65");
	((struct ucx_peer *)up_a.peer)->out_seq += 3 * UCX_ORDER_MAX;
	forge((struct ucx_frame){.type = UCX_GO, .id = 1}, NULL, 0);
	assert_thrown_out("expected");
	((struct ucx_peer *)up_a.peer)->out_seq += 5;
	forge((struct ucx_frame){.type = UCX_GO, .id = 1}, NULL, 0);
	((struct ucx_peer *)up_a.peer)->out_seq--;
	forge((struct ucx_frame){.type = UCX_GO, .id = 1}, NULL, 0);
	assert_thrown_out("twice");
}

/* b expects `expect` bytes of transfer 1 from a; a sends one slice. False: a has thrown b
 * out first, for its GO to a transfer that a does not know. */
static bool forge_slice_once(uint64_t expect, uint64_t offset, uint64_t announced,
			     size_t len, unsigned int times)
{
	static uint8_t bytes[200000];
	struct plan_run run = {.len = expect, .count = 1};
	struct plan *plan = up_plan(&run, 1);
	struct up_place dst;

	up_place_init(&dst, &up_b, 4 * MIB, false);
	memset(dst.memory->base, 0, 4 * MIB);
	up_b.answer = ANSWER_LAND;
	up_b.sides = (struct xp_sides){.plan = plan, .dst = &dst.buffer, .dst_count = 1};
	forge((struct ucx_frame){.type = UCX_REQUEST, .id = 1, .length = expect}, NULL,
	      0);
	/* its GO finds no transfer of a's, which would throw b out: not now */
	((struct ucx_peer *)up_a.peer)->in_seq = 1000;
	await(up_b.requests);
	for (unsigned int i = 0; i < times; i++)
		forge((struct ucx_frame){.type = UCX_DATA,
					 .id = 1,
					 .offset = offset,
					 .length = announced},
		      bytes, len);
	await(up_b.lost);
	up_place_fini(&dst, &up_b);
	plan_free(plan);
	up_b.requests = 0;
	return up_b.lost_why.code != ERR_PEER;
}

static void forge_slice(uint64_t expect, uint64_t offset, uint64_t announced, size_t len,
			unsigned int times)
{
	for (int i = 0; i < TRIES; i++) {
		if (forge_slice_once(expect, offset, announced, len, times))
			return;
		await(up_a.lost);
		up_rejoin();
	}
	fail_msg("a was first %d times", TRIES);
}

static void slices_out_of_rule_lose_the_peer(void **state)
{
	(void)state;
	forge_slice(100000, 90000, 10001, 10001, 1);
	assert_thrown_out("past 100000");
	forge_slice(100000, UINT64_MAX - 5, 10000, 10000, 1);
	assert_thrown_out("past 100000");
	forge_slice(100000, 0, 10000, 10001, 1);
	assert_thrown_out("announced");
	forge_slice(100000, 0, 10000, 10000, 2);
	assert_thrown_out("twice");
	forge_slice(100000, 0, 100, 100, 1);
	assert_thrown_out("unsolicited");
	forge_slice(100000, 0, 0, 0, 1);
	assert_thrown_out("slice of 0 bytes");
}

int main(void)
{
#define PAIR(test) cmocka_unit_test_setup_teardown(test, up_begin_pair, up_end)
	const struct CMUnitTest tests[] = {
		PAIR(frames_out_of_rule_lose_the_peer),
		PAIR(slices_out_of_rule_lose_the_peer),
	};

	return up_run_tests("ucx hostile", tests, ARRAY_LEN(tests));
}
