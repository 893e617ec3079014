/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd-ctl top: on a terminal a screen that is redrawn after each sample and key; with
 * --batch or --json, successive frames.
 *
 * If the daemon does not respond, the last line shows the error, the last sample stays on
 * the screen, and the query is repeated every interval.
 */
#include "ctl/top.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/term.h"
#include "ctl/display.h"
#include "daemon/base/clock.h"
#include "daemon/base/mem.h"

#define INTERVAL_MS 1000
#define INTERVAL_MIN_MS 100
#define ANSWER_MS 2000 /* limits the time for which a hung daemon blocks the keys */
#define LINES_MAX 512u
#define FRAME_COLUMNS 110
#define ROOMS_LIMIT 1000
#define KEYS "q quit   p peers   r rooms   f failed"

struct screen {
	struct top top;
	struct top_view view;
	bool peers, rooms; /* shown */
	struct term_line lines[LINES_MAX];
	size_t line_count;
	char *texts[3]; /* the lines point into them */
	char more[2][40];
};

/* ---- successive frames ---- */

static int frame_print(struct top *top)
{
	struct top_view view;
	char *head, *peers, *rooms;
	cJSON *json;

	if (top_view_make(top, &view) < 0)
		return ctl_failed("out of memory");
	if (top->ctl->json) {
		json = top_view_json(top, &view);
		display_print_json(json, true, stdout);
		cJSON_Delete(json);
	} else {
		head = top_head_text(top, &view, FRAME_COLUMNS);
		peers = top_peers_text(&view);
		rooms = top_rooms_text(top, &view, 0);
		printf("%s\n%s\n%s%s%s%s\n", head ? head : "", peers ? peers : "",
		       rooms ? rooms : "", top_now(top)->rooms_why,
		       *top_now(top)->rooms_why ? "\n" : "",
		       view.rooms_cut ? "… and more (--limit N)\n" : "");
		free(head);
		free(peers);
		free(rooms);
	}
	top_view_free(&view);
	return fflush(stdout) == EOF ? CTL_ERROR : CTL_OK;
}

/* Rates need two samples, so the first frame is printed after one interval. */
static int run_batch(struct top *top, int interval_ms)
{
	unsigned long shown = 0;
	int r = CTL_OK;

	top_look(top);
	while (r == CTL_OK && (!top->ctl->count || shown < top->ctl->count)) {
		poll(NULL, 0, interval_ms);
		r = top_look(top);
		if (r == CTL_OK && top->count > 1) {
			r = frame_print(top);
			shown++;
		} else if (r) {
			fprintf(stderr, "kvd-ctl: no reply: %s\n", top->why);
			r = CTL_OK; /* the daemon may return */
		}
	}
	return r;
}

/* ---- the screen ---- */

static void screen_line(struct screen *s, const char *text, enum term_look look)
{
	if (s->line_count < LINES_MAX)
		s->lines[s->line_count++] = (struct term_line){text, look};
}

/* Adds at most `most` lines of a text; more[] counts the omitted ones. */
static void screen_lines(struct screen *s, char *text, size_t most, char more[40],
			 enum term_look (*look)(const struct screen *s, size_t line))
{
	size_t n = 0;

	for (char *line; text && (line = strsep(&text, "\n")) && (*line || text); n++)
		if (n < most)
			screen_line(s, line, look(s, n));
	if (!more || n <= most || most < 2)
		return;
	snprintf(more, 40, "… %zu more", n - most + 1);
	s->lines[s->line_count - 1] = (struct term_line){more, TERM_PLAIN};
}

static enum term_look look_head(const struct screen *s, size_t line)
{
	(void)line;
	return *s->top.why ? TERM_BAD : TERM_PLAIN;
}

static enum term_look look_peer(const struct screen *s, size_t line)
{
	if (line == 0)
		return TERM_HEAD;
	return strcmp(s->view.peers[line - 1].state, "up") ? TERM_BAD : TERM_PLAIN;
}

static enum term_look look_room(const struct screen *s, size_t line)
{
	if (line == 0)
		return TERM_HEAD;
	return ctl_list(s->view.rooms[line - 1].json, "error") ? TERM_BAD : TERM_PLAIN;
}

static void screen_tables(struct screen *s, unsigned int rows, unsigned int columns)
{
	size_t left, peers;

	if (top_view_make(&s->top, &s->view) < 0)
		return;
	s->texts[0] = top_head_text(&s->top, &s->view, columns);
	screen_lines(s, s->texts[0], rows, NULL, look_head);
	screen_line(s, "", TERM_PLAIN);
	left = rows > s->line_count + 1 ? rows - s->line_count - 1 : 0;
	peers = s->rooms ? left / 3 : left;
	if (s->peers) {
		s->texts[1] = top_peers_text(&s->view);
		screen_lines(s, s->texts[1], peers > 2 ? peers : 2, s->more[0],
			     look_peer);
		screen_line(s, "", TERM_PLAIN);
	}
	left = rows > s->line_count + 1 ? rows - s->line_count - 1 : 0;
	if (!s->rooms)
		return;
	s->texts[2] = top_rooms_text(&s->top, &s->view, columns);
	screen_lines(s, s->texts[2], left, s->more[1], look_room);
	if (*top_now(&s->top)->rooms_why)
		screen_line(s, top_now(&s->top)->rooms_why, TERM_BAD);
}

static void screen_draw(struct screen *s)
{
	unsigned int rows, columns;
	char last[512];

	term_size(&rows, &columns);
	s->line_count = 0;
	if (top_now(&s->top))
		screen_tables(s, rows, columns);
	if (s->line_count > rows - 1)
		s->line_count = rows - 1;
	while (s->line_count < rows - 1 && s->line_count < LINES_MAX - 1)
		screen_line(s, "", TERM_PLAIN);
	if (*s->top.why)
		snprintf(last, sizeof(last), "no reply, retrying: %s", s->top.why);
	else
		snprintf(last, sizeof(last), "%s%s", KEYS,
			 s->top.failed ? "   [failed]" : "");
	screen_line(s, last, *s->top.why ? TERM_BAD : TERM_PLAIN);
	term_draw(s->lines, s->line_count);
	for (unsigned int i = 0; i < ARRAY_LEN(s->texts); i++) {
		free(s->texts[i]);
		s->texts[i] = NULL;
	}
	top_view_free(&s->view);
}

/* ---- keys ---- */

/* True: take a new sample at once. */
static bool screen_key(struct screen *s, int key)
{
	switch (key) {
	case 'p':
		s->rooms = !s->rooms && s->peers;
		s->peers = true;
		return false;
	case 'r':
		s->peers = !s->peers && s->rooms;
		s->rooms = true;
		return false;
	case 'f':
		s->top.failed = !s->top.failed;
		return true;
	default:
		return false;
	}
}

static int run_screen(struct screen *s, int interval_ms)
{
	uint64_t interval_ns = (uint64_t)interval_ms * 1000000, next_ns = 0, now_ns;
	int r = term_open(), key;

	if (r < 0)
		return ctl_failed("terminal: %s", strerror(-r));
	for (;;) {
		now_ns = clock_ns();
		if (now_ns >= next_ns) {
			top_look(&s->top);
			next_ns = clock_ns() + interval_ns;
		}
		screen_draw(s);
		now_ns = clock_ns();
		key = term_key(next_ns > now_ns ? (int)((next_ns - now_ns) / 1000000) + 1
						: 0);
		if (key == TERM_KEY_END || key == 'q')
			break;
		if (key >= 0 && screen_key(s, key))
			next_ns = 0;
	}
	term_close();
	return CTL_OK;
}

int ctl_run_top(struct ctl *ctl)
{
	bool frames = ctl->batch || ctl->json;
	double interval_ms = INTERVAL_MS;
	struct screen *s;
	int r;

	if (ctl->interval &&
	    (!ctl_duration(ctl->interval, &interval_ms) || interval_ms < INTERVAL_MIN_MS))
		return ctl_usage("--interval: a duration of at least %d ms like 1s, not "
				 "'%s'",
				 INTERVAL_MIN_MS, ctl->interval);
	if (!frames && (ctl->count || ctl->limit))
		return ctl_usage("top: --count and --limit require --batch or --json");
	if (!frames && !term_usable())
		return ctl_usage("top: not a terminal: use --batch or --json");
	if (!frames && ctl->timeout_ms > ANSWER_MS)
		ctl->timeout_ms = ANSWER_MS;
	if (!ctl_open(ctl))
		return CTL_NO_DAEMON;
	s = mem_zalloc(sizeof(*s));
	if (!s)
		return ctl_failed("out of memory");
	s->peers = s->rooms = true;
	s->top.ctl = ctl;
	s->top.limit = ctl->limit ? ctl->limit : ROOMS_LIMIT;
	r = frames ? run_batch(&s->top, (int)interval_ms)
		   : run_screen(s, (int)interval_ms);
	top_fini(&s->top);
	mem_free(s);
	return r;
}
