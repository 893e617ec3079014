/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine: what the parts of faults-engine share: the loop and its commands
 * (engine.c), the cache (cache.c), and rooms by the hundred for the soak (batch.c).
 */
#ifndef TEST_FAULTS_ENGINE_H
#define TEST_FAULTS_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/integration/faults/cache.h"

#define ROOMS_MAX 512u
#define PAGES_MAX 2048u
#define WORDS 64u

struct room {
	struct kvd_room *handle;
	struct cache_run run;
	enum kvd_role role;
	int state, error; /* as last seen; state -1: never */
	unsigned int aborting;
	uint64_t bytes;
	bool ended, moved_after_end;
	uint64_t ended_ns;
	uint32_t wrong; /* pages that a success did not fill */
	uint64_t watch_id, watch_bytes; /* a `watch` to answer; 0: none */
	uint64_t still_id, still_ns;	/* a `still` */
};

struct engine {
	struct kvd_client *client;
	struct cache cache;
	struct room rooms[ROOMS_MAX];
	unsigned int room_count;
	bool lost, leaving;
	bool quiet; /* a batch runs: no line for each room */
	char instance[33];
	uint64_t late_ns;
	char input[65536];
	size_t input_len;
};

struct open_args {
	uint64_t room;
	enum kvd_role role;
	uint32_t base, count, receivers;
	unsigned int word;
	const char *endpoint, *pool;
};
struct send_args {
	uint64_t seq;
	uint32_t begin, end;
	bool last;
	unsigned int word;
};

uint64_t engine_now_ns(void);
void engine_print_text(const char *text);
struct room *engine_room(struct engine *e, uint64_t number, const char *role);
/* 0, or a negative code: the call was not taken. */
int engine_open(struct engine *e, const struct open_args *a, const struct kvd_call *call);
int engine_bind(struct engine *e, struct room *room, unsigned int word,
		const struct kvd_call *call);
int engine_send(struct engine *e, struct room *room, const struct send_args *a,
		const struct kvd_call *call);
bool engine_look(struct engine *e, struct room *room);


#endif
