/* SPDX-License-Identifier: Apache-2.0 */
/* ring_chunk: the submission ring's operations on chunks. */
#ifndef KVD_RING_CHUNK_H
#define KVD_RING_CHUNK_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/request/ring_ops.h"

extern const struct ring_verb store_verbs[];
/* As the hooks of their names (module.h). */
bool store_ring_cancel(struct session *session, uint64_t id);
bool store_ring_release(struct session *session, uint64_t id);

#endif
