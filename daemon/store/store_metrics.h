/* SPDX-License-Identifier: Apache-2.0 */
/* store_metrics: what the store counts, told at a scrape. */
#ifndef KVD_STORE_METRICS_H
#define KVD_STORE_METRICS_H

#include "daemon/base/metrics.h"

/* X(NAME, type, unit, "name", "help") */
#define STORE_METRICS(X)                                                                 \
	X(MEMORY, GAUGE, BYTES, "store_memory_bytes",                                    \
	  "memory for chunks (chunk_memory), once it is made")                           \
	X(FREE, GAUGE, BYTES, "store_free_bytes", "of that, what no user has")           \
	X(CHUNKS, GAUGE, NUMBER, "store_chunks", "chunks kept")                          \
	X(PUBLISHED, GAUGE, NUMBER, "store_published",                                   \
	  "parts of chunks in engines' own pages")                                       \
	X(HOLDS, GAUGE, NUMBER, "store_holds", "holds that are open")                    \
	X(MOVES, GAUGE, NUMBER, "store_moves",                                           \
	  "puts, fetches and others that are not closed")                                \
	X(FOUND, COUNTER, NUMBER, "store_found_total",                                   \
	  "chunks that were asked for and there")                                        \
	X(MISSED, COUNTER, NUMBER, "store_missed_total",                                 \
	  "chunks that were asked for and not there, or behind one that was not")        \
	X(EVICTED, COUNTER, NUMBER, "store_evicted_total",                               \
	  "chunks that left for others")                                                 \
	X(SPACES, GAUGE, NUMBER, "store_spaces",                                         \
	  "spaces of chunks: user, model, revision, …")                                  \
	X(SPACES_EVICTED, COUNTER, NUMBER, "store_spaces_evicted_total",                 \
	  "spaces that left with all of their chunks, unused for longest")               \
	X(PUT_BYTES, COUNTER, BYTES, "store_put_bytes_total", "bytes stored")            \
	X(FETCHED_BYTES, COUNTER, BYTES, "store_fetched_bytes_total",                    \
	  "bytes read into engines' pages")                                              \
	X(FAR_FOUND, COUNTER, NUMBER, "store_far_found_total",                           \
	  "chunks that were asked for and are at another daemon")                        \
	X(FAR_BYTES, COUNTER, BYTES, "store_far_bytes_total",                            \
	  "fetched from other daemons")                                                  \
	X(FAR_RETRIES, COUNTER, NUMBER, "store_far_retries_total",                       \
	  "parts of fetches that another daemon went on with")                           \
	X(FAR_HEDGES, COUNTER, NUMBER, "store_far_hedges_total",                         \
	  "parts of fetches that were late, and asked of another daemon, too")           \
	X(FAR_HEDGES_WON, COUNTER, NUMBER, "store_far_hedges_won_total",                 \
	  "of them, those that came from there first")                                   \
	X(FAR_LEFT_OUT, GAUGE, NUMBER, "store_far_left_out",                             \
	  "holders of chunks that are not asked for a while, because they were late")    \
	X(LENDS, COUNTER, NUMBER, "store_lends_total",                                   \
	  "holds that other daemons have had of chunks here")                            \
	X(LENT, GAUGE, NUMBER, "store_lent", "of them, those that are open")             \
	X(HOMES, GAUGE, NUMBER, "store_homes", "daemons of chunk_homes")                 \
	X(HOMES_UP, GAUGE, NUMBER, "store_home_up", "of them, those that are up")        \
	X(HOME_TOLD, COUNTER, NUMBER, "store_home_told_total",                           \
	  "chunks that came and went, told to homes")                                    \
	X(HOME_RESYNCS, COUNTER, NUMBER, "store_home_resyncs_total",                     \
	  "times that a home was told all")                                              \
	X(HOME_ASKS, COUNTER, NUMBER, "store_home_asks_total", "questions to homes")     \
	X(HOME_LATE, COUNTER, NUMBER, "store_home_late_total",                           \
	  "of them, those without an answer in time")                                    \
	X(HOME_DIALS, COUNTER, NUMBER, "store_home_dials_total",                         \
	  "holders that were dialled because homes named them")                          \
	X(HOME_UNDIALLED, COUNTER, NUMBER, "store_home_dials_refused_total",             \
	  "holders that were not: too many a second, or not allowed")                    \
	X(HOME_HOLDINGS, GAUGE, NUMBER, "store_home_holdings",                           \
	  "chunks of daemons that this one knows as their home")                         \
	X(HOME_HOLDERS, GAUGE, NUMBER, "store_home_holders", "these daemons")            \
	X(HOME_NOTES, COUNTER, NUMBER, "store_home_notes_total",                         \
	  "chunks that came and went, as others told")                                   \
	X(HOME_REFUSED, COUNTER, NUMBER, "store_home_refused_total",                     \
	  "of them, those for which there was no room (chunk_home_memory)")              \
	X(HOME_UNKNOWN, GAUGE, NUMBER, "store_home_unknown",                             \
	  "chunks of daemons that have no room here yet")                                \
	X(HOME_FINDS, COUNTER, NUMBER, "store_home_finds_total",                         \
	  "questions of others to this home")                                            \
	X(HOME_AGAIN, COUNTER, NUMBER, "store_home_again_total",                         \
	  "times that a daemon had to tell all anew")                                    \
	X(FILE, GAUGE, BYTES, "store_file_bytes",                                        \
	  "bytes of files for chunks (chunk_dir_size)")                                  \
	X(FILE_FREE, GAUGE, BYTES, "store_file_free_bytes", "of that, what no user has") \
	X(FILE_DISK_FREE, GAUGE, BYTES, "store_file_disk_free_bytes",                    \
	  "bytes that the file system of chunk_dir has left")                            \
	X(FILE_FULL, GAUGE, NUMBER, "store_file_full",                                   \
	  "1: the file system of chunk_dir has no room for another file of chunks")      \
	X(FILE_STANDS, GAUGE, NUMBER, "store_file_stands",                               \
	  "1: the disk of chunk_dir does not answer")                                    \
	X(FILE_WRITTEN, COUNTER, BYTES, "store_file_written_bytes_total",                \
	  "bytes of chunks written to files")                                            \
	X(FILE_READ, COUNTER, BYTES, "store_file_read_bytes_total",                      \
	  "bytes of chunks read from files")                                             \
	X(FILE_EVICTED, COUNTER, NUMBER, "store_file_evicted_total",                     \
	  "chunks that left files for others")                                           \
	X(FILE_BAD, COUNTER, NUMBER, "store_file_bad_total",                             \
	  "parts of chunks whose sums were wrong when they were read")                   \
	X(FILE_FAULTS, COUNTER, NUMBER, "store_file_faults_total",                       \
	  "reads and writes of files that failed")                                       \
	X(FILE_READONLY, GAUGE, NUMBER, "store_file_readonly",                           \
	  "1: nothing is written to chunk_dir any more, or it is not used at all")

enum {
#define STORE_METRICS_OF(id, type, unit, name, help) STORE_METRIC_##id,
	STORE_METRICS(STORE_METRICS_OF)
#undef STORE_METRICS_OF
		STORE_METRIC_END,
};
extern const struct metric_row store_metrics[STORE_METRIC_END];
/* As module->figures. */
void store_cells(const void *part, uint64_t *cells);

#endif
