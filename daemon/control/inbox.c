/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A buffer that grows by doubling up to KEEP_BYTES, then at once to the longest line, and
 * shrinks when the line is complete: an idle connection costs little. The kernel
 * allocates memory on first write, so the second step is nearly free; growth of a line of
 * a megabyte by doubling would copy it, and block the loop too long.
 *
 * Descriptors belong to the last line of the data that arrived ahead with them. Too many,
 * lost or refused descriptors spoil that line and not the connection: its request is
 * answered with the fault.
 */
#include "daemon/control/inbox.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/gate/gate.h"

#define KEEP_BYTES (16u << 10)
#define FIRST_BYTES 512u

struct inbox_ahead {
	struct err fault;
	int fds[REQUEST_FDS_MAX];
	unsigned int fd_count;
	size_t pos, len;
	uint8_t bytes[];
};

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

static void ahead_drop(struct inbox *inbox)
{
	struct inbox_ahead *ahead = mem_steal(inbox->ahead);

	for (unsigned int i = 0; ahead && i < ahead->fd_count; i++)
		mem_closep(&ahead->fds[i]);
	mem_free(ahead);
}

void inbox_fini(struct inbox *inbox)
{
	inbox_reset(inbox);
	ahead_drop(inbox);
	inbox_line_free(inbox);
}

static int inbox_reserve(struct inbox *inbox, size_t want, uint64_t cap)
{
	size_t need = inbox->len + want, size = inbox->cap ? inbox->cap : FIRST_BYTES;
	char *line;

	if (need > cap + 1) /* one for the newline */
		return err_raise(ERR_TOOBIG, "request line over %ju bytes",
				 (uintmax_t)cap);
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

/* ---- data that arrived ahead ---- */

int inbox_put(struct inbox *inbox, struct gate_parcel *parcel)
{
	struct inbox_ahead *ahead = mem_alloc(sizeof(*ahead) + parcel->len);

	assert(!inbox->ahead && parcel->fd_count <= REQUEST_FDS_MAX);
	if (!ahead)
		return err_pass(-ENOMEM);
	ahead->fault = parcel->fault;
	ahead->fd_count = parcel->fd_count;
	for (unsigned int i = 0; i < parcel->fd_count; i++)
		ahead->fds[i] = mem_steal_fd(&parcel->fds[i]);
	ahead->pos = 0;
	ahead->len = parcel->len;
	memcpy(ahead->bytes, parcel->bytes, parcel->len);
	inbox->ahead = ahead;
	return 0;
}

const uint8_t *inbox_ahead(const struct inbox *inbox, size_t *len_p)
{
	const struct inbox_ahead *ahead = inbox->ahead;

	*len_p = ahead ? ahead->len - ahead->pos : 0;
	return ahead ? ahead->bytes + ahead->pos : NULL;
}

/* Assign the descriptors to the line that has the last byte. */
static void ahead_end(struct inbox *inbox)
{
	struct inbox_ahead *ahead = inbox->ahead;

	if (ahead->fault.code != ERR_OK)
		inbox->fault = ahead->fault;
	for (unsigned int i = 0; i < ahead->fd_count; i++) {
		if (inbox->fd_count < REQUEST_FDS_MAX)
			inbox->fds[inbox->fd_count++] = mem_steal_fd(&ahead->fds[i]);
		else
			err_set(&inbox->fault, ERR_LIMIT,
				"more than %u file descriptors with one request line",
				REQUEST_FDS_MAX);
	}
	ahead_drop(inbox);
}

static ssize_t receive_some(struct inbox *inbox, size_t want)
{
	struct inbox_ahead *ahead = inbox->ahead;
	ssize_t n;

	if (ahead) {
		n = (ssize_t)(want < ahead->len - ahead->pos ? want
							     : ahead->len - ahead->pos);
		memcpy(inbox->line + inbox->len, ahead->bytes + ahead->pos, (size_t)n);
		ahead->pos += (size_t)n;
		if (ahead->pos == ahead->len)
			ahead_end(inbox);
		return n;
	}
	do
		n = recv(inbox->fd, inbox->line + inbox->len, want, MSG_DONTWAIT);
	while (n < 0 && errno == EINTR);
	if (n <= 0)
		return err_raise(ERR_IO, "short read after MSG_PEEK");
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
