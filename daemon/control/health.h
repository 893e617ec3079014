/* SPDX-License-Identifier: Apache-2.0 */
/* health: the state of the daemon, as the command `health` and the metrics report it. */
#ifndef KVD_CONTROL_HEALTH_H
#define KVD_CONTROL_HEALTH_H

struct err;
struct kvd;

/* Degraded: it serves, but the directory (option cluster) is unavailable, or the disk
 * of chunk_dir does not answer. */
enum health {
	HEALTH_SERVING,
	HEALTH_REFUSING,
	HEALTH_DRAINING,
	HEALTH_STOPPING,
	HEALTH_DEGRADED
};
extern const char *const health_names[HEALTH_DEGRADED + 1];

/* HEALTH_REFUSING, HEALTH_DEGRADED: *why_p is the reason. */
enum health health_of(const struct kvd *kvd, struct err *why_p);

#endif
