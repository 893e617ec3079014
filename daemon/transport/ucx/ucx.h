/* SPDX-License-Identifier: Apache-2.0 */
/* ucx: all networks of UCX, by active messages. See ucx.c. */
#ifndef KVD_TRANSPORT_UCX_H
#define KVD_TRANSPORT_UCX_H

#include "daemon/transport/transport.h"

extern const struct transport_ops ucx_transport;

#endif
