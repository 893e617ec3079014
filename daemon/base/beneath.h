/* SPDX-License-Identifier: Apache-2.0 */
/* beneath: a name in a directory that others may write, without waiting for them. */
#ifndef KVD_BASE_BENEATH_H
#define KVD_BASE_BENEATH_H

/*
 * An O_PATH descriptor of what has that name, one part, in the directory: not of what it
 * links to. -1 and errno; EXDEV: another file system is mounted there, whose server may
 * never answer, and which was not entered. Nothing is opened by it: a FIFO, a device or a
 * leased file may wait.
 */
int beneath_look(const char *dir, const char *name);
/* What it found, opened by open(2); `flags` besides O_CLOEXEC. */
int beneath_open(int path_fd, int flags);

#endif
