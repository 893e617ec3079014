/* SPDX-License-Identifier: Apache-2.0 */
/* store_metrics: what the store counts, read at a scrape. */
#ifndef KVD_STORE_METRICS_H
#define KVD_STORE_METRICS_H

#include "daemon/base/metrics.h"

/* X(value, type, unit, "name", "help"), of struct store_figures *f */
#define STORE_METRICS(X)                                                              \
	X(f->ready ? f->memory_bytes : 0, GAUGE, BYTES, "chunk_memory_bytes",         \
	  "memory for chunks (chunk_memory), once it is allocated")                   \
	X(f->slabs_free * f->slab_bytes, GAUGE, BYTES, "chunk_memory_free_bytes",     \
	  "part of chunk_memory that no user occupies")                               \
	X(f->chunks, GAUGE, NUMBER, "chunks", "stored chunks")                        \
	X(f->published, GAUGE, NUMBER, "chunk_parts_published",                       \
	  "parts of chunks in engines' own pages")                                    \
	X(f->holds, GAUGE, NUMBER, "chunk_holds", "open holds")                       \
	X(f->moves, GAUGE, NUMBER, "chunk_moves",                                     \
	  "puts, fetches, publications and withdrawals that are not closed")          \
	X(f->found, COUNTER, NUMBER, "chunk_hits_total",                              \
	  "requested chunks that were found")                                         \
	X(f->missed, COUNTER, NUMBER, "chunk_misses_total",                           \
	  "requested chunks that were not found, or follow one that was not found")   \
	X(f->evicted, COUNTER, NUMBER, "chunk_evictions_total",                       \
	  "chunks evicted from memory")                                               \
	X(f->spaces, GAUGE, NUMBER, "chunk_spaces",                                   \
	  "chunk spaces (user, model, revision, scheme, ...)")                        \
	X(f->spaces_evicted, COUNTER, NUMBER, "chunk_spaces_evicted_total",           \
	  "chunk spaces evicted with all their chunks")                               \
	X(f->put_bytes, COUNTER, BYTES, "chunk_put_bytes_total", "bytes stored")      \
	X(f->fetched_bytes, COUNTER, BYTES, "chunk_fetched_bytes_total",              \
	  "bytes copied into engines' pages")                                         \
	X(f->remote.found, COUNTER, NUMBER, "chunk_remote_hits_total",                \
	  "requested chunks that were found at other daemons")                        \
	X(f->remote.bytes, COUNTER, BYTES, "chunk_remote_bytes_total",                \
	  "bytes fetched from other daemons")                                         \
	X(f->remote.retries, COUNTER, NUMBER, "chunk_remote_retries_total",           \
	  "parts of fetches that were continued from another daemon")                 \
	X(f->remote.hedges, COUNTER, NUMBER, "chunk_remote_hedges_total",             \
	  "slow parts of fetches that were also requested from a second daemon")      \
	X(f->remote.hedges_won, COUNTER, NUMBER, "chunk_remote_hedges_won_total",     \
	  "hedged parts that arrived first from the second daemon")                   \
	X(f->remote.left_out, GAUGE, NUMBER, "chunk_remote_suspended",                \
	  "holders that are temporarily not queried because they answered late")      \
	X(f->remote.holds_total, COUNTER, NUMBER, "chunk_remote_holds_total",         \
	  "holds that other daemons opened on local chunks")                          \
	X(f->remote.holds, GAUGE, NUMBER, "chunk_remote_holds_open",                  \
	  "open holds of other daemons on local chunks")                              \
	X(f->homes.homes, GAUGE, NUMBER, "chunk_index_nodes",                         \
	  "configured index nodes (chunk_index)")                                     \
	X(f->homes.up, GAUGE, NUMBER, "chunk_index_nodes_up",                         \
	  "index nodes that are connected")                                           \
	X(f->homes.notes, COUNTER, NUMBER, "chunk_index_updates_sent_total",          \
	  "chunk additions and removals sent to index nodes")                         \
	X(f->homes.resyncs, COUNTER, NUMBER, "chunk_index_resyncs_total",             \
	  "full resynchronisations of index nodes")                                   \
	X(f->homes.asks, COUNTER, NUMBER, "chunk_index_queries_total",                \
	  "queries to index nodes")                                                   \
	X(f->homes.late, COUNTER, NUMBER, "chunk_index_query_timeouts_total",         \
	  "queries to index nodes without an answer in time")                         \
	X(f->homes.dials, COUNTER, NUMBER, "chunk_index_dials_total",                 \
	  "connections to holders that an index node named")                          \
	X(f->homes.dials_refused, COUNTER, NUMBER, "chunk_index_dials_refused_total", \
	  "such connections that were not made: rate limit, or not allowed")          \
	X(f->home.used, GAUGE, NUMBER, "chunk_index_entries",                         \
	  "entries of the index on this index node")                                  \
	X(f->home.holders, GAUGE, NUMBER, "chunk_index_holders",                      \
	  "daemons with entries in the index on this index node")                     \
	X(f->home.notes, COUNTER, NUMBER, "chunk_index_updates_received_total",       \
	  "chunk additions and removals received as an index node")                   \
	X(f->home.refused, COUNTER, NUMBER, "chunk_index_updates_refused_total",      \
	  "received updates that were refused because the index was full "            \
	  "(chunk_index_memory)")                                                     \
	X(f->home.unknown, GAUGE, NUMBER, "chunk_index_entries_missing",              \
	  "chunks of daemons that do not fit into the index yet")                     \
	X(f->home.finds, COUNTER, NUMBER, "chunk_index_queries_served_total",         \
	  "queries answered as an index node")                                        \
	X(f->home.again, COUNTER, NUMBER, "chunk_index_resyncs_requested_total",      \
	  "full resynchronisations requested as an index node")                       \
	X(f->files.bytes, GAUGE, BYTES, "chunk_file_bytes",                           \
	  "bytes of chunk files, of chunk_dir_size")                                  \
	X(f->files.free_bytes, GAUGE, BYTES, "chunk_file_free_bytes",                 \
	  "part of the chunk files that no user occupies")                            \
	X(f->files.disk_free_bytes, GAUGE, BYTES, "chunk_file_system_free_bytes",     \
	  "free bytes of the file system of chunk_dir")                               \
	X(f->files.full, GAUGE, NUMBER, "chunk_file_system_full",                     \
	  "1 if the file system of chunk_dir has no space for another chunk file")    \
	X(f->files.stands, GAUGE, NUMBER, "chunk_disk_stalled",                       \
	  "1 if the disk of chunk_dir does not respond")                              \
	X(f->files.written_bytes, COUNTER, BYTES, "chunk_file_written_bytes_total",   \
	  "bytes of chunks written to files")                                         \
	X(f->files.read_bytes, COUNTER, BYTES, "chunk_file_read_bytes_total",         \
	  "bytes of chunks read from files")                                          \
	X(f->files.evicted, COUNTER, NUMBER, "chunk_file_evictions_total",            \
	  "chunks evicted from files")                                                \
	X(f->files.bad, COUNTER, NUMBER, "chunk_file_corrupt_total",                  \
	  "parts of chunks that failed their checksum when read from a file")         \
	X(f->files.faults, COUNTER, NUMBER, "chunk_file_errors_total",                \
	  "failed reads and writes of chunk files")                                   \
	X(f->files.readonly, GAUGE, NUMBER, "chunk_file_readonly",                    \
	  "1 if the daemon no longer writes to chunk_dir, or does not use it")

extern const struct metric_row store_metrics[];
/* As module->figures. */
void store_cells(const void *part, uint64_t *cells);

#endif
