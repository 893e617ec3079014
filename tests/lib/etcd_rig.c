/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/etcd_rig.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/cluster/etcd_impl.h"

static struct etcd_server rig_server;

int etcd_rig_begin(void **state)
{
	(void)state;
	if (system("command -v etcd >/dev/null && command -v etcdctl >/dev/null") != 0)
		return 0;
	etcd_server_init(&rig_server);
	etcd_server_start(&rig_server);
	return 0;
}

int etcd_rig_end(void **state)
{
	(void)state;
	if (rig_server.pid)
		etcd_server_free(&rig_server);
	return 0;
}

void etcd_rig_disown(void)
{
	rig_server.pid = 0;
}

static void rig_on_state(void *arg)
{
	++*(unsigned int *)arg;
}

static struct directory *rig_member(struct directory_rig *base, unsigned int i)
{
	struct etcd_rig *rig = container_of(base, struct etcd_rig, rig);

	assert_true(i < DIRECTORY_MEMBERS);
	if (!rig->members[i]) {
		assert_int_equal(etcd_new(&rig->args, &rig->members[i]), 0);
		rig->members[i]->on_state = rig_on_state;
		rig->members[i]->arg = &rig->states[i];
	}
	return rig->members[i];
}

static void rig_leave(struct directory_rig *base, unsigned int i)
{
	struct etcd_rig *rig = container_of(base, struct etcd_rig, rig);

	if (rig->members[i])
		rig->members[i]->ops->free(rig->members[i]);
	rig->members[i] = NULL;
}

/* Its lease is left to its time. */
static void rig_crash(struct directory_rig *base, unsigned int i)
{
	struct etcd_rig *rig = container_of(base, struct etcd_rig, rig);

	etcd_of(rig->members[i])->lease.id = 0;
	rig_leave(base, i);
}

static void rig_turn(struct directory_rig *base)
{
	loop_turn(container_of(base, struct etcd_rig, rig)->loop, 10 * LOOP_NS_PER_MS);
}

static uint64_t rig_now_ns(const struct directory_rig *base)
{
	return loop_clock_ns(container_of(base, struct etcd_rig, rig)->loop);
}

struct etcd_rig *etcd_rig_on(struct etcd_server *server, unsigned int lease_s)
{
	struct etcd_rig *rig = calloc(1, sizeof(*rig));
	char url[128];

	assert_non_null(rig);
	rig->server = server;
	snprintf(url, sizeof(url), "etcd%s://%s:%s/kvd", server->tls ? "s" : "",
		 server->listen ? server->listen : "127.0.0.1", server->port);
	assert_int_equal(cluster_url_parse(url, &rig->url), 0);
	assert_int_equal(loop_new(&rig->loop), 0);
	rig->args = (struct etcd_args){
		.loop = rig->loop, .url = &rig->url, .lease_s = lease_s};
	rig->rig = (struct directory_rig){.lease_ns = lease_s * LOOP_NS_PER_S,
					  .member = rig_member,
					  .crash = rig_crash,
					  .leave = rig_leave,
					  .turn = rig_turn,
					  .now_ns = rig_now_ns};
	return rig;
}

struct etcd_rig *etcd_rig_new(unsigned int lease_s)
{
	etcd_server_need();
	assert_int_equal(etcd_ctl(&rig_server, NULL, 0, "del --prefix ''"), 0);
	return etcd_rig_on(&rig_server, lease_s);
}

void etcd_rig_free(struct etcd_rig *rig)
{
	for (unsigned int i = 0; i < DIRECTORY_MEMBERS; i++)
		rig_leave(&rig->rig, i);
	loop_free(rig->loop);
	free(rig);
}

struct directory_state etcd_rig_state(struct etcd_rig *rig, unsigned int member)
{
	struct directory *directory = rig_member(&rig->rig, member);
	struct directory_state state;

	directory->ops->state(directory, &state);
	return state;
}

bool etcd_rig_up(struct etcd_rig *rig, unsigned int member)
{
	return etcd_rig_state(rig, member).up;
}
