/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups with their loads. A file has a line for each look:
 *
 *   {"at": SECONDS, "groups": {"NAME": ANSWER, …}}
 *
 * ANSWER is what group.query with loads answers. Without "at" a look is a second after
 * the one before it.
 */
#include "ctl/groups.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"

#define LINE_MAX_BYTES ((ssize_t)64 << 20)
#define SECONDS_MAX 1e9

int groups_open(struct groups *groups, struct ctl *ctl, const char *command)
{
	struct kvd_pick_options o = {.seed = clock_ns()};

	*groups = (struct groups){.ctl = ctl, .name = {"prefill", "decode"}};
	if (ctl->arg_count == 1)
		return ctl_usage("%s: a prefill group and a decode group, or neither",
				 command);
	for (unsigned int i = 0; i < ctl->arg_count; i++)
		groups->name[i] = ctl->args[i];
	if (kvd_picker_new(&o, &groups->picker))
		return ctl_failed("out of memory");
	if (!ctl->from)
		return CTL_OK;
	groups->from = strcmp(ctl->from, "-") ? fopen(ctl->from, "re") : stdin;
	return groups->from ? CTL_OK : ctl_failed("%s: %s", ctl->from, strerror(errno));
}

void groups_close(struct groups *groups)
{
	kvd_picker_free(groups->picker);
	if (groups->from && groups->from != stdin)
		fclose(groups->from);
}

static int groups_feed(struct groups *groups, enum kvd_pick_side side,
		       const cJSON *answer)
{
	char *text = cJSON_PrintUnformatted(answer);
	int r = text ? kvd_picker_feed(groups->picker, side, text, strlen(text),
				       groups->now_ns)
		     : -KVD_E_NOMEM;

	cJSON_free(text);
	return r;
}

/* ---- of the daemon ---- */

static int groups_ask(struct groups *groups, enum kvd_pick_side side, bool quiet)
{
	struct ctl *ctl = groups->ctl;
	cJSON *args = cJSON_CreateObject(), *answer;
	int r;

	cJSON_AddStringToObject(args, "group", groups->name[side]);
	cJSON_AddTrueToObject(args, "loads");
	if (ctl->at)
		cJSON_AddStringToObject(args, "at", ctl->at);
	r = quiet ? ctl_query(ctl, "group.query", args, &answer)
		  : ctl_ask(ctl, "group.query", args, &answer);
	if (r)
		return r;
	r = groups_feed(groups, side, answer);
	cJSON_Delete(answer);
	if (!r)
		return CTL_OK;
	ctl->error = (struct kvd_error){.code = -r};
	snprintf(ctl->error.message, sizeof(ctl->error.message), "group %.64s: %s",
		 groups->name[side],
		 r == -KVD_E_LIMIT ? "more workers than 4096, or ranks than 1024"
				   : "the answer is not one of group.query");
	return quiet ? CTL_ERROR : ctl_failed("%s", ctl->error.message);
}

/* ---- of a file ---- */

static int groups_line(struct groups *groups, const char *text, size_t length)
{
	const char *path = groups->ctl->from;
	cJSON *line = cJSON_ParseWithLength(text, length);
	const cJSON *all = cJSON_GetObjectItemCaseSensitive(line, "groups");
	const cJSON *at = cJSON_GetObjectItemCaseSensitive(line, "at");
	int r = CTL_OK;

	groups->now_ns += CLOCK_NS_PER_S;
	if (cJSON_IsNumber(at) && at->valuedouble > 0 && at->valuedouble < SECONDS_MAX)
		groups->now_ns = (uint64_t)(at->valuedouble * 1e9);
	for (unsigned int side = 0; side < KVD_PICK_SIDES && !r; side++) {
		const cJSON *answer =
			cJSON_GetObjectItemCaseSensitive(all, groups->name[side]);

		if (!cJSON_IsObject(all) || groups_feed(groups, side, answer))
			r = ctl_failed("%s:%lu: {\"groups\": {\"%s\": …}} with an answer "
				       "of group.query is wanted",
				       path, groups->line, groups->name[side]);
	}
	cJSON_Delete(line);
	return r;
}

static int groups_read(struct groups *groups)
{
	char *text = NULL;
	size_t size = 0;
	ssize_t length;
	int r;

	do {
		length = getline(&text, &size, groups->from);
		groups->line++;
	} while (length == 1); /* an empty line */
	if (length > LINE_MAX_BYTES)
		r = ctl_failed("%s:%lu: a line of more than 64 MiB", groups->ctl->from,
			       groups->line);
	else
		r = length < 0 ? GROUPS_END : groups_line(groups, text, (size_t)length);
	free(text);
	return r;
}

int groups_look(struct groups *groups, bool quiet)
{
	int r = CTL_OK;

	if (groups->from)
		return groups_read(groups);
	groups->now_ns = clock_ns();
	for (unsigned int side = 0; side < KVD_PICK_SIDES && !r; side++)
		r = groups_ask(groups, side, quiet);
	return r;
}
