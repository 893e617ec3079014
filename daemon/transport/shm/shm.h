/* SPDX-License-Identifier: Apache-2.0 */
/* shm: both engines use host memory of this machine; the fd of the source is passed
 * read-only and the destination's copy threads do the work. */
#ifndef KVD_TRANSPORT_SHM_H
#define KVD_TRANSPORT_SHM_H

#include "daemon/transport/transport.h"

extern const struct transport_ops shm_transport;

#endif
