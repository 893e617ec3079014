/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire: the messages between daemons. A frame is a fixed header and a body; both are read
 * and written with the bounded cursor, little-endian.
 *
 * Header, 96 bytes: magic u32 "KVD1", version u16, type u16, flags u32, sender instance
 * id, target instance id (zero in HELLO only), session epoch u64 (of the peering; each
 * side chooses the one that it accepts and sends it in the header of its HELLO/WELCOME),
 * sequence u64 (per epoch from 1 without a gap; HELLO, WELCOME and BYE are not numbered:
 * 0; flags on the control connection: how many earlier numbers used the data connection),
 * body length u32, checksum u32 (XXH3 low half over header with this field zero, then
 * body; see also WIRE_FLAG_ROWS), the sender's own epoch u64 (a receiver may give one
 * epoch to several attempts of a sender, so a peering is identified by both epochs; 0 in
 * HELLO, WELCOME and a BYE that refuses a HELLO), 20 reserved zero bytes.
 */
#ifndef KVD_PROTO_WIRE_H
#define KVD_PROTO_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/cursor.h"
#include "proto/wire_table.h"

#define WIRE_MAGIC 0x3144564bu /* "KVD1" */
#define WIRE_VERSION_MIN 2u
#define WIRE_VERSION_MAX 2u
#define WIRE_HEADER_BYTES 96u
#define WIRE_STR_MAX 336u /* bytes of a str field with its NUL */
/* A flag on the data connection: the checksum covers only the first WIRE_SUMMED bytes
 * of the body. The rest are rows, bytes of engines; transports do not checksum them
 * either unless configured to. */
#define WIRE_FLAG_ROWS (UINT32_C(1) << 31)
#define WIRE_SUMMED 1024u
#define WIRE_FRAME_MAX \
	(1u << 20) /* header + body; the option `peer message` lowers the limit */

#define WIRE_ENUM(num, NAME, name, owner, cap, text) WIRE_T_##NAME = (num),
enum wire_type { WIRE_MESSAGES(WIRE_ENUM) WIRE_T_END };
#undef WIRE_ENUM

#define WIRE_OWNER_ENUM(NAME) WIRE_OWNER_##NAME,
enum wire_owner { WIRE_OWNER_NONE, WIRE_OWNERS(WIRE_OWNER_ENUM) };
#undef WIRE_OWNER_ENUM

struct wire_header {
	uint16_t version, type;
	uint32_t flags;
	uint8_t sender[16], target[16];
	uint64_t epoch, sequence, from_epoch;
	uint32_t body_len;
};

struct wire_blob {
	const void *data; /* in the frame's buffer when decoded */
	size_t len;
};

/* struct wire_hello { uint16_t version_min; …; char name[WIRE_STR_MAX]; … } */
#define WIRE_C_u8(f) uint8_t f;
#define WIRE_C_u16(f) uint16_t f;
#define WIRE_C_u32(f) uint32_t f;
#define WIRE_C_u64(f) uint64_t f;
#define WIRE_C_id(f) uint8_t f[16];
#define WIRE_C_str(f) char f[WIRE_STR_MAX];
#define WIRE_C_blob(f) struct wire_blob f;
#define WIRE_FIELD(type, f) WIRE_C_##type(f)
#define WIRE_STRUCT(num, NAME, name, owner, cap, text) \
	struct wire_##name {                           \
		WIRE_##NAME(WIRE_FIELD)                \
	};
WIRE_MESSAGES(WIRE_STRUCT)
#undef WIRE_STRUCT

/*
 * wire_<name>_put appends the body: 0 or ERR_TOOBIG. wire_<name>_get reads it: 0 or
 * ERR_PROTO; errors name message and field. Longer bodies are accepted (newer sender).
 * Texts are made printable: invalid UTF-8 and control characters become '?'.
 */
#define WIRE_PROTOS(num, NAME, name, owner, cap, text)                          \
	int wire_##name##_put(struct cursor *out, const struct wire_##name *m); \
	int wire_##name##_get(struct cursor *in, struct wire_##name *m);
WIRE_MESSAGES(WIRE_PROTOS)
#undef WIRE_PROTOS

/* Does the encoded message contain a session's secret or a room's ticket? It grants
 * access. It is the last field of such requests. */
bool wire_shows_secret(unsigned int type, const void *body, size_t len);

/* Make a text printable in place: invalid UTF-8 and control characters become '?'. */
void wire_text_clean(char *text);

const char *wire_type_name(unsigned int type); /* "HELLO"; "?" when unknown */
size_t wire_body_cap(unsigned int type);       /* 0 when unknown */
enum wire_owner wire_owner(unsigned int type); /* WIRE_OWNER_NONE when unknown */

/* Write header + body into one frame of WIRE_HEADER_BYTES + body_len bytes; the body
 * may already be in it. */
void wire_frame_put(uint8_t *frame, const struct wire_header *h, const void *body);
/* Check magic, length, checksum, reserved zeroes, type, body cap of the type and
 * version (HELLO, WELCOME and BYE never change and pass in any version): 0 and *body_p
 * in place, or ERR_PROTO / ERR_VERSION. */
int wire_frame_get(const uint8_t *frame, size_t len, struct wire_header *h_p,
		   struct cursor *body_p);

#endif
