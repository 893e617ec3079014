/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp_seal: one direction of a connection as records that are encrypted and
 * authenticated by AES-128-GCM.
 *
 * A record is TLS 1.3's (RFC 8446, 5.2):
 *
 *   17 03 03, length (16 bits)   authenticated
 *   up to 16384 bytes, 17        encrypted
 *   tag (16 bytes)
 *
 * Its number is in the nonce, from 0 up, and is not sent: a missing, repeated or
 * reordered one has a wrong tag, as has one of another stream, connection or direction,
 * which has another key. A key serves for TCP_KEY_RECORDS records; then both ends derive
 * the next one.
 *
 * One thread at a time. Buffers belong to the owner, which provides them while they hold
 * data.
 */
#ifndef KVD_TRANSPORT_TCP_SEAL_H
#define KVD_TRANSPORT_TCP_SEAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "daemon/transport/tcp/tcp_keys.h"

#define TCP_RECORD_MAX 16384u /* bytes of a record's content */
#define TCP_RECORD_HEAD 5u
#define TCP_RECORD_TAG 16u
#define TCP_RECORD_BYTES (TCP_RECORD_HEAD + TCP_RECORD_MAX + 1u + TCP_RECORD_TAG)
#define TCP_KEY_BYTES 16u
#define TCP_IV_BYTES 12u
#define TCP_KEY_RECORDS (UINT64_C(1) << 24) /* RFC 8446, 5.5: 2^24.5 at most */

struct evp_cipher_ctx_st; /* OpenSSL's */

struct tcp_seal {
	struct evp_cipher_ctx_st *ctx;
	const char *name; /* of the other end, for messages */
	struct tcp_secret secret;
	uint8_t iv[TCP_IV_BYTES];
	uint64_t number;      /* of the next record */
	bool broken;	      /* opening: one was wrong, so no other is right */
	uint64_t key_records; /* of a key */
	uint8_t *buf;	      /* the owner's; NULL: none */
	size_t size;	      /* of it, TCP_RECORD_BYTES or more */
	size_t pos, end;      /* sealing: to be sent; opening: received, not opened */
	const uint8_t *plain; /* opening: of the last record, not taken yet */
	size_t plain_len;
};

/* The key and nonce of a secret's first records. */
int tcp_seal_key(const struct tcp_secret *secret, uint8_t key_p[TCP_KEY_BYTES],
		 uint8_t iv_p[TCP_IV_BYTES]);
/* `name` lives as long as the seal. */
int tcp_seal_new(const struct tcp_secret *secret, const char *name,
		 struct tcp_seal **seal_p);
void tcp_seal_free(struct tcp_seal *seal); /* NULL is allowed */
/* It must be idle. NULL: takes the buffer back. */
static inline void tcp_seal_lend(struct tcp_seal *seal, uint8_t *buf, size_t size)
{
	seal->buf = buf;
	seal->size = size;
	seal->pos = seal->end = 0;
}
/* Is data in the buffer? Then it cannot be taken back. */
static inline bool tcp_seal_busy(const struct tcp_seal *seal)
{
	return seal && (seal->pos < seal->end || seal->plain_len > 0);
}

/* ---- sealing ---- */
/* One record of the first bytes that `msg` names, TCP_RECORD_MAX at most, after the
 * content of the buffer, which has room for it. Returns the number of bytes, removed from
 * `msg`: 0 for none, negative: raised. They may change meanwhile: the record has the
 * bytes that were read. */
ssize_t tcp_seal_put(struct tcp_seal *seal, struct msghdr *msg);
/* As sendmsg(2) with MSG_DONTWAIT: bytes taken, in so many records as the buffer holds;
 * records that the socket does not take wait for the next call, which may name no more
 * bytes. -1 and errno, EAGAIN while earlier records wait. */
ssize_t tcp_seal_sendmsg(struct tcp_seal *seal, int fd, struct msghdr *msg);

/* ---- opening ---- */
/* Read on: as recv(2). */
ssize_t tcp_seal_fill(struct tcp_seal *seal, int fd);
/* Opens the next record; the content of the last one was taken. 1: `plain` has its bytes,
 * whose tag is right: at `to`, if it has room for them, else in the buffer. 0: it is
 * incomplete. Negative: ERR_AUTH, the connection is to end; `to` may have been
 * written. */
int tcp_seal_open(struct tcp_seal *seal, uint8_t *to, size_t room);
static inline void tcp_seal_taken(struct tcp_seal *seal, size_t n)
{
	seal->plain += n;
	seal->plain_len -= n;
}
/* As recvmsg(2) with MSG_DONTWAIT; -1 and EBADMSG: raised, as above. */
ssize_t tcp_seal_recvmsg(struct tcp_seal *seal, int fd, const struct msghdr *msg);

#endif
