/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A cluster of daemons in this process, in virtual time: the real handshake, homes and
 * home over a link in memory. How long it takes until the homes know what there is, at
 * the start and after a death, and what they are sent. What a message costs is
 * bench_homes.c's.
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

#include "daemon/handshake/handshake_impl.h"
#include "daemon/room/rooms_set.h"
#include "daemon/store/home.h"
#include "daemon/store/home_table.h"
#include "daemon/store/homes_impl.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/cluster.h"

#define COMMON 800u
#define PROMPT 40u
#define FINDS 1000u
#define CHURN_S 5u
#define CHANGES 200u /* a second and holder */
#define TURN_NS (10 * LOOP_NS_PER_MS)
#define LIMIT_S 100
#define DEAD 1u /* the holder that dies */

struct bench {
	struct cluster c;
	unsigned int holders, homes, chunks;
	struct store_tenant tenant;
	struct store_space *spaces;   /* by node */
	struct store_chunk **of_node; /* its chunks */
	unsigned int at[MEMBERS_MAX]; /* nodes of the homes */
};

/* Messages of chunks that homes were sent, and bytes of their bodies. */
static uint64_t messages, bytes;
static int (*true_message)(void *owner, struct remote *remote,
			   const struct wire_header *h, struct cursor *body);

static int on_message(void *owner, struct remote *remote, const struct wire_header *h,
		      struct cursor *body)
{
	if (h->type == WIRE_T_INDEX_UPDATE || h->type == WIRE_T_INDEX_DIGEST ||
	    h->type == WIRE_T_INDEX_QUERY) {
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

static void die(const char *what)
{
	fprintf(stderr, "bench_homes_cluster: %s: %s\n", what, err_last()->text);
	exit(1);
}

static void must(int r, const char *what)
{
	if (r < 0)
		die(what);
}

/* ---- what holders have ---- */

static void id_of(const struct bench *b, unsigned int holder, unsigned int chunk,
		  uint8_t id[STORE_ID_BYTES])
{
	uint64_t words[STORE_ID_BYTES / 8] = {chunk};

	if (chunk >= COMMON) /* half are the next one's, too, half the one's before */
		words[1] =
			1 + (chunk / PROMPT % 2 ? holder
						: (holder + b->holders - 1) % b->holders);
	if (chunk >= COMMON)
		words[0] = chunk % PROMPT + chunk / PROMPT / 2 * PROMPT + COMMON;
	memcpy(id, words, STORE_ID_BYTES);
}

static void chunks_make(struct bench *b, unsigned int node)
{
	struct store *store = store_of(&b->c.nodes[node].kvd);
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

static void node_begin(struct bench *b, unsigned int node, const char *homes,
		       bool is_home)
{
	struct kvd *kvd = &b->c.nodes[node].kvd;
	struct config *config = &b->c.nodes[node].config;
	struct store *store;

	/* no bytes move: a turn would do nothing but ask all transports */
	loop_prepare_remove(&kvd->handshake->before_sleep);
	config->chunk_memory_bytes = 1 << 20;
	config->chunk_index_bytes = is_home ? 16 << 20 : 0;
	snprintf(config->chunk_index, sizeof(config->chunk_index), "%s", homes);
	must(store_make(kvd, &store), "store");
	kvd->part[MODULE_STORE] = store;
	if (is_home)
		must(home_new(store_of(kvd), &store_of(kvd)->home), "home");
	must(homes_new(store_of(kvd), &store_of(kvd)->homes), "homes");
}

static uint64_t holdings(const struct bench *b)
{
	uint64_t used = 0;

	for (unsigned int i = 0; i < b->homes; i++) {
		struct store_home f;

		home_figures(store_of(&b->c.nodes[b->at[i]].kvd)->home, &f);
		used += f.used;
	}
	return used;
}

static unsigned int holders(const struct bench *b)
{
	unsigned int known = 0;

	for (unsigned int i = 0; i < b->homes; i++) {
		struct store_home f;

		home_figures(store_of(&b->c.nodes[b->at[i]].kvd)->home, &f);
		known += f.holders;
	}
	return known;
}

/* ---- measuring ---- */

struct mark {
	uint64_t virtual_ns, messages, bytes;
};

static struct mark mark(const struct bench *b)
{
	return (struct mark){.virtual_ns = loop_now_ns(b->c.loop),
			     .messages = messages,
			     .bytes = bytes};
}

static double virtual_s(const struct bench *b, const struct mark *from)
{
	return (double)(loop_now_ns(b->c.loop) - from->virtual_ns) / 1e9;
}

/* Homes have so many holdings; `known` 0: whoever tells them. */
static void until(struct bench *b, uint64_t wanted, unsigned int known)
{
	struct mark from = mark(b);

	while (known ? holders(b) != known : holdings(b) != wanted) {
		if (virtual_s(b, &from) > LIMIT_S)
			die("homes do not come to know all");
		cluster_run(&b->c, TURN_NS);
	}
}

static void say_messages(const struct bench *b, const struct mark *from)
{
	printf("%.0f messages and %.2f MB to a home",
	       (double)(messages - from->messages) / b->homes,
	       (double)(bytes - from->bytes) / 1e6 / b->homes);
}

static void bench_report(struct bench *b)
{
	uint64_t known = b->holders < HOME_SAME_MAX ? b->holders : HOME_SAME_MAX;
	struct mark from = {.virtual_ns = loop_now_ns(b->c.loop)};

	until(b, (uint64_t)b->holders * (b->chunks - COMMON) + COMMON * known, 0);
	printf("start     %.2f M holdings known %.2f s behind the daemons' start; ",
	       (double)holdings(b) / 1e6, virtual_s(b, &from));
	say_messages(b, &from);
	printf("\n");
}

/* ---- finding ---- */

struct finding {
	struct bench *b;
	struct homes_query *query;
	unsigned int holder, *done;
	unsigned int wanted, named, dead;
};

static bool is_named(const struct finding *f, unsigned int holder, const char **endpoints,
		     unsigned int count)
{
	for (unsigned int i = 0; i < count; i++) {
		if (strcmp(endpoints[i], f->b->c.nodes[f->b->homes + holder].endpoint) ==
		    0)
			return true;
	}
	return false;
}

static void on_found(void *arg)
{
	struct finding *f = arg;
	const char *endpoints[4];
	unsigned int count = homes_query_best(f->query, endpoints, 4);
	unsigned int second = (f->holder + 1) % f->b->holders;

	f->wanted = (f->holder != f->dead) + (second != f->dead);
	f->named = is_named(f, f->holder, endpoints, count) +
		   is_named(f, second, endpoints, count);
	if (f->dead != UINT32_MAX && is_named(f, f->dead, endpoints, count))
		die("the dead one is named");
	homes_query_end(f->query);
	++*f->done;
}

static void finding_begin(struct bench *b, struct finding *f, unsigned int n)
{
	unsigned int requester = b->homes + (f->holder + 2) % b->holders;
	unsigned int groups = (b->chunks - COMMON) / PROMPT / 2, begin = n % 100 * 8;
	uint8_t ids[(8 + PROMPT) * STORE_ID_BYTES];

	if (f->dead != UINT32_MAX && requester == b->homes + f->dead)
		requester++;
	for (unsigned int i = 0; i < 8; i++)
		id_of(b, f->holder, begin + i, ids + (size_t)i * STORE_ID_BYTES);
	for (unsigned int i = 0; i < PROMPT; i++)
		id_of(b, f->holder, COMMON + (2 * (n % groups) + 1) * PROMPT + i,
		      ids + (size_t)(8 + i) * STORE_ID_BYTES);
	if (homes_find(store_of(&b->c.nodes[requester].kvd)->homes, &b->spaces[requester],
		       ids, 8 + PROMPT, LOOP_NS_PER_S, on_found, f, &f->query) != 0)
		die("homes_find");
}

/* Prompts of a beginning that all have, and 40 chunks that two have. */
static void bench_find(struct bench *b, unsigned int dead)
{
	static struct finding findings[FINDS];
	unsigned int done = 0, wanted = 0, named = 0;
	struct mark from = mark(b);

	for (unsigned int i = 0; i < FINDS; i++) {
		findings[i] = (struct finding){
			.b = b,
			.holder = (unsigned int)(home_mix(i) % b->holders),
			.done = &done,
			.dead = dead};
		finding_begin(b, &findings[i], i);
	}
	while (done < FINDS)
		cluster_run(&b->c, LOOP_NS_PER_MS);
	for (unsigned int i = 0; i < FINDS; i++) {
		wanted += findings[i].wanted;
		named += findings[i].named;
	}
	printf("find      of %u prompts %.1f %% of the holders are among the four best; "
	       "%.1f messages each\n",
	       FINDS, 100.0 * named / wanted, (double)(messages - from.messages) / FINDS);
}

/* ---- change ---- */

static void churn_turn(struct bench *b, unsigned int turn)
{
	for (unsigned int node = b->homes; node < b->homes + b->holders; node++) {
		for (unsigned int i = 0; i < CHANGES / 4; i++) {
			struct store_chunk *chunk =
				&b->of_node[node][COMMON + (turn / 2 * CHANGES / 4 + i) %
								   (b->chunks - COMMON)];

			chunk->shown = turn % 2 ? STORE_IN_MEMORY : 0;
			homes_tell(store_of(&b->c.nodes[node].kvd)->homes, chunk,
				   chunk->shown);
		}
	}
}

static void bench_churn(struct bench *b)
{
	uint64_t wanted = holdings(b);
	struct mark from = mark(b);

	for (unsigned int turn = 0; turn < CHURN_S * 4; turn++) {
		churn_turn(b, turn);
		cluster_run(&b->c, LOOP_NS_PER_S / 4);
	}
	printf("changes   %u a second and holder, for %u s: ", CHANGES, CHURN_S);
	say_messages(b, &from);
	printf("\n");
	until(b, wanted, 0);
}

static void bench_holder_dies(struct bench *b)
{
	struct mark from = mark(b);
	unsigned int known = holders(b);

	/* not cluster_crash(): data lines would tell of it at once */
	link_mem_crash(b->c.nodes[b->homes + DEAD].kvd.link, MEM_CRASH_POWER);
	b->c.nodes[b->homes + DEAD].alive = false;
	until(b, 0, known - b->homes);
	printf("holder    loses power: all homes have forgotten it %.2f s later\n",
	       virtual_s(b, &from));
	bench_find(b, DEAD);
}

static void bench_home_dies(struct bench *b, const char *homes)
{
	uint64_t wanted = holdings(b);
	struct mark from = mark(b);

	cluster_crash(&b->c, b->at[0], MEM_CRASH_KILLED);
	cluster_run(&b->c, LOOP_NS_PER_S);
	b->at[0] = cluster_restart(&b->c, b->at[0]);
	node_begin(b, b->at[0], homes, true);
	from = mark(b);
	until(b, wanted, 0);
	printf("home      is killed and comes back after 1 s: it knows all %.2f s later; "
	       "%" PRIu64 " messages, %.2f MB\n",
	       virtual_s(b, &from), messages - from.messages,
	       (double)(bytes - from.bytes) / 1e6);
	bench_find(b, DEAD);
}

/* As a membership service would: all daemons have a list without it. */
static void bench_home_leaves(struct bench *b, const char *homes)
{
	uint64_t wanted = holdings(b);
	struct mark from = mark(b);

	homes = strchr(homes, ' ');
	b->homes--;
	for (unsigned int i = 0; i < b->homes; i++)
		b->at[i] = b->at[i + 1];
	for (unsigned int i = 0; i < b->c.count; i++) {
		if (b->c.nodes[i].alive)
			members_set(homes_members(store_of(&b->c.nodes[i].kvd)->homes),
				    homes);
	}
	until(b, wanted, 0);
	printf("home      leaves the list: the others know all %.2f s later; ",
	       virtual_s(b, &from));
	say_messages(b, &from);
	printf("\n");
}

/* ---- life ---- */

static unsigned int number(int argc, char **argv, int i, unsigned int preset,
			   unsigned int least, unsigned int most)
{
	unsigned long n = argc > i ? strtoul(argv[i], NULL, 10) : preset;

	return n >= least && n <= most ? (unsigned int)n : preset;
}

static void setup(struct bench *b, char *homes)
{
	const struct mem_path path = {.delay_ns = LOOP_NS_PER_MS};

	cluster_wrap_events(wrap);
	cluster_peers_max(2 * (b->homes + b->holders)); /* an eighth is kept */
	cluster_new(&b->c, 7, b->homes + b->holders);
	mem_hub_set_default(b->c.links, &path);
	b->spaces = calloc(b->c.most, sizeof(*b->spaces));
	b->of_node = calloc(b->c.most, sizeof(*b->of_node));
	if (!b->spaces || !b->of_node)
		die("memory");
	for (unsigned int i = 0; i < b->homes; i++) {
		strcat(homes, i ? " " : "");
		strcat(homes, b->c.nodes[i].endpoint);
		b->at[i] = i;
	}
	for (unsigned int i = 0; i < b->c.count; i++) {
		node_begin(b, i, homes, i < b->homes);
		if (i >= b->homes)
			chunks_make(b, i);
	}
}

int main(int argc, char **argv)
{
	static struct bench bench;
	struct bench *b = &bench;
	char homes[MEMBERS_MAX * 64] = "";

	b->holders = number(argc, argv, 1, 1000, 100, 4000);
	b->homes = number(argc, argv, 2, MEMBERS_MAX, 2, MEMBERS_MAX);
	b->chunks = number(argc, argv, 3, 10000, COMMON + 2 * PROMPT, 1 << 20);
	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("%u daemons of %u chunks, %u homes\n", b->holders, b->chunks, b->homes);
	setup(b, homes);
	bench_report(b);
	bench_find(b, UINT32_MAX);
	bench_churn(b);
	bench_holder_dies(b);
	bench_home_dies(b, homes);
	bench_home_leaves(b, homes);
	return 0; /* all of it ends with the process */
}
