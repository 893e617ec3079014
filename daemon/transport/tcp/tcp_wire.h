/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp_wire: the bytes of the tcp backend: the start of a connection, the head of every
 * frame, the trailer of a data frame, and an address as HELLO carries it.
 *
 * Pure. Little-endian, read and written by the bounded cursor; every length is checked
 * against its cap here, before any allocation or wait.
 */
#ifndef KVD_TRANSPORT_TCP_WIRE_H
#define KVD_TRANSPORT_TCP_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/transport/net_wire.h"
#include "daemon/plan/pack.h"
#include "daemon/transport/transport.h"

#define TCP_HELLO_BYTES 96u
#define TCP_ID_BYTES 16u
#define TCP_NONCE_BYTES 32u
#define TCP_PROOF_BYTES 32u
#define TCP_HEAD_BYTES 40u
#define TCP_TRAILER_BYTES 4u
#define TCP_STREAMS_MAX 32u
#define TCP_DATA_MAX PACK_FRAME_BYTES /* bytes of one data frame */
#define TCP_EAGER_MAX PACK_EAGER_MAX  /* bytes that travel inside a request or answer */
#define TCP_TEXT_MAX NET_TEXT_MAX
#define TCP_ADDRESSES_MAX 16u

/* ---- the start of a connection ---- */
enum tcp_role {
	TCP_CONTROL = 1, /* dialer's, first */
	TCP_WELCOME,	 /* its answer */
	TCP_STREAM,	 /* dialer's, of a stream */
	TCP_STREAM_OK,	 /* its answer */
	TCP_ROLE_END,
};

/* The protection of a connection's bytes, as in the option `tcp_crypto`, weaker ones
 * first: of two requirements the larger one applies. */
enum tcp_crypto {
	TCP_CRYPTO_NONE,
	TCP_CRYPTO_AES128GCM,
	TCP_CRYPTO_END,
};

struct tcp_hello {
	enum tcp_role role;
	enum tcp_crypto crypto; /* CONTROL: its sender's requirement; WELCOME: the
				   result */
	uint16_t streams;	/* CONTROL: wanted; WELCOME: given, 1 … MAX */
	uint16_t number;	/* STREAM: which, from 0 */
	uint8_t id[TCP_ID_BYTES];
	uint8_t nonce[TCP_NONCE_BYTES];
	uint8_t proof[TCP_PROOF_BYTES]; /* tcp_keys.h; it is the hello's end */
};

void tcp_hello_put(const struct tcp_hello *hello, uint8_t buf[TCP_HELLO_BYTES]);
/* ERR_PROTO: not one; ERR_VERSION. The proof is tcp_keys.h's to check. */
int tcp_hello_get(const uint8_t buf[TCP_HELLO_BYTES], struct tcp_hello *hello_p);

/* ---- frames ---- */
/* `id` names a transfer and is minted by its initiator, from 1 up. */
enum tcp_type {
	TCP_REQUEST = 1, /* at = bytes of the transfer, code = kind; payload: header */
	TCP_GO,		 /* a WRITE's destination is ready for its bytes */
	TCP_CANCEL,	 /* fault: the initiator cancels */
	TCP_DONE,	 /* fault or code 0: the responder has finished */
	TCP_BYE,	 /* fault: the sender closes */
	TCP_DATA,	 /* of the sender's WRITE; at = offset; bytes, then a trailer */
	TCP_SERVE,	 /* of the receiver's READ; the same */
	TCP_BEAT,	 /* empty, on line and streams: shows that the last record was not
			  * dropped */
	TCP_TYPE_END,
};

/* REQUEST, DONE: the transfer's bytes follow the payload's first part. */
#define TCP_FLAG_EAGER 0x8000u

struct tcp_head {
	uint8_t type;
	uint16_t flags; /* faults: scope, and 256 for retryable */
	uint64_t id, at;
	uint32_t code;
	uint32_t length; /* of the payload that follows */
};

static inline bool tcp_head_is_data(const struct tcp_head *head)
{
	return head->type == TCP_DATA || head->type == TCP_SERVE;
}

void tcp_head_put(const struct tcp_head *head, uint8_t buf[TCP_HEAD_BYTES]);
/* ERR_PROTO: not a head of this version, or a length over its type's cap; on a
 * stream (`data`) only data frames and BEATs are right, on the control line no data. */
int tcp_head_get(const uint8_t buf[TCP_HEAD_BYTES], bool data, struct tcp_head *head_p);

/* ---- the trailer of a data frame ---- */
/* `good`: the bytes are valid; else they are padding. */
void tcp_trailer_put(bool good, uint8_t buf[TCP_TRAILER_BYTES]);
int tcp_trailer_get(const uint8_t buf[TCP_TRAILER_BYTES], bool *good_p);

/* ---- the address of a daemon's data port ---- */
struct tcp_address {
	union net_place list[TCP_ADDRESSES_MAX]; /* to be tried in this order */
	uint32_t count;
};

int tcp_address_put(const struct tcp_address *address, uint8_t buf[XP_ADDRESS_MAX],
		    size_t *len_p);
/* ERR_PROTO when it is not one; ERR_VERSION. */
int tcp_address_get(const void *buf, size_t len, struct tcp_address *address_p);
socklen_t tcp_sockaddr_len(const union net_place *sa);
/* "127.0.0.1:4000", "[::1]:4000" */
void tcp_sockaddr_text(const union net_place *sa, char *buf, size_t size);

#endif
