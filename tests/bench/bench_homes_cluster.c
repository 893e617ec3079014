/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A cluster of daemons in this process, in virtual time: the real handshake, homes and
 * home over a link in memory. How long it takes until the homes know what there is, at the
 * start and after a death, and what that costs.
 *
 *     bench_homes_cluster [holders [homes [chunks of a holder]]]
 *
 * A holder has 800 chunks that all others have as well; the rest are of two holders each.
 * They stand in the index without bytes. Frames take a millisecond.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/handshake/handshake_impl.h"
#include "daemon/room/rooms_impl.h"
#include "daemon/store/home_table.h"
#include "daemon/store/homes_impl.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/cluster.h"

#define COMMON 800u
#define NODES_MAX 4000u
#define PROMPT 40u
#define FINDS 1000u
#define CHURN_S 5u
#define CHANGES 200u /* a second and holder */
#define TURN_NS (10 * LOOP_NS_PER_MS)
#define LIMIT_NS (600 * LOOP_NS_PER_S)

struct bench {
	struct cluster c;
	unsigned int holders, homes, chunks;
	struct store_tenant tenant;
	struct store_space *spaces;   /* by node */
	struct store_chunk **of_node; /* its chunks */
	uint64_t wanted;	      /* holdings of all homes together */
	unsigned int at[MEMBERS_MAX]; /* nodes of the homes */
};

/* Messages of chunks that homes were sent, and bytes of their bodies. */
static uint64_t messages, bytes;
static int (*true_message)(void *owner, struct remote *remote,
			   const struct wire_header *h, struct cursor *body);

static int on_message(void *owner, struct remote *remote, const struct wire_header *h,
		      struct cursor *body)
{
	if (h->type == WIRE_T_CHUNK_NOTE || h->type == WIRE_T_CHUNK_SUM ||
	    h->type == WIRE_T_CHUNK_FIND) {
		messages++;
		bytes += cursor_left(body);
	}
	return true_message(owner, remote, h, body);
}

static void wrap(struct kvd *kvd, struct handshake_events *events)
{
	(void)kvd;
	true_message = events->on_message;
	events->on_message = on_message;
}

static void must(int r, const char *what)
{
	if (r >= 0)
		return;
	fprintf(stderr, "bench_homes_cluster: %s: %s\n", what, err_last()->text);
	exit(1);
}

/* ---- what holders have ---- */

static void id_of(const struct bench *b, unsigned int holder, unsigned int chunk,
		  uint8_t id[STORE_ID_BYTES])
{
	uint64_t words[STORE_ID_BYTES / 8] = {chunk};

	if (chunk >= COMMON) /* half are the next one's, too, half the one's before */
		words[1] = 1 + (chunk / PROMPT % 2 ? holder
						   : (holder + b->holders - 1) % b->holders);
	if (chunk >= COMMON)
		words[0] = chunk % PROMPT + chunk / PROMPT / 2 * PROMPT + COMMON;
	memcpy(id, words, STORE_ID_BYTES);
}

static void chunks_make(struct bench *b, unsigned int node)
{
	struct store *store = b->c.nodes[node].kvd.store;
	struct store_space *space = &b->spaces[node];
	unsigned int holder = node - b->homes;

	*space = (struct store_space){
		.store = store, .tenant = &b->tenant, .digest = "the same space"};
	b->of_node[node] = calloc(b->chunks, sizeof(struct store_chunk));
	assert_non_null(b->of_node[node]);
	for (unsigned int i = 0; i < b->chunks; i++) {
		struct store_chunk *chunk = &b->of_node[node][i];
		struct store_chunk **bucket;

		chunk->space = space;
		chunk->shown = STORE_IN_MEMORY;
		id_of(b, holder, i, chunk->id);
		chunk->item.key = XXH3_64bits(chunk->id, sizeof(chunk->id));
		bucket = &store->buckets[chunk->item.key & store->bucket_mask];
		chunk->next = *bucket;
		*bucket = chunk;
	}
}

/* ---- daemons ---- */

static void node_begin(struct bench *b, unsigned int node, const char *homes, bool is_home)
{
	struct kvd *kvd = &b->c.nodes[node].kvd;
	struct config *config = &b->c.nodes[node].config;

	config->chunk_memory_bytes = 1 << 20;
	config->chunk_home_bytes = is_home ? 16 << 20 : 0;
	snprintf(config->chunk_homes, sizeof(config->chunk_homes), "%s", homes);
	loop_prepare_remove(&kvd->handshake->before_sleep);
	loop_prepare_remove(&kvd->rooms->before_sleep);
	must(store_make(kvd, &kvd->store), "store");
	if (is_home)
		must(home_new(kvd->store, &kvd->store->home), "home");
	must(homes_new(kvd->store, &kvd->store->homes), "homes");
}

static uint64_t holdings(const struct bench *b)
{
	uint64_t used = 0;

	for (unsigned int i = 0; i < b->homes; i++) {
		struct store_home f;

		home_figures(b->c.nodes[b->at[i]].kvd.store->home, &f);
		used += f.used;
	}
	return used;
}

/* -> seconds of virtual time until homes have so many. */
static double until(struct bench *b, uint64_t wanted, double *cpu_p)
{
	uint64_t since = loop_now_ns(b->c.loop), real = clock_ns();

	while (holdings(b) != wanted) {
		if (loop_now_ns(b->c.loop) - since > LIMIT_NS) {
			fprintf(stderr,
				"bench_homes_cluster: %" PRIu64 " holdings of %" PRIu64
				"\n",
				holdings(b), wanted);
			exit(1);
		}
		cluster_run(&b->c, TURN_NS);
	}
	*cpu_p = (double)(clock_ns() - real) / 1e9;
	return (double)(loop_now_ns(b->c.loop) - since) / 1e9;
}

int main(int argc, char **argv)
{
	static struct bench bench;
	struct bench *b = &bench;
	char homes[3072] = "";
	double s, cpu;
	uint64_t real = clock_ns();
	const struct mem_path path = {.delay_ns = LOOP_NS_PER_MS};

	b->holders = argc > 1 ? (unsigned int)atoi(argv[1]) : 1000;
	b->homes = argc > 2 ? (unsigned int)atoi(argv[2]) : 32;
	b->chunks = argc > 3 ? (unsigned int)atoi(argv[3]) : 10000;
	cluster_wrap_events(wrap);
	cluster_new(&b->c, 7, b->homes + b->holders);
	mem_hub_set_default(b->c.links, &path);
	printf("made in %.2f s\n", (double)(clock_ns() - real) / 1e9);
	b->spaces = calloc(b->c.most, sizeof(*b->spaces));
	b->of_node = calloc(b->c.most, sizeof(*b->of_node));
	for (unsigned int i = 0; i < b->homes; i++) {
		strcat(homes, b->c.nodes[i].endpoint);
		strcat(homes, " ");
		b->at[i] = i;
	}
	for (unsigned int i = 0; i < b->c.count; i++) {
		node_begin(b, i, homes, i < b->homes);
		if (i >= b->homes)
			chunks_make(b, i);
	}
	printf("begun in %.2f s\n", (double)(clock_ns() - real) / 1e9);
	fflush(stdout);
	b->wanted = (uint64_t)b->holders * (b->chunks - COMMON) +
		    COMMON * (uint64_t)(b->holders < HOME_SAME_MAX ? b->holders
								    : HOME_SAME_MAX);
	s = until(b, b->wanted, &cpu);
	printf("told in %.2f s (virtual), %.2f s real; %" PRIu64 " messages, %" PRIu64 " bytes\n", s, cpu, messages, bytes);
	fflush(stdout);
	real = clock_ns();
	cluster_run(&b->c, LOOP_NS_PER_S);
	printf("an idle second costs %.2f s\n", (double)(clock_ns() - real) / 1e9);
	return 0;
}
