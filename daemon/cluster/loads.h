/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loads: each second, while sessions have places in groups, their work is counted, and
 * published where it differs by a step (load.h). Loop thread; GPUs are sampled by a
 * helper.
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
	struct engine_load load; /* as last reported by the engine */
	uint64_t at_ns;		 /* when */
};
void loads_session_init(struct session *session);
void loads_report(struct session *session, const struct engine_load *load);

struct loads *loads_of(const struct kvd *kvd); /* NULL in tests without it */
int loads_new(struct kvd *kvd, struct loads **loads_p);
void loads_free(struct loads *loads); /* NULL is fine */
/* A session has one more place: counts it from now on, and publishes it again. */
void loads_begin(struct loads *loads, uint64_t session);

#endif
