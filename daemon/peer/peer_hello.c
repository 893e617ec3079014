/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Authentication of peers: HELLO, WELCOME, BYE.
 *
 * A dials B: HELLO on A's line to B, with A's endpoint in it. B answers with WELCOME on
 * its own line to that endpoint. Each of the two carries its sender's half of the
 * peering: the epoch that it expects in the headers of received frames, the token for
 * data connections, addresses.
 *
 *   A                                    B
 *   HELLO nonce, epoch a  ────────────►  opens a line to A's endpoint
 *   UP, knows b           ◄────────────  WELCOME nonce, epoch b
 *   PING in epoch b       ────────────►  UP
 *
 * Proof by each step. Only the receiver of the HELLO can return the nonce: B is at the
 * endpoint that A dialled. Only the receiver of the WELCOME can return epoch b: A is at
 * the endpoint that it named. So a HELLO by itself changes nothing: neither the peer that
 * is up at the endpoint it claims, nor the instance it claims to be. It makes an attempt
 * (`next`) in addition to the peering (`cur`), and only the proof replaces the old one by
 * the new one.
 *
 * Both sides may dial at the same time. An attempt has one local half, sent by HELLO or
 * by WELCOME, so the crossing messages agree and either proof completes the same attempt.
 * When A gives up and dials again, B's half may meet two of A's: frames carry both
 * epochs, so that a late frame of the first peering is not taken for one of the second.
 * HELLO is repeated until answered; a repeated one is answered again, with the same half.
 *
 * A line that broke and connected again may lead to another process at the same endpoint.
 * Therefore the HELLO of the current peering is sent again: the same daemon answers with
 * the same half, which changes nothing. A new one cannot know it, and its WELCOME, with
 * the nonce that only the owner of the endpoint has seen, proves a restart long before
 * the old instance would be declared dead.
 *
 * One daemon may be dialled by two names (a host name, its address). The WELCOME shows
 * that both are one instance: a peer that only the other side dialled is replaced by the
 * one that was dialled here; of two that were dialled here the first stays, and the
 * second waits with that reason.
 */
#include "daemon/peer/peer_impl.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

static const char product[] = "kvd " KVD_VERSION;

/* ---- sending the local half ---- */

static void hello_fill(const struct peer_impl *impl, const struct peering *peering,
		       uint64_t nonce, struct wire_hello *m)
{
	const struct peers *peers = impl->peers;

	*m = (struct wire_hello){
		.version_min = WIRE_VERSION_MIN,
		.version_max = WIRE_VERSION_MAX,
		.features = peers->features,
		.nonce = nonce,
		.addresses = {peers->addresses, peers->addresses_len},
	};
	memcpy(m->boot_id, peers->boot_id, sizeof(m->boot_id));
	memcpy(m->token, peering->token_in, sizeof(m->token));
	snprintf(m->name, sizeof(m->name), "%s", peers->name);
	snprintf(m->product, sizeof(m->product), "%s", product);
	snprintf(m->endpoint, sizeof(m->endpoint), "%s", peers->link->endpoint);
}

static int half_send(struct peer_impl *impl, struct peering *peering, enum wire_type type,
		     uint64_t nonce)
{
	struct wire_header h = {.type = (uint16_t)type, .epoch = peering->epoch_in};
	size_t size = sizeof(struct wire_hello) + impl->peers->addresses_len;
	cleanup_free uint8_t *body = mem_zalloc(size);
	struct wire_hello m;
	struct cursor c;
	int r;

	if (!body)
		return err_pass(-ENOMEM);
	hello_fill(impl, peering, nonce, &m);
	cursor_write(&c, body, size);
	r = wire_hello_put(&c, &m); /* a WELCOME has HELLO's body */
	if (r < 0)
		return err_pass(r);
	h.version = type == WIRE_T_HELLO ? WIRE_VERSION_MIN : 0;
	h.body_len = (uint32_t)c.pos;
	return err_pass(peer_frame_send(impl, peering, &h, body));
}

void peer_hello_send(struct peer_impl *impl)
{
	if (half_send(impl, &impl->next, WIRE_T_HELLO, impl->next.nonce) < 0)
		err_clear(); /* not connected yet: on_line and the tick try again */
	else
		impl->hellos++;
}

void peer_hello_probe(struct peer_impl *impl)
{
	if (half_send(impl, &impl->cur, WIRE_T_HELLO, impl->cur.nonce) < 0)
		err_clear(); /* the liveness check decides */
}

void peer_answer(struct peer_impl *impl, struct peering *peering)
{
	if (!peering->answer_due)
		return;
	if (half_send(impl, peering, WIRE_T_WELCOME, peering->answer_nonce) < 0)
		err_clear();
	else
		peering->answer_due = false;
}

/* ---- receiving the remote half ---- */

/* Both sides log it, so it names both, the older one first. */
static int version_refuse(const struct peers *peers, const struct wire_hello *m)
{
	const char *theirs = *m->product ? m->product : "an older kvd";

	if (m->version_max < WIRE_VERSION_MIN)
		return err_raise(ERR_VERSION,
				 "no common protocol version: %.24s (%.24s) speaks %u to "
				 "%u and is older than %.24s (%s), %u to %u",
				 m->name, theirs, m->version_min, m->version_max,
				 peers->name, product, WIRE_VERSION_MIN,
				 WIRE_VERSION_MAX);
	return err_raise(ERR_VERSION,
			 "no common protocol version: %.24s (%s) speaks %u to %u and is "
			 "older than %.24s (%.24s), %u to %u",
			 peers->name, product, WIRE_VERSION_MIN, WIRE_VERSION_MAX,
			 m->name, theirs, m->version_min, m->version_max);
}

/* 0, or the code and text of the refusal. */
static int judge(const struct peers *peers, const struct wire_hello *m,
		 uint16_t *version_p)
{
	uint16_t version =
		m->version_max < WIRE_VERSION_MAX ? m->version_max : WIRE_VERSION_MAX;

	if (m->version_min > m->version_max || version < m->version_min ||
	    version < WIRE_VERSION_MIN)
		return err_pass(version_refuse(peers, m));
	if (!(m->features & PEER_FEATURE_BASE))
		return err_raise(ERR_VERSION,
				 "%.32s: the base feature is missing in 0x%llx", m->name,
				 (unsigned long long)m->features);
	*version_p = version;
	return 0;
}

/* Nothing of the peering changes unless the whole half is valid. */
static int hear(const struct peers *peers, struct peering *peering,
		const struct wire_header *h, const struct wire_hello *m, const char *user)
{
	struct peer_address addresses[TRANSPORTS_MAX];
	unsigned int count;
	uint16_t version;
	int r;

	r = judge(peers, m, &version);
	if (r < 0)
		return err_pass(r);
	r = peer_addresses_decode(&m->addresses, addresses, &count);
	if (r < 0)
		return err_pass(r);
	peer_addresses_free(peering->addresses, &peering->address_count);
	memcpy(peering->addresses, addresses, count * sizeof(addresses[0]));
	peering->address_count = count;
	if (!peering->heard || peering->epoch_out != h->epoch ||
	    memcmp(peering->instance, h->sender, sizeof(h->sender)) != 0)
		peering->seq_in = peering->seq_out = peering->control_in = 0;
	peering->heard = true;
	peering->version = version;
	peering->epoch_out = h->epoch;
	peering->features = m->features & peers->features;
	memcpy(peering->instance, h->sender, sizeof(peering->instance));
	memcpy(peering->boot_id, m->boot_id, sizeof(peering->boot_id));
	memcpy(peering->token_out, m->token, sizeof(peering->token_out));
	snprintf(peering->name, sizeof(peering->name), "%.63s", m->name);
	snprintf(peering->product, sizeof(peering->product), "%.31s", m->product);
	snprintf(peering->endpoint, sizeof(peering->endpoint), "%.127s", m->endpoint);
	snprintf(peering->user, sizeof(peering->user), "%.63s", user);
	return 0;
}

/* The self peer is known without messages. */
int peering_begin_self(struct peer_impl *impl)
{
	struct peers *peers = impl->peers;
	struct wire_header h = {.epoch = loop_random_u64(peers->loop)};
	struct wire_hello m;

	peering_begin(impl);
	hello_fill(impl, &impl->next, 0, &m);
	memcpy(h.sender, peers->instance, sizeof(h.sender));
	return err_pass(hear(peers, &impl->next, &h, &m, ""));
}

static uint64_t hello_price_ns(const struct peers *peers)
{
	return LOOP_NS_PER_S / peers->options.hello_rate;
}

/* Beyond PEER_PACES users, the one that has sent the fewest is forgotten. */
static struct hello_pace *pace_of(struct peers *peers, const char *user)
{
	struct hello_pace *least = &peers->paces[0];

	for (unsigned int i = 0; i < PEER_PACES; i++) {
		struct hello_pace *pace = &peers->paces[i];

		if (strcmp(pace->user, user) == 0)
			return pace;
		if (pace->until_ns < least->until_ns)
			least = pace;
	}
	*least = (struct hello_pace){0};
	snprintf(least->user, sizeof(least->user), "%s", user);
	return least;
}

/* HELLOs of unknown senders make us dial, so their rate is limited: each user has its
 * own limit, with a burst of one second, and does not use up that of others. */
static bool admit_unauthenticated(struct peers *peers, const char *user)
{
	struct hello_pace *pace = pace_of(peers, user);
	uint64_t now_ns = loop_now_ns(peers->loop);

	if (pace->until_ns < now_ns)
		pace->until_ns = now_ns;
	if (pace->until_ns - now_ns + hello_price_ns(peers) > LOOP_NS_PER_S) {
		peers->stats.hellos_limited++;
		return false;
	}
	pace->until_ns += hello_price_ns(peers);
	return true;
}

/* Its attempt was ended by others: it may make another. */
static void unauthenticated_repay(struct peers *peers, const char *user)
{
	struct hello_pace *pace = pace_of(peers, user);

	if (pace->until_ns >= hello_price_ns(peers))
		pace->until_ns -= hello_price_ns(peers);
}

/* May the sender name this endpoint? If not, it is not dialled and gets no answer. */
static bool hello_placed(struct peers *peers, const struct wire_hello *m,
			 const char *user)
{
	struct link *link = peers->link;

	if (!link->ops->may_answer || link->ops->may_answer(link, m->endpoint, user) == 0)
		return true;
	peers->stats.hellos_misplaced++;
	log_warn("peer", user, "HELLO not answered", "why=\"%s\"", err_last()->text);
	err_clear();
	return false;
}

/* Attempts without proof are replaced by the next one, the oldest first: of the same
 * user if that has used its share. */
static void unauthenticated_make_room(struct peers *peers, const char *user)
{
	struct peer_impl *impl, *oldest = NULL, *own_oldest = NULL;
	unsigned int all = 0, own = 0;
	struct err why;

	/* when the table is full, a new one replaces the oldest */
	list_foreach(impl, &peers->waiting, waits) { /* at most 64: unauthenticated_max */
		all++;
		if (!oldest)
			oldest = impl;
		if (strcmp(impl->next.user, user) != 0)
			continue;
		own++;
		if (!own_oldest)
			own_oldest = impl;
	}
	if (own_oldest && *user && own >= peers->options.unauthenticated_user_max)
		oldest = own_oldest;
	else if (!oldest || all < peers->options.unauthenticated_max)
		return;
	peers->stats.unauthenticated_dropped++;
	if (strcmp(oldest->next.user, user) != 0)
		unauthenticated_repay(peers, oldest->next.user);
	err_set(&why, ERR_LIMIT, "peer %s sent HELLO and was evicted to make room",
		oldest->peer.shown);
	peer_attempt_failed(oldest, &why);
}

static int unauthenticated_create(struct peers *peers, const struct wire_hello *m,
				  struct peer_impl **impl_p)
{
	int r = peer_check_room(peers);

	if (r < 0)
		return err_pass(r);
	r = peer_create(peers, m->endpoint, impl_p);
	if (r < 0)
		return err_pass(r);
	(*impl_p)->unauthenticated = true;
	peers->unauthenticated++;
	return 0;
}

/* The peer that this HELLO names. 1: dropped. */
static int hello_peer(struct peers *peers, const struct wire_header *h,
		      const struct wire_hello *m, const char *user,
		      struct peer_impl **impl_p)
{
	struct peer *known = peers_by_instance(peers, h->sender);
	struct peer_impl *impl = NULL;

	if (known) {
		impl = impl_of(known);
		if (strcmp(impl->cur.user, user) != 0) {
			peers->stats.foreign_user++;
			return 1;
		}
		/* an instance does not move: another daemon claims its name */
		if (strcmp(impl->cur.endpoint, m->endpoint) != 0) {
			peers->stats.forged_hellos++;
			return 1;
		}
		*impl_p = impl;
		return 0;
	}
	impl = peer_find_endpoint(peers, m->endpoint);
	if (!impl) {
		if (!admit_unauthenticated(peers, user))
			return 1;
		int r = unauthenticated_create(peers, m, &impl);

		if (r < 0)
			return err_pass(r);
	}
	*impl_p = impl;
	return 0;
}

/* We dialled ourselves by another name. */
static void on_own_hello(struct peers *peers, const struct wire_hello *m)
{
	struct peering *peering = peering_find_nonce(peers, m->nonce);
	struct peer_impl *impl = peering ? peering->owner : NULL;
	struct err why;

	if (!impl || peering != &impl->next || sm_state(&impl->peer.sm) == PEER_UP)
		return;
	if (!peers->self) {
		peer_become_self(impl);
		return;
	}
	err_set(&why, ERR_EXIST, "%s is this daemon; use %s", impl->peer.shown,
		peers->link->endpoint);
	peer_attempt_failed(impl, &why);
}

static void begin_answer(struct peer_impl *impl, const struct wire_header *h,
			 const struct wire_hello *m, const char *user)
{
	struct peers *peers = impl->peers;
	struct err why;

	if (!impl->next.live && impl->unauthenticated)
		unauthenticated_make_room(peers, user);
	if (!impl->next.live)
		peering_begin(impl);
	if (hear(peers, &impl->next, h, m, user) < 0) {
		err_take(&why);
		peer_refuse(peers, h, m->endpoint, user, why.code, why.text);
		if (!impl->dialled) /* if dialled, our own HELLO is still valid */
			peer_attempt_failed(impl, &why);
		return;
	}
	impl->next.begun_ns = loop_now_ns(peers->loop);
	impl->next.answer_due = true;
	impl->next.answer_nonce = m->nonce;
	peer_answer(impl, &impl->next);
	peer_dial_later(impl);
	if (!loop_timer_running(&impl->tick))
		peer_tick_in(impl, peers->options.accept_ttl_ns);
}

void peer_on_hello(struct peers *peers, const struct wire_header *h, struct cursor *body,
		   const char *user)
{
	struct peer_impl *impl = NULL;
	char endpoint[LINK_ENDPOINT_MAX];
	struct wire_hello m;
	uint16_t version;
	int r;

	if (wire_hello_get(body, &m) < 0 || !h->epoch ||
	    peer_canonical(peers, m.endpoint, endpoint) < 0) {
		peers->stats.bad_frames++;
		log_warn("peer", user[0] ? user : NULL, "bad HELLO", "why='%s'",
			 err_last()->text);
		err_clear();
		return;
	}
	snprintf(m.endpoint, sizeof(m.endpoint), "%s", endpoint);
	if (memcmp(h->sender, peers->instance, sizeof(h->sender)) == 0) {
		on_own_hello(peers, &m);
		return;
	}
	if (strcmp(m.endpoint, peers->link->endpoint) == 0) { /* that is us */
		peers->stats.forged_hellos++;
		return;
	}
	if (!hello_placed(peers, &m, user))
		return;
	peer_vouch(peers);
	r = judge(peers, &m, &version);
	if (r < 0 && !admit_unauthenticated(peers, user))
		return;
	if (r == 0)
		r = hello_peer(peers, h, &m, user, &impl);
	if (r < 0)
		peer_refuse(peers, h, m.endpoint, user, err_last()->code,
			    err_last()->text);
	err_clear();
	if (r != 0)
		return;
	if (impl->cur.live && h->epoch == impl->cur.epoch_out &&
	    memcmp(h->sender, impl->cur.instance, sizeof(h->sender)) == 0) {
		/* our WELCOME arrived after its timeout */
		impl->cur.answer_due = true;
		impl->cur.answer_nonce = m.nonce;
		peer_answer(impl, &impl->cur);
		return;
	}
	begin_answer(impl, h, &m, user);
}

/* The answer to a probe: which daemon is at the endpoint of a peer that is UP? */
static void on_probed(struct peer_impl *impl, const struct wire_header *h,
		      const char *user)
{
	struct err why;

	if (memcmp(h->sender, impl->cur.instance, sizeof(h->sender)) == 0)
		return;
	if (strcmp(impl->cur.user, user) != 0) { /* a restart keeps its key */
		impl->peers->stats.foreign_user++;
		return;
	}
	peer_restarted(impl, h->sender, &why);
	peer_bring_down(impl, &why, false);
	if (sm_state(&impl->peer.sm) == PEER_DOWN && impl->peer.holds &&
	    !impl->peers->closing)
		peer_tick_in(impl, 0); /* it is there: no need to wait */
}

void peer_on_welcome(struct peers *peers, const struct wire_header *h,
		     struct cursor *body, const char *user)
{
	struct peering *peering;
	struct peer_impl *impl;
	struct wire_hello m;
	struct err why;

	if (wire_hello_get(body, &m) < 0 || !h->epoch) { /* the same body */
		peers->stats.bad_frames++;
		err_clear();
		return;
	}
	peering = peering_find_nonce(peers, m.nonce);
	impl = peering ? peering->owner : NULL;
	if (!impl || (peering == &impl->next && !impl->hellos)) {
		peers->stats.stale_frames++; /* or a second answer without news */
		return;
	}
	peer_vouch(peers);
	if (peering == &impl->cur) {
		on_probed(impl, h, user);
		return;
	}
	if (hear(peers, &impl->next, h, &m, user) < 0) {
		err_take(&why);
		peer_attempt_failed(impl, &why);
		return;
	}
	impl->next.answer_due = false;
	/* the PING that follows is the other side's proof */
	peer_bring_up(impl);
}

void peer_on_bye(struct peers *peers, const struct wire_header *h, struct cursor *body,
		 const char *user)
{
	struct peering *peering = peering_find(peers, h->epoch);
	struct wire_bye m;
	struct err why;

	if (wire_bye_get(body, &m) < 0) {
		peers->stats.bad_frames++;
		err_clear();
		return;
	}
	if (!peering || (peering->heard &&
			 (memcmp(peering->instance, h->sender, sizeof(h->sender)) != 0 ||
			  strcmp(peering->user, user) != 0 ||
			  (h->from_epoch && h->from_epoch != peering->epoch_out)))) {
		peers->stats.stale_frames++;
		return;
	}
	struct peer_impl *impl = peering->owner;

	peer_report(&impl->peer, m.code, m.text, &why);
	if (peering == &impl->cur)
		peer_bring_down(impl, &why, false);
	else
		peer_attempt_failed(impl, &why);
}
