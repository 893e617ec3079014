/* SPDX-License-Identifier: Apache-2.0 */
/* attend_metrics: what attends and prices count, read at a scrape. */
#ifndef KVD_ATTEND_METRICS_H
#define KVD_ATTEND_METRICS_H

#include "daemon/base/metrics.h"

/* X(NAME, type, unit, "name", "help") */
#define ATTEND_METRICS(X)                                                       \
	X(REQUESTS, COUNTER, NUMBER, "attention_requests_total",                \
	  "attention requests of local engines")                                \
	X(ROWS, COUNTER, NUMBER, "attention_request_rows_total",                \
	  "query rows of attention requests of local engines")                  \
	X(BYTES, COUNTER, BYTES, "attention_request_bytes_total",               \
	  "bytes of rows and selections sent to other daemons, and of results") \
	X(FAILED, COUNTER, NUMBER, "attention_requests_failed_total",           \
	  "attention requests of local engines that failed or were canceled")   \
	X(ACTIVE, GAUGE, NUMBER, "attention_requests_active",                   \
	  "attention requests of local engines in progress")                    \
	X(SERVED, COUNTER, NUMBER, "attention_served_total",                    \
	  "attention requests served for other daemons")                        \
	X(SERVED_ROWS, COUNTER, NUMBER, "attention_served_rows_total",          \
	  "query rows served for other daemons")                                \
	X(REFUSED, COUNTER, NUMBER, "attention_refused_total",                  \
	  "refused attention requests of other daemons")                        \
	X(BATCHES, COUNTER, NUMBER, "attention_batches_total",                  \
	  "calls of an attention kernel")                                       \
	X(SECONDS, COUNTER, SECONDS, "attention_compute_seconds_total",         \
	  "time of attention_threads in kernel calls")                          \
	X(GPU_SECONDS, COUNTER, SECONDS, "attention_gpu_seconds_total",         \
	  "time of GPUs in attention kernels (attention_gpu_share)")            \
	X(QUEUED, GAUGE, NUMBER, "attention_queued",                            \
	  "attention requests that wait for a thread")                          \
	X(THREADS, GAUGE, NUMBER, "attention_threads",                          \
	  "threads that compute attention (attention_threads)")                 \
	X(BUSY_POLLS, COUNTER, NUMBER, "attention_busy_polls_total",            \
	  "event loop iterations that polled for attention messages "           \
	  "(attention_busy_poll)")                                              \
	X(COST_CALIBRATIONS, COUNTER, NUMBER, "cost_calibrations_total",        \
	  "peers measured for the cost page")                                   \
	X(COST_BYTES, COUNTER, BYTES, "cost_probe_bytes_total",                 \
	  "bytes of cost probes in both directions")                            \
	X(COST_STALE, COUNTER, NUMBER, "cost_stale_total",                      \
	  "times that the cost model of a peer no longer matched observations") \
	X(COST_ECHOES, COUNTER, NUMBER, "cost_probes_answered_total",           \
	  "cost probes answered for other daemons")                             \
	X(COST_REUSED, COUNTER, NUMBER, "cost_rows_reused_total",               \
	  "geometries replaced in the cost page by newer ones")                 \
	X(COST_REFUSED, COUNTER, NUMBER, "cost_peers_refused_total",            \
	  "measurements of peers that the cost page had no row for")

enum {
#define ATTEND_METRICS_OF(id, type, unit, name, help) ATTENDS_METRIC_##id,
	ATTEND_METRICS(ATTEND_METRICS_OF)
#undef ATTEND_METRICS_OF
		ATTENDS_METRIC_END,
};
#endif
