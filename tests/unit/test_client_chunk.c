/* SPDX-License-Identifier: Apache-2.0 */
/* Holds by libkvd: which way they go by what the daemon says that it knows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "tests/lib/client_fixture.h"

static const uint8_t ids[2 * KVD_CHUNK_ID_BYTES] = {0xab, [32] = 0xcd};
static const struct kvd_chunks chunks = {.ids = ids, .count = 2, .first = 3};

/* hello and space.open are lines 0 and 1 */
static struct kvd_space *space_make(struct client_fixture *f)
{
	const struct kvd_space_args args = {
		.layout = "{}", .model = "m", .scheme = "s", .tokens = 16};
	struct kvd_space *space;

	fake_kvd_answer(f->fake, OK ",\"space\":5}");
	assert_int_equal(kvd_space_open(f->client, &args, NULL, &space), 0);
	return space;
}

/* The other way knows no such entry, and an unknown one would end the session. */
static void remote_hold_without_ring_op_uses_json(void **state)
{
	static const char *const rings[] = {"!ring", "!ring,\"ops\":[16,17]", OK "}"};
	struct client_fixture *f = *state;
	struct kvd_space *space = space_make(f);
	struct kvd_hold *hold;
	struct kvd_found found;
	uint64_t first;

	for (size_t i = 0; i < ARRAY_LEN(rings); i++) {
		unsigned int lines = fake_kvd_lines(f->fake);

		fake_kvd_answer(f->fake, rings[i]);
		fake_kvd_answer(f->fake,
				OK ",\"hold\":9,\"chunks\":2,\"tokens\":32,\"remote\":2,"
				   "\"first\":3,\"secret\":"
				   "\"000102030405060708090a0b0c0d0e0f\"}");
		assert_int_equal(kvd_hold_open(space, &chunks, 70, 90, NULL, &hold), 0);
		assert_non_null(
			strstr(client_line_args(f, lines), "\"cmd\":\"session.share\""));
		assert_non_null(
			strstr(client_line_args(f, lines + 1),
			       "\"cmd\":\"chunk.hold\",\"space\":5,\"ids\":[\"ab"));
		assert_non_null(strstr(client_line_args(f, lines + 1),
				       "\"remote_ms\":90,\"lease_ms\":70"));
		assert_int_equal(kvd_hold_found(hold, &found, &first), 0);
		assert_int_equal(found.remote, 2);
		assert_int_equal(first, 3);
		assert_int_equal(kvd_hold_close(hold, NULL), 0);
		assert_int_equal(fake_kvd_ring(f->fake)->tail, 0);
		fake_kvd_kill(f->fake);
		fake_kvd_restart(f->fake);
		assert_int_equal(kvd_reconnect(f->client, 0), 0);
		space = space_make(f);
	}
}

/* Raw ids behind a secret; when no answer comes in time, it is let go. */
static void remote_hold_uses_ring(void **state)
{
	const struct kvd_call call = {.timeout_ms = 20};
	struct client_fixture *f = *state;
	struct kvd_space *space = space_make(f);
	const struct kvd_ring_entry *entries;
	struct kvd_hold *hold;

	fake_kvd_answer(f->fake, "!ring,\"ops\":[5,17,21]");
	assert_int_equal(kvd_hold_open(space, &chunks, 70, 90, &call, &hold),
			 -KVD_E_NOREPLY);
	assert_null(hold);
	entries = (const void *)((const char *)fake_kvd_ring(f->fake) +
				 KVD_RING_HEADER_BYTES);
	assert_int_equal(fake_kvd_ring(f->fake)->tail, 2);
	assert_int_equal(entries[0].op, KVD_RING_HOLD_REMOTE);
	assert_int_equal(entries[0].a, 5);
	assert_int_equal(entries[0].b, 70);
	assert_int_equal(entries[0].c, 3);
	assert_int_equal(entries[0].n0, 2);
	assert_int_equal(entries[0].n1, 90);
	assert_int_equal(entries[0].bytes, KVD_RING_SECRET_BYTES + sizeof(ids));
	assert_memory_equal(fake_kvd_arena(f->fake) + entries[0].offset +
				    KVD_RING_SECRET_BYTES,
			    ids, sizeof(ids));
	assert_int_equal(entries[1].op, KVD_RING_RELEASE);
	assert_int_equal(entries[1].a, KVD_RING_IDS + entries[0].slot);
}

int main(void)
{
#define T(name)                                                     \
	cmocka_unit_test_setup_teardown(name, client_fixture_setup, \
					client_fixture_teardown)
	const struct CMUnitTest tests[] = {
		T(remote_hold_without_ring_op_uses_json),
		T(remote_hold_uses_ring),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
