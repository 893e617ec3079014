/* SPDX-License-Identifier: Apache-2.0 */
/*
 * demo: the decode engine. Binds pages for each request, waits for its bytes,
 * and looks at every byte of its cache: what arrived, and what must not change.
 * Prints a row a request. Exit status 0: all of it was as it should be.
 *
 *   demo-decode SOCKET PREFILL_ENDPOINT TRANSPORT
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/demo/cache.h"

#define WAIT_MS 120000 /* for what works on a slow machine, too */
#define STILL_MS 300   /* how long a failed room's memory is watched */

struct decode {
	struct kvd_client *client;
	struct cache cache;
	const char *endpoint, *transport;
	uint64_t verified; /* of rooms that succeeded */
	unsigned int bad;
};

/* what the daemon says of a room */
struct record {
	char transport[16], error[32];
	double ms;
	uint64_t bytes;
};

static void find_text(const char *json, const char *key, char *out, size_t size)
{
	const char *at = strstr(json, key);
	size_t n;

	*out = '\0';
	if (!at)
		return;
	at += strlen(key);
	n = strcspn(at, "\"");
	snprintf(out, size, "%.*s", (int)n, at);
}

static double find_number(const char *json, const char *key)
{
	const char *at = strstr(json, key);

	return at ? strtod(at + strlen(key), NULL) : 0;
}

static void read_record(struct decode *d, struct kvd_room *room, struct record *rec)
{
	const char *times;
	char *json;

	if (kvd_room_show(room, 0, &json))
		die(d->client, "room.show");
	find_text(json, "\"transport\":\"", rec->transport, sizeof(rec->transport));
	find_text(json, "\"code\":\"", rec->error, sizeof(rec->error));
	times = strstr(json, "\"timings_ms\"");
	rec->ms = times ? find_number(times, "\"transfer\":") : 0;
	rec->bytes = (uint64_t)find_number(json, "\"bytes\":");
	kvd_string_free(json);
}

static void print_row(struct decode *d, const struct act_row *row,
		      const struct record *rec, const char *what, bool ok)
{
	static const char *const acts_text[] = {"push", "pull", "abort", "kill"};
	char rate[16] = "-";

	if (rec->ms > 0 && row->act <= ACT_PULL)
		snprintf(rate, sizeof(rate), "%.2f", (double)rec->bytes / rec->ms / 1e6);
	printf("%-6" PRIu64 " %-5s %-9s %6u %12" PRIu64 " %9.2f %7s  %s%s\n", row->room,
	       acts_text[row->act], rec->transport, row->tokens, rec->bytes, rec->ms,
	       rate, what, ok ? "" : "  <-- WRONG");
	fflush(stdout);
	d->bad += !ok;
}

/* Every byte there, every other byte untouched, counted by the daemon as by us. */
static void check_success(struct decode *d, const struct act_row *row,
			  const struct request *request, struct kvd_room *room)
{
	uint64_t want = (uint64_t)row->tokens * TOKEN_BYTES, wrong, verified;
	struct record rec;
	char what[96];
	bool ok;

	read_record(d, room, &rec);
	verified = cache_verify(&d->cache, request, &wrong);
	ok = verified == want && !wrong && rec.bytes == verified &&
	     !strcmp(rec.transport, d->transport);
	snprintf(what, sizeof(what), "%s", ok ? "all bytes, guards untouched" : "");
	if (!ok)
		snprintf(what, sizeof(what),
			 "%" PRIu64 " of %" PRIu64 " bytes, %" PRIu64 " strayed",
			 verified, want, wrong);
	d->verified += verified;
	print_row(d, row, &rec, what, ok);
}

/* Terminal means still: nothing that the room could reach changes any more. */
static void check_failure(struct decode *d, const struct act_row *row,
			  const struct request *request, struct kvd_room *room)
{
	const struct timespec watch = {.tv_nsec = STILL_MS * 1000000L};
	uint64_t before = cache_sum(&d->cache), wrong;
	struct record rec;
	char what[96];
	bool ok;

	nanosleep(&watch, NULL);
	ok = cache_sum(&d->cache) == before;
	read_record(d, room, &rec);
	rec.bytes = cache_verify(&d->cache, request, &wrong);
	ok = ok && !wrong && *rec.error;
	snprintf(what, sizeof(what), "failed (%s), still for %d ms, guards untouched",
		 rec.error, STILL_MS);
	print_row(d, row, &rec, what, ok);
}

static struct kvd_room *open_room(struct decode *d, const struct act_row *row,
				  const struct request *request)
{
	struct kvd_view view = request_view(request, 0, row->tokens);
	struct kvd_source source = {.endpoint = d->endpoint};
	struct kvd_room_args open = {.room = row->room,
				     .ticket = getenv("TICKET"), /* the router's */
				     .role = KVD_RECV,
				     .pool = d->cache.pool,
				     .sources = &source,
				     .source_count = 1};
	struct kvd_room_pages bind = {.views = &view, .view_count = 1};
	struct kvd_room *room;

	if (row->act == ACT_PULL) {
		open.role = KVD_PULL;
		open.views = &view;
		open.view_count = 1;
	}
	if (kvd_room_open(d->client, &open, NULL, &room))
		die(d->client, "room.open");
	if (row->act != ACT_PULL && kvd_room_bind(room, &bind, NULL))
		die(d->client, "room.bind");
	return room;
}

/* The first bytes of the second chunk are landing: now. */
static void abort_in_the_middle(struct decode *d, const struct request *request,
				struct kvd_room *room)
{
	const struct timespec pause = {.tv_nsec = 20000};

	for (long i = 0; i < WAIT_MS * 50L && kvd_room_state(room) > KVD_FAILED; i++) {
		if (cache_touched(&d->cache, request, chunk_tokens))
			break;
		nanosleep(&pause, NULL);
	}
	if (kvd_room_abort(room, "the user went away", NULL))
		die(d->client, "room.abort");
}

static void take(struct decode *d, const struct act_row *row)
{
	struct request request;
	struct kvd_room *room;
	int state;

	cache_guard(&d->cache);
	request_make(&request, row, 11);
	room = open_room(d, row, &request);
	if (row->act == ACT_ABORT)
		abort_in_the_middle(d, &request, room);
	state = kvd_room_wait(room, KVD_SUCCESS, WAIT_MS);
	if (state == KVD_SUCCESS && row->act <= ACT_PULL) {
		check_success(d, row, &request, room);
	} else if (state == KVD_FAILED && row->act > ACT_PULL) {
		check_failure(d, row, &request, room);
	} else {
		struct record rec = {0};

		read_record(d, room, &rec);
		print_row(d, row, &rec,
			  state < 0 ? kvd_code_name(state) : kvd_state_name(state),
			  false);
	}
	if (kvd_room_close(room, NULL))
		die(d->client, "room.close");
}

/* The daemon's own count of bytes that arrived in rooms. */
static uint64_t daemon_bytes(struct decode *d)
{
	char *json;
	const char *at;
	uint64_t bytes;

	if (kvd_command(d->client, "stats", NULL, 0, &json))
		die(d->client, "stats");
	at = strstr(json, "\"room_received_bytes_total\"");
	if (!at) {
		fprintf(stderr, "demo: stats has no room_received_bytes_total\n");
		exit(1);
	}
	bytes = (uint64_t)find_number(at, "\"value\":");
	kvd_string_free(json);
	return bytes;
}

int main(int argc, char **argv)
{
	struct kvd_options options = {.client = "demo-decode", .role = "decode"};
	struct decode d = {0};
	uint64_t before, counted = 0;

	if (argc != 4) {
		fprintf(stderr, "usage: demo-decode SOCKET PREFILL_ENDPOINT TRANSPORT\n");
		return 2;
	}
	options.socket = argv[1];
	d.endpoint = argv[2];
	d.transport = argv[3];
	acts_shrink();
	if (kvd_open(&options, &d.client))
		die(NULL, "decode daemon");
	cache_open(d.client, &d.cache);
	before = daemon_bytes(&d);
	for (size_t i = 0; i < act_count; i++) {
		if (acts[i].act == ACT_ABORT && !counted)
			counted = daemon_bytes(&d) - before;
		take(&d, &acts[i]);
	}
	printf("       %s: the daemon counted %" PRIu64 " bytes, %" PRIu64
	       " verified%s\n",
	       d.transport, counted, d.verified,
	       counted == d.verified ? "" : "  <-- WRONG");
	kvd_close(d.client);
	return d.bad || counted != d.verified;
}
