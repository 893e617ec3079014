/* SPDX-License-Identifier: Apache-2.0 */
/* xfer_pair: two engines on the in-process cluster, of which one is attached to the
 * other, with a cache each; for the transfer layer's tests. */
#ifndef KVD_TESTS_XFER_PAIR_H
#define KVD_TESTS_XFER_PAIR_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/kvd_ring.h"
#include "tests/lib/cluster.h"

/* the initiator on node 0, the target on node 1 */
struct pair {
	struct cluster c;
	struct session *me, *you;
	struct cache mine, yours;
	uint64_t attach;
	uint32_t slots; /* of the engine's own, that pair_start() has taken */
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
/* The line that gives an entry of the submission ring by the socket; heap. */
char *pair_line(const struct kvd_ring_entry *entry, const void *data, size_t bytes);
/* Give it, and turn until it is done. */
void pair_submit(struct pair *p, const struct kvd_ring_entry *entry, const void *data,
		 size_t bytes);
/* Rows of the lists, and words for the other session. */
struct pair_args {
	const uint32_t *local, *remote;
	uint32_t count;	       /* 0: all rows */
	uint32_t remote_count; /* 0: as many */
	const char *notif;     /* NULL: none */
};
/* A transfer in a new slot, posted: its number. op: "read" or "write"; args NULL: all
 * rows. */
uint64_t pair_start(struct pair *p, const char *op, uint64_t local, uint64_t remote,
		    const struct pair_args *args);
/* Post an ended one again; notif NULL: with the words of before. */
void pair_again(struct pair *p, uint64_t xfer, const char *notif);
/* KVD_RING_CANCEL, KVD_RING_RELEASE. */
void pair_give(struct pair *p, enum kvd_ring_op op, uint64_t object);
void pair_notify(struct pair *p, const void *data, size_t bytes);
unsigned int pair_state(struct pair *p, uint64_t xfer);
/* Turn until the transfer is in that state. */
void pair_until(struct pair *p, uint64_t xfer, unsigned int state);
/* Turn until it has failed, with this code and these words in the text. */
void pair_fails(struct pair *p, uint64_t xfer, const char *code, const char *words);
bool pair_row_is(const struct pair *p, unsigned int yours, unsigned int mine);

#endif
