/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_watch: has an engine's process, or its memory, gone? And the daemon's
 * heartbeat in the sessions' status pages.
 *
 * Three witnesses, because each can come late or never: the socket's EOF
 * (control.c; a forked child keeps a socket open), the process's pidfd (after
 * kill -9 of a large process a second late), and /proc/<pid>/statm, which reads
 * zero as soon as the address space is gone and which the engine has to pass.
 */
#ifndef KVD_SESSION_WATCH_H
#define KVD_SESSION_WATCH_H

#include <stdbool.h>

struct kvd;
struct session;
struct session_peer;
struct session_watch;

/* *watch_p stays NULL where the kernel shows us no pid (another PID namespace):
 * EOF is the only witness then. ERR_SESSION: the process is gone already. */
int session_watch_new(struct session *session, const struct session_peer *peer,
		      struct session_watch **watch_p);
/* From now on its memory is watched, too: by a statm that passed a gate. The first
 * counts, and stays the caller's. */
int session_watch_memory(struct session_watch *watch, int statm_fd);
/* The session ends: look no more. NULL is fine in both. */
void session_watch_stop(struct session_watch *watch);
void session_watch_free(struct session_watch *watch);
/* Neither the process nor its memory is known to be gone (NULL: true). While
 * this holds the pid still names the process that connected. */
bool session_watch_alive(const struct session_watch *watch);
/* A duplicate of the process's pidfd, -1: none. */
int session_watch_pidfd(const struct session_watch *watch);

/* One timer for all sessions: heartbeats, and looks at statm of those that have
 * regions or rooms. Runs only while there are sessions. */
int session_clock_start(struct kvd *kvd);
void session_clock_stop(struct kvd *kvd); /* no session is left; idempotent */

#endif
