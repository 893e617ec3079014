/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/peer/peer_impl.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define REFUSAL_TTL_NS LOOP_NS_PER_S

/* A refusal is an answer: BYE with the reason, in the epoch of the HELLO, by which the
 * dialler recognises it. It needs a line of its own, so there are few at a time
 * (PEER_REFUSALS_MAX), and fewer for one user; a flood of HELLOs is not answered. */

static void refusal_end(struct peers *peers, struct peer_refusal *refusal)
{
	if (refusal->line)
		peers->link->ops->hangup(refusal->line);
	refusal->line = NULL;
}

void peer_refusals_close(struct peers *peers)
{
	loop_timer_stop(&peers->refusal_timer);
	for (unsigned int i = 0; i < PEER_REFUSALS_MAX; i++)
		refusal_end(peers, &peers->refusals[i]);
}

/* Its line is connected. */
void peer_refusal_send(struct peer_refusal *refusal)
{
	struct peers *peers = refusal->peers;

	assert(refusal->line && refusal->len > 0);
	if (peers->link->ops->send(refusal->line, refusal->frame, refusal->len) < 0)
		err_clear();
	refusal_end(peers, refusal);
}

void peer_on_refusal_timer(struct loop_timer *timer)
{
	struct peers *peers = container_of(timer, struct peers, refusal_timer);
	uint64_t now_ns = loop_now_ns(peers->loop);
	bool left = false;

	for (unsigned int i = 0; i < PEER_REFUSALS_MAX; i++) {
		struct peer_refusal *refusal = &peers->refusals[i];

		if (refusal->line && refusal->until_ns <= now_ns)
			refusal_end(peers, refusal);
		left |= refusal->line != NULL;
	}
	if (left)
		loop_timer_start(timer, REFUSAL_TTL_NS);
}

/* NULL: that user has no more. */
static struct peer_refusal *refusal_take(struct peers *peers, const char *user)
{
	struct peer_refusal *refusal = NULL;
	unsigned int own = 0;

	for (unsigned int i = 0; i < PEER_REFUSALS_MAX; i++) {
		struct peer_refusal *one = &peers->refusals[i];

		if (!one->line)
			refusal = one;
		else
			own += *user && strcmp(one->user, user) == 0;
	}
	if (!refusal || own >= PEER_REFUSALS_USER)
		return NULL;
	snprintf(refusal->user, sizeof(refusal->user), "%s", user);
	return refusal;
}

void peer_refuse(struct peers *peers, const struct wire_header *h, const char *endpoint,
		 const char *user, enum err_code code, const char *text)
{
	struct peer_refusal *refusal = refusal_take(peers, user);
	int (*dial)(struct link *, const char *, void *, struct link_line **);

	log_warn("peer", endpoint, "refused", "code=%s why='%s'", err_name(code), text);
	peers->stats.refused++;
	if (!refusal)
		return;
	refusal->peers = peers;
	refusal->len = peer_bye_frame(peers, NULL, h->sender, h->epoch, (uint32_t)code,
				      text, refusal->frame);
	refusal->until_ns = loop_now_ns(peers->loop) + REFUSAL_TTL_NS;
	dial = peers->link->ops->dial_once ? peers->link->ops->dial_once
					   : peers->link->ops->dial;
	if (dial(peers->link, endpoint, &refusal->line_owner, &refusal->line) < 0) {
		refusal->line = NULL;
		err_clear();
		return;
	}
	if (!loop_timer_running(&peers->refusal_timer))
		loop_timer_start(&peers->refusal_timer, REFUSAL_TTL_NS);
}
