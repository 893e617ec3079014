/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_mem: the link's contract in memory, for tests and the simulation. Links
 * of one hub reach each other by endpoint. Everything runs on one loop's timers
 * and draws from its random numbers: on a virtual loop a seed replays exactly.
 *
 * It does what a real network may do and no more: a frame takes as long as the
 * path's rule says, order on a line is kept, and frames are lost only together
 * with the line (then a random tail of what was in flight). Frames of a node
 * that died or hung up still arrive, as they do from kernel buffers.
 */
#ifndef KVD_LINK_MEM_H
#define KVD_LINK_MEM_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/link/link.h"

struct loop;
struct mem_hub;

/* What frames from one endpoint to another go through. */
struct mem_path {
	uint64_t delay_ns, jitter_ns; /* delay + 0 … jitter a frame */
	uint32_t break_ppm;	      /* chance that a send breaks the line */
	bool cut;		      /* frames wait; new lines do not connect */
	bool refuse;		      /* new lines end with ERR_AUTH, as by a wrong key */
};

enum mem_crash {
	MEM_CRASH_KILLED, /* the process: lines to it break at once */
	MEM_CRASH_POWER,  /* the machine: lines to it stay, what is sent vanishes */
};

struct mem_stats {
	uint64_t sent, delivered, lost, refused;
};

int mem_hub_new(struct loop *loop, struct mem_hub **hub_p);
void mem_hub_free(struct mem_hub *hub); /* its links must be freed before */
/* For all paths without a rule of their own. */
void mem_hub_set_default(struct mem_hub *hub, const struct mem_path *path);
/* Holds until set again, whoever lives at the endpoints. */
int mem_hub_set_path(struct mem_hub *hub, const char *from, const char *to,
		     const struct mem_path *path);
/* Another name for an endpoint, as a host name is for an address. */
int mem_hub_alias(struct mem_hub *hub, const char *alias, const char *endpoint);
/* Both directions between two endpoints. */
int mem_hub_partition(struct mem_hub *hub, const char *a, const char *b, bool cut);
/* Break the lines of this path now; they connect again by themselves. */
void mem_hub_break(struct mem_hub *hub, const char *from, const char *to);
/* Frames in flight on one line; more are refused with ERR_LIMIT (default 1000). */
void mem_hub_set_queue_max(struct mem_hub *hub, unsigned int frames);
const struct mem_stats *mem_hub_stats(const struct mem_hub *hub);

/* `user` is what receivers see in link_frame.user. ERR_EXIST when a living link
 * has the endpoint. */
int link_mem_new(struct mem_hub *hub, const char *endpoint, const char *user,
		 struct link **link_p);
/* From now on it sends and receives nothing; free it when its owner is gone.
 * The endpoint is free for a new link. */
void link_mem_crash(struct link *link, enum mem_crash how);
/* Sent by it and delivered to it. */
uint64_t link_mem_frames(const struct link *link);
/* A stopped process: what comes waits, what it sends is refused. */
void link_mem_freeze(struct link *link, bool frozen);

#endif
