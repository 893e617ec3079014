/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pull: a prefill engine offers pages, a decode engine fetches them when it likes. Both
 * are in this program, so that it fits on a page; they know of each other only the
 * endpoint and the room's number, which a router would tell.
 *
 *   pull PREFILL_SOCKET DECODE_SOCKET
 */
#include "examples/engine.h"

int main(int argc, char **argv)
{
	struct engine prefill = {0}, decode = {0};
	const uint32_t here[] = {7, 8}, there[] = {30, 31};
	struct kvd_view offered = {.pages = here, .page_count = 2};
	struct kvd_view wanted = {.pages = there, .page_count = 2};
	struct kvd_source from = {0};
	struct kvd_room_args offer = {
		.room = 43, .role = KVD_OFFER, .views = &offered, .view_count = 1};
	struct kvd_room_args pull = {.room = 43,
				     .role = KVD_PULL,
				     .sources = &from,
				     .source_count = 1,
				     .views = &wanted,
				     .view_count = 1};
	struct kvd_room *offering, *pulling;
	bool same;

	if (argc != 3)
		return fprintf(stderr, "usage: pull PREFILL_SOCKET DECODE_SOCKET\n"), 2;
	engine_open(&prefill, argv[1]);
	engine_open(&decode, argv[2]);
	offer.pool = prefill.pool;
	pull.pool = decode.pool;
	from.endpoint = kvd_daemon(prefill.client)->endpoint;
	memset(engine_page(&prefill, 7), 0x77, PAGE_BYTES);
	memset(engine_page(&prefill, 8), 0x88, PAGE_BYTES);
	if (kvd_room_open(prefill.client, &offer, NULL, &offering))
		die(prefill.client, "offer");
	if (kvd_room_open(decode.client, &pull, NULL, &pulling))
		die(decode.client, "pull");
	if (kvd_room_wait(pulling, KVD_SUCCESS, 60000) != KVD_SUCCESS ||
	    kvd_room_wait(offering, KVD_SUCCESS, 60000) != KVD_SUCCESS)
		return fprintf(stderr, "%s\n", kvd_room_why(pulling, 0)->message), 1;
	same = !memcmp(engine_page(&decode, 30), engine_page(&prefill, 7), PAGE_BYTES) &&
	       !memcmp(engine_page(&decode, 31), engine_page(&prefill, 8), PAGE_BYTES);
	puts(same ? "pages 7 and 8 are in pages 30 and 31" : "other bytes");
	engine_close(&decode);
	engine_close(&prefill);
	return !same;
}
