/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer.connect … peer.forget. A connect is answered when the peer's control and
 * data lines are up, or when its time is over; the request waits in a list that
 * a timer and every change of a peer look through.
 */
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/control/brief.h"
#include "daemon/control/commands.h"
#include "daemon/control/commands_peer.h"
#include "daemon/handshake/handshake.h"
#include "daemon/base/context.h"
#include "daemon/session/session.h"
#include "proto/json.h"

#define CONNECT_MS_DEFAULT 5000
#define CONNECT_MS_MAX 600000

/* one peer.connect that waits */
struct connect {
	struct list link;
	struct request *req;
	struct remote *remote;
	struct loop_timer timer;
};

static struct list waiting = LIST_INIT(waiting);

static void commands_peer_describe(struct brief *out, const struct remote *remote)
{
	const struct peer *peer = remote->peer;
	const struct xp_peer_base *xp = (const struct xp_peer_base *)remote->xp;

	brief_init(out);
	brief_text(out, "endpoint", peer->endpoint);
	brief_text(out, "name", peer->name);
	brief_text(out, "instance", peer->instance_text);
	brief_text(out, "state", sm_name(&peer->sm));
	brief_bool(out, "data_line", remote->ready);
	brief_text(out, "transport",
		   remote->transport ? remote->transport->ops->name : "none");
	brief_text(out, "path", xp && xp->ready ? xp->path : "");
	brief_bool(out, "self", peer->self);
	brief_bool(out, "same_host", peer->same_host);
	brief_number(out, "rtt_us", (double)peer->rtt_ns / 1e3);
	brief_number(out, "messages_in", (double)peer->messages_in);
	brief_number(out, "messages_out", (double)peer->messages_out);
	if (remote->why.code != ERR_OK)
		brief_text(out, "why", remote->why.text);
}

/* ---- peer.connect ---- */

static void connect_end(struct connect *c, const struct err *why)
{
	struct handshake *hs = c->req->kvd->handshake;
	struct brief brief;

	list_remove(&c->link);
	loop_timer_stop(&c->timer);
	if (why) {
		request_fail(c->req, why);
	} else {
		commands_peer_describe(&brief, c->remote);
		request_reply_brief(c->req, &brief);
	}
	handshake_release(hs, c->remote);
	mem_free(c);
}

/* Is the wait over? A data line that found no memory is tried again. */
static void connect_look(struct connect *c)
{
	struct err why;

	if (c->remote->ready) {
		connect_end(c, NULL);
	} else if ((sm_state(&c->remote->peer->sm) == PEER_UP || c->remote->refused) &&
		   c->remote->why.code != ERR_OK && c->remote->why.code != ERR_NOMEM) {
		why = c->remote->why;
		connect_end(c, &why);
	}
}

static void on_connect_timer(struct loop_timer *timer)
{
	struct connect *c = container_of(timer, struct connect, timer);
	const struct remote *remote = c->remote;
	struct err why;

	err_set(&why, ERR_TIMEOUT, "%.120s: no %s line yet%s%.120s", remote->label,
		sm_state(&remote->peer->sm) == PEER_UP ? "data" : "control",
		remote->why.code ? ": " : "", remote->why.code ? remote->why.text : "");
	connect_end(c, &why);
}

void peer_commands_on_change(struct remote *remote)
{
	struct connect *c;

	list_foreach_safe(c, &waiting, link) {
		if (c->remote == remote)
			connect_look(c);
	}
}

void peer_commands_stop(const struct err *why)
{
	struct connect *c;

	list_foreach_safe(c, &waiting, link)
		connect_end(c, why);
}

struct connect_args {
	const char *endpoint;
	uint32_t timeout_ms;
};

static int run_connect(struct request *req)
{
	const struct connect_args *args = request_args(req);
	struct connect *c = mem_zalloc(sizeof(*c));
	int r;

	if (!c)
		return err_pass(-ENOMEM);
	loop_timer_init(&c->timer, req->kvd->loop, on_connect_timer);
	r = handshake_reach(req->kvd->handshake, args->endpoint, &c->remote);
	if (r < 0) {
		mem_free(c);
		return err_pass(r);
	}
	loop_timer_start(&c->timer, args->timeout_ms * LOOP_NS_PER_MS);
	c->req = req;
	list_push_back(&waiting, &c->link);
	connect_look(c);
	return 0;
}

/* ---- peer.list, peer.forget ---- */

static int run_list(struct request *req)
{
	cJSON *result = request_result(), *out;
	const struct remote *remote;
	bool ok;

	if (!result)
		return err_pass(-ENOMEM);
	out = cJSON_AddArrayToObject(result, "peers");
	ok = out != NULL;
	list_foreach(remote, handshake_remotes(req->kvd->handshake), link) {
		struct brief brief;
		cJSON *one;

		if (!ok)
			break;
		commands_peer_describe(&brief, remote);
		one = cJSON_Duplicate(brief.nodes, true);
		ok = one && cJSON_AddItemToArray(out, one);
	}
	return request_finish(req, result, ok);
}

struct forget_args {
	const char *endpoint, *instance; /* one of them */
};

static struct remote *commands_peer_find(struct request *req,
					 const struct forget_args *args)
{
	const char *endpoint = args->endpoint, *instance = args->instance;
	struct remote *remote;

	list_foreach(remote, handshake_remotes(req->kvd->handshake), link) {
		if ((endpoint && strcmp(remote->peer->endpoint, endpoint) == 0) ||
		    (instance && strcmp(remote->peer->instance_text, instance) == 0))
			return remote;
	}
	err_raise(ERR_NOTFOUND, "no peer %s", endpoint ? endpoint : instance);
	return NULL;
}

static int run_forget(struct request *req)
{
	const struct forget_args *args = request_args(req);
	struct remote *remote;
	struct err why;

	if (!args->endpoint == !args->instance)
		return err_raise(ERR_INVAL, "one of endpoint and instance is wanted");
	remote = commands_peer_find(req, args);
	if (!remote)
		return err_pass(-ENOENT);
	err_set(&why, ERR_PEER, "%.150s: forgotten by an administrator (pid %d)",
		remote->label, (int)req->session->pid);
	if (sm_state(&remote->peer->sm) == PEER_UP)
		peer_kill(remote->peer, &why);
	request_reply(req, NULL);
	return 0;
}

static const struct field connect_fields[] = {
	F_STR("endpoint", connect_args, endpoint, REQUIRED, LINK_ENDPOINT_MAX - 1,
	      "tcp://host:port"),
	F_INT("timeout_ms", connect_args, timeout_ms, DEFAULT(CONNECT_MS_DEFAULT), 1,
	      CONNECT_MS_MAX, "5000 if absent"),
	F_END,
};
static const struct field forget_fields[] = {
	F_STR("endpoint", forget_args, endpoint, OPTIONAL, LINK_ENDPOINT_MAX - 1,
	      "of the peer, or"),
	F_STR("instance", forget_args, instance, OPTIONAL, 32,
	      "its instance id, 32 hex digits"),
	F_END,
};

const struct command peer_commands[] = {
	{"peer.connect", "reach another daemon; answers when its lines are up",
	 connect_fields, 0, run_connect, "the peer"},
	{"peer.list", "all peers", NULL, 0, run_list,
	 "peers: {endpoint, instance, state, transport, path, …}"},
	{"peer.forget", "cut a peer; its rooms fail", forget_fields, COMMAND_ADMIN,
	 run_forget, "nothing"},
	{.name = NULL},
};
