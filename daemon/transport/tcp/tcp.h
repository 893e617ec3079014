/* SPDX-License-Identifier: Apache-2.0 */
/* tcp: transfers over plain TCP connections, between any two daemons. */
#ifndef KVD_TRANSPORT_TCP_H
#define KVD_TRANSPORT_TCP_H

#include "daemon/transport/transport.h"

extern const struct transport_ops tcp_transport;

#endif
