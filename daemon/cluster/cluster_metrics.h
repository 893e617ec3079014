/* SPDX-License-Identifier: Apache-2.0 */
/* cluster_metrics: the state of the directory at a scrape. */
#ifndef KVD_CLUSTER_METRICS_H
#define KVD_CLUSTER_METRICS_H

#include "daemon/base/metrics.h"

/* X(NAME, type, unit, "name", "help") */
#define CLUSTER_METRICS(X)                                                          \
	X(UP, GAUGE, NUMBER, "cluster_directory_up",                                \
	  "1 if the directory of option cluster responds")                          \
	X(DOWN, GAUGE, SECONDS, "cluster_directory_down_seconds",                   \
	  "time for which the directory has not responded; 0 while it responds")    \
	X(PLACES, GAUGE, NUMBER, "cluster_places",                                  \
	  "places that the sessions of this daemon publish")                        \
	X(WATCHES, GAUGE, NUMBER, "cluster_watches", "groups that are watched")     \
	X(UNSYNCED, GAUGE, NUMBER, "cluster_watches_unsynced",                      \
	  "watched groups whose entries may be out of date")                        \
	X(ENTRIES, GAUGE, NUMBER, "cluster_entries", "entries of watched groups")   \
	X(KEYS, GAUGE, NUMBER, "cluster_keys",                                      \
	  "keys that cluster_trust = directory knows: with an entry, or looked up") \
	X(KEYS_UNKNOWN, GAUGE, NUMBER, "cluster_keys_unknown",                      \
	  "keys that tried to connect and have no entry")                           \
	X(PUTS, COUNTER, NUMBER, "cluster_puts_total",                              \
	  "entries and loads written to the directory")                             \
	X(EVENTS, COUNTER, NUMBER, "cluster_events_total",                          \
	  "changes received from the directory")                                    \
	X(RECONNECTS, COUNTER, NUMBER, "cluster_reconnects_total",                  \
	  "new connections after the directory was lost")                           \
	X(REFUSED, COUNTER, NUMBER, "cluster_entries_refused_total",                \
	  "entries of others that are malformed or too long, and not used")

enum {
#define CLUSTER_METRICS_OF(id, type, unit, name, help) CLUSTER_METRIC_##id,
	CLUSTER_METRICS(CLUSTER_METRICS_OF)
#undef CLUSTER_METRICS_OF
		CLUSTER_METRIC_END,
};
#endif
