/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ucx_wire: the fixed header of every active message of the ucx backend.
 *
 * A worker accepts messages from anyone who reaches its port, so each one carries the
 * token that its receiver minted for that peer, and a checksum that detects foreign or
 * truncated messages. Little-endian, read and written by the bounded cursor; nothing here
 * trusts a length.
 */
#ifndef KVD_TRANSPORT_UCX_WIRE_H
#define KVD_TRANSPORT_UCX_WIRE_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/transport/net_wire.h"
#include "daemon/transport/transport.h"

#define UCX_FRAME_BYTES 72u
#define UCX_TEXT_MAX NET_TEXT_MAX
#define UCX_ADDRESS_HEADER 8u

/*
 * `id` names a transfer and is minted by its initiator, from 1 up. Types before
 * UCX_DATA are sequenced: a peer's are acted on in the order they were sent.
 */
enum ucx_type {
	UCX_REQUEST = 1, /* id, code = kind, length = bytes; payload: the header */
	UCX_GO,		 /* id: a WRITE's destination is ready for its bytes */
	UCX_CANCEL,	 /* id, fault: the initiator cancels */
	UCX_DONE,	 /* id, fault or code 0: the responder has finished */
	UCX_BYE,	 /* fault: the sender closes */
	UCX_DATA,	 /* id of the sender's WRITE, offset; payload: bytes */
	UCX_SERVE,	 /* id of the receiver's READ, offset; payload: bytes */
	UCX_HELLO,	 /* id = the endpoint's number, offset = largest slice; flags */
	UCX_TYPE_END,
};

/* of HELLO */
#define UCX_FLAG_ASK 1u	   /* answer this */
#define UCX_FLAG_ANSWER 2u /* your token was right */

struct ucx_frame {
	uint8_t type;
	uint16_t flags; /* faults: scope, and 256 for retryable */
	uint8_t token[XP_TOKEN_BYTES];
	uint64_t seq; /* of a sequenced frame, from 1 up */
	uint64_t id, offset, length;
	uint32_t code;
};

static inline bool ucx_frame_sequenced(const struct ucx_frame *frame)
{
	return frame->type < UCX_DATA;
}

void ucx_frame_put(const struct ucx_frame *frame, uint8_t buf[UCX_FRAME_BYTES]);
/* ERR_PROTO: not a frame of this version. */
int ucx_frame_get(const void *buf, size_t len, struct ucx_frame *frame_p);

/* transport->address: magic, version and length before libucp's own bytes. */
int ucx_address_put(const void *worker, size_t len, uint8_t buf[XP_ADDRESS_MAX],
		    size_t *len_p);
/* ERR_PROTO when it is not a ucx address; *worker_p points into `buf`. */
int ucx_address_get(const void *buf, size_t len, const void **worker_p,
		    size_t *worker_len_p);

#endif
