/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lock: one daemon a name. <run_dir>/<name>.lock holds the pid and an flock(2)
 * for the life of the daemon; the kernel lets go of it however the daemon ends,
 * so a file left behind blocks nobody.
 */
#ifndef KVD_LOCK_H
#define KVD_LOCK_H

struct lock {
	int fd; /* -1 when not held */
	char path[512];
};

void lock_init(struct lock *lock);
/* Waits for a holder that was killed and is not through with its exit. ERR_BUSY
 * names the pid of the daemon that holds it; ERR_CONFIG: run_dir does not exist or
 * may not be written; ERR_IO names the path. */
int lock_take(struct lock *lock, const char *run_dir, const char *name);
void lock_drop(struct lock *lock); /* idempotent; removes the file */

/* Remove what an ended daemon left at a control socket's path; 0 also when nothing is
 * there. ERR_CONFIG: somebody listens there (the pid is named), or it is no socket.
 * ERR_BUSY: somebody else takes the path just now. */
int lock_clear_socket(const char *path);

#endif
