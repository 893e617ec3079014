/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tokens: how many copy threads of all daemons of this host may run at once.
 *
 * Daemons of one host (one a GPU) share cores. Each may always run one copy thread, so
 * none is ever stopped by another; every further one needs a token, and a file that all
 * of them open states their number. A token is an open file description's lock on one
 * byte of it: the kernel releases it however its holder ends, kill -9 included.
 *
 * Never blocks. All calls under one lock of the caller's.
 */
#ifndef KVD_TRANSPORT_TOKENS_H
#define KVD_TRANSPORT_TOKENS_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/err.h"

#define TOKENS_MAX 1024u
#define TOKENS_HOLD_NS UINT64_C(10000000) /* then tokens are requested */
#define TOKENS_REST_NS UINT64_C(4000000)  /* between giving and taking again */
#define TOKENS_RETRY_NS UINT64_C(1000000) /* the poll interval of a waiting thread */

struct tokens;

/* `count` tokens in the file, which is created if needed. 0: none, no file. */
int tokens_open(const char *path, unsigned int count, struct tokens **tokens_p);
void tokens_free(struct tokens *tokens); /* NULL is allowed; releases all */

/* May one more thread run when `running` do? Takes a token if it needs one.
 * False: try again after TOKENS_RETRY_NS. Without tokens (NULL): true. */
bool tokens_may_run(struct tokens *tokens, unsigned int running, uint64_t now_ns);
/* A thread has stopped for a moment, `running` others continue; is there more work? Gives
 * back unneeded tokens, and after TOKENS_HOLD_NS one that another daemon waits for. */
void tokens_settle(struct tokens *tokens, unsigned int running, bool more,
		   uint64_t now_ns);
unsigned int tokens_held(const struct tokens *tokens);

#endif
