/* SPDX-License-Identifier: Apache-2.0 */
/* trace: what all daemons that can be queried report of a room. */
#ifndef KVD_CTL_TRACE_H
#define KVD_CTL_TRACE_H

#include <cjson/cJSON.h>

#define FILE_MAX_BYTES (256u << 20) /* of --join, --views */

struct ctl;
struct kvd_client;

/* Replies about the rooms of a number, from all accessible daemons and --join:
 * {"sides": […]}, owned by the caller in any case. `more` (may be NULL) sends further
 * queries to each daemon and adds their results to its reply. */
typedef void trace_more(const struct ctl *ctl, struct kvd_client *client, cJSON *reply);
int trace_gather(struct ctl *ctl, trace_more *more, cJSON **result_p);

#endif
