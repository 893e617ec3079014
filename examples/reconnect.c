/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reconnect: the daemon is restarted under an engine that does nothing but open a room
 * for each request. What is retryable it tries again; memory and pool it registers once.
 *
 *   reconnect [SOCKET]     a line for each line of the standard input
 */
#include "examples/engine.h"

#include <time.h>

int main(int argc, char **argv)
{
	const struct timespec pause = {.tv_nsec = 20000000};
	struct engine engine = {0};
	struct kvd_room_args open = {.room = 45, .role = KVD_SEND};
	struct kvd_room *room;
	char line[16];
	int r, tries;

	engine_open(&engine, argc > 1 ? argv[1] : NULL);
	open.pool = engine.pool;
	for (; fgets(line, sizeof(line), stdin); open.room++) {
		for (tries = 1;; tries++) {
			r = kvd_room_open(engine.client, &open, NULL, &room);
			if (!r || !kvd_last_error(engine.client)->retryable)
				break;
			nanosleep(&pause, NULL);
		}
		if (r)
			die(engine.client, "room");
		printf("room %u: %s\n", (unsigned int)open.room,
		       tries == 1 ? "open" : "open, after other tries");
		fflush(stdout);
		kvd_room_abort(room, "the example ends it", NULL);
		kvd_room_wait(room, KVD_SUCCESS, 60000);
		kvd_room_close(room, NULL);
	}
	engine_close(&engine);
	return 0;
}
