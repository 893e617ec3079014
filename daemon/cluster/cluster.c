/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cluster: the module: groups, and the loads that are published in them. A daemon whose
 * directory does not respond is degraded, not unhealthy, since its rooms continue; how
 * long that lasts, and which groups may be out of date meanwhile, are figures. Without
 * the option cluster there is no directory that could fail: the series is absent.
 */
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/cluster/cluster_metrics.h"
#include "daemon/cluster/commands_group.h"
#include "daemon/cluster/groups.h"
#include "daemon/cluster/loads.h"
#include "daemon/handshake/handshake.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"

struct cluster {
	const struct kvd *kvd;
	struct groups *groups;
	struct loads *loads;
};

struct groups *groups_of(const struct kvd *kvd)
{
	const struct cluster *cluster = kvd->part[MODULE_CLUSTER];

	return cluster ? cluster->groups : NULL;
}

struct loads *loads_of(const struct kvd *kvd)
{
	const struct cluster *cluster = kvd->part[MODULE_CLUSTER];

	return cluster ? cluster->loads : NULL;
}

static int cluster_new(struct kvd *kvd, void **part_p)
{
	struct cluster *cluster = mem_zalloc(sizeof(*cluster));
	int r;

	if (!cluster)
		return err_pass(-ENOMEM);
	*part_p = cluster;
	cluster->kvd = kvd;
	kvd->names = &groups_names;
	r = groups_new(kvd, &cluster->groups);
	if (r >= 0)
		r = loads_new(kvd, &cluster->loads);
	return err_pass(r);
}

static int cluster_reload(void *part, bool apply)
{
	return err_pass(groups_reload(((struct cluster *)part)->groups, apply));
}

static void cluster_drain(void *part)
{
	groups_drain(((struct cluster *)part)->groups);
}

static void cluster_close(void *part, const struct err *why)
{
	groups_close(((struct cluster *)part)->groups, why);
}

static void cluster_free(void *part)
{
	struct cluster *cluster = part;

	loads_free(cluster->loads);
	groups_free(cluster->groups);
	mem_free(cluster);
}

static int cluster_session_end(struct session *session)
{
	if (groups_of(session->kvd))
		groups_session_gone(groups_of(session->kvd), session->id);
	return 0;
}

static void cluster_pools_changed(struct pool *pool)
{
	if (groups_of(pool->session->kvd))
		groups_pools_changed(groups_of(pool->session->kvd));
}

static bool cluster_health(const void *part, struct err *why_p)
{
	const struct cluster *cluster = part;
	struct groups_state state;

	groups_state(cluster->groups, &state);
	if (state.directory.up || !*state.where)
		return true;
	err_set(why_p, ERR_PEER, "cluster: directory unavailable: %s",
		state.directory.why.text);
	return false;
}

/* ---- figures ---- */

static const struct metric_row cluster_metrics[] = {CLUSTER_METRICS(METRIC_OWN)};

struct watched {
	uint64_t entries, unsynced;
};

static bool add_group(void *arg, const char *group, unsigned int entries, bool synced)
{
	struct watched *watched = arg;

	(void)group;
	watched->entries += entries;
	watched->unsynced += !synced;
	return true;
}

static void cluster_cells(const void *part, uint64_t *cells)
{
	const struct cluster *cluster = part;
	uint64_t now_ns = loop_now_ns(cluster->kvd->loop);
	struct groups_state state, *s = &state;
	struct watched watched = {0};

	groups_state(cluster->groups, s);
	groups_each_watch(cluster->groups, add_group, &watched); /* at most 4096 */
	CLUSTER_METRICS(METRIC_CELL)
}

static const struct command *const cluster_tables[] = {group_commands, NULL};

const struct module cluster_module = {
	.id = MODULE_CLUSTER,
	.name = "cluster",
	.commands = cluster_tables,
	.check = groups_check,
	.new = cluster_new,
	.reload = cluster_reload,
	.drain = cluster_drain,
	.close = cluster_close,
	.free = cluster_free,
	.session_bytes = sizeof(struct loads_session),
	.session_init = loads_session_init,
	.session_end = cluster_session_end,
	.pool_coming = cluster_pools_changed,
	.pool_going = cluster_pools_changed,
	.metrics = cluster_metrics,
	.metric_count = ARRAY_LEN(cluster_metrics),
	.figures = cluster_cells,
	.health = cluster_health,
};
