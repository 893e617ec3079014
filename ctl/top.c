/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd-ctl top: successive frames. On a terminal each frame replaces the one before it,
 * and its tables are cut to the size of the terminal.
 *
 * If the daemon does not respond, the error is printed, and the query is repeated every
 * interval.
 */
#include "ctl/top.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "ctl/display.h"
#include "daemon/base/mem.h"

#define INTERVAL_MS 1000
#define INTERVAL_MIN_MS 100
#define FRAME_COLUMNS 110 /* of the head, without a terminal */
#define ROOMS_LIMIT 1000
/* ECMA-48: do not wrap lines, move to the first one, erase the rest; wrap lines again */
#define FRAME_BEGIN "\033[?7l\033[H\033[J"
#define FRAME_END "\033[?7h"

/* No limit without a terminal. */
static struct winsize frame_size(void)
{
	struct winsize size = {0};

	if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) < 0 || !size.ws_row)
		return (struct winsize){.ws_row = 0};
	return size;
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

static void tables_print(const struct top *top, const struct top_view *view)
{
	struct winsize size = frame_size();
	unsigned int used, left;
	char *head = top_head_text(top, view, size.ws_row ? size.ws_col : FRAME_COLUMNS);
	char *peers = top_peers_text(view);
	char *rooms = top_rooms_text(view, size.ws_col);

	if (size.ws_row)
		printf(FRAME_BEGIN);
	used = lines_print(head, 0) + 3 + /* two empty lines, and the cursor's */
	       (*top_now(top)->rooms_why != 0) + view->rooms_cut;
	left = size.ws_row > used + 6 ? size.ws_row - used : 6;
	printf("\n");
	left -= lines_print(peers, size.ws_row ? left / 3 : 0);
	printf("\n");
	lines_print(rooms, size.ws_row ? left : 0);
	if (*top_now(top)->rooms_why)
		printf("%s\n", top_now(top)->rooms_why);
	if (view->rooms_cut)
		printf("… and more (--limit N)\n");
	if (size.ws_row)
		printf(FRAME_END);
	free(head);
	free(peers);
	free(rooms);
}

static int frame_print(struct top *top)
{
	struct top_view view;
	cJSON *json;

	if (top_view_make(top, &view) < 0)
		return ctl_failed("out of memory");
	if (top->ctl->json) {
		json = top_view_json(top, &view);
		display_print_json(json, true, stdout);
		cJSON_Delete(json);
	} else {
		tables_print(top, &view);
	}
	top_view_free(&view);
	return fflush(stdout) == EOF ? CTL_ERROR : CTL_OK;
}

/* Rates need two samples, so the first frame is printed after one interval. */
static int frames_print(struct top *top, int interval_ms)
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

int ctl_run_top(struct ctl *ctl)
{
	double interval_ms = INTERVAL_MS;
	struct top *top;
	int r;

	if (ctl->interval &&
	    (!ctl_duration(ctl->interval, &interval_ms) || interval_ms < INTERVAL_MIN_MS))
		return ctl_usage("--interval: a duration of at least %d ms like 1s, not "
				 "'%s'",
				 INTERVAL_MIN_MS, ctl->interval);
	if (!ctl_open(ctl))
		return CTL_NO_DAEMON;
	top = mem_zalloc(sizeof(*top));
	if (!top)
		return ctl_failed("out of memory");
	top->ctl = ctl;
	top->limit = ctl->limit ? ctl->limit : ROOMS_LIMIT;
	r = frames_print(top, (int)interval_ms);
	top_fini(top);
	mem_free(top);
	return r;
}
