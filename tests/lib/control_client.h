/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A daemon reduced to its control socket, and clients of it, in one thread: what
 * a client waits for is waited for by turning the daemon's loop. Anything that
 * does not come within seconds fails the test.
 */
#ifndef KVD_TESTS_CONTROL_CLIENT_H
#define KVD_TESTS_CONTROL_CLIENT_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/config/config.h"
#include "daemon/base/context.h"

/* the daemon */
struct mini {
	struct kvd kvd;
	struct config config;
	char dir[64];
	int fds_before;	     /* open descriptors before it was made */
	bool inline_helpers; /* offloaded work runs in this thread: allocation sweeps */
};

/* Change config between mini_config() and mini_start(). */
void mini_config(struct mini *mini);
void mini_start(struct mini *mini);
/* Close, wait for every session's end, free; fails if a descriptor is left. */
void mini_stop(struct mini *mini);
void mini_turn(struct mini *mini);
/* Turn until the condition holds. */
void mini_until(struct mini *mini, bool (*holds)(void *arg), void *arg, const char *what);
void mini_until_sessions(struct mini *mini, unsigned int count);
int open_fds(void); /* of this process */

#define CLIENT_FDS_MAX 64

struct client {
	struct mini *mini;
	int fd;
	char *buf;
	size_t len, cap;
	int fds[CLIENT_FDS_MAX]; /* that came with replies */
	unsigned int fd_count;
	bool eof;
};

void client_connect(struct client *client, struct mini *mini);
void client_open(struct client *client, struct mini *mini); /* and hello */
void client_close(struct client *client);		    /* NULL-safe, idempotent */
/* Send bytes as they are; returns how many went out before the daemon closed. */
size_t client_send(struct client *client, const void *bytes, size_t len);
void client_send_fds(struct client *client, const char *text, const int *fds,
		     unsigned int fd_count);
/* The next line as JSON, to be deleted; NULL when the daemon closed. */
cJSON *client_reply(struct client *client);
/* Send one line (newline added) and take the next reply. */
cJSON *client_call(struct client *client, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
cJSON *client_call_fd(struct client *client, int fd, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
/* The call must succeed; its reply's integer member. */
int64_t client_call_int(struct client *client, const char *member, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
void client_call_ok(struct client *client, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
/* The call must fail with this code. */
void client_call_fails(struct client *client, const char *code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* "" when it is no error reply. */
const char *reply_code(const cJSON *reply);
int64_t reply_int(const cJSON *reply, const char *member);
/* Deletes the reply. */
void expect_code(cJSON *reply, const char *code);
void expect_ok(cJSON *reply);
/* A sealed memfd of `bytes`, filled with `fill`. */
int memfd_filled(size_t bytes, int fill);

#endif
