/* SPDX-License-Identifier: Apache-2.0 */
/* The line that a client is sending: how its buffer grows, and goes. */
#include "daemon/control/inbox.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"

#define PIECE 4096u
#define CAP (1u << 20)

struct rig {
	int fds[2];
	struct inbox inbox;
};

static void rig_begin(struct rig *r)
{
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, r->fds), 0);
	inbox_init(&r->inbox, r->fds[0]);
}

static void rig_end(struct rig *r)
{
	inbox_fini(&r->inbox);
	close(r->fds[0]);
	close(r->fds[1]);
}

/* The bytes at `at` of a line that tells where each of them belongs. */
static void piece_make(uint8_t *bytes, size_t at, size_t len)
{
	for (size_t i = 0; i < len; i++)
		bytes[i] = (uint8_t)((at + i) * 2654435761u >> 24);
}

static int piece_move(struct rig *r, size_t len, uint64_t cap)
{
	uint8_t bytes[PIECE];

	piece_make(bytes, r->inbox.len, len);
	assert_int_equal(send(r->fds[1], bytes, len, 0), (ssize_t)len);
	return inbox_take(&r->inbox, len, cap);
}

static void line_long_is_whole_and_not_copied_as_it_grows(void **state)
{
	uint8_t wanted[PIECE];
	struct rig r;

	(void)state;
	rig_begin(&r);
	mem_fail_at(0); /* counts from here */
	while (r.inbox.len + PIECE <= CAP)
		assert_int_equal(piece_move(&r, PIECE, CAP), 0);
	/* the short buffer grows a little, and once more for all the rest */
	assert_true(mem_count() <= 4);
	for (size_t at = 0; at < CAP; at += PIECE) {
		piece_make(wanted, at, PIECE);
		assert_memory_equal(r.inbox.line + at, wanted, PIECE);
	}
	assert_int_equal(piece_move(&r, 1, CAP), 0); /* the newline has its place */
	assert_int_equal(piece_move(&r, 1, CAP), -EMSGSIZE);
	rig_end(&r);
}

static void line_short_keeps_buffer_and_long_frees_it(void **state)
{
	const char *kept;
	struct rig r;

	(void)state;
	rig_begin(&r);
	assert_int_equal(piece_move(&r, 100, CAP), 0);
	kept = r.inbox.line;
	inbox_reset(&r.inbox);
	assert_int_equal(r.inbox.len, 0);
	assert_int_equal(piece_move(&r, 200, CAP), 0);
	assert_ptr_equal(r.inbox.line, kept);
	assert_true(r.inbox.cap < PIECE);
	while (r.inbox.len < 32 * PIECE)
		assert_int_equal(piece_move(&r, PIECE - 1, CAP), 0);
	inbox_reset(&r.inbox);
	assert_int_equal(r.inbox.cap, 0);
	rig_end(&r);
}

static void line_read_by_a_helper_leaves_no_buffer(void **state)
{
	struct rig r;

	(void)state;
	rig_begin(&r);
	assert_int_equal(piece_move(&r, PIECE, CAP), 0);
	inbox_line_free(&r.inbox);
	assert_null(r.inbox.line);
	inbox_reset(&r.inbox);
	assert_int_equal(piece_move(&r, 10, CAP), 0);
	assert_int_equal(r.inbox.len, 10);
	rig_end(&r);
}

static void line_of_a_small_limit_grows_up_to_it(void **state)
{
	struct rig r;

	(void)state;
	rig_begin(&r);
	assert_int_equal(piece_move(&r, 1000, 1000), 0);
	assert_int_equal(piece_move(&r, 2, 1000), -EMSGSIZE);
	rig_end(&r);
}

static void line_without_memory_keeps_received_bytes(void **state)
{
	struct rig r;

	(void)state;
	rig_begin(&r);
	for (size_t i = 0; i < 4; i++)
		assert_int_equal(piece_move(&r, PIECE, CAP), 0);
	mem_fail_at(1);
	assert_int_equal(piece_move(&r, PIECE, CAP), -ENOMEM);
	mem_fail_at(0);
	assert_int_equal(r.inbox.len, 4 * PIECE);
	rig_end(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(line_long_is_whole_and_not_copied_as_it_grows),
		cmocka_unit_test(line_short_keeps_buffer_and_long_frees_it),
		cmocka_unit_test(line_read_by_a_helper_leaves_no_buffer),
		cmocka_unit_test(line_of_a_small_limit_grows_up_to_it),
		cmocka_unit_test(line_without_memory_keeps_received_bytes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
