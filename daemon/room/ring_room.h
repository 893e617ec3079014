/* SPDX-License-Identifier: Apache-2.0 */
/* ring_room: the submission ring's verbs of rooms. */
#ifndef KVD_RING_ROOM_H
#define KVD_RING_ROOM_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/request/ring_ops.h"

extern const struct ring_verb room_verbs[];
/* Hooks of the same names (module.h). */
bool rooms_ring_has(const struct session *session, uint64_t id);
bool rooms_ring_cancel(struct session *session, uint64_t id);
bool rooms_ring_release(struct session *session, uint64_t id);

#endif
