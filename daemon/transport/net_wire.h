/* SPDX-License-Identifier: Apache-2.0 */
/*
 * net_wire: wire formats common to several backends: a fault's numbers and text, and an
 * IP address with its port. Pure.
 */
#ifndef KVD_TRANSPORT_NET_WIRE_H
#define KVD_TRANSPORT_NET_WIRE_H

#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"

#define NET_TEXT_MAX (ERR_TEXT_MAX - 1u) /* bytes of a fault's text */

/* Its scope, and 256 for retryable; the code is sent unchanged. */
uint16_t net_fault_flags(const struct err *err);
/* A peer's: numbers checked, the text cut and made printable. */
void net_fault_get(uint32_t code, uint16_t flags, const void *text, size_t len,
		   struct err *err_p);

union net_place {
	struct sockaddr any;
	struct sockaddr_in v4;
	struct sockaddr_in6 v6;
};

/* Family, port, address. `pad`: an IPv4 address has 16 bytes, too. */
void net_place_put(struct cursor *c, const union net_place *place, bool pad);
/* None: c->bad. */
void net_place_get(struct cursor *c, bool pad, union net_place *place_p);

#endif
