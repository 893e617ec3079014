/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/conform/message.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

bool send_all(int sock, const void *buf, size_t len, int fd)
{
	const uint8_t *at = buf;
	union {
		char space[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control;

	while (len) {
		struct iovec iov = {(void *)(uintptr_t)at, len};
		struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
		ssize_t n;

		if (fd >= 0) {
			struct cmsghdr *head;

			msg.msg_control = control.space;
			msg.msg_controllen = sizeof(control.space);
			head = CMSG_FIRSTHDR(&msg);
			head->cmsg_level = SOL_SOCKET;
			head->cmsg_type = SCM_RIGHTS;
			head->cmsg_len = CMSG_LEN(sizeof(int));
			memcpy(CMSG_DATA(head), &fd, sizeof(int));
		}
		n = sendmsg(sock, &msg, MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return false;
		fd = -1;
		at += n;
		len -= (size_t)n;
	}
	return true;
}

bool recv_all(int sock, void *buf, size_t len, int *fd_p)
{
	uint8_t *at = buf;

	while (len) {
		union {
			char space[CMSG_SPACE(sizeof(int))];
			struct cmsghdr align;
		} control;
		struct iovec iov = {at, len};
		struct msghdr msg = {.msg_iov = &iov,
				     .msg_iovlen = 1,
				     .msg_control = control.space,
				     .msg_controllen = sizeof(control.space)};
		ssize_t n = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC);
		struct cmsghdr *head;

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return false;
		head = CMSG_FIRSTHDR(&msg);
		if (head && head->cmsg_type == SCM_RIGHTS)
			memcpy(fd_p, CMSG_DATA(head), sizeof(int));
		at += n;
		len -= (size_t)n;
	}
	return true;
}

bool recv_blob(int sock, uint32_t len, void **blob_p)
{
	int fd = -1;

	*blob_p = NULL;
	if (len == 0)
		return true;
	*blob_p = malloc(len); /* not mem_: CMD_FAIL_ALLOC counts those */
	return *blob_p && recv_all(sock, *blob_p, len, &fd);
}
