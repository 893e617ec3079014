/* SPDX-License-Identifier: Apache-2.0 */
/* openat2: a name in a directory that others may write, without waiting for them. */
#ifndef KVD_BASE_OPENAT2_H
#define KVD_BASE_OPENAT2_H

/*
 * An O_PATH descriptor of the entry with that name (one component) in the directory;
 * symbolic links are not followed. -1 and errno; EXDEV: another file system is mounted
 * there, whose server may never answer, and which was not entered. It opens nothing: a
 * FIFO, a device or a leased file may wait.
 */
int openat2_path(const char *dir, const char *name);
/* The entry found, opened by open(2); `flags` besides O_CLOEXEC. */
int openat2_reopen(int path_fd, int flags);

#endif
