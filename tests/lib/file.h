/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files of memory as an engine makes them: so long, and every page there. Written: a page
 * that was only read is clean, and reclaim may take it away again.
 */
#ifndef KVD_TEST_FILE_H
#define KVD_TEST_FILE_H

#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* 0, or -1 and errno. */
static inline int file_fill(int fd, size_t bytes)
{
	void *at;

	if (ftruncate(fd, (off_t)bytes) < 0)
		return -1;
	at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		return -1;
	memset(at, 0, bytes);
	return munmap(at, bytes);
}

#endif
