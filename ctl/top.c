/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd-ctl top: successive frames. On a terminal each frame replaces the one before it,
 * and its tables are cut to the size of the terminal.
 *
 * A frame shows a sample of the daemon, and rates since the sample before it. If the
 * daemon does not respond, the error is printed, and the query is repeated every
 * interval. A lost connection is reopened by ctl_connect(), which does not connect to the
 * socket of a stopped daemon, since that would start the daemon.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "ctl/table.h"
#include "daemon/base/clock.h"

#define INTERVAL_MS 1000
#define INTERVAL_MIN_MS 100
/* ECMA-48: do not wrap lines, move to the first one, erase the rest; wrap lines again */
#define FRAME_BEGIN "\033[?7l\033[H\033[J"
#define FRAME_END "\033[?7h"

struct sample {
	double at_s;
	double ok, failed, in, out, cpu_s; /* since the daemon's start */
	cJSON *health, *peers, *rooms;	   /* replies; no rooms: not permitted */
};

/* ---- a sample ---- */

static void sample_fini(struct sample *s)
{
	cJSON_Delete(s->health);
	cJSON_Delete(s->peers);
	cJSON_Delete(s->rooms);
	*s = (struct sample){0};
}

static void take_metric(const cJSON *metric, struct sample *s)
{
	const char *name = ctl_str(metric, "name", "");
	bool ended = strcmp(name, "rooms_ended_total") == 0;
	const cJSON *series;

	if (strcmp(name, "process_cpu_seconds_total") == 0)
		s->cpu_s = ctl_num(metric, "value");
	if (!ended && strcmp(name, "transferred_bytes_total") != 0)
		return;
	cJSON_ArrayForEach(series, ctl_list(metric, "series")) {
		bool ok = strcmp(ctl_str(series, "result", ""), "success") == 0;
		bool in = strcmp(ctl_str(series, "direction", ""), "in") == 0;

		*(ended ? ok ? &s->ok : &s->failed
		  : in	? &s->in
			: &s->out) += ctl_num(series, "value");
	}
}

/* Without permission for rooms the sample has none, and ctl->error is the reason. */
static int sample_take(struct ctl *ctl, struct sample *s)
{
	cJSON *stats = NULL, *args;
	const cJSON *metric;
	int r = ctl_query(ctl, "health", NULL, &s->health);

	if (!r)
		r = ctl_query(ctl, "stats", NULL, &stats);
	cJSON_ArrayForEach(metric, ctl_list(stats, "metrics"))
		take_metric(metric, s);
	cJSON_Delete(stats);
	s->at_s = clock_s();
	if (!r)
		r = ctl_query(ctl, "peer.list", NULL, &s->peers);
	if (r)
		return r;
	args = ctl_args_all();
	cJSON_AddTrueToObject(args, "live");
	r = ctl_query(ctl, "room.list", args, &s->rooms);
	return r == CTL_ERROR ? CTL_OK : r;
}

/* A counter that has fallen is of a daemon that was restarted. */
static double rate(const struct sample *a, const struct sample *b, double was, double is)
{
	return is > was && b->at_s > a->at_s ? (is - was) / (b->at_s - a->at_s) : 0;
}

/* ---- a frame ---- */

static const cJSON *peer_before(const struct sample *s, const cJSON *peer)
{
	const cJSON *one;

	cJSON_ArrayForEach(one, ctl_list(s->peers, "peers")) {
		if (strcmp(ctl_str(one, "instance", ""), ctl_str(peer, "instance", "")) ==
		    0)
			return one;
	}
	return NULL;
}

static void peer_row(struct table *table, const cJSON *peer, const struct sample *a,
		     const struct sample *b)
{
	static const char *const counters[] = {"bytes_in", "bytes_out"};
	const cJSON *was = peer_before(a, peer);

	table_cell(table, ctl_peer_name(peer));
	ctl_cells(table, peer, "state transport");
	table_cellf(table, "%.0f us", ctl_num(peer, "rtt_us"));
	for (unsigned int i = 0; i < 2; i++)
		table_cellf(table, "%s/s",
			    ctl_bytes(was ? rate(a, b, ctl_num(was, counters[i]),
						 ctl_num(peer, counters[i]))
					  : 0));
	ctl_cells(table, peer, "inflight_bytes:B rooms_failed");
	ctl_peer_error_cell(table, peer, "");
}

static char *table_text(struct table *table)
{
	char *text = NULL;
	size_t len;
	FILE *out = open_memstream(&text, &len);

	if (out) {
		table_print(table, out);
		fclose(out);
	}
	table_free(table);
	return text;
}

static char *peers_text(const struct sample *a, const struct sample *b)
{
	static const char *const members[] = {"peers", "lost"};
	struct table *table = table_new("NAME STATE TRANSPORT >RTT >IN >OUT >INFLIGHT "
					">FAILED LAST_ERROR");
	const cJSON *peer;

	for (unsigned int i = 0; i < 2; i++)
		cJSON_ArrayForEach(peer, ctl_list(b->peers, members[i]))
			peer_row(table, peer, a, b);
	return table_text(table);
}

static char *rooms_text(const struct sample *s)
{
	struct table *table = table_new("ROOM ROLE STATE >AGE >BYTES >EXPECTED ENGINE "
					"ERROR WAITS_FOR");
	const cJSON *room;

	cJSON_ArrayForEach(room, ctl_list(s->rooms, "rooms"))
		ctl_cells(table, room,
			  "room role state_name waits_for.since_ms:t bytes:B "
			  "expected_bytes:B engine error.code waits_for.what");
	return table_text(table);
}

/* At most `most` lines of a text, 0: all of them. Returns the number of lines. */
static unsigned int lines_print(const char *text, unsigned int most)
{
	unsigned int count = 0, printed = 0;

	for (const char *at = text; at && (at = strchr(at, '\n')); at++)
		count++;
	while (text && *text && (!most || count <= most || printed + 1 < most)) {
		size_t len = strcspn(text, "\n");

		printf("%.*s\n", (int)len, text);
		text += len + (text[len] == '\n');
		printed++;
	}
	if (printed < count)
		printf("… %u more\n", count - printed);
	return printed + (printed < count);
}

static void head_print(const struct sample *a, const struct sample *b)
{
	printf("%s   %s   %s   up %s   ok %.3g/s   failed %.3g/s   in %s/s   ",
	       ctl_str(b->health, "name", "?"), ctl_str(b->health, "daemon", "?"),
	       ctl_str(b->health, "state", "?"), ctl_ms(ctl_num(b->health, "uptime_ms")),
	       rate(a, b, a->ok, b->ok), rate(a, b, a->failed, b->failed),
	       ctl_bytes(rate(a, b, a->in, b->in)));
	printf("out %s/s   cpu %.0f %%   %s\n\n", ctl_bytes(rate(a, b, a->out, b->out)),
	       100 * rate(a, b, a->cpu_s, b->cpu_s), ctl_str(b->health, "why", ""));
}

static int frame_print(const struct ctl *ctl, const struct sample *a,
		       const struct sample *b)
{
	struct winsize size = {0}; /* no limit without a terminal */
	char *peers = peers_text(a, b), *rooms = rooms_text(b);
	bool whole = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) < 0 || !size.ws_row;
	unsigned int left = size.ws_row > 10 ? size.ws_row - 4 : 6; /* below the head */

	if (!whole)
		printf(FRAME_BEGIN);
	head_print(a, b);
	left -= lines_print(peers, whole ? 0 : left / 3);
	printf("\n");
	if (b->rooms)
		lines_print(rooms, whole ? 0 : left);
	else
		printf("rooms: %s: %s\n", kvd_code_name(ctl->error.code),
		       ctl->error.message);
	if (!whole)
		printf(FRAME_END);
	free(peers);
	free(rooms);
	return fflush(stdout) == EOF ? CTL_ERROR : CTL_OK;
}

/* ---- frames ---- */

/* The first frame is printed after one interval. */
static int frames_print(struct ctl *ctl, int interval_ms)
{
	struct sample before = {0}, now = {0};
	unsigned long shown = 0;
	int r = CTL_OK;

	while (r == CTL_OK && (!ctl->count || shown < ctl->count)) {
		if (sample_take(ctl, &now)) {
			fprintf(stderr, "kvd-ctl: no reply: %s: %s\n",
				kvd_code_name(ctl->error.code), ctl->error.message);
			ctl_disconnect(ctl); /* the daemon may return */
			sample_fini(&now);
		} else {
			if (before.health) {
				r = frame_print(ctl, &before, &now);
				shown++;
			}
			sample_fini(&before);
			before = now;
			now = (struct sample){0};
		}
		if (!ctl->count || shown < ctl->count)
			poll(NULL, 0, interval_ms);
	}
	sample_fini(&before);
	return r;
}

int ctl_run_top(struct ctl *ctl)
{
	double interval_ms = INTERVAL_MS;

	if (ctl->json)
		return ctl_usage("top: no --json; use it with stats, peers and rooms");
	if (ctl->interval &&
	    (!ctl_duration(ctl->interval, &interval_ms) || interval_ms < INTERVAL_MIN_MS))
		return ctl_usage("--interval: a duration of at least %d ms like 1s, not "
				 "'%s'",
				 INTERVAL_MIN_MS, ctl->interval);
	if (!ctl_open(ctl))
		return CTL_NO_DAEMON;
	return frames_print(ctl, (int)interval_ms);
}
