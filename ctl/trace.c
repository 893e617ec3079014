/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command trace. Each daemon reports its own rooms to its own administrators. kvd-ctl
 * therefore queries the daemons of this host that permit it, and reads the output of
 * kvd-ctl on another host (--join). Two rooms belong together if one names the other's
 * generation; generations are unique, so reused numbers are not confused.
 *
 * Clocks: daemons of one boot share a clock. Between two hosts every message is a bound:
 * it is received after it was sent. Messages in both directions bound the difference of
 * the clocks to an interval. Its midpoint is used, and half its width is the error.
 */

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ctl/ctl.h"
#include "ctl/table.h"
#include "ctl/display.h"
#include "daemon/base/mem.h"
#include "lib/kvd.h"

#define LOOK_MS 1000		    /* for another instance of this host */
#define FILE_MAX_BYTES (256u << 20) /* of --join */
#define SIDES_MAX 256u
/* Limit of a clock since boot, and of the difference of two hosts' clocks: 18 years. Sums
 * of several of them and a wall clock time fit into an int64_t. */
#define CLOCK_MAX_NS (INT64_C(1) << 59)
#define UNIX_MAX_NS (INT64_MAX / 2)

/* One daemon's reply. */
struct trace_side {
	const cJSON *reply;
	char name[64];
	/* added to its clock to get the first side's, and the error bound */
	int64_t shift_ns, error_ns;
	int64_t ahead_ns; /* wall clock minus its clock */
	char clock[96];	  /* how the shift was determined */
};

struct trace_step {
	int64_t at_ns; /* by the first side's clock, since the first opening */
	size_t order;  /* among steps with equal at_ns */
	unsigned int lane;
	const char *what;
	int party;     /* -1: none */
	bool is_chunk; /* then seq and bytes are set */
	uint64_t seq, bytes;
	uint64_t generation; /* of the party; 0: not known */
};

/* One room of one daemon; its steps are in trace.steps. */
struct trace_lane {
	const cJSON *room;
	struct trace_side *side;
	uint64_t generation;
	int64_t opened_ns; /* on the side's own clock until align() */
	bool shown;	   /* part of the requested room */
};

struct trace {
	const char *number;
	struct trace_side *sides;
	struct trace_lane *lanes;
	struct trace_step *steps; /* in order of time */
	unsigned int side_count, lane_count;
	size_t step_count;
	char bad[160]; /* the first invalid number; "" */
};

/* ---- queries ---- */

static cJSON *trace_args(const struct ctl *ctl)
{
	cJSON *args = ctl_args_all();

	cJSON_AddStringToObject(args, "room", ctl->args[0]);
	if (ctl->trace.pages)
		cJSON_AddTrueToObject(args, "pages");
	return args;
}

/* Requests of peers for a room of that number that no engine has opened. */
static cJSON *unopened_args(const struct ctl *ctl)
{
	cJSON *args = ctl_args_all();

	cJSON_AddStringToObject(args, "room", ctl->args[0]);
	cJSON_AddStringToObject(args, "state", "unopened");
	return args;
}

static bool is_known(const cJSON *sides, const char *instance)
{
	const cJSON *side;

	cJSON_ArrayForEach(side, sides) {
		if (!strcmp(ctl_str(side, "instance", ""), instance))
			return true;
	}
	return false;
}

/* Adds the wall clock time of clock_ns, for sides that share no other clock. Takes
 * ownership of `unopened`, a reply to unopened_args() or NULL. */
static void side_add(cJSON *sides, cJSON *reply, cJSON *unopened)
{
	struct timespec now;
	char text[24];

	clock_gettime(CLOCK_REALTIME, &now);
	snprintf(text, sizeof(text), "%lld%09ld", (long long)now.tv_sec, now.tv_nsec);
	cJSON_AddStringToObject(reply, "unix_ns", text);
	cJSON_DeleteItemFromObjectCaseSensitive(reply, "id");
	cJSON_DeleteItemFromObjectCaseSensitive(reply, "ok");
	cJSON_AddItemToObject(reply, "unopened",
			      cJSON_DetachItemFromObjectCaseSensitive(unopened, "rooms"));
	cJSON_Delete(unopened);
	cJSON_AddItemToArray(sides, reply);
}

/* Takes ownership of args. NULL after printing the error. */
static cJSON *ask_client(struct kvd_client *client, const char *socket, const char *cmd,
			 cJSON *args)
{
	cJSON *reply;
	int r = ctl_command(client, cmd, args, 0, &reply);

	cJSON_Delete(args);
	if (!r)
		return reply;
	fprintf(stderr, "kvd-ctl: %s: not queried: %s\n", socket,
		kvd_last_error(client)->message);
	cJSON_Delete(reply);
	return NULL;
}

/* Queries another instance of this host, if permitted. */
static void ask_instance(const struct ctl *ctl, const char *socket, cJSON *sides)
{
	const struct kvd_options o = {
		.client = "kvd-ctl", .timeout_ms = LOOK_MS, .socket = socket};
	struct kvd_client *client = NULL;
	cJSON *reply = NULL;

	if (!ctl_instance_runs(socket))
		return;
	if (kvd_open(&o, &client)) {
		fprintf(stderr, "kvd-ctl: %s: not queried: %s\n", socket,
			kvd_last_error(NULL)->message);
		return;
	}
	if (!is_known(sides, kvd_daemon(client)->instance))
		reply = ask_client(client, socket, "room.trace", trace_args(ctl));
	if (reply)
		side_add(sides, reply,
			 ask_client(client, socket, "room.list", unopened_args(ctl)));
	kvd_close(client);
}

static void ask_instances(const struct ctl *ctl, cJSON *sides)
{
	struct dirent **names = NULL;
	int count = ctl_instances(&names);
	char path[512];

	for (int i = 0; i < count && i < (int)SIDES_MAX; i++) {
		snprintf(path, sizeof(path), "%s/%s", ctl_run_dir(), names[i]->d_name);
		ask_instance(ctl, path, sides);
	}
	ctl_instances_free(names, count > 0 ? count : 0);
}

/* Reads the output of `kvd-ctl --json trace` of another host. */
static int join_file(const char *path, cJSON *sides)
{
	size_t len;
	char *text = ctl_read_file(path, FILE_MAX_BYTES, &len);
	cJSON *root, *theirs, *item;

	if (!text)
		return ctl_failed("%s: %s", path, strerror(errno));
	root = cJSON_Parse(text);
	free(text);
	theirs = cJSON_GetObjectItemCaseSensitive(root, "sides");
	if (!cJSON_IsArray(theirs)) {
		cJSON_Delete(root);
		return ctl_failed("%s: not output of kvd-ctl --json trace", path);
	}
	while ((item = cJSON_DetachItemFromArray(theirs, 0))) {
		if (is_known(sides, ctl_str(item, "instance", "")))
			cJSON_Delete(item);
		else
			cJSON_AddItemToArray(sides, item);
	}
	cJSON_Delete(root);
	return CTL_OK;
}

/* ---- replies as structs ---- */

/* A number or a string of digits; 0: absent, or invalid and recorded in t->bad. */
static uint64_t figure(struct trace *t, const cJSON *obj, const char *name, uint64_t most)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(obj, name);
	uint64_t value = 0;
	bool ok = false;

	if (!item)
		return 0;
	if (cJSON_IsString(item)) {
		const char *text = item->valuestring;

		errno = 0;
		value = strtoull(text, NULL, 10);
		ok = !errno && *text && strspn(text, "0123456789") == strlen(text);
	} else if (cJSON_IsNumber(item)) {
		ok = item->valuedouble >= 0 && item->valuedouble < 0x1p63;
		value = ok ? (uint64_t)item->valuedouble : 0;
	}
	if (ok && value <= most)
		return value;
	if (!*t->bad)
		snprintf(t->bad, sizeof(t->bad), "%s is not an integer of 0 to %llu",
			 name, (unsigned long long)most);
	return 0;
}

static size_t steps_of(const cJSON *sides)
{
	const cJSON *side, *room;
	size_t n = 0;

	cJSON_ArrayForEach(side, sides) {
		cJSON_ArrayForEach(room, ctl_list(side, "rooms"))
			n += (size_t)cJSON_GetArraySize(ctl_list(room, "events")) + 2;
	}
	return n;
}

static unsigned int rooms_of(const cJSON *sides)
{
	const cJSON *side;
	unsigned int n = 0;

	cJSON_ArrayForEach(side, sides)
		n += (unsigned int)cJSON_GetArraySize(ctl_list(side, "rooms"));
	return n;
}

static struct trace_step *step_add(struct trace *t, unsigned int lane, int64_t at_ns,
				   const char *what)
{
	struct trace_step *step = &t->steps[t->step_count++];

	*step = (struct trace_step){
		.at_ns = at_ns, .lane = lane, .what = what, .party = -1};
	return step;
}

/* Times are on the side's own clock until align(). */
static void lane_fill(struct trace *t, unsigned int number)
{
	struct trace_lane *lane = &t->lanes[number];
	const cJSON *event;
	int64_t now_ns;

	lane->generation = figure(t, lane->room, "generation", UINT64_MAX);
	lane->opened_ns = (int64_t)figure(t, lane->room, "opened_ns", CLOCK_MAX_NS);
	now_ns = (int64_t)figure(t, lane->room, "now_ns", CLOCK_MAX_NS);
	if (now_ns) /* it has not ended */
		step_add(t, number, lane->opened_ns + now_ns, "now");
	cJSON_ArrayForEach(event, ctl_list(lane->room, "events")) {
		int64_t at_ns = (int64_t)figure(t, event, "ns", CLOCK_MAX_NS);
		struct trace_step *step = step_add(t, number, lane->opened_ns + at_ns,
						   ctl_str(event, "what", "?"));

		step->is_chunk = strncmp(step->what, "chunk_", 6) == 0;
		if (cJSON_GetObjectItemCaseSensitive(event, "party"))
			step->party = (int)figure(t, event, "party", INT32_MAX);
		step->seq = figure(t, event, "seq", UINT64_MAX);
		step->bytes = figure(t, event, "bytes", UINT64_MAX);
		step->generation = figure(t, event, "generation", UINT64_MAX);
	}
	step_add(t, number, lane->opened_ns, "opened");
}

/* The wall clock may have any value, but the difference between sides is bounded. */
static void side_fill(struct trace *t, struct trace_side *side)
{
	int64_t unix_ns = (int64_t)figure(t, side->reply, "unix_ns", UNIX_MAX_NS);
	int64_t clock_ns = (int64_t)figure(t, side->reply, "clock_ns", CLOCK_MAX_NS);
	int64_t apart_ns;

	snprintf(side->name, sizeof(side->name), "%s", ctl_str(side->reply, "name", "?"));
	side->ahead_ns = unix_ns - clock_ns;
	apart_ns = side->ahead_ns - t->sides->ahead_ns;
	if (!*t->bad && (apart_ns > CLOCK_MAX_NS || apart_ns < -CLOCK_MAX_NS))
		snprintf(t->bad, sizeof(t->bad),
			 "unix_ns is over 18 years from that of %s", t->sides->name);
}

/* -EINVAL: the last side has t->bad. */
static int trace_fill(struct trace *t, const cJSON *sides)
{
	const cJSON *reply, *room;

	t->sides = calloc((size_t)cJSON_GetArraySize(sides) + 1, sizeof(*t->sides));
	t->lanes = calloc(rooms_of(sides) + 1, sizeof(*t->lanes));
	t->steps = calloc(steps_of(sides) + 1, sizeof(*t->steps));
	if (!t->sides || !t->lanes || !t->steps)
		return -ENOMEM;
	cJSON_ArrayForEach(reply, sides) {
		struct trace_side *side = &t->sides[t->side_count++];

		side->reply = reply;
		side_fill(t, side);
		cJSON_ArrayForEach(room, ctl_list(reply, "rooms")) {
			t->lanes[t->lane_count].room = room;
			t->lanes[t->lane_count].side = side;
			lane_fill(t, t->lane_count++);
		}
		if (*t->bad)
			return -EINVAL;
	}
	return 0;
}

/* ---- which rooms belong together ---- */

static bool lane_names(const struct trace *t, unsigned int lane, uint64_t generation)
{
	const cJSON *peer;

	if (!generation)
		return false;
	cJSON_ArrayForEach(peer, ctl_list(t->lanes[lane].room, "peers")) {
		if (strtoull(ctl_str(peer, "generation", "0"), NULL, 10) == generation)
			return true;
	}
	for (size_t i = 0; i < t->step_count; i++) {
		if (t->steps[i].lane == lane && t->steps[i].generation == generation)
			return true;
	}
	return false;
}

/* Selects the first room of the queried daemon, and the rooms that belong to it. */
static bool choose(struct trace *t, const char *role)
{
	unsigned int first = 0;
	bool more = true;

	while (first < t->lane_count && t->lanes[first].side == t->sides && role &&
	       strcmp(ctl_str(t->lanes[first].room, "role", ""), role) != 0)
		first++;
	if (first == t->lane_count || t->lanes[first].side != t->sides)
		return false;
	t->lanes[first].shown = true;
	while (more) {
		more = false;
		for (unsigned int a = 0; a < t->lane_count; a++) {
			for (unsigned int b = 0; b < t->lane_count; b++) {
				if (!t->lanes[a].shown || t->lanes[b].shown ||
				    !(lane_names(t, a, t->lanes[b].generation) ||
				      lane_names(t, b, t->lanes[a].generation)))
					continue;
				t->lanes[b].shown = more = true;
			}
		}
	}
	return true;
}

/* ---- one clock ---- */

/* The party number of lane `b` in lane `a`; -1: not known. */
static int party_of(const struct trace *t, unsigned int a, unsigned int b)
{
	int most = -1;

	for (size_t i = 0; i < t->step_count; i++) {
		const struct trace_step *step = &t->steps[i];

		if (step->lane != a || step->party < 0)
			continue;
		if (step->generation && step->generation == t->lanes[b].generation)
			return step->party;
		most = step->party > most ? step->party : most;
	}
	return most == 0 ? 0 : -1;
}

/* The first chunk of a kind of step is as good a bound of the clocks as any other. */
static const struct trace_step *step_find(const struct trace *t, unsigned int lane,
					  const char *what, int party)
{
	const struct trace_step *found = NULL;

	for (size_t i = 0; i < t->step_count; i++) {
		const struct trace_step *step = &t->steps[i];

		if (step->lane == lane && step->party == party && step->seq == 0 &&
		    strcmp(step->what, what) == 0 &&
		    (!found || step->at_ns < found->at_ns))
			found = step;
	}
	return found;
}

struct bounds {
	int64_t least, most; /* of the shift */
	unsigned int out, in;
};

/* Bounds by messages that `from` sent and `to` received. `back`: `to` is on the first
 * side. */
static void bound_by(const struct trace *t, unsigned int from, unsigned int to, bool back,
		     struct bounds *bounds)
{
	static const char *const pairs[][2] = {
		{"info_sent", "info_received"},	   {"ack_sent", "ack_received"},
		{"done_sent", "done_received"},	   {"abort_sent", "abort_received"},
		{"chunk_posted", "chunk_arrived"}, {"lease_confirmed", "lease_answered"},
	};
	int there = party_of(t, from, to), here = party_of(t, to, from);

	for (size_t p = 0; p < ARRAY_LEN(pairs) && there >= 0 && here >= 0; p++) {
		const struct trace_step *sent = step_find(t, from, pairs[p][0], there);
		const struct trace_step *got = step_find(t, to, pairs[p][1], here);
		int64_t d = sent && got ? sent->at_ns - got->at_ns : 0;

		if (!sent || !got)
			continue;
		if (back && -d < bounds->most)
			bounds->most = -d;
		else if (!back && d > bounds->least)
			bounds->least = d;
		*(back ? &bounds->in : &bounds->out) += 1;
	}
}

static void side_align(struct trace *t, struct trace_side *side)
{
	struct bounds b = {.least = INT64_MIN / 4, .most = INT64_MAX / 4};
	bool one_boot = !strcmp(ctl_str(t->sides->reply, "boot_id", ""),
				ctl_str(side->reply, "boot_id", "-"));

	for (unsigned int i = 0; i < t->lane_count; i++) {
		for (unsigned int j = 0; j < t->lane_count; j++) {
			if (!t->lanes[i].shown || t->lanes[i].side != t->sides ||
			    !t->lanes[j].shown || t->lanes[j].side != side)
				continue;
			bound_by(t, i, j, false, &b);
			bound_by(t, j, i, true, &b);
		}
	}
	if (one_boot && b.least <= 0 && b.most >= 0) {
		snprintf(side->clock, sizeof(side->clock), "the same");
	} else if (b.out && b.in && b.least <= b.most) {
		side->shift_ns = b.least + (b.most - b.least) / 2;
		side->error_ns = (b.most - b.least) / 2;
		snprintf(side->clock, sizeof(side->clock),
			 "aligned to within %.3f ms, by %u messages",
			 (double)side->error_ns / 1e6, b.out + b.in);
	} else {
		side->shift_ns = side->ahead_ns - t->sides->ahead_ns;
		snprintf(side->clock, sizeof(side->clock),
			 "by the hosts' wall clocks: too few messages");
	}
}

static int by_time(const void *a, const void *b)
{
	const struct trace_step *x = a, *y = b;

	if (x->at_ns != y->at_ns)
		return x->at_ns < y->at_ns ? -1 : 1;
	return x->order < y->order ? -1 : 1;
}

/* Daemons report the steps of a lane latest first. */
static void steps_reverse(struct trace *t)
{
	for (size_t i = 0, j = t->step_count; i + 1 < j; i++) {
		struct trace_step step = t->steps[i];

		t->steps[i] = t->steps[--j];
		t->steps[j] = step;
	}
}

static void align(struct trace *t)
{
	int64_t zero = INT64_MAX;
	size_t kept = 0;

	snprintf(t->sides->clock, sizeof(t->sides->clock), "reference");
	for (unsigned int s = 1; s < t->side_count; s++)
		side_align(t, &t->sides[s]);
	for (unsigned int i = 0; i < t->lane_count; i++) {
		struct trace_lane *lane = &t->lanes[i];

		lane->opened_ns += lane->side->shift_ns;
		if (lane->shown && lane->opened_ns < zero)
			zero = lane->opened_ns;
	}
	steps_reverse(t);
	for (size_t i = 0; i < t->step_count; i++) {
		struct trace_step step = t->steps[i];

		if (!t->lanes[step.lane].shown)
			continue;
		step.at_ns += t->lanes[step.lane].side->shift_ns - zero;
		step.order = kept;
		t->steps[kept++] = step;
	}
	t->step_count = kept;
	qsort(t->steps, t->step_count, sizeof(*t->steps), by_time);
}

/* ---- text ---- */

static int print_lanes(const struct trace *t)
{
	struct table *table = table_new(
		"DAEMON ROLE STATE ENGINE POOL LAYOUT >BYTES REQUEST TRACEPARENT "
		"CLOCK ERROR/WAITS_FOR");

	for (unsigned int i = 0; i < t->lane_count; i++) {
		const struct trace_lane *lane = &t->lanes[i];
		const cJSON *room = lane->room, *error = ctl_list(room, "error"),
			    *waits = ctl_list(room, "waits_for");

		if (!lane->shown)
			continue;
		table_cell(table, lane->side->name);
		ctl_cells(table, room,
			  "role state_name engine pool_name layout bytes:B request_id "
			  "traceparent");
		table_cell(table, lane->side->clock);
		table_cellf(table, "%s%s%s", ctl_str(error, "code", ""),
			    error ? ": " : "",
			    error ? ctl_str(error, "message", "")
				  : ctl_str(waits, "what", ""));
	}
	return ctl_print_table(table);
}

static void runs_cell(struct table *table, const cJSON *view)
{
	char text[4096] = "";
	const cJSON *run;
	size_t n = 0;

	cJSON_ArrayForEach(run, ctl_list(view, "runs")) {
		double first = cJSON_GetNumberValue(cJSON_GetArrayItem(run, 0));
		double count = cJSON_GetNumberValue(cJSON_GetArrayItem(run, 1));

		if (n > sizeof(text) - 64)
			break;
		n += (size_t)snprintf(text + n, sizeof(text) - n,
				      count > 1 ? "%s%.0f-%.0f" : "%s%.0f", n ? "," : "",
				      first, first + count - 1);
	}
	table_cellf(table, "%s%s", text,
		    run || ctl_true(view, "runs_cut") ? ",… (--json)" : "");
}

static void range_cell(struct table *table, const cJSON *range)
{
	if (cJSON_GetArraySize(range) == 2)
		table_cellf(table, "%.0f-%.0f",
			    cJSON_GetNumberValue(cJSON_GetArrayItem(range, 0)),
			    cJSON_GetNumberValue(cJSON_GetArrayItem(range, 1)));
	else
		table_cell(table, "all");
}

/* Views of open rooms; for ended rooms only the number of tokens is kept. */
static int print_views(const struct trace *t, bool pages)
{
	struct table *table =
		table_new(pages ? "DAEMON ROLE VIEW RECEIVER TOKENS LAYERS >PAGES WHICH"
				: "DAEMON ROLE VIEW RECEIVER TOKENS LAYERS >PAGES");
	bool any = false;

	for (unsigned int i = 0; i < t->lane_count; i++) {
		const struct trace_lane *lane = &t->lanes[i];
		const cJSON *view;

		if (!lane->shown)
			continue;
		cJSON_ArrayForEach(view, ctl_list(lane->room, "views")) {
			any = true;
			table_cell(table, lane->side->name);
			table_cell(table, ctl_str(lane->room, "role", NULL));
			table_cell(table, ctl_str(view, "view", NULL));
			if (cJSON_GetObjectItemCaseSensitive(view, "party"))
				table_cellf(table, "%.0f", ctl_num(view, "party"));
			else
				table_cell(table, "");
			range_cell(table, ctl_list(view, "tokens"));
			range_cell(table, ctl_list(view, "layers"));
			table_cellf(table, "%.0f", ctl_num(view, "pages"));
			if (pages)
				runs_cell(table, view);
		}
	}
	if (any) {
		putchar('\n');
		return ctl_print_table(table);
	}
	table_free(table);
	return CTL_OK;
}

/* The step after the longest gap; 0: no gap. */
static size_t longest_gap(const struct trace *t)
{
	size_t longest = 0;

	for (size_t i = 1; i < t->step_count; i++) {
		int64_t gap = t->steps[i].at_ns - t->steps[i - 1].at_ns;

		if (gap >
		    (longest ? t->steps[longest].at_ns - t->steps[longest - 1].at_ns : 0))
			longest = i;
	}
	return longest;
}

static void step_row(struct table *table, const struct trace *t, size_t i, size_t gap)
{
	const struct trace_step *step = &t->steps[i];
	const struct trace_lane *lane = &t->lanes[step->lane];
	char what[64];

	snprintf(what, sizeof(what), "%.60s", step->what);
	for (char *c = what; *c; c++)
		*c = *c == '_' ? ' ' : *c;
	table_cellf(table, "%.3f", (double)step->at_ns / 1e6);
	table_cellf(table, "%.3f",
		    i ? (double)(step->at_ns - t->steps[i - 1].at_ns) / 1e6 : 0.0);
	table_cell(table, i && i == gap ? "longest" : "");
	table_cell(table, lane->side->name);
	table_cell(table, ctl_str(lane->room, "role", NULL));
	table_cell(table, what);
	if (step->party >= 0)
		table_cellf(table, "%d", step->party);
	else
		table_cell(table, "");
	if (step->is_chunk) {
		table_cellf(table, "%llu", (unsigned long long)step->seq);
		table_cell(table, step->bytes ? ctl_bytes((double)step->bytes) : "");
	} else {
		table_cell(table, "");
		table_cell(table, "");
	}
}

static int print_steps(const struct trace *t)
{
	size_t gap = longest_gap(t);
	struct table *table =
		table_new(">MS >+MS GAP DAEMON ROLE EVENT >PARTY >CHUNK >BYTES");

	for (size_t i = 0; i < t->step_count; i++)
		step_row(table, t, i, gap);
	return ctl_print_table(table);
}

/* The other side's daemon is known, but no engine has opened the room there. */
static bool print_unopened(const struct trace *t)
{
	const char *instance = ctl_str(t->sides->reply, "instance", "?");
	const cJSON *asked, *peers;
	bool any = false;

	for (unsigned int s = 1; s < t->side_count; s++) {
		cJSON_ArrayForEach(asked, ctl_list(t->sides[s].reply, "unopened")) {
			peers = ctl_list(asked, "peers");
			if (!cJSON_IsArray(peers) || !peers->child ||
			    strcmp(ctl_str(peers->child, "instance", ""), instance) != 0)
				continue;
			any = true;
			printf("\nThe other side, %s, is unopened: it waits for %s.\n",
			       t->sides[s].name,
			       ctl_str(ctl_list(asked, "waits_for"), "what", "?"));
		}
	}
	return any;
}

/* Reports missing parts and how to obtain them. */
static void print_missing(const struct trace *t)
{
	unsigned int shown = 0, others = 0;

	for (unsigned int i = 0; i < t->lane_count; i++) {
		const struct trace_lane *lane = &t->lanes[i];

		shown += lane->shown;
		others += !lane->shown && lane->side == t->sides;
		if (!lane->shown)
			continue;
		if (ctl_true(lane->room, "forgotten"))
			printf("\n%s: the first events were overwritten by newer "
			       "ones\n",
			       ctl_str(lane->room, "role", "?"));
		if (ctl_num(lane->room, "left_out") > 0)
			printf("\n%s: %s omitted\n", ctl_str(lane->room, "role", "?"),
			       ctl_count(ctl_num(lane->room, "left_out"), "event"));
		if (ctl_true(lane->room, "views_cut"))
			printf("\n%s: more views or receivers were omitted\n",
			       ctl_str(lane->room, "role", "?"));
	}
	if (shown == 1 && !print_unopened(t))
		printf("\nThe other side's events are missing. On its host run kvd-ctl "
		       "--json trace %s > FILE, then pass --join FILE here.\n",
		       t->number);
	if (others)
		printf("\n%s of this number: use --role or --json.\n",
		       ctl_count(others, "more room"));
}

static int print_trace(const struct trace *t, bool pages)
{
	int r = print_lanes(t);

	if (!r)
		r = print_views(t, pages);
	if (!r) {
		putchar('\n');
		r = print_steps(t);
	}
	if (!r)
		print_missing(t);
	return r;
}

/* ---- the command ---- */

/* What an unopened room of the queried daemon waits for; NULL: none. */
static const char *unopened_here(const struct trace *t, const char *role)
{
	const cJSON *asked;

	if (!t->side_count)
		return NULL;
	cJSON_ArrayForEach(asked, ctl_list(t->sides->reply, "unopened")) {
		if (!role || strcmp(ctl_str(asked, "role", ""), role) == 0)
			return ctl_str(ctl_list(asked, "waits_for"), "what", "?");
	}
	return NULL;
}

static int show(const struct ctl *ctl, const cJSON *result)
{
	const cJSON *sides = ctl_list(result, "sides");
	struct trace t = {.number = ctl->args[0]};
	int filled = trace_fill(&t, sides), r = CTL_OK;
	bool chosen = filled == 0 && choose(&t, ctl->role);
	const char *wanted = filled == 0 && !chosen ? unopened_here(&t, ctl->role) : NULL;

	if (filled == -EINVAL)
		r = ctl_failed("trace of %s: %s; create it again with kvd-ctl --json "
			       "trace",
			       t.sides[t.side_count - 1].name, t.bad);
	else if (filled < 0)
		r = ctl_failed("out of memory");
	else if (wanted)
		r = ctl_failed("room %s: unopened: it waits for %s", t.number, wanted);
	else if (!chosen)
		r = ctl_failed("room %s: not open here, and no room of this number%s%s "
			       "is among the last that ended",
			       t.number, ctl->role ? " and role " : "",
			       ctl->role ? ctl->role : "");
	if (!r) {
		align(&t);
		if (ctl->json)
			ctl_print_json(result);
		else
			r = print_trace(&t, ctl->trace.pages);
	}
	free(t.sides);
	free(t.lanes);
	free(t.steps);
	return r;
}

/* Replies about the rooms of a number, from all accessible daemons and --join:
 * {"sides": […]}, owned by the caller in any case. */
static int gather(struct ctl *ctl, cJSON **result_p)
{
	cJSON *result = cJSON_CreateObject();
	cJSON *sides = cJSON_AddArrayToObject(result, "sides"), *reply, *unopened = NULL;
	int r = ctl_ask(ctl, "room.trace", trace_args(ctl), &reply);

	if (!r) {
		ctl_query(ctl, "room.list", unopened_args(ctl), &unopened);
		side_add(sides, reply, unopened);
		ask_instances(ctl, sides);
	}
	if (!r && ctl->trace.join)
		r = join_file(ctl->trace.join, sides);
	if (!r && !ctl->json)
		display_sanitize_json(
			sides); /* also text of other daemons and of a file */
	*result_p = result;
	return r;
}

int ctl_run_trace(struct ctl *ctl)
{
	cJSON *result = NULL;
	int r = gather(ctl, &result);

	if (!r)
		r = show(ctl, result);
	cJSON_Delete(result);
	return r;
}
