/* SPDX-License-Identifier: Apache-2.0 */
/*
 * landlock: files that this process, and its later children, gives up permanently
 * (landlock(7)). Open descriptors stay usable. In such a process the memory and the
 * descriptors of others (/proc/PID/mem, …/fd, ptrace) are out of reach, too.
 *
 * Before Linux 7.0 it holds for the calling thread and those that it makes: so before the
 * first one.
 */
#ifndef KVD_GATE_LANDLOCK_H
#define KVD_GATE_LANDLOCK_H

/* 0: not supported by this kernel, or not permitted in this container. */
int landlock_version(void);
/* Every file, socket and signal. -1: errno. */
int landlock_nothing(void);
/* Changing files, but in and below `directories` and by `devices` (NULL at the end of
 * each; missing ones are skipped). Read access stays. -1: errno. */
int landlock_no_change(const char *const *directories, const char *const *devices);

#endif
