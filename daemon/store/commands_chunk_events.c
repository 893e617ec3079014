/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunk.events, chunk.snapshot: daemon/store/events.h. Both reply with one page of at
 * most some hundred objects, formatted as text, which bounds the time of a turn. Clients
 * repeat the command until the reply has no more.
 */
#include <errno.h>
#include <string.h>

#include "daemon/base/hex.h"
#include "daemon/request/commands.h"
#include "proto/out.h"
#include "daemon/session/session.h"
#include "daemon/store/commands_chunk.h"
#include "daemon/store/events.h"
#include "daemon/store/store.h"

#define INSTANCE_BYTES 16u

/* `number` 0: all spaces of the user. */
static int reader_of(struct request *req, uint64_t number, struct store_reader *reader)
{
	reader->session = req->session;
	if (number)
		reader->handle = store_handle_find(req->session, number);
	return number && !reader->handle ? err_pass(-ENOENT) : 0;
}

/* Sends what was read without a fault. */
static int listing_end(struct reply *reply, int r)
{
	if (r >= 0)
		r = reply_try(reply);
	else
		text_fini(&reply->text);
	return err_pass(r);
}

static void put_chunk(struct text *out, const struct store_event *event)
{
	out_hex(out, "id", event->id, sizeof(event->id));
	out_hex(out, "space", event->space, sizeof(event->space));
	out_number(out, "first", event->first);
	out_number(out, "tokens", event->tokens);
}

/* ---- chunk.events ---- */

static void event_add(void *arg, const struct store_event *event)
{
	struct text *out = arg;

	out_object(out, NULL);
	put_chunk(out, event);
	out_number(out, "seq", event->seq);
	out_text(out, "tier",
		 event->tiers & STORE_IN_MEMORY ? "memory"
		 : event->tiers & STORE_IN_FILE ? "file"
						: "pages");
	out_bool(out, "put", event->put);
	out_close(out, '}');
}

struct events_args {
	uint64_t space, since;
	const char *instance;
};
static const struct field events_fields[] = {
	F_ID("space", events_args, space, OPTIONAL,
	     "Report only the chunks of this space of the session; default: all spaces "
	     "of the user"),
	F_ID("since", events_args, since, OPTIONAL,
	     "`seq` of the previous reply; 0 for the first call"),
	F_STR("instance", events_args, instance, OPTIONAL, 0,
	      "`instance` of the previous reply"),
	F_END,
};

static int events_run(struct request *req)
{
	const struct events_args *args = request_args(req);
	struct reply reply;
	struct text *out = reply_begin(&reply, req);
	struct store_reader reader = {.each = event_add, .arg = out};
	uint8_t instance[INSTANCE_BYTES];
	struct store_events_facts facts = {.begun = false};
	int r = reader_of(req, args->space, &reader);

	if (r >= 0 && args->instance &&
	    (strlen(args->instance) != HEX_CHARS(INSTANCE_BYTES) ||
	     !hex_read(args->instance, instance, sizeof(instance))))
		r = err_raise(ERR_INVAL, "instance: not an instance; give %u hex digits",
			      2 * INSTANCE_BYTES);
	if (r < 0)
		return err_pass(r);
	out_array(out, "events");
	r = store_events_read(&reader, args->since, args->instance ? instance : NULL,
			      &facts);
	out_close(out, ']');
	out_number(out, "seq", facts.seq);
	out_bool(out, "lost", facts.lost);
	out_bool(out, "more", facts.more);
	out_hex(out, "instance", facts.instance, sizeof(facts.instance));
	r = listing_end(&reply, r);
	if (r < 0 && facts.begun)
		store_events_undo(req->session);
	return err_pass(r);
}

/* ---- chunk.snapshot ---- */

static void snapshot_add(void *arg, const struct store_event *event)
{
	struct text *out = arg;

	out_object(out, NULL);
	put_chunk(out, event);
	out_bool(out, "memory", event->tiers & STORE_IN_MEMORY);
	out_bool(out, "file", event->tiers & STORE_IN_FILE);
	out_bool(out, "pages", event->tiers & STORE_IN_PAGES);
	out_close(out, '}');
}

struct snapshot_args {
	uint64_t space, at;
};
static const struct field snapshot_fields[] = {
	F_ID("space", snapshot_args, space, OPTIONAL,
	     "List only the chunks of this space of the session; default: all spaces "
	     "of the user"),
	F_ID("at", snapshot_args, at, OPTIONAL,
	     "`next` of the previous page; 0 for the first page"),
	F_END,
};

static int snapshot_run(struct request *req)
{
	const struct snapshot_args *args = request_args(req);
	struct reply reply;
	struct text *out = reply_begin(&reply, req);
	struct store_reader reader = {.each = snapshot_add, .arg = out};
	uint64_t next = 0;
	int r = reader_of(req, args->space, &reader);

	if (r < 0)
		return err_pass(r);
	out_array(out, "chunks");
	r = store_snapshot(&reader, args->at, &next);
	out_close(out, ']');
	out_number(out, "next", next);
	return err_pass(listing_end(&reply, r));
}

const struct command chunk_event_commands[] = {
	{"chunk.events",
	 "Report the user's chunks that were added or removed since the previous call",
	 events_fields, 0, events_run,
	 "events: at most 256 of {seq, id, space: its digest as in chunk.list, first, "
	 "tokens, tier: memory, file or pages (of an engine), put: true if added, "
	 "false if removed}; seq: the value of since for the next call; more: further "
	 "events are available; lost: events are missing, as after the first call: "
	 "read chunk.snapshot, then continue from this seq; instance: of the daemon; "
	 "seq values of another instance are not comparable"},
	{"chunk.snapshot", "List the user's chunks in pages", snapshot_fields, 0,
	 snapshot_run,
	 "chunks: {id, space, first, tokens, memory, file, pages: the tiers that have "
	 "it}; next: the value of at for the next page, 0 after the last page"},
	{.name = NULL},
};
