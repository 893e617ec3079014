/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inbox: the line that one client is sending, and the descriptors that came with
 * its bytes.
 */
#ifndef KVD_INBOX_H
#define KVD_INBOX_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/control/commands.h"

struct inbox {
	int fd; /* the client's socket, not owned */
	char *line;
	size_t len, cap;
	int fds[REQUEST_FDS_MAX]; /* owned until taken (set fd_count 0) */
	unsigned int fd_count;
	struct err fault; /* code != OK: descriptors of this line were lost */
};

void inbox_init(struct inbox *inbox, int fd);
/* Forget the line: closes its descriptors, keeps a small buffer. */
void inbox_reset(struct inbox *inbox);
void inbox_fini(struct inbox *inbox);
/* The line has been read: its memory goes, also on the helper that read it. */
void inbox_line_free(struct inbox *inbox);
/*
 * Receive exactly `want` bytes that were seen to be in the socket and that do
 * not reach past the end of the line. ERR_TOOBIG: the line would be longer than
 * `cap` and its newline; ERR_IO: they are not there; ERR_NOMEM.
 */
int inbox_take(struct inbox *inbox, size_t want, uint64_t cap);

#endif
