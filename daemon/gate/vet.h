/* SPDX-License-Identifier: Apache-2.0 */
/* vet: which descriptors of clients the daemon may hold. */
#ifndef KVD_GATE_VET_H
#define KVD_GATE_VET_H

#include <stdbool.h>
#include <stddef.h>

/*
 * 0: closing and using it does not sleep for longer than the kernel itself needs: memory
 * (memfd, tmpfs, hugetlbfs), a file of a local file system or a block device
 * (vet_is_disk()), a dma-buf, an NVIDIA device, a process's memory (/proc/PID/mem) or its
 * figures (vet_is_statm()), a pidfd. Else -1, and `what` describes it. May sleep for as
 * long as a client likes: for gates only.
 */
int vet_fd(int fd, char *what, size_t size);

/* Of one that passed: it is /proc/PID/statm, and no other file that is mounted there. A
 * process that shares its description can hold the kernel's lock on it while sleeping:
 * reopen it instead of reading it. */
bool vet_is_statm(int fd);

/* Of one that passed: bytes at offsets, of a regular file or a block device; its disk may
 * be slow, but no other process serves it. Else `what` describes it. */
bool vet_is_disk(int fd, char *what, size_t size);

/* Before a process gives up opening files (sandbox.h): prepares the checks of
 * vet_fd(). */
void vet_prepare(void);
int vet_descriptor(void); /* of that, to be kept open; or -1 */

#endif
