/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The data line of a peering: which transport, and which side connects.
 *
 * The side with the lower instance id chooses the first transport of the configured order
 * that both sides have, that the pair can use (one host or two) and that `require`
 * allows. It dials, so only this side learns whether it can connect. A transport that
 * cannot connect (shm, between containers that share neither network namespace nor
 * run_dir) is skipped, and LINE informs the other side of the choice and its reason. That
 * side opens nothing before. A choice is valid for one peering: a restart on either side
 * repeats it. (Rejected: a choice by the same rule on both sides, which is only possible
 * if the rule needs nothing but shared knowledge; the next transport after the loss of a
 * data line, which costs the rooms of the peering.)
 *
 * An attempt may fail although the peers can communicate: a firewall blocks the data
 * port, or an address is of a network that only one side can reach. So attempts continue
 * for as long as the peering lasts, by the transport for which pools were announced, and
 * the sides take turns to dial: the chooser in even turns, the other in odd ones. The
 * chooser starts each turn, with LINE; the other side reports a failure of its own
 * attempt. Both keep the reasons of both, for rooms that give up (connect_timeout),
 * `peers` and the doctor. (Rejected: a new peering for each attempt, which ends
 * operations that only need the control line; dialling from both sides at once, which
 * needs a rule for two connections.)
 *
 * The two lines share one fate: the loss of a data line takes the peer down, because
 * operations that could not be proven ended on a room must be cut on the connection; and
 * a peer that is down closes its data line, which ends every op on it.
 *
 * An endpoint may be up again before all of that has drained: the new epoch then waits
 * (start_again) until the old data line is closed.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/config/config.h"
#include "daemon/handshake/handshake_impl.h"

/* Minimum time between attempts that fail at once. */
#define AGAIN_NS LOOP_NS_PER_S

/* ---- which transport ---- */

static const struct peer_address *address_of(const struct peer *peer, const char *name)
{
	for (unsigned int i = 0; i < peer->address_count; i++) {
		if (strcmp(peer->addresses[i].transport, name) == 0)
			return &peer->addresses[i];
	}
	return NULL;
}

bool line_allowed(const struct config *config, const struct transport *t)
{
	const struct setting_words *req = &config->require;

	for (size_t i = 0; i < req->count; i++) {
		if (strcmp(req->word[i], t->ops->name) == 0)
			return true;
		if (strcmp(req->word[i], "rdma") == 0 && (t->caps & XP_CAP_RDMA))
			return true;
	}
	return req->count == 0;
}

/* Why `t` cannot be used for this peer, or NULL. */
static const char *unfit(const struct handshake *hs, const struct remote *remote,
			 const struct transport *t)
{
	const struct peer *peer = remote->peer;

	if (peer->self)
		return t->caps & XP_CAP_SELF ? NULL
					     : "does not connect a daemon to itself";
	if (!line_allowed(hs->kvd->config, t))
		return "not in `require`";
	if ((t->caps & XP_CAP_SAME_HOST) && !peer->same_host)
		return "the peer is on another host";
	if (!address_of(peer, t->ops->name))
		return "the peer does not offer it";
	return NULL;
}

__attribute__((format(printf, 2, 3))) static void add_words(char text[ERR_TEXT_MAX],
							    const char *fmt, ...)
{
	size_t n = strlen(text);
	va_list ap;

	if (n && n + 3 < ERR_TEXT_MAX)
		n += (size_t)snprintf(text + n, ERR_TEXT_MAX - n, ", ");
	va_start(ap, fmt);
	vsnprintf(text + n, ERR_TEXT_MAX - n, fmt, ap);
	va_end(ap);
}

/* The line of a daemon to itself has one side. */
static bool chooses(const struct peer *peer)
{
	return peer->lower || peer->self;
}

const struct transport *handshake_transport(const struct remote *remote)
{
	if (chooses(remote->peer))
		return remote->transport;
	return remote->dial.told < 0 ? NULL : remote->kvd->transports[remote->dial.told];
}

/* ---- opening ---- */

static bool dials(const struct remote *remote)
{
	return remote->peer->lower == (remote->dial.turn % 2 == 0);
}

static int open_line(struct handshake *hs, struct remote *remote, unsigned int index)
{
	struct peer *peer = remote->peer;
	struct transport *t = hs->kvd->transports[index];
	const struct peer_address *address = address_of(peer, t->ops->name);
	struct xp_peer_args args = {.self = peer->self,
				    .dial = dials(remote),
				    .account = remote->account,
				    .owner = remote};
	int r;

	memcpy(args.instance, peer->instance, sizeof(args.instance));
	memcpy(args.token_in, peer->token_in, sizeof(args.token_in));
	memcpy(args.token_out, peer->token_out, sizeof(args.token_out));
	if (address) {
		args.address = address->data;
		args.address_len = address->len;
	}
	remote->transport = t;
	remote->transport_index = index;
	r = express_init(remote);
	if (r == 0)
		r = t->ops->peer_open(t, &args, &remote->xp);
	if (r < 0)
		express_fini(remote);
	return err_pass(r);
}

static int choose_line(struct handshake *hs, struct remote *remote)
{
	char why[ERR_TEXT_MAX] = "";

	for (unsigned int i = 0; i < hs->kvd->transport_count; i++) {
		const struct transport *t = hs->kvd->transports[i];
		const char *no = unfit(hs, remote, t);
		int r;

		if (no) {
			add_words(why, "%s: %s", t->ops->name, no);
			continue;
		}
		r = open_line(hs, remote, i);
		if (r >= 0 || r != -err_errno(ERR_REQUIRE) || remote->peer->self)
			return err_pass(r);
		add_words(why, "%s", err_last()->text);
		add_words(remote->dial.passed, "%s", err_last()->text);
		err_clear();
	}
	remote->transport = NULL;
	return err_raise(ERR_REQUIRE, "%.100s: no transport: %s", remote->label,
			 *why ? why : "no transport built in");
}

/* The other side waits for this message. */
static void tell_line(struct remote *remote, const struct err *why)
{
	struct wire_line msg = {.code = why->code, .turn = remote->dial.turn};
	const char *text = why->code ? why->text : remote->dial.passed;
	size_t label = strlen(remote->label);
	struct err e;

	if (why->code && strncmp(text, remote->label, label) == 0)
		text += label + strspn(text + label, ": "); /* redundant there */
	if (!why->code)
		snprintf(msg.transport, sizeof(msg.transport), "%s",
			 remote->transport->ops->name);
	snprintf(msg.text, sizeof(msg.text), "%s", text);
	if (remote->dial.turn % 2 && remote->peer->lower)
		snprintf(msg.tried, sizeof(msg.tried), "%s",
			 remote->dial.why[LINE_HERE].text);
	if (handshake_send_line(remote, &msg) >= 0)
		return;
	err_take(&e);
	peer_end_later(remote->peer, &e);
}

static void line_on_closed(void *arg);

void line_close(struct remote *remote)
{
	if (!remote->xp || remote->dial.closing)
		return;
	remote->dial.closing = true;
	remote->transport->ops->peer_close(remote->xp, line_on_closed, remote);
}

/* ---- failed attempts ---- */

static void note_why(struct remote *remote, unsigned int from, const struct err *why)
{
	struct handshake *hs = remote->kvd->handshake;
	struct err *kept = &remote->dial.why[from];
	bool again = strcmp(kept->text, why->text) == 0;
	char text[ERR_TEXT_MAX];

	*kept = *why;
	peer_note_error(remote->peer, why);
	if (!again)
		log_warn("peer", remote->peer->shown, "not connected yet", "why=\"%s\"",
			 handshake_why_not(remote, text));
	hs->events.on_change(hs->events.owner, remote);
}

/* The next turn starts when the line of this attempt is closed. */
static void next_turn(struct remote *remote)
{
	uint64_t after_ns = remote->dial.turn_ns + AGAIN_NS,
		 now_ns = loop_now_ns(remote->kvd->loop);

	remote->dial.turn++;
	line_close(remote);
	loop_timer_start(&remote->dial.again, after_ns > now_ns ? after_ns - now_ns : 0);
}

/* On this side. */
static void attempt_failed(struct remote *remote, const struct err *why)
{
	bool dialled = dials(remote);
	uint64_t epoch = remote->peer->epoch;

	if (dialled || remote->dial.why[LINE_THERE].code == ERR_OK)
		note_why(remote, dialled ? LINE_HERE : LINE_THERE, why);
	if (sm_state(&remote->peer->sm) != PEER_UP || remote->peer->epoch != epoch)
		return;
	if (chooses(remote->peer)) {
		next_turn(remote);
		return;
	}
	line_close(remote);
	if (dialled)
		tell_line(remote, why);
}

void line_on_again(struct loop_timer *timer)
{
	struct remote *remote = container_of(timer, struct remote, dial.again);

	if (remote->xp)
		remote->dial.start_again = true;
	else
		line_start(remote);
}

/* ---- the start ---- */

static void start_failed(struct remote *remote)
{
	struct handshake *hs = remote->kvd->handshake;

	log_warn("peer", remote->peer->shown, "no data connection", "why=\"%s\"",
		 remote->why.text);
	if (remote->why.code == ERR_NOMEM)
		peer_end_later(remote->peer, &remote->why);
	else
		hs->events.on_change(hs->events.owner, remote);
}

static void start_turn(struct remote *remote)
{
	static const struct err none = {.code = ERR_OK};
	int r = open_line(remote->kvd->handshake, remote, remote->transport_index);
	struct err why;

	if (r < 0) {
		err_take(&why);
		if (why.code == ERR_NOMEM)
			peer_end_later(remote->peer, &why);
		else
			attempt_failed(remote, &why);
	} else if (remote->peer->lower) {
		tell_line(remote, &none);
	}
}

void line_start(struct remote *remote)
{
	struct handshake *hs = remote->kvd->handshake;
	struct peer *peer = remote->peer;
	int r;

	remote->dial.start_again = false;
	remote->refused = false;
	remote->why.code = ERR_OK;
	peer_label(peer, remote->label);
	if (!chooses(peer) && remote->dial.told < 0)
		return; /* line_message() */
	remote->dial.turn_ns = loop_now_ns(hs->kvd->loop);
	if (remote->announce.begun) {
		start_turn(remote);
		return;
	}
	r = chooses(peer) ? choose_line(hs, remote)
			  : open_line(hs, remote, (unsigned int)remote->dial.told);
	if (r < 0)
		err_take(&remote->why);
	else if (*remote->dial.passed)
		log_warn("peer", peer->shown, "a preferred transport was skipped",
			 "transport=%s why=\"%s\"", remote->transport->ops->name,
			 remote->dial.passed);
	if (peer->lower && remote->why.code != ERR_NOMEM)
		tell_line(remote, &remote->why);
	if (r < 0) {
		start_failed(remote);
		return;
	}
	remote->announce.begun = true;
	pools_begin(remote);
}

/* ---- messages of the other side ---- */

/* Its choice. */
static void take_line(struct handshake *hs, struct remote *remote,
		      const struct wire_line *msg)
{
	const char *no = "not usable here";

	for (unsigned int i = 0; i < hs->kvd->transport_count; i++) {
		if (strcmp(hs->kvd->transports[i]->ops->name, msg->transport) != 0)
			continue;
		no = unfit(hs, remote, hs->kvd->transports[i]);
		if (!no)
			remote->dial.told = (int)i;
	}
	if (no)
		err_set(&remote->why, ERR_REQUIRE, "%.100s: no transport: %.32s: %s",
			remote->label, msg->transport, no);
	snprintf(remote->dial.passed, sizeof(remote->dial.passed), "%.319s", msg->text);
}

static int take_choice(struct remote *remote, const struct wire_line *msg)
{
	struct handshake *hs = remote->kvd->handshake;

	if (msg->code)
		peer_report(remote->peer, msg->code, msg->text, &remote->why);
	else
		take_line(hs, remote, msg);
	if (remote->why.code != ERR_OK) {
		log_warn("peer", remote->peer->shown, "no data connection", "why='%s'",
			 remote->why.text);
		hs->events.on_change(hs->events.owner, remote);
	} else if (!remote->xp) { /* else the line of the last epoch is not closed yet */
		line_start(remote);
	}
	return 0;
}

/* The chooser starts another turn; turns that it could not start are skipped. */
static int take_turn(struct remote *remote, const struct wire_line *msg)
{
	uint64_t epoch = remote->peer->epoch;
	struct err why;

	if (remote->why.code != ERR_OK || msg->turn <= remote->dial.turn || msg->code ||
	    strcmp(msg->transport, remote->kvd->transports[remote->dial.told]->ops->name))
		return err_raise(ERR_PROTO, "LINE: sent twice");
	if (remote->ready)
		return err_raise(ERR_PEER, "%.100s: the peer closed the data connection",
				 remote->label);
	remote->dial.turn = msg->turn;
	if (*msg->tried) {
		err_set(&why, ERR_PEER, "%.*s", ERR_TEXT_MAX - 1, msg->tried);
		note_why(remote, LINE_THERE, &why);
	}
	if (sm_state(&remote->peer->sm) != PEER_UP || remote->peer->epoch != epoch)
		return 0;
	line_close(remote);
	if (remote->xp)
		remote->dial.start_again = true;
	else
		line_start(remote);
	return 0;
}

/* The attempt of the other side in this turn failed. */
static int take_failure(struct remote *remote, const struct wire_line *msg)
{
	uint64_t epoch = remote->peer->epoch;
	struct err why;

	if (remote->peer->self || !msg->code || msg->turn > remote->dial.turn ||
	    msg->turn % 2 == 0)
		return err_raise(ERR_PROTO, "LINE: this side chooses the transport");
	if (remote->ready || msg->turn < remote->dial.turn)
		return 0; /* the next turn has started meanwhile */
	err_set(&why, err_from_wire(msg->code), "%.*s", ERR_TEXT_MAX - 1, msg->text);
	note_why(remote, LINE_THERE, &why);
	if (sm_state(&remote->peer->sm) == PEER_UP && remote->peer->epoch == epoch)
		next_turn(remote);
	return 0;
}

int line_message(struct remote *remote, struct cursor *body)
{
	struct wire_line msg;
	int r = wire_line_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (chooses(remote->peer))
		return err_pass(take_failure(remote, &msg));
	if (remote->dial.told >= 0 || remote->why.code != ERR_OK)
		return err_pass(take_turn(remote, &msg));
	return err_pass(take_choice(remote, &msg));
}

/* ---- calls from the transport ---- */

void line_on_ready(void *owner, struct xp_peer *xp)
{
	struct handshake *hs = owner;
	struct remote *remote = line_remote(xp);

	remote->ready = true;
	remote->dial.down_ns = 0;
	remote->dial.up_ns = loop_now_ns(hs->kvd->loop);
	remote->dial.why[LINE_HERE] = remote->dial.why[LINE_THERE] =
		(struct err){.code = ERR_OK};
	log_info("peer", remote->peer->shown, "data connection up",
		 "transport=%s path=\"%s\"", remote->transport->ops->name,
		 ((struct xp_peer_base *)xp)->path);
	sched_line_set(&remote->line, xp, remote->transport->ops, NULL);
	express_line_ready(remote);
	pools_line_ready(remote);
	hs->events.on_change(hs->events.owner, remote);
}

static void line_on_closed(void *arg)
{
	struct remote *remote = arg;
	struct handshake *hs = remote->kvd->handshake;

	remote->dial.closing = false;
	remote->xp = NULL;
	express_fini(remote);
	if (remote->dial.start_again && sm_state(&remote->peer->sm) == PEER_UP &&
	    !hs->closing)
		line_start(remote);
	else
		remote_try_free(remote);
}

static void not_ready(struct remote *remote)
{
	if (remote->ready)
		remote->dial.down_ns = loop_now_ns(remote->kvd->loop);
	remote->ready = false;
}

void line_on_lost(void *owner, struct xp_peer *xp, const struct err *why)
{
	struct remote *remote = line_remote(xp);
	bool was_ready = remote->ready;
	struct err e;

	(void)owner;
	not_ready(remote);
	if (!was_ready && sm_state(&remote->peer->sm) == PEER_UP && !remote->peer->self) {
		attempt_failed(remote, why);
		return;
	}
	err_set(&e, why->code, "%.100s: data connection lost: %s", remote->label,
		why->text);
	sched_line_set(&remote->line, NULL, NULL, &e);
	line_close(remote);
	if (sm_state(&remote->peer->sm) == PEER_UP)
		peer_kill(remote->peer, &e);
}

/* ---- the end ---- */

void line_forget(struct remote *remote)
{
	loop_timer_stop(&remote->dial.again);
	not_ready(remote);
	list_remove(&remote->announce.link);
	remote->dial.start_again = remote->announce.begun = false;
	remote->dial.turn = 0;
	remote->dial.told = -1;
	remote->dial.passed[0] = '\0';
}

/* ---- reasons for a missing line ---- */

uint64_t handshake_patience(const struct remote *remote, uint64_t since_ns)
{
	const struct config *config = remote->kvd->config;
	const struct peer *peer = remote->peer;
	uint64_t line_ns =
		remote->dial.down_ns > since_ns ? remote->dial.down_ns : since_ns;
	uint64_t away_ns = peer->since_ns > since_ns ? peer->since_ns : since_ns;

	if (remote->ready)
		return UINT64_MAX;
	line_ns += config->connect_timeout_ns;
	away_ns += config->dead_after_ns;
	return sm_state(&peer->sm) != PEER_UP && peer->totals.away && away_ns < line_ns
		       ? away_ns
		       : line_ns;
}

const char *handshake_why_not(const struct remote *remote, char text[ERR_TEXT_MAX])
{
	const struct peer *peer = remote->peer;
	const char *here = remote->dial.why[LINE_HERE].text,
		   *there = remote->dial.why[LINE_THERE].text;

	if (sm_state(&peer->sm) != PEER_UP)
		snprintf(text, ERR_TEXT_MAX, "%s",
			 peer->why.code != ERR_OK ? peer->why.text : "not connected yet");
	else if (remote->why.code != ERR_OK)
		snprintf(text, ERR_TEXT_MAX, "%s", remote->why.text);
	else if (*here && *there)
		snprintf(text, ERR_TEXT_MAX, "%.140s; reported by the peer: %.140s", here,
			 there);
	else if (*here)
		snprintf(text, ERR_TEXT_MAX, "%s", here);
	else if (*there)
		snprintf(text, ERR_TEXT_MAX, "reported by the peer: %.290s", there);
	else
		snprintf(text, ERR_TEXT_MAX, "its data connection is not up yet");
	return text;
}
