/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs_loopback: proof that an adapter's writes to GPU memory have landed, and that none
 * lands later: a READ of a byte there, by the same adapter and port, over a queue pair
 * that is connected to itself.
 */
#ifndef KVD_TRANSPORT_VERBS_LOOPBACK_H
#define KVD_TRANSPORT_VERBS_LOOPBACK_H

#include <stdbool.h>
#include <stdint.h>

struct verbs_transport;
struct verbs_xfer;

/* One for each rail; its queue pair is made when first needed. */
int verbs_loopback_open(struct verbs_transport *transport);
/* No peer is left, no helper at work. Idempotent. */
void verbs_loopback_close(struct verbs_transport *transport);

/* For a transfer with known places: determines its READs. Allocates memory for them,
 * too; nothing (xfer->flushes stays NULL) when no adapter may write a GPU for it. */
int verbs_flush_plan(struct verbs_xfer *xfer);
/* Nothing more is written for it: read, over the rails that `rails` names. Once, and
 * again when a rail was lost since; calls nothing back before the next turn. They count
 * in xfer->busy; a READ that fails stops the transfer, with a message that names the
 * port. */
void verbs_flush_begin(struct verbs_xfer *xfer, uint32_t rails);
bool verbs_flush_begun(const struct verbs_xfer *xfer);
void verbs_flush_drop(struct verbs_xfer *xfer); /* none is in flight; idempotent */

#endif
