/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp_ktls: a stream's records made and opened by the kernel (CONFIG_TLS, module `tls`),
 * or by an adapter that it offloads to. The format is that of tcp_seal.h, so the other
 * end need not do the same, nor one end in both directions.
 */
#ifndef KVD_TRANSPORT_TCP_KTLS_H
#define KVD_TRANSPORT_TCP_KTLS_H

#include <stdbool.h>

#include "daemon/transport/tcp/tcp_keys.h"

/* Does this kernel support it? */
bool tcp_ktls_there(void);
/* Once for a connection, before the other two. These: false, if the kernel does not take
 * the key: then use tcp_seal.h. */
bool tcp_ktls_begin(int fd);
bool tcp_ktls_send(int fd, const struct tcp_secret *secret);
bool tcp_ktls_receive(int fd, const struct tcp_secret *secret);

#endif
