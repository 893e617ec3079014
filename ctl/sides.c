/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups with their loads. A file has a line for each look:
 *
 *   {"at": SECONDS, "groups": {"NAME": ANSWER, …}}
 *
 * ANSWER is what group.query with loads answers. Without "at" a look is a second after
 * the one before it.
 */
#include "ctl/sides.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"

#define LINE_MAX_BYTES ((ssize_t)64 << 20)
#define SECONDS_MAX 1e9

int sides_open(struct sides *sides, struct ctl *ctl, const char *command)
{
	struct kvd_pick_options o = {.seed = clock_ns()};

	*sides = (struct sides){.ctl = ctl, .name = {"prefill", "decode"}};
	if (ctl->arg_count == 1)
		return ctl_usage("%s: a prefill group and a decode group, or neither",
				 command);
	for (unsigned int i = 0; i < ctl->arg_count; i++)
		sides->name[i] = ctl->args[i];
	if (kvd_picker_new(&o, &sides->picker))
		return ctl_failed("out of memory");
	if (!ctl->from)
		return CTL_OK;
	sides->from = strcmp(ctl->from, "-") ? fopen(ctl->from, "re") : stdin;
	return sides->from ? CTL_OK : ctl_failed("%s: %s", ctl->from, strerror(errno));
}

void sides_close(struct sides *sides)
{
	kvd_picker_free(sides->picker);
	if (sides->from && sides->from != stdin)
		fclose(sides->from);
}

static int sides_feed(struct sides *sides, enum kvd_pick_side side, const cJSON *answer)
{
	char *text = cJSON_PrintUnformatted(answer);
	int r = text ? kvd_picker_feed(sides->picker, side, text, strlen(text),
				       sides->now_ns)
		     : -KVD_E_NOMEM;

	cJSON_free(text);
	return r;
}

/* ---- of the daemon ---- */

static int sides_ask(struct sides *sides, enum kvd_pick_side side, bool quiet)
{
	struct ctl *ctl = sides->ctl;
	cJSON *args = cJSON_CreateObject(), *answer;
	int r;

	cJSON_AddStringToObject(args, "group", sides->name[side]);
	cJSON_AddTrueToObject(args, "loads");
	if (ctl->at)
		cJSON_AddStringToObject(args, "at", ctl->at);
	r = quiet ? ctl_query(ctl, "group.query", args, &answer)
		  : ctl_ask(ctl, "group.query", args, &answer);
	if (r)
		return r;
	r = sides_feed(sides, side, answer);
	cJSON_Delete(answer);
	if (!r)
		return CTL_OK;
	ctl->error = (struct kvd_error){.code = -r};
	snprintf(ctl->error.message, sizeof(ctl->error.message), "group %.64s: %s",
		 sides->name[side],
		 r == -KVD_E_LIMIT ? "more workers than 4096, or ranks than 1024"
				   : "the answer is not one of group.query");
	return quiet ? CTL_ERROR : ctl_failed("%s", ctl->error.message);
}

/* ---- of a file ---- */

static int sides_line(struct sides *sides, const char *text, size_t length)
{
	const char *path = sides->ctl->from;
	cJSON *line = cJSON_ParseWithLength(text, length);
	const cJSON *all = cJSON_GetObjectItemCaseSensitive(line, "groups");
	const cJSON *at = cJSON_GetObjectItemCaseSensitive(line, "at");
	int r = CTL_OK;

	sides->now_ns += CLOCK_NS_PER_S;
	if (cJSON_IsNumber(at) && at->valuedouble > 0 && at->valuedouble < SECONDS_MAX)
		sides->now_ns = (uint64_t)(at->valuedouble * 1e9);
	for (unsigned int side = 0; side < KVD_PICK_SIDES && !r; side++) {
		const cJSON *answer =
			cJSON_GetObjectItemCaseSensitive(all, sides->name[side]);

		if (!cJSON_IsObject(all) || sides_feed(sides, side, answer))
			r = ctl_failed("%s:%lu: {\"groups\": {\"%s\": …}} with an answer "
				       "of group.query is wanted",
				       path, sides->line, sides->name[side]);
	}
	cJSON_Delete(line);
	return r;
}

static int sides_read(struct sides *sides)
{
	char *text = NULL;
	size_t size = 0;
	ssize_t length;
	int r;

	do {
		length = getline(&text, &size, sides->from);
		sides->line++;
	} while (length == 1); /* an empty line */
	if (length > LINE_MAX_BYTES)
		r = ctl_failed("%s:%lu: a line of more than 64 MiB", sides->ctl->from,
			       sides->line);
	else
		r = length < 0 ? SIDES_END : sides_line(sides, text, (size_t)length);
	free(text);
	return r;
}

int sides_look(struct sides *sides, bool quiet)
{
	int r = CTL_OK;

	if (sides->from)
		return sides_read(sides);
	sides->now_ns = clock_ns();
	for (unsigned int side = 0; side < KVD_PICK_SIDES && !r; side++)
		r = sides_ask(sides, side, quiet);
	return r;
}
