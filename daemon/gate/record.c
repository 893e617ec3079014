/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gate/record.h"

#include <assert.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

union record_control {
	struct cmsghdr align;
	char bytes[CMSG_SPACE(sizeof(int) * RECORD_FDS_MAX)];
};

ssize_t record_send(int socket, const void *head, size_t head_bytes, const void *body,
		    size_t body_bytes, const int *fds, unsigned int fd_count)
{
	union record_control control;
	struct iovec iov[] = {{(void *)(uintptr_t)head, head_bytes},
			      {(void *)(uintptr_t)body, body_bytes}};
	struct msghdr msg = {.msg_iov = iov, .msg_iovlen = body_bytes ? 2 : 1};
	ssize_t n;

	assert(fd_count <= RECORD_FDS_MAX);
	if (fd_count) {
		struct cmsghdr *c = &control.align;

		msg.msg_control = &control;
		msg.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
		memset(&control, 0, msg.msg_controllen); /* its padding */
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
		memcpy(CMSG_DATA(c), fds, sizeof(int) * fd_count);
	}
	do
		n = sendmsg(socket, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	return n;
}

static ssize_t record_read(int socket, int flags, struct iovec iov, int *fds,
			   unsigned int room, unsigned int *count_p)
{
	union record_control control;
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = &control,
			     .msg_controllen = sizeof(control)};
	unsigned int count = 0;
	ssize_t n;

	do
		n = recvmsg(socket, &msg, MSG_CMSG_CLOEXEC | flags);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return n;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
		size_t came = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		for (size_t i = 0; i < came; i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof(fd), sizeof(fd));
			if (count < room)
				fds[count++] = fd;
			else
				close(fd);
		}
	}
	if (count_p)
		*count_p = count;
	return n;
}

ssize_t record_receive(int socket, void *buf, size_t size, int *fds, unsigned int room,
		       unsigned int *count_p)
{
	return record_read(socket, 0, (struct iovec){buf, size}, fds, room, count_p);
}

ssize_t record_receive_now(int socket, void *buf, size_t size, int *fds,
			   unsigned int room, unsigned int *count_p)
{
	return record_read(socket, MSG_DONTWAIT, (struct iovec){buf, size}, fds, room,
			   count_p);
}
