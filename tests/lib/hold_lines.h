/* SPDX-License-Identifier: Apache-2.0 */
/* hold_lines: lines of tests about finds and holds, for cluster_call(). */
#ifndef KVD_TESTS_HOLD_LINES_H
#define KVD_TESTS_HOLD_LINES_H

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "proto/kvd_ring.h"

struct session;

struct hold_line {
	struct session *session;
	struct kvd_ring_entry entry; /* op 0: another line */
	uint8_t secret[KVD_RING_SECRET_BYTES];
};

/* A line of these becomes that of its entry, for xfer.submit. */
void hold_line_begin(struct hold_line *hold, struct session *session, cJSON **line);
/* Has its slot the result? For cluster_until(). */
bool hold_line_is_over(void *hold);
/* Of a line that is over, from the answer of xfer.submit. False: refused; the text of its
 * error is xfer.state's, unless memory for it was missing. */
bool hold_line_answer(const struct hold_line *hold, cJSON *answer);

#endif
