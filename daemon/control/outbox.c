/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The usual reply is short: it is appended to the other replies of the turn, a
 * room.open's before its room.bind's, and one system call sends them (and wakes the
 * client once). Long replies, and those with descriptors, are sent at once. Neither
 * allocates memory, duplicates a descriptor or makes the loop watch: a command that has
 * taken effect can answer without memory. Only if replies are queued already, or the
 * socket is full, the rest of a reply is copied.
 *
 * A reply of a megabyte is taken without a copy, and sent in pieces, between which the
 * loop serves others.
 *
 * MSG_NOSIGNAL everywhere: a client that has disconnected is an error code, not a
 * SIGPIPE.
 */
#include "daemon/control/outbox.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/request/commands.h"

#define FLUSH_BYTES (64u << 10) /* copied by one system call: some 20 us */

/* a reply, or the rest of one */
struct out {
	struct list link;
	size_t len, sent;
	int fds[REQUEST_FDS_MAX];
	unsigned int fd_count;
	char *given; /* the text, heap; NULL: it is in `copy` */
	char copy[];
};

static const char *out_text(const struct out *out)
{
	return (out->given ? out->given : out->copy) + out->sent;
}

void outbox_init(struct outbox *outbox, int fd)
{
	*outbox = (struct outbox){.fd = fd};
	list_init(&outbox->waiting);
}

static void out_free(struct out *out)
{
	list_remove(&out->link);
	for (unsigned int i = 0; i < out->fd_count; i++)
		mem_closep(&out->fds[i]);
	mem_free(out->given);
	mem_free(out);
}

void outbox_fini(struct outbox *outbox)
{
	struct out *out;

	list_foreach_safe(out, &outbox->waiting, link)
		out_free(out);
	outbox->batched = 0;
	outbox->bytes = 0;
	charge_drop(&outbox->charge);
}

/* Never refused here, since the command has been done: large replies are checked in
 * advance, and a client whose account is full is not read from while replies are
 * queued. */
static void outbox_charge(struct outbox *outbox)
{
	uint64_t bytes = outbox->bytes - outbox->batched;

	if (bytes == outbox->charge.bytes)
		return;
	charge_drop(&outbox->charge);
	if (bytes)
		charge_force(&outbox->charge, outbox->account, ACCOUNT_REPLIES, bytes);
}

/* Returns the bytes sent, 0 when the socket is full. */
static ssize_t send_some(int fd, const char *text, size_t len, const int *fds,
			 unsigned int fd_count)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * REQUEST_FDS_MAX)];
	} control = {.bytes = {0}};
	struct iovec iov = {.iov_base = (void *)(uintptr_t)text, .iov_len = len};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	ssize_t n;

	if (fd_count) {
		msg.msg_control = control.bytes;
		msg.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
		CMSG_FIRSTHDR(&msg)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&msg)->cmsg_type = SCM_RIGHTS;
		CMSG_FIRSTHDR(&msg)->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&msg)), fds, sizeof(int) * fd_count);
	}
	do
		n = sendmsg(fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	if (n >= 0)
		return n;
	if (errno == EAGAIN || errno == EWOULDBLOCK)
		return 0;
	return err_raise(ERR_IO, "the client disconnected: %s", strerror(errno));
}

static int out_new(const char *text, size_t len, const int *fds, unsigned int fd_count,
		   struct out **out_p)
{
	struct out *out = mem_zalloc(sizeof(*out) + len);

	if (!out)
		return err_pass(-ENOMEM);
	list_init(&out->link);
	memcpy(out->copy, text, len);
	out->len = len;
	for (unsigned int i = 0; i < fd_count; i++) {
		int fd = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);

		if (fd < 0) {
			out_free(out);
			return err_raise_errno(errno, "duplicating a file descriptor "
						      "of a reply");
		}
		out->fds[out->fd_count++] = fd;
	}
	*out_p = out;
	return 0;
}

static int outbox_batch_flush(struct outbox *outbox)
{
	ssize_t n = 0;

	if (outbox->batched)
		n = send_some(outbox->fd, outbox->batch, outbox->batched, NULL, 0);
	if (n <= 0)
		return err_pass((int)n);
	outbox->batched -= (size_t)n;
	outbox->bytes -= (size_t)n;
	memmove(outbox->batch, outbox->batch + n, outbox->batched);
	return 0;
}

/* The rest of the batch precedes queued replies. */
static int batch_queue(struct outbox *outbox)
{
	struct out *out = NULL;
	int r = outbox_batch_flush(outbox);

	if (r < 0 || outbox->batched == 0)
		return err_pass(r);
	r = out_new(outbox->batch, outbox->batched, NULL, 0, &out);
	if (r < 0)
		return err_pass(r);
	list_push_back(&outbox->waiting, &out->link);
	outbox->batched = 0;
	return 0;
}

int outbox_send(struct outbox *outbox, const char *text, size_t len, const int *fds,
		unsigned int fd_count, size_t cap)
{
	struct out *out = NULL;
	ssize_t n = 0;
	int r;

	assert(len > 0);
	if (fd_count == 0 && list_empty(&outbox->waiting) &&
	    len <= sizeof(outbox->batch) - outbox->batched &&
	    outbox->bytes + len <= cap) {
		memcpy(outbox->batch + outbox->batched, text, len);
		outbox->batched += len;
		outbox->bytes += len;
		return 0;
	}
	r = batch_queue(outbox);
	if (r < 0)
		return err_pass(r);
	if (outbox_empty(outbox))
		n = send_some(outbox->fd, text, len, fds, fd_count);
	if (n < 0)
		return err_pass((int)n);
	if ((size_t)n == len)
		return 0;
	if (n > 0) /* the descriptors were sent with the first byte */
		fd_count = 0;
	text += n;
	len -= (size_t)n;
	if (outbox->bytes + len > cap)
		return err_raise(ERR_LIMIT,
				 "the client does not read its replies: %zu bytes "
				 "queued (client_queue)",
				 outbox->bytes + len);
	r = out_new(text, len, fds, fd_count, &out);
	if (r < 0)
		return err_pass(r);
	list_push_back(&outbox->waiting, &out->link);
	outbox->bytes += len;
	outbox_charge(outbox);
	return 0;
}

int outbox_give(struct outbox *outbox, char *owned, size_t len, size_t cap)
{
	cleanup_free char *given = owned;
	struct out *out = NULL;
	int r = batch_queue(outbox);

	assert(owned && len > 0);
	if (r >= 0 && outbox->bytes + len > cap)
		r = err_raise(ERR_LIMIT,
			      "the client does not read its replies: %zu bytes queued "
			      "(client_queue)",
			      outbox->bytes + len);
	if (r >= 0)
		r = out_new("", 0, NULL, 0, &out);
	if (r < 0)
		return err_pass(r);
	out->given = mem_steal(given);
	out->len = len;
	list_push_back(&outbox->waiting, &out->link);
	outbox->bytes += len;
	outbox_charge(outbox);
	return 0;
}

int outbox_flush(struct outbox *outbox)
{
	size_t left = FLUSH_BYTES;
	struct out *out;
	int r = outbox_batch_flush(outbox);

	if (r < 0)
		return err_pass(r);
	list_foreach_safe(out, &outbox->waiting, link) {
		size_t piece = out->len - out->sent;
		ssize_t n =
			send_some(outbox->fd, out_text(out), piece < left ? piece : left,
				  out->fds, out->sent ? 0 : out->fd_count);

		if (n < 0)
			return err_pass((int)n);
		out->sent += (size_t)n;
		outbox->bytes -= (size_t)n;
		left -= (size_t)n;
		if (out->sent < out->len)
			break;
		out_free(out);
		if (!left)
			break;
	}
	outbox_charge(outbox);
	return 0;
}
