/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handover: a request's cache handed from prefill ranks to decode ranks through real
 * rooms of a cluster, one daemon a rank, and every byte of both sides looked at.
 *
 * What a byte of the model's cache is follows from its name alone (view, layer, field,
 * token, unit), so ranks that hold the same heads hold the same bytes, however their
 * layouts place them. All other bytes of a rank are noise of its own: padding, pages of
 * other requests, and gaps between buffers. The destination must be its noise with the
 * request's bytes in it, the source as it was.
 */
#ifndef KVD_TESTS_HANDOVER_H
#define KVD_TESTS_HANDOVER_H

#include "daemon/plan/layout.h"
#include "tests/lib/cluster.h"

#define HANDOVER_RANKS_MAX 8u

enum handover_side { HANDOVER_PREFILL, HANDOVER_DECODE };

struct handover_rank {
	struct session *session;
	struct layout *layout;
	uint64_t *at; /* where each buffer begins */
	uint8_t *base, *want;
	uint64_t bytes, pool;
	int fd;
};

struct handover {
	struct cluster c;
	struct handover_rank ranks[2][HANDOVER_RANKS_MAX];
	unsigned int count[2];
	uint64_t room; /* the next one */
	/* by the last handover, as the decode ranks' rooms count it */
	uint64_t moved, rows;
	unsigned int carried; /* prefill ranks with bytes in that */
};

/* A request's place in one view of one side; token t is in page
 * (t - first_token) / page_tokens of the list. */
struct handover_pages {
	const uint32_t *pages;
	unsigned int count;
	uint64_t first_token;
};

/* Tokens [begin, end) are handed over; all ranks of a side have the same page lists. */
struct handover_view {
	const char *name;
	struct handover_pages side[2];
	uint64_t begin, end;
};

struct handover_request {
	const struct handover_view *views;
	unsigned int view_count;
	/* A push is cut into chunks of so many tokens; 0: one. Views of one token a page
	 * (states, aux) go with the last. */
	unsigned int chunk_tokens;
};

void handover_new(struct handover *h);
void handover_free(struct handover *h);
/* The side's next rank, on a daemon of its own. Takes the layout. */
void handover_rank(struct handover *h, enum handover_side side, struct layout *layout);

/* Hand it over; all rooms must succeed. */
void handover_push(struct handover *h, const struct handover_request *req);
void handover_pull(struct handover *h, const struct handover_request *req);
/* Each in turn, with every byte checked. */
void handover_both(struct handover *h, const struct handover_request *req);

/* Bytes that are not as they must be; the first is printed when there is `what`. */
uint64_t handover_wrong(const struct handover *h, const char *what);

#endif
