/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer.connect, peer.list. peer.connect replies when the control and data connections of
 * the peer are up, or after its timeout. Pending requests are kept in a list that is
 * checked on a timer and on every change of a peer.
 */
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/control/commands.h"
#include "proto/out.h"
#include "daemon/request/commands.h"
#include "daemon/control/commands_peer.h"
#include "daemon/handshake/handshake.h"
#include "daemon/base/context.h"
#include "daemon/session/session.h"

#define CONNECT_MS_DEFAULT 5000
#define CONNECT_MS_MAX 600000

/* a pending peer.connect */
struct connect {
	struct list link;
	struct request *req;
	struct remote *remote;
	struct loop_timer timer;
};

static struct list waiting = LIST_INIT(waiting);

/* The members of an object. */
static void peer_put(struct text *out, const struct remote *remote)
{
	const struct peer *peer = remote->peer;
	const struct xp_peer_base *xp = (const struct xp_peer_base *)remote->xp;
	char why[ERR_TEXT_MAX];

	out_text(out, "endpoint", peer->endpoint);
	out_text(out, "name", peer->name);
	out_text(out, "instance", peer->instance_text);
	out_text(out, "state", sm_name(&peer->sm));
	out_bool(out, "data_line", remote->ready);
	out_text(out, "transport",
		 remote->transport ? remote->transport->ops->name : "none");
	out_text(out, "path", xp && xp->ready ? xp->path : "");
	if (xp && xp->ready)
		out_text(out, "crypto", xp->crypto ? xp->crypto : "none");
	out_bool(out, "self", peer->self);
	out_bool(out, "same_host", peer->same_host);
	out_double(out, "rtt_us", (double)peer->rtt_ns / 1e3);
	out_number(out, "messages_in", peer->messages_in);
	out_number(out, "messages_out", peer->messages_out);
	out_filled(out, "passed_over", remote->dial.passed);
	if (remote->why.code != ERR_OK) {
		out_text(out, "why", remote->why.text);
		out_text(out, "why_code", err_name(remote->why.code));
	} else if (!remote->ready && sm_state(&peer->sm) == PEER_UP) {
		out_text(out, "why", handshake_why_not(remote, why));
		if (remote->dial.why[LINE_HERE].code || remote->dial.why[LINE_THERE].code)
			out_text(out, "why_code", err_name(ERR_PEER));
	}
}

/* ---- peer.connect ---- */

static void connect_end(struct connect *c, const struct err *why)
{
	struct reply reply;

	list_remove(&c->link);
	loop_timer_stop(&c->timer);
	if (why) {
		request_fail(c->req, why);
	} else {
		peer_put(reply_begin(&reply, c->req), c->remote);
		reply_end(&reply);
	}
	handshake_release(c->remote);
	mem_free(c);
}

/* Has the wait ended? A data connection that failed for lack of memory is retried. */
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
	char text[ERR_TEXT_MAX];
	struct err why;

	if (sm_state(&remote->peer->sm) != PEER_UP && !remote->peer->why.code)
		err_set(&why, ERR_TIMEOUT, "not connected in time: %s", remote->label);
	else
		err_set(&why, ERR_TIMEOUT, "not connected in time: %s",
			handshake_why_not(remote, text));
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
	const struct peer_client client = {.uid = req->session->uid,
					   .session = req->session->id};
	struct connect *c = mem_zalloc(sizeof(*c));
	int r;

	if (!c)
		return err_pass(-ENOMEM);
	loop_timer_init(&c->timer, req->kvd->loop, on_connect_timer);
	r = handshake_reach(req->kvd->handshake, args->endpoint, &client, &c->remote);
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

/* ---- peer.list ---- */

static int64_t ms_since(uint64_t now_ns, uint64_t then_ns)
{
	return (now_ns - then_ns) / LOOP_NS_PER_MS;
}

/* up_ns: start of its data connection; 0: it is down. Errors of other users' rooms are
 * shown to administrators only. */
static void put_totals(struct text *out, const struct peer_totals *totals, uint64_t up_ns,
		       uint64_t now_ns, bool admin)
{
	out_number(out, "bytes_in", totals->bytes_in);
	out_number(out, "bytes_out", totals->bytes_out);
	out_number(out, "rooms_ended", totals->rooms);
	out_number(out, "rooms_failed", totals->rooms_failed);
	out_number(out, "downs", totals->downs);
	if (totals->error.code == ERR_OK || !admin)
		return;
	out_object(out, "last_error");
	out_text(out, "code", err_name(totals->error.code));
	out_text(out, "message", totals->error.text);
	out_bool(out, "resolved", totals->error_ns <= up_ns);
	out_number(out, "age_ms", ms_since(now_ns, totals->error_ns));
	out_close(out, '}');
}

static void put_known(struct text *out, const char *known_as, const char *product,
		      uint64_t since_ns, uint64_t now_ns)
{
	out_text(out, "known_as", known_as);
	out_text(out, "version", product);
	out_number(out, "since_ms", ms_since(now_ns, since_ns));
}

static void list_one(struct text *out, const struct remote *remote, uint64_t now_ns,
		     bool admin)
{
	const struct peer *peer = remote->peer;
	uint64_t up_ns = remote->ready ? remote->dial.up_ns : 0;

	out_object(out, NULL);
	peer_put(out, remote);
	out_number(out, "inflight_bytes", remote->line.bytes_posted);
	put_known(out, peer->known_as, peer->product, peer->since_ns, now_ns);
	put_totals(out, &peer->totals, up_ns, now_ns, admin);
	out_close(out, '}');
}

static void list_past(struct text *out, const struct peer_past *past, uint64_t now_ns)
{
	out_object(out, NULL);
	out_text(out, "endpoint", past->endpoint);
	out_text(out, "name", past->name);
	out_text(out, "instance", past->instance_text);
	out_text(out, "state", past->totals.downs ? "lost" : "unreached");
	put_known(out, past->known_as, past->product, past->since_ns, now_ns);
	put_totals(out, &past->totals, 0, now_ns, true);
	out_close(out, '}');
}

static int run_list(struct request *req)
{
	uint64_t now_ns = loop_now_ns(req->kvd->loop);
	const struct list *past = peers_past(req->kvd->peers);
	bool admin = req->session->admin;
	const struct remote *remote;
	struct reply reply;
	struct text *out = reply_begin(&reply, req);

	out_array(out, "peers");
	list_foreach(remote, handshake_remotes(req->kvd->handshake), link)
		list_one(out, remote, now_ns, admin); /* at most 65536: option peers */
	out_close(out, ']');
	out_array(out, "lost");
	/* Only administrators see which daemons could not be reached. */
	for (const struct list *at = past->prev; admin && at != past; at = at->prev)
		list_past(out, list_entry(at, struct peer_past, link), now_ns);
	out_close(out, ']');
	return reply_end(&reply);
}

static const struct field connect_fields[] = {
	F_STR("endpoint", connect_args, endpoint, REQUIRED, LINK_ENDPOINT_MAX - 1,
	      "tcp://host:port"),
	F_INT("timeout_ms", connect_args, timeout_ms, DEFAULT(CONNECT_MS_DEFAULT), 1,
	      CONNECT_MS_MAX, "Milliseconds to wait; default 5000"),
	F_END,
};
const struct command peer_commands[] = {
	{"peer.connect",
	 "Connect to another daemon; reply when the control and data connections are up",
	 connect_fields, 0, run_connect, "the peer, in the form of peer.list"},
	{"peer.list",
	 "List the peers. Administrators also see why peers failed, and those lost "
	 "within the last ten minutes",
	 NULL, 0, run_list,
	 "peers: {endpoint, instance, state, transport, path, crypto (protection of "
	 "data in transit: none or aes128gcm), passed_over (transports that could not "
	 "be used, and why), inflight_bytes, why, why_code (reason for no data "
	 "connection: EREQUIRE, no transport; EPEER, no connection), …}; lost: the "
	 "same for peers that disconnected (state lost) or were never connected "
	 "(unreached); each with known_as (its name in curve_allow_file), version, "
	 "since_ms (time up or down), bytes_in, bytes_out, rooms_ended, rooms_failed, "
	 "downs (disconnects), last_error {code, message, resolved (the data "
	 "connection has been up since), age_ms}"},
	{.name = NULL},
};
