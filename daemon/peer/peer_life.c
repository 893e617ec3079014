/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer's life: up, down, and the one timer that drives both.
 *
 * The timer does all of it: repeated HELLO, redial, PING, liveness, the end of attempts
 * without proof. A daemon without peers has no timer.
 *
 * Dead means no frame for `dead_after`, or for two fifths of that when PINGs were not
 * answered for longer: a line may be cut in one direction only. The lateness of this
 * daemon is subtracted: a late turn adds to the allowance, and when this loop did not
 * poll for longer than a ping interval the silence before that is no evidence (the peer's
 * frames were in our socket), so the count starts again. Frames that the link could not
 * deliver yet (its budget a turn) also delay the decision, but not forever: a flood from
 * one peer must not keep another alive.
 *
 * A peer that answers, and that nothing waits for, is pinged once a second: then silence
 * is usual, and the check starts anew with a PING that was not answered, with a message,
 * or with the end of its connection.
 *
 * Callbacks of the owner may release, kill and dial at any time while a function here is
 * running. So each move first does all of its own work, calls back last, and code after
 * that checks the state again.
 */
#include "daemon/peer/peer_impl.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/hex.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define FAILED_LOG_NS (60 * LOOP_NS_PER_S)
#define ONCE_NS LOOP_NS_PER_S /* between dials of an unauthenticated endpoint */

const char *peer_label(const struct peer *peer, char text[PEER_LABEL_MAX])
{
	snprintf(text, PEER_LABEL_MAX, "peer %s%s%.8s", peer->shown,
		 peer->instance_text[0] ? " instance " : "", peer->instance_text);
	return text;
}

void peer_report(const struct peer *peer, uint32_t code, const char *text,
		 struct err *why_p)
{
	char label[PEER_LABEL_MAX];

	err_set(why_p, code ? err_from_wire(code) : ERR_PEER, "%.110s reports: \"%s\"",
		peer_label(peer, label), text);
	err_foreign(why_p);
}

/* ---- timers ---- */

void peer_tick_in(struct peer_impl *impl, uint64_t after_ns)
{
	loop_timer_start(&impl->tick, after_ns);
}

/* Doubles, with up to a quarter at random so that a cluster spreads out. */
static uint64_t next_retry(struct peer_impl *impl)
{
	uint64_t wait_ns = impl->retry_ns;

	impl->retry_ns *= 2;
	if (impl->retry_ns > impl->peers->options.redial_max_ns)
		impl->retry_ns = impl->peers->options.redial_max_ns;
	return wait_ns + loop_random_u64(impl->peers->loop) % (wait_ns / 4 + 1);
}

/* Not UP (any more): plan the next step. */
void peer_plan_next(struct peer_impl *impl)
{
	if (impl->peers->closing) {
		loop_timer_stop(&impl->tick);
	} else if (impl->dialled && impl->peer.holds) {
		peer_tick_in(impl, next_retry(impl));
	} else if (impl->next.live) {
		peer_tick_in(impl, impl->peers->options.accept_ttl_ns);
	} else {
		loop_timer_stop(&impl->tick);
		peer_reap_later(impl);
	}
}

void peer_hang_up(struct peer_impl *impl)
{
	if (impl->line)
		impl->peers->link->ops->hangup(impl->line);
	impl->line = NULL;
	impl->line_once = impl->line_up = false;
	list_remove(&impl->dials);
}

static int open_line(struct peer_impl *impl)
{
	struct link *link = impl->peers->link;
	bool once = impl->unauthenticated && link->ops->dial_once;
	uint64_t now_ns = loop_now_ns(impl->peers->loop);
	int r;

	/* dialled here meanwhile; or its single attempt failed, and it has sent HELLO
	 * again */
	if (impl->line_once && sm_state(&impl->peer.sm) != PEER_UP &&
	    (!once || (!impl->line_up && now_ns - impl->line_ns >= ONCE_NS)))
		peer_hang_up(impl);
	if (impl->line)
		return 0;
	r = (once ? link->ops->dial_once : link->ops->dial)(
		link, impl->peer.endpoint, &impl->line_owner, &impl->line);
	if (r < 0)
		return err_pass(r);
	impl->line_once = once;
	impl->line_ns = now_ns;
	return 0;
}

void peer_dial_later(struct peer_impl *impl)
{
	if (list_empty(&impl->dials))
		list_push_back(&impl->peers->dials, &impl->dials);
	loop_work_defer(&impl->peers->dial);
}

static void dial(struct peer_impl *impl)
{
	bool up = sm_state(&impl->peer.sm) == PEER_UP;
	struct err why;

	if (!up && !impl->next.live)
		return;
	if (open_line(impl) < 0) {
		err_take(&why);
		peer_attempt_failed(impl, &why); /* if UP, the liveness check decides */
		return;
	}
	peer_answer(impl, &impl->next);
	if (impl->dialled && !up)
		peer_hello_send(impl);
}

bool peer_dial_step(struct loop_work *work)
{
	struct peers *peers = container_of(work, struct peers, dial);
	struct list *first = list_pop_front(&peers->dials);

	if (first)
		dial(list_entry(first, struct peer_impl, dials));
	return !list_empty(&peers->dials);
}

/* ---- up and down ---- */

static void say_bye(struct peer_impl *impl, const struct peering *peering,
		    const struct err *why)
{
	uint8_t frame[PEER_BYE_FRAME_MAX];
	size_t len =
		peer_bye_frame(impl->peers, peering, peering->instance,
			       peering->epoch_out, (uint32_t)why->code, why->text, frame);

	if (impl->line && impl->peers->link->ops->send(impl->line, frame, len) < 0)
		err_clear(); /* it will miss our frames */
}

static void take_down(struct peer_impl *impl, const struct err *why, bool bye)
{
	struct peers *peers = impl->peers;
	struct peer *peer = &impl->peer;

	if (bye)
		say_bye(impl, &impl->cur, why);
	peer_move(impl, PEER_DOWN);
	peer->why = *why;
	peer->since_ns = loop_now_ns(peers->loop);
	peer->totals.downs++;
	peer->totals.away = why->code != ERR_CANCELED;
	if (peer->totals.away)
		peer_note_error(peer, why);
	impl->why_down.code = ERR_OK;
	impl->ping_open = impl->quiet = false;
	loop_defer_cancel(&impl->later);
	peer_queue_drop(impl);
	peer_whole_drop(impl);
	peer_express_end(impl);
	peering_end(&impl->cur);
	if (!impl->next.live)
		peer_hang_up(impl);
	if (loop_now_ns(peers->loop) - peer->up_since_ns > peers->options.redial_max_ns)
		impl->retry_ns = peers->options.hello_retry_ns;
	log_info("peer", peer->shown, "down", "instance=%s code=%s why='%s'",
		 peer->instance_text, err_name(why->code), why->text);
	peer_plan_next(impl);
	if (peers->callbacks.on_down)
		peers->callbacks.on_down(peers->callbacks.owner, peer);
}

void peer_bring_down(struct peer_impl *impl, const struct err *why, bool bye)
{
	assert(why->code != ERR_OK);
	if (sm_state(&impl->peer.sm) == PEER_UP)
		take_down(impl, why, bye);
}

/* A peer that fails repeatedly with the same error costs a log line a minute. */
static void warn_not_reached(struct peer *peer, const struct err *why, uint64_t now_ns)
{
	struct peer_totals *totals = &peer->totals;

	if (totals->warned == why->code && now_ns - totals->warned_ns < FAILED_LOG_NS)
		return;
	totals->warned = why->code;
	totals->warned_ns = now_ns;
	log_warn("peer", peer->shown, "not reached", "code=%s why='%s'",
		 err_name(why->code), why->text);
}

void peer_attempt_failed(struct peer_impl *impl, const struct err *why)
{
	struct peers *peers = impl->peers;
	struct peer *peer = &impl->peer;

	assert(why->code != ERR_OK);
	peering_end(&impl->next);
	if (sm_state(&peer->sm) == PEER_UP)
		return;
	if (sm_state(&peer->sm) != PEER_DOWN)
		peer_move(impl, PEER_DOWN);
	peer->why = *why;
	peer_hang_up(impl);
	peer_plan_next(impl);
	if (!impl->unauthenticated) /* of those there may be hundreds a second */
		warn_not_reached(peer, why, loop_now_ns(peers->loop));
	peer_note_error(peer, why);
	if (impl->dialled && peers->callbacks.on_refused)
		peers->callbacks.on_refused(peers->callbacks.owner, peer);
}

/* Copy the data of the proven peering to the fields that the owner sees. */
static void peer_life_publish(struct peer_impl *impl)
{
	struct peers *peers = impl->peers;
	struct peering *cur = &impl->cur;
	struct peer *peer = &impl->peer;

	peer_addresses_free(peer->addresses, &peer->address_count);
	memcpy(peer->addresses, cur->addresses, sizeof(peer->addresses));
	peer->address_count = cur->address_count;
	cur->address_count = 0;
	memcpy(peer->name, cur->name, sizeof(peer->name));
	memcpy(peer->product, cur->product, sizeof(peer->product));
	memcpy(peer->instance, cur->instance, sizeof(peer->instance));
	hex_write(peer->instance, sizeof(peer->instance), peer->instance_text);
	peer->totals.warned = ERR_OK;
	memcpy(peer->token_in, cur->token_in, sizeof(peer->token_in));
	memcpy(peer->token_out, peer->self ? cur->token_in : cur->token_out,
	       sizeof(peer->token_out));
	peer->features = cur->features;
	peer->same_host = memcmp(cur->boot_id, peers->boot_id, sizeof(cur->boot_id)) == 0;
	peer->lower = memcmp(peers->instance, cur->instance, sizeof(cur->instance)) < 0;
	peer->epoch = ++peers->epochs_minted;
	peer->up_since_ns = peer->since_ns = loop_now_ns(peers->loop);
	peer_show(peer, cur->user);
	peer->same_user =
		peer->self || !peers->link->ops->same_user ||
		peers->link->ops->same_user(peers->link, peer->endpoint, cur->user);
	peer_past_take(peer);
	peer->totals.away = peer->totals.dead = false;
	peer->rtt_ns = peer->missed_pings = 0;
	peer->why = (struct err){.code = ERR_OK};
	peer_move(impl, PEER_UP);
}

static void ping(struct peer_impl *impl)
{
	struct wire_ping m = {.stamp = loop_clock_ns(impl->peers->loop)};
	uint8_t body[16];
	struct cursor c;

	if (impl->ping_open)
		impl->peer.missed_pings++;
	cursor_write(&c, body, sizeof(body));
	impl->pinged_ns = loop_now_ns(impl->peers->loop);
	impl->ping_stamp = m.stamp;
	impl->ping_open = true;
	if (wire_ping_put(&c, &m) < 0 ||
	    peer_send_now(impl, WIRE_T_PING, body, c.pos) < 0) {
		err_clear();
		impl->proven_ns = m.stamp; /* a full line: no PING was sent */
	}
}

/* Is another peer object UP with this instance already? */
static bool makes_room(struct peer_impl *impl)
{
	struct peer *other = peers_by_instance(impl->peers, impl->next.instance);
	struct err why;

	if (!other || other == &impl->peer)
		return true;
	if (strcmp(impl_of(other)->cur.user, impl->next.user) != 0) {
		impl->peers->stats.foreign_user++;
		err_set(&why, ERR_AUTH,
			"peer %s claims the instance of %s with another key",
			impl->peer.shown, other->shown);
	} else if (impl_of(other)->dialled && other->holds) {
		err_set(&why, ERR_EXIST, "peer %s is the daemon that is up as %s",
			impl->peer.shown, other->shown);
	} else {
		err_set(&why, ERR_RESTART, "peer %s: dialled as %s", other->shown,
			impl->peer.shown);
		take_down(impl_of(other), &why, false);
		return impl->next.live;
	}
	peer_attempt_failed(impl, &why);
	return false;
}

void peer_restarted(const struct peer_impl *impl, const uint8_t instance[16],
		    struct err *why_p)
{
	char label[PEER_LABEL_MAX], hex[9];

	assert(impl->peer.endpoint[0]);
	hex_write(instance, 4, hex);
	err_set(why_p, ERR_RESTART, "%s: the daemon was restarted, as instance %s",
		peer_label(&impl->peer, label), hex);
}

/* An unauthenticated peer that has proven itself counts as known, if the limit allows. */
static bool peer_settle(struct peer_impl *impl)
{
	struct peers *peers = impl->peers;
	struct err why;

	if (!impl->unauthenticated || peer_check_room(peers) == 0) {
		peer_acquaint(impl);
		return true;
	}
	err_take(&why);
	say_bye(impl, &impl->next, &why);
	peers->stats.refused++;
	peer_attempt_failed(impl, &why);
	return false;
}

bool peer_bring_up(struct peer_impl *impl)
{
	struct peers *peers = impl->peers;
	struct peer *peer = &impl->peer;
	char label[PEER_LABEL_MAX];
	struct err why;

	if (!makes_room(impl) || !peer_settle(impl))
		return false;
	if (sm_state(&peer->sm) == PEER_UP) {
		bool same = memcmp(impl->cur.instance, impl->next.instance,
				   sizeof(impl->next.instance)) == 0;

		if (same)
			err_set(&why, ERR_PEER, "%s: the peer started a new peering",
				peer_label(&impl->peer, label));
		else
			peer_restarted(impl, impl->next.instance, &why);
		take_down(impl, &why, false);
	}
	if (!impl->next.live || peers->closing)
		return false; /* on_down ended it */
	peering_promote(impl);
	peer_reached(impl);
	peer_life_publish(impl);
	impl->received_ns = impl->window_ns = impl->used_ns = peer->up_since_ns;
	impl->proven_ns = loop_clock_ns(peers->loop);
	impl->pong_pending = 0;
	log_info("peer", peer->shown, "up", "instance=%s name='%s' user='%s'",
		 peer->instance_text, peer->name, impl->cur.user);
	if (peer->self) {
		loop_timer_stop(&impl->tick);
	} else {
		ping(impl);
		peer_tick_in(impl, peers->options.ping_interval_ns);
	}
	if (peers->callbacks.on_up)
		peers->callbacks.on_up(peers->callbacks.owner, peer);
	return sm_state(&peer->sm) == PEER_UP;
}

/* ---- the tick ---- */

/* Every idle daemon of a cluster pings all others. While a peer answers, and nothing can
 * wait for it, that is often enough. */
#define QUIET_NS LOOP_NS_PER_S

static uint64_t ping_ns_of(const struct peer_impl *impl)
{
	uint64_t ping_ns = impl->peers->options.ping_interval_ns;

	return impl->quiet && ping_ns < QUIET_NS ? QUIET_NS : ping_ns;
}

/* Ticks for rare PINGs are rounded. */
static uint64_t early_ns(const struct peer_impl *impl)
{
	return ping_ns_of(impl) == QUIET_NS ? LOOP_TICK_NS / 2 : 0;
}

void peer_rest(struct peer_impl *impl)
{
	uint64_t now_ns = loop_now_ns(impl->peers->loop);
	uint64_t next_ns = impl->pinged_ns + ping_ns_of(impl);
	uint64_t left_ns = next_ns > now_ns ? next_ns - now_ns : 0;

	if (left_ns >= LOOP_TICK_NS)
		loop_timer_start_tick(&impl->tick, left_ns);
	else
		peer_tick_in(impl, left_ns);
}

/* Silence until now is no evidence. */
void peer_wake(struct peer_impl *impl)
{
	impl->quiet = false;
	impl->window_ns = loop_now_ns(impl->peers->loop);
	impl->proven_ns = loop_clock_ns(impl->peers->loop);
	peer_tick_in(impl, 0);
}

static bool may_be_quiet(const struct peer_impl *impl)
{
	const struct peers *peers = impl->peers;
	const struct peers_callbacks *callbacks = &peers->callbacks;

	return !impl->ping_open && !impl->line_broke && callbacks->busy &&
	       loop_now_ns(peers->loop) - impl->used_ns >= QUIET_NS &&
	       !callbacks->busy(callbacks->owner, &impl->peer);
}

static void declare_dead(struct peer_impl *impl, const char *how, uint64_t silent_ns)
{
	char label[PEER_LABEL_MAX];
	struct err why;

	err_set(&why, ERR_PEER, "%s missed %llu pings (%s for %llu ms)",
		peer_label(&impl->peer, label),
		(unsigned long long)(silent_ns / impl->peers->options.ping_interval_ns),
		how, (unsigned long long)(silent_ns / LOOP_NS_PER_MS));
	impl->peer.totals.dead = true;
	peer_bring_down(impl, &why, true);
}

/* True when it is down. Else *left_p is the time until it is declared dead. */
static bool check_alive(struct peer_impl *impl, uint64_t *left_p)
{
	const struct peers *peers = impl->peers;
	const struct peers_options *o = &peers->options;
	uint64_t now_ns = loop_now_ns(peers->loop);
	uint64_t since_ns =
		impl->received_ns > impl->window_ns ? impl->received_ns : impl->window_ns;
	uint64_t lag_ns = loop_lag_ns(peers->loop, since_ns);
	uint64_t allowed_ns = o->dead_after_ns + lag_ns;

	if (lag_ns > o->ping_interval_ns) {
		impl->window_ns = since_ns = now_ns;
		allowed_ns = o->dead_after_ns;
	}
	if (peers->link->backlog)
		allowed_ns += o->dead_after_ns;
	if (now_ns - since_ns >= allowed_ns) {
		declare_dead(impl, "silent", now_ns - since_ns);
		return true;
	}
	*left_p = allowed_ns - (now_ns - since_ns);
	return false;
}

/* The same for a line that is half open: frames arrive from the peer, but not ours
 * there. TCP without ACKs sends for up to 0.6 s more, then holds back everything, also
 * its BYE, for longer than we have. So two fifths of the silence are enough when no
 * ping was answered in all the time; a late answer alone proves nothing on a busy
 * host. */
static bool check_answers(struct peer_impl *impl, uint64_t *left_p)
{
	const struct peers *peers = impl->peers;
	const struct peers_options *o = &peers->options;
	uint64_t now_ns = loop_now_ns(peers->loop), end_ns;
	uint64_t lag_ns = loop_lag_ns(peers->loop, impl->proven_ns);

	if (lag_ns > o->ping_interval_ns) {
		impl->proven_ns = now_ns;
		lag_ns = 0;
	}
	end_ns = impl->proven_ns + o->dead_after_ns + o->ping_interval_ns / 2 + lag_ns;
	if (peers->link->backlog)
		end_ns += o->dead_after_ns;
	if (end_ns < impl->received_ns + o->dead_after_ns * 2 / 5)
		end_ns = impl->received_ns + o->dead_after_ns * 2 / 5;
	if (now_ns >= end_ns) {
		declare_dead(impl, "no answer", now_ns - impl->proven_ns);
		return true;
	}
	if (*left_p > end_ns - now_ns)
		*left_p = end_ns - now_ns;
	return false;
}

static void tick_up(struct peer_impl *impl)
{
	const struct peers_options *o = &impl->peers->options;
	uint64_t now_ns = loop_now_ns(impl->peers->loop);
	uint64_t left_ns = o->ping_interval_ns, ping_ns;
	bool quiet = may_be_quiet(impl);
	struct err why;

	if (impl->quiet && !quiet) {
		peer_wake(impl);
		if (impl->ping_open) {
			impl->window_ns = impl->pinged_ns;
			impl->proven_ns = impl->ping_stamp;
		}
	}
	impl->quiet = quiet;
	if (!quiet && (check_alive(impl, &left_ns) || check_answers(impl, &left_ns)))
		return;
	if (impl->dialled && !impl->peer.holds &&
	    now_ns - impl->used_ns >= impl->peers->options.idle_after_ns) {
		err_set(&why, ERR_CANCELED, "idle on this side");
		peer_bring_down(impl, &why, true);
		return;
	}
	if (impl->next.live && now_ns - impl->next.begun_ns >= o->accept_ttl_ns)
		peering_end(&impl->next);
	peer_flush(impl);
	if (now_ns + early_ns(impl) >= impl->pinged_ns + ping_ns_of(impl))
		ping(impl);
	if (quiet && !impl->ping_open) {
		peer_rest(impl);
		return;
	}
	ping_ns = impl->pinged_ns + o->ping_interval_ns - now_ns;
	peer_tick_in(impl, left_ns < ping_ns ? left_ns : ping_ns);
}

/* While it is dialled: the reason for rooms that wait for it. */
static void note_why_not(struct peer_impl *impl, enum err_code code, const char *words)
{
	char label[PEER_LABEL_MAX];
	struct err why;

	err_set(&why, code, "%.200s %s", peer_label(&impl->peer, label), words);
	if (strcmp(why.text, impl->peer.why.text) != 0)
		log_info("peer", impl->peer.shown, "not reached yet",
			 "hellos=%u why=\"%s\"", impl->hellos, why.text);
	impl->peer.why = why;
	peer_note_error(&impl->peer, &why);
}

static void say_why_not(struct peer_impl *impl)
{
	if (impl->hellos)
		note_why_not(impl, ERR_PEER,
			     "does not answer; check that it can connect to this "
			     "daemon's `advertise`");
	else if (impl->line_why.code != ERR_OK)
		note_why_not(impl, impl->line_why.code, impl->line_why.text);
	else
		note_why_not(impl, ERR_PEER, "cannot be reached");
}

static void tick_dial(struct peer_impl *impl)
{
	if (impl->peer.self) {
		loop_defer(impl->peers->loop, &impl->later);
		return;
	}
	if (sm_state(&impl->peer.sm) == PEER_DOWN)
		peer_move(impl, PEER_DIALING);
	else if (impl->next.live && impl->line) /* dialled before */
		say_why_not(impl);
	if (!impl->next.live)
		peering_begin(impl);
	peer_respell(impl);
	peer_dial_later(impl);
	peer_tick_in(impl, next_retry(impl));
}

void peer_on_tick(struct loop_timer *timer)
{
	struct peer_impl *impl = container_of(timer, struct peer_impl, tick);
	uint64_t now_ns = loop_now_ns(impl->peers->loop);
	uint64_t end_ns = impl->next.begun_ns + impl->peers->options.accept_ttl_ns;
	struct err why;

	if (sm_state(&impl->peer.sm) == PEER_UP) {
		tick_up(impl);
	} else if (impl->dialled && impl->peer.holds) {
		tick_dial(impl);
	} else if (impl->next.live && now_ns < end_ns) {
		peer_tick_in(impl, end_ns - now_ns); /* a later HELLO renewed it */
	} else {
		err_set(&why, ERR_TIMEOUT, "peer %s sent HELLO and no further message",
			impl->peer.shown);
		peer_attempt_failed(impl, &why);
	}
}

void peer_on_flush(struct loop_timer *timer)
{
	peer_flush(container_of(timer, struct peer_impl, flush));
}

void peer_on_line(void *owner, void *line_owner, bool connected)
{
	struct line_owner *kind = line_owner;
	struct peer_impl *impl;

	(void)owner;
	if (kind->kind == LINE_REFUSAL) {
		if (connected)
			peer_refusal_send(
				container_of(kind, struct peer_refusal, line_owner));
		return;
	}
	impl = container_of(kind, struct peer_impl, line_owner);
	impl->line_up = connected;
	if (!connected) {
		impl->line_broke = true;
		if (impl->quiet)
			peer_wake(impl);
		return; /* the liveness check decides */
	}
	if (impl->cur.live)
		peer_answer(impl, &impl->cur);
	if (impl->cur.live && impl->line_broke && impl->dialled)
		peer_hello_probe(impl);
	impl->line_broke = false;
	if (impl->next.live) {
		peer_answer(impl, &impl->next);
		if (impl->dialled && sm_state(&impl->peer.sm) != PEER_UP) {
			peer_hello_send(impl);
			impl->retry_ns = impl->peers->options.hello_retry_ns;
			peer_tick_in(impl, next_retry(impl));
		}
	}
	peer_flush(impl);
}

void peer_on_diagnosis(void *owner, void *line_owner, const struct err *why, bool final)
{
	struct line_owner *kind = line_owner;
	char label[PEER_LABEL_MAX];
	struct peer_impl *impl;
	struct err named;

	(void)owner;
	if (kind->kind == LINE_REFUSAL)
		return; /* it ends by itself */
	impl = container_of(kind, struct peer_impl, line_owner);
	if (impl->unauthenticated)
		return; /* it sends HELLO again, or is forgotten */
	if (sm_state(&impl->peer.sm) == PEER_UP) {
		if (!impl->line_once)
			return;
		/* opened for an unauthenticated peer, which has proven itself since */
		peer_hang_up(impl);
		peer_dial_later(impl);
		return;
	}
	impl->line_why = *why;
	if (!final) {
		say_why_not(impl);
		return;
	}
	err_set(&named, why->code, "%.200s %s", peer_label(&impl->peer, label),
		why->text);
	peer_attempt_failed(impl, &named);
}

/* ---- deferred work ---- */

void peer_mark_down(struct peer_impl *impl, const struct err *why)
{
	assert(why->code != ERR_OK);
	if (impl->why_down.code)
		return;
	impl->why_down = *why;
	loop_defer(impl->peers->loop, &impl->later);
}

void peer_on_later(struct loop_defer *defer)
{
	struct peer_impl *impl = container_of(defer, struct peer_impl, later);
	struct err why = impl->why_down;

	if (why.code) {
		peer_bring_down(impl, &why, true);
	} else if (sm_state(&impl->peer.sm) == PEER_UP && !impl->peer.self) {
		if (peer_early_pending(impl))
			peer_early_deliver(impl);
		if (!list_empty(&impl->queue))
			peer_flush(impl); /* the next part */
	} else if (impl->peer.self && sm_state(&impl->peer.sm) == PEER_UP) {
		peer_self_deliver(impl);
	} else if (impl->peer.self && impl->peer.holds) {
		if (peering_begin_self(impl) == 0) {
			peer_bring_up(impl);
			return;
		}
		err_take(&why);
		peer_attempt_failed(impl, &why);
	}
}

void peer_become_self(struct peer_impl *impl)
{
	assert(!impl->peers->self);
	impl->peer.self = true;
	impl->peers->self = impl;
	peering_end(&impl->next);
	peer_hang_up(impl);
	loop_timer_stop(&impl->tick);
	loop_defer(impl->peers->loop, &impl->later);
}
