/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A prefill engine hands one request of 48 tokens over, in two chunks: the first goes
 * while the model computes the second. Tokens that the decode engine has already (a
 * prefix hit) are left out. Its other side is decode.c.
 *
 *   prefill [TICKET]   of the router, as for decode.c
 */
#include "examples/engine.h"

static const uint32_t pages[] = {7, 8, 12}; /* where this engine has tokens 0 … 47 */

/* Tokens [begin, end), which begin with a page. */
static int send(struct kvd_room *room, uint64_t seq, uint32_t begin, uint32_t end)
{
	struct kvd_view view = {.pages = pages + begin / TOKENS,
				.page_count = (end - begin) / TOKENS,
				.first_token = begin,
				.token_begin = begin,
				.token_end = end};
	struct kvd_room_pages chunk = {
		.seq = seq, .views = &view, .view_count = 1, .last = end == 3 * TOKENS};

	return kvd_room_send(room, &chunk, NULL);
}

int main(int argc, char **argv)
{
	struct engine engine = {0};
	struct kvd_room_args open = {
		.room = 42, .role = KVD_SEND, .ticket = argc > 1 ? argv[1] : NULL};
	struct kvd_room_status status;
	struct kvd_room *room;
	uint64_t first = 0;
	int state;

	engine_open(&engine, NULL);
	open.pool = engine.pool;
	if (kvd_room_open(engine.client, &open, NULL, &room))
		die(engine.client, "room");
	state = kvd_room_wait(room, KVD_WAITING_FOR_INPUT, 60000);
	if (state >= KVD_WAITING_FOR_INPUT) {
		if (kvd_room_read(room, &status))
			die(engine.client, "first token");
		first = (uint64_t)status.first_token;
		for (uint32_t page = 0; page < 3; page++) /* the model runs */
			memset(engine_page(&engine, pages[page]), (int)page + 1,
			       PAGE_BYTES);
		if ((first < TOKENS && send(room, 0, 0, TOKENS)) ||
		    send(room, 1, TOKENS, 3 * TOKENS))
			die(engine.client, "send");
		state = kvd_room_wait(room, KVD_SUCCESS, 60000);
	}
	if (state == KVD_SUCCESS)
		printf("sent tokens %u to 47\n", (unsigned int)first);
	else
		fprintf(stderr, "%s\n",
			state == KVD_FAILED ? kvd_room_why(room, 0)->message
					    : kvd_last_error(engine.client)->message);
	engine_close(&engine);
	return state != KVD_SUCCESS;
}
