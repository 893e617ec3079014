/* SPDX-License-Identifier: Apache-2.0 */
/* vet: which descriptors of strangers the daemon may hold. */
#ifndef KVD_GATE_VET_H
#define KVD_GATE_VET_H

#include <stdbool.h>
#include <stddef.h>

/*
 * 0: closing it and what the daemon does with it does not sleep for longer than the
 * kernel itself needs: memory (memfd, tmpfs, hugetlbfs), a file of a local file system or
 * a block device (vet_is_disk()), a dma-buf, an NVIDIA device, a process's memory
 * (/proc/PID/mem) or its figures (vet_is_statm()), a pidfd. Else -1, and `what` says what
 * it is. May sleep for as long as a stranger likes: for gates only.
 */
int vet_fd(int fd, char *what, size_t size);

/* Of one that passed: it is /proc/PID/statm, and no other file that is mounted there.
 * Whoever shares its description can hold the kernel's lock of it while he sleeps: it is
 * to be opened again, not to be read. */
bool vet_is_statm(int fd);

/* Of one that passed: bytes at offsets, of a regular file or a block device; its disk may
 * be slow, and nobody else answers for it. Else `what` says what it is. */
bool vet_is_disk(int fd, char *what, size_t size);

/* Before a process gives up opening files (sandbox.h): what vet_fd() will look at. */
void vet_prepare(void);
int vet_descriptor(void); /* of that, to be kept open; or -1 */

#endif
