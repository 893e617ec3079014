/* SPDX-License-Identifier: Apache-2.0 */
/*
 * metrics: the daemon's counters and gauges. One row per family has its name, type, unit,
 * labels and help; `stats`, the metrics endpoint and the reference follow from the table.
 * A family has a cell for each value of its labels, so counting is one addition. Counters
 * only rise; gauges are levels. Any thread may add to a cell; histograms and peers are
 * the loop's.
 */
#ifndef KVD_METRICS_H
#define KVD_METRICS_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/account.h"
#include "daemon/base/err.h"
#include "daemon/base/histogram.h"

enum metric_type { METRIC_COUNTER, METRIC_GAUGE, METRIC_HISTOGRAM };
/* Cells of seconds hold nanoseconds. */
enum metric_unit { METRIC_NUMBER, METRIC_BYTES, METRIC_SECONDS };

/* Peers with their own set of values; the rest share a last set, "other". */
#define METRIC_PEERS_MAX 64u
#define METRIC_PEER_OTHER METRIC_PEERS_MAX
#define METRIC_PEER_NAME 208u

/*
 * Labels. X(NAME, values, "label", "second label"): the same value selects both.
 * daemon/metrics/labels.c has the names of the values.
 */
#define METRIC_LABELS(X)                                   \
	X(NONE, 1, NULL, NULL)                             \
	X(VERSION, 1, "version", "name")                   \
	X(DAEMON_STATE, 5, "state", NULL)                  \
	X(ROLE, 4, "role", NULL)                           \
	X(ROOM_STATE, 6, "state", NULL)                    \
	X(ROOM_END, ERR_CODE_END, "result", "code")        \
	X(ROOM_PHASE, 4, "phase", NULL)                    \
	X(DIRECTION, 2, "direction", NULL)                 \
	X(TRANSPORT, 8, "transport", NULL)                 \
	X(PEER, METRIC_PEERS_MAX + 1, "peer", NULL)        \
	X(PEER_STATE, 3, "state", NULL)                    \
	X(XFER_OP, 2, "op", NULL)                          \
	X(XFER_END, 3, "result", NULL)                     \
	X(NOTIF_END, 2, "result", NULL)                    \
	X(REGION_KIND, 7, "kind", NULL)                    \
	X(ACCOUNT_CLASS, ACCOUNT_CLASS_END, "class", NULL) \
	X(COMMAND, 96, "command", NULL)                    \
	X(COMMAND_END, 2, "result", NULL)

enum metric_label {
#define METRIC_LABEL_ENUM(id, values, first, second) METRIC_BY_##id,
	METRIC_LABELS(METRIC_LABEL_ENUM)
#undef METRIC_LABEL_ENUM
		METRIC_BY_END,
};
enum {
#define METRIC_LABEL_VALUES(id, values, first, second) METRIC_VALUES_##id = (values),
	METRIC_LABELS(METRIC_LABEL_VALUES)
#undef METRIC_LABEL_VALUES
};
enum metric_direction { METRIC_IN, METRIC_OUT };
enum metric_phase {
	METRIC_PHASE_BOOTSTRAP,
	METRIC_PHASE_WAITING,
	METRIC_PHASE_TRANSFER,
	METRIC_PHASE_TOTAL,
};
enum metric_xfer_end { METRIC_XFER_SUCCESS, METRIC_XFER_FAILED, METRIC_XFER_CANCELED };
enum metric_notif_end { METRIC_NOTIF_PASSED, METRIC_NOTIF_DROPPED };
enum metric_command_end { METRIC_COMMAND_OK, METRIC_COMMAND_ERROR };

/* X(NAME, type, unit, label, label, "name", "help"). The exported name is kvd_NAME,
 * except names starting with process_, which are the same in every program. */
#define METRICS(X)                                                                       \
	X(SESSIONS, GAUGE, NUMBER, NONE, NONE, "sessions",                               \
	  "connected engines (control sessions)")                                        \
	X(SESSIONS_OPENED, COUNTER, NUMBER, NONE, NONE, "sessions_opened_total",         \
	  "accepted control connections")                                                \
	X(SESSIONS_REFUSED, COUNTER, NUMBER, NONE, NONE, "sessions_refused_total",       \
	  "refused control connections: not authorized, too frequent, or over the "      \
	  "limit")                                                                       \
	X(SESSIONS_KILLED, COUNTER, NUMBER, NONE, NONE, "sessions_killed_total",         \
	  "control connections closed by the daemon: protocol error, full reply "        \
	  "queue, or dead owner")                                                        \
	X(COMMANDS, COUNTER, NUMBER, COMMAND, COMMAND_END, "commands_total",             \
	  "answered control commands")                                                   \
	X(CONTROL_IN_BYTES, COUNTER, BYTES, NONE, NONE, "control_in_bytes_total",        \
	  "bytes of control requests")                                                   \
	X(CONTROL_OUT_BYTES, COUNTER, BYTES, NONE, NONE, "control_out_bytes_total",      \
	  "bytes of control replies")                                                    \
	X(PRINCIPALS, GAUGE, NUMBER, NONE, NONE, "principals",                           \
	  "users, keys and addresses that are charged for memory or objects")            \
	X(ACCOUNT_BYTES, GAUGE, BYTES, ACCOUNT_CLASS, NONE, "account_bytes",             \
	  "memory kept for engines and other daemons, by class")                         \
	X(ACCOUNT_LIMIT, GAUGE, BYTES, NONE, NONE, "account_limit_bytes",                \
	  "limit of this memory over all classes (memory_limit)")                        \
	X(ACCOUNT_REFUSED, COUNTER, NUMBER, ACCOUNT_CLASS, NONE,                         \
	  "account_refused_total",                                                       \
	  "requests refused because the principal's share or memory_limit was "          \
	  "exhausted")                                                                   \
	X(REGIONS, GAUGE, NUMBER, NONE, NONE, "regions", "registered memory regions")    \
	X(REGION_BYTES, GAUGE, BYTES, REGION_KIND, NONE, "region_bytes",                 \
	  "bytes of registered memory regions")                                          \
	X(REGIONS_REFUSED, COUNTER, NUMBER, NONE, NONE, "regions_refused_total",         \
	  "failed registrations")                                                        \
	X(POOLS, GAUGE, NUMBER, NONE, NONE, "pools", "registered pools")                 \
	X(ROOMS, GAUGE, NUMBER, ROLE, ROOM_STATE, "rooms", "open rooms")                 \
	X(ROOMS_OPENED, COUNTER, NUMBER, NONE, NONE, "rooms_opened_total",               \
	  "opened rooms")                                                                \
	X(ROOMS_ENDED, COUNTER, NUMBER, ROLE, ROOM_END, "rooms_ended_total",             \
	  "finished rooms, by result and error code")                                    \
	X(ROOM_OLDEST, GAUGE, SECONDS, ROOM_STATE, NONE, "room_oldest_seconds",          \
	  "age of the room that has been in the state for the longest time")             \
	X(ROOM_RECEIVED_BYTES, COUNTER, BYTES, NONE, NONE, "room_received_bytes_total",  \
	  "bytes received in rooms of local engines")                                    \
	X(ROOM_SENT_BYTES, COUNTER, BYTES, NONE, NONE, "room_sent_bytes_total",          \
	  "bytes sent or served in rooms of local engines")                              \
	X(ROOM_STAGED_BYTES, COUNTER, BYTES, NONE, NONE, "room_staged_bytes_total",      \
	  "bytes of both directions that were copied through a buffer of the "           \
	  "daemon")                                                                      \
	X(TRANSFERRED_BYTES, COUNTER, BYTES, DIRECTION, TRANSPORT,                       \
	  "transferred_bytes_total",                                                     \
	  "bytes of rooms and transfers, by transport of the peer")                      \
	X(CHUNKS_RECEIVED, COUNTER, NUMBER, NONE, NONE, "chunks_received_total",         \
	  "chunks received in rooms")                                                    \
	X(CHUNKS_SENT, COUNTER, NUMBER, NONE, NONE, "chunks_sent_total",                 \
	  "chunks sent in rooms")                                                        \
	X(PULLS_SERVED, COUNTER, NUMBER, NONE, NONE, "pulls_served_total",               \
	  "served or validated reads of offers")                                         \
	X(PULLS_TAKEN_BACK, COUNTER, NUMBER, NONE, NONE, "pulls_retried_total",          \
	  "pulls that failed with a retryable error")                                    \
	X(ORPHANS, GAUGE, NUMBER, NONE, NONE, "early_requests",                          \
	  "peers' requests that wait for their room to open")                            \
	X(ORPHANS_KEPT, COUNTER, NUMBER, NONE, NONE, "early_requests_kept_total",        \
	  "peers' requests that were kept for a room that was not open")                 \
	X(ORPHANS_EXPIRED, COUNTER, NUMBER, NONE, NONE, "early_requests_expired_total",  \
	  "kept requests that were refused after early_request_ttl")                     \
	X(ORPHANS_REFUSED, COUNTER, NUMBER, NONE, NONE, "early_requests_refused_total",  \
	  "kept requests that were dropped at the limit (early_requests) or "            \
	  "during a drain")                                                              \
	X(ROOM_LATE, COUNTER, NUMBER, NONE, NONE, "room_messages_late_total",            \
	  "messages and requests for rooms that had ended")                              \
	X(ROOM_REFUSED, COUNTER, NUMBER, NONE, NONE, "room_messages_refused_total",      \
	  "refused room messages of peers")                                              \
	X(ROOM_UNAUTHORIZED, COUNTER, NUMBER, NONE, NONE,                                \
	  "room_messages_unauthorized_total",                                            \
	  "refused messages of peers that are not authorized for the room: "             \
	  "missing or wrong ticket, or not a peer of the room")                          \
	X(BOOTSTRAP_TIMEOUTS, COUNTER, NUMBER, NONE, NONE,                               \
	  "rooms_bootstrap_timeouts_total",                                              \
	  "rooms that failed because the other side did not open them in time")          \
	X(WAITING_TIMEOUTS, COUNTER, NUMBER, NONE, NONE, "rooms_waiting_timeouts_total", \
	  "rooms that failed because nothing was bound, offered or sent in time")        \
	X(STALLS, COUNTER, NUMBER, NONE, NONE, "rooms_stalled_total",                    \
	  "rooms that failed because no posted byte moved in time")                      \
	X(LEASES_EXPIRED, COUNTER, NUMBER, NONE, NONE, "leases_expired_total",           \
	  "offers that failed because their lease expired")                              \
	X(FENCES_WIDENED, COUNTER, NUMBER, NONE, NONE, "fences_forced_total",            \
	  "peer connections closed because a fence was not confirmed in time")           \
	X(PEERS, GAUGE, NUMBER, PEER_STATE, NONE, "peers",                               \
	  "known remote daemons, by connection state")                                   \
	X(PEER_RTT, GAUGE, SECONDS, PEER, NONE, "peer_rtt_seconds",                      \
	  "round-trip time of the last answered ping")                                   \
	X(PEER_BYTES, COUNTER, BYTES, PEER, DIRECTION, "peer_bytes_total",               \
	  "bytes of rooms and transfers; peers after the 64th share the label other")    \
	X(PEER_INFLIGHT, GAUGE, BYTES, PEER, NONE, "peer_inflight_bytes",                \
	  "bytes in flight to the peer")                                                 \
	X(PEER_LOST, COUNTER, NUMBER, PEER, NONE, "peer_disconnects_total",              \
	  "connections to the peer that ended unexpectedly")                             \
	X(DEAD_AFTER, GAUGE, SECONDS, NONE, NONE, "peer_dead_after_seconds",             \
	  "silence after which a peer is declared dead (dead_after)")                    \
	X(INSECURE, GAUGE, NUMBER, NONE, NONE, "insecure",                               \
	  "1 if peers are not authenticated (option insecure)")                          \
	X(PLAIN_PEERS, GAUGE, NUMBER, NONE, NONE, "peers_unencrypted",                   \
	  "connected daemons of other hosts without encryption of data")                 \
	X(XFERS_STARTED, COUNTER, NUMBER, NONE, NONE, "xfers_started_total",             \
	  "started transfers")                                                           \
	X(XFERS, COUNTER, NUMBER, XFER_OP, XFER_END, "xfers_total",                      \
	  "finished transfers")                                                          \
	X(XFER_IN_BYTES, COUNTER, BYTES, NONE, NONE, "xfer_in_bytes_total",              \
	  "bytes that transfers wrote into memory of local engines")                     \
	X(XFER_OUT_BYTES, COUNTER, BYTES, NONE, NONE, "xfer_out_bytes_total",            \
	  "bytes that transfers read from memory of local engines")                      \
	X(XFER_REFUSED, COUNTER, NUMBER, NONE, NONE, "xfer_refused_total",               \
	  "refused transfers of other daemons")                                          \
	X(NOTIFS, COUNTER, NUMBER, DIRECTION, NOTIF_END, "notifications_total",          \
	  "notifications; dropped: the session did not read them, or was closed")        \
	X(LOOP_TURNS, COUNTER, NUMBER, NONE, NONE, "loop_iterations_total",              \
	  "event loop iterations")                                                       \
	X(LOOP_SLOW_TURNS, COUNTER, NUMBER, NONE, NONE, "loop_slow_iterations_total",    \
	  "event loop iterations with more than 200 us of CPU time")                     \
	X(LOOP_LONGEST, GAUGE, SECONDS, NONE, NONE, "loop_longest_iteration_seconds",    \
	  "longest event loop iteration since startup, in wall-clock time")              \
	X(RING_ENTRIES, COUNTER, NUMBER, NONE, NONE, "ring_entries_total",               \
	  "processed entries of submission rings")                                       \
	X(STATE, GAUGE, NUMBER, DAEMON_STATE, NONE, "state",                             \
	  "1 for the current state of the daemon, 0 for the others")                     \
	X(BUILD, GAUGE, NUMBER, VERSION, NONE, "build_info",                             \
	  "1; the labels are the version and the daemon's name")                         \
	X(PROCESS_CPU, COUNTER, SECONDS, NONE, NONE, "process_cpu_seconds_total",        \
	  "CPU time of all threads")                                                     \
	X(PROCESS_RESIDENT, GAUGE, BYTES, NONE, NONE, "process_resident_memory_bytes",   \
	  "resident memory, including mapped memory of engines")                         \
	X(PROCESS_VIRTUAL, GAUGE, BYTES, NONE, NONE, "process_virtual_memory_bytes",     \
	  "virtual memory")                                                              \
	X(PROCESS_FDS, GAUGE, NUMBER, NONE, NONE, "process_open_fds",                    \
	  "open file descriptors")                                                       \
	X(PROCESS_FDS_MAX, GAUGE, NUMBER, NONE, NONE, "process_max_fds",                 \
	  "limit of open file descriptors")                                              \
	X(PROCESS_THREADS, GAUGE, NUMBER, NONE, NONE, "process_threads", "threads")      \
	X(PROCESS_START, GAUGE, SECONDS, NONE, NONE, "process_start_time_seconds",       \
	  "start time of the process, in seconds since 1970-01-01 UTC")

/* X(NAME, unit, end of the first bucket, label, label, "name", "help") */
#define METRIC_HISTOGRAMS(X)                                                    \
	X(ROOM_PHASE, SECONDS, 50000, ROLE, ROOM_PHASE, "room_phase_seconds",   \
	  "duration of completed phases of rooms; total: of successful rooms")  \
	X(ROOM_SIZE, BYTES, 4096, NONE, NONE, "room_size_bytes",                \
	  "bytes of successful rooms")                                          \
	X(LOOP_BUSY, SECONDS, 1000, NONE, NONE, "loop_busy_seconds",            \
	  "wall-clock time of event loop iterations")                           \
	X(LOOP_CPU, SECONDS, 1000, NONE, NONE, "loop_cpu_seconds",              \
	  "CPU time of event loop iterations; the target is 200 us")            \
	X(LOOP_LATE, SECONDS, 1000, NONE, NONE, "loop_late_seconds",            \
	  "delay between a timer's due time and the event loop iteration that " \
	  "served it")

/* A family's first cell; its others follow, by METRIC_AT(). */
enum metric {
#define METRIC_ENUM(id, type, unit, one, two, name, help) \
	METRIC_##id,                                      \
		METRIC_LAST_##id =                        \
			METRIC_##id + METRIC_VALUES_##one * METRIC_VALUES_##two - 1,
	METRICS(METRIC_ENUM)
#undef METRIC_ENUM
		METRIC_END,
};
enum metric_histogram {
#define METRIC_ENUM(id, unit, first, one, two, name, help) \
	METRIC_##id,                                       \
		METRIC_LAST_##id =                         \
			METRIC_##id + METRIC_VALUES_##one * METRIC_VALUES_##two - 1,
	METRIC_HISTOGRAMS(METRIC_ENUM)
#undef METRIC_ENUM
		METRIC_HISTOGRAMS_END,
};
/* Values of a family's second label, and the start of a histogram's buckets. */
enum {
#define METRIC_ENUM(id, type, unit, one, two, name, help) \
	METRIC_STEP_##id = METRIC_VALUES_##two,
	METRICS(METRIC_ENUM)
#undef METRIC_ENUM
#define METRIC_ENUM(id, unit, first, one, two, name, help) \
	METRIC_STEP_##id = METRIC_VALUES_##two, METRIC_FIRST_##id = (first),
		METRIC_HISTOGRAMS(METRIC_ENUM)
#undef METRIC_ENUM
};
#define METRIC_AT(id, i, j)                                               \
	((unsigned int)METRIC_##id + (unsigned int)(i)*METRIC_STEP_##id + \
	 (unsigned int)(j))

/* A gauge that has no value at the moment. */
#define METRIC_ABSENT UINT64_MAX

struct metric_peer {
	char name[METRIC_PEER_NAME]; /* "" = never used */
	const void *owner;	     /* the connected peer; NULL: none */
	uint64_t left;		     /* order of going */
};

struct metrics {
	uint64_t value[METRIC_END]; /* atomic */
	struct histogram histogram[METRIC_HISTOGRAMS_END];
	struct metric_peer peers[METRIC_PEERS_MAX];
	uint64_t peers_left;
	bool peers_other; /* a peer had no set of its own */
};

static inline void metrics_add(struct metrics *m, unsigned int cell, uint64_t n)
{
	assert(cell < METRIC_END);
	__atomic_fetch_add(&m->value[cell], n, __ATOMIC_RELAXED);
}
/* Gauges. */
static inline void metrics_sub(struct metrics *m, unsigned int cell, uint64_t n)
{
	assert(cell < METRIC_END);
	__atomic_fetch_sub(&m->value[cell], n, __ATOMIC_RELAXED);
}
static inline uint64_t metrics_get(const struct metrics *m, unsigned int cell)
{
	return __atomic_load_n(&m->value[cell], __ATOMIC_RELAXED);
}
static inline void metrics_set(struct metrics *m, unsigned int cell, uint64_t value)
{
	assert(cell < METRIC_END);
	__atomic_store_n(&m->value[cell], value, __ATOMIC_RELAXED);
}
/* Of a family: `id` as in METRIC_AT(). */
#define METRICS_SUM(m, id) metrics_sum(m, METRIC_##id, METRIC_LAST_##id)
uint64_t metrics_sum(const struct metrics *m, unsigned int first, unsigned int last);
#define METRICS_OBSERVE(m, id, i, j, v) \
	histogram_put(&(m)->histogram[METRIC_AT(id, i, j)], v, METRIC_FIRST_##id)

/* The set of a newly connected peer (`owner`); a set of that name continues with its
 * counts. If no set is free, the one of the peer that disconnected first is reused.
 * METRIC_PEER_OTHER: all are connected. */
unsigned int metrics_peer(struct metrics *m, const char *name, const void *owner);
/* It has disconnected. METRIC_PEER_OTHER is allowed. */
void metrics_peer_left(struct metrics *m, unsigned int peer, const void *owner);

struct metric_row {
	const char *name, *help;
	enum metric_type type;
	enum metric_unit unit;
	enum metric_label label[2];
	unsigned int cell;     /* the first; of histograms: in histogram[] */
	unsigned int count[2]; /* values of each label */
	uint64_t first;	       /* histograms: end of the first bucket */
};
/* A module's own: one cell each, in their order, by a list X(value, type, unit, "name",
 * "help"). */
#define METRIC_OWN(value, own_type, own_unit, own_name, own_help) \
	{.name = (own_name),                                      \
	 .help = (own_help),                                      \
	 .type = METRIC_##own_type,                               \
	 .unit = METRIC_##own_unit,                               \
	 .count = {1, 1}},
#define METRIC_CELL(value, type, unit, name, help) *cells++ = (value);
#define METRIC_OWN_MAX 64u

/* Values, then histograms. */
#define METRIC_ROW(...) +1
#define METRIC_ROWS (0 METRICS(METRIC_ROW) METRIC_HISTOGRAMS(METRIC_ROW))
extern const struct metric_row metric_rows[];
struct metric_label_row {
	const char *name[2];
};
extern const struct metric_label_row metric_labels[METRIC_BY_END];

#endif
