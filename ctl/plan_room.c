/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command plan for a file and for a room. For a room the daemon supplies the
 * planner's input (room.plan) in the format of the files.
 *
 * The source pages of a push are known only while its chunks are transferred. Without
 * them the exact rows are unknown, but row sizes follow from the layouts and the other
 * side's pages. --explain therefore substitutes non-adjacent pages, and prints that it
 * did.
 */
#include <stdio.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/plan.h"

/* The i-th substitute page: odd numbers first, then even ones. */
static double page_apart(uint32_t i, uint32_t pages)
{
	i %= pages;
	return i < pages / 2 ? 2.0 * i + 1 : 2.0 * (i - pages / 2);
}

/* False: out of memory, or an invalid reply. */
static bool stand_in(const cJSON *reply, cJSON *map)
{
	const cJSON *views = ctl_list(ctl_list(reply, "src"), "views");
	const cJSON *view = ctl_list(views, ctl_str(map, "view", ""));
	const cJSON *tokens = ctl_list(map, "tokens");
	double size = ctl_num(view, "page_tokens"), pages = ctl_num(view, "pages");
	double begin = cJSON_GetNumberValue(cJSON_GetArrayItem(tokens, 0));
	double end = cJSON_GetNumberValue(cJSON_GetArrayItem(tokens, 1));
	double first, count;
	cJSON *list;

	if (!(size >= 1 && pages >= 1 && pages <= UINT32_MAX && begin >= 0 &&
	      end >= begin))
		return false;
	first = (double)((uint64_t)begin / (uint64_t)size);
	count = (double)(((uint64_t)end + (uint64_t)size - 1) / (uint64_t)size) - first;
	if (count > PLAN_ROWS_MAX)
		return false;
	list = cJSON_AddArrayToObject(map, "src_pages");
	for (uint32_t i = 0; list && i < (uint32_t)count; i++) {
		cJSON *page = cJSON_CreateNumber(page_apart(i, (uint32_t)pages));

		if (!page || !cJSON_AddItemToArray(list, page))
			return false;
	}
	return list && cJSON_AddNumberToObject(map, "src_first_token", first * size);
}

static int plan_party(const struct ctl *ctl, const cJSON *reply)
{
	const struct plan_options options = {.explain = ctl->plan_explain};
	bool apart = false;
	cJSON *map;
	char *text;
	int r;

	cJSON_ArrayForEach(map, ctl_list(reply, "map")) {
		if (ctl_list(map, "src_pages"))
			continue;
		if (!options.explain)
			return ctl_failed("room %s: rows unknown: the daemon does not "
					  "keep the source pages of a push; --explain "
					  "shows the row sizes",
					  ctl->number);
		if (!stand_in(reply, map))
			return ctl_failed("room %s: invalid reply from the daemon",
					  ctl->number);
		apart = true;
	}
	text = cJSON_PrintUnformatted(reply);
	if (!text)
		return ctl_failed("out of memory");
	if (options.explain)
		printf("room %s (%s), with %s, pool '%s'\n", ctl->number,
		       ctl_str(reply, "role", "?"), ctl_str(reply, "peer", "?"),
		       ctl_str(reply, "pool", "?"));
	if (apart)
		puts("source pages unknown: assuming that no two are adjacent");
	r = plan_text(text, strlen(text), &options);
	cJSON_free(text);
	return r;
}

/* party: -1 for the first. */
static int ask_party(struct ctl *ctl, int party, cJSON **reply_p)
{
	cJSON *args = cJSON_CreateObject();
	int r;

	cJSON_AddStringToObject(args, "room", ctl->number);
	if (ctl->role)
		cJSON_AddStringToObject(args, "role", ctl->role);
	if (party >= 0)
		cJSON_AddNumberToObject(args, "party", party);
	r = ctl_ask(ctl, "room.plan", args, reply_p);
	if (r && ctl->error.code == KVD_E_NOTFOUND && party < 0)
		fprintf(stderr,
			"  the daemon keeps no pages of a closed room; for its events: "
			"kvd-ctl trace %s\n",
			ctl->number);
	return r;
}

/* One plan per source or receiver. */
static int plan_room(struct ctl *ctl)
{
	cJSON *first = NULL;
	const cJSON *party;
	int r = ask_party(ctl, -1, &first);

	if (!r)
		r = plan_party(ctl, first);
	cJSON_ArrayForEach(party, ctl_list(first, "parties")) {
		cJSON *reply = NULL;

		if (r || party == ctl_list(first, "parties")->child)
			continue;
		if (ctl->plan_explain)
			putchar('\n');
		r = ask_party(ctl, (int)cJSON_GetNumberValue(party), &reply);
		if (!r)
			r = plan_party(ctl, reply);
		cJSON_Delete(reply);
	}
	cJSON_Delete(first);
	return r;
}

int ctl_run_plan(struct ctl *ctl)
{
	const struct plan_options options = {.explain = ctl->plan_explain};

	if (!ctl->number == !ctl->arg_count)
		return ctl_usage("plan: a FILE, or --room NUMBER");
	if (ctl->role && !ctl->number)
		return ctl_usage("plan: --role requires --room");
	return ctl->number ? plan_room(ctl) : plan_file(ctl->args[0], &options);
}
