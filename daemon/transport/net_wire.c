/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/transport/net_wire.h"

#include <ctype.h>
#include <string.h>

#define RETRYABLE 256u
#define V4_BYTES 4u
#define V6_BYTES 16u

uint16_t net_fault_flags(const struct err *err)
{
	return (uint16_t)(err->scope | (err->retryable ? RETRYABLE : 0));
}

void net_fault_get(uint32_t code, uint16_t flags, const void *text, size_t len,
		   struct err *err_p)
{
	unsigned int scope = flags & (RETRYABLE - 1);

	memset(err_p, 0, sizeof(*err_p));
	err_p->code = err_from_wire(code);
	err_p->scope = scope <= ERR_SCOPE_DAEMON ? (enum err_scope)scope
						 : err_default_scope(err_p->code);
	err_foreign(err_p);
	err_p->retryable = flags & RETRYABLE;
	if (len > NET_TEXT_MAX)
		len = NET_TEXT_MAX;
	for (size_t i = 0; i < len; i++) {
		unsigned char ch = ((const unsigned char *)text)[i];

		err_p->text[i] = isprint(ch) ? (char)ch : '?';
	}
}

void net_place_put(struct cursor *c, const union net_place *place, bool pad)
{
	bool v6 = place->any.sa_family == AF_INET6;
	uint8_t bytes[V6_BYTES] = {0};

	if (v6)
		memcpy(bytes, &place->v6.sin6_addr, V6_BYTES);
	else
		memcpy(bytes, &place->v4.sin_addr, V4_BYTES);
	cursor_put_u8(c, v6 ? 6 : 4);
	cursor_put_u16(c, ntohs(v6 ? place->v6.sin6_port : place->v4.sin_port));
	cursor_put_bytes(c, bytes, v6 || pad ? V6_BYTES : V4_BYTES);
}

void net_place_get(struct cursor *c, bool pad, union net_place *place_p)
{
	uint8_t family = cursor_get_u8(c);
	uint16_t port = cursor_get_u16(c);
	const void *bytes = cursor_get_bytes(c, family == 6 || pad ? V6_BYTES : V4_BYTES);

	memset(place_p, 0, sizeof(*place_p));
	if (!bytes || (family != 4 && family != 6) || port == 0) {
		c->bad = true;
	} else if (family == 6) {
		place_p->v6.sin6_family = AF_INET6;
		place_p->v6.sin6_port = htons(port);
		memcpy(&place_p->v6.sin6_addr, bytes, V6_BYTES);
	} else {
		place_p->v4.sin_family = AF_INET;
		place_p->v4.sin_port = htons(port);
		memcpy(&place_p->v4.sin_addr, bytes, V4_BYTES);
	}
}
