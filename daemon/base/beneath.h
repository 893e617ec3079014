/* SPDX-License-Identifier: Apache-2.0 */
/* beneath: a name in a directory that others may write, without waiting for them. */
#ifndef KVD_BASE_BENEATH_H
#define KVD_BASE_BENEATH_H

/*
 * An O_PATH descriptor of the entry with that name (one component) in the directory;
 * symbolic links are not followed. -1 and errno; EXDEV: another file system is mounted
 * there, whose server may never answer, and which was not entered. It opens nothing: a
 * FIFO, a device or a leased file may wait.
 */
int beneath_look(const char *dir, const char *name);
/* The entry found, opened by open(2); `flags` besides O_CLOEXEC. */
int beneath_open(int path_fd, int flags);

#endif
