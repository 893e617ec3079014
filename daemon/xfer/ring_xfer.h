/* SPDX-License-Identifier: Apache-2.0 */
/* ring_xfer: the submission ring's verbs of lists, transfers and notifications. */
#ifndef KVD_RING_XFER_H
#define KVD_RING_XFER_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/request/ring_ops.h"

extern const struct ring_verb xfer_verbs[];
/* Hooks of the same names (module.h). */
bool xfers_ring_has(const struct session *session, uint64_t id);
bool xfers_ring_cancel(struct session *session, uint64_t id);
bool xfers_ring_release(struct session *session, uint64_t id);

#endif
