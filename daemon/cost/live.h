/* SPDX-License-Identifier: Apache-2.0 */
/*
 * live: the page that a daemon fills with its measurements. They are reported by their
 * makers: echoes and rounds of rows (attend), pulls (store), speeds of kernels. It keeps
 * the data that a row of the page cannot: sums of pulls, drift, times of measurements.
 * Nothing here sends or waits. Loop thread.
 */
#ifndef KVD_COST_LIVE_H
#define KVD_COST_LIVE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/cost/cost.h"
#include "daemon/cost/fit.h"
#include "daemon/cost/page.h"

struct live;

int live_new(struct live **live_p);
void live_free(struct live *live); /* NULL is fine */
struct cost_page *live_page(const struct live *live);
uint64_t live_refused(const struct live *live); /* measurements of peers without a row */

/* The path of a measurement. */
struct live_way {
	const uint8_t *key; /* the peer's instance */
	const char *transport;
	uint32_t now_s;
};

/* Echoes by their bytes, of request and reply together: sets the link's constants, which
 * are no longer stale. ERR_LIMIT: the page is full; ERR_STATE: no line fits them. */
int live_echoes(struct live *live, const struct live_way *way, const struct fit *fit);
/* A pull of so many bytes took so long. */
void live_pull(struct live *live, const struct live_way *way, double bytes, double us);
/* Rows were sent to a holder and returned: `tokens` in one layer, by `query` query
 * tokens. */
struct live_round {
	struct cost_shape shape;
	double query, tokens;
	bool selected;
	double bytes; /* request and reply */
	double us, queue_us, attend_us;
	double requesters; /* with rows for the same KV */
	uint32_t kind;	   /* of memory that has it (page.h) */
};
/* True: the path's constants have stopped predicting, for the first time since
 * live_echoes(). */
bool live_round(struct live *live, const struct live_way *way,
		const struct live_round *round);
int live_speed(struct live *live, const uint8_t key[COST_KEY_BYTES],
	       const struct cost_shape *shape, uint32_t kind,
	       const struct cost_compute *compute);
/* Whether it computes no attention in this kind of memory. */
void live_no_attend(struct live *live, const uint8_t key[COST_KEY_BYTES], uint32_t kind,
		    bool cannot);
void live_home(struct live *live, const struct cost_home *home);
/* Rows were attended to locally: the part of a round without a path. */
void live_home_round(struct live *live, const struct live_round *round, uint32_t now_s);
void live_drop(struct live *live, const uint8_t key[COST_KEY_BYTES]);

/* The i-th peer of the page, or false. */
bool live_peer_at(const struct live *live, unsigned int i, struct cost_peer *peer_p);
bool live_stale(const struct live *live, const uint8_t key[COST_KEY_BYTES]);
/* 0: the peer is due for a measurement, and then not for `again_ns`; else due in so many
 * ns. */
uint64_t live_ask(struct live *live, const uint8_t key[COST_KEY_BYTES], uint64_t now_ns,
		  uint64_t again_ns);
/* Is there a row with the link's constants? */
bool live_knows(const struct live *live, const uint8_t key[COST_KEY_BYTES]);

#endif
