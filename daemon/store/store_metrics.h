/* SPDX-License-Identifier: Apache-2.0 */
/* store_metrics: what the store counts, read at a scrape. */
#ifndef KVD_STORE_METRICS_H
#define KVD_STORE_METRICS_H

#include "daemon/base/metrics.h"

/* X(NAME, type, unit, "name", "help") */
#define STORE_METRICS(X)                                                                 \
	X(MEMORY, GAUGE, BYTES, "chunk_memory_bytes",                                    \
	  "memory for chunks (chunk_memory), once it is allocated")                      \
	X(FREE, GAUGE, BYTES, "chunk_memory_free_bytes",                                 \
	  "part of chunk_memory that no user occupies")                                  \
	X(CHUNKS, GAUGE, NUMBER, "chunks", "stored chunks")                              \
	X(PUBLISHED, GAUGE, NUMBER, "chunk_parts_published",                             \
	  "parts of chunks in engines' own pages")                                       \
	X(HOLDS, GAUGE, NUMBER, "chunk_holds", "open holds")                             \
	X(MOVES, GAUGE, NUMBER, "chunk_moves",                                           \
	  "puts, fetches, publications and withdrawals that are not closed")             \
	X(FOUND, COUNTER, NUMBER, "chunk_hits_total",                                    \
	  "requested chunks that were found")                                            \
	X(MISSED, COUNTER, NUMBER, "chunk_misses_total",                                 \
	  "requested chunks that were not found, or follow one that was not found")      \
	X(EVICTED, COUNTER, NUMBER, "chunk_evictions_total",                             \
	  "chunks evicted from memory")                                                  \
	X(SPACES, GAUGE, NUMBER, "chunk_spaces",                                         \
	  "chunk spaces (user, model, revision, scheme, ...)")                           \
	X(SPACES_EVICTED, COUNTER, NUMBER, "chunk_spaces_evicted_total",                 \
	  "chunk spaces evicted with all their chunks")                                  \
	X(PUT_BYTES, COUNTER, BYTES, "chunk_put_bytes_total", "bytes stored")            \
	X(FETCHED_BYTES, COUNTER, BYTES, "chunk_fetched_bytes_total",                    \
	  "bytes copied into engines' pages")                                            \
	X(REMOTE_HITS, COUNTER, NUMBER, "chunk_remote_hits_total",                       \
	  "requested chunks that were found at other daemons")                           \
	X(REMOTE_BYTES, COUNTER, BYTES, "chunk_remote_bytes_total",                      \
	  "bytes fetched from other daemons")                                            \
	X(REMOTE_RETRIES, COUNTER, NUMBER, "chunk_remote_retries_total",                 \
	  "parts of fetches that were continued from another daemon")                    \
	X(REMOTE_HEDGES, COUNTER, NUMBER, "chunk_remote_hedges_total",                   \
	  "slow parts of fetches that were also requested from a second daemon")         \
	X(REMOTE_HEDGES_WON, COUNTER, NUMBER, "chunk_remote_hedges_won_total",           \
	  "hedged parts that arrived first from the second daemon")                      \
	X(REMOTE_SUSPENDED, GAUGE, NUMBER, "chunk_remote_suspended",                     \
	  "holders that are temporarily not queried because they answered late")         \
	X(REMOTE_HOLDS_TOTAL, COUNTER, NUMBER, "chunk_remote_holds_total",               \
	  "holds that other daemons opened on local chunks")                             \
	X(REMOTE_HOLDS, GAUGE, NUMBER, "chunk_remote_holds_open",                        \
	  "open holds of other daemons on local chunks")                                 \
	X(INDEX_NODES, GAUGE, NUMBER, "chunk_index_nodes",                               \
	  "configured index nodes (chunk_index)")                                        \
	X(INDEX_NODES_UP, GAUGE, NUMBER, "chunk_index_nodes_up",                         \
	  "index nodes that are connected")                                              \
	X(INDEX_UPDATES_SENT, COUNTER, NUMBER, "chunk_index_updates_sent_total",         \
	  "chunk additions and removals sent to index nodes")                            \
	X(INDEX_RESYNCS, COUNTER, NUMBER, "chunk_index_resyncs_total",                   \
	  "full resynchronisations of index nodes")                                      \
	X(INDEX_QUERIES, COUNTER, NUMBER, "chunk_index_queries_total",                   \
	  "queries to index nodes")                                                      \
	X(INDEX_QUERY_TIMEOUTS, COUNTER, NUMBER, "chunk_index_query_timeouts_total",     \
	  "queries to index nodes without an answer in time")                            \
	X(INDEX_DIALS, COUNTER, NUMBER, "chunk_index_dials_total",                       \
	  "connections to holders that an index node named")                             \
	X(INDEX_DIALS_REFUSED, COUNTER, NUMBER, "chunk_index_dials_refused_total",       \
	  "such connections that were not made: rate limit, or not allowed")             \
	X(INDEX_ENTRIES, GAUGE, NUMBER, "chunk_index_entries",                           \
	  "entries of the index on this index node")                                     \
	X(INDEX_HOLDERS, GAUGE, NUMBER, "chunk_index_holders",                           \
	  "daemons with entries in the index on this index node")                        \
	X(INDEX_UPDATES_RECEIVED, COUNTER, NUMBER, "chunk_index_updates_received_total", \
	  "chunk additions and removals received as an index node")                      \
	X(INDEX_UPDATES_REFUSED, COUNTER, NUMBER, "chunk_index_updates_refused_total",   \
	  "received updates that were refused because the index was full "               \
	  "(chunk_index_memory)")                                                        \
	X(INDEX_ENTRIES_MISSING, GAUGE, NUMBER, "chunk_index_entries_missing",           \
	  "chunks of daemons that do not fit into the index yet")                        \
	X(INDEX_QUERIES_SERVED, COUNTER, NUMBER, "chunk_index_queries_served_total",     \
	  "queries answered as an index node")                                           \
	X(INDEX_RESYNCS_REQUESTED, COUNTER, NUMBER,                                      \
	  "chunk_index_resyncs_requested_total",                                         \
	  "full resynchronisations requested as an index node")                          \
	X(FILE, GAUGE, BYTES, "chunk_file_bytes",                                        \
	  "bytes of chunk files, of chunk_dir_size")                                     \
	X(FILE_FREE, GAUGE, BYTES, "chunk_file_free_bytes",                              \
	  "part of the chunk files that no user occupies")                               \
	X(FILE_DISK_FREE, GAUGE, BYTES, "chunk_file_system_free_bytes",                  \
	  "free bytes of the file system of chunk_dir")                                  \
	X(FILE_FULL, GAUGE, NUMBER, "chunk_file_system_full",                            \
	  "1 if the file system of chunk_dir has no space for another chunk file")       \
	X(FILE_STANDS, GAUGE, NUMBER, "chunk_disk_stalled",                              \
	  "1 if the disk of chunk_dir does not respond")                                 \
	X(FILE_WRITTEN, COUNTER, BYTES, "chunk_file_written_bytes_total",                \
	  "bytes of chunks written to files")                                            \
	X(FILE_READ, COUNTER, BYTES, "chunk_file_read_bytes_total",                      \
	  "bytes of chunks read from files")                                             \
	X(FILE_EVICTED, COUNTER, NUMBER, "chunk_file_evictions_total",                   \
	  "chunks evicted from files")                                                   \
	X(FILE_BAD, COUNTER, NUMBER, "chunk_file_corrupt_total",                         \
	  "parts of chunks that failed their checksum when read from a file")            \
	X(FILE_FAULTS, COUNTER, NUMBER, "chunk_file_errors_total",                       \
	  "failed reads and writes of chunk files")                                      \
	X(FILE_READONLY, GAUGE, NUMBER, "chunk_file_readonly",                           \
	  "1 if the daemon no longer writes to chunk_dir, or does not use it")

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
