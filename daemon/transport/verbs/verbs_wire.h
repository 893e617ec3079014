/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs_wire: the wire formats of the verbs backend: the messages on a connection's first
 * queue pair (frames), the private data of its connection requests, the address in HELLO,
 * packed keys, and immediate values. Pure.
 */
#ifndef KVD_TRANSPORT_VERBS_WIRE_H
#define KVD_TRANSPORT_VERBS_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "daemon/transport/net_wire.h"
#include "daemon/transport/transport.h"

#define VERBS_RAILS_MAX 4u
#define VERBS_QPS_MAX 16u    /* of a peer */
#define VERBS_PIECES_MAX 16u /* of a region, registered one by one */
#define VERBS_FRAME_BYTES 56u
#define VERBS_HELLO_BYTES 32u /* private data: RDMA_PS_TCP leaves 56 bytes */
#define VERBS_TEXT_MAX 256u   /* of a fault's text */

enum verbs_type {
	VERBS_REQUEST = 1, /* + the first bytes of the header */
	VERBS_MORE,	   /* + the next bytes of that header */
	VERBS_GO,	   /* bytes may move */
	VERBS_MARK,	   /* WRITE: behind its last byte on this queue pair */
	VERBS_FIN,	   /* READ: nothing of it is outstanding any more */
	VERBS_DONE,	   /* the answerer's last message */
	VERBS_CANCEL,	   /* the initiator's: stop */
	VERBS_REVOKE,	   /* the answerer's: stop */
	VERBS_PROGRESS,	   /* bytes moved */
	VERBS_CREDIT,	   /* nothing but credits */
	VERBS_BYE,
	VERBS_SLOT,  /* the destination's: a packed transfer may write there */
	VERBS_SLICE, /* the source's: that is written */
	VERBS_RAIL,  /* my queue pairs on rail `slot` are dead */
	VERBS_TYPE_END,
};

/* REQUEST: the requested packing; GO: the granted one */
enum verbs_packing {
	VERBS_ROWS,
	VERBS_PACK,	 /* in slices; the slots' key follows a WRITE's GO */
	VERBS_PACK_MUST, /* ... or not at all */
};

struct verbs_frame {
	uint8_t type;
	uint8_t kind;	  /* REQUEST, SLOT, SLICE: enum xp_kind */
	uint8_t pack;	  /* REQUEST, GO: enum verbs_packing */
	uint16_t flags;	  /* of a fault: scope, retryable */
	uint16_t credits; /* receives posted again since the last frame */
	uint32_t code;	  /* of a fault; ERR_OK: none */
	uint32_t slot;	  /* GO: the mark to send; MARK: that mark; SLOT, SLICE: its
			   * number */
	uint32_t total;	  /* REQUEST: bytes of the header; SLICE: of it */
	uint64_t id;
	uint64_t bytes;	 /* REQUEST: of the plan; PROGRESS: bytes moved; SLICE: bytes
			  * before it */
	uint64_t digest; /* REQUEST: of the plan; GO: of the written or read buffers */
	uint32_t length; /* bytes behind the frame */
};

void verbs_frame_put(const struct verbs_frame *frame, uint8_t buf[VERBS_FRAME_BYTES]);
/* ERR_PROTO: malformed, or `len` differs from the announced length. */
int verbs_frame_get(const void *buf, size_t len, struct verbs_frame *frame_p);
/*
 * The immediate of a WRITE_WITH_IMM: it follows the last byte of that transfer on this
 * queue pair.
 */
struct verbs_mark {
	uint16_t slot;	     /* below VERBS_GRANTS */
	uint16_t generation; /* 12 bits */
	uint8_t count;	     /* queue pairs used, 1 … VERBS_QPS_MAX */
	bool aborted;	     /* not all bytes were sent */
};
#define VERBS_GRANTS 256u
#define VERBS_GENERATIONS 4096u
uint32_t verbs_mark_put(const struct verbs_mark *mark);
void verbs_mark_get(uint32_t imm, struct verbs_mark *mark_p);

/* private data of connect and accept */
struct verbs_hello {
	uint8_t token[XP_TOKEN_BYTES];
	uint8_t qp, total; /* this one's number, of how many */
	uint8_t rail;
	uint16_t depth; /* receives for frames on queue pair 0 */
};
void verbs_hello_put(const struct verbs_hello *hello, uint8_t buf[VERBS_HELLO_BYTES]);
int verbs_hello_get(const void *buf, size_t len, struct verbs_hello *hello_p);

struct verbs_address {
	uint32_t rails, qps;			       /* queue pairs requested on each */
	struct sockaddr_storage rail[VERBS_RAILS_MAX]; /* with their ports */
};
int verbs_address_put(const struct verbs_address *address, uint8_t buf[XP_ADDRESS_MAX],
		      size_t *len_p);
int verbs_address_get(const void *buf, size_t len, struct verbs_address *address_p);

/* a peer's region */
struct verbs_remote {
	uint64_t id, address, length;
	uint32_t rails;
	uint32_t pieces; /* 0: registered with no adapter of the peer; shift is 0, too */
	uint8_t shift;	 /* a piece is 1 << shift bytes */
	uint32_t rkey[VERBS_RAILS_MAX][VERBS_PIECES_MAX];
};
int verbs_remote_put(const struct verbs_remote *remote, void *buf, size_t size,
		     size_t *len_p);
int verbs_remote_get(const void *buf, size_t len, struct verbs_remote *remote_p);

#endif
