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

struct deferred_abort {
	struct list link; /* in rooms->deferred_aborts */
	struct remote *remote;
	uint8_t instance[16]; /* zeroes: it was never connected */
	uint64_t since_ns;
	struct wire_abort msg;
	struct charge charge;
};

static void deferred_abort_free(struct rooms *rooms, struct deferred_abort *deferred)
{
	list_remove(&deferred->link);
	rooms->deferred_abort_count--;
	charge_drop(&deferred->charge);
	handshake_release(deferred->remote);
	explicit_bzero(deferred->msg.ticket, sizeof(deferred->msg.ticket));
	mem_free(deferred);
}

static void deferred_abort_send(const struct deferred_abort *deferred)
{
	static const uint8_t never[16];
	const struct peer *peer = deferred->remote->peer;

	if (memcmp(deferred->instance, never, sizeof(never)) != 0 &&
	    memcmp(deferred->instance, peer->instance, sizeof(never)) != 0)
		return;
	if (handshake_send_abort(deferred->remote, &deferred->msg) < 0)
		err_clear(); /* it is going down again */
}

static void deferred_aborts_scan(struct rooms *rooms)
{
	struct loop *loop = rooms->kvd->loop;
	const uint64_t ttl = rooms->kvd->config->connect_timeout_ns;
	uint64_t now = loop_now_ns(loop);
	struct deferred_abort *deferred;

	list_foreach_safe(deferred, &rooms->deferred_aborts, link) {
		bool up = sm_state(&deferred->remote->peer->sm) == PEER_UP;

		if (!up && now - deferred->since_ns < ttl)
			continue;
		if (up)
			deferred_abort_send(deferred);
		deferred_abort_free(rooms, deferred);
		if (loop_enough(loop)) {
			loop_defer(loop, &rooms->deferred_abort_scan);
			return;
		}
	}
	deferred = list_first(&rooms->deferred_aborts, struct deferred_abort, link);
	if (deferred)
		loop_timer_start(&rooms->deferred_abort_timer,
				 deferred->since_ns + ttl - now);
	else
		loop_timer_stop(&rooms->deferred_abort_timer);
}

static void on_deferred_abort_timer(struct loop_timer *timer)
{
	deferred_aborts_scan(container_of(timer, struct rooms, deferred_abort_timer));
}

static void on_deferred_abort_scan(struct loop_defer *go)
{
	deferred_aborts_scan(container_of(go, struct rooms, deferred_abort_scan));
}

void rooms_defer_abort(struct rooms *rooms, struct remote *remote,
		       const struct wire_abort *msg, struct account *account)
{
	struct deferred_abort *deferred = NULL;

	assert(msg->from_role == ROOM_RECV && msg->to_gen == 0);
	if (rooms->stopping.code != ERR_OK) /* so do its peerings */
		return;
	if (share_allows(rooms->kvd->config->early_requests_max,
			 rooms->deferred_abort_count, account->objects[ACCOUNT_ORPHANS]))
		deferred = mem_zalloc(sizeof(*deferred));
	if (deferred && charge_take(&deferred->charge, account, ACCOUNT_ORPHANS,
				    sizeof(*deferred)) < 0) {
		mem_free(deferred);
		deferred = NULL;
	}
	if (!deferred) { /* its source waits for its timeout instead */
		metrics_add(&rooms->kvd->metrics, METRIC_ORPHANS_REFUSED, 1);
		err_clear();
		return;
	}
	deferred->remote = remote;
	remote->reaches++;
	memcpy(deferred->instance, remote->peer->instance, sizeof(deferred->instance));
	deferred->since_ns = loop_now_ns(rooms->kvd->loop);
	deferred->msg = *msg;
	list_push_back(&rooms->deferred_aborts, &deferred->link);
	rooms->deferred_abort_count++;
	if (!loop_timer_running(&rooms->deferred_abort_timer))
		loop_timer_start(&rooms->deferred_abort_timer,
				 rooms->kvd->config->connect_timeout_ns);
}

void rooms_on_up(struct remote *remote)
{
	struct rooms *rooms = rooms_of(remote->kvd);

	if (rooms->deferred_abort_count > 0)
		loop_defer(rooms->kvd->loop, &rooms->deferred_abort_scan);
}

void deferred_abort_revoke(struct rooms *rooms, uint64_t gen)
{
	struct deferred_abort *deferred;

	list_foreach_safe(deferred, &rooms->deferred_aborts, link) {
		if (deferred->msg.from_gen == gen)
			deferred_abort_free(rooms, deferred);
	}
}

void deferred_aborts_init(struct rooms *rooms)
{
	list_init(&rooms->deferred_aborts);
	loop_timer_init(&rooms->deferred_abort_timer, rooms->kvd->loop,
			on_deferred_abort_timer);
	loop_defer_init(&rooms->deferred_abort_scan, on_deferred_abort_scan);
}

void deferred_aborts_fini(struct rooms *rooms)
{
	struct deferred_abort *deferred;

	list_foreach_safe(deferred, &rooms->deferred_aborts, link)
		deferred_abort_free(rooms, deferred);
	loop_timer_stop(&rooms->deferred_abort_timer);
	loop_defer_cancel(&rooms->deferred_abort_scan);
}
