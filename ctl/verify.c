/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command verify: compares the pages of both sides of an open room. Each daemon
 * hashes its own pages (room.digest). As in trace, the daemons of this host are queried,
 * and the output of another host is merged. Each block of tokens that is complete on
 * both sides is compared, by view, layer, field and unit.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/trace.h"
#include "lib/kvd.h"

#define VIEWS_MAX 64u
#define DIGEST_MS 60000 /* for 4096 blocks */

/* ---- queries ---- */

static cJSON *digest_args(const struct ctl *ctl, const cJSON *room, const cJSON *next)
{
	cJSON *args = cJSON_CreateObject();

	cJSON_AddStringToObject(args, "room", ctl->args[0]);
	cJSON_AddStringToObject(args, "role", ctl_str(room, "role", ""));
	cJSON_AddStringToObject(args, "generation", ctl_str(room, "generation", "0"));
	if (next)
		cJSON_AddStringToObject(args, "from", next->valuestring);
	if (ctl->views_tree && strcmp(ctl_str(room, "role", ""), "send") == 0)
		cJSON_AddItemReferenceToObject(args, "views", ctl->views_tree);
	return args;
}

/* The reply to one room.digest; NULL: the room has "digest_error". */
static cJSON *ask_digest(const struct ctl *ctl, struct kvd_client *client, cJSON *room,
			 const cJSON *next)
{
	cJSON *args = digest_args(ctl, room, next), *reply;
	int r = ctl_command(client, "room.digest", args, DIGEST_MS, &reply);

	cJSON_Delete(args);
	if (!r && reply)
		return reply;
	cJSON_AddStringToObject(room, "digest_error",
				r ? kvd_last_error(client)->message : "out of memory");
	cJSON_Delete(reply);
	return NULL;
}

static void ask_room(const struct ctl *ctl, struct kvd_client *client, cJSON *room)
{
	cJSON *units = cJSON_AddArrayToObject(room, "digests"), *next = NULL;

	do {
		cJSON *reply = ask_digest(ctl, client, room, next), *unit;
		cJSON *some = cJSON_DetachItemFromObjectCaseSensitive(reply, "units");

		while ((unit = cJSON_DetachItemFromArray(some, 0)))
			cJSON_AddItemToArray(units, unit);
		cJSON_Delete(some);
		cJSON_Delete(next);
		next = cJSON_DetachItemFromObjectCaseSensitive(reply, "next");
		cJSON_Delete(reply);
	} while (cJSON_IsString(next));
	cJSON_Delete(next);
}

static void ask_rooms(const struct ctl *ctl, struct kvd_client *client, cJSON *reply)
{
	cJSON *room;

	cJSON_ArrayForEach(room, cJSON_GetObjectItemCaseSensitive(reply, "rooms")) {
		if (ctl_true(room, "open"))
			ask_room(ctl, client, room);
		else
			cJSON_AddStringToObject(room, "digest_error",
						"room is closed; kvd-ctl trace shows "
						"its events");
	}
}

/* ---- comparing ---- */

struct compared {
	const char *view;
	unsigned long equal, differ, alone; /* alone: not complete on both sides */
	char first[320];
};

static bool is_same_unit(const cJSON *a, const cJSON *b)
{
	return ctl_num(a, "layer") == ctl_num(b, "layer") &&
	       ctl_num(a, "unit") == ctl_num(b, "unit") &&
	       !strcmp(ctl_str(a, "field", ""), ctl_str(b, "field", "-")) &&
	       !strcmp(ctl_str(a, "view", ""), ctl_str(b, "view", "-"));
}

static double part(const cJSON *block, int n)
{
	return cJSON_GetNumberValue(cJSON_GetArrayItem(block, n));
}

static void block_compare(struct compared *c, const cJSON *unit, const cJSON *src,
			  const cJSON *dst)
{
	const char *one = cJSON_GetStringValue(cJSON_GetArrayItem(src, 3));
	const char *other = cJSON_GetStringValue(cJSON_GetArrayItem(dst, 3));

	if (part(src, 1) != part(dst, 1) || !one || !other) {
		c->alone++;
	} else if (strcmp(one, other) == 0) {
		c->equal++;
	} else if (c->differ++ == 0) {
		snprintf(c->first, sizeof(c->first),
			 "layer %.0f, field %.32s, unit %.0f, tokens %.0f-%.0f: page "
			 "%.0f (source), %.0f (destination)",
			 ctl_num(unit, "layer"), ctl_str(unit, "field", "?"),
			 ctl_num(unit, "unit"), part(dst, 0), part(dst, 1) - 1,
			 part(src, 2), part(dst, 2));
	}
}

/* Both lists are sorted. A unit may continue in a second item if a reply was full. */
static void unit_compare(struct compared *c, const cJSON *src_units, const cJSON *unit)
{
	const cJSON *other, *block;
	unsigned long before = c->equal + c->differ + c->alone;
	const cJSON *blocks = ctl_list(unit, "blocks");
	unsigned long count = (unsigned long)cJSON_GetArraySize(blocks);

	cJSON_ArrayForEach(other, src_units) {
		const cJSON *src =
			is_same_unit(other, unit) ? ctl_list(other, "blocks") : NULL;

		src = src ? src->child : NULL;
		cJSON_ArrayForEach(block, blocks) {
			while (src && part(src, 0) < part(block, 0))
				src = src->next;
			if (src && part(src, 0) == part(block, 0))
				block_compare(c, unit, src, block);
		}
	}
	before = c->equal + c->differ + c->alone - before;
	c->alone += count > before ? count - before : 0;
}

static struct compared *compared_of(struct compared *all, const char *view)
{
	for (unsigned int i = 0; i < VIEWS_MAX; i++) {
		if (!all[i].view)
			all[i].view = view;
		if (strcmp(all[i].view, view) == 0)
			return &all[i];
	}
	return NULL;
}

static bool is_source(const cJSON *room)
{
	const char *role = ctl_str(room, "role", "");

	return !strcmp(role, "send") || !strcmp(role, "offer");
}

static bool names(const cJSON *room, const cJSON *other)
{
	const char *generation = ctl_str(other, "generation", "");
	const cJSON *peer;

	cJSON_ArrayForEach(peer, ctl_list(room, "peers")) {
		if (!strcmp(ctl_str(peer, "generation", "-"), generation))
			return true;
	}
	return false;
}

struct verdict {
	unsigned long equal, differ;
	unsigned int pairs;
};

static void pair_compare(const cJSON *src_side, const cJSON *src, const cJSON *dst_side,
			 const cJSON *dst, bool tell, struct verdict *verdict)
{
	struct compared all[VIEWS_MAX] = {{0}}, *c;
	const cJSON *unit;

	verdict->pairs++;
	cJSON_ArrayForEach(unit, ctl_list(dst, "digests")) {
		c = compared_of(all, ctl_str(unit, "view", "?"));
		if (c)
			unit_compare(c, ctl_list(src, "digests"), unit);
	}
	for (c = all; c < all + VIEWS_MAX && c->view; c++) {
		unsigned long both = c->equal + c->differ;

		verdict->equal += c->equal;
		verdict->differ += c->differ;
		if (!tell)
			continue;
		printf("%s to %s, view %s: ", ctl_str(src_side, "name", "?"),
		       ctl_str(dst_side, "name", "?"), c->view);
		if (!both)
			printf("nothing to compare");
		else if (!c->differ)
			printf("equal, %lu blocks", both);
		else
			printf("%lu of %lu blocks differ; the first: %s", c->differ, both,
			       c->first);
		printf(c->alone ? "; %lu not compared: incomplete on one side\n" : "\n",
		       c->alone);
	}
}

static void tell_errors(const cJSON *sides)
{
	const cJSON *side, *room;

	cJSON_ArrayForEach(side, sides) {
		cJSON_ArrayForEach(room, ctl_list(side, "rooms")) {
			const char *why = ctl_str(room, "digest_error",
						  ctl_list(room, "digests")
							  ? NULL
							  : "no digests; create them "
							    "with kvd-ctl --json verify");

			if (why)
				printf("%s, %s: not read: %s\n",
				       ctl_str(side, "name", "?"),
				       ctl_str(room, "role", "?"), why);
		}
	}
}

static void compare_all(const cJSON *sides, bool tell, struct verdict *verdict)
{
	const cJSON *a, *b, *src, *dst;

	cJSON_ArrayForEach(a, sides) {
		cJSON_ArrayForEach(src, ctl_list(a, "rooms")) {
			cJSON_ArrayForEach(b, sides) {
				cJSON_ArrayForEach(dst, ctl_list(b, "rooms")) {
					if (is_source(src) && !is_source(dst) &&
					    (names(src, dst) || names(dst, src)))
						pair_compare(a, src, b, dst, tell,
							     verdict);
				}
			}
		}
	}
}

/* ---- the command ---- */

static int read_views(struct ctl *ctl)
{
	size_t len;
	char *text = ctl_read_file(ctl->views, FILE_MAX_BYTES, &len);

	if (!text)
		return ctl_failed("%s: %s", ctl->views, strerror(errno));
	ctl->views_tree = cJSON_Parse(text);
	free(text);
	if (!cJSON_IsObject(ctl->views_tree))
		return ctl_failed("%s: not a JSON object of views as in room.send",
				  ctl->views);
	return CTL_OK;
}

int ctl_run_verify(struct ctl *ctl)
{
	struct verdict verdict = {0};
	cJSON *result = NULL;
	int r = ctl->views ? read_views(ctl) : CTL_OK;

	if (!r)
		r = trace_gather(ctl, ask_rooms, &result);
	if (!r) {
		compare_all(ctl_list(result, "sides"), !ctl->json, &verdict);
		if (ctl->json) {
			ctl_print_json(result);
		} else {
			tell_errors(ctl_list(result, "sides"));
			if (!verdict.pairs)
				printf("room %s: the other side is missing: on its host "
				       "run kvd-ctl --json verify %s > FILE, then pass "
				       "--join FILE here\n",
				       ctl->args[0], ctl->args[0]);
			puts("The result is valid only while neither engine writes the "
			     "pages.");
		}
		/* with --json one side is valid output, for --join on another host */
		r = verdict.differ || (!verdict.equal && !ctl->json) ? CTL_ERROR : CTL_OK;
	}
	cJSON_Delete(result);
	cJSON_Delete(ctl->views_tree);
	return r;
}
