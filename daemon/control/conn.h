/* SPDX-License-Identifier: Apache-2.0 */
/*
 * conn: one connection of the control socket. It splits bytes into lines, assigns
 * descriptors to the line that they arrived with, and sends replies. Private to
 * control.c.
 */
#ifndef KVD_CONN_H
#define KVD_CONN_H

#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"

struct conn;
struct kvd;
struct session_peer;

#define CONN_PEEK_BYTES (32u << 10)

/* shared by the connections of one control socket */
struct conn_host {
	struct kvd *kvd;
	struct list conns;
	uint64_t timeout_ns;
	uint8_t peek[CONN_PEEK_BYTES];
};

/* Also creates the session. `fd` (non-blocking) is taken on success. */
int conn_new(struct conn_host *host, int fd, const struct session_peer *peer);
/* Close the connection in the next turn, with its session. */
void conn_end_later(struct conn *conn, const struct err *why);
/* Its socket. */
int conn_fd(const struct conn *conn);
/* The loop has stopped: close and free all at once. */
void conns_free(struct conn_host *host);

#endif
