/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rooms by the hundred, for the soak: an engine drives its side of a row of rooms
 * by itself, a window of them at a time. What a room is follows from its number,
 * so that source and target agree without a word: every third is a pull, the
 * others are pushes in one chunk or two.
 *
 * Rooms of a partner that died are left to their timeouts, which are short here;
 * `finish` opens no more. A batch is over when all that it opened has ended and is
 * closed; its answer tells how each room ended, by a letter, and some of the words.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/faults/engine.h"

#define LIMIT_MS 3000u
#define WORDS_MAX 8u
#define WINDOW_PAGES 8u /* of the pool for a room: three, canaries between them */

/* Nobody waits for these answers: the room's state tells. */
static void on_answer(void *arg, int result, const struct kvd_reply *reply)
{
	(void)arg, (void)result, (void)reply;
}

static const struct kvd_call unheard = {.timeout_ms = 20000, .on_done = on_answer};

/* Of failed rooms, until the next batch's answer. */
static char words[WORDS_MAX][240];
static unsigned int words_count;

static void on_record(void *arg, int result, const struct kvd_reply *reply)
{
	const char *begin = result ? NULL : strstr(reply->json, "\"message\":\"");

	(void)arg;
	if (begin && words_count < WORDS_MAX) {
		begin += strlen("\"message\":\"");
		snprintf(words[words_count++], sizeof(words[0]), "%.*s",
			 (int)strcspn(begin, "\"\\"), begin);
	}
}

static void ask_why(struct engine *e, const struct room *room)
{
	struct kvd_call call = {.timeout_ms = 20000, .on_done = on_record};
	char args[64];

	if (words_count == WORDS_MAX)
		return;
	snprintf(args, sizeof(args), "{\"room\":\"%" PRIu64 "\"}", room->run.room);
	(void)kvd_submit(e->client, "room.show", args, &call);
}

static enum kvd_role role_in(const struct batch *b, uint64_t number)
{
	if (number % 3 == 0)
		return b->target ? KVD_PULL : KVD_OFFER;
	return b->target ? KVD_RECV : KVD_SEND;
}

/* Is this one to be aborted by this side? By its number, so that it can be told. */
static bool shall_abort(const struct batch *b, uint64_t number)
{
	return (number * UINT64_C(0x9e3779b97f4a7c15) >> 40) % 1000 < b->abort_permille &&
	       number % 2 == b->target;
}

static bool open_next(struct engine *e, struct batch *b)
{
	uint64_t number = b->first + b->next;
	uint32_t slots = b->pages / WINDOW_PAGES;
	struct open_args a = {.room = number,
			      .role = role_in(b, number),
			      .base = b->base + b->next % slots * WINDOW_PAGES,
			      .count = 1 + (uint32_t)(number % 3),
			      .limit_ms = LIMIT_MS,
			      .endpoint = b->endpoint,
			      .pool = b->pool};
	struct room *room;

	if (e->room_count == ROOMS_MAX || kvd_lost(e->client) ||
	    engine_open(e, &a, &unheard))
		return false;
	room = &e->rooms[e->room_count - 1];
	room->batch = b;
	b->results[b->next++] = '?';
	b->live++;
	if (a.role == KVD_RECV)
		(void)engine_bind(e, room, 0, &unheard);
	return true;
}

static void drive(struct engine *e, struct room *room)
{
	uint32_t count = room->run.count, half = count / 2;
	bool two = room->run.room % 2 && half;
	struct send_args first = {.begin = 0, .end = two ? half : count, .last = !two};
	struct send_args second = {.seq = 1, .begin = half, .end = count, .last = true};

	if (!room->given && room->role == KVD_SEND &&
	    room->state == KVD_WAITING_FOR_INPUT) {
		room->given = true;
		(void)engine_send(e, room, &first, &unheard);
		if (two)
			(void)engine_send(e, room, &second, &unheard);
	}
	if (!room->aborted && room->state >= KVD_BOOTSTRAPPING &&
	    shall_abort(room->batch, room->run.room)) {
		room->aborted = true;
		(void)kvd_room_abort(room->handle, "the soak gives up", &unheard);
	}
}

/* True when it is closed: `room` is another one then. */
static bool close_ended(struct engine *e, struct room *room)
{
	struct batch *b = room->batch;
	uint32_t written = cache_reuse_wrong(&e->cache, &room->run);

	if (room->state == KVD_FAILED && !room->asked)
		ask_why(e, room);
	room->asked = true;
	if (kvd_room_close(room->handle, &unheard))
		return false;
	b->results[room->run.room - b->first] = room->state == KVD_SUCCESS ? 's' : 'f';
	b->wrong += room->wrong;
	b->written += written;
	b->unsteady += room->moved_after_end;
	b->live--;
	engine_forget(e, room);
	return true;
}

static void tell(struct engine *e, struct batch *b)
{
	b->results[b->next] = '\0';
	printf("{\"id\":%" PRIu64 ",\"result\":\"OK\",\"rooms\":\"%s\",\"wrong\":%u,"
	       "\"written\":%u,\"unsteady\":%u,\"strayed\":%u,\"words\":[",
	       b->id, b->results, b->wrong, b->written, b->unsteady,
	       cache_strayed(&e->cache));
	for (unsigned int i = 0; i < words_count; i++)
		printf("%s\"%s\"", i ? "," : "", words[i]);
	printf("]}\n");
	words_count = 0;
	free(b->results);
	*b = (struct batch){0};
}

bool batch_begin(struct engine *e, uint64_t id, const char *args)
{
	struct batch *b = e->batches;
	char side[8];

	while (b < e->batches + BATCHES && b->results)
		b++;
	if (b == e->batches + BATCHES)
		return false;
	*b = (struct batch){.id = id};
	if (sscanf(args,
		   "%" SCNu64 " %" SCNu32 " %" SCNu32 " %7s %u %" SCNu32 " %" SCNu32
		   " %159s %63s",
		   &b->first, &b->count, &b->window, side, &b->abort_permille, &b->base,
		   &b->pages, b->endpoint, b->pool) != 9 ||
	    b->pages < WINDOW_PAGES || b->count > BATCH_MAX)
		return false;
	b->target = strcmp(side, "target") == 0;
	b->results = calloc(b->count + 1, 1);
	return b->results != NULL;
}

void batch_finish(struct engine *e)
{
	for (unsigned int i = 0; i < BATCHES; i++)
		e->batches[i].count = e->batches[i].next;
}

bool batch_turn(struct engine *e)
{
	bool busy = false;

	for (unsigned int i = 0; i < e->room_count; i++) {
		struct room *room = &e->rooms[i];

		if (!room->batch)
			continue;
		busy = true;
		drive(e, room);
		if (room->ended && close_ended(e, room))
			i--;
	}
	for (struct batch *b = e->batches; b < e->batches + BATCHES; b++) {
		while (b->live < b->window && b->next < b->count && open_next(e, b))
			;
		if (b->results && b->live == 0 && b->next == b->count)
			tell(e, b);
		busy = busy || b->results;
	}
	return busy;
}
