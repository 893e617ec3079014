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
	struct text text; /* heap */
	size_t sent;
	int fds[REQUEST_FDS_MAX];
	unsigned int fd_count;
};

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
	text_fini(&out->text);
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

/* Queues the text but for its first `sent` bytes. */
static int out_queue(struct outbox *outbox, struct text *text, size_t sent,
		     const int *fds, unsigned int fd_count)
{
	struct out *out = mem_zalloc(sizeof(*out));

	if (!out)
		return err_pass(-ENOMEM);
	list_init(&out->link);
	if (text->borrowed) {
		/* without spare bytes: a client that reads nothing has many of them */
		out->text.len = out->text.cap = text->len - sent;
		out->text.data = mem_dup(text->data + sent, out->text.len);
		out->text.failed = !out->text.data;
	} else {
		out->text = *text;
		out->sent = sent;
	}
	*text = (struct text){0};
	for (unsigned int i = 0; i < fd_count && !out->text.failed; i++) {
		int fd = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);

		if (fd < 0) {
			out_free(out);
			return err_raise_errno(errno, "duplicating a file descriptor "
						      "of a reply");
		}
		out->fds[out->fd_count++] = fd;
	}
	if (out->text.failed) {
		out_free(out);
		return err_raise(ERR_NOMEM, "no memory for a reply");
	}
	list_push_back(&outbox->waiting, &out->link);
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
	struct text text = text_on(outbox->batch, sizeof(outbox->batch));
	int r = outbox_batch_flush(outbox);

	if (r < 0 || outbox->batched == 0)
		return err_pass(r);
	text.len = outbox->batched;
	r = out_queue(outbox, &text, 0, NULL, 0);
	if (r == 0)
		outbox->batched = 0;
	return err_pass(r);
}

static bool batch_put(struct outbox *outbox, const struct text *text, size_t cap)
{
	if (!list_empty(&outbox->waiting) ||
	    text->len > sizeof(outbox->batch) - outbox->batched ||
	    outbox->bytes + text->len > cap)
		return false;
	memcpy(outbox->batch + outbox->batched, text->data, text->len);
	outbox->batched += text->len;
	outbox->bytes += text->len;
	return true;
}

static int outbox_queue(struct outbox *outbox, struct text *text, const int *fds,
			unsigned int fd_count, size_t cap)
{
	size_t len = text->len;
	ssize_t n = 0;
	int r = batch_queue(outbox);

	if (r < 0)
		return err_pass(r);
	if (outbox_empty(outbox) && (text->borrowed || fd_count))
		n = send_some(outbox->fd, text->data, len, fds, fd_count);
	if (n < 0 || (size_t)n == len)
		return n < 0 ? err_pass((int)n) : 0;
	len -= (size_t)n;
	if (outbox->bytes + len > cap)
		return err_raise(ERR_LIMIT,
				 "the client does not read its replies: %zu bytes "
				 "queued (client_queue)",
				 outbox->bytes + len);
	/* the descriptors were sent with the first byte */
	r = out_queue(outbox, text, (size_t)n, fds, n > 0 ? 0 : fd_count);
	if (r < 0)
		return err_pass(r);
	outbox->bytes += len;
	outbox_charge(outbox);
	return 0;
}

int outbox_send(struct outbox *outbox, struct text *text, const int *fds,
		unsigned int fd_count, size_t cap)
{
	int r = 0;

	assert(text->len > 0);
	if (fd_count || !batch_put(outbox, text, cap))
		r = outbox_queue(outbox, text, fds, fd_count, cap);
	text_fini(text);
	return err_pass(r);
}

int outbox_flush(struct outbox *outbox)
{
	size_t left = FLUSH_BYTES;
	struct out *out;
	int r = outbox_batch_flush(outbox);

	if (r < 0)
		return err_pass(r);
	list_foreach_safe(out, &outbox->waiting, link) {
		size_t piece = out->text.len - out->sent;
		ssize_t n = send_some(outbox->fd, out->text.data + out->sent,
				      piece < left ? piece : left, out->fds,
				      out->sent ? 0 : out->fd_count);

		if (n < 0)
			return err_pass((int)n);
		out->sent += (size_t)n;
		outbox->bytes -= (size_t)n;
		left -= (size_t)n;
		if (out->sent < out->text.len)
			break;
		out_free(out);
		if (!left)
			break;
	}
	outbox_charge(outbox);
	return 0;
}
