/* SPDX-License-Identifier: Apache-2.0 */
/* Holds by libkvd: entries of the submission ring, or of the socket without one. */
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

/* The daemon could not create a ring: the same entry is a line. */
static void remote_hold_without_ring_uses_socket(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_space *space = space_make(f);
	struct kvd_hold *hold;

	fake_kvd_answer(f->fake, OK "}");
	fake_kvd_answer(f->fake, OK "}");
	fake_kvd_answer(f->fake, OK "}");
	assert_int_equal(kvd_hold_open(space, &chunks, 70, 90, 20, &hold),
			 -KVD_E_NOREPLY);
	assert_null(hold);
	assert_int_equal(fake_kvd_ring(f->fake)->tail, 0);
	assert_non_null(strstr(client_line_args(f, 2), "\"cmd\":\"session.share\""));
	for (unsigned int line = 3; line < 5; line++) /* the hold, its release */
		assert_non_null(
			strstr(client_line_args(f, line), "\"cmd\":\"xfer.submit\""));
}

/* Raw ids behind a secret; when no answer comes in time, it is let go. */
static void remote_hold_uses_ring(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_space *space = space_make(f);
	const struct kvd_ring_entry *entries;
	struct kvd_hold *hold;

	fake_kvd_answer(f->fake, "!ring,\"ops\":[5,17,21]");
	assert_int_equal(kvd_hold_open(space, &chunks, 70, 90, 20, &hold),
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
		T(remote_hold_without_ring_uses_socket),
		T(remote_hold_uses_ring),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
