/* SPDX-License-Identifier: Apache-2.0 */
/* xfer_pair: two engines on the in-process cluster, of which one is attached to the
 * other, with a cache each; for the transfer layer's tests. */
#ifndef KVD_TESTS_XFER_PAIR_H
#define KVD_TESTS_XFER_PAIR_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/lib/cluster.h"

/* the initiator on node 0, the target on node 1 */
struct pair {
	struct cluster c;
	struct session *me, *you;
	struct cache mine, yours;
	uint64_t attach;
};

int pair_setup(void **state);		 /* two daemons */
int pair_setup_one_daemon(void **state); /* both engines on node 0 */
int pair_teardown(void **state);
/* A figure of an answer, which is freed. */
/* `from` to `to`, which is on that node: the attachment. */
uint64_t pair_attach(struct pair *p, struct session *from, struct session *to,
		     unsigned int node);
/* A list of so many rows of 256 bytes, of our cache or of theirs. */
uint64_t pair_rows(struct pair *p, bool local, uint64_t count);
/* A grid over the whole cache: 256 rows of 256 bytes. */
uint64_t pair_grid(struct pair *p, bool local);
/* xfer.start; `rest` is more of its arguments, "" or ",'…':…". */
uint64_t pair_start(struct pair *p, const char *op, uint64_t local, uint64_t remote,
		    const char *rest);
unsigned int pair_state(struct pair *p, uint64_t xfer);
/* Turn until the transfer is in that state. */
void pair_until(struct pair *p, uint64_t xfer, unsigned int state);
bool pair_row_is(const struct pair *p, unsigned int yours, unsigned int mine);

#endif
