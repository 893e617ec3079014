/* SPDX-License-Identifier: Apache-2.0 */
/*
 * live_daemon: the real daemon, started from beside the test's own program, with a
 * folder of its own (shm only, quick to miss its peers). For tests that see nothing
 * of kvd but its headers, its library and its program.
 */
#ifndef TESTS_LIVE_DAEMON_H
#define TESTS_LIVE_DAEMON_H

#include <stdint.h>
#include <sys/types.h>

#include "lib/kvd.h"

struct live_daemon {
	char dir[64], config[96], socket[96], log[96];
	pid_t pid; /* 0: none runs */
};

void live_daemon_init(
	struct live_daemon *daemon); /* its folder; starts it, waits for it */
void live_daemon_fini(struct live_daemon *daemon);  /* stops it, if it runs */
void live_daemon_start(struct live_daemon *daemon); /* again */
void live_daemon_kill(struct live_daemon *daemon);
void live_daemon_stop(struct live_daemon *daemon); /* SIGTERM; it must end with 0 */
/* Of no clock that anybody sets. */
uint64_t live_now_ms(void);
/* Its last words, for who reads why a test failed. */
void live_daemon_log(const struct live_daemon *daemon);
/* A client of it; waits until a daemon that starts is there. */
struct kvd_client *live_daemon_client(const struct live_daemon *daemon, const char *name,
				      unsigned int timeout_ms);
/* Fails the test with the client's last error if `r` is one. */
void live_well(const struct kvd_client *client, int r);

#endif
