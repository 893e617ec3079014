/* SPDX-License-Identifier: Apache-2.0 */
/*
 * warden: a small process, forked before the daemon has threads, that forks the
 * disposable processes that make calls which may sleep for as long as a client likes
 * (gate.h). It touches no client object itself.
 *
 * It also keeps descriptors that the daemon must never be the last to close, and ends
 * when the daemon has ended, for any reason.
 */
#ifndef KVD_GATE_WARDEN_H
#define KVD_GATE_WARDEN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct loop;
struct warden;

/* Before the first thread: the warden's process, and the socket to it. */
int warden_fork(int *socket_p);

/* The daemon's side. Takes the socket. When the warden's process ends, on_lost is called
 * once: nothing can be forked after that. on_freed: one that had been abandoned has
 * ended.
 */
struct warden_events {
	void (*on_lost)(void *arg);
	void (*on_freed)(void *arg);
	void *arg;
};
int warden_new(struct loop *loop, int socket, const struct warden_events *events,
	       struct warden **warden_p);
void warden_free(struct warden *warden); /* NULL is allowed */

enum warden_kind {
	WARDEN_GATE, /* gate_child.h */
	WARDEN_VM,   /* vm_child.h */
	WARDEN_OPEN, /* open_child.h */
};

/*
 * Any thread. Forks a process that serves `uid`; *socket_p is a SOCK_SEQPACKET to it.
 * Never waits: the process reads messages sent meanwhile, and ends at end of file.
 * ERR_LIMIT: too many of this user's hang.
 */
int warden_start(struct warden *warden, enum warden_kind kind, uid_t uid, uint64_t *id_p,
		 int *socket_p);
/* Any thread. SIGKILL; it counts for its user until the kernel has let it end, and one
 * that `hung` for at least half a minute. */
void warden_abandon(struct warden *warden, uint64_t id, uid_t uid, bool hung);
/* The warden holds a duplicate until the daemon has ended. */
void warden_keep(struct warden *warden, int fd);

#endif
