/* SPDX-License-Identifier: Apache-2.0 */
/* health: the daemon's state in a word, as `health` and the metrics tell it. */
#ifndef KVD_CONTROL_HEALTH_H
#define KVD_CONTROL_HEALTH_H

struct err;
struct kvd;

enum health { HEALTH_SERVING, HEALTH_REFUSING, HEALTH_DRAINING, HEALTH_STOPPING };
extern const char *const health_names[HEALTH_STOPPING + 1];

/* HEALTH_REFUSING: *why_p says why rooms are refused. */
enum health health_of(const struct kvd *kvd, struct err *why_p);

#endif
