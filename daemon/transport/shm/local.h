/* SPDX-License-Identifier: Apache-2.0 */
/* local: two daemons of one host, whose engines have memory on its GPUs (or in host
 * memory, handled as in shm). */
#ifndef KVD_TRANSPORT_LOCAL_H
#define KVD_TRANSPORT_LOCAL_H

#include "daemon/transport/transport.h"

extern const struct transport_ops local_transport;

#endif
