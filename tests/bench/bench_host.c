/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_host PREFILL_SOCKET DECODE_SOCKET THREADS [WORK [ROUNDS]]: transfers
 * between two live daemons of this host (scripts/bench-host.sh starts them), the
 * whole way from kvd_xfer_again() to the state that a poller sees, beside the
 * limit: the same rows, moved by as many threads, with nothing around it.
 *
 *   memfd, adopt   the limit is a loop of memcpy over the rows
 *   vm             process_vm_readv into a bounce buffer of a cache's size, then
 *                  process_vm_writev, 1024 rows a call, from another process:
 *                  two daemons take part, so it has twice the threads
 *
 * Both sides take turns, who begins changes every round, and before each the
 * caches are swept by a memory larger than they are: what is measured is cold.
 * One process plays both engines. `first` is the first transfer over memory
 * that nobody but its engine has touched. One line of JSON for each work.
 */
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/kvd.h"

#define MIB (UINT64_C(1) << 20)
#define REGION_BYTES (256 * MIB)
#define THREADS_MAX 64u
#define ROUNDS_MAX 101u
#define BOUNCE_BYTES (128u << 10)
#define IOVS 1024u

enum kind { KIND_MEMFD, KIND_ADOPT, KIND_VM };

struct engine {
	struct kvd_client *client;
	enum kind kind;
	struct kvd_memory memory;
	struct kvd_adopted adopted;
	uint8_t *base;
	struct kvd_region *region;
};

/* `count` rows of `bytes` each; row i lies at from[i] and to[i]. */
struct rows {
	uint64_t bytes, count;
	uint64_t *from, *to;
};

static struct engine prefill, decode;
static unsigned int thread_count;
static uint8_t *sweep;
static size_t sweep_bytes;

static void die(const struct engine *e, const char *what)
{
	const struct kvd_error *why = kvd_last_error(e ? e->client : NULL);

	fprintf(stderr, "bench_host: %s: %s\n", what, why->message);
	exit(1);
}

static void *need(void *p)
{
	if (!p || p == MAP_FAILED) {
		fprintf(stderr, "bench_host: out of memory\n");
		exit(1);
	}
	return p;
}

static double now_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sweep_caches(void)
{
	for (size_t i = 0; i < sweep_bytes; i += 64)
		sweep[i]++;
}

static void sweep_init(void)
{
	long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);

	sweep_bytes = l3 > 0 ? 2 * (size_t)l3 : 64 * MIB;
	if (sweep_bytes > 512 * MIB)
		sweep_bytes = 512 * MIB;
	sweep = need(mmap(NULL, sweep_bytes, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
}

/* ---- the limit ---- */

struct share {
	const struct rows *rows;
	const uint8_t *src;
	uint8_t *dst;
	uint64_t begin, end;
	pid_t pid;
	pthread_t thread;
};

static void *share_memcpy(void *arg)
{
	const struct share *s = arg;
	const struct rows *r = s->rows;

	for (uint64_t i = s->begin; i < s->end; i++)
		memcpy(s->dst + r->to[i], s->src + r->from[i], r->bytes);
	return NULL;
}

static void vm_move(pid_t pid, bool reading, struct iovec *near, struct iovec *far,
		    size_t n)
{
	ssize_t done = reading ? process_vm_readv(pid, near, n, far, n, 0)
			       : process_vm_writev(pid, near, n, far, n, 0);

	if (done < 0) {
		perror("bench_host: process_vm_readv/writev");
		exit(1);
	}
}

/* Rows above the bounce buffer's size go through it in parts. */
static void *share_vm(void *arg)
{
	const struct share *s = arg;
	const struct rows *r = s->rows;
	uint8_t *bounce = need(malloc(BOUNCE_BYTES));
	uint64_t part = r->bytes < BOUNCE_BYTES ? r->bytes : BOUNCE_BYTES;
	static _Thread_local struct iovec near[IOVS], src[IOVS], dst[IOVS];
	uint64_t i = s->begin, at = 0;

	while (i < s->end) {
		size_t n = 0, used = 0;

		for (; i < s->end && n < IOVS && used + part <= BOUNCE_BYTES; n++) {
			uint64_t len = r->bytes - at < part ? r->bytes - at : part;

			near[n] = (struct iovec){bounce + used, len};
			src[n] = (struct iovec){(void *)(s->src + r->from[i] + at), len};
			dst[n] = (struct iovec){s->dst + r->to[i] + at, len};
			used += len;
			at += len;
			if (at == r->bytes) {
				at = 0;
				i++;
			}
		}
		vm_move(s->pid, true, near, src, n);
		vm_move(s->pid, false, near, dst, n);
	}
	free(bounce);
	return NULL;
}

static void limit_run(const struct rows *rows, unsigned int threads,
		      void *(*run)(void *), pid_t pid)
{
	struct share shares[THREADS_MAX];

	for (unsigned int t = 0; t < threads; t++) {
		shares[t] = (struct share){.rows = rows,
					   .src = prefill.base,
					   .dst = decode.base,
					   .begin = rows->count * t / threads,
					   .end = rows->count * (t + 1) / threads,
					   .pid = pid};
		if (t > 0 && pthread_create(&shares[t].thread, NULL, run, &shares[t]))
			die(NULL, "pthread_create");
	}
	run(&shares[0]);
	for (unsigned int t = 1; t < threads; t++)
		pthread_join(shares[t].thread, NULL);
}

/* Another process moves this one's bytes, as the daemons do. */
static double limit_vm_s(const struct rows *rows)
{
	pid_t engine = getpid(), child;
	double took = 0;
	int pipes[2];

	if (pipe(pipes) < 0)
		die(NULL, "pipe");
	child = fork();
	if (child == 0) {
		double begin = now_s();

		limit_run(rows, 2 * thread_count, share_vm, engine);
		took = now_s() - begin;
		_exit(write(pipes[1], &took, sizeof(took)) != sizeof(took));
	}
	close(pipes[1]);
	if (child < 0 || read(pipes[0], &took, sizeof(took)) != sizeof(took))
		die(NULL, "the limit's process");
	close(pipes[0]);
	waitpid(child, NULL, 0);
	return took;
}

static double limit_s(const struct rows *rows)
{
	double begin;

	if (prefill.kind == KIND_VM)
		return limit_vm_s(rows);
	begin = now_s();
	limit_run(rows, thread_count, share_memcpy, 0);
	return now_s() - begin;
}

/* ---- kvd ---- */

/* Plain memory, as an engine has it that knows nothing of kvd. */
static void engine_plain(struct engine *e, const char *name)
{
	struct kvd_adopt_args adopt = {.bytes = REGION_BYTES, .vouched = true};

	e->base = need(mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
	(void)madvise(e->base, REGION_BYTES, MADV_HUGEPAGE);
	/* the limit's process is a fork: it must not make these pages copy-on-write */
	(void)madvise(e->base, REGION_BYTES, MADV_DONTFORK);
	memset(e->base, *name, REGION_BYTES);
	adopt.address = e->base;
	if (e->kind == KIND_ADOPT && kvd_adopt(&adopt, &e->adopted) < 0)
		die(NULL, "kvd_adopt");
}

static void engine_memory(struct engine *e, const char *name)
{
	struct kvd_region_args args = {.kind = KVD_REGION_VM, .bytes = REGION_BYTES};

	if (e->kind == KIND_MEMFD) {
		if (kvd_memory_alloc(REGION_BYTES, name, &e->memory) < 0)
			die(NULL, "kvd_memory_alloc");
		e->base = e->memory.address;
		memset(e->base, *name, REGION_BYTES);
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
	if (e->kind == KIND_ADOPT)
		kvd_adopt_release(&e->adopted);
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
	if (kvd_dlist_prep(own->client, attach, descs, rows->count, NULL, &dlist) < 0)
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
	if (kvd_peer_attach(own->client, kvd_daemon(remote->client)->endpoint, &key, 0,
			    &id) < 0)
		die(own, "peer.attach");
	return id;
}

static void xfer_wait(const struct engine *own, struct kvd_xfer *xfer)
{
	/* a poller that spins would take a core from the copies, which the limit's
	 * does not; an engine polls between other work */
	const struct timespec pause = {.tv_nsec = 10000};
	double end = now_s() + 60;
	int state;

	while ((state = kvd_xfer_state(xfer)) != KVD_SUCCESS) {
		if (state < 0 || state == KVD_FAILED || now_s() > end)
			die(own, "the transfer failed or hangs");
		nanosleep(&pause, NULL);
	}
}

/* ---- one work ---- */

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void check_rows(const struct rows *rows)
{
	for (uint64_t i = 0; i < rows->count; i++)
		if (memcmp(decode.base + rows->to[i], prefill.base + rows->from[i],
			   rows->bytes) != 0) {
			fprintf(stderr, "bench_host: row %" PRIu64 " differs\n", i);
			exit(1);
		}
}

static void shuffle(uint64_t *v, uint64_t n)
{
	static uint64_t seed = 88172645463325252;

	for (uint64_t i = n - 1; i > 0; i--) {
		uint64_t j, t;

		seed ^= seed << 13;
		seed ^= seed >> 7;
		seed ^= seed << 17;
		j = seed % (i + 1);
		t = v[i];
		v[i] = v[j];
		v[j] = t;
	}
}

static void rows_make(struct rows *rows, uint64_t bytes, uint64_t total, bool scattered)
{
	uint64_t places = REGION_BYTES / bytes;

	rows->bytes = bytes;
	rows->count = total / bytes;
	rows->from = need(calloc(places, sizeof(uint64_t)));
	rows->to = need(calloc(places, sizeof(uint64_t)));
	for (uint64_t i = 0; i < places; i++)
		rows->from[i] = rows->to[i] = i * bytes;
	if (scattered) {
		shuffle(rows->from, places);
		shuffle(rows->to, places);
	}
}

static double xfer_s(const struct engine *own, struct kvd_xfer *xfer)
{
	double begin = now_s();

	if (kvd_xfer_again(xfer, NULL) < 0)
		die(own, "xfer.again");
	xfer_wait(own, xfer);
	return now_s() - begin;
}

static void report(const char *work, bool reading, const struct rows *rows, double first,
		   double *kvd, double *limit, unsigned int rounds)
{
	double bytes = (double)(rows->bytes * rows->count);
	double k, l;

	qsort(kvd, rounds, sizeof(double), by_value);
	qsort(limit, rounds, sizeof(double), by_value);
	k = kvd[rounds / 2];
	l = limit[rounds / 2];
	printf("{\"work\":\"%s\",\"op\":\"%s\",\"transport\":\"shm\",\"size\":%" PRIu64
	       ",\"rows\":%" PRIu64 ",\"kvd_gbps\":%.3f,\"kvd_spread\":[%.3f,%.3f],"
	       "\"limit\":\"%s, %u threads\",\"limit_gbps\":%.3f,\"ratio\":%.3f,"
	       "\"first_gbps\":%.3f}\n",
	       work, reading ? "READ" : "WRITE", rows->bytes, rows->count, bytes / k / 1e9,
	       bytes / kvd[rounds * 9 / 10] / 1e9, bytes / kvd[rounds / 10] / 1e9,
	       prefill.kind == KIND_VM ? "readv, bounce, writev" : "memcpy of the rows",
	       prefill.kind == KIND_VM ? 2 * thread_count : thread_count, bytes / l / 1e9,
	       l / k, bytes / first / 1e9);
	fflush(stdout);
}

static void work_run(const char *work, const struct rows *rows, bool reading,
		     unsigned int rounds)
{
	double kvd[ROUNDS_MAX], limit[ROUNDS_MAX], first;
	const struct engine *own = reading ? &decode : &prefill;
	const struct engine *remote = reading ? &prefill : &decode;
	uint64_t id = attach(own, remote);
	struct kvd_xfer_args args = {.op = reading ? KVD_READ : KVD_WRITE};
	struct kvd_dlist *local, *far;
	struct kvd_xfer *xfer;

	local = dlist_of(own, 0, own->base, reading ? rows->to : rows->from, rows);
	far = dlist_of(own, id, remote->base, reading ? rows->from : rows->to, rows);
	args.local = local;
	args.remote = far;
	first = now_s();
	if (kvd_xfer_start(own->client, &args, NULL, &xfer) < 0)
		die(own, "xfer.start");
	xfer_wait(own, xfer);
	first = now_s() - first;
	check_rows(rows);
	for (unsigned int i = 0; i < rounds; i++) {
		for (unsigned int turn = 0; turn < 2; turn++) {
			sweep_caches();
			if ((i + turn) % 2)
				kvd[i] = xfer_s(own, xfer);
			else
				limit[i] = limit_s(rows);
		}
	}
	report(work, reading, rows, first, kvd, limit, rounds);
	if (kvd_xfer_release(xfer, NULL) < 0 || kvd_dlist_free(local, NULL) < 0 ||
	    kvd_dlist_free(far, NULL) < 0)
		die(own, "release");
}

struct work {
	const char *name, *words;
	enum kind kind;
	uint64_t row, total;
	bool scattered;
};

static const struct work works[] = {
	{"64k", "memfd, 64 KiB pages, scattered", KIND_MEMFD, 65536, 128 * MIB, true},
	{"room", "memfd, 64 KiB pages, 4 MiB, scattered", KIND_MEMFD, 65536, 4 * MIB, true},
	{"4k", "memfd, 4 KiB pages, scattered", KIND_MEMFD, 4096, 64 * MIB, true},
	{"512", "memfd, 512 B rows, scattered", KIND_MEMFD, 512, 10 * MIB, true},
	{"256", "memfd, 256 B rows, scattered", KIND_MEMFD, 256, 10 * MIB, true},
	{"64", "memfd, 64 B rows, scattered", KIND_MEMFD, 64, 4 * MIB, true},
	{"flat", "memfd, 64 KiB pages, contiguous", KIND_MEMFD, 65536, 128 * MIB, false},
	{"adopt64k", "adopted, 64 KiB pages, scattered", KIND_ADOPT, 65536, 128 * MIB, true},
	{"adopt4k", "adopted, 4 KiB pages, scattered", KIND_ADOPT, 4096, 64 * MIB, true},
	{"adopt256", "adopted, 256 B rows, scattered", KIND_ADOPT, 256, 10 * MIB, true},
	{"vm64k", "vm, 64 KiB pages, scattered", KIND_VM, 65536, 128 * MIB, true},
	{"vm4k", "vm, 4 KiB pages, scattered", KIND_VM, 4096, 64 * MIB, true},
	{"vm256", "vm, 256 B rows, scattered", KIND_VM, 256, 10 * MIB, true},
};

int main(int argc, char **argv)
{
	unsigned int rounds = argc > 5 ? (unsigned int)atoi(argv[5]) : 20;
	bool known = false;

	if (argc < 4 || rounds < 1 || rounds > ROUNDS_MAX) {
		fprintf(stderr, "usage: bench_host PREFILL_SOCKET DECODE_SOCKET THREADS "
				"[WORK|all [ROUNDS]]\n");
		return 2;
	}
	thread_count = (unsigned int)atoi(argv[3]);
	if (thread_count < 1 || thread_count > THREADS_MAX / 2)
		return 2;
	prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
	sweep_init();
	for (size_t i = 0; i < sizeof(works) / sizeof(works[0]); i++) {
		const struct work *w = &works[i];
		struct rows rows;

		if (argc > 4 && strcmp(argv[4], "all") != 0 && strcmp(argv[4], w->name) != 0)
			continue;
		known = true;
		rows_make(&rows, w->row, w->total, w->scattered);
		prefill.kind = decode.kind = w->kind;
		for (int reading = 0; reading < 2; reading++) {
			/* fresh memory for each, so that `first` means it */
			engine_open(&prefill, argv[1], "prefill");
			engine_open(&decode, argv[2], "decode");
			work_run(w->words, &rows, reading, rounds);
			engine_close(&prefill);
			engine_close(&decode);
		}
		free(rows.from);
		free(rows.to);
	}
	return known ? 0 : 2;
}
