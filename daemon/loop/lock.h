/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lock: one daemon a name. <run_dir>/<name>.lock holds the pid and an flock(2) for the
 * life of the daemon; the kernel releases it however the daemon ends, so a stale file
 * blocks no daemon.
 */
#ifndef KVD_LOCK_H
#define KVD_LOCK_H

#include <sys/stat.h>
#include <sys/un.h>

struct lock {
	int fd; /* -1 when not held */
	char path[512];
};

void lock_init(struct lock *lock);
/* Waits for a holder that was killed and is exiting. ERR_BUSY names the pid of the daemon
 * that holds it; ERR_CONFIG: run_dir does not exist or may not be written; ERR_IO names
 * the path. */
int lock_take(struct lock *lock, const char *run_dir, const char *name);
/* Does the file exist? A removed one is created again, and locked: positive outcome.
 * ERR_BUSY: another daemon has the name by now. Waits for nothing. */
#define LOCK_MADE_AGAIN 1
int lock_look(struct lock *lock);
void lock_drop(struct lock *lock); /* idempotent; removes the file, if it is its own */

/* The name of a listening Unix socket. */
struct lock_socket {
	char path[sizeof(((struct sockaddr_un *)0)->sun_path)]; /* "" = none */
	struct stat made;					/* the bound socket */
};

/* Bind `fd` to `path`, with `mode`, and listen, after removing an ended daemon's socket.
 * `option` names the path in errors. ERR_CONFIG: another process listens there (the pid
 * is named), it is not a socket, or it is too long. ERR_BUSY: another process is taking
 * the path now. */
int lock_socket_bind(struct lock_socket *socket, int fd, const char *option,
		     const char *path, mode_t mode, int backlog);
/* Does the name exist, and is it the one created here? ERR_BUSY: another file; positive
 * outcome: none. */
#define LOCK_SOCKET_GONE 1
int lock_socket_look(const struct lock_socket *socket);
/* Remove the name if it is the one created here; before the socket is closed, so that the
 * inode number is not reused. Idempotent. */
void lock_socket_drop(struct lock_socket *socket);

#endif
