/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_xfer PREFILL_SOCKET DECODE_SOCKET MEMORY OP SIZE TOTAL PLACES CACHES
 * THREADS: one work between two live daemons, the whole way from kvd_xfer_post() to the
 * state that a poller sees, and its limit on the same memory.
 *
 *   MEMORY  memfd, adopt (moved behind a memfd in place) or vm (by address)
 *   OP      write (the prefill engine posts) or read (the decode engine does)
 *   SIZE    of a row; TOTAL bytes a transfer
 *   PLACES  scattered, dense or flat (rows.h)
 *   CACHES  cold: swept before each transfer by a memory larger than they are;
 *           warm: as the last transfer left them
 *
 * It says once what the first transfer took, over memory that nobody but its
 * engine had touched, and then obeys scripts/bench.py, so that all who are
 * measured take turns: a line `kvd N` or `limit N` is answered by a line of JSON
 * with N times [seconds, seconds of CPU] (of kvd the caller knows the latter). One
 * process plays both engines.
 *
 * The limit of memfd and adopt is a loop of memcpy over the rows on THREADS
 * threads; that of vm goes through a bounce buffer from another process. (Where the
 * kernel lets one daemon read both engines, one alone copies; with `vm_direct = no`
 * both do, and kvd has twice the limit's threads.)
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "lib/kvd.h"
#include "tests/bench/limit.h"
#include "tests/bench/rows.h"

#define REGION_BYTES ROWS_REGION_BYTES
#define WAIT_S 60

enum kind { KIND_MEMFD, KIND_ADOPT, KIND_VM };

struct engine {
	struct kvd_client *client;
	enum kind kind;
	struct kvd_memory memory;
	uint8_t *base;
	struct kvd_region *region;
};

static struct engine prefill, decode;
static bool cold;

static void die(const struct engine *e, const char *what)
{
	const struct kvd_error *why = kvd_last_error(e ? e->client : NULL);

	fprintf(stderr, "bench_xfer: %s: %s\n", what, why->message);
	exit(1);
}

static void die_xfer(const struct kvd_xfer *xfer, int state)
{
	struct kvd_error why = {0};

	kvd_xfer_error(xfer, 0, &why);
	fprintf(stderr, "bench_xfer: the transfer %s: %s %s\n",
		state == KVD_FAILED ? "failed" : "hangs", kvd_code_name(why.code),
		why.message);
	exit(1);
}

static void *need(void *p)
{
	if (!p || p == MAP_FAILED) {
		fprintf(stderr, "bench_xfer: out of memory\n");
		exit(1);
	}
	return p;
}

/* Words that differ from place to place, and from one salt to another. */
static void fill(struct engine *e, uint64_t salt)
{
	uint64_t *word = (uint64_t *)(void *)e->base;

	for (uint64_t i = 0; i < REGION_BYTES / sizeof(*word); i++)
		word[i] = (i + salt) * UINT64_C(0x9e3779b97f4a7c15);
}

/* Plain memory, as an engine has it that knows nothing of kvd. */
static void engine_plain(struct engine *e, const char *name)
{
	struct kvd_adopt_args adopt = {.bytes = REGION_BYTES, .vouched = true};
	struct kvd_adopted adopted;

	e->base = need(mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
	(void)madvise(e->base, REGION_BYTES, MADV_HUGEPAGE);
	/* the limit's process is a fork: it must not make these pages copy-on-write */
	(void)madvise(e->base, REGION_BYTES, MADV_DONTFORK);
	fill(e, (uint64_t)*name << 32);
	adopt.address = e->base;
	if (e->kind == KIND_ADOPT && kvd_adopt(&adopt, &adopted) < 0)
		die(NULL, "kvd_adopt");
}

static void engine_memory(struct engine *e, const char *name)
{
	struct kvd_region_args args = {.kind = KVD_REGION_VM, .bytes = REGION_BYTES};

	if (e->kind == KIND_MEMFD) {
		if (kvd_memory_alloc(REGION_BYTES, name, &e->memory) < 0)
			die(NULL, "kvd_memory_alloc");
		e->base = e->memory.address;
		fill(e, (uint64_t)*name << 32);
		if (kvd_region_memory(e->client, &e->memory, NULL, &e->region) < 0)
			die(e, "region");
		return;
	}
	engine_plain(e, name);
	args.address = e->base;
	if (kvd_region_register(e->client, &args, NULL, &e->region) < 0)
		die(e, "region");
}

static void engine_open(struct engine *e, const char *socket, const char *role)
{
	struct kvd_options options = {
		.socket = socket, .client = "bench", .role = role, .timeout_ms = 60000};

	if (kvd_open(&options, &e->client) < 0)
		die(NULL, socket);
	engine_memory(e, role);
}

static void engine_close(struct engine *e)
{
	kvd_close(e->client);
	if (e->kind == KIND_MEMFD)
		kvd_memory_free(&e->memory);
	else
		munmap(e->base, REGION_BYTES);
}

static struct kvd_dlist *dlist_of(const struct engine *own, uint64_t attach,
				  const uint8_t *base, const uint64_t *at,
				  const struct rows *rows)
{
	struct kvd_desc *descs = need(calloc(rows->count, sizeof(*descs)));
	struct kvd_dlist *dlist;

	for (uint64_t i = 0; i < rows->count; i++)
		descs[i] = (struct kvd_desc){.address = (uintptr_t)(base + at[i]),
					     .bytes = rows->bytes};
	if (kvd_dlist_prep(own->client, attach, descs, rows->count, 4, &dlist) < 0 ||
	    kvd_dlist_wait(dlist, 0) < 0)
		die(own, "dlist");
	free(descs);
	return dlist;
}

static uint64_t attach(const struct engine *own, const struct engine *remote)
{
	struct kvd_session_key key;
	uint64_t id;

	if (kvd_session_key(remote->client, 0, &key) < 0)
		die(remote, "session.key");
	if (kvd_peer_attach(own->client, kvd_daemon(remote->client)->endpoint, &key, NULL,
			    &id) < 0)
		die(own, "peer.attach");
	return id;
}

/* A poller that spins would take a core from the copies, which the limit's does not;
 * an engine polls between other work. `expected_s` is what the last one took. */
static void xfer_wait(struct kvd_xfer *xfer, double expected_s)
{
	long ns = (long)(expected_s * 1e9 / 50);
	const struct timespec pause = {.tv_nsec = ns < 5000	? 5000
						  : ns > 100000 ? 100000
								: ns};
	double end = clock_s() + WAIT_S;
	int state;

	while ((state = kvd_xfer_state(xfer)) != KVD_SUCCESS) {
		if (state < 0 || state == KVD_FAILED || clock_s() > end)
			die_xfer(xfer, state);
		nanosleep(&pause, NULL);
	}
}

static void check_rows(const struct rows *rows)
{
	for (uint64_t i = 0; i < rows->count; i++)
		if (memcmp(decode.base + rows->to[i], prefill.base + rows->from[i],
			   rows->bytes) != 0) {
			fprintf(stderr, "bench_xfer: row %" PRIu64 " differs\n", i);
			exit(1);
		}
}

static double xfer_s(const struct engine *own, struct kvd_xfer *xfer)
{
	static double took;
	double begin;

	if (cold)
		caches_sweep();
	begin = clock_s();
	if (kvd_xfer_post(xfer, NULL, 0) < 0)
		die(own, "post");
	xfer_wait(xfer, took);
	took = clock_s() - begin;
	return took;
}

static struct limit_took limit_run(const struct rows *rows, unsigned int threads)
{
	if (cold)
		caches_sweep();
	return prefill.kind == KIND_VM
		       ? limit_vm(rows, prefill.base, decode.base, threads)
		       : limit_memcpy(rows, prefill.base, decode.base, threads);
}

static void obey(const struct engine *own, struct kvd_xfer *xfer, const struct rows *rows,
		 unsigned int threads)
{
	char line[64], word[16];
	unsigned int n;

	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "%15s %u", word, &n) != 2)
			exit(2);
		printf("[");
		for (unsigned int i = 0; i < n; i++) {
			struct limit_took took = {0};

			if (strcmp(word, "kvd") == 0)
				took.s = xfer_s(own, xfer);
			else
				took = limit_run(rows, threads);
			printf("%s[%.9f,%.9f]", i ? "," : "", took.s, took.cpu_s);
		}
		printf("]\n");
		fflush(stdout);
	}
}

static void work_run(const struct rows *rows, bool reading, unsigned int threads)
{
	const struct engine *own = reading ? &decode : &prefill;
	const struct engine *remote = reading ? &prefill : &decode;
	uint64_t id = attach(own, remote);
	struct kvd_xfer_args args = {.op = reading ? KVD_READ : KVD_WRITE};
	struct kvd_dlist *local, *far;
	struct kvd_xfer *xfer;
	double first;

	local = dlist_of(own, 0, own->base, reading ? rows->to : rows->from, rows);
	far = dlist_of(own, id, remote->base, reading ? rows->from : rows->to, rows);
	args.local = local;
	args.remote = far;
	first = clock_s();
	if (kvd_xfer_make(own->client, &args, &xfer) < 0 ||
	    kvd_xfer_post(xfer, NULL, 0) < 0)
		die(own, "a transfer");
	xfer_wait(xfer, 0);
	first = clock_s() - first;
	check_rows(rows);
	printf("{\"rows\":%" PRIu64 ",\"first_s\":%.9f}\n", rows->count, first);
	fflush(stdout);
	obey(own, xfer, rows, threads);
	/* a transfer that is posted again moves what is there now */
	fill(&prefill, 0);
	xfer_s(own, xfer);
	check_rows(rows);
	if (kvd_xfer_release(xfer) < 0 || kvd_dlist_release(local) < 0 ||
	    kvd_dlist_release(far) < 0)
		die(own, "release");
}

static int find(const char *word, const char *const *words)
{
	for (int i = 0; words[i]; i++)
		if (strcmp(word, words[i]) == 0)
			return i;
	fprintf(stderr, "bench_xfer: %s: not known\n", word);
	exit(2);
}

int main(int argc, char **argv)
{
	static const char *const kinds[] = {"memfd", "adopt", "vm", NULL};
	static const char *const ops[] = {"write", "read", NULL};
	static const char *const places[] = {"flat", "scattered", "dense", NULL};
	static const char *const caches[] = {"warm", "cold", NULL};
	unsigned int threads;
	struct rows rows;

	if (argc != 10) {
		fprintf(stderr,
			"usage: bench_xfer PREFILL_SOCKET DECODE_SOCKET MEMORY OP SIZE "
			"TOTAL PLACES CACHES THREADS\n");
		return 2;
	}
	threads = (unsigned int)atoi(argv[9]);
	if (threads < 1 || threads > LIMIT_THREADS_MAX)
		return 2;
	prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
	prefill.kind = decode.kind = (enum kind)find(argv[3], kinds);
	rows_make(&rows, strtoull(argv[5], NULL, 10), strtoull(argv[6], NULL, 10),
		  (enum rows_places)find(argv[7], places));
	cold = find(argv[8], caches);
	engine_open(&prefill, argv[1], "prefill");
	engine_open(&decode, argv[2], "decode");
	work_run(&rows, find(argv[4], ops), threads);
	engine_close(&prefill);
	engine_close(&decode);
	rows_free(&rows);
	return 0;
}
