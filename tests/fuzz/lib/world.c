/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/fuzz/lib/world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "daemon/peer/peer.h"
#include "daemon/session/session.h"
#include "proto/json.h"

#define USER 4242 /* an engine's, who is no administrator */

__attribute__((constructor)) static void failures_abort(void)
{
	setenv("CMOCKA_TEST_ABORT", "1", 1); /* of cmocka's asserts in the test library */
}

static struct session *engine(struct world *w, unsigned int node, const char *name)
{
	const struct session_peer peer = {.fd = -1, .uid = USER, .gid = USER};
	struct session *session = NULL;

	if (session_new(&w->c.nodes[node].kvd, &peer, NULL, &session) < 0 ||
	    session_greet(session, name, "") < 0)
		abort();
	return session;
}

void world_begin(struct world *w)
{
	memset(w, 0, sizeof(*w));
	cluster_new(&w->c, 3, 2);
	for (unsigned int i = 0; i < 2; i++) {
		w->engines[i] = engine(w, i, i ? "decode" : "prefill");
		w->caches[i] = cluster_geometry;
		cluster_cache(&w->c, w->engines[i], "kv", 0, &w->caches[i]);
	}
	cluster_ok(&w->c, w->engines[1],
		   "{'cmd':'room.open','room':'%u','role':'recv','pool':%llu,"
		   "'sources':['%s']}",
		   WORLD_ROOM, (unsigned long long)w->caches[1].pool,
		   w->c.nodes[0].endpoint);
	cluster_ok(&w->c, w->engines[0],
		   "{'cmd':'room.open','room':'%u','role':'send','pool':%llu}",
		   WORLD_ROOM, (unsigned long long)w->caches[0].pool);
	cluster_run(&w->c, LOOP_NS_PER_S);
}

void world_end(struct world *w)
{
	cluster_crash(&w->c, 1, MEM_CRASH_KILLED);
	cluster_run(&w->c, 60 * LOOP_NS_PER_S);
	cluster_free(&w->c);
	for (unsigned int i = 0; i < 2; i++)
		cache_close(&w->caches[i]);
	err_clear();
}

static void on_answer(void *arg, const char *text, size_t len)
{
	(void)arg;
	if (json_check(text, len && text[len - 1] == '\n' ? len - 1 : len, 16) < 0)
		abort();
}

/* It may have been ended for what it said. */
static bool is_alive(const struct world *w, unsigned int node)
{
	const struct session *session;

	list_foreach(session, &w->c.nodes[node].kvd.sessions, link)
		if (session == w->engines[node])
			return !session->ending;
	return false;
}

/* Of the loop: virtual time has none (fuzz_ring). */
static bool needs_descriptors(const cJSON *json)
{
	const char *cmd =
		cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "cmd"));

	return cmd && strcmp(cmd, "session.share") == 0;
}

void world_say(struct world *w, unsigned int node, const char *line, size_t len, int fd)
{
	struct session *session = w->engines[node];
	struct request *req;
	cJSON *json = NULL;

	if (!is_alive(w, node) || json_parse(line, len, JSON_DEPTH_MAX, &json) < 0 ||
	    needs_descriptors(json)) {
		err_clear();
		cJSON_Delete(json);
		mem_closep(&fd);
		return;
	}
	req = request_new(session, len, &fd, fd >= 0 ? 1 : 0);
	if (!req)
		abort();
	req->on_answer = on_answer;
	req->line = json;
	commands_dispatch(req);
	err_clear();
}

struct peer *world_peer(struct world *w, unsigned int of_node)
{
	const struct kvd *other = &w->c.nodes[!of_node].kvd;

	return peers_by_instance(w->c.nodes[of_node].kvd.peers,
				 peers_instance(other->peers));
}
