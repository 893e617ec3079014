/* SPDX-License-Identifier: Apache-2.0 */
/*
 * context: the daemon object as seen by its parts: a pointer to each. kvd.c builds the
 * members in one visible order and frees them in reverse; each is written only by its own
 * part.
 */
#ifndef KVD_CONTEXT_H
#define KVD_CONTEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/account.h"
#include "daemon/base/list.h"
#include "daemon/base/metrics.h"
#include "daemon/base/module.h"

/* Of one daemon, of one peer, of one region's keys. */
#define TRANSPORTS_MAX 8u

struct config;
struct copier;
struct directory;
struct gates;
struct gpu;
struct handshake;
struct http;
struct link;
struct lock;
struct loop;
struct names;
struct offload;
struct peers;
struct pool_publisher;
struct session_clock;
struct transport;

/* Opened earlier by main(). */
struct kvd_sockets {
	int control_fd;	   /* listening, handed over by systemd, or -1 */
	int warden_fd;	   /* of warden_fork(); taken */
	struct lock *lock; /* of the name; borrowed */
};

struct kvd {
	const struct config *config;
	struct loop *loop;
	struct offload *offload;
	struct gates *gates;
	struct copier *copier;
	struct gpu *gpu;      /* NULL in tests without */
	struct list sessions; /* struct session.link */
	unsigned int session_count;
	uint64_t next_session_id, next_pool_id;
	struct transport *transports[TRANSPORTS_MAX]; /* in configured order */
	unsigned int transport_count;
	struct link *link;
	struct peers *peers;
	struct handshake *handshake;
	struct directory *directory; /* set by tests, taken by groups_new(); else NULL */
	const struct names *names;   /* names.h: cluster's; NULL: not built in */
	const struct pool_publisher *publisher; /* pool.h: handshake's; NULL: no peers */
	const struct module *const *modules;	/* ends with NULL; NULL: none */
	void *part[MODULES]; /* each module's own; NULL: switched off, or not made */
	const struct kvd_sockets *sockets; /* while the parts are made; NULL: none */
	struct offload *compute; /* attention's helper, in simulations; NULL: its own */
	struct http *http;	 /* NULL without metrics_listen */
	struct session_clock *session_clock; /* session_watch.c; NULL without sessions */
	bool draining;			     /* refuse new rooms, let running ones end */
	bool stopping;
	bool abandoned;	     /* did not quiesce; freed at process exit */
	uint8_t boot_id[16]; /* of this kernel: equal = same host */
	uint64_t started_ns; /* loop_now_ns at start */
	struct metrics metrics;
	struct accounts accounts; /* by principal; freed with the objects charged to
				   * them */
	void *impl;		  /* kvd.c's own */
};

/* Let running rooms end, then stop; at the deadline stop anyway. Idempotent. kvd.c ends
 * the daemon; commands request it. */
void kvd_drain(struct kvd *kvd, uint64_t deadline_ns);
void kvd_stop(struct kvd *kvd);

/* Ends peerings of keys that a reload removed or changed, and sessions of users that are
 * no longer admitted. */
struct kvd_ended {
	unsigned int peerings, sessions;
};

/* Read the configuration again; each option that differs is passed to on_differ, with the
 * value of the file in `fresh`, and differences in the allow-list to keys_p. With `apply`
 * the reloadable ones and the allow-list are taken. ERR_CONFIG: the file's first error;
 * nothing is taken then. */
struct config;
struct setting;
struct curve_changes;
int kvd_reload(struct kvd *kvd, bool apply,
	       void (*on_differ)(void *arg, const struct setting *row,
				 const struct config *fresh),
	       void *arg, struct curve_changes *keys_p, struct kvd_ended *ended_p);

#endif
