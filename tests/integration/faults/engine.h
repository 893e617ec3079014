/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine: what the parts of faults-engine share: the loop and its commands
 * (engine.c), the cache (cache.c), query rows (rows.c), and rooms by the hundred for the
 * soak (batch.c).
 */
#ifndef TEST_FAULTS_ENGINE_H
#define TEST_FAULTS_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/integration/faults/cache.h"
#include "tests/integration/faults/rows.h"

#define ROOMS_MAX 512u
#define PAGES_MAX 2048u
#define WORDS 64u
#define BATCHES 2u	/* at a time */
#define BATCH_MAX 4096u /* rooms of one */

/* A row of rooms that the engine drives by itself (batch.c). */
struct batch {
	uint64_t id, first;
	uint32_t count, window; /* rooms in all, and at a time */
	bool target;
	unsigned int abort_permille;
	uint32_t base, pages; /* its part of the pool */
	char endpoint[160], pool[64];
	uint32_t next, live;
	char *results; /* a letter a room; NULL: no batch */
	uint32_t wrong, written, unsteady;
};

struct room {
	struct kvd_room *handle;
	struct cache_run run;
	enum kvd_role role;
	int state, error; /* as last seen; state -1: never */
	unsigned int aborting;
	uint64_t bytes;
	bool ended, moved_after_end;
	uint64_t ended_ns;
	uint32_t wrong;			/* pages that a success did not fill */
	uint64_t watch_id, watch_bytes; /* a `watch` to answer; 0: none */
	uint64_t still_id, still_ns;	/* a `still` */
	struct batch *batch;		/* NULL: driven by the test's lines */
	bool given, aborted, asked;
};

struct engine {
	struct kvd_client *client;
	struct cache cache;
	struct room rooms[ROOMS_MAX];
	unsigned int room_count;
	bool lost, leaving;
	struct batch batches[BATCHES];
	struct rows rows;
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
	uint32_t limit_ms; /* of each phase, and an offer's lease; 0: the daemon's */
	const char *endpoint, *pool;
};
struct send_args {
	uint64_t seq;
	uint32_t begin, end;
	bool last;
	unsigned int word;
};

void engine_print_text(const char *text);
struct room *engine_room(struct engine *e, uint64_t number, const char *role);
/* 0, or a negative code: the call was not taken. */
int engine_open(struct engine *e, const struct open_args *a, const struct kvd_call *call);
int engine_bind(struct engine *e, struct room *room, unsigned int word,
		const struct kvd_call *call);
int engine_send(struct engine *e, struct room *room, const struct send_args *a,
		const struct kvd_call *call);
/* True when the state changed. */
bool engine_look(struct engine *e, struct room *room);
/* Its pages are canaries again; another room has its place. */
void engine_forget(struct engine *e, struct room *room);

/* ID, then: FIRST COUNT WINDOW source|target ABORT_PERMILLE BASE PAGES ENDPOINT POOL */
bool batch_begin(struct engine *e, uint64_t id, const char *args);
void batch_finish(struct engine *e);
/* True while one runs. */
bool batch_turn(struct engine *e);

#endif
