/* SPDX-License-Identifier: Apache-2.0 */
/* The built-in backends; the first one that supports a pair of daemons is preferred. */
#include "daemon/transport/shm/local.h"
#include "daemon/transport/shm/shm.h"
#include "daemon/transport/tcp/tcp.h"
#include "daemon/transport/transport.h"
#include "daemon/transport/verbs/verbs.h"
#ifdef KVD_WITH_ucx
#include "daemon/transport/ucx/ucx.h"
#endif

const struct transport_ops *const transport_table[] = {
	&local_transport,
	&shm_transport,
	&verbs_transport,
	/* faster than UCX without RDMA, with it verbs is; ucx only when named */
	&tcp_transport,
#ifdef KVD_WITH_ucx
	&ucx_transport,
#endif
	NULL,
};
