/* SPDX-License-Identifier: Apache-2.0 */
/*
 * message: what the driver, a puppet's process and a keeper say to each other over a
 * stream socket: a struct cmd or reply, its blob, and over a Unix socket at most one
 * fd. Blocking; false when the other end is gone.
 */
#ifndef TESTS_CONFORM_MESSAGE_H
#define TESTS_CONFORM_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

bool send_all(int sock, const void *buf, size_t len, int fd); /* fd -1: none */
/* Exactly `len` bytes; an fd that comes with them goes to *fd_p. */
bool recv_all(int sock, void *buf, size_t len, int *fd_p);
/* NULL when there is none. The caller frees it. */
bool recv_blob(int sock, uint32_t len, void **blob_p);

#endif
