/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Former peers, for some time: an operator who looks after the loss still sees the peer
 * and the reason. A daemon is identified by its name in the allow-list, without keys by
 * its endpoint or by its own name and host, so one that is restarted again and again has
 * one entry; its totals continue when it returns. Unauthenticated peers that were never
 * up and not dialled here leave no entry.
 */
#include "daemon/peer/peer_impl.h"

#include <assert.h>
#include <string.h>

#include "daemon/base/mem.h"

#define PAST_MAX 256u
#define PAST_NS (600 * LOOP_NS_PER_S)

static void past_drop(struct peers *peers, struct peer_past *past)
{
	assert(peers->past_count > 0);
	list_remove(&past->link);
	peers->past_count--;
	mem_free(past);
}

static size_t host_len(const char *endpoint)
{
	return (size_t)(strrchr(endpoint, ':') - endpoint);
}

static bool past_same(const struct peer_past *past, const struct peer *peer)
{
	size_t len = strcspn(peer->endpoint, "#");
	size_t past_len = strcspn(past->endpoint, "#");

	if (*past->known_as && *peer->known_as)
		return strcmp(past->known_as, peer->known_as) == 0;
	if (len == past_len && memcmp(past->endpoint, peer->endpoint, len) == 0)
		return true;
	len = host_len(peer->endpoint);
	return *peer->name && strcmp(past->name, peer->name) == 0 &&
	       len == host_len(past->endpoint) &&
	       memcmp(past->endpoint, peer->endpoint, len) == 0;
}

static void totals_add(struct peer_totals *to, const struct peer_totals *more)
{
	to->bytes_in += more->bytes_in;
	to->bytes_out += more->bytes_out;
	to->rooms += more->rooms;
	to->rooms_failed += more->rooms_failed;
	to->downs += more->downs;
	if (more->error_ns > to->error_ns) {
		to->error = more->error;
		to->error_ns = more->error_ns;
	}
	if (more->warned_ns > to->warned_ns) {
		to->warned = more->warned;
		to->warned_ns = more->warned_ns;
	}
}

const struct list *peers_past(struct peers *peers)
{
	uint64_t now_ns = loop_now_ns(peers->loop);
	struct peer_past *past;

	list_foreach_safe(past, &peers->past, link) { /* at most 256: PAST_MAX */
		if (now_ns - past->gone_ns >= PAST_NS)
			past_drop(peers, past);
	}
	return &peers->past;
}

void peer_past_take(struct peer *peer)
{
	struct peers *peers = impl_of(peer)->peers;
	struct peer_past *past;

	list_foreach_safe(past, &peers->past, link) { /* at most 256: PAST_MAX */
		if (!past_same(past, peer))
			continue;
		totals_add(&peer->totals, &past->totals);
		if (!peer->epoch) { /* not up yet: the same loss */
			peer->since_ns = past->since_ns;
			peer->totals.away = past->totals.away;
		}
		past_drop(peers, past);
	}
}

void peer_past_add(const struct peer_impl *impl)
{
	const struct peer *peer = &impl->peer;
	struct peers *peers = impl->peers;
	struct peer_past *past;

	if (peer->self || (!peer->epoch && !impl->wanted))
		return;
	past = mem_zalloc(sizeof(*past));
	if (!past) {
		err_clear();
		return;
	}
	memcpy(past->endpoint, peer->endpoint, sizeof(past->endpoint));
	memcpy(past->known_as, peer->known_as, sizeof(past->known_as));
	memcpy(past->name, peer->name, sizeof(past->name));
	memcpy(past->product, peer->product, sizeof(past->product));
	memcpy(past->instance_text, peer->instance_text, sizeof(past->instance_text));
	past->since_ns = peer->since_ns;
	past->gone_ns = loop_now_ns(peers->loop);
	past->totals = peer->totals;
	list_push_back(&peers->past, &past->link);
	if (++peers->past_count > PAST_MAX)
		past_drop(peers, list_first(&peers->past, struct peer_past, link));
}

void peer_past_free(struct peers *peers)
{
	struct peer_past *past;

	list_foreach_safe(past, &peers->past, link) /* at most 256: PAST_MAX */
		past_drop(peers, past);
}

void peer_note_error(struct peer *peer, const struct err *why)
{
	assert(why->code != ERR_OK);
	peer->totals.error = *why;
	peer->totals.error_ns = loop_now_ns(impl_of(peer)->peers->loop);
}
