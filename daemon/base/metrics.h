/* SPDX-License-Identifier: Apache-2.0 */
/*
 * metrics: what the daemon counts. One row a family says name, type, unit, labels and
 * help; `stats`, the metrics endpoint and the reference follow from the table. A family
 * has a cell for each value of its labels, so counting is one addition. Counters only
 * rise; gauges are levels. Any thread may add to a cell; histograms and peers are the
 * loop's.
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

/* Peers that have figures of their own; the rest share a last set, "other". */
#define METRIC_PEERS_MAX 64u
#define METRIC_PEER_OTHER METRIC_PEERS_MAX
#define METRIC_PEER_NAME 208u

/*
 * Labels. X(NAME, values, "label", "second label"): the second is told by the same
 * value as the first. What the values are called is known above: daemon/metrics/words.c.
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

/* X(NAME, type, unit, label, label, "name", "help"). The exported name is kvd_NAME, but
 * for those that begin with process_, which are called alike in every program. */
#define METRICS(X)                                                                       \
	X(SESSIONS, GAUGE, NUMBER, NONE, NONE, "sessions",                               \
	  "engines connected to the control socket")                                     \
	X(SESSIONS_OPENED, COUNTER, NUMBER, NONE, NONE, "sessions_opened_total",         \
	  "connections taken")                                                           \
	X(SESSIONS_REFUSED, COUNTER, NUMBER, NONE, NONE, "sessions_refused_total",       \
	  "connections refused: not admitted, too often, or over the cap")               \
	X(SESSIONS_KILLED, COUNTER, NUMBER, NONE, NONE, "sessions_killed_total",         \
	  "connections closed by the daemon: a broken protocol, a full queue, "          \
	  "a dead owner")                                                                \
	X(COMMANDS, COUNTER, NUMBER, COMMAND, COMMAND_END, "commands_total",             \
	  "control commands answered")                                                   \
	X(CONTROL_IN_BYTES, COUNTER, BYTES, NONE, NONE, "control_in_bytes_total",        \
	  "bytes of control lines")                                                      \
	X(CONTROL_OUT_BYTES, COUNTER, BYTES, NONE, NONE, "control_out_bytes_total",      \
	  "bytes of replies")                                                            \
	X(PRINCIPALS, GAUGE, NUMBER, NONE, NONE, "principals",                           \
	  "users, keys and addresses in whose name something is kept")                   \
	X(ACCOUNT_BYTES, GAUGE, BYTES, ACCOUNT_CLASS, NONE, "account_bytes",             \
	  "bytes kept for engines and other daemons, of those in memory")                \
	X(ACCOUNT_LIMIT, GAUGE, BYTES, NONE, NONE, "account_limit_bytes",                \
	  "most bytes of all classes together (memory)")                                 \
	X(ACCOUNT_REFUSED, COUNTER, NUMBER, ACCOUNT_CLASS, NONE,                         \
	  "account_refused_total",                                                       \
	  "refusals because a principal's share of memory, or all of it, is taken")      \
	X(REGIONS, GAUGE, NUMBER, NONE, NONE, "regions", "regions imported")             \
	X(REGION_BYTES, GAUGE, BYTES, REGION_KIND, NONE, "region_bytes",                 \
	  "bytes of the imported regions")                                               \
	X(REGIONS_REFUSED, COUNTER, NUMBER, NONE, NONE, "regions_refused_total",         \
	  "registrations that failed")                                                   \
	X(POOLS, GAUGE, NUMBER, NONE, NONE, "pools", "pools registered")                 \
	X(ROOMS, GAUGE, NUMBER, ROLE, ROOM_STATE, "rooms", "rooms that are open")        \
	X(ROOMS_OPENED, COUNTER, NUMBER, NONE, NONE, "rooms_opened_total",               \
	  "rooms opened")                                                                \
	X(ROOMS_ENDED, COUNTER, NUMBER, ROLE, ROOM_END, "rooms_ended_total",             \
	  "rooms that ended")                                                            \
	X(ROOM_OLDEST, GAUGE, SECONDS, ROOM_STATE, NONE, "room_oldest_seconds",          \
	  "how long the room that is in the state for longest is in it")                 \
	X(ROOM_RECEIVED_BYTES, COUNTER, BYTES, NONE, NONE, "room_received_bytes_total",  \
	  "bytes landed in rooms of this daemon's engines")                              \
	X(ROOM_SENT_BYTES, COUNTER, BYTES, NONE, NONE, "room_sent_bytes_total",          \
	  "bytes sent or served by rooms of this daemon's engines")                      \
	X(ROOM_STAGED_BYTES, COUNTER, BYTES, NONE, NONE, "room_staged_bytes_total",      \
	  "of both, bytes that passed a buffer of this daemon's")                        \
	X(TRANSFERRED_BYTES, COUNTER, BYTES, DIRECTION, TRANSPORT,                       \
	  "transferred_bytes_total",                                                     \
	  "bytes of rooms and transfers, by the transport of the peer")                  \
	X(CHUNKS_RECEIVED, COUNTER, NUMBER, NONE, NONE, "chunks_received_total",         \
	  "chunks landed")                                                               \
	X(CHUNKS_SENT, COUNTER, NUMBER, NONE, NONE, "chunks_sent_total", "chunks sent")  \
	X(PULLS_SERVED, COUNTER, NUMBER, NONE, NONE, "pulls_served_total",               \
	  "reads of offers served or checked")                                           \
	X(PULLS_TAKEN_BACK, COUNTER, NUMBER, NONE, NONE, "pulls_taken_back_total",       \
	  "pullers that failed by what may pass and may come again")                     \
	X(ORPHANS, GAUGE, NUMBER, NONE, NONE, "orphans",                                 \
	  "partners' messages that wait for their room to open")                         \
	X(ORPHANS_KEPT, COUNTER, NUMBER, NONE, NONE, "orphans_kept_total",               \
	  "partners' messages kept until their room opens")                              \
	X(ORPHANS_EXPIRED, COUNTER, NUMBER, NONE, NONE, "orphans_expired_total",         \
	  "of these, refused because nobody opened the room in time")                    \
	X(ORPHANS_REFUSED, COUNTER, NUMBER, NONE, NONE, "orphans_refused_total",         \
	  "given up for others at the cap (orphans), or refused by a drain")             \
	X(ROOM_LATE, COUNTER, NUMBER, NONE, NONE, "room_late_total",                     \
	  "messages and requests for rooms that ended")                                  \
	X(ROOM_REFUSED, COUNTER, NUMBER, NONE, NONE, "room_refused_total",               \
	  "peers' room messages refused")                                                \
	X(ROOM_STRANGERS, COUNTER, NUMBER, NONE, NONE, "room_strangers_total",           \
	  "peers' messages for rooms that are not theirs: no ticket, or another "        \
	  "one, or not among the room's peers")                                          \
	X(BOOTSTRAP_TIMEOUTS, COUNTER, NUMBER, NONE, NONE,                               \
	  "rooms_bootstrap_timeouts_total",                                              \
	  "rooms failed because the other side did not show up in time")                 \
	X(WAITING_TIMEOUTS, COUNTER, NUMBER, NONE, NONE, "rooms_waiting_timeouts_total", \
	  "rooms failed because nothing was bound, offered or sent in time")             \
	X(STALLS, COUNTER, NUMBER, NONE, NONE, "rooms_stalled_total",                    \
	  "rooms failed because no byte of what was posted moved in time")               \
	X(LEASES_EXPIRED, COUNTER, NUMBER, NONE, NONE, "leases_expired_total",           \
	  "offers failed because their lease ended, taken or not")                       \
	X(FENCES_WIDENED, COUNTER, NUMBER, NONE, NONE, "fences_widened_total",           \
	  "peers cut because a room on them could not be proven quiesced in "            \
	  "time")                                                                        \
	X(PEERS, GAUGE, NUMBER, PEER_STATE, NONE, "peers",                               \
	  "other daemons that this one knows")                                           \
	X(PEER_RTT, GAUGE, SECONDS, PEER, NONE, "peer_rtt_seconds",                      \
	  "round trip of the last ping that was answered")                               \
	X(PEER_BYTES, COUNTER, BYTES, PEER, DIRECTION, "peer_bytes_total",               \
	  "bytes of rooms and transfers; peers past the 64th are other")                 \
	X(PEER_INFLIGHT, GAUGE, BYTES, PEER, NONE, "peer_inflight_bytes",                \
	  "bytes posted to the peer and not yet done")                                   \
	X(PEER_LOST, COUNTER, NUMBER, PEER, NONE, "peer_lost_total",                     \
	  "ends of a connection to the peer that this daemon did not choose")            \
	X(DEAD_AFTER, GAUGE, SECONDS, NONE, NONE, "peer_dead_after_seconds",             \
	  "silence after which a peer is declared dead (dead_after)")                    \
	X(INSECURE, GAUGE, NUMBER, NONE, NONE, "insecure",                               \
	  "1: peers are not authenticated (option insecure)")                            \
	X(PLAIN_PEERS, GAUGE, NUMBER, NONE, NONE, "plain_peers",                         \
	  "daemons of other hosts to which bytes go in clear")                           \
	X(XFERS_STARTED, COUNTER, NUMBER, NONE, NONE, "xfers_started_total",             \
	  "transfers started")                                                           \
	X(XFERS, COUNTER, NUMBER, XFER_OP, XFER_END, "xfers_total",                      \
	  "transfers that ended")                                                        \
	X(XFER_IN_BYTES, COUNTER, BYTES, NONE, NONE, "xfer_in_bytes_total",              \
	  "bytes that transfers wrote into this daemon's engines' memory")               \
	X(XFER_OUT_BYTES, COUNTER, BYTES, NONE, NONE, "xfer_out_bytes_total",            \
	  "bytes that transfers took from this daemon's engines' memory")                \
	X(XFER_REFUSED, COUNTER, NUMBER, NONE, NONE, "xfer_refused_total",               \
	  "other daemons' transfers refused")                                            \
	X(NOTIFS, COUNTER, NUMBER, DIRECTION, NOTIF_END, "notifications_total",          \
	  "notifications; dropped: the session does not read them, or is gone")          \
	X(LOOP_TURNS, COUNTER, NUMBER, NONE, NONE, "loop_turns_total",                   \
	  "turns of the daemon's loop")                                                  \
	X(LOOP_SLOW_TURNS, COUNTER, NUMBER, NONE, NONE, "loop_slow_turns_total",         \
	  "of these, such as took over 200 us of a core")                                \
	X(LOOP_LONGEST, GAUGE, SECONDS, NONE, NONE, "loop_longest_turn_seconds",         \
	  "the longest turn since the start, time without a core counted in")            \
	X(RING_ENTRIES, COUNTER, NUMBER, NONE, NONE, "ring_entries_total",               \
	  "entries of submission rings taken")                                           \
	X(STATE, GAUGE, NUMBER, DAEMON_STATE, NONE, "state",                             \
	  "1 at the daemon's state, 0 at the others")                                    \
	X(BUILD, GAUGE, NUMBER, VERSION, NONE, "build_info",                             \
	  "1; the version and the daemon's name are in the labels")                      \
	X(PROCESS_CPU, COUNTER, SECONDS, NONE, NONE, "process_cpu_seconds_total",        \
	  "processor time of all threads")                                               \
	X(PROCESS_RESIDENT, GAUGE, BYTES, NONE, NONE, "process_resident_memory_bytes",   \
	  "resident memory, engines' mapped memory counted in")                          \
	X(PROCESS_VIRTUAL, GAUGE, BYTES, NONE, NONE, "process_virtual_memory_bytes",     \
	  "address space")                                                               \
	X(PROCESS_FDS, GAUGE, NUMBER, NONE, NONE, "process_open_fds",                    \
	  "open file descriptors")                                                       \
	X(PROCESS_FDS_MAX, GAUGE, NUMBER, NONE, NONE, "process_max_fds",                 \
	  "file descriptors that may be open")                                           \
	X(PROCESS_THREADS, GAUGE, NUMBER, NONE, NONE, "process_threads", "threads")      \
	X(PROCESS_START, GAUGE, SECONDS, NONE, NONE, "process_start_time_seconds",       \
	  "start of the process, seconds since 1970")

/* X(NAME, unit, end of the first bucket, label, label, "name", "help") */
#define METRIC_HISTOGRAMS(X)                                                  \
	X(ROOM_PHASE, SECONDS, 50000, ROLE, ROOM_PHASE, "room_phase_seconds", \
	  "how long the phases of rooms took that reached their end; total: " \
	  "of rooms that succeeded")                                          \
	X(ROOM_SIZE, BYTES, 4096, NONE, NONE, "room_size_bytes",              \
	  "bytes of rooms that succeeded")                                    \
	X(LOOP_BUSY, SECONDS, 1000, NONE, NONE, "loop_busy_seconds",          \
	  "how long turns of the loop were away from its poll")               \
	X(LOOP_CPU, SECONDS, 1000, NONE, NONE, "loop_cpu_seconds",            \
	  "what of that its thread had a core for; a turn shall take 200 us") \
	X(LOOP_LATE, SECONDS, 1000, NONE, NONE, "loop_late_seconds",          \
	  "how late turns of the loop began after a timer was due")

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
/* Values of a family's second label, and what begins a histogram's buckets. */
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
	const void *owner;	     /* who is connected; NULL: nobody */
	uint64_t left;		     /* order of going */
};

struct metrics {
	uint64_t value[METRIC_END]; /* atomic */
	struct histogram histogram[METRIC_HISTOGRAMS_END];
	struct metric_peer peers[METRIC_PEERS_MAX];
	uint64_t peers_left;
	bool peers_other; /* somebody had no set of his own */
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

/* The set of figures of a peer that is connected from now on (`owner`); one of that name
 * goes on with its counts. The set of the peer that left first is taken when there is no
 * other. METRIC_PEER_OTHER: all are connected. */
unsigned int metrics_peer(struct metrics *m, const char *name, const void *owner);
/* It has left. METRIC_PEER_OTHER is fine. */
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
/* A module's own: one cell each, by number. */
#define METRIC_OWN(own_cell, own_type, own_unit, own_name, own_help) \
	[own_cell] = {.name = (own_name),                            \
		      .help = (own_help),                            \
		      .type = METRIC_##own_type,                     \
		      .unit = METRIC_##own_unit,                     \
		      .cell = (own_cell),                            \
		      .count = {1, 1}}
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
