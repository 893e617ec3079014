/* SPDX-License-Identifier: Apache-2.0 */
/*
 * context: the daemon object as its parts see it: a pointer to each. kvd.c builds
 * the members in one visible order and frees them in reverse; each is written only
 * by its own part.
 */
#ifndef KVD_CONTEXT_H
#define KVD_CONTEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/account.h"
#include "daemon/base/list.h"
#include "daemon/base/metrics.h"

/* Of one daemon, of one peer, of one region's keys. */
#define TRANSPORTS_MAX 8u

struct attends;
struct config;
struct control;
struct copier;
struct directory;
struct gates;
struct gpu;
struct groups;
struct handshake;
struct http;
struct link;
struct live;
struct loads;
struct loop;
struct offload;
struct peers;
struct rings;
struct rooms;
struct session_clock;
struct session_events;
struct store;
struct transport;
struct xfers;

struct kvd {
	const struct config *config;
	struct loop *loop;
	struct offload *offload;
	struct gates *gates;
	struct copier *copier;
	struct gpu *gpu;			     /* NULL in tests without */
	struct list sessions;			     /* struct session.link */
	const struct session_events *session_events; /* session.h; NULL: nobody asks */
	unsigned int session_count;
	uint64_t next_session_id, next_pool_id;
	struct transport *transports[TRANSPORTS_MAX]; /* in configured order */
	unsigned int transport_count;
	struct link *link;
	struct peers *peers;
	struct handshake *handshake;
	struct directory *directory; /* of tests, taken by groups_new(); else NULL */
	struct groups *groups;	     /* NULL in tests of less, and when peers are freed */
	struct xfers *xfers;
	struct loads *loads; /* NULL in tests of less */
	struct rooms *rooms;
	struct store *store; /* NULL: it keeps no chunks */
	struct attends *attends;
	struct live *costs; /* with attends */
	struct control *control;
	struct http *http;		     /* NULL without metrics_listen */
	struct rings *rings;		     /* ring.c; NULL without any */
	struct session_clock *session_clock; /* session_watch.c; NULL without sessions */
	bool draining;			     /* refuse new rooms, let running ones end */
	bool stopping;
	bool abandoned;	     /* did not quiesce: freed by the kernel */
	uint8_t boot_id[16]; /* of this kernel: equal = same host */
	uint64_t started_ns; /* loop_now_ns at start */
	struct metrics metrics;
	struct accounts accounts; /* by principal; freed with what they are charged for */
	void *impl;		  /* kvd.c's own */
};

/* Let running rooms end, then stop; at the deadline stop anyway. Idempotent. The end
 * is kvd.c's; commands ask for it. */
void kvd_drain(struct kvd *kvd, uint64_t deadline_ns);
void kvd_stop(struct kvd *kvd);

/* What a reload ends: peerings of keys that were removed or changed, and sessions of
 * users that are not admitted any more. */
struct kvd_ended {
	unsigned int peerings, sessions;
};

/* Read the configuration again; each option that differs goes to on_differ, with the
 * value of the file in `fresh`, and what differs in the allow-list to keys_p. With
 * `apply` the reloadable ones and the allow-list
 * are taken. ERR_CONFIG: the file's first error; nothing is taken then. */
struct config;
struct setting;
struct curve_changes;
int kvd_reload(struct kvd *kvd, bool apply,
	       void (*on_differ)(void *arg, const struct setting *row,
				 const struct config *fresh),
	       void *arg, struct curve_changes *keys_p, struct kvd_ended *ended_p);

#endif
