/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A cluster of daemons in this process, in virtual time: the real peering, handshake and
 * rooms over a link in memory. What it costs each of them, in messages, memory and time
 * of a core, to start, to stay, to lose a switch, to be upgraded one batch after the
 * other.
 *
 *     bench_cluster [daemons [peers of each]]
 *
 * Each daemon is on a ring and dials the next half of its peers, so it has the same
 * number of peers whatever the number of daemons: what grows with that number is the
 * cluster's own cost. A part of them opens rooms, and goes on doing so. Frames take a
 * millisecond. One line of JSON a phase, for scale.py.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "daemon/handshake/handshake_impl.h"
#include "daemon/peer/peer_impl.h"
#include "daemon/room/rooms_set.h"
#include "tests/lib/cluster.h"

#define STEP_NS (20 * LOOP_NS_PER_MS)
#define LIMIT_S 300
#define SWITCH 500u /* daemons behind it */
#define BATCH 100u  /* that are upgraded at once */
#define BATCHES 5u
#define IDLE_S 10u
#define AWAY_S 10u
#define TALKER 50u /* peers of the one that comes */

struct bench {
	struct cluster c;
	unsigned int daemons, peers;
	unsigned int *at; /* node of each daemon */
};

static void die(const char *what)
{
	fprintf(stderr, "bench_cluster: %s: %s\n", what, err_last()->text);
	exit(1);
}

/* ---- daemons ---- */

static struct node *node_of(const struct bench *b, unsigned int daemon)
{
	return &b->c.nodes[b->at[daemon]];
}

static void give_back(void *memory, size_t bytes)
{
	const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	uintptr_t begin = ((uintptr_t)memory + page - 1) & ~(page - 1);
	uintptr_t end = ((uintptr_t)memory + bytes) & ~(page - 1);

	if (end > begin && madvise((void *)begin, end - begin, MADV_DONTNEED) != 0)
		die("madvise");
}

/* The largest message's memory, which a daemon touches at its start, is not counted: 3
 * MiB of each. */
static void node_shrink(struct node *node)
{
	give_back(node->kvd.handshake->scratch, WIRE_FRAME_MAX);
	give_back(node->kvd.handshake->blob_scratch, WIRE_FRAME_MAX);
	give_back(node->kvd.peers->frame, WIRE_FRAME_MAX);
}

/* The one before is made by now. */
static void on_node(struct kvd *kvd, struct handshake_events *events)
{
	static struct node *before;

	(void)events;
	if (before)
		node_shrink(before);
	before = container_of(kvd, struct node, kvd);
}

/* No bytes move here: a turn would do nothing but ask all daemons' transports. */
static void node_quieten(struct node *node)
{
	node_shrink(node);
	loop_prepare_remove(&node->kvd.handshake->before_sleep);
}

static void dial(const struct bench *b, unsigned int daemon)
{
	struct remote *remote;

	for (unsigned int i = 1; i <= b->peers / 2; i++) {
		const struct node *to = node_of(b, (daemon + i) % b->daemons);

		if (handshake_reach(node_of(b, daemon)->kvd.handshake, to->endpoint, NULL,
				    &remote) < 0)
			die("reach");
	}
}

static uint64_t ready_of(const struct node *node)
{
	const struct remote *remote;
	uint64_t ready = 0;

	list_foreach(remote, handshake_remotes(node->kvd.handshake), link)
		ready += remote->ready;
	return ready;
}

/* Lines that are up, of all daemons. */
static uint64_t ready_all(const struct bench *b)
{
	uint64_t ready = 0;

	for (unsigned int i = 0; i < b->daemons; i++)
		ready += ready_of(node_of(b, i));
	return ready;
}

/* ---- measuring ---- */

struct mark {
	uint64_t virtual_ns, messages, resident;
	double cpu;
};

/* Resident: memory that is there and was never touched costs nothing. */
static uint64_t resident_bytes(void)
{
	FILE *file = fopen("/proc/self/statm", "r");
	uint64_t pages = 0;

	if (!file || fscanf(file, "%*s %" SCNu64, &pages) != 1)
		die("statm");
	fclose(file);
	return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static double cpu_seconds(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static struct mark mark(const struct bench *b)
{
	return (struct mark){.virtual_ns = loop_now_ns(b->c.loop),
			     .messages = mem_hub_stats(b->c.links)->sent,
			     .resident = resident_bytes(),
			     .cpu = cpu_seconds()};
}

static double virtual_s(const struct bench *b, const struct mark *from)
{
	return (double)(loop_now_ns(b->c.loop) - from->virtual_ns) / 1e9;
}

/* Messages of the daemons that it is about, to them and from them. */
static uint64_t frames_of(const struct bench *b, unsigned int first, unsigned int of)
{
	uint64_t frames = 0;

	for (unsigned int i = first; i < first + of; i++)
		frames += link_mem_frames(node_of(b, i % b->daemons)->kvd.link);
	return frames;
}

/* What `of` daemons did, whose messages were `frames`. */
static void say_of(const struct bench *b, const char *phase, const struct mark *from,
		   unsigned int of, uint64_t frames)
{
	printf("{\"phase\":\"%s\",\"daemons\":%u,\"peers\":%u,\"seconds\":%.2f,"
	       "\"messages\":%.2f}\n",
	       phase, b->daemons, b->peers, virtual_s(b, from), (double)frames / of);
}

/* Each daemon. */
static void say(const struct bench *b, const char *phase, const struct mark *from,
		unsigned int of)
{
	struct mark now = mark(b);

	printf("{\"phase\":\"%s\",\"daemons\":%u,\"peers\":%u,\"seconds\":%.2f,"
	       "\"messages\":%.2f,\"cpu_us\":%.1f,\"resident_kib\":%.1f}\n",
	       phase, b->daemons, b->peers, virtual_s(b, from),
	       (double)(now.messages - from->messages) / of,
	       (now.cpu - from->cpu) * 1e6 / of,
	       ((double)now.resident - (double)from->resident) / 1024 / of);
}

static void until_ready(struct bench *b, uint64_t wanted, const char *what)
{
	struct mark from = mark(b);

	while (ready_all(b) != wanted) {
		if (virtual_s(b, &from) > LIMIT_S)
			die(what);
		cluster_run(&b->c, STEP_NS * 10);
	}
}

/* ---- phases ---- */

static void bench_start(struct bench *b)
{
	struct mark from = mark(b);

	for (unsigned int i = 0; i < b->daemons; i++)
		dial(b, i);
	until_ready(b, (uint64_t)b->daemons * b->peers, "not all lines come up");
	say(b, "start", &from, b->daemons);
}

static void bench_idle(struct bench *b)
{
	struct mark from = mark(b);

	cluster_run(&b->c, IDLE_S * LOOP_NS_PER_S);
	say(b, "ten seconds", &from, b->daemons);
}

/* One more that comes to a cluster that is there, and talks to more than others do. */
static void bench_join(struct bench *b)
{
	struct node *node = &b->c.nodes[b->c.count - 1]; /* kept back until now */
	struct mark from = mark(b);
	struct remote *remote;

	for (unsigned int i = 0; i < TALKER; i++) {
		if (handshake_reach(node->kvd.handshake, node_of(b, i)->endpoint, NULL,
				    &remote) < 0)
			die("reach");
	}
	while (ready_of(node) != TALKER)
		cluster_run(&b->c, STEP_NS);
	printf("{\"phase\":\"one comes\",\"daemons\":%u,\"peers\":%u,\"seconds\":%.2f,"
	       "\"messages\":%" PRIu64 "}\n",
	       b->daemons, TALKER, virtual_s(b, &from), link_mem_frames(node->kvd.link));
}

/* A switch and the hosts behind it, as long as `seconds`: their processes go on. */
static void bench_switch(struct bench *b, unsigned int seconds)
{
	unsigned int of = b->daemons / 2 < SWITCH ? b->daemons / 2 : SWITCH;
	uint64_t frames = frames_of(b, 0, of);
	struct mark from = mark(b);

	for (unsigned int i = 0; i < of; i++)
		link_mem_freeze(node_of(b, i)->kvd.link, true);
	cluster_run(&b->c, seconds * LOOP_NS_PER_S);
	say_of(b, "switch away", &from, of, frames_of(b, 0, of) - frames);
	from = mark(b);
	frames = frames_of(b, 0, of);
	for (unsigned int i = 0; i < of; i++)
		link_mem_freeze(node_of(b, i)->kvd.link, false);
	until_ready(b, (uint64_t)b->daemons * b->peers + TALKER, "not all come back");
	say_of(b, "switch back", &from, of, frames_of(b, 0, of) - frames);
}

/* Each of a batch dies and comes back as another instance, and those who had dialled it
 * find it again. */
static void bench_upgrade(struct bench *b)
{
	struct mark from = mark(b);

	for (unsigned int batch = 0; batch < BATCHES; batch++) {
		for (unsigned int i = 0; i < BATCH; i++) {
			unsigned int daemon = b->daemons / 2 + batch * BATCH + i;

			daemon %= b->daemons;
			cluster_crash(&b->c, b->at[daemon], MEM_CRASH_KILLED);
			b->at[daemon] = cluster_restart(&b->c, b->at[daemon]);
			node_quieten(node_of(b, daemon));
			dial(b, daemon);
		}
		until_ready(b, (uint64_t)b->daemons * b->peers + TALKER,
			    "not all come back");
	}
	/* as new instances, from nothing on */
	say_of(b, "upgrade", &from, BATCHES * BATCH,
	       frames_of(b, b->daemons / 2, BATCHES * BATCH));
}

static unsigned int number(int argc, char **argv, int i, unsigned int preset,
			   unsigned int least, unsigned int most)
{
	unsigned long n = argc > i ? strtoul(argv[i], NULL, 10) : preset;

	return n >= least && n <= most ? (unsigned int)n : preset;
}

int main(int argc, char **argv)
{
	const struct mem_path path = {.delay_ns = LOOP_NS_PER_MS};
	static struct bench bench;
	struct bench *b = &bench;
	struct mark from;

	b->daemons = number(argc, argv, 1, 1000, 200, 20000);
	b->peers = number(argc, argv, 2, 10, 2, 100);
	setvbuf(stdout, NULL, _IOLBF, 0);
	from = (struct mark){.resident = resident_bytes(), .cpu = cpu_seconds()};
	cluster_restarts_max(BATCHES * BATCH);
	cluster_wrap_events(on_node);
	cluster_new(&b->c, 7, b->daemons + 1);
	mem_hub_set_default(b->c.links, &path);
	fake_hub_profile(b->c.bytes)->delay_min_ns = LOOP_NS_PER_MS;
	fake_hub_profile(b->c.bytes)->delay_max_ns = LOOP_NS_PER_MS;
	b->at = calloc(b->daemons, sizeof(*b->at));
	if (!b->at)
		die("memory");
	for (unsigned int i = 0; i <= b->daemons; i++) {
		if (i < b->daemons)
			b->at[i] = i;
		node_quieten(&b->c.nodes[i]);
	}
	say(b, "alone", &from, b->daemons);
	bench_start(b);
	bench_idle(b);
	bench_join(b);
	bench_switch(b, AWAY_S);
	bench_upgrade(b);
	return 0; /* all of it ends with the process */
}
