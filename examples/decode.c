/* SPDX-License-Identifier: Apache-2.0 */
/* A decode engine takes one request's KV cache: docs/clients.md shows the middle. Its
 * other side is prefill.c.
 *
 *   decode [ENDPOINT [HAS [TICKET]]]   of the prefill engine's daemon; HAS: so many of
 *                             the 48 tokens are in page 3 already (0 or 16); TICKET:
 *                             the router's, 32 hex digits, as for prefill.c */
#include <kvd.h>
#include <stdio.h>
#include <stdlib.h>

enum { PAGES = 64, TOKENS = 16, HEADS = 8, HEAD_BYTES = 256 };

int main(int argc, char **argv)
{
	struct kvd_field kv = {.name = "kv", .unit_bytes = HEAD_BYTES, .units = HEADS};
	struct kvd_source from = {.endpoint =
					  argc > 1 ? argv[1] : "tcp://127.0.0.1:7400"};
	const uint32_t pages[] = {3, 9, 4}; /* where this engine wants tokens 0 … 47 */
	const char *ticket = argc > 3 ? argv[3] : NULL;
	uint32_t has = argc > 2 && atoi(argv[2]) == TOKENS ? TOKENS : 0;
	struct kvd_view view = {.pages = pages + has / TOKENS,
				.page_count = 3 - has / TOKENS,
				.first_token = has, /* what pages[0] begins with */
				.token_begin = has,
				.token_end = 3 * TOKENS};
	struct kvd_room_pages bind = {.views = &view, .view_count = 1};
	struct kvd_layout *layout = kvd_layout_new(0);
	struct kvd_region *region;
	struct kvd_client *client;
	struct kvd_memory memory;
	const char *text;

	if (kvd_open(NULL, &client) ||
	    kvd_memory_alloc(PAGES * TOKENS * HEADS * HEAD_BYTES, "kv-cache", &memory))
		return fprintf(stderr, "%s\n", kvd_last_error(NULL)->message), 1;
	kv.buffer = kvd_layout_buffer(layout, memory.bytes);
	kvd_layout_heads(layout, kvd_layout_view(layout, "kv", TOKENS, PAGES), 0, KVD_NHD,
			 &kv);
	struct kvd_pool_args args = {.regions = &region, .region_count = 1};
	struct kvd_room_args open = {.room = 42,
				     .ticket = ticket, /* of the router, as 42 is */
				     .role = KVD_RECV,
				     .sources = &from,
				     .source_count = 1};
	struct kvd_room *room = NULL;
	int state = -1;

	if (!kvd_layout_text(layout, &text) && (args.layout = text) &&
	    !kvd_region_memory(client, &memory, NULL, &region) &&
	    !kvd_pool_register(client, &args, NULL, &open.pool) && /* once, at start */
	    !kvd_room_open(client, &open, NULL, &room) && /* then for each request */
	    !kvd_room_bind(room, &bind, NULL))
		/* or poll kvd_room_state() */
		state = kvd_room_wait(room, KVD_SUCCESS, 60000);
	if (state == KVD_FAILED) /* the room's own reason */
		fprintf(stderr, "%s\n", kvd_room_why(room, 0)->message);
	else if (state != KVD_SUCCESS) /* a call's */
		fprintf(stderr, "%s\n", kvd_last_error(client)->message);
	else
		printf("tokens %u to 47 are in pages 3, 9 and 4\n", has);
	kvd_layout_free(layout);
	kvd_close(client); /* rooms, pool and region go with the session */
	kvd_memory_free(&memory);
	return state != KVD_SUCCESS;
}
