/* SPDX-License-Identifier: Apache-2.0 */
/* Two daemons with an engine each, and what the first knows of the other. */
#ifndef KVD_TESTS_TOLD_PAIR_H
#define KVD_TESTS_TOLD_PAIR_H

#include "daemon/base/hex.h"
#include "daemon/handshake/handshake.h"
#include "tests/lib/cluster.h"

struct pair {
	struct cluster c;
	struct session *me, *you;
	struct cache mine, yours;
};

static inline cJSON *attach(struct pair *p)
{
	char secret[33];

	hex_write(p->you->secret, 16, secret);
	return cluster_call(&p->c, p->me,
			    "{'cmd':'peer.attach','endpoint':'%s','session':'%llu',"
			    "'secret':'%s'}",
			    p->c.nodes[1].endpoint, (unsigned long long)p->you->epoch,
			    secret);
}

static inline struct remote *remote_at(struct pair *p, unsigned int node)
{
	return list_first(handshake_remotes(p->c.nodes[node].kvd.handshake),
			  struct remote, link);
}

static inline void assert_attaches(struct pair *p)
{
	cJSON *answer = attach(p);

	if (cJSON_GetObjectItem(answer, "error"))
		fail_msg("%s", cJSON_PrintUnformatted(answer));
	cJSON_Delete(answer);
}

#endif
