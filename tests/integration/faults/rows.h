/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows: query rows of a faults-engine, whose queries are 0: then every token weighs the
 * same, l is the number of tokens and o their mean, and an answer over fewer or other
 * tokens differs. Chunks hold what their number says.
 *
 *   chunks ID FIRST COUNT          puts them
 *   hold ID FIRST COUNT            holds them, here or elsewhere
 *   rows ID NUMBER LAYER ROWS CHUNKS TOKENS MS TIMES
 *                                  of the seat, with chunks of the hold, so many times;
 * MS: its deadline
 *
 * A post is a "room" of the role "attend" to who reads the lines: its states are told,
 * and `still` says what was written to its seat behind its end.
 */
#ifndef TEST_FAULTS_ROWS_H
#define TEST_FAULTS_ROWS_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/kvd.h"

struct rows {
	struct kvd_client *client;
	struct kvd_memory memory; /* pages of chunks, then the seat */
	struct kvd_region *region;
	struct kvd_pool *pool;
	struct kvd_space *space;
	struct kvd_hold *hold;
	struct kvd_attend *attend;
	struct kvd_seat seat;
	uint8_t *shadow; /* of the seat */
	uint32_t first;	 /* chunk of the hold */
	uint64_t number;
	uint32_t posted, layer, chunks, tokens, times; /* posted: rows */
	int state;
	bool live, ended, moved;
	uint32_t wrong;
	uint64_t ended_ns, still_id, still_ns;
};

/* 0, or a negative code. */
int rows_chunks(struct rows *r, const char *args);
int rows_hold(struct rows *r, const char *args);
int rows_post(struct rows *r, const char *args);
/* True: something was told. Until the post has ended. */
bool rows_look(struct rows *r, uint64_t late_ns, uint64_t now_ns);
void rows_still(struct rows *r, uint64_t id, uint32_t ms);
/* Why it failed. */
void rows_why(struct rows *r, uint64_t id);

#endif
