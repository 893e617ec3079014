/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Deferred aborts: ends of receivers whose sources are not connected yet.
 *
 * A receiver that ends before its TRANSFER_INFO notifies its sources (rooms_early.c), and
 * one that is just being connected must be notified as well, because its room waits. The
 * room here does not wait for that, so the ABORT is kept for connect_timeout, as long as
 * a room would wait for the connection. It is sent to the instance that the room knew, if
 * any, and dropped if the receiver's number is opened again before. All peers share one
 * list: it is short, and is scanned when a peer comes up.
 */
#include <assert.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/base/share.h"
#include "daemon/config/config.h"
#include "daemon/room/rooms_set.h"

struct untold {
	struct list link; /* in rooms->untold */
	struct remote *remote;
	uint8_t instance[16]; /* zeroes: it was never connected */
	uint64_t since_ns;
	struct wire_abort msg;
	struct charge charge;
};

static void untold_free(struct rooms *rooms, struct untold *untold)
{
	list_remove(&untold->link);
	rooms->untold_count--;
	charge_drop(&untold->charge);
	handshake_release(untold->remote);
	explicit_bzero(untold->msg.ticket, sizeof(untold->msg.ticket));
	mem_free(untold);
}

static void untold_tell(const struct untold *untold)
{
	static const uint8_t never[16];
	const struct peer *peer = untold->remote->peer;

	if (memcmp(untold->instance, never, sizeof(never)) != 0 &&
	    memcmp(untold->instance, peer->instance, sizeof(never)) != 0)
		return;
	if (handshake_tell_abort(untold->remote, &untold->msg) < 0)
		err_clear(); /* it is going down again */
}

static void untold_look(struct rooms *rooms)
{
	struct loop *loop = rooms->kvd->loop;
	const uint64_t ttl = rooms->kvd->config->connect_timeout_ns;
	uint64_t now = loop_now_ns(loop);
	struct untold *untold;

	list_foreach_safe(untold, &rooms->untold, link) {
		bool up = sm_state(&untold->remote->peer->sm) == PEER_UP;

		if (!up && now - untold->since_ns < ttl)
			continue;
		if (up)
			untold_tell(untold);
		untold_free(rooms, untold);
		if (loop_enough(loop)) {
			loop_defer(loop, &rooms->untold_go);
			return;
		}
	}
	untold = list_first(&rooms->untold, struct untold, link);
	if (untold)
		loop_timer_start(&rooms->untold_timer, untold->since_ns + ttl - now);
	else
		loop_timer_stop(&rooms->untold_timer);
}

static void on_untold_timer(struct loop_timer *timer)
{
	untold_look(container_of(timer, struct rooms, untold_timer));
}

static void on_untold_go(struct loop_defer *go)
{
	untold_look(container_of(go, struct rooms, untold_go));
}

void rooms_tell_later(struct rooms *rooms, struct remote *remote,
		      const struct wire_abort *msg, struct account *account)
{
	struct untold *untold = NULL;

	assert(msg->from_role == ROOM_RECV && msg->to_gen == 0);
	if (rooms->stopping.code != ERR_OK) /* so do its peerings */
		return;
	if (share_allows(rooms->kvd->config->early_requests_max, rooms->untold_count,
			 account->objects[ACCOUNT_ORPHANS]))
		untold = mem_zalloc(sizeof(*untold));
	if (untold &&
	    charge_take(&untold->charge, account, ACCOUNT_ORPHANS, sizeof(*untold)) < 0) {
		mem_free(untold);
		untold = NULL;
	}
	if (!untold) { /* its source waits for its timeout instead */
		metrics_add(&rooms->kvd->metrics, METRIC_ORPHANS_REFUSED, 1);
		err_clear();
		return;
	}
	untold->remote = remote;
	remote->reaches++;
	memcpy(untold->instance, remote->peer->instance, sizeof(untold->instance));
	untold->since_ns = loop_now_ns(rooms->kvd->loop);
	untold->msg = *msg;
	list_push_back(&rooms->untold, &untold->link);
	rooms->untold_count++;
	if (!loop_timer_running(&rooms->untold_timer))
		loop_timer_start(&rooms->untold_timer,
				 rooms->kvd->config->connect_timeout_ns);
}

void rooms_on_up(struct remote *remote)
{
	struct rooms *rooms = rooms_of(remote->kvd);

	if (rooms->untold_count > 0)
		loop_defer(rooms->kvd->loop, &rooms->untold_go);
}

void untold_take_back(struct rooms *rooms, uint64_t gen)
{
	struct untold *untold;

	list_foreach_safe(untold, &rooms->untold, link) {
		if (untold->msg.from_gen == gen)
			untold_free(rooms, untold);
	}
}

void untold_init(struct rooms *rooms)
{
	list_init(&rooms->untold);
	loop_timer_init(&rooms->untold_timer, rooms->kvd->loop, on_untold_timer);
	loop_defer_init(&rooms->untold_go, on_untold_go);
}

void untold_fini(struct rooms *rooms)
{
	struct untold *untold;

	list_foreach_safe(untold, &rooms->untold, link)
		untold_free(rooms, untold);
	loop_timer_stop(&rooms->untold_timer);
	loop_defer_cancel(&rooms->untold_go);
}
