/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A source that is not found yet is notified of changes in its group and schedules its
 * room, whose next step looks it up again. The pages that a pull's engine names for it
 * are kept with it, and passed to the party.
 */
#include "daemon/room/room_source.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/room/room.h"
#include "daemon/session/session.h"
#include "proto/json.h"

#define SOURCE_TEXT_MAX 320u

struct room_source {
	struct list link; /* in room->bind.sources */
	struct room *room;
	struct names_user user;
	char group[PLACE_GROUP_MAX], worker[PLACE_WORKER_MAX];
	struct names_wanted wanted;
	char pool[POOL_NAME_MAX];
	int64_t rank;
	uint64_t number;
	cJSON *theirs;
	size_t bytes; /* charged to the room */
};

/* The pages are detached from the command's line: a copy of a long tree takes long. */
static int source_pages(struct room *room, cJSON *entry, cJSON **views_p, size_t *bytes_p)
{
	cJSON *views = cJSON_GetObjectItemCaseSensitive(entry, "views");
	size_t bytes = json_bytes(views);
	int r = charge_more(&room->charge, bytes);

	if (r < 0)
		return err_pass(r);
	*views_p = cJSON_DetachItemViaPointer(entry, views);
	*bytes_p = bytes;
	return 0;
}

static int source_join(struct room *room, const char *endpoint, struct party **party_p)
{
	struct handshake *hs = room->session->kvd->handshake;
	const struct peer_client client = {.uid = room->session->uid,
					   .session = room->session->id};
	struct remote *remote;
	int r = handshake_reach(hs, endpoint, &client, &remote);

	if (r < 0)
		return err_pass(r);
	*party_p = room_party_add(room, remote);
	handshake_release(remote); /* the party holds it */
	return *party_p ? 0 : err_pass(-ENOMEM);
}

/* The fields that select its pool. */
static uint8_t source_names(const struct party *party)
{
	return (uint8_t)((party->pool_name[0] ? POOL_BY_NAME : 0) |
			 (party->rank >= 0 ? POOL_BY_RANK : 0) |
			 (party->session ? POOL_BY_SESSION : 0));
}

/* ---- by endpoint ---- */

static int source_at(struct room *room, const struct source_args *args, cJSON *theirs)
{
	struct party *party;
	int r = source_join(room, args->endpoint, &party);

	if (r < 0)
		return err_pass(r);
	snprintf(party->pool_name, sizeof(party->pool_name), "%s",
		 args->pool ? args->pool : "");
	party->rank = args->rank;
	party->session = args->session;
	party->named = source_names(party);
	party->room_there = args->room;
	/* read when its pool is known */
	return theirs ? err_pass(source_pages(room, theirs, &party->due.theirs_json,
					      &party->due.json_bytes))
		      : 0;
}

/* ---- by group ---- */

static const struct names *room_names(const struct room *room)
{
	return room->session->kvd->names;
}

static void source_free(struct room_source *source)
{
	if (source->user.cache)
		room_names(source->room)->unuse(&source->user);
	cJSON_Delete(source->theirs);
	charge_less(&source->room->charge, source->bytes);
	list_remove(&source->link);
	mem_free(source);
}

static void source_on_change(struct names_user *user)
{
	room_kick(container_of(user, struct room_source, user)->room);
}

static const char *source_words(const struct room_source *source, char *text, size_t size)
{
	const uint32_t *rank = source->wanted.rank;

	snprintf(text, size, "group '%.100s'%s%s%s rank %u.%u.%u.%u", source->group,
		 source->wanted.worker ? " worker '" : "",
		 source->wanted.worker ? source->worker : "",
		 source->wanted.worker ? "'" : "", rank[PLACE_TP], rank[PLACE_PP],
		 rank[PLACE_DP], rank[PLACE_CP]);
	return text;
}

/* Make a party of the source's entry in the directory. */
static int source_found(struct room_source *source, const struct names_member *member)
{
	struct room *room = source->room;
	struct party *party;
	int r = source_join(room, member->endpoint, &party);

	if (r < 0)
		return err_pass(r);
	snprintf(party->pool_name, sizeof(party->pool_name), "%s",
		 *source->pool ? source->pool : member->pool);
	party->rank = source->rank;
	party->session = member->session;
	party->named = source_names(party);
	party->room_there = source->number;
	party->due.theirs_json = mem_steal(source->theirs);
	if (party->due.theirs_json) { /* with its memory */
		party->due.json_bytes = source->bytes - sizeof(*source);
		source->bytes = sizeof(*source);
	}
	return 0;
}

/* 0: it is a party, and the source is freed; outcome 1: not found yet. */
static int source_look(struct room_source *source)
{
	struct names_member member;
	char text[SOURCE_TEXT_MAX];
	int r = room_names(source->room)->find(&source->user, &source->wanted, &member);

	if (r == 0)
		r = source_found(source, &member);
	if (r > 0)
		return 1;
	if (r < 0)
		return err_prefix(r, "%s", source_words(source, text, sizeof(text)));
	source_free(source);
	return 0;
}

static int source_new(struct room *room, const struct source_args *args,
		      struct room_source **source_p)
{
	struct room_source *source;
	int r = charge_more(&room->charge, sizeof(*source));

	if (r < 0)
		return err_pass(r);
	source = mem_zalloc(sizeof(*source));
	if (!source) {
		charge_less(&room->charge, sizeof(*source));
		return err_pass(-ENOMEM);
	}
	source->bytes = sizeof(*source);
	source->room = room;
	source->user.on_change = source_on_change;
	source->rank = args->rank;
	source->number = args->room;
	snprintf(source->group, sizeof(source->group), "%s", args->group);
	snprintf(source->worker, sizeof(source->worker), "%s",
		 args->worker ? args->worker : "");
	snprintf(source->pool, sizeof(source->pool), "%s", args->pool ? args->pool : "");
	source->wanted.worker = args->worker ? source->worker : NULL;
	memcpy(source->wanted.rank, args->place, sizeof(source->wanted.rank));
	list_push_back(&room->bind.sources, &source->link);
	*source_p = source;
	return 0;
}

static int source_named(struct room *room, const struct source_args *args, cJSON *theirs)
{
	const struct names *names;
	struct room_source *source;
	size_t bytes = 0;
	int r = names_get(room->session->kvd, &names);

	if (r < 0)
		return err_pass(r);
	r = source_new(room, args, &source);
	if (r == 0 && theirs)
		r = source_pages(room, theirs, &source->theirs, &bytes);
	if (r < 0)
		return err_pass(r); /* rooms_discard() frees it */
	source->bytes += bytes;
	r = names->use(room->session->kvd, args->group, &source->user);
	if (r == 0)
		r = source_look(source);
	return r < 0 ? err_pass(r) : 0;
}

int room_source_add(struct room *room, const struct source_args *args, cJSON *theirs)
{
	if (!args->endpoint == !args->group)
		return err_raise(ERR_INVAL, "endpoint or group: exactly one is required");
	if (args->group && args->session)
		return err_raise(ERR_INVAL, "session: only with endpoint; the "
					    "directory supplies the session of a worker");
	if (args->group)
		return err_pass(source_named(room, args, theirs));
	if (args->worker || args->place[PLACE_TP] || args->place[PLACE_PP] ||
	    args->place[PLACE_DP] || args->place[PLACE_CP])
		return err_raise(ERR_INVAL,
				 "worker, tp_rank …: only with group, not with endpoint");
	return err_pass(source_at(room, args, theirs));
}

bool room_sources_find(struct room *room)
{
	struct room_source *source;

	list_foreach_safe(source, &room->bind.sources, link) {
		if (source_look(source) >= 0)
			continue;
		room_fail_last(room);
		return false;
	}
	return list_empty(&room->bind.sources);
}

void room_sources_free(struct room *room)
{
	struct room_source *source;

	list_foreach_safe(source, &room->bind.sources, link)
		source_free(source);
}

void room_sources_text(const struct room *room, char *text, size_t size)
{
	const struct room_source *source =
		list_first(&room->bind.sources, struct room_source, link);
	char words[SOURCE_TEXT_MAX], why[SOURCE_TEXT_MAX];

	source_words(source, words, sizeof(words));
	if (room_names(room)->away(room->session->kvd, why, sizeof(why)))
		snprintf(text, size, "%s: the directory is unavailable: %.120s", words,
			 why);
	else
		snprintf(text, size, "%s: not in the directory", words);
}
