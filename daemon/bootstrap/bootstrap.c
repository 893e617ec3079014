/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls of this daemon's engines; sessions and peers that come and go.
 *
 * A publication elsewhere is state, not a message: the group's meeting point may
 * restart, be partitioned away or not be there yet. So what a session published
 * is kept here and said again whenever that peer comes up, and in every third of
 * the time that it is kept there. Refused at the first time it is dropped and
 * the caller told; refused later (somebody took the place while we were cut
 * off) it is said again, with a warning, until the place is free.
 *
 * A query is a message with a cookie, said again when the peer comes up anew;
 * the time that the whole may take is the caller's to wait, and the answer to
 * the caller then says why the meeting point was not reached. What cannot come good (a
 * refused key, another version) ends the call at once.
 */
#include "daemon/bootstrap/bootstrap_impl.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

static const struct bootstrap_options defaults = {
	.ranks_max = 65536,
	.owner_ranks_max = 1024,
	.calls_max = 1024,
	.session_calls_max = 64,
	.message_bytes = WIRE_FRAME_MAX,
	.ttl_ns = 60 * LOOP_NS_PER_S,
	.call_timeout_ns = 10 * LOOP_NS_PER_S,
};

void bootstrap_options_default(struct bootstrap_options *options)
{
	*options = defaults;
}

/* ---- calls ---- */

void bootstrap_call_finish(struct bootstrap_call *call, const struct err *err,
			   const struct bootstrap_rank *ranks, unsigned int count)
{
	bootstrap_cancel(call);
	call->on_done(call, err, ranks, count);
}

static void call_fail_last(struct bootstrap_call *call)
{
	struct err err;

	err_take(&err);
	bootstrap_call_finish(call, &err, NULL, 0);
}

static void answer_locally(struct bootstrap_call *call)
{
	const struct board_group *group =
		board_group(&call->bootstrap->board, call->group);
	cleanup_free struct bootstrap_rank *ranks = NULL;
	const struct board_entry *entry;
	unsigned int count = 0;

	if (!group) {
		err_raise(ERR_NOTFOUND, "group '%s': no rank is published", call->group);
		call_fail_last(call);
		return;
	}
	ranks = mem_calloc(group->count, sizeof(*ranks));
	if (!ranks) {
		call_fail_last(call);
		return;
	}
	list_foreach(entry, &group->entries, of_group)
		ranks[count++] = entry->rank;
	bootstrap_call_finish(call, NULL, ranks, count);
}

static void on_call_done(struct loop_defer *defer)
{
	struct bootstrap_call *call = container_of(defer, struct bootstrap_call, done);
	struct err err = call->err;

	if (err.code)
		bootstrap_call_finish(call, &err, NULL, 0);
	else if (call->query)
		answer_locally(call);
	else
		bootstrap_call_finish(call, NULL, NULL, 0);
}

static void publication_send(struct bootstrap *b, struct publication *pub);
static void query_send(struct bootstrap_call *call);

/* Heard twice it is one: by its cookie, or by its place in the group. */
static void call_again(struct bootstrap_call *call)
{
	struct publication *pub;

	if (call->query) {
		call->sent = false;
		query_send(call);
		return;
	}
	list_foreach(pub, &call->bootstrap->publications, link) {
		if (pub->call == call)
			publication_send(call->bootstrap, pub);
	}
}

static uint64_t call_patience_ns(const struct bootstrap_call *call, uint64_t now_ns)
{
	uint64_t part_ns = call->bootstrap->options.call_timeout_ns / 5;
	uint64_t left_ns = call->end_ns > now_ns ? call->end_ns - now_ns : 0;

	return left_ns < part_ns ? left_ns : part_ns;
}

static void on_call_timer(struct loop_timer *timer)
{
	struct bootstrap_call *call = container_of(timer, struct bootstrap_call, timer);
	uint64_t now_ns = loop_now_ns(call->bootstrap->loop);
	struct err err;

	if (now_ns < call->end_ns) {
		loop_timer_start(timer, call_patience_ns(call, now_ns));
		call_again(call);
		return;
	}
	err_set(&err, ERR_TIMEOUT, "group '%s': no answer from the meeting point%s%s",
		call->group, call->peer->why.code ? ": " : "",
		call->peer->why.code ? call->peer->why.text : "");
	bootstrap_call_finish(call, &err, NULL, 0);
}

/* Deferred: never inside the call that made it. */
static void call_finish_later(struct bootstrap_call *call, const struct err *err)
{
	if (err)
		call->err = *err;
	loop_timer_stop(&call->timer);
	loop_defer(call->bootstrap->loop, &call->done);
}

static int call_check(const struct bootstrap *b, uint64_t session)
{
	const struct bootstrap_call *call;
	unsigned int own = 0;

	if (b->closing)
		return err_raise(ERR_DRAIN, "the daemon is stopping");
	list_foreach(call, &b->calls, link)
		own += call->session == session;
	if (own >= b->options.session_calls_max || b->call_count >= b->options.calls_max)
		return err_raise(ERR_LIMIT, "%u publish and query calls wait, the cap",
				 own >= b->options.session_calls_max ? own
								     : b->call_count);
	return 0;
}

/* `peer`: its hold becomes the call's; NULL: local, done in the next turn. */
static void bootstrap_call_start(struct bootstrap *b, struct bootstrap_call *call,
				 uint64_t session, const char *group, bool query,
				 struct peer *peer)
{
	call->bootstrap = b;
	call->peer = peer;
	call->session = session;
	call->cookie = ++b->cookies;
	snprintf(call->group, sizeof(call->group), "%s", group);
	call->query = query;
	call->sent = false;
	call->err = (struct err){.code = ERR_OK};
	call->end_ns = loop_now_ns(b->loop) + b->options.call_timeout_ns;
	loop_timer_init(&call->timer, b->loop, on_call_timer);
	loop_defer_init(&call->done, on_call_done);
	if (peer)
		loop_timer_start(&call->timer,
				 call_patience_ns(call, loop_now_ns(b->loop)));
	else
		loop_defer(b->loop, &call->done);
	call->waiting = true;
	b->call_count++;
	list_push_back(&b->calls, &call->link);
}

void bootstrap_cancel(struct bootstrap_call *call)
{
	struct publication *pub;

	if (!call->waiting)
		return;
	call->waiting = false;
	list_foreach(pub, &call->bootstrap->publications, link) {
		if (pub->call == call)
			pub->call = NULL;
	}
	list_remove(&call->link);
	call->bootstrap->call_count--;
	loop_timer_stop(&call->timer);
	loop_defer_cancel(&call->done);
	if (call->peer)
		peer_release(call->peer);
	call->peer = NULL;
}

static bool is_here(const struct bootstrap *b, const char *at)
{
	return !at || !at[0] || strcmp(at, b->endpoint) == 0;
}

/* ---- queries ---- */

static void query_send(struct bootstrap_call *call)
{
	struct wire_route_query m = {.cookie = call->cookie};
	uint8_t body[WIRE_STR_MAX + 16];
	struct cursor c;

	if (call->sent || sm_state(&call->peer->sm) != PEER_UP)
		return;
	snprintf(m.group, sizeof(m.group), "%s", call->group);
	cursor_write(&c, body, sizeof(body));
	if (wire_route_query_put(&c, &m) < 0 ||
	    peer_send_reliable(call->peer, WIRE_T_ROUTE_QUERY, body, c.pos) < 0)
		err_clear(); /* said again when the peer comes up, or timed out */
	else
		call->sent = true;
}

int bootstrap_query(struct bootstrap *b, uint64_t session, const char *group,
		    const char *at, struct bootstrap_call *call)
{
	struct peer *peer = NULL;
	int r;

	r = board_check(group, NULL);
	if (r == 0)
		r = call_check(b, session);
	if (r == 0 && !is_here(b, at))
		r = peers_dial(b->peers, at, &peer);
	if (r < 0)
		return err_pass(r);
	bootstrap_call_start(b, call, session, group, true, peer);
	if (peer)
		query_send(call);
	return 0;
}

/* ---- publications ---- */

void bootstrap_publication_free(struct bootstrap *b, struct publication *pub)
{
	list_remove(&pub->link);
	b->publication_count--;
	peer_release(pub->peer);
	mem_free(pub);
}

static void publication_send(struct bootstrap *b, struct publication *pub)
{
	struct wire_route_publish m = {.ttl_ms = b->options.ttl_ns / LOOP_NS_PER_MS};
	uint8_t record[sizeof(struct bootstrap_rank) + 64];
	uint8_t body[sizeof(record) + WIRE_STR_MAX + 32];
	struct cursor c;

	if (sm_state(&pub->peer->sm) != PEER_UP)
		return;
	cursor_write(&c, record, sizeof(record));
	rank_put(&c, &pub->rank);
	m.cookie = pub->cookie = ++b->cookies;
	m.rank = (struct wire_blob){record, c.pos};
	snprintf(m.group, sizeof(m.group), "%s", pub->group);
	cursor_write(&c, body, sizeof(body));
	if (wire_route_publish_put(&c, &m) < 0 ||
	    peer_send_reliable(pub->peer, WIRE_T_ROUTE_PUBLISH, body, c.pos) < 0)
		err_clear(); /* the tick says it again */
}

static void publication_withdraw(struct bootstrap *b, struct publication *pub)
{
	struct wire_route_withdraw m = {.group = ""};
	uint8_t record[sizeof(struct bootstrap_rank) + 64];
	uint8_t body[sizeof(record) + WIRE_STR_MAX + 32];
	struct cursor c;

	cursor_write(&c, record, sizeof(record));
	rank_put(&c, &pub->rank);
	m.rank = (struct wire_blob){record, c.pos};
	snprintf(m.group, sizeof(m.group), "%s", pub->group);
	cursor_write(&c, body, sizeof(body));
	if (sm_state(&pub->peer->sm) != PEER_UP || wire_route_withdraw_put(&c, &m) < 0 ||
	    peer_send_reliable(pub->peer, WIRE_T_ROUTE_WITHDRAW, body, c.pos) < 0)
		err_clear(); /* it goes with the peer, or in its time */
	bootstrap_publication_free(b, pub);
}

void bootstrap_tick_start(struct bootstrap *b)
{
	if (loop_timer_running(&b->tick) ||
	    (!b->publication_count && !b->board.remote_count))
		return;
	loop_timer_start(&b->tick, b->options.ttl_ns / 3);
}

static void bootstrap_on_tick(struct loop_timer *timer)
{
	struct bootstrap *b = container_of(timer, struct bootstrap, tick);
	struct publication *pub;

	board_expire(&b->board, loop_now_ns(b->loop));
	list_foreach(pub, &b->publications, link)
		publication_send(b, pub);
	bootstrap_tick_start(b);
}

/* The session's publication of this place at this peer; made when there is none.
 * The hold on the peer becomes its own. */
static int publication_get(struct bootstrap *b, uint64_t session, const char *group,
			   struct peer *peer, const struct bootstrap_rank *rank,
			   struct publication **pub_p)
{
	unsigned int own = 0;
	struct publication *pub;

	list_foreach(pub, &b->publications, link) {
		own += pub->session == session;
		if (pub->session == session && pub->peer == peer &&
		    strcmp(pub->group, group) == 0 && rank_same_place(&pub->rank, rank)) {
			peer_release(peer); /* it has one */
			pub->rank = *rank;
			*pub_p = pub;
			return 0;
		}
	}
	if (own >= b->options.owner_ranks_max ||
	    b->publication_count >= b->options.ranks_max)
		return err_raise(
			ERR_LIMIT, "%u ranks are published elsewhere, the cap",
			own >= b->options.owner_ranks_max ? own : b->publication_count);
	pub = mem_zalloc(sizeof(*pub));
	if (!pub)
		return err_pass(-ENOMEM);
	pub->peer = peer;
	pub->session = session;
	pub->rank = *rank;
	snprintf(pub->group, sizeof(pub->group), "%s", group);
	list_push_back(&b->publications, &pub->link);
	b->publication_count++;
	*pub_p = pub;
	return 0;
}

static int publish_elsewhere(struct bootstrap *b, uint64_t session, const char *group,
			     const char *at, const struct bootstrap_rank *rank,
			     struct bootstrap_call *call)
{
	struct publication *pub = NULL;
	struct peer *peer;
	struct err err;
	int r;

	r = peers_dial(b->peers, at, &peer);
	if (r < 0)
		return err_pass(r);
	r = publication_get(b, session, group, peer, rank, &pub);
	if (r < 0) {
		peer_release(peer);
		return err_pass(r);
	}
	if (call) {
		bootstrap_call_start(b, call, session, group, false, peer);
		peer_hold(peer);
	}
	if (pub->call) {
		err_set(&err, ERR_CANCELED, "group '%s': published again", group);
		call_finish_later(pub->call, &err);
	}
	pub->call = call;
	publication_send(b, pub);
	bootstrap_tick_start(b);
	return 0;
}

int bootstrap_publish(struct bootstrap *b, uint64_t session, const char *group,
		      const char *at, const struct bootstrap_rank *rank,
		      struct bootstrap_call *call)
{
	struct bootstrap_rank copy = *rank;
	int r;

	if (!copy.endpoint[0])
		memcpy(copy.endpoint, b->endpoint, sizeof(copy.endpoint));
	r = board_check(group, &copy);
	if (r == 0 && call)
		r = call_check(b, session);
	if (r < 0)
		return err_pass(r);
	if (!is_here(b, at))
		return err_pass(publish_elsewhere(b, session, group, at, &copy, call));
	r = board_put(&b->board, session, NULL, group, &copy, UINT64_MAX);
	if (r < 0)
		return err_pass(r);
	if (call)
		bootstrap_call_start(b, call, session, group, false, NULL);
	return 0;
}

/* ---- sessions and peers come and go ---- */

void bootstrap_session_gone(struct bootstrap *b, uint64_t session)
{
	struct bootstrap_call *call;
	struct publication *pub;
	struct err err;

	err_set(&err, ERR_SESSION, "the session has ended");
	list_foreach(call, &b->calls, link) {
		if (call->session == session)
			call_finish_later(call, &err);
	}
	list_foreach_safe(pub, &b->publications, link) {
		if (pub->session == session)
			publication_withdraw(b, pub);
	}
	board_owner_gone(&b->board, session, NULL);
}

void bootstrap_peer_up(struct bootstrap *b, struct peer *peer)
{
	struct publication *pub;
	struct bootstrap_call *call;

	list_foreach(pub, &b->publications, link) {
		if (pub->peer == peer)
			publication_send(b, pub);
	}
	list_foreach(call, &b->calls, link) {
		if (call->peer == peer && call->query)
			query_send(call);
	}
}

void bootstrap_peer_down(struct bootstrap *b, struct peer *peer)
{
	struct bootstrap_call *call;

	board_owner_gone(&b->board, 0, peer);
	list_foreach(call, &b->calls, link) {
		if (call->peer == peer)
			call->sent = false;
	}
}

void bootstrap_peer_refused(struct bootstrap *b, struct peer *peer)
{
	struct publication *pub;
	struct bootstrap_call *call;

	if (peer->why.retryable)
		return;
	list_foreach(call, &b->calls, link) {
		if (call->peer == peer)
			call_finish_later(call, &peer->why);
	}
	list_foreach_safe(pub, &b->publications, link) {
		if (pub->peer == peer && pub->call && !pub->established)
			bootstrap_publication_free(b, pub);
	}
}

/* ---- the whole ---- */

int bootstrap_new(const struct bootstrap_args *args, struct bootstrap **bootstrap_p)
{
	struct bootstrap *b = mem_zalloc(sizeof(*b));

	if (!b)
		return err_pass(-ENOMEM);
	b->loop = args->loop;
	b->peers = args->peers;
	b->options = args->options ? *args->options : defaults;
	snprintf(b->endpoint, sizeof(b->endpoint), "%s", args->endpoint);
	b->cookies = loop_random_u64(b->loop) >> 1;
	board_init(&b->board, &b->options);
	list_init(&b->publications);
	list_init(&b->calls);
	loop_timer_init(&b->tick, b->loop, bootstrap_on_tick);
	*bootstrap_p = b;
	return 0;
}

void bootstrap_close(struct bootstrap *b, const struct err *why)
{
	struct bootstrap_call *call;

	b->closing = true;
	while ((call = list_first(&b->calls, struct bootstrap_call, link)))
		bootstrap_call_finish(call, why, NULL, 0);
}

void bootstrap_free(struct bootstrap *b)
{
	struct publication *pub;
	struct err err;

	if (!b)
		return;
	err_set(&err, ERR_DRAIN, "the daemon is stopping");
	bootstrap_close(b, &err);
	list_foreach_safe(pub, &b->publications, link)
		bootstrap_publication_free(b, pub);
	board_fini(&b->board);
	loop_timer_stop(&b->tick);
	mem_free(b);
}
