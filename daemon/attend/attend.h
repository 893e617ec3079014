/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend: sends query rows to the daemon that has the KV of chunks, which computes
 * attention there and returns partial results; these are merged.
 *
 *   attend  an engine's seats in memory of its own, and the shape of its attention
 *   seat    query rows, and their results: q, o, m, l
 *   post    an attention request: a seat's rows with one layer's KV of some holds: parts
 *   leg     a subtransfer: a part's rows with the chunks of one daemon
 *
 * An engine posts, and the requested daemon serves; both put rows into one queue
 * (compute.h). Only the engine's own daemon writes to a seat, when all subtransfers are
 * complete: so a post that ends has ended, even if work continues elsewhere. Loop thread.
 *
 * An engine on a GPU posts a layer before its stream has written q (ordered): the stream
 * stores a value in the seat's word `ready` behind q, and waits for the same value in
 * `done`, which each end of the post stores.
 */
#ifndef KVD_ATTEND_H
#define KVD_ATTEND_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/attend/form.h"
#include "daemon/base/context.h"

struct attend;
struct attends;
struct cursor;
struct err;
struct region;
struct remote;
struct session;
struct wire_header;

#define ATTEND_PARTS_MAX 64u	     /* of a post */
#define ATTEND_SEATS_MAX 256u	     /* of an attend */
#define ATTEND_SELECT_MAX (1u << 20) /* of a post: numbers of tokens */

extern const struct module attend_module;
static inline struct attends *attends_of(const struct kvd *kvd)
{
	return kvd->part[MODULE_ATTEND];
}
/* All posts fail, no more requests are served. NULL is fine. */
void attends_close(struct attends *attends);
bool attends_drained(const struct attends *attends); /* NULL is fine */

struct attend_args {
	uint64_t region, offset; /* where the first seat is */
	uint32_t rows, seats;
	struct form form;
};
struct attend_facts {
	uint64_t id, seat_bytes; /* from one seat to the next */
	/* in a seat, from its start on */
	uint64_t q, o, m, l, ready, done;
};
/* ERR_INVAL, ERR_RANGE, ERR_NOTFOUND, ERR_LIMIT. */
int attend_open(struct session *session, const struct attend_args *args,
		struct attend **attend_p);
void attend_facts(const struct attend *attend, struct attend_facts *facts_p);
struct attend *attend_find(struct session *session, uint64_t id); /* ERR_NOTFOUND */
void attend_close(struct attend *attend);			  /* ends its posts */

struct attend_post_args {
	uint64_t id; /* of the post: its slot's */
	uint32_t slot;
	uint32_t seat, layer;
	uint64_t deadline_ns;
	uint64_t value; /* of the seat's words ready and done; 0: not ordered */
	uint8_t *data;	/* parts, then the selections of all: attend_post() takes it */
	uint32_t part_count, select_count;
	/* the highest of each part's numbers, plus one: attend_post_scan() */
	uint32_t bounds[ATTEND_PARTS_MAX];
	/* It fails after its start: sets the slot's word. */
	void (*on_failed)(struct session *session, uint32_t slot, uint64_t id,
			  const struct err *why);
};
/* The slot is claimed; it is the post's from here on, if this succeeds. ERR_INVAL,
 * ERR_RANGE, ERR_NOTFOUND, ERR_BUSY, ERR_LEASE, ERR_REQUIRE (that daemon cannot compute
 * it), … */
int attend_post(struct attend *attend, struct attend_post_args *args);
/* An ordered request was refused before it had a post: sets the seat's word `done`,
 * unless the seat is in use. */
void attend_pass(struct session *session, uint64_t id, uint32_t seat, uint64_t value);
/* Scans all selections; any thread. */
void attend_post_scan(uint32_t heads, struct attend_post_args *args);
uint32_t attend_heads(const struct attend *attend);
/* Is it in progress, and its slot in use? */
bool attend_posted(const struct session *session, uint64_t id);
/* False: unknown, or ended. */
bool attend_cancel(struct session *session, uint64_t id);
/* The module's hooks. */
void attends_region_going(struct region *region);
int attends_on_message(struct remote *remote, const struct wire_header *h,
		       struct cursor *body);
void attends_on_change(struct remote *remote);

struct attend_figures {
	uint64_t posts, rows, bytes, failed, served, served_rows, batches, refused;
	uint64_t calibrations, calibration_bytes, stale, echoes; /* echoes: for others */
	uint64_t attend_us, gpu_us;				 /* of threads; of GPUs */
	uint64_t looks; /* busy-poll iterations of the loop */
	unsigned int threads, waiting, live;
	const char *isa;
};
void attends_figures(const struct attends *attends, struct attend_figures *figures_p);

#endif
