/* SPDX-License-Identifier: Apache-2.0 */
/*
 * warden: a small process, forked before the daemon has threads, that forks the
 * disposable processes in which calls are made that may sleep for as long as a stranger
 * likes (gate.h). It touches nothing foreign itself.
 *
 * It also keeps what the daemon must never be the last to close, and ends when the
 * daemon has ended, however that was.
 */
#ifndef KVD_GATE_WARDEN_H
#define KVD_GATE_WARDEN_H

#include <stdint.h>
#include <sys/types.h>

#include "daemon/base/list.h"

struct loop;
struct warden;

/* Before the first thread: the warden's process, and the socket to it. */
int warden_fork(int *socket_p);

/* The daemon's side. Takes the socket. When the warden's process ends, on_lost says so
 * once: nothing can be forked any more. */
int warden_new(struct loop *loop, int socket, void (*on_lost)(void *arg), void *arg,
	       struct warden **warden_p);
void warden_free(struct warden *warden); /* NULL is fine; no ward may be left */

/* One forked process. */
struct ward {
	struct list link;
	uint64_t id;
	void (*on_gone)(struct ward *ward); /* it has ended and was unlinked */
};

/* Forks a process that serves `uid`; *socket_p is a SOCK_SEQPACKET to it, non-blocking.
 * Never waits: the process reads what is sent meanwhile. ERR_IO, ERR_LIMIT. */
int warden_spawn(struct warden *warden, uid_t uid, struct ward *ward, int *socket_p);
/* SIGKILL; on_gone follows when the kernel lets it end. */
void warden_kill(struct warden *warden, const struct ward *ward);
/* on_gone will not be called any more. */
void warden_forget(struct ward *ward);
/* The warden holds a duplicate until the daemon has ended. */
void warden_keep(struct warden *warden, int fd);

#endif
