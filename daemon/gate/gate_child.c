/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The process of a gate: it receives, judges and closes, and may sleep in any of it.
 *
 * It closes refused descriptors only after it has answered, so that the client gets the
 * reason even if the close never returns. It closes accepted ones after passing them on,
 * too, and the daemon holds a descriptor that passed vet_fd().
 *
 * "begun" is sent before bytes are taken: when the daemon kills a gate that hangs, it
 * knows which client's bytes are lost and which are untouched in their socket.
 */
#include "daemon/gate/gate_child.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/gate/record.h"
#include "daemon/gate/vet.h"

/* In the data segment: pages are allocated on use. */
static int held[GATE_SLOTS_MAX]; /* descriptor + 1 */

struct parcel {
	struct gate_answer answer;
	uint8_t bytes[GATE_BYTES];
	int fds[RECORD_FDS_MAX];
	unsigned int fd_count;
};

/* As many as one line may carry, or all of it. */
static size_t piece_bytes(int fd, const struct gate_ask *ask, uint8_t *at, size_t want)
{
	ssize_t n;
	const uint8_t *end;

	if (ask->op == GATE_STREAM)
		return want;
	n = recv(fd, at, want, MSG_PEEK | MSG_DONTWAIT);
	if (n <= 0)
		return want;
	end = memchr(at, '\n', (size_t)n);
	return end ? (size_t)(end - at) + 1 : (size_t)n;
}

static void parcel_fault(struct parcel *parcel, enum gate_fault fault, uint32_t at)
{
	if (parcel->answer.fault != GATE_FINE)
		return;
	parcel->answer.fault = fault;
	parcel->answer.at = at;
}

static ssize_t receive_piece(int fd, struct parcel *parcel, size_t want)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * RECORD_FDS_MAX)];
	} control;
	struct iovec iov = {parcel->bytes + parcel->answer.bytes, want};
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = &control,
			     .msg_controllen = sizeof(control)};
	ssize_t n = recvmsg(fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

	if (n <= 0)
		return n;
	parcel->answer.bytes += (uint32_t)n;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		parcel->fd_count =
			(unsigned int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(parcel->fds, CMSG_DATA(c), parcel->fd_count * sizeof(int));
	}
	if (msg.msg_flags & MSG_CTRUNC)
		parcel_fault(parcel, GATE_LOST, 0);
	return n;
}

static void parcel_take(struct parcel *parcel, int fd, const struct gate_ask *ask)
{
	while (parcel->answer.bytes < ask->want && !parcel->fd_count &&
	       parcel->answer.fault == GATE_FINE) {
		size_t want = ask->want - parcel->answer.bytes;

		want = piece_bytes(fd, ask, parcel->bytes + parcel->answer.bytes, want);
		if (receive_piece(fd, parcel, want) <= 0)
			parcel_fault(parcel, GATE_NOTHING, 0);
		if (ask->op == GATE_STREAM)
			break;
	}
}

static void parcel_vet(struct parcel *parcel, uint32_t most)
{
	if (parcel->fd_count > most)
		parcel_fault(parcel, GATE_TOO_MANY, most);
	for (unsigned int i = 0;
	     i < parcel->fd_count && parcel->answer.fault == GATE_FINE; i++)
		if (vet_fd(parcel->fds[i], parcel->answer.what,
			   sizeof(parcel->answer.what)) < 0)
			parcel_fault(parcel, GATE_REFUSED, i);
}

static void child_receive(int socket, const struct gate_ask *ask)
{
	struct parcel parcel = {.answer = {.serial = ask->serial, .begun = 1}};
	struct gate_answer *answer = &parcel.answer;

	(void)record_send(socket, answer, sizeof(*answer), NULL, 0, NULL, 0);
	answer->begun = 0;
	parcel_take(&parcel, held[ask->slot] - 1, ask);
	parcel_vet(&parcel, ask->most);
	answer->fds = answer->fault == GATE_FINE ? parcel.fd_count : 0;
	(void)record_send(socket, answer, sizeof(*answer), parcel.bytes, answer->bytes,
			  parcel.fds, answer->fds);
	for (unsigned int i = 0; i < parcel.fd_count; i++)
		close(parcel.fds[i]);
}

static void child_obey(int socket, const struct gate_ask *ask, int fd)
{
	int was;

	if (ask->slot >= GATE_SLOTS_MAX || ask->want > GATE_BYTES) {
		mem_closep(&fd);
		return;
	}
	if (ask->op == GATE_LINES || ask->op == GATE_STREAM) {
		child_receive(socket, ask);
		return;
	}
	was = held[ask->slot] - 1;
	held[ask->slot] = ask->op == GATE_HOLD ? fd + 1 : 0;
	mem_closep(&was);
}

void gate_child_serve(int socket)
{
	struct gate_ask ask;

	for (;;) {
		int fd = -1;
		ssize_t n = record_receive(socket, &ask, sizeof(ask), &fd, 1, NULL);

		if (n != sizeof(ask))
			return;
		child_obey(socket, &ask, fd);
	}
}
