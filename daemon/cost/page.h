/* SPDX-License-Identifier: Apache-2.0 */
/*
 * page: the cost model's constants in shared memory. One daemon writes, from one thread;
 * its engines read, without a system call and without a lock, and cannot write.
 *
 * Rows: one a peer (the paths to it and its load), one a peer, geometry and kind of
 * memory (its attention speed), one of the daemon's own merge and splice. A peer is named
 * by 16 bytes, its instance; COST_SELF is the daemon itself. If a peer computes attention
 * and has no row for a geometry, its speed is unknown: it cannot be routed to.
 */
#ifndef KVD_COST_PAGE_H
#define KVD_COST_PAGE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/cost/cost.h"

#define COST_KEY_BYTES 16u
#define COST_PAGE_PEERS 96u
#define COST_PAGE_SPEEDS 192u

extern const uint8_t cost_self[COST_KEY_BYTES]; /* zeros */

struct cost_page;

/* The kind of memory that has the KV: index of what depends on it. */
enum { COST_HOST, COST_GPU, COST_KINDS };

/* The data of a peer. Zero all of it before it is set. */
struct cost_peer {
	uint8_t key[COST_KEY_BYTES];
	uint32_t link_count;
	uint32_t stale; /* predictions no longer hold: cost_holder.stale */
	/* as cost_holder's */
	uint32_t no_attend[COST_KINDS];
	struct cost_figure wait[COST_KINDS];
	double requesters[COST_KINDS];
	struct cost_link links[COST_LINKS_MAX];
};

/* The attention speed of a peer in a geometry; a shape of zeros stands for any, in either
 * memory. */
struct cost_speed {
	uint8_t key[COST_KEY_BYTES];
	struct cost_shape shape;
	uint32_t kind;
	struct cost_compute compute;
	struct cost_figure attend; /* as cost_holder's */
};

/* ---- the writer ---- */

/* In a sealed memfd that others map; `shared` false: in this process only. */
int cost_page_new(bool shared, struct cost_page **page_p);
/* NULL is fine. Also of one that was mapped. */
void cost_page_free(struct cost_page *page);
/* A read-only descriptor, which stays the page's; -1: it is not shared. */
int cost_page_fd(const struct cost_page *page);

/* Makes a row, or replaces the one of the same key. ERR_LIMIT: all are in use. */
int cost_page_set_peer(struct cost_page *page, const struct cost_peer *peer);
/* The same, by key, shape and kind. If all are in use: replaces the oldest. */
int cost_page_set_speed(struct cost_page *page, const struct cost_speed *speed);
uint64_t cost_page_reused(const struct cost_page *page); /* such rows */
void cost_page_set_home(struct cost_page *page, const struct cost_home *home);
/* The peer is disconnected: removes its rows, of all geometries. */
void cost_page_drop(struct cost_page *page, const uint8_t key[COST_KEY_BYTES]);

/* ---- readers ---- */

enum {
	COST_PAGE_NONE = 1, /* no such row */
	COST_PAGE_BUSY = 2, /* it is being written; or its writer died during a write */
};

/* Maps a page from its descriptor, which stays the caller's. ERR_PROTO: not a page. */
int cost_page_map(int fd, struct cost_page **page_p);
/* 0 or an outcome: each row is consistent. Links from link_count on are not set. */
int cost_page_peer(const struct cost_page *page, const uint8_t key[COST_KEY_BYTES],
		   struct cost_peer *peer);
/* Of this shape and kind, else the one for any. */
int cost_page_speed(const struct cost_page *page, const uint8_t key[COST_KEY_BYTES],
		    const struct cost_shape *shape, uint32_t kind,
		    struct cost_speed *speed);
/* The next geometry of a peer's from slot *i_p on, or false. */
bool cost_page_speed_at(const struct cost_page *page, unsigned int *i_p,
			struct cost_speed *speed);
int cost_page_home(const struct cost_page *page, struct cost_home *home);

/* A page of this process that knows one peer, COST_SELF's zeros: the remote end of a
 * published fabric, and the local end, alike. ERR_NOTFOUND: no such fabric. */
int cost_page_preset(const char *name, struct cost_page **page_p);

#endif
