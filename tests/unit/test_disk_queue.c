/* SPDX-License-Identifier: Apache-2.0 */
/* Which piece comes next, and what becomes of one that comes back. No disk. */
#include "daemon/store/disk_queue.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/mem.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)
#define PIECES 400u

static struct disk_queue queue;
static struct disk_piece flying[PIECES];
static char order[PIECES + 1]; /* the ops' letters, one a piece */

static struct disk_op op_of(char letter, enum disk_what what, uint64_t head,
			    uint64_t rest)
{
	static char memory[4096];

	return (struct disk_op){.what = what,
				.bytes = (unsigned char)letter,
				.iov = {{memory, head}, {memory, rest}}};
}

static void put(struct disk_op *op)
{
	list_init(&op->link);
	disk_queue_put(&queue, op);
}

/* At most so many pieces; ops begin on the way. How many. */
static unsigned int take(unsigned int most)
{
	unsigned int n = 0;

	while (n < most && disk_queue_next(&queue, &flying[n])) {
		struct disk_op *op = flying[n].op;

		if (flying[n].bytes == 0) {
			disk_queue_begun(&queue, op);
			continue;
		}
		order[n++] = (char)op->bytes;
	}
	order[n] = '\0';
	return n;
}

static enum disk_back back_whole(struct disk_piece *piece)
{
	int no;

	return disk_queue_back(&queue, piece, (int64_t)piece->bytes, &no);
}

static int begin(void **state)
{
	(void)state;
	disk_queue_init(&queue, 8);
	return 0;
}

static void ops_of_a_kind_take_turns(void **state)
{
	struct disk_op a = op_of('a', DISK_READ, 4 * KIB, 9 * MIB),
		       b = op_of('b', DISK_READ, 6 * MIB, 0),
		       c = op_of('c', DISK_READ, 4 * KIB, 0);

	(void)state;
	put(&a);
	put(&b);
	put(&c);
	assert_int_equal(take(PIECES), 17);
	assert_string_equal(order, "aaaabbbbcaaaabbaa");
	assert_int_equal(queue.reads.flying, 17);
}

static void writes_yield_and_do_not_starve(void **state)
{
	struct disk_op w = op_of('w', DISK_WRITE, 20 * MIB, 0),
		       r = op_of('r', DISK_READ, 40 * MIB, 0);

	(void)state;
	put(&w);
	assert_int_equal(take(2), 2);
	put(&r);
	assert_int_equal(take(PIECES), 46);
	assert_string_equal(order, "rrrrrrrrrrrrrrrw"
				   "rrrrrrrrrrrrrrrw"
				   "rrrrrrrrrrwwww"); /* 8 in flight */
	assert_int_equal(take(PIECES), 0);
}

static void as_many_ops_begin_as_may(void **state)
{
	static struct disk_op ops[DISK_ACTIVE + 10];
	unsigned int ended = 0;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(ops); i++) {
		ops[i] = op_of('r', DISK_READ, 4 * KIB, 0);
		put(&ops[i]);
	}
	assert_int_equal(take(PIECES), DISK_ACTIVE);
	for (unsigned int i = 0; i < 4; i++)
		ended += back_whole(&flying[i]) == DISK_BACK_OP;
	assert_int_equal(ended, 4);
	assert_int_equal(take(PIECES), 4);
}

static void piece_spans_the_two_parts(void **state)
{
	struct disk_op a = op_of('a', DISK_WRITE, MIB - 4 * KIB, 8 * KIB);
	const struct disk_piece *piece = flying;
	int no;

	(void)state;
	put(&a);
	assert_int_equal(take(1), 1);
	assert_int_equal(piece->bytes, MIB);
	assert_int_equal(piece->iov_count, 2);
	assert_int_equal(piece->iov[0].iov_len, MIB - 4 * KIB);
	assert_int_equal(piece->iov[1].iov_len, 4 * KIB);
	assert_ptr_equal(piece->iov[1].iov_base, a.iov[1].iov_base);
	/* all but 4 KiB and an odd bit */
	assert_int_equal(disk_queue_back(&queue, flying, MIB - 5 * KIB, &no),
			 DISK_BACK_AGAIN);
	assert_int_equal(piece->at, MIB - 8 * KIB);
	assert_int_equal(piece->bytes, 8 * KIB);
	assert_int_equal(piece->iov_count, 2);
	assert_int_equal(piece->iov[0].iov_len, 4 * KIB);
	assert_int_equal(back_whole(flying), DISK_BACK_PIECE);
	assert_int_equal(take(PIECES), 1);
	assert_int_equal(piece->at, MIB);
	assert_int_equal(piece->bytes, 4 * KIB);
	assert_int_equal(piece->iov_count, 1);
	assert_ptr_equal(piece->iov[0].iov_base, (char *)a.iov[1].iov_base + 4 * KIB);
	assert_int_equal(back_whole(flying), DISK_BACK_OP);
	assert_int_equal(a.moved, MIB + 4 * KIB);
	assert_int_equal(queue.writes.begun, 0);
}

static void op_without_progress_is_retried_a_few_times(void **state)
{
	static const int64_t moved[] = {0, 100, -EINTR, -EAGAIN};
	static const int nos[] = {EIO, EIO, EINTR, EAGAIN};
	int no;

	for (size_t i = 0; i < ARRAY_LEN(moved); i++) {
		struct disk_op w = op_of('w', DISK_WRITE, 8 * KIB, 0);
		unsigned int tries = 1;

		begin(state);
		put(&w);
		assert_int_equal(take(PIECES), 1);
		while (disk_queue_back(&queue, flying, moved[i], &no) == DISK_BACK_AGAIN)
			tries++;
		assert_int_equal(tries, DISK_TRIES);
		assert_int_equal(no, nos[i]);
	}
}

static void read_short_is_fault_without_errno(void **state)
{
	struct disk_op r = op_of('r', DISK_READ, 8 * KIB, 0);
	int no = -1;

	(void)state;
	put(&r);
	assert_int_equal(take(PIECES), 1);
	assert_int_equal(disk_queue_back(&queue, flying, 5000, &no), DISK_BACK_AGAIN);
	assert_int_equal(disk_queue_back(&queue, flying, 904, &no), DISK_BACK_FAULT);
	assert_int_equal(no, 0);
	assert_true(disk_queue_fault(&queue, flying));
}

static void op_with_a_fault_ends_when_all_is_back(void **state)
{
	struct disk_op r = op_of('r', DISK_READ, 10 * MIB, 0);
	int no;

	(void)state;
	put(&r);
	assert_int_equal(take(3), 3);
	assert_int_equal(disk_queue_back(&queue, &flying[1], -EIO, &no), DISK_BACK_FAULT);
	assert_int_equal(no, EIO);
	disk_op_fail(&r, err_raise(ERR_IO, "first"));
	assert_false(disk_queue_fault(&queue, &flying[1]));
	disk_op_fail(&r, err_raise(ERR_IO, "second"));
	assert_string_equal(r.err.text, "first");
	assert_false(disk_queue_next(&queue, &flying[4])); /* no more of it */
	assert_int_equal(back_whole(&flying[0]), DISK_BACK_PIECE);
	assert_int_equal(back_whole(&flying[2]), DISK_BACK_OP);
	assert_int_equal(queue.reads.begun, 0);
	assert_int_equal(queue.reads.flying, 0);
}

static void cancel_without_io_ends_at_once(void **state)
{
	struct disk_op a = op_of('a', DISK_READ, 10 * MIB, 0),
		       b = op_of('b', DISK_READ, 10 * MIB, 0),
		       w = op_of('w', DISK_WRITE, 4 * KIB, 0), *op;
	unsigned int ended = 0;

	(void)state;
	put(&a);
	assert_int_equal(take(2), 2);
	put(&b);
	put(&w);
	while ((op = disk_queue_cancel(&queue))) {
		assert_true(op == &b || op == &w);
		assert_int_equal(op->err.code, ERR_CANCELED);
		ended++;
	}
	assert_int_equal(ended, 2);
	assert_int_equal(take(PIECES), 0);
	assert_int_equal(back_whole(&flying[1]), DISK_BACK_PIECE);
	assert_int_equal(back_whole(&flying[0]), DISK_BACK_OP);
	assert_int_equal(a.err.code, ERR_CANCELED);
	assert_int_equal(queue.reads.begun, 0);
	assert_int_equal(queue.writes.begun, 0);
}

static void op_started_counts_as_piece(void **state)
{
	struct disk_op ops[10];

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(ops); i++) {
		ops[i] = op_of('w', DISK_WRITE, 4 * KIB, 0);
		put(&ops[i]);
	}
	for (unsigned int i = 0; i < 8; i++) {
		assert_true(disk_queue_next(&queue, &flying[i]));
		assert_int_equal(flying[i].bytes, 0);
	}
	assert_false(disk_queue_next(&queue, &flying[8]));
	disk_queue_drop(&queue, flying[0].op); /* its hook refused it */
	assert_true(disk_queue_next(&queue, &flying[8]));
	disk_queue_begun(&queue, flying[1].op);
	assert_true(disk_queue_next(&queue, &flying[9]));
	assert_ptr_equal(flying[9].op,
			 flying[1].op); /* its piece before another begins */
	assert_int_equal(flying[9].bytes, 4 * KIB);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup(ops_of_a_kind_take_turns, begin),
		cmocka_unit_test_setup(writes_yield_and_do_not_starve, begin),
		cmocka_unit_test_setup(as_many_ops_begin_as_may, begin),
		cmocka_unit_test_setup(piece_spans_the_two_parts, begin),
		cmocka_unit_test_setup(op_without_progress_is_retried_a_few_times, begin),
		cmocka_unit_test_setup(read_short_is_fault_without_errno, begin),
		cmocka_unit_test_setup(op_with_a_fault_ends_when_all_is_back, begin),
		cmocka_unit_test_setup(cancel_without_io_ends_at_once, begin),
		cmocka_unit_test_setup(op_started_counts_as_piece, begin),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
