/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inbox: the request line that one client is sending, and the descriptors that arrived
 * with its bytes. Descriptors are received through a gate, with the bytes up to them
 * ("ahead"); all other bytes are read here.
 */
#ifndef KVD_INBOX_H
#define KVD_INBOX_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/request/commands.h"

struct gate_parcel;
struct inbox_ahead;

struct inbox {
	int fd; /* the client's socket, not owned */
	char *line;
	size_t len, cap;
	int fds[REQUEST_FDS_MAX]; /* owned until taken (set fd_count 0) */
	unsigned int fd_count;
	struct err fault;	   /* code != OK: descriptors of this line were lost */
	struct inbox_ahead *ahead; /* received, not part of the line yet; NULL: none */
};

void inbox_init(struct inbox *inbox, int fd);
/* Drop the line: closes its descriptors, keeps a small buffer. */
void inbox_reset(struct inbox *inbox);
void inbox_fini(struct inbox *inbox);
/* The line has been read: frees its memory, also on the helper that read it. */
void inbox_line_free(struct inbox *inbox);
/* Add data that a gate has received; it precedes the unread data of the socket. Takes
 * the descriptors. */
int inbox_put(struct inbox *inbox, struct gate_parcel *parcel);
/* Bytes that arrived ahead, if any. */
const uint8_t *inbox_ahead(const struct inbox *inbox, size_t *len_p);
/*
 * Take exactly `want` bytes: either bytes that arrived ahead, or bytes peeked from the
 * socket without descriptors. They must not extend past the end of the line. ERR_TOOBIG:
 * the line would exceed `cap` and its newline; ERR_IO: the bytes are missing; ERR_NOMEM.
 */
int inbox_take(struct inbox *inbox, size_t want, uint64_t cap);

#endif
