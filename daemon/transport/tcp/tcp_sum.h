/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp_sum: checksums of a transfer's bytes, for networks whose 16-bit one is not
 * trusted. Pure; a sum is made piece by piece.
 */
#ifndef KVD_TRANSPORT_TCP_SUM_H
#define KVD_TRANSPORT_TCP_SUM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* as in the option `tcp_verify`, and on the wire */
enum tcp_verify {
	TCP_VERIFY_NONE,
	TCP_VERIFY_CRC32C,
	TCP_VERIFY_XXH3,
	TCP_VERIFY_END,
};

/* Of the bytes that the iovecs name, one after the other; NONE gives 0. */
uint64_t tcp_sum(enum tcp_verify kind, const struct iovec *iov, unsigned int count);

/* CRC-32C (Castagnoli), continued from `crc` (0 at the start): with the processor's
 * instruction where it has one. */
uint32_t crc32c(uint32_t crc, const void *buf, size_t len);
/* The same without it: the reference for tests. */
uint32_t crc32c_table(uint32_t crc, const void *buf, size_t len);

#endif
