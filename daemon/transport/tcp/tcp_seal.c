/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sealing is the copy: rows are encrypted from where they lie into the record, which the
 * kernel takes while it is in the cache. Many short pieces cost a call of the cipher
 * each, so the caller packs them first (tcp_tx.c).
 *
 * Opening is done into memory of this daemon's, never an engine's (tcp_rx.c has the
 * reason).
 *
 * Records of 16 KiB are TLS's limit. 64 KiB would save 4 % of the cipher's time.
 */
#include "daemon/transport/tcp/tcp_seal.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/transport/tcp/tcp_openssl.h"

#define CONTENT 0x17 /* application data */

static EVP_CIPHER *cipher;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void seal_fetch(void)
{
	cipher = EVP_CIPHER_fetch(NULL, "AES-128-GCM", NULL);
}

/* ---- keys ---- */

int tcp_seal_key(const struct tcp_secret *secret, uint8_t key_p[TCP_KEY_BYTES],
		 uint8_t iv_p[TCP_IV_BYTES])
{
	uint8_t both[TCP_KEY_BYTES + TCP_IV_BYTES];
	int r = tcp_keys_derive(secret, "key", 0, both, sizeof(both));

	memcpy(key_p, both, TCP_KEY_BYTES);
	memcpy(iv_p, both + TCP_KEY_BYTES, TCP_IV_BYTES);
	OPENSSL_cleanse(both, sizeof(both));
	return err_pass(r);
}

static int failed(void)
{
	return err_raise(ERR_NOMEM, "tcp: OpenSSL: out of memory");
}

static int key_set(struct tcp_seal *seal)
{
	uint8_t key[TCP_KEY_BYTES];
	int r = tcp_seal_key(&seal->secret, key, seal->iv);

	/* the direction is given with each record */
	if (r == 0 && !EVP_EncryptInit_ex(seal->ctx, cipher, NULL, key, NULL))
		r = failed();
	OPENSSL_cleanse(key, sizeof(key));
	return err_pass(r);
}

static int key_next(struct tcp_seal *seal)
{
	struct tcp_secret next;
	int r = tcp_keys_derive(&seal->secret, "next", 0, next.bytes, sizeof(next.bytes));

	if (r == 0)
		seal->secret = next;
	OPENSSL_cleanse(&next, sizeof(next));
	return err_pass(r < 0 ? r : key_set(seal));
}

int tcp_seal_new(const struct tcp_secret *secret, const char *name,
		 struct tcp_seal **seal_p)
{
	struct tcp_seal *seal = mem_zalloc(sizeof(*seal));
	int r;

	if (!seal)
		return err_pass(-ENOMEM);
	pthread_once(&once, seal_fetch);
	seal->name = name;
	seal->secret = *secret;
	seal->key_records = TCP_KEY_RECORDS;
	seal->ctx = EVP_CIPHER_CTX_new();
	if (!cipher)
		r = err_raise(ERR_REQUIRE, "tcp: this OpenSSL's libcrypto has no "
					   "AES-128-GCM");
	else
		r = seal->ctx ? key_set(seal) : failed();
	if (r < 0) {
		tcp_seal_free(seal);
		return err_pass(r);
	}
	*seal_p = seal;
	return 0;
}

void tcp_seal_free(struct tcp_seal *seal)
{
	if (!seal)
		return;
	EVP_CIPHER_CTX_free(seal->ctx);
	OPENSSL_cleanse(seal, sizeof(*seal));
	mem_free(seal);
}

/* The next record's key and nonce. */
static int record_begin(struct tcp_seal *seal, bool seals)
{
	uint8_t nonce[TCP_IV_BYTES];
	int r = 0;

	if (seal->number && seal->number % seal->key_records == 0)
		r = key_next(seal);
	memcpy(nonce, seal->iv, sizeof(nonce));
	for (unsigned int i = 0; i < 8; i++)
		nonce[TCP_IV_BYTES - 1 - i] ^= (uint8_t)(seal->number >> 8 * i);
	seal->number++;
	if (r == 0 && !EVP_CipherInit_ex(seal->ctx, NULL, NULL, NULL, nonce, seals))
		r = failed();
	return err_pass(r);
}

/* ---- sealing ---- */

static size_t iov_bytes(const struct msghdr *msg, size_t most)
{
	size_t n = 0;

	for (size_t i = 0; i < msg->msg_iovlen && n < most; i++)
		n += msg->msg_iov[i].iov_len;
	return n < most ? n : most;
}

/* The next piece of `msg`, `most` bytes at most, which it names no more. */
static struct iovec piece_take(struct msghdr *msg, size_t most)
{
	struct iovec *first = msg->msg_iov, piece = *first;

	if (piece.iov_len > most) {
		piece.iov_len = most;
		first->iov_base = (uint8_t *)first->iov_base + most;
		first->iov_len -= most;
	} else {
		msg->msg_iov++;
		msg->msg_iovlen--;
	}
	return piece;
}

static bool update(struct tcp_seal *seal, uint8_t *to, const void *from, size_t len)
{
	int n;

	return EVP_CipherUpdate(seal->ctx, to, &n, from, (int)len) > 0;
}

/* `len` bytes, and the content's type behind them. */
static bool seal_content(struct tcp_seal *seal, uint8_t *record, struct msghdr *msg,
			 size_t len)
{
	uint8_t *to = record + TCP_RECORD_HEAD, *end = to + len, type = CONTENT;
	bool ok = update(seal, NULL, record, TCP_RECORD_HEAD);

	while (to < end && ok) {
		struct iovec piece = piece_take(msg, (size_t)(end - to));

		if (piece.iov_len == 0)
			continue; /* of nowhere, perhaps */
		ok = update(seal, to, piece.iov_base, piece.iov_len);
		to += piece.iov_len;
	}
	return ok && update(seal, to, &type, 1);
}

ssize_t tcp_seal_put(struct tcp_seal *seal, struct msghdr *msg)
{
	size_t len = iov_bytes(msg, TCP_RECORD_MAX), sealed = len + 1 + TCP_RECORD_TAG;
	uint8_t *record = seal->buf + seal->end,
		*tag = record + TCP_RECORD_HEAD + len + 1;
	int n, r;

	if (len == 0)
		return 0;
	assert(seal->end + TCP_RECORD_HEAD + sealed <= seal->size);
	r = record_begin(seal, true);
	if (r < 0)
		return err_pass(r);
	record[0] = CONTENT;
	record[1] = record[2] = 3;
	record[3] = (uint8_t)(sealed >> 8);
	record[4] = (uint8_t)sealed;
	if (!seal_content(seal, record, msg, len) ||
	    EVP_EncryptFinal_ex(seal->ctx, tag, &n) <= 0 ||
	    EVP_CIPHER_CTX_ctrl(seal->ctx, EVP_CTRL_AEAD_GET_TAG, TCP_RECORD_TAG, tag) <=
		    0)
		return failed();
	seal->end += TCP_RECORD_HEAD + sealed;
	return (ssize_t)len;
}

/* 0: the socket has all of it. */
static int flush(struct tcp_seal *seal, int fd)
{
	while (seal->pos < seal->end) {
		ssize_t n = send(fd, seal->buf + seal->pos, seal->end - seal->pos,
				 MSG_NOSIGNAL | MSG_DONTWAIT);

		if (n < 0)
			return -1;
		seal->pos += (size_t)n;
	}
	seal->pos = seal->end = 0;
	return 0;
}

ssize_t tcp_seal_sendmsg(struct tcp_seal *seal, int fd, struct msghdr *msg)
{
	ssize_t taken = 0, n = 1;

	if (flush(seal, fd) < 0)
		return -1;
	while (n > 0 && seal->size - seal->end >= TCP_RECORD_BYTES) {
		n = tcp_seal_put(seal, msg);
		taken += n;
	}
	if (n < 0) {
		err_clear();
		errno = ENOMEM;
		return -1;
	}
	if (flush(seal, fd) < 0 && errno != EAGAIN && errno != ENOBUFS && errno != EINTR)
		return -1;
	return taken;
}

/* ---- opening ---- */

static int forged(struct tcp_seal *seal)
{
	seal->broken = true;
	OPENSSL_cleanse(seal->buf, seal->size);
	return err_raise(ERR_AUTH,
			 "tcp: authentication failed: record %" PRIu64 " of a connection "
			 "to %s was changed, dropped, replayed or reordered in transit",
			 seal->number - 1, seal->name);
}

ssize_t tcp_seal_fill(struct tcp_seal *seal, int fd)
{
	ssize_t n;

	assert(seal->plain_len == 0);
	if (seal->size - seal->end < TCP_RECORD_BYTES || seal->pos == seal->end) {
		memmove(seal->buf, seal->buf + seal->pos, seal->end - seal->pos);
		seal->end -= seal->pos;
		seal->pos = 0;
	}
	n = recv(fd, seal->buf + seal->end, seal->size - seal->end, MSG_DONTWAIT);
	if (n > 0)
		seal->end += (size_t)n;
	return n;
}

/* The content of the complete record at `pos`, if the tag is right. */
static bool open_content(struct tcp_seal *seal, uint8_t *record, size_t len, uint8_t *to)
{
	uint8_t *content = record + TCP_RECORD_HEAD, *tag = content + len;
	int n;

	if (EVP_CIPHER_CTX_ctrl(seal->ctx, EVP_CTRL_AEAD_SET_TAG, TCP_RECORD_TAG, tag) <=
	    0)
		return false;
	return update(seal, NULL, record, TCP_RECORD_HEAD) &&
	       update(seal, to, content, len) &&
	       EVP_DecryptFinal_ex(seal->ctx, tag, &n) > 0;
}

int tcp_seal_open(struct tcp_seal *seal, uint8_t *to, size_t room)
{
	uint8_t *record = seal->buf + seal->pos;
	size_t came = seal->end - seal->pos, len;
	int r;

	assert(seal->plain_len == 0);
	if (seal->broken)
		return forged(seal);
	if (came < TCP_RECORD_HEAD)
		return 0;
	len = (size_t)record[3] << 8 | record[4]; /* with type and tag */
	if (record[0] == CONTENT && record[1] == 3 && record[2] == 3 &&
	    len >= 2 + TCP_RECORD_TAG && len <= TCP_RECORD_BYTES - TCP_RECORD_HEAD &&
	    came < TCP_RECORD_HEAD + len)
		return 0;
	if (!to || room < len)
		to = record + TCP_RECORD_HEAD;
	r = record_begin(seal, false);
	if (r < 0)
		return err_pass(r);
	if (came < TCP_RECORD_HEAD + len || len < 2 + TCP_RECORD_TAG ||
	    !open_content(seal, record, len - TCP_RECORD_TAG, to))
		return forged(seal);
	seal->pos += TCP_RECORD_HEAD + len;
	len -= TCP_RECORD_TAG + 1;
	if (to[len] != CONTENT)
		return err_raise(ERR_PROTO, "tcp: a record of type %u", to[len]);
	seal->plain = to;
	seal->plain_len = len;
	return 1;
}

/* Copies opened bytes to the buffers of `msg`. */
static ssize_t seal_give(struct tcp_seal *seal, const struct msghdr *msg)
{
	ssize_t given = 0;

	for (size_t i = 0; i < msg->msg_iovlen && seal->plain_len > 0; i++) {
		size_t part = msg->msg_iov[i].iov_len < seal->plain_len
				      ? msg->msg_iov[i].iov_len
				      : seal->plain_len;

		memcpy(msg->msg_iov[i].iov_base, seal->plain, part);
		tcp_seal_taken(seal, part);
		given += (ssize_t)part;
	}
	return given;
}

ssize_t tcp_seal_recvmsg(struct tcp_seal *seal, int fd, const struct msghdr *msg)
{
	ssize_t n;
	int r;

	while (seal->plain_len == 0) {
		r = tcp_seal_open(seal, NULL, 0);
		if (r < 0) {
			errno = EBADMSG;
			return -1;
		}
		if (r > 0)
			break;
		n = tcp_seal_fill(seal, fd);
		if (n <= 0)
			return n;
	}
	return seal_give(seal, msg);
}
