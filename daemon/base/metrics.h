/* SPDX-License-Identifier: Apache-2.0 */
/*
 * metrics: what the daemon counts. One row a figure: `stats`, `health` and the
 * reference come from the table. Counters only rise; gauges are levels. Any
 * thread may add.
 */
#ifndef KVD_METRICS_H
#define KVD_METRICS_H

#include <stdint.h>

enum metric_type { METRIC_COUNTER, METRIC_GAUGE };

/* X(NAME, type, "name", "help"); bytes and seconds are in the name */
#define METRICS(X)                                                                       \
	X(SESSIONS, GAUGE, "sessions", "engines connected to the control socket")        \
	X(SESSIONS_OPENED, COUNTER, "sessions_opened_total", "connections taken")        \
	X(SESSIONS_REFUSED, COUNTER, "sessions_refused_total",                           \
	  "connections refused: not admitted, or over the cap")                          \
	X(SESSIONS_KILLED, COUNTER, "sessions_killed_total",                             \
	  "connections closed by the daemon: a broken protocol, a full queue, a dead "   \
	  "owner")                                                                       \
	X(COMMANDS, COUNTER, "commands_total", "control commands begun")                 \
	X(COMMANDS_FAILED, COUNTER, "commands_failed_total",                             \
	  "control commands answered with an error")                                     \
	X(CONTROL_IN_BYTES, COUNTER, "control_in_bytes_total", "bytes of control lines") \
	X(CONTROL_OUT_BYTES, COUNTER, "control_out_bytes_total", "bytes of replies")     \
	X(REGIONS, GAUGE, "regions", "regions imported")                                 \
	X(REGION_BYTES, GAUGE, "region_bytes", "bytes of the imported regions")          \
	X(REGIONS_REFUSED, COUNTER, "regions_refused_total",                             \
	  "registrations that failed")                                                   \
	X(POOLS, GAUGE, "pools", "pools registered")                                     \
	X(ROOMS, GAUGE, "rooms", "rooms that are open")                                  \
	X(ROOMS_OPENED, COUNTER, "rooms_opened_total", "rooms opened")                   \
	X(ROOMS_SUCCEEDED, COUNTER, "rooms_succeeded_total",                             \
	  "rooms that ended in success")                                                 \
	X(ROOMS_FAILED, COUNTER, "rooms_failed_total", "rooms that ended in failure")    \
	X(ROOM_RECEIVED_BYTES, COUNTER, "room_received_bytes_total",                     \
	  "bytes landed in rooms of this daemon's engines")                              \
	X(ROOM_SENT_BYTES, COUNTER, "room_sent_bytes_total",                             \
	  "bytes sent or served by rooms of this daemon's engines")                      \
	X(ROOM_STAGED_BYTES, COUNTER, "room_staged_bytes_total",                         \
	  "of both, bytes that passed a buffer of this daemon's")                        \
	X(CHUNKS_RECEIVED, COUNTER, "chunks_received_total", "chunks landed")            \
	X(CHUNKS_SENT, COUNTER, "chunks_sent_total", "chunks sent")                      \
	X(PULLS_SERVED, COUNTER, "pulls_served_total",                                   \
	  "reads of offers served or checked")                                           \
	X(ORPHANS_KEPT, COUNTER, "orphans_kept_total",                                   \
	  "partners' messages kept until their room opens")                              \
	X(ORPHANS_EXPIRED, COUNTER, "orphans_expired_total",                             \
	  "of these, refused because nobody opened the room in time")                    \
	X(ORPHANS_REFUSED, COUNTER, "orphans_refused_total",                             \
	  "refused at the cap (orphans), or by a drain")                                 \
	X(ROOM_LATE, COUNTER, "room_late_total",                                         \
	  "messages and requests for rooms that ended")                                  \
	X(ROOM_REFUSED, COUNTER, "room_refused_total", "peers' room messages refused")   \
	X(PEER_PAGES_BYTES, GAUGE, "peer_pages_bytes",                                   \
	  "bytes of page lists out of peers' messages; the cap of each is 256 MiB")      \
	X(BOOTSTRAP_TIMEOUTS, COUNTER, "rooms_bootstrap_timeouts_total",                 \
	  "rooms failed because the other side did not show up in time")                 \
	X(WAITING_TIMEOUTS, COUNTER, "rooms_waiting_timeouts_total",                     \
	  "rooms failed because nothing was bound, offered or sent in time")             \
	X(STALLS, COUNTER, "rooms_stalled_total",                                        \
	  "rooms failed because no byte of what was posted moved in time")               \
	X(LEASES_EXPIRED, COUNTER, "leases_expired_total",                               \
	  "offers failed because their lease ended, taken or not")                       \
	X(FENCES_WIDENED, COUNTER, "fences_widened_total",                               \
	  "peers cut because a room on them could not be proven quiesced in time")       \
	X(XFERS_STARTED, COUNTER, "xfers_started_total", "transfers started")            \
	X(XFERS_SUCCEEDED, COUNTER, "xfers_succeeded_total", "transfers that succeeded") \
	X(XFERS_FAILED, COUNTER, "xfers_failed_total", "transfers that failed")          \
	X(XFERS_CANCELED, COUNTER, "xfers_canceled_total", "transfers canceled")         \
	X(XFER_IN_BYTES, COUNTER, "xfer_in_bytes_total",                                 \
	  "bytes that transfers wrote into this daemon's engines' memory")               \
	X(XFER_OUT_BYTES, COUNTER, "xfer_out_bytes_total",                               \
	  "bytes that transfers took from this daemon's engines' memory")                \
	X(XFER_REFUSED, COUNTER, "xfer_refused_total",                                   \
	  "other daemons' transfers refused")                                            \
	X(NOTIFS_IN, COUNTER, "notifs_in_total",                                         \
	  "notifications for this daemon's engines")                                     \
	X(NOTIFS_OUT, COUNTER, "notifs_out_total", "notifications sent")                 \
	X(NOTIFS_DROPPED, COUNTER, "notifs_dropped_total",                               \
	  "notifications refused: the session does not read them, or is gone")           \
	X(LOOP_TURNS, COUNTER, "loop_turns_total", "turns of the daemon's loop")         \
	X(LOOP_SLOW_TURNS, COUNTER, "loop_slow_turns_total",                             \
	  "of these, such as took over 200 us of a core")                                \
	X(LOOP_LONGEST, GAUGE, "loop_longest_turn_us",                                   \
	  "the longest turn since the start, time without a core counted in")            \
	X(RING_ENTRIES, COUNTER, "ring_entries_total",                                   \
	  "entries of submission rings taken")

enum metric {
#define METRIC_ENUM(id, type, name, help) METRIC_##id,
	METRICS(METRIC_ENUM)
#undef METRIC_ENUM
		METRIC_END,
};

struct metrics {
	uint64_t value[METRIC_END]; /* atomic */
};

static inline void metrics_add(struct metrics *m, enum metric metric, uint64_t n)
{
	__atomic_fetch_add(&m->value[metric], n, __ATOMIC_RELAXED);
}
/* Gauges. */
static inline void metrics_sub(struct metrics *m, enum metric metric, uint64_t n)
{
	__atomic_fetch_sub(&m->value[metric], n, __ATOMIC_RELAXED);
}
static inline uint64_t metrics_get(const struct metrics *m, enum metric metric)
{
	return __atomic_load_n(&m->value[metric], __ATOMIC_RELAXED);
}

static inline void metrics_set(struct metrics *m, enum metric metric, uint64_t value)
{
	__atomic_store_n(&m->value[metric], value, __ATOMIC_RELAXED);
}

struct metric_row {
	const char *name;
	const char *help;
	enum metric_type type;
};
extern const struct metric_row metric_rows[METRIC_END];

#endif
