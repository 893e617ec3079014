/* SPDX-License-Identifier: Apache-2.0 */
/*
 * notify: messages to systemd, and descriptors passed by it: sd_notify(3) states, the
 * watchdog, listening sockets. Spoken directly (both protocols are a page long and
 * stable), so the daemon needs no libsystemd. Without systemd every call is a cheap
 * nothing.
 */
#ifndef KVD_NOTIFY_H
#define KVD_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>

/* None of them blocks or fails: a lost status is harmless, and the queue is empty when
 * READY is sent. */
void notify_ready(const char *status);	/* READY=1 */
void notify_reloading(uint64_t now_ns); /* CLOCK_MONOTONIC; READY follows */
void notify_stopping(const char *status);
void notify_status(const char *status);
void notify_watchdog(void);

/* The watchdog's limit for this process; 0 = none. */
uint64_t notify_watchdog_ns(void);

/* The listening Unix stream socket handed over for this process, close-on-exec and
 * non-blocking; *fd_p = -1 when there is none. ERR_CONFIG for any other descriptor, or
 * more than one. The environment is cleared, so that children do not use it. Descriptors
 * named "kvd-…" are not sockets, but those of notify_keep_fd(). */
int notify_listen_fd(int *fd_p);

/* Keep a descriptor beyond this process (FileDescriptorStoreMax= of the unit). */
bool notify_keeps(void); /* is a service manager present? */
void notify_keep_fd(const char *name, int fd);
void notify_forget_fd(const char *name);
/* The descriptor kept by the previous process, once, owned by the caller; -1: none. */
int notify_kept_fd(const char *name);

#endif
