/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer.connect, peer.list. peer.connect replies when the control and data connections of
 * the peer are up, or after its timeout. Pending requests are kept in a list that is
 * checked on a timer and on every change of a peer.
 */
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/control/commands.h"
#include "daemon/request/brief.h"
#include "daemon/request/commands.h"
#include "daemon/control/commands_peer.h"
#include "daemon/handshake/handshake.h"
#include "daemon/base/context.h"
#include "daemon/session/session.h"

#define CONNECT_MS_DEFAULT 5000
#define CONNECT_MS_MAX 600000
#define LIST_MAX 65536 /* the limit of option `peers` */

/* a pending peer.connect */
struct connect {
	struct list link;
	struct request *req;
	struct remote *remote;
	struct loop_timer timer;
};

static struct list waiting = LIST_INIT(waiting);

/* `why` is valid as long as `out`. */
static void commands_peer_describe(struct brief *out, const struct remote *remote,
				   char why[ERR_TEXT_MAX])
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
	if (xp && xp->ready)
		brief_text(out, "crypto", xp->crypto ? xp->crypto : "none");
	brief_bool(out, "self", peer->self);
	brief_bool(out, "same_host", peer->same_host);
	brief_number(out, "rtt_us", (double)peer->rtt_ns / 1e3);
	brief_number(out, "messages_in", (double)peer->messages_in);
	brief_number(out, "messages_out", (double)peer->messages_out);
	if (*remote->passed)
		brief_text(out, "passed_over", remote->passed);
	if (remote->why.code != ERR_OK) {
		brief_text(out, "why", remote->why.text);
		brief_text(out, "why_code", err_name(remote->why.code));
	} else if (!remote->ready && sm_state(&peer->sm) == PEER_UP) {
		brief_text(out, "why", handshake_why_not(remote, why));
		if (remote->line_why[LINE_HERE].code || remote->line_why[LINE_THERE].code)
			brief_text(out, "why_code", err_name(ERR_PEER));
	}
}

/* ---- peer.connect ---- */

static void connect_end(struct connect *c, const struct err *why)
{
	char text[ERR_TEXT_MAX];
	struct brief brief;

	list_remove(&c->link);
	loop_timer_stop(&c->timer);
	if (why) {
		request_fail(c->req, why);
	} else {
		commands_peer_describe(&brief, c->remote, text);
		request_reply_brief(c->req, &brief);
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

static double ms_since(uint64_t now_ns, uint64_t then_ns)
{
	return (double)((now_ns - then_ns) / LOOP_NS_PER_MS);
}

/* up_ns: start of its data connection; 0: it is down. Errors of other users' rooms are
 * shown to administrators only. */
static bool put_totals(cJSON *one, const struct peer_totals *totals, uint64_t up_ns,
		       uint64_t now_ns, bool admin)
{
	cJSON *error;

	if (!cJSON_AddNumberToObject(one, "bytes_in", (double)totals->bytes_in) ||
	    !cJSON_AddNumberToObject(one, "bytes_out", (double)totals->bytes_out) ||
	    !cJSON_AddNumberToObject(one, "rooms_ended", (double)totals->rooms) ||
	    !cJSON_AddNumberToObject(one, "rooms_failed", (double)totals->rooms_failed) ||
	    !cJSON_AddNumberToObject(one, "downs", (double)totals->downs))
		return false;
	if (totals->error.code == ERR_OK || !admin)
		return true;
	error = cJSON_AddObjectToObject(one, "last_error");
	return error &&
	       cJSON_AddStringToObject(error, "code", err_name(totals->error.code)) &&
	       cJSON_AddStringToObject(error, "message", totals->error.text) &&
	       cJSON_AddBoolToObject(error, "resolved", totals->error_ns <= up_ns) &&
	       cJSON_AddNumberToObject(error, "age_ms",
				       ms_since(now_ns, totals->error_ns));
}

static bool put_known(cJSON *one, const char *known_as, const char *product,
		      uint64_t since_ns, uint64_t now_ns)
{
	return cJSON_AddStringToObject(one, "known_as", known_as) &&
	       cJSON_AddStringToObject(one, "version", product) &&
	       cJSON_AddNumberToObject(one, "since_ms", ms_since(now_ns, since_ns));
}

static bool list_one(cJSON *out, const struct remote *remote, uint64_t now_ns, bool admin)
{
	const struct peer *peer = remote->peer;
	uint64_t up_ns = remote->ready ? remote->ready_ns : 0;
	char why[ERR_TEXT_MAX];
	struct brief brief;
	cJSON *one;

	commands_peer_describe(&brief, remote, why);
	one = cJSON_Duplicate(brief.nodes, true);
	if (one && cJSON_AddItemToArray(out, one))
		return cJSON_AddNumberToObject(one, "inflight_bytes",
					       (double)remote->line.bytes_posted) &&
		       put_known(one, peer->known_as, peer->product, peer->since_ns,
				 now_ns) &&
		       put_totals(one, &peer->totals, up_ns, now_ns, admin);
	cJSON_Delete(one);
	return false;
}

static bool list_past(cJSON *out, const struct peer_past *past, uint64_t now_ns)
{
	cJSON *one = cJSON_CreateObject();

	if (one && cJSON_AddItemToArray(out, one))
		return cJSON_AddStringToObject(one, "endpoint", past->endpoint) &&
		       cJSON_AddStringToObject(one, "name", past->name) &&
		       cJSON_AddStringToObject(one, "instance", past->instance_text) &&
		       cJSON_AddStringToObject(
			       one, "state", past->totals.downs ? "lost" : "unreached") &&
		       put_known(one, past->known_as, past->product, past->since_ns,
				 now_ns) &&
		       put_totals(one, &past->totals, 0, now_ns, true);
	cJSON_Delete(one);
	return false;
}

struct list_args {
	uint32_t limit;
};

/* Those without a data connection first, so that a limit does not hide them. */
static bool list_known(cJSON *out, const struct request *req, uint64_t now_ns)
{
	const struct list_args *args = request_args(req);
	const struct list *remotes = handshake_remotes(req->kvd->handshake);
	const struct remote *remote;
	uint32_t left = args->limit;

	for (int ready = 0; ready <= 1; ready++) {
		list_foreach(remote, remotes, link) {
			if (left == 0)
				return true;
			if (remote->ready != (bool)ready)
				continue;
			if (!list_one(out, remote, now_ns, req->session->admin))
				return false;
			left--;
		}
	}
	return true;
}

/* The last ones. Only administrators see which daemons could not be reached. */
static bool list_lost(cJSON *out, const struct request *req, uint64_t now_ns)
{
	const struct list_args *args = request_args(req);
	const struct list *past = peers_past(req->kvd->peers);
	uint32_t left = req->session->admin ? args->limit : 0;

	for (const struct list *at = past->prev; at != past && left;
	     at = at->prev, left--)
		if (!list_past(out, list_entry(at, struct peer_past, link), now_ns))
			return false;
	return true;
}

static int run_list(struct request *req)
{
	cJSON *result = request_result(), *out, *lost;
	uint64_t now_ns = loop_now_ns(req->kvd->loop);

	if (!result)
		return err_pass(-ENOMEM);
	out = cJSON_AddArrayToObject(result, "peers");
	lost = cJSON_AddArrayToObject(result, "lost");
	return request_finish(req, result,
			      out && lost && list_known(out, req, now_ns) &&
				      list_lost(lost, req, now_ns));
}

static const struct field connect_fields[] = {
	F_STR("endpoint", connect_args, endpoint, REQUIRED, LINK_ENDPOINT_MAX - 1,
	      "tcp://host:port"),
	F_INT("timeout_ms", connect_args, timeout_ms, DEFAULT(CONNECT_MS_DEFAULT), 1,
	      CONNECT_MS_MAX, "Milliseconds to wait; default 5000"),
	F_END,
};
static const struct field list_fields[] = {
	F_INT("limit", list_args, limit, DEFAULT(LIST_MAX), 1, LIST_MAX,
	      "Maximum number of records of each list; peers without a data connection, "
	      "and the latest lost ones, come first"),
	F_END,
};
const struct command peer_commands[] = {
	{"peer.connect",
	 "Connect to another daemon; reply when the control and data connections are up",
	 connect_fields, 0, run_connect, "the peer, in the form of peer.list"},
	{"peer.list",
	 "List the peers. Administrators also see why peers failed, and those lost "
	 "within the last ten minutes",
	 list_fields, 0, run_list,
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
