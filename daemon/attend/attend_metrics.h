/* SPDX-License-Identifier: Apache-2.0 */
/* attend_metrics: what attends and prices count, read at a scrape. */
#ifndef KVD_ATTEND_METRICS_H
#define KVD_ATTEND_METRICS_H

#include "daemon/base/metrics.h"

/* X(value, type, unit, "name", "help"), of struct attend_figures *f and live *costs */
#define ATTEND_METRICS(X)                                                               \
	X(f->posts, COUNTER, NUMBER, "attention_requests_total",                        \
	  "attention requests of local engines")                                        \
	X(f->rows, COUNTER, NUMBER, "attention_request_rows_total",                     \
	  "query rows of attention requests of local engines")                          \
	X(f->bytes, COUNTER, BYTES, "attention_request_bytes_total",                    \
	  "bytes of rows and selections sent to other daemons, and of results")         \
	X(f->failed, COUNTER, NUMBER, "attention_requests_failed_total",                \
	  "attention requests of local engines that failed or were canceled")           \
	X(f->live, GAUGE, NUMBER, "attention_requests_active",                          \
	  "attention requests of local engines in progress")                            \
	X(f->served, COUNTER, NUMBER, "attention_served_total",                         \
	  "attention requests served for other daemons")                                \
	X(f->served_rows, COUNTER, NUMBER, "attention_served_rows_total",               \
	  "query rows served for other daemons")                                        \
	X(f->refused, COUNTER, NUMBER, "attention_refused_total",                       \
	  "refused attention requests of other daemons")                                \
	X(f->batches, COUNTER, NUMBER, "attention_batches_total",                       \
	  "calls of an attention kernel")                                               \
	X(f->attend_us * 1000, COUNTER, SECONDS, "attention_compute_seconds_total",     \
	  "time of attention_threads in kernel calls")                                  \
	X(f->gpu_us * 1000, COUNTER, SECONDS, "attention_gpu_seconds_total",            \
	  "time of GPUs in attention kernels (attention_gpu_share)")                    \
	X(f->waiting, GAUGE, NUMBER, "attention_queued",                                \
	  "attention requests that wait for a thread")                                  \
	X(f->threads, GAUGE, NUMBER, "attention_threads",                               \
	  "threads that compute attention (attention_threads)")                         \
	X(f->looks, COUNTER, NUMBER, "attention_busy_polls_total",                      \
	  "event loop iterations that polled for attention messages "                   \
	  "(attention_busy_poll)")                                                      \
	X(f->calibrations, COUNTER, NUMBER, "cost_calibrations_total",                  \
	  "peers measured for the cost page")                                           \
	X(f->calibration_bytes, COUNTER, BYTES, "cost_probe_bytes_total",               \
	  "bytes of cost probes in both directions")                                    \
	X(f->stale, COUNTER, NUMBER, "cost_stale_total",                                \
	  "times that the cost model of a peer no longer matched observations")         \
	X(f->echoes, COUNTER, NUMBER, "cost_probes_answered_total",                     \
	  "cost probes answered for other daemons")                                     \
	X(costs ? cost_page_reused(live_page(costs)) : 0, COUNTER, NUMBER,              \
	  "cost_rows_reused_total",                                                     \
	  "geometries replaced in the cost page by newer ones")                         \
	X(costs ? live_refused(costs) : 0, COUNTER, NUMBER, "cost_peers_refused_total", \
	  "measurements of peers that the cost page had no row for")

#endif
