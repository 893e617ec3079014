/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Abort: the decode engine gives a request up. Its pages may be used again once its room
 * has failed, not before; the prefill engine is told why.
 *
 *   abort PREFILL_SOCKET DECODE_SOCKET
 */
#include "examples/engine.h"

int main(int argc, char **argv)
{
	struct engine prefill = {0}, decode = {0};
	const uint32_t pages[] = {3, 9};
	struct kvd_view view = {.pages = pages, .page_count = 2};
	struct kvd_room_pages bind = {.views = &view, .view_count = 1};
	struct kvd_room_pages chunk = {.views = &view, .view_count = 1, .last = true};
	struct kvd_source from = {0};
	struct kvd_room_args send = {.room = 44, .role = KVD_SEND};
	struct kvd_room_args recv = {
		.room = 44, .role = KVD_RECV, .sources = &from, .source_count = 1};
	struct kvd_room *tx, *rx;
	int r;

	if (argc != 3)
		return fprintf(stderr, "usage: abort PREFILL_SOCKET DECODE_SOCKET\n"), 2;
	engine_open(&prefill, argv[1]);
	engine_open(&decode, argv[2]);
	send.pool = prefill.pool;
	recv.pool = decode.pool;
	from.endpoint = kvd_daemon(prefill.client)->endpoint;
	if (kvd_room_open(prefill.client, &send, NULL, &tx))
		die(prefill.client, "send");
	if (kvd_room_open(decode.client, &recv, NULL, &rx) ||
	    kvd_room_bind(rx, &bind, NULL))
		die(decode.client, "recv");
	kvd_room_wait(tx, KVD_WAITING_FOR_INPUT, 60000);
	if (kvd_room_abort(rx, "the user closed the window", NULL))
		die(decode.client, "abort");
	if (kvd_room_wait(rx, KVD_SUCCESS, 60000) != KVD_FAILED ||
	    kvd_room_wait(tx, KVD_SUCCESS, 60000) != KVD_FAILED)
		return fprintf(stderr, "a room did not fail\n"), 1;
	printf("prefill: %s\n", kvd_room_why(tx, 0)->message);
	/* whoever goes on all the same gets the room's own error */
	r = kvd_room_send(tx, &chunk, NULL);
	printf("send: %s: %s\n", kvd_code_name(r),
	       kvd_last_error(prefill.client)->message);
	engine_close(&decode);
	engine_close(&prefill);
	return r != -KVD_E_ABORTED;
}
