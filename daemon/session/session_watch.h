/* SPDX-License-Identifier: Apache-2.0 */
/*
 * session_watch: detects the end of an engine's process or memory, and writes the
 * daemon's heartbeat into the status pages of the sessions.
 *
 * There are three signals, because each can be late or missing: the EOF of the socket
 * (control.c; a forked child keeps a socket open), the pidfd of the process (a second
 * late after kill -9 of a large process), and /proc/<pid>/statm, which reads zero as soon
 * as the address space is freed and which the engine has to pass.
 */
#ifndef KVD_SESSION_WATCH_H
#define KVD_SESSION_WATCH_H

#include <stdbool.h>

struct kvd;
struct session;
struct session_peer;
struct session_watch;

/* watch_p stays NULL where the kernel reports no pid (another PID namespace): EOF is
 * the only signal then. ERR_SESSION: the process has ended already. */
int session_watch_new(struct session *session, const struct session_peer *peer,
		      struct session_watch **watch_p);
/* Watch its memory, too: by a statm that passed a gate. The first call counts; the
 * caller keeps the descriptor. */
int session_watch_memory(struct session_watch *watch, int statm_fd);
/* Stop watching: the session ends. NULL is fine in both. */
void session_watch_stop(struct session_watch *watch);
void session_watch_free(struct session_watch *watch);
/* Are the process and its memory alive, as far as known (NULL: true)? While this
 * holds, the pid names the process that connected. */
bool session_watch_alive(const struct session_watch *watch);
/* A duplicate of the process's pidfd, -1: none. */
int session_watch_pidfd(const struct session_watch *watch);

/* One timer for all sessions: heartbeats, and checks of statm for those with regions
 * or rooms. Runs only while there are sessions. */
int session_clock_start(struct kvd *kvd);
void session_clock_stop(struct kvd *kvd); /* there are no sessions; idempotent */

#endif
