/* SPDX-License-Identifier: Apache-2.0 */
/* attend_metrics: what attends and prices count, told at a scrape. */
#ifndef KVD_ATTEND_METRICS_H
#define KVD_ATTEND_METRICS_H

#include "daemon/base/metrics.h"

/* X(NAME, type, unit, "name", "help") */
#define ATTEND_METRICS(X)                                                                \
	X(ATTEND_POSTS, COUNTER, NUMBER, "attend_posts_total",                           \
	  "posts of query rows of this daemon's engines")                                \
	X(ATTEND_ROWS, COUNTER, NUMBER, "attend_rows_total", "rows of these posts")      \
	X(ATTEND_FAILED, COUNTER, NUMBER, "attend_failed_total",                         \
	  "of these posts, those that failed or were canceled")                          \
	X(ATTEND_LIVE, GAUGE, NUMBER, "attend_live", "posts under way")                  \
	X(ATTEND_SERVED, COUNTER, NUMBER, "attend_served_total",                         \
	  "attends served to other daemons")                                             \
	X(ATTEND_SERVED_ROWS, COUNTER, NUMBER, "attend_served_rows_total",               \
	  "rows of these")                                                               \
	X(ATTEND_REFUSED, COUNTER, NUMBER, "attend_refused_total",                       \
	  "attends of other daemons that were refused")                                  \
	X(ATTEND_BATCHES, COUNTER, NUMBER, "attend_batches_total",                       \
	  "calls of an attention kernel")                                                \
	X(ATTEND_SECONDS, COUNTER, SECONDS, "attend_seconds_total",                      \
	  "time of attend_threads in these calls")                                       \
	X(ATTEND_WAITING, GAUGE, NUMBER, "attend_waiting",                               \
	  "attends, own and of others, that wait for a thread")                          \
	X(ATTEND_THREADS, GAUGE, NUMBER, "attend_threads",                               \
	  "threads that attend (attend_threads)")                                        \
	X(ATTEND_LOOKS, COUNTER, NUMBER, "attend_looks_total",                           \
	  "turns in which the loop looked for attends awake (attend_spin)")              \
	X(COST_CALIBRATIONS, COUNTER, NUMBER, "cost_calibrations_total",                 \
	  "peers measured for the cost page")                                            \
	X(COST_BYTES, COUNTER, BYTES, "cost_bytes_total",                                \
	  "bytes of echoes that this took, both ways")                                   \
	X(COST_STALE, COUNTER, NUMBER, "cost_stale_total",                               \
	  "times that a peer's constants ceased to predict")                             \
	X(COST_ECHOES, COUNTER, NUMBER, "cost_echoes_total", "echoes for other daemons") \
	X(COST_REUSED, COUNTER, NUMBER, "cost_rows_reused_total",                        \
	  "geometries that left the cost page for newer ones")                           \
	X(COST_REFUSED, COUNTER, NUMBER, "cost_peers_refused_total",                     \
	  "measurements of peers for which the cost page had no row")

enum {
#define ATTEND_METRICS_OF(id, type, unit, name, help) ATTENDS_METRIC_##id,
	ATTEND_METRICS(ATTEND_METRICS_OF)
#undef ATTEND_METRICS_OF
		ATTENDS_METRIC_END,
};
#endif
