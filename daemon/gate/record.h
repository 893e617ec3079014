/* SPDX-License-Identifier: Apache-2.0 */
/*
 * record: one message with descriptors on a SOCK_SEQPACKET pair between the daemon's
 * processes. Never waits for space: EAGAIN.
 */
#ifndef KVD_GATE_RECORD_H
#define KVD_GATE_RECORD_H

#include <stddef.h>
#include <sys/types.h>

#define RECORD_FDS_MAX 253u /* the kernel's own limit for one message */

/* `head`, then `body`. As sendmsg(2). */
ssize_t record_send(int socket, const void *head, size_t head_bytes, const void *body,
		    size_t body_bytes, const int *fds, unsigned int fd_count);
/* As recvmsg(2), waits; up to `room` descriptors, others are closed. *count_p (may be
 * NULL): the number received. */
ssize_t record_receive(int socket, void *buf, size_t size, int *fds, unsigned int room,
		       unsigned int *count_p);

/* The same, without waiting. */
ssize_t record_receive_now(int socket, void *buf, size_t size, int *fds,
			   unsigned int room, unsigned int *count_p);

#endif
