/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend_world: two daemons in virtual time, a holder whose chunks have KV and a
 * requester with seats, whose engine posts query rows as entries of the ring. Four layers
 * of GQA with 4 heads of 16 bf16 values; chunks of 16 tokens.
 */
#ifndef KVD_TESTS_ATTEND_WORLD_H
#define KVD_TESTS_ATTEND_WORLD_H

#include "proto/kvd_ring.h"
#include "tests/lib/cluster_store.h"
#include "tests/lib/ring_entries.h"

#define AW_HOLDER 0u
#define AW_REQUESTER 1u
#define AW_SECOND 2u /* holder, if there are two */
#define AW_CHUNK 16u /* tokens */
#define AW_CHUNKS 4u
#define AW_HEADS 4u
#define AW_DIMS 16u
#define AW_ROWS 8u /* of a seat */
#define AW_SEATS 16u
#define AW_SLOT SESSION_SLOTS /* the first that the engine numbers */

struct attend_world {
	struct cluster c;
	struct session *engine[3];
	struct cache cache[3];
	uint64_t space[3];
	uint64_t hold,
		near; /* of the requester: chunks at the holder, chunks of its own */
	uint64_t attend, region, seat_bytes, q, o, m, l, ready, done;
	uint8_t *seats;
	uint64_t bytes;
	int fd;
	unsigned int rows;	 /* of a seat */
	unsigned int seat_count; /* of what is opened next */
	bool held;		 /* the test's: helpers of the requester do nothing */
	unsigned int chunk;	 /* tokens of what is put next */
	uint32_t gens[64];	 /* of slots from AW_SLOT on, the last that was posted */
};

/* Asked for each message about attends that came to a node, before it is read; true: it
 * is lost. Set before attend_world_new(), and back to NULL behind it. */
extern bool (*attend_world_tap)(unsigned int node, const struct wire_header *h,
				struct cursor body, void *arg);
extern void *attend_world_tap_arg;
/* Caches of worlds made from now on are fp8, with fields of scales of any bits. */
extern bool attend_world_scaled;

/* How a node sees the other. */
struct remote *attend_world_remote(const struct attend_world *w, unsigned int node);

/* The holder has chunks 1 to 4, the requester 11 to 14, of the same bytes. */
void attend_world_new(struct attend_world *w, unsigned int threads);
/* And a second holder has chunks 21 to 24. */
void attend_world_new_two(struct attend_world *w, unsigned int threads);
void attend_world_free(struct attend_world *w);
/* Of cmocka: *state is a world with a thread at each. attend_world_tap is NULL behind
 * it. */
int attend_world_setup(void **state);
int attend_world_teardown(void **state);
/* The engine of a node opens a space, and puts chunks of the first pages of its cache. */
void attend_world_put(struct attend_world *w, unsigned int node, unsigned int first,
		      unsigned int count, unsigned int pages_of_each);
/* The same pages as AW_CHUNKS chunks that are not copied. */
void attend_world_publish(struct attend_world *w, unsigned int node, unsigned int first);
/* The node's engine has one layer of 8192 tokens instead, and puts them in chunks. */
#define AW_LONG 128u	   /* tokens */
#define AW_LONG_CHUNKS 64u /* of so many */
void attend_world_long(struct attend_world *w, unsigned int node, unsigned int first);
/* Of chunks `first` to `first + count` of the engine of a node; 0: refused. */
uint64_t attend_world_hold(struct attend_world *w, unsigned int node, unsigned int first,
			   unsigned int count, unsigned int lease_ms);
uint64_t attend_world_open(struct attend_world *w, const char *more);
/* Random rows of a seat. */
void attend_world_rows(struct attend_world *w, unsigned int seat, unsigned int seed);
/* All rows of a seat with all chunks of a hold. */
struct kvd_ring_part attend_world_part(uint64_t hold);
/* An entry of the next generation of AW_SLOT + seat. */
struct kvd_ring_entry attend_world_entry(struct attend_world *w, unsigned int seat,
					 unsigned int layer);
void attend_world_post(struct attend_world *w, unsigned int seat, unsigned int layer,
		       const struct kvd_ring_part *parts, unsigned int count,
		       const uint32_t *select, unsigned int select_count);
void attend_world_post_for(struct attend_world *w, unsigned int seat,
			   const struct kvd_ring_part *part, unsigned int deadline_us);
/* Ordered by this value. */
void attend_world_order(struct attend_world *w, unsigned int seat, uint64_t value,
			const struct kvd_ring_part *part, unsigned int deadline_us);
/* The word of a seat at w->ready or w->done. */
uint64_t *attend_world_word(const struct attend_world *w, unsigned int seat, uint64_t at);
unsigned int attend_world_state(const struct attend_world *w, unsigned int seat);
unsigned int attend_world_error(const struct attend_world *w, unsigned int seat);
/* It has succeeded, and the seat has attention over tokens [0, tokens) of the chunks, or
 * over these. */
void attend_world_right(const struct attend_world *w, unsigned int seat,
			unsigned int layer, unsigned int tokens, const uint32_t *select,
			unsigned int per_token);
/* Nothing is under way at either. */
void attend_world_quiet(struct attend_world *w);
float *attend_world_floats(const struct attend_world *w, unsigned int seat, uint64_t at);

#endif
