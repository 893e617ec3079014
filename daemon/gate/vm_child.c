/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory of a process is reached through its /proc/PID/mem: that stays bound to the
 * address space it was opened for, also when the process executes another program or its
 * pid is reused. A read or write may sleep for as long as the server of that page likes
 * (a FUSE file, userfaultfd); hence this process, which can be given up.
 */
#include "daemon/gate/vm_child.h"

#include <errno.h>
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

static void vm_obey(const struct vm_ask *ask, int mem, struct vm_window *window,
		    struct vm_answer *answer)
{
	for (uint32_t i = 0; i < ask->count && i < VM_WINDOW_ROWS; i++) {
		const struct vm_row row = window->rows[i];
		uint64_t done;

		if (row.bytes > VM_WINDOW_BYTES - answer->moved) {
			answer->error = EINVAL;
			return;
		}
		done = row_move(mem, &row, window->bytes + answer->moved,
				ask->write != 0);
		answer->moved += done;
		if (done < row.bytes) {
			answer->error = errno;
			return;
		}
	}
}

void vm_child_serve(int socket)
{
	struct vm_window *window = MAP_FAILED;
	struct vm_ask ask;

	for (;;) {
		struct vm_answer answer = {0};
		int fd = -1;

		if (record_receive(socket, &ask, sizeof(ask), &fd, 1, NULL) !=
		    sizeof(ask))
			return;
		if (window == MAP_FAILED) {
			window = mmap(NULL, sizeof(*window), PROT_READ | PROT_WRITE,
				      MAP_SHARED, fd, 0);
			close(fd);
			if (window == MAP_FAILED)
				return;
			continue;
		}
		vm_obey(&ask, fd, window, &answer);
		if (fd >= 0)
			close(fd);
		if (record_send(socket, &answer, sizeof(answer), NULL, 0, NULL, 0) < 0)
			return;
	}
}
