/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/cluster_store.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "daemon/attend/attend.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/store/files.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/disk_sim.h"

/* Or never will be. */
static bool is_ready(void *arg)
{
	const struct node *node = arg;
	struct store_figures figures;
	const struct store *store = store_of(&node->kvd);

	store_figures(store, &figures);
	return (figures.ready || store->failed.code != ERR_OK) &&
	       (!figures.files.dir || figures.files.scanned || figures.files.readonly);
}

static void must(int r)
{
	if (r < 0)
		fail_msg("%s", err_last()->text);
}

/* As files_open() of store.c, but for the disk. Its memory is not there yet. */
static void open_files(struct node *node, const struct cluster_store_args *args)
{
	struct store *store = store_of(&node->kvd);
	struct disk_args disk_args = {.on_open = files_on_open};
	struct disk *disk;

	snprintf(node->config.chunk_dir, sizeof(node->config.chunk_dir), "/simulated");
	must(files_new(store, args->file_bytes));
	disk_args.arg = store->files;
	must(disk_sim_open(args->disk, node->kvd.loop, &disk_args, &disk));
	files_begin(store->files, disk);
}

void cluster_store_begin(struct cluster *c, unsigned int node,
			 const struct cluster_store_args *args)
{
	struct node *n = &c->nodes[node];

	n->config.chunk_memory_bytes = args->memory_bytes;
	n->config.attention_threads = args->attention_threads;
	if (args->stores)
		snprintf(n->config.chunk_peers, sizeof(n->config.chunk_peers), "%s",
			 args->stores);
	n->kvd.compute = args->kernels ? args->kernels : n->kvd.offload;
	must(store_module.new(&n->kvd, &n->kvd.part[MODULE_STORE]));
	must(attend_module.new(&n->kvd, &n->kvd.part[MODULE_ATTEND]));
	if (args->disk)
		open_files(n, args);
}

bool cluster_store(struct cluster *c, unsigned int node,
		   const struct cluster_store_args *args)
{
	bool had;

	cluster_store_begin(c, node, args);
	mem_fail_at(args->lack_nth);
	cluster_until(c, is_ready, &c->nodes[node], "the store's memory and files");
	had = !args->lack_nth || mem_count() < args->lack_nth;
	mem_fail_at(0);
	return had;
}
