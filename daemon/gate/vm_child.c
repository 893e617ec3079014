/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory of a process is reached through its /proc/PID/mem: that stays bound to the
 * address space it was opened for, also when the process executes another program or its
 * pid is reused. A read or write may sleep for as long as the server of that page likes
 * (a FUSE file, userfaultfd); hence this process, which can be given up.
 */
#include "daemon/gate/vm_child.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/gate/record.h"

/* Bytes of one row; errno is the error that stopped it. */
static uint64_t row_move(int mem, const struct vm_row *row, uint8_t *at, int write)
{
	uint64_t done = 0;

	errno = 0;
	while (done < row->bytes) {
		off_t from = (off_t)(row->address + done);
		ssize_t n = write ? pwrite(mem, at + done, row->bytes - done, from)
				  : pread(mem, at + done, row->bytes - done, from);

		if (n < 0 && errno == EINTR)
			continue;
		if (n == 0)
			errno = ESRCH; /* the address space no longer exists */
		else if (n < 0 && errno == EIO)
			errno = EFAULT;
		if (n <= 0)
			break;
		done += (uint64_t)n;
	}
	return done;
}

/* Rows in turn, as many bytes as there is room for. */
static struct vm_answer rows_move(int mem, const struct vm_row *rows, uint32_t count,
				  uint8_t *bytes, uint64_t room, int write)
{
	struct vm_answer answer = {0};

	for (uint32_t i = 0; i < count && !answer.error; i++) {
		const struct vm_row row = rows[i];
		uint64_t done;

		if (row.bytes > room - answer.moved) {
			answer.error = EINVAL;
			break;
		}
		done = row_move(mem, &row, bytes + answer.moved, write);
		answer.moved += done;
		if (done < row.bytes)
			answer.error = errno;
	}
	return answer;
}

static struct vm_answer pair_move(const struct vm_ask *ask, const int mem[2],
				  struct vm_window *window)
{
	uint32_t n = ask->pair % VM_PAIRS;
	struct vm_pair *pair = &window->pairs[n];
	uint8_t *bytes = window->bytes + n * VM_PAIR_BYTES;
	struct vm_answer answer =
		rows_move(mem[0], pair->rows[0], ask->count[0], bytes, VM_PAIR_BYTES, 0);
	uint32_t stage = VM_READING;

	if (!answer.error &&
	    !atomic_compare_exchange_strong(&pair->stage, &stage, VM_WRITING))
		answer.error = ECANCELED;
	if (answer.error)
		return (struct vm_answer){.error = answer.error};
	return rows_move(mem[1], pair->rows[1], ask->count[1], bytes, answer.moved, 1);
}

static struct vm_answer vm_obey(const struct vm_ask *ask, const int mem[2],
				struct vm_window *window)
{
	uint32_t most = ask->op == VM_PAIR ? VM_PAIR_ROWS : VM_WINDOW_ROWS;

	if (ask->count[0] > most || ask->count[1] > most)
		return (struct vm_answer){.error = EINVAL};
	if (ask->op == VM_PAIR)
		return pair_move(ask, mem, window);
	return rows_move(mem[0], window->rows, ask->count[0], window->bytes,
			 VM_WINDOW_BYTES, ask->op == VM_WRITE);
}

void vm_child_serve(int socket)
{
	struct vm_window *window = MAP_FAILED;
	struct vm_ask ask;

	for (;;) {
		struct vm_answer answer;
		int fds[2] = {-1, -1};

		if (record_receive(socket, &ask, sizeof(ask), fds, 2, NULL) !=
		    sizeof(ask))
			return;
		if (window == MAP_FAILED) {
			window = mmap(NULL, sizeof(*window), PROT_READ | PROT_WRITE,
				      MAP_SHARED, fds[0], 0);
			close(fds[0]);
			if (window == MAP_FAILED)
				return;
			continue;
		}
		answer = vm_obey(&ask, fds, window);
		for (unsigned int i = 0; i < 2; i++)
			if (fds[i] >= 0)
				close(fds[i]);
		if (record_send(socket, &answer, sizeof(answer), NULL, 0, NULL, 0) < 0)
			return;
	}
}
