/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loads: each second, while sessions have places in groups, what they do is counted, and
 * told to the directory where it differs by a step (load.h). Loop thread; GPUs are looked
 * at by a helper.
 */
#ifndef KVD_CLUSTER_LOADS_H
#define KVD_CLUSTER_LOADS_H

#include <stdint.h>

#include "daemon/cluster/engine_load.h"

struct kvd;
struct loads;
struct session;

/* session->part[MODULE_CLUSTER] */
struct loads_session {
	struct engine_load load; /* as the engine said last */
	uint64_t at_ns;		 /* when */
};
void loads_session_init(struct session *session);
void loads_said(struct session *session, const struct engine_load *load);

struct loads *loads_of(const struct kvd *kvd); /* NULL in tests of less */
int loads_new(struct kvd *kvd, struct loads **loads_p);
void loads_free(struct loads *loads); /* NULL is fine */
/* A session has one more place: it is counted from now on, and told anew. */
void loads_begin(struct loads *loads, uint64_t session);

#endif
