/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunk.events, chunk.snapshot: daemon/store/events.h. Both reply with one page of at
 * most some hundred objects, formatted as text, which bounds the time of a turn. Clients
 * repeat the command until the reply has no more.
 */
#include <errno.h>
#include <string.h>

#include "daemon/base/hex.h"
#include "daemon/base/text.h"
#include "daemon/request/commands.h"
#include "daemon/session/session.h"
#include "daemon/store/commands_chunk.h"
#include "daemon/store/events.h"
#include "daemon/store/store.h"

#define INSTANCE_BYTES 16u

struct listing {
	struct text text;
	bool snapshot, begun;
};

static void text_hex(struct text *text, const char *name, const uint8_t *bytes,
		     size_t len)
{
	char hex[HEX_CHARS(STORE_ID_BYTES) + 1];

	hex_write(bytes, len, hex);
	text_puts(text, name);
	text_puts(text, "\"");
	text_puts(text, hex);
	text_puts(text, "\"");
}

static void listing_add(void *arg, const struct store_event *event)
{
	struct listing *listing = arg;
	struct text *text = &listing->text;

	text_hex(text, listing->begun ? ",{\"id\":" : "{\"id\":", event->id,
		 sizeof(event->id));
	listing->begun = true;
	text_hex(text, ",\"space\":", event->space, sizeof(event->space));
	text_number(text, ",\"first\":", event->first);
	text_number(text, ",\"tokens\":", event->tokens);
	if (listing->snapshot) {
		text_puts(text, ",\"memory\":");
		text_puts(text, event->tiers & STORE_IN_MEMORY ? "true" : "false");
		text_puts(text, ",\"file\":");
		text_puts(text, event->tiers & STORE_IN_FILE ? "true" : "false");
		text_puts(text, ",\"pages\":");
		text_puts(text, event->tiers & STORE_IN_PAGES ? "true}" : "false}");
		return;
	}
	text_number(text, ",\"seq\":", event->seq);
	text_puts(text, event->tiers & STORE_IN_MEMORY ? ",\"tier\":\"memory\""
			: event->tiers & STORE_IN_FILE ? ",\"tier\":\"file\""
						       : ",\"tier\":\"pages\"");
	text_puts(text, event->put ? ",\"put\":true}" : ",\"put\":false}");
}

/* `number` 0: all spaces of the user. */
static int reader_of(struct request *req, uint64_t number, struct listing *listing,
		     struct store_reader *reader)
{
	*reader = (struct store_reader){
		.session = req->session, .each = listing_add, .arg = listing};
	if (number)
		reader->handle = store_handle_find(req->session, number);
	return number && !reader->handle ? err_pass(-ENOENT) : 0;
}

static int listing_end(struct request *req, struct listing *listing, int r)
{
	if (r >= 0)
		r = request_text_reply(req, &listing->text);
	if (r < 0)
		text_fini(&listing->text);
	return err_pass(r);
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
	struct listing listing = {.snapshot = false};
	uint8_t instance[INSTANCE_BYTES];
	struct store_events_facts facts = {.begun = false};
	struct store_reader reader;
	int r = reader_of(req, args->space, &listing, &reader);

	if (r >= 0 && args->instance &&
	    (strlen(args->instance) != HEX_CHARS(INSTANCE_BYTES) ||
	     !hex_read(args->instance, instance, sizeof(instance))))
		r = err_raise(ERR_INVAL, "instance: not an instance; give %u hex digits",
			      2 * INSTANCE_BYTES);
	if (r < 0)
		return err_pass(r);
	request_text_begin(req, &listing.text);
	text_puts(&listing.text, ",\"events\":[");
	r = store_events_read(&reader, args->since, args->instance ? instance : NULL,
			      &facts);
	if (r >= 0) {
		text_number(&listing.text, "],\"seq\":", facts.seq);
		text_puts(&listing.text,
			  facts.lost ? ",\"lost\":true" : ",\"lost\":false");
		text_puts(&listing.text,
			  facts.more ? ",\"more\":true" : ",\"more\":false");
		text_hex(&listing.text, ",\"instance\":", facts.instance,
			 sizeof(facts.instance));
	}
	r = listing_end(req, &listing, r);
	if (r < 0 && facts.begun)
		store_events_undo(req->session);
	return err_pass(r);
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
	struct listing listing = {.snapshot = true};
	struct store_reader reader;
	uint64_t next;
	int r = reader_of(req, args->space, &listing, &reader);

	if (r < 0)
		return err_pass(r);
	request_text_begin(req, &listing.text);
	text_puts(&listing.text, ",\"chunks\":[");
	r = store_snapshot(&reader, args->at, &next);
	if (r >= 0)
		text_number(&listing.text, "],\"next\":", next);
	return err_pass(listing_end(req, &listing, r));
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
