/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The commands of rooms: rooms, room, history. WAITS FOR is a column, since it answers an
 * operator's first question. The daemon filters the list: the first thousand rooms might
 * not include the one that hangs.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ctl/ctl.h"
#include "ctl/table.h"
#include "daemon/base/mem.h"

#define HISTORY_PAGE 500 /* records of one reply */
#define HISTORY_SHOWN 20 /* of one room */

/* The name in the allow-list, else its own name, else its endpoint without the key. */
const char *ctl_peer_name(const cJSON *peer)
{
	static char text[160];
	const char *name = ctl_str(peer, "known_as", "");

	if (!*name)
		name = ctl_str(peer, "name", "");
	if (!*name)
		name = ctl_str(peer, "endpoint", "?");
	snprintf(text, sizeof(text), "%.*s", (int)strcspn(name, "#"), name);
	return text;
}

static const char *room_transports(const cJSON *room)
{
	static char text[128];
	const cJSON *peer;
	size_t n = 0;

	*text = '\0';
	cJSON_ArrayForEach(peer, ctl_list(room, "peers")) {
		const char *name = ctl_str(peer, "transport", "?");

		if (!strstr(text, name) && n < sizeof(text) - 16)
			n += (size_t)snprintf(text + n, sizeof(text) - n, "%s%.10s",
					      n ? "," : "", name);
	}
	return text;
}

bool ctl_duration(const char *text, double *ms_p)
{
	static const struct {
		const char *unit;
		double ms;
	} units[] = {{"ms", 1},	    {"s", 1e3},	   {"", 1e3},	  {"m", 60e3},
		     {"min", 60e3}, {"h", 3600e3}, {"d", 86400e3}};
	char *end;
	double n;

	errno = 0;
	n = strtod(text, &end);
	for (size_t i = 0; i < ARRAY_LEN(units); i++) {
		if (end != text && !errno && !strcmp(end, units[i].unit) && n >= 0 &&
		    n * units[i].ms <= 0x7fffffff) {
			*ms_p = n * units[i].ms;
			return true;
		}
	}
	return false;
}

static int add_duration(cJSON *args, const char *member, const char *option,
			const char *text)
{
	double ms;

	if (!ctl_duration(text, &ms))
		return ctl_usage("--%s: a duration like 30s or 10m, not '%s'", option,
				 text);
	cJSON_AddNumberToObject(args, member, (double)(unsigned long)ms);
	return CTL_OK;
}

/* ---- rooms ---- */

static void room_row(struct table *table, const cJSON *room)
{
	const char *state = ctl_process_state(ctl_num(room, "pid"));

	ctl_cells(table, room, "room role state_name engine");
	if (ctl_num(room, "pid") > 0)
		table_cellf(table, "%.0f%s%s", ctl_num(room, "pid"), *state ? " " : "",
			    state);
	else
		table_cell(table, NULL);
	table_cell(table, room_transports(room));
	table_cell(table, ctl_peer_name(cJSON_GetArrayItem(ctl_list(room, "peers"), 0)));
	table_cellf(table, "%d", cJSON_GetArraySize(ctl_list(room, "peers")));
	ctl_cells(table, room,
		  "bytes:B expected_bytes:B error.code waits_for.since_ms:t "
		  "waits_for.what");
}

static int print_rooms(const cJSON *reply)
{
	return ctl_print_list(
		ctl_list(reply, "rooms"),
		"ROOM ROLE STATE ENGINE PROCESS TRANSPORT PEER >PEERS >BYTES "
		">EXPECTED ERROR >AGE WAITS_FOR",
		room_row);
}

int ctl_run_rooms(struct ctl *ctl)
{
	cJSON *args = ctl_args_all();
	int r = CTL_OK;

	if (ctl->limit)
		cJSON_AddNumberToObject(args, "limit", (double)ctl->limit);
	if (ctl->state)
		cJSON_AddStringToObject(args, "state", ctl->state);
	if (ctl->peers.count)
		cJSON_AddStringToObject(args, "peer", ctl->peers.word[0]);
	if (ctl->failed)
		cJSON_AddTrueToObject(args, "failed");
	if (ctl->stuck)
		r = add_duration(args, "stuck_ms", "stuck", ctl->stuck);
	if (r) {
		cJSON_Delete(args);
		return r;
	}
	return ctl_show(ctl, "room.list", args, print_rooms);
}

/* ---- history ---- */

/* By this host's clock. */
static const char *clock_time(double ms_ago)
{
	static char text[32];
	time_t seconds = time(NULL) - (time_t)(ms_ago / 1000);
	struct tm tm;

	if (!localtime_r(&seconds, &tm) ||
	    !strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &tm))
		return "?";
	return text;
}

static void ended_row(struct table *table, const cJSON *e)
{
	const cJSON *error = ctl_list(e, "error");

	table_cell(table, clock_time(ctl_num(e, "ended_ms")));
	ctl_cells(table, e, "room role");
	table_cell(table, error ? ctl_str(error, "code", "?") : "success");
	if (ctl_num(e, "expected_bytes") > ctl_num(e, "bytes"))
		table_cellf(table, "%s of %s", ctl_bytes(ctl_num(e, "bytes")),
			    ctl_bytes(ctl_num(e, "expected_bytes")));
	else
		table_cell(table, ctl_bytes(ctl_num(e, "bytes")));
	ctl_cells(table, e,
		  "tokens timings_ms.total:t timings_ms.transfer:t transport engine peer "
		  "error.message");
}

/* One page; `before` NULL: the latest. */
static int ask_history(struct ctl *ctl, const char *number, const char *before,
		       unsigned long limit, cJSON **reply_p)
{
	cJSON *args = ctl_args_all();
	int r = CTL_OK;

	cJSON_AddNumberToObject(args, "limit",
				(double)(limit < HISTORY_PAGE ? limit : HISTORY_PAGE));
	if (number)
		cJSON_AddStringToObject(args, "room", number);
	if (before)
		cJSON_AddStringToObject(args, "before", before);
	if (ctl->failed)
		cJSON_AddTrueToObject(args, "failed");
	if (ctl->code)
		cJSON_AddStringToObject(args, "code", ctl->code);
	if (ctl->since)
		r = add_duration(args, "since_ms", "since", ctl->since);
	if (r) {
		cJSON_Delete(args);
		return r;
	}
	return ctl_ask(ctl, "room.history", args, reply_p);
}

int ctl_history(struct ctl *ctl, const char *number, unsigned long limit, cJSON *rooms)
{
	char before[24] = "";
	int r;

	do {
		cJSON *reply, *page, *item;

		r = ask_history(ctl, number, *before ? before : NULL, limit, &reply);
		if (r)
			return r;
		page = cJSON_GetObjectItemCaseSensitive(reply, "rooms");
		while ((item = cJSON_DetachItemFromArray(page, 0))) {
			cJSON_AddItemToArray(rooms, item);
			limit -= limit > 0;
		}
		snprintf(before, sizeof(before), "%.23s", ctl_str(reply, "next", ""));
		cJSON_Delete(reply);
	} while (*before && limit > 0);
	return CTL_OK;
}

static int print_history(const cJSON *rooms)
{
	return ctl_print_list(rooms,
			      "ENDED ROOM ROLE RESULT >BYTES >TOKENS-BOUND >TIME "
			      ">TRANSFER TRANSPORT ENGINE PEER MESSAGE",
			      ended_row);
}

int ctl_run_history(struct ctl *ctl)
{
	cJSON *result = cJSON_CreateObject();
	cJSON *rooms = cJSON_AddArrayToObject(result, "rooms");
	int r = rooms ? ctl_history(ctl, ctl->number, ctl->limit ? ctl->limit : 1000,
				    rooms)
		      : ctl_failed("out of memory");

	if (!r && ctl->json)
		ctl_print_json(result);
	else if (!r)
		r = print_history(rooms);
	cJSON_Delete(result);
	return r;
}

/* ---- one room ---- */

static void put_waits(const cJSON *room)
{
	const cJSON *waits = ctl_list(room, "waits_for");

	if (!waits)
		return;
	printf("%-12s %s\n", "waits for", ctl_str(waits, "what", "?"));
	printf("%-12s %s; the room fails in %s unless that happens\n", "since",
	       ctl_ms(ctl_num(waits, "since_ms")), ctl_ms(ctl_num(waits, "until_ms")));
}

/* "packed 256 B", "rows 4 KiB", "staged 64 KiB"; "" if there was no choice. */
static void way_cell(struct table *table, const cJSON *way)
{
	if (!way)
		table_cell(table, "");
	else
		table_cellf(table, "%s %s",
			    ctl_true(way, "staged")   ? "staged"
			    : ctl_true(way, "packed") ? "packed"
						      : "rows",
			    ctl_bytes(ctl_num(way, "row_bytes")));
}

static void party_row(struct table *table, const cJSON *p)
{
	const cJSON *used =
		ctl_list(p, "sent") ? ctl_list(p, "sent") : ctl_list(p, "received");

	table_cell(table, ctl_peer_name(p));
	ctl_cells(table, p, "transport path");
	table_cellf(table, "%.0f %%", 100 * ctl_num(used, "staged_share"));
	ctl_cells(table, used, "rows descriptors");
	way_cell(table, ctl_list(p, "way"));
	ctl_cells(table, p, "rank bytes:B expected_bytes:B");
	table_cell(table, ctl_true(p, "lost")	    ? "lost"
			  : ctl_true(p, "done")	    ? "done"
			  : ctl_true(p, "quiesced") ? "quiesced"
						    : "open");
}

/* The peers that may take part. */
static void put_admits(const cJSON *room)
{
	const cJSON *admits = ctl_list(room, "admits"), *name;

	printf("%-12s %s\n", "ticket", ctl_true(room, "ticket") ? "yes" : "no");
	if (!admits)
		return;
	printf("%-12s", "peers");
	cJSON_ArrayForEach(name, admits)
		printf(" %s", cJSON_IsString(name) ? name->valuestring : "?");
	putchar('\n');
}

static int print_room(const cJSON *room)
{
	const cJSON *error = ctl_list(room, "error"), *t = ctl_list(room, "timings_ms"),
		    *item;
	const char *state = ctl_process_state(ctl_num(room, "pid"));

	printf("%-12s %s (%s)\n", "room", ctl_str(room, "room", "?"),
	       ctl_str(room, "role", "?"));
	printf("%-12s %s%s\n", "state", ctl_str(room, "state_name", "?"),
	       ctl_true(room, "aborting") ? ": aborting, not quiesced yet" : "");
	if (error)
		printf("%-12s %s: %s%s\n", "error", ctl_str(error, "code", "?"),
		       ctl_str(error, "message", ""),
		       ctl_true(error, "retryable") ? " (retryable)" : "");
	put_waits(room);
	printf("%-12s '%s' (session %.0f, process %.0f%s%s)\n", "engine",
	       ctl_str(room, "engine", "?"), ctl_num(room, "session"),
	       ctl_num(room, "pid"), *state ? ", " : "", state);
	printf("%-12s %s\n", "pool", ctl_str(room, "pool_name", "?"));
	put_admits(room);
	printf("%-12s %s of %s, %.0f chunks, %.0f moves in flight\n", "bytes",
	       ctl_bytes(ctl_num(room, "bytes")),
	       ctl_bytes(ctl_num(room, "expected_bytes")), ctl_num(room, "chunks"),
	       ctl_num(room, "in_flight"));
	printf("%-12s bootstrap %s, waiting %s, transfer %s\n", "time",
	       ctl_ms(ctl_num(t, "bootstrap")), ctl_ms(ctl_num(t, "waiting")),
	       ctl_ms(ctl_num(t, "transfer")));
	if (ctl_num(room, "surplus_tokens") > 0)
		printf("%-12s %.0f tokens were sent but not bound\n", "surplus",
		       ctl_num(room, "surplus_tokens"));
	cJSON_ArrayForEach(item, ctl_list(room, "landed"))
		printf("%-12s %s: %s (bitmap of pages)\n", "landed", item->string,
		       cJSON_IsString(item) ? item->valuestring : "?");
	putchar('\n');
	return ctl_print_list(
		ctl_list(room, "peers"),
		"PEER TRANSPORT PATH >STAGED >ROWS >DESCRIPTORS METHOD >RANK "
		">BYTES >EXPECTED STATE",
		party_row);
}

static int print_found(const cJSON *rooms)
{
	const cJSON *room;
	int r = CTL_OK;

	cJSON_ArrayForEach(room, rooms) {
		if (room->prev && room != rooms->child)
			putchar('\n');
		if (strcmp(ctl_str(room, "state_name", ""), "unopened") != 0) {
			r = print_room(room);
			continue;
		}
		/* requested by a peer, not opened by an engine */
		printf("%-12s %s (%s)\n", "room", ctl_str(room, "room", "?"),
		       ctl_str(room, "role", "?"));
		printf("%-12s unopened\n", "state");
		put_waits(room);
	}
	return r;
}

/* Removes rooms of other roles. */
static void keep_role(cJSON *rooms, const char *role)
{
	cJSON *room = rooms ? rooms->child : NULL, *next;

	for (; room && role; room = next) {
		next = room->next;
		if (strcmp(ctl_str(room, "role", ""), role) != 0)
			cJSON_Delete(cJSON_DetachItemViaPointer(rooms, room));
	}
}

/* The room is not open: search the history. */
static int room_of_the_past(struct ctl *ctl, cJSON *result)
{
	cJSON *ended = cJSON_AddArrayToObject(result, "ended");
	int r = ended ? ctl_history(ctl, ctl->args[0], HISTORY_SHOWN, ended)
		      : ctl_failed("out of memory");

	if (r)
		return r;
	keep_role(ended, ctl->role);
	if (!ended->child)
		return ctl_failed("room %s: not open, not requested by a peer, and not "
				  "among the last rooms that ended",
				  ctl->args[0]);
	if (ctl->json)
		return CTL_OK;
	printf("room %s is not open; it has ended:\n\n", ctl->args[0]);
	return print_history(ended);
}

int ctl_run_room(struct ctl *ctl)
{
	cJSON *args = ctl_args_all(), *reply, *rooms;
	int r;

	cJSON_AddStringToObject(args, "room", ctl->args[0]);
	r = ctl_ask(ctl, "room.list", args, &reply);
	if (r)
		return r;
	cJSON_DeleteItemFromObjectCaseSensitive(reply, "total"); /* of all rooms */
	rooms = cJSON_GetObjectItemCaseSensitive(reply, "rooms");
	keep_role(rooms, ctl->role);
	if (!rooms || !rooms->child)
		r = room_of_the_past(ctl, reply);
	else if (!ctl->json)
		r = print_found(rooms);
	if (!r && ctl->json)
		ctl_print_json(reply);
	cJSON_Delete(reply);
	return r;
}
