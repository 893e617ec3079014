/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A buffer that grows by doubling up to KEEP_BYTES, then at once to the longest line,
 * and shrinks back when the line is done: an idle connection costs little. Memory comes
 * with the bytes that are written to it, so the second step is nearly free; growing a
 * line of a megabyte by doubling copies it, and holds the loop too long.
 *
 * The room for descriptors is that of the kernel's largest message, so a
 * truncated message means that this process has no descriptors left. Those that
 * are too many, or were lost, spoil the line and not the connection: the line's
 * request is answered with the fault. MSG_CMSG_CLOEXEC: nothing that we start
 * inherits an engine's memory.
 */
#include "daemon/control/inbox.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/mem.h"

#define KEEP_BYTES (16u << 10)
#define FIRST_BYTES 512u
#define SCM_FDS_MAX 253u /* the kernel's own limit for one message */

void inbox_init(struct inbox *inbox, int fd)
{
	*inbox = (struct inbox){.fd = fd};
}

void inbox_reset(struct inbox *inbox)
{
	for (unsigned int i = 0; i < inbox->fd_count; i++)
		mem_closep(&inbox->fds[i]);
	inbox->fd_count = 0;
	inbox->fault.code = ERR_OK;
	inbox->len = 0;
	if (inbox->cap > KEEP_BYTES)
		inbox_line_free(inbox);
}

void inbox_line_free(struct inbox *inbox)
{
	mem_free(mem_steal(inbox->line));
	inbox->cap = 0;
}

void inbox_fini(struct inbox *inbox)
{
	inbox_reset(inbox);
	inbox_line_free(inbox);
}

static int inbox_reserve(struct inbox *inbox, size_t want, uint64_t cap)
{
	size_t need = inbox->len + want, size = inbox->cap ? inbox->cap : FIRST_BYTES;
	char *line;

	if (need > cap + 1) /* one for the newline */
		return err_raise(ERR_TOOBIG, "a line over %ju bytes", (uintmax_t)cap);
	if (need <= inbox->cap)
		return 0;
	while (size < need && size < KEEP_BYTES)
		size *= 2;
	if (size < need)
		size = cap + 1;
	line = mem_regrow(inbox->line, size, 1);
	if (!line)
		return err_pass(-ENOMEM);
	inbox->line = line;
	inbox->cap = size;
	return 0;
}

static void fds_keep(struct inbox *inbox, const struct cmsghdr *c)
{
	size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

	for (size_t i = 0; i < count; i++) {
		int fd;

		memcpy(&fd, CMSG_DATA(c) + i * sizeof(fd), sizeof(fd));
		if (inbox->fd_count < REQUEST_FDS_MAX) {
			inbox->fds[inbox->fd_count++] = fd;
			continue;
		}
		close(fd);
		err_set(&inbox->fault, ERR_LIMIT,
			"more than %u descriptors with one line", REQUEST_FDS_MAX);
	}
}

static ssize_t receive_some(struct inbox *inbox, size_t want)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * SCM_FDS_MAX)];
	} control;
	struct iovec iov = {.iov_base = inbox->line + inbox->len, .iov_len = want};
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = control.bytes,
			     .msg_controllen = sizeof(control.bytes)};
	ssize_t n;

	do
		n = recvmsg(inbox->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n <= 0)
		return err_raise(ERR_IO, "bytes that were seen did not come");
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
			fds_keep(inbox, c);
	}
	if (msg.msg_flags & MSG_CTRUNC)
		err_set(&inbox->fault, ERR_LIMIT,
			"descriptors of this line were lost: kvd has no more");
	return n;
}

int inbox_take(struct inbox *inbox, size_t want, uint64_t cap)
{
	int r = inbox_reserve(inbox, want, cap);

	assert(want > 0);
	if (r < 0)
		return err_pass(r);
	while (want) {
		ssize_t n = receive_some(inbox, want);

		if (n < 0)
			return err_pass((int)n);
		inbox->len += (size_t)n;
		want -= (size_t)n;
	}
	return 0;
}
