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
 * names the pid of the daemon that holds it; ERR_IO, ERR_PERM name the
 * path. */
int lock_take(struct lock *lock, const char *run_dir, const char *name);
void lock_drop(struct lock *lock); /* idempotent; removes the file */

#endif
