/* SPDX-License-Identifier: Apache-2.0 */
/* store_figures: the figures of a store, for lists, health and metrics. Loop thread. */
#ifndef KVD_STORE_FIGURES_H
#define KVD_STORE_FIGURES_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/store/home.h"
#include "daemon/store/homes.h"

struct store;

struct store_figures {
	bool ready;
	uint64_t memory_bytes, slab_bytes, slabs_free;
	uint64_t chunks, evicted, spaces_evicted;
	uint64_t published;	/* parts of them, in engines' pages */
	uint64_t found, missed; /* chunks asked for */
	uint64_t put_bytes, fetched_bytes;
	unsigned int spaces, holds, moves;
	struct store_remote_figures { /* other daemons */
		uint64_t found, bytes,
			retries; /* chunks; subtransfers continued by another daemon */
		uint64_t hedges, hedges_won; /* subtransfers that were also requested from
						another daemon */
		uint64_t holds_total;	     /* holds of chunks here, by others */
		unsigned int holds;	     /* open ones */
		unsigned int stores, up;     /* daemons that are queried */
		unsigned int left_out;	     /* paused: they were late */
	} remote;
	struct store_homes homes; /* updates to index nodes */
	struct store_home home;	  /* updates from other daemons */
	struct store_files {
		const char *dir; /* NULL: no files */
		bool open, scanned, readonly, direct;
		bool full;	       /* no space for another file */
		bool stands;	       /* the disk has not responded for some seconds */
		const struct err *why; /* code != OK: writes or reads failed */
		uint64_t bytes, written_bytes, read_bytes;
		uint64_t free_bytes;	  /* of them, as far as the disk has space */
		uint64_t disk_free_bytes; /* the file system's */
		uint64_t written, read, bad, faults, evicted;
		unsigned int queued;
	} files;
};
void store_figures(const struct store *store, struct store_figures *figures_p);

#endif
