/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd: the daemon object: every member, built in one visible order by kvd_new()
 * and torn down in reverse. Members are public to the daemon's modules; each is
 * written only by its own module.
 */
#ifndef KVD_KVD_H
#define KVD_KVD_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/loop/loop.h"
#include "daemon/base/metrics.h"

#define KVD_TRANSPORTS_MAX 8u

struct config;
struct transport;

struct kvd {
	const struct config *config;
	struct loop *loop;
	struct offload *offload;
	struct copier *copier;
	struct gpu *gpu; /* NULL in tests without */
	struct list sessions; /* struct session.link */
	unsigned int session_count;
	uint64_t next_session_id, next_pool_id;
	struct transport *transports[KVD_TRANSPORTS_MAX]; /* in configured order */
	unsigned int transport_count;
	struct link *link;
	struct peers *peers;
	struct handshake *handshake;
	struct bootstrap *bootstrap;
	struct xfers *xfers;
	struct rooms *rooms;
	struct control *control;
	struct rings *rings; /* ring.c; NULL without any */
	struct session_clock *session_clock; /* session_watch.c; NULL without sessions */
	bool draining;	      /* refuse new rooms, let running ones end */
	bool stopping;
	bool abandoned;	      /* did not become still: freed by the kernel */
	uint8_t boot_id[16];  /* of this kernel: equal = same host */
	uint64_t started_ns;  /* loop_now_ns at start */
	struct metrics metrics;
	void *impl;	      /* kvd.c's own */
};

/* Listening sockets handed over by systemd, or -1. */
struct kvd_sockets {
	int control_fd;
};

int kvd_new(const struct config *config, const struct kvd_sockets *sockets,
	    struct kvd **kvd_p);
/* Until drained or stopped; 0, or negative when the daemon must exit with an error. */
int kvd_run(struct kvd *kvd);
void kvd_free(struct kvd *kvd);

/* Let running rooms end, then stop; at the deadline stop anyway. Idempotent. */
void kvd_drain(struct kvd *kvd, uint64_t deadline_ns);
void kvd_stop(struct kvd *kvd);

#endif
