/* SPDX-License-Identifier: Apache-2.0 */
/* cluster_metrics: the state of the directory at a scrape. */
#ifndef KVD_CLUSTER_METRICS_H
#define KVD_CLUSTER_METRICS_H

#include "daemon/base/metrics.h"

/* X(value, type, unit, "name", "help"), of struct groups_state *s and what
 * cluster_cells() adds to it */
#define CLUSTER_METRICS(X)                                                          \
	X(*s->where ? s->directory.up : METRIC_ABSENT, GAUGE, NUMBER,               \
	  "cluster_directory_up", "1 if the directory of option cluster responds")  \
	X(s->directory.up ? 0 : now_ns - s->directory.since_ns, GAUGE, SECONDS,     \
	  "cluster_directory_down_seconds",                                         \
	  "time for which the directory has not responded; 0 while it responds")    \
	X(s->places, GAUGE, NUMBER, "cluster_places",                               \
	  "places that the sessions of this daemon publish")                        \
	X(s->watches, GAUGE, NUMBER, "cluster_watches", "groups that are watched")  \
	X(watched.unsynced, GAUGE, NUMBER, "cluster_watches_unsynced",              \
	  "watched groups whose entries may be out of date")                        \
	X(watched.entries, GAUGE, NUMBER, "cluster_entries",                        \
	  "entries of watched groups")                                              \
	X(s->keys, GAUGE, NUMBER, "cluster_keys",                                   \
	  "keys that cluster_trust = directory knows: with an entry, or looked up") \
	X(s->keys_unknown, GAUGE, NUMBER, "cluster_keys_unknown",                   \
	  "keys that tried to connect and have no entry")                           \
	X(s->directory.puts, COUNTER, NUMBER, "cluster_puts_total",                 \
	  "entries and loads written to the directory")                             \
	X(s->directory.events, COUNTER, NUMBER, "cluster_events_total",             \
	  "changes received from the directory")                                    \
	X(s->directory.reconnects, COUNTER, NUMBER, "cluster_reconnects_total",     \
	  "new connections after the directory was lost")                           \
	X(s->directory.refused, COUNTER, NUMBER, "cluster_entries_refused_total",   \
	  "entries of others that are malformed or too long, and not used")

#endif
