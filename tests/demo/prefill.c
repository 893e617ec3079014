/* SPDX-License-Identifier: Apache-2.0 */
/*
 * demo: the prefill engine. Computes each request's cache in chunks of 512
 * tokens and hands every chunk over as soon as it is there; offers others to be
 * fetched; is told of an abort; is killed in the middle of the last one.
 *
 *   demo-prefill SOCKET
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "tests/demo/cache.h"

#define WAIT_MS 120000 /* for what works on a slow machine, too */

/* However late the abort comes, it finds the room without its last chunk. */
static void until_aborted(struct kvd_client *client, struct kvd_room *room)
{
	const struct timespec pause = {.tv_nsec = 20000};
	struct kvd_room_status st = {0};

	for (long i = 0; i < WAIT_MS * 50L; i++) {
		if (kvd_room_read(room, &st))
			die(client, "room");
		if (st.flags & KVD_FLAG_ABORTING || st.state == KVD_FAILED)
			return;
		nanosleep(&pause, NULL);
	}
}

/* false: the other side has aborted the room meanwhile. */
static bool send_chunk(struct cache *cache, struct kvd_client *client,
		       struct kvd_room *room, const struct request *request, enum act act,
		       uint32_t begin)
{
	uint32_t end = begin + chunk_tokens;
	struct kvd_room_pages send = {.seq = begin / chunk_tokens, .view_count = 1};
	struct kvd_view view;
	int r;

	if (end > request->tokens)
		end = request->tokens;
	cache_fill(cache, request, begin, end); /* the model runs */
	view = request_view(request, begin, end);
	send.views = &view;
	send.last = end == request->tokens;
	if (send.last && act == ACT_ABORT)
		until_aborted(client, room);
	r = kvd_room_send(room, &send, NULL);
	if (r && r != -KVD_E_ABORTED)
		die(client, "room.send");
	return !r;
}

static void until_bytes_move(struct kvd_client *client, struct kvd_room *room)
{
	const struct timespec pause = {.tv_nsec = 20000};
	struct kvd_room_status st = {0};

	for (long i = 0; !st.bytes && i < WAIT_MS * 50L; i++) {
		if (kvd_room_read(room, &st))
			die(client, "room");
		nanosleep(&pause, NULL);
	}
}

static void end_room(struct kvd_client *client, struct kvd_room *room, int want)
{
	if (kvd_room_wait(room, KVD_SUCCESS, WAIT_MS) != want)
		die(client, "the room did not end as it should");
	if (kvd_room_close(room, NULL))
		die(client, "room.close");
}

static void push(struct kvd_client *client, struct cache *cache,
		 const struct act_row *row)
{
	struct kvd_room_args open = {.room = row->room,
				     .ticket = getenv("TICKET"), /* the router's */
				     .role = KVD_SEND,
				     .pool = cache->pool};
	struct request request;
	struct kvd_room *room;

	request_make(&request, row, 3);
	if (kvd_room_open(client, &open, NULL, &room))
		die(client, "room.open");
	if (kvd_room_wait(room, KVD_WAITING_FOR_INPUT, WAIT_MS) < KVD_WAITING_FOR_INPUT)
		die(client, "no receiver came");
	for (uint32_t t = 0; t < row->tokens; t += chunk_tokens) {
		if (!send_chunk(cache, client, room, &request, row->act, t))
			break;
		if (row->act == ACT_KILL) {
			until_bytes_move(client, room);
			raise(SIGKILL);
		}
	}
	end_room(client, room, row->act == ACT_ABORT ? KVD_FAILED : KVD_SUCCESS);
}

static void offer(struct kvd_client *client, struct cache *cache,
		  const struct act_row *row)
{
	struct request request;
	struct kvd_view view;
	struct kvd_room_args open = {.room = row->room,
				     .ticket = getenv("TICKET"), /* the router's */
				     .role = KVD_OFFER,
				     .pool = cache->pool,
				     .views = &view,
				     .view_count = 1};
	struct kvd_room *room;

	request_make(&request, row, 3);
	cache_fill(cache, &request, 0, row->tokens);
	view = request_view(&request, 0, row->tokens);
	if (kvd_room_open(client, &open, NULL, &room))
		die(client, "room.open");
	end_room(client, room, KVD_SUCCESS);
}

int main(int argc, char **argv)
{
	struct kvd_options options = {.client = "demo-prefill",
				      .role = "prefill",
				      .socket = argc > 1 ? argv[1] : NULL};
	struct kvd_client *client;
	struct cache cache;

	acts_shrink();
	if (kvd_open(&options, &client))
		die(NULL, "prefill daemon");
	cache_open(client, &cache);
	for (size_t i = 0; i < act_count; i++)
		if (acts[i].act == ACT_PULL)
			offer(client, &cache, &acts[i]);
		else
			push(client, &cache, &acts[i]);
	kvd_close(client);
	return 0;
}
