/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every head carries a checksum of itself. TCP's own is 16 bits; a head that it lets
 * through wrong would name another transfer or length, and a stream that lost framing is
 * indistinguishable from a hostile one. A hello's proof is its checksum (tcp_keys.c).
 */
#include "daemon/transport/tcp/tcp_wire.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/base/cursor.h"

#define HELLO_MAGIC UINT32_C(0x4854564b)   /* "KVTH" */
#define FRAME_MAGIC UINT32_C(0x4654564b)   /* "KVTF" */
#define ADDRESS_MAGIC UINT32_C(0x4154564b) /* "KVTA" */
#define GOOD_MARK UINT32_C(0x444f4f47)	   /* "GOOD" */
#define VOID_MARK UINT32_C(0x44494f56)	   /* "VOID" */
#define WIRE_VERSION 3u
#define CHECK_BYTES 8u

#define HELLO(F) F(8, role) F(8, crypto) F(16, streams) F(16, number)
#define HEAD(F) F(8, type) F(16, flags) F(64, id) F(64, at) F(32, code) F(32, length)

static uint64_t check_of(const uint8_t *buf, size_t size)
{
	return XXH3_64bits(buf, size - CHECK_BYTES);
}

/* ---- hello ---- */

void tcp_hello_put(const struct tcp_hello *m, uint8_t buf[TCP_HELLO_BYTES])
{
	struct cursor out, *c = &out;

	cursor_write(c, buf, TCP_HELLO_BYTES);
	cursor_put_format(c, HELLO_MAGIC, WIRE_VERSION);
	HELLO(CURSOR_PUT);
	cursor_put_u32(c, 0); /* spare */
	cursor_put_bytes(c, m->id, TCP_ID_BYTES);
	cursor_put_bytes(c, m->nonce, TCP_NONCE_BYTES);
	cursor_put_bytes(c, m->proof, TCP_PROOF_BYTES);
}

static int hello_check(const struct tcp_hello *h)
{
	bool line = h->role == TCP_CONTROL || h->role == TCP_WELCOME;

	if (h->role == 0 || h->role >= TCP_ROLE_END || h->crypto >= TCP_CRYPTO_END)
		return err_raise(ERR_PROTO, "tcp hello: role %u, crypto %u", h->role,
				 h->crypto);
	if (line && (h->streams == 0 || h->streams > TCP_STREAMS_MAX))
		return err_raise(ERR_PROTO, "tcp hello: %u streams", h->streams);
	if (h->number >= TCP_STREAMS_MAX)
		return err_raise(ERR_PROTO, "tcp hello: stream %u", h->number);
	return 0;
}

int tcp_hello_get(const uint8_t buf[TCP_HELLO_BYTES], struct tcp_hello *hello_p)
{
	struct tcp_hello *m = hello_p;
	struct cursor in, *c = &in;
	int r;

	cursor_read(c, buf, TCP_HELLO_BYTES);
	r = cursor_get_format(c, "tcp", HELLO_MAGIC, WIRE_VERSION);
	if (r < 0)
		return err_pass(r);
	HELLO(CURSOR_GET);
	(void)cursor_get_u32(c);
	memcpy(m->id, cursor_get_bytes(c, TCP_ID_BYTES), TCP_ID_BYTES);
	memcpy(m->nonce, cursor_get_bytes(c, TCP_NONCE_BYTES), TCP_NONCE_BYTES);
	memcpy(m->proof, cursor_get_bytes(c, TCP_PROOF_BYTES), TCP_PROOF_BYTES);
	return err_pass(hello_check(m));
}

/* ---- heads ---- */

static uint32_t length_max(uint8_t type)
{
	switch (type) {
	case TCP_REQUEST:
		return XP_HEADER_MAX + TCP_EAGER_MAX;
	case TCP_DONE:
		return TCP_EAGER_MAX;
	case TCP_CANCEL:
	case TCP_BYE:
		return TCP_TEXT_MAX;
	case TCP_DATA:
	case TCP_SERVE:
		return TCP_DATA_MAX;
	default:
		return 0;
	}
}

void tcp_head_put(const struct tcp_head *m, uint8_t buf[TCP_HEAD_BYTES])
{
	struct cursor out, *c = &out;

	cursor_write(c, buf, TCP_HEAD_BYTES);
	cursor_put_u32(c, FRAME_MAGIC);
	cursor_put_u8(c, WIRE_VERSION);
	HEAD(CURSOR_PUT);
	cursor_put_u64(c, check_of(buf, TCP_HEAD_BYTES));
}

static int head_check(const struct tcp_head *h, bool data)
{
	bool eager = h->flags & TCP_FLAG_EAGER;

	if (h->type == 0 || h->type >= TCP_TYPE_END ||
	    (h->type != TCP_BEAT && tcp_head_is_data(h) != data))
		return err_raise(ERR_PROTO, "tcp frame: type %u on %s", h->type,
				 data ? "a stream" : "the control line");
	if (h->length > length_max(h->type) || (tcp_head_is_data(h) && h->length == 0))
		return err_raise(ERR_PROTO, "tcp frame: type %u with %u bytes", h->type,
				 h->length);
	if ((h->id == 0) != (h->type == TCP_BYE || h->type == TCP_BEAT))
		return err_raise(ERR_PROTO, "tcp frame: type %u of transfer %llu",
				 h->type, (unsigned long long)h->id);
	if (eager && h->type != TCP_REQUEST && h->type != TCP_DONE)
		return err_raise(ERR_PROTO, "tcp frame: type %u carries unexpected bytes",
				 h->type);
	if (h->type == TCP_REQUEST &&
	    (eager ? h->at == 0 || h->at > TCP_EAGER_MAX || h->at > h->length ||
			     h->length - h->at > XP_HEADER_MAX
		   : h->length > XP_HEADER_MAX))
		return err_raise(ERR_PROTO,
				 "tcp request: %u bytes, %llu of them the transfer's",
				 h->length, (unsigned long long)h->at);
	if (h->type == TCP_DONE &&
	    (eager ? h->code != ERR_OK || h->length == 0 : h->length > TCP_TEXT_MAX))
		return err_raise(ERR_PROTO, "tcp answer: %u bytes", h->length);
	if (data && h->at > UINT64_MAX - h->length)
		return err_raise(ERR_PROTO, "tcp frame: bytes from %llu on wrap around",
				 (unsigned long long)h->at);
	return 0;
}

int tcp_head_get(const uint8_t buf[TCP_HEAD_BYTES], bool data, struct tcp_head *head_p)
{
	struct tcp_head *m = head_p;
	struct cursor in, *c = &in;
	uint32_t magic;
	uint8_t version;

	cursor_read(c, buf, TCP_HEAD_BYTES);
	magic = cursor_get_u32(c);
	version = cursor_get_u8(c);
	HEAD(CURSOR_GET);
	if (magic != FRAME_MAGIC || version != WIRE_VERSION)
		return err_raise(ERR_PROTO, "tcp frame: magic %08x version %u", magic,
				 version);
	if (cursor_get_u64(c) != check_of(buf, TCP_HEAD_BYTES))
		return err_raise(ERR_PROTO, "tcp frame: header checksum mismatch");
	return err_pass(head_check(m, data));
}

/* ---- trailers ---- */

void tcp_trailer_put(bool good, uint8_t buf[TCP_TRAILER_BYTES])
{
	struct cursor c;

	cursor_write(&c, buf, TCP_TRAILER_BYTES);
	cursor_put_u32(&c, good ? GOOD_MARK : VOID_MARK);
}

int tcp_trailer_get(const uint8_t buf[TCP_TRAILER_BYTES], bool *good_p)
{
	uint32_t mark;
	struct cursor c;

	cursor_read(&c, buf, TCP_TRAILER_BYTES);
	mark = cursor_get_u32(&c);
	if (mark != GOOD_MARK && mark != VOID_MARK)
		return err_raise(ERR_PROTO, "tcp trailer: mark %08x", mark);
	*good_p = mark == GOOD_MARK;
	return 0;
}

/* ---- addresses ---- */

int tcp_address_put(const struct tcp_address *address, uint8_t buf[XP_ADDRESS_MAX],
		    size_t *len_p)
{
	struct cursor c;

	cursor_write(&c, buf, XP_ADDRESS_MAX);
	cursor_put_format(&c, ADDRESS_MAGIC, WIRE_VERSION);
	cursor_put_u8(&c, (uint8_t)address->count);
	for (uint32_t i = 0; i < address->count; i++)
		net_place_put(&c, &address->list[i], false);
	*len_p = c.pos;
	return err_pass(cursor_check(&c, "tcp address"));
}

int tcp_address_get(const void *buf, size_t len, struct tcp_address *address_p)
{
	struct cursor c;
	int r;

	memset(address_p, 0, sizeof(*address_p));
	cursor_read(&c, buf, len);
	r = cursor_get_format(&c, "tcp address", ADDRESS_MAGIC, WIRE_VERSION);
	if (r < 0)
		return err_pass(r);
	address_p->count = cursor_get_u8(&c);
	if (address_p->count == 0 || address_p->count > TCP_ADDRESSES_MAX)
		return err_raise(ERR_PROTO, "tcp address: %u places", address_p->count);
	for (uint32_t i = 0; i < address_p->count && !c.bad; i++)
		net_place_get(&c, false, &address_p->list[i]);
	if (c.bad || cursor_left(&c) > 0)
		return err_raise(ERR_PROTO, "tcp address: %zu bytes for %u places", len,
				 address_p->count);
	return 0;
}

socklen_t tcp_sockaddr_len(const union net_place *sa)
{
	return sa->any.sa_family == AF_INET6 ? sizeof(sa->v6) : sizeof(sa->v4);
}

void tcp_sockaddr_text(const union net_place *sa, char *buf, size_t size)
{
	char host[INET6_ADDRSTRLEN] = "?";

	if (sa->any.sa_family == AF_INET6) {
		inet_ntop(AF_INET6, &sa->v6.sin6_addr, host, sizeof(host));
		snprintf(buf, size, "[%s]:%u", host, ntohs(sa->v6.sin6_port));
	} else {
		inet_ntop(AF_INET, &sa->v4.sin_addr, host, sizeof(host));
		snprintf(buf, size, "%s:%u", host, ntohs(sa->v4.sin_port));
	}
}
