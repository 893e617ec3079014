/* SPDX-License-Identifier: Apache-2.0 */
/* verbs: the backend for RDMA NICs, over libibverbs and librdmacm. */
#ifndef KVD_TRANSPORT_VERBS_H
#define KVD_TRANSPORT_VERBS_H

#include "daemon/transport/transport.h"

extern const struct transport_ops verbs_transport;

#endif
