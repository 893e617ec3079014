/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A ring of the last events, with numbers that never repeat: a log starts at the
 * microseconds of the daemon's clock, which exceed the count of all earlier events. So a
 * log may be freed with its user's last space: a reader of the old log gets `lost`,
 * without a record of the old one.
 *
 * The list of chunks needs no number of its own. Chunks stay in their bucket, and a
 * reader of the log from before the first page gets the last event of every chunk that
 * changed meanwhile.
 */
#include "daemon/store/events.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/session/session.h"
#include "daemon/store/store_impl.h"

#define NS_PER_US UINT64_C(1000)

struct store_events {
	uint64_t first, next; /* numbers: the oldest one's, the next one's */
	struct charge charge;
	struct store_event ring[EVENTS_MAX];
};

void store_events_free(struct store_events *events)
{
	if (!events)
		return;
	charge_drop(&events->charge);
	mem_free(events);
}

static void event_fill(struct store_event *event, const struct store_chunk *chunk)
{
	event->first = chunk->first;
	event->tokens = chunk->tokens;
	event->tiers = chunk->shown;
	memcpy(event->space, chunk->space->digest, sizeof(event->space));
	memcpy(event->id, chunk->id, sizeof(event->id));
}

void store_events_add(struct store_events *events, const struct store_chunk *chunk,
		      uint8_t before)
{
	for (uint8_t tier = STORE_IN_MEMORY; tier <= STORE_IN_PAGES; tier *= 2) {
		struct store_event *event = &events->ring[events->next % EVENTS_MAX];

		if (!((before ^ chunk->shown) & tier))
			continue;
		event_fill(event, chunk);
		event->seq = events->next++;
		event->tiers = tier;
		event->put = chunk->shown & tier;
		if (events->next - events->first > EVENTS_MAX)
			events->first = events->next - EVENTS_MAX;
	}
}

static struct store_tenant *events_tenant(const struct session *session)
{
	const struct store *store = store_of(session->kvd);
	struct store_tenant *tenant;

	list_foreach(tenant, &store->tenants, link) {
		if (tenant->account == session->account)
			return tenant;
	}
	return NULL;
}

static bool reader_wants(const struct store_reader *reader, const uint8_t space[16])
{
	return !reader->handle || memcmp(reader->handle->space->digest, space, 16) == 0;
}

static uint64_t events_now(const struct store *store)
{
	return loop_now_ns(store->kvd->loop) / NS_PER_US + 1;
}

static int events_make(const struct store_reader *reader, struct store_tenant *tenant)
{
	struct store_events *events = mem_zalloc(sizeof(*events));
	int r;

	if (!events)
		return err_pass(-ENOMEM);
	r = charge_take(&events->charge, reader->session->account, ACCOUNT_CHUNKS,
			sizeof(*events));
	if (r < 0) {
		mem_free(events);
		return err_pass(r);
	}
	events->first = events->next = events_now(tenant->store) + 1;
	tenant->events = events;
	return 0;
}

int store_events_read(const struct store_reader *reader, uint64_t since,
		      const uint8_t *instance, struct store_events_facts *facts_p)
{
	struct store *store = store_of(reader->session->kvd);
	struct store_tenant *tenant;
	const struct store_events *events;
	uint64_t at = since + 1;
	int r = store_ready(store);

	if (r < 0)
		return err_pass(r);
	*facts_p = (struct store_events_facts){.seq = events_now(store), .lost = true};
	memcpy(facts_p->instance, store->instance, sizeof(facts_p->instance));
	tenant = events_tenant(reader->session);
	if (!tenant)
		return 0; /* it has no chunks */
	if (!tenant->events) {
		r = events_make(reader, tenant);
		if (r < 0)
			return err_pass(r);
		facts_p->begun = true;
	}
	events = tenant->events;
	facts_p->seq = events->next - 1;
	if (since == UINT64_MAX || at < events->first || at > events->next ||
	    (instance && memcmp(instance, store->instance, 16) != 0))
		return 0;
	facts_p->lost = false;
	for (unsigned int n = 0; n < EVENTS_PAGE && at < events->next; n++, at++) {
		const struct store_event *event = &events->ring[at % EVENTS_MAX];

		if (reader_wants(reader, event->space))
			reader->each(reader->arg, event);
	}
	facts_p->seq = at - 1;
	facts_p->more = at < events->next;
	return 0;
}

void store_events_undo(struct session *session)
{
	struct store_tenant *tenant = events_tenant(session);

	if (tenant)
		store_events_free(mem_steal(tenant->events));
}

int store_snapshot(const struct store_reader *reader, uint64_t at, uint64_t *next_p)
{
	const struct store *store = store_of(reader->session->kvd);
	unsigned int seen = 0;
	int r = store_ready(store_of(reader->session->kvd));

	if (r < 0)
		return err_pass(r);
	for (unsigned int n = 0;
	     n < EVENTS_BUCKETS && seen < EVENTS_PAGE && at <= store->bucket_mask;
	     n++, at++) {
		const struct store_chunk *chunk = store->buckets[at];

		for (; chunk; chunk = chunk->next, seen++) {
			struct store_event event = {.put = true};

			if (!chunk->shown ||
			    chunk->space->tenant->account != reader->session->account ||
			    !reader_wants(reader, chunk->space->digest))
				continue;
			event_fill(&event, chunk);
			reader->each(reader->arg, &event);
		}
	}
	*next_p = at <= store->bucket_mask ? at : 0;
	return 0;
}
