/* SPDX-License-Identifier: Apache-2.0 */
/* ring_entries: entries of the submission ring about rooms, given by the socket
 * (xfer.submit), and what the status page says of them. */
#ifndef KVD_TESTS_RING_ENTRIES_H
#define KVD_TESTS_RING_ENTRIES_H

#include "proto/kvd_ring.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster.h"

/* of a payload */
struct payload {
	uint8_t *bytes;
	size_t len, views;
	uint32_t count;
};

void payload_add(struct payload *p, const void *bytes, size_t len);
struct kvd_ring_view *payload_view(struct payload *p, const char *name,
				   const uint32_t *pages, uint32_t count);
/* JSON, with ' for ". */
void payload_text(struct payload *p, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
/* The answer. The payload (NULL: none) is freed; lengths that the entry does not say are
 * its. */
cJSON *entry_say(struct cluster *c, struct session *session,
		 const struct kvd_ring_entry *entry, struct payload *payload);
void entry_give(struct cluster *c, struct session *session,
		const struct kvd_ring_entry *entry, struct payload *payload);
/* It breaks the protocol: in the ring it would end the session. */
void entry_breaks(struct cluster *c, struct session *session,
		  const struct kvd_ring_entry *entry, struct payload *payload);
struct kvd_status_slot slot_read(const struct session *session, uint32_t slot);

#endif
