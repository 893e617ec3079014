/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cluster: several daemons in one process on one virtual loop, joined by the
 * in-memory link and the fake transport: the real handshake, rooms, transfers
 * and commands, without a socket, thread or clock. Engines speak the control
 * commands by cluster_call(); their caches are real memfds.
 */
#ifndef KVD_TESTS_CLUSTER_H
#define KVD_TESTS_CLUSTER_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/config/config.h"
#include "daemon/handshake/handshake.h"
#include "daemon/base/context.h"
#include "tests/sim/link_mem.h"
#include "daemon/session/session.h"
#include "tests/sim/fake.h"

#define CLUSTER_NODES_MAX 40 /* the dead among them, unless it begins with more */

struct node {
	struct kvd kvd;
	struct config config;
	char endpoint[64];
	bool alive;
};

struct directory_hub;
struct room;

struct cluster {
	struct loop *loop;
	struct directory_hub *directory; /* that all share; NULL: each has its own */
	const struct cluster_sharing *sharing;
	struct mem_hub *links;
	struct fake_hub *bytes;
	struct node *nodes;
	unsigned int count, most;
};

/* A cache of an engine: one view "kv" (and "aux"), NHD, k and v in one buffer:
 *   layers x {k, v} x pages x page_tokens x units x unit_bytes, then aux slots. */
struct cache {
	struct session *session;
	uint8_t *base;
	int fd;
	uint64_t bytes, region, pool;
	unsigned int layers, pages, page_tokens, units, first_unit, total_units;
	unsigned int unit_bytes, aux_slots, aux_bytes;
	unsigned int shard_size, shard_rank, shard_run; /* of "kv"; 0: all tokens */
	/* k and v have half of their units; behind them is a field of 4 bytes, k_scale
	 * and v_scale */
	bool scaled;
};
/* 16 pages of 4 tokens, all heads. */
extern const struct cache cluster_geometry;

void cluster_new(struct cluster *c, uint64_t seed, unsigned int nodes);
void cluster_free(struct cluster *c); /* fails if a room, session or pool is left */
void cluster_run(struct cluster *c, uint64_t ns); /* of virtual time */
/* Turn until it holds; fails after 100 s of virtual time. */
void cluster_until(struct cluster *c, bool (*holds)(void *arg), void *arg,
		   const char *what);

/* Nodes made from now on hand their events to `wrap` before they are used. */
void cluster_wrap_events(void (*wrap)(struct kvd *kvd, struct handshake_events *events));
/* Nodes made from now on have these modules; NULL: all, without the control socket. */
void cluster_modules(const struct module *const *modules);
/* Nodes made from now on have this transport, too, and prefer it; NULL: no more. */
void cluster_prefer(const struct transport_ops *ops);
/* Nodes made from now on have the user name of their index, as links with keys prove it;
 * NULL: all are of one user, without a name. */
void cluster_users(const char *const *users);
/* Clusters made from now on have a loop with descriptors, which a submission ring needs,
 * and the world's clock: no seed replays. */
void cluster_real_time(void);
/* Nodes made from now on send and read rooms' pages as if two of them were thousands. */
void cluster_short_parts(void);
/* Nodes made from now on have their options changed so; NULL: no more. */
void cluster_configure(void (*configure)(struct config *config));
/* Clusters made from now on have one directory for all nodes, as an etcd is, by these
 * calls (directory_hub.h); NULL: each has its own. */
struct cluster_sharing {
	struct directory_hub *(*new)(struct loop *loop);
	void (*free)(struct directory_hub *hub);
	struct directory *(*member)(struct directory_hub *hub);
	void (*crash)(struct directory *member);
};
void cluster_share(const struct cluster_sharing *sharing);
/* Nodes made from now on may have so many peers; 0: as the preset is. */
void cluster_peers_max(uint32_t peers);
/* Clusters made from now on have room for so many restarts; 0: for some. */
void cluster_restarts_max(unsigned int restarts);
/* The node's daemon dies: nothing of it moves from now on; its sessions' ends are
 * only this process's housekeeping. */
void cluster_crash(struct cluster *c, unsigned int node, enum mem_crash how);
/* A new daemon at the endpoint of a dead one; its index. */
unsigned int cluster_restart(struct cluster *c, unsigned int node);

struct session *cluster_engine(struct cluster *c, unsigned int node, const char *name);
struct session *cluster_engine_of(struct cluster *c, unsigned int node, const char *name,
				  uid_t uid);
void cluster_engine_dies(struct cluster *c, struct session *session);
/* One command; turns the loop until it is answered. The caller deletes it. */
cJSON *cluster_call(struct cluster *c, struct session *session, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
/* Want of memory while a command runs: its nth allocation fails, or all from there. */
struct cluster_lack {
	uint64_t nth; /* from 1 */
	bool lasting;
	uint64_t after_ns; /* of virtual time that it lasts after the answer */
	uint64_t used;	   /* out: allocations; less than nth: none failed */
};
/* The text is JSON as it is; fd: taken, or -1; lack may be NULL. */
cJSON *cluster_call_fd(struct cluster *c, struct session *session, int fd,
		       struct cluster_lack *lack, const char *text);
/* A number of the answer, which it frees. */
uint64_t cluster_number(cJSON *answer, const char *name);
/* Of chunks of the pool's model 'm'. */
uint64_t cluster_space(struct cluster *c, struct session *engine, uint64_t pool,
		       unsigned int tokens);
/* It must succeed / fail with this code ("ESTATE"). */
void cluster_ok(struct cluster *c, struct session *session, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
void cluster_refused(struct cluster *c, struct session *session, const char *code,
		     const char *fmt, ...) __attribute__((format(printf, 4, 5)));

/* Geometry in `cache` first; makes memory, region and pool. */
void cluster_cache(struct cluster *c, struct session *session, const char *pool,
		   unsigned int rank, struct cache *cache);
void cache_close(struct cache *cache);
/* Byte `b` of unit u (the model's number) of token t in layer l, field f. */
uint8_t *cache_at(const struct cache *cache, unsigned int layer, unsigned int field,
		  unsigned int page, unsigned int token, unsigned int unit,
		  unsigned int b);
uint8_t *cache_aux(const struct cache *cache, unsigned int slot);

/* State of a room as SGLang polls it; -1: not there. */
int cluster_state(struct cluster *c, struct session *session, const char *role,
		  uint64_t room);
/* It fails, or has, with this code, and words that hold these. */
void room_failed_with(const struct room *room, enum err_code code, const char *words);
void cluster_until_state(struct cluster *c, struct session *session, const char *role,
			 uint64_t room, int state);

#endif
