/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Members of a cluster in an etcd: as many directories as daemons have, each
 * with its own connections and lease. How long a start of all takes, what the etcd and a
 * member use while leases are kept and loads are told as often as they may be, how old a
 * load is when it is heard, and how soon all are back when the etcd is.
 *
 *     bench_etcd [members]
 *
 * A process has WORKER_MEMBERS of them on one loop, for it may have so many descriptors
 * only; this one tells them what to do next. One line of JSON a phase.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/cluster/etcd.h"
#include "daemon/cluster/load.h"
#include "daemon/loop/loop.h"
#include "tests/lib/etcd_server.h"

#define GROUP 100u /* members of a group */
#define WORKER_MEMBERS 2500u
#define WORKERS_MAX 16u
#define LEASE_S 15u
#define STEADY_S 30u
#define AWAY_S 5u
#define LIMIT_S 600

static const char record[] =
	"{\"v\":1,\"instance\":\"0123456789abcdef0123456789abcdef\",\"name\":\"gpu0\","
	"\"endpoint\":\"tcp://10.0.0.3:18515\",\"version\":\"1\",\"state\":\"serving\","
	"\"transports\":[\"verbs\",\"tcp\"],"
	"\"size\":{\"tp\":1,\"pp\":1,\"dp\":1,\"cp\":1},"
	"\"pools\":[{\"name\":\"kv\",\"pages\":4096,\"page_tokens\":16}]}";

struct member {
	struct bench *b;
	struct directory *directory;
	struct publication publication;
	struct loop_timer timer;
	unsigned int loads;
};

/* What a worker is told to do, and does until it is told the next. */
enum phase {
	PHASE_START,
	PHASE_READ,
	PHASE_WAIT, /* leases are kept */
	PHASE_LOADS,
	PHASE_COUNT, /* loads from now on */
	PHASE_QUIET, /* no more loads */
	PHASE_UP,
};

/* What it has seen by then. */
struct seen {
	unsigned int entries;
	uint64_t told, heard, age_ns, oldest_ns; /* loads: how old when they were heard */
};

/* A worker's. */
struct bench {
	struct loop *loop;
	struct member *members;
	unsigned int first, count, done;
	struct watch watch;
	bool synced;
	struct seen seen;
};

struct worker {
	pid_t pid;
	int fd; /* phases there, struct seen back */
};

/* The process that tells them. */
struct boss {
	struct etcd_server server;
	struct worker workers[WORKERS_MAX];
	unsigned int count, worker_count;
	struct seen seen; /* of all */
};

static void die(const char *what)
{
	fprintf(stderr, "bench_etcd: %s: %s\n", what, err_last()->text);
	exit(1);
}

/* ---- measuring ---- */

static double cpu_of(pid_t pid)
{
	char path[64], text[1024], *at;
	unsigned long user, kernel;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	file = fopen(path, "r");
	if (!file || !fgets(text, sizeof(text), file))
		die(path);
	fclose(file);
	at = strrchr(text, ')');
	if (!at || sscanf(at + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu",
			  &user, &kernel) != 2)
		die(path);
	return (double)(user + kernel) / (double)sysconf(_SC_CLK_TCK);
}

static double resident_mib(pid_t pid)
{
	unsigned long pages;
	char path[64];
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
	file = fopen(path, "r");
	if (!file || fscanf(file, "%*s %lu", &pages) != 1)
		die(path);
	fclose(file);
	return (double)pages * (double)sysconf(_SC_PAGESIZE) / (1 << 20);
}

static double now_s(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

struct mark {
	double s, etcd_cpu, worker_cpu;
};

static struct mark mark(const struct boss *boss)
{
	struct mark m = {.s = now_s(), .etcd_cpu = cpu_of(boss->server.pid)};

	for (unsigned int i = 0; i < boss->worker_count; i++)
		m.worker_cpu += cpu_of(boss->workers[i].pid);
	return m;
}

static void say(const struct boss *boss, const char *phase, const struct mark *from)
{
	struct mark now = mark(boss);
	double s = now.s - from->s, worker_mib = 0;

	for (unsigned int i = 0; i < boss->worker_count; i++)
		worker_mib += resident_mib(boss->workers[i].pid);
	printf("{\"phase\":\"%s\",\"members\":%u,\"seconds\":%.2f,\"etcd_cores\":%.2f,"
	       "\"etcd_mib\":%.0f,\"member_cores\":%.6f,\"member_kib\":%.1f",
	       phase, boss->count, s, (now.etcd_cpu - from->etcd_cpu) / s,
	       resident_mib(boss->server.pid),
	       (now.worker_cpu - from->worker_cpu) / s / boss->count,
	       worker_mib * 1024 / boss->count);
}

/* ---- members ---- */

static void on_done(struct publication *publication, const struct err *err)
{
	struct member *member = container_of(publication, struct member, publication);

	if (err) {
		fprintf(stderr, "bench_etcd: refused: %s\n", err->text);
		exit(1);
	}
	member->b->done++;
}

static void member_begin(struct bench *b, unsigned int i, const struct etcd_args *args)
{
	struct member *member = &b->members[i];
	struct place place = {.rank = {0}};

	member->b = b;
	if (etcd_new(args, &member->directory) < 0)
		die("etcd_new");
	snprintf(place.group, sizeof(place.group), "group%u", (b->first + i) / GROUP);
	snprintf(place.worker, sizeof(place.worker), "w%u", b->first + i);
	member->publication.on_done = on_done;
	if (member->directory->ops->publish(member->directory, &member->publication,
					    &place, record, NULL) < 0)
		die("publish");
}

static bool all_done(const struct bench *b)
{
	return b->done == b->count;
}

static bool all_up(const struct bench *b)
{
	for (unsigned int i = 0; i < b->count; i++) {
		struct directory_state state;

		b->members[i].directory->ops->state(b->members[i].directory, &state);
		if (!state.up)
			return false;
	}
	return true;
}

/* What a load says is when it was told. */
static void on_member_timer(struct loop_timer *timer)
{
	struct member *member = container_of(timer, struct member, timer);
	struct load load = {.failed = loop_clock_ns(timer->loop),
			    .running = ++member->loads,
			    .engine = ENGINE_LOAD_NONE};
	struct text text = {0};

	load_text(&load, member->loads, &text);
	if (text.failed ||
	    member->directory->ops->update(&member->publication, NULL, text.data) < 0)
		die("update");
	text_fini(&text);
	member->b->seen.told++;
	loop_timer_start(timer, LOAD_EVERY_NS);
}

/* ---- who reads one group ---- */

static void on_entry(struct watch *watch, const struct place *place, const char *text,
		     const char *load)
{
	struct bench *b = container_of(watch, struct bench, watch);
	const char *at = load ? strstr(load, "\"failed\":") : NULL;
	uint64_t now_ns = loop_clock_ns(b->loop), age_ns;

	(void)place;
	(void)text;
	b->seen.entries++;
	if (!at)
		return;
	age_ns = now_ns - strtoull(at + strlen("\"failed\":"), NULL, 10);
	if (age_ns > now_ns)
		return;
	b->seen.heard++;
	b->seen.age_ns += age_ns;
	if (age_ns > b->seen.oldest_ns)
		b->seen.oldest_ns = age_ns;
}

static void on_synced(struct watch *watch)
{
	container_of(watch, struct bench, watch)->synced = true;
}

/* Only the first worker's first member reads. */
static bool is_synced(const struct bench *b)
{
	return b->synced || b->first > 0;
}

/* ---- a worker ---- */

static void worker_start(struct bench *b, const struct etcd_args *args)
{
	for (unsigned int i = 0; i < b->count; i++) {
		member_begin(b, i, args);
		loop_turn(b->loop, 0);
	}
}

static void worker_read(struct bench *b)
{
	if (b->first > 0)
		return;
	b->watch.on_entry = on_entry;
	b->watch.on_synced = on_synced;
	if (b->members[0].directory->ops->watch(b->members[0].directory, &b->watch,
						"group0", true) < 0)
		die("watch");
}

static void worker_loads(struct bench *b)
{
	for (unsigned int i = 0; i < b->count; i++) {
		struct member *member = &b->members[i];

		loop_timer_init(&member->timer, b->loop, on_member_timer);
		loop_timer_start(&member->timer, LOAD_EVERY_NS * i / b->count);
	}
}

static void worker_begin(struct bench *b, enum phase phase, const struct etcd_args *args)
{
	if (phase == PHASE_START)
		worker_start(b, args);
	if (phase == PHASE_READ)
		worker_read(b);
	if (phase == PHASE_LOADS)
		worker_loads(b);
	if (phase == PHASE_COUNT)
		b->seen = (struct seen){0};
	for (unsigned int i = 0; phase == PHASE_QUIET && i < b->count; i++)
		loop_timer_stop(&b->members[i].timer);
}

static bool worker_has(const struct bench *b, enum phase phase)
{
	return phase == PHASE_START  ? all_done(b)
	       : phase == PHASE_READ ? is_synced(b)
	       : phase == PHASE_UP   ? all_up(b)
				     : true;
}

/* Does not return. */
static void worker_run(struct bench *b, int fd, const struct etcd_args *args)
{
	bool asked = false;
	char phase = 0;

	for (;;) {
		ssize_t n = recv(fd, &phase, 1, MSG_DONTWAIT);

		if (n == 0)
			_exit(0);
		if (n == 1) {
			asked = true;
			worker_begin(b, (enum phase)phase, args);
		}
		loop_turn(b->loop, 10 * LOOP_NS_PER_MS);
		if (!asked || !worker_has(b, (enum phase)phase))
			continue;
		asked = false;
		if (send(fd, &b->seen, sizeof(b->seen), 0) != (ssize_t)sizeof(b->seen))
			_exit(1);
	}
}

static void worker_main(unsigned int first, unsigned int count, int fd,
			const struct cluster_url *url)
{
	static struct bench bench;
	struct bench *b = &bench;
	struct etcd_args args = {.url = url, .lease_s = LEASE_S};

	b->first = first;
	b->count = count;
	b->members = calloc(count, sizeof(*b->members));
	if (!b->members || loop_new(&b->loop) < 0)
		die("worker");
	args.loop = b->loop;
	worker_run(b, fd, &args);
}

/* ---- who tells them ---- */

static void boss_hire(struct boss *boss, const struct cluster_url *url)
{
	for (unsigned int first = 0; first < boss->count; first += WORKER_MEMBERS) {
		struct worker *worker = &boss->workers[boss->worker_count++];
		unsigned int left = boss->count - first;
		int fd[2];

		if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fd) != 0)
			die("socketpair");
		worker->pid = fork();
		if (worker->pid < 0)
			die("fork");
		if (worker->pid == 0) {
			for (unsigned int i = 0; i + 1 < boss->worker_count; i++)
				close(boss->workers[i].fd);
			close(fd[0]);
			worker_main(first, left < WORKER_MEMBERS ? left : WORKER_MEMBERS,
				    fd[1], url);
		}
		close(fd[1]);
		worker->fd = fd[0];
	}
}

/* All begin it; returns when all have it. */
static void boss_phase(struct boss *boss, enum phase phase)
{
	struct timeval limit = {.tv_sec = LIMIT_S};
	char byte = (char)phase;
	struct seen seen;

	boss->seen = (struct seen){0};
	for (unsigned int i = 0; i < boss->worker_count; i++) {
		setsockopt(boss->workers[i].fd, SOL_SOCKET, SO_RCVTIMEO, &limit,
			   sizeof(limit));
		if (send(boss->workers[i].fd, &byte, 1, MSG_NOSIGNAL) != 1)
			die("a worker has ended");
	}
	for (unsigned int i = 0; i < boss->worker_count; i++) {
		if (recv(boss->workers[i].fd, &seen, sizeof(seen), 0) !=
		    (ssize_t)sizeof(seen))
			die("a worker has ended, or is not done in time");
		boss->seen.entries += seen.entries;
		boss->seen.told += seen.told;
		boss->seen.heard += seen.heard;
		boss->seen.age_ns += seen.age_ns;
		if (seen.oldest_ns > boss->seen.oldest_ns)
			boss->seen.oldest_ns = seen.oldest_ns;
	}
}

/* What is measured goes on for so long, or until a worker ends. */
static void boss_wait(const struct boss *boss, unsigned int seconds)
{
	struct pollfd fds[WORKERS_MAX];

	for (unsigned int i = 0; i < boss->worker_count; i++)
		fds[i] = (struct pollfd){.fd = boss->workers[i].fd, .events = POLLIN};
	if (poll(fds, boss->worker_count, (int)seconds * 1000) != 0)
		die("a worker has ended");
}

/* ---- phases ---- */

static void bench_start(struct boss *boss)
{
	struct mark from = mark(boss);

	boss_phase(boss, PHASE_START);
	say(boss, "start", &from);
	printf("}\n");
	from = mark(boss);
	boss_phase(boss, PHASE_READ);
	say(boss, "a group read", &from);
	printf(",\"entries\":%u}\n", boss->seen.entries);
}

static void bench_leases(struct boss *boss)
{
	struct mark from = mark(boss);

	boss_wait(boss, STEADY_S);
	say(boss, "leases", &from);
	printf("}\n");
}

static void bench_loads(struct boss *boss)
{
	struct mark from;
	double s;

	boss_phase(boss, PHASE_LOADS);
	boss_wait(boss, LOAD_EVERY_NS / LOOP_NS_PER_S);
	boss_phase(boss, PHASE_COUNT);
	from = mark(boss);
	boss_wait(boss, STEADY_S);
	boss_phase(boss, PHASE_QUIET);
	s = now_s() - from.s;
	say(boss, "leases and loads", &from);
	printf(",\"loads_s\":%.0f,\"heard\":%" PRIu64
	       ",\"age_ms\":%.1f,\"oldest_ms\":%.1f}\n",
	       (double)boss->seen.told / s, boss->seen.heard,
	       boss->seen.heard
		       ? (double)boss->seen.age_ns / 1e6 / (double)boss->seen.heard
		       : 0,
	       (double)boss->seen.oldest_ns / 1e6);
}

static void bench_restart(struct boss *boss)
{
	struct mark from;

	etcd_server_stop(&boss->server, SIGTERM);
	boss_wait(boss, AWAY_S);
	etcd_server_start(&boss->server);
	from = mark(boss);
	boss_phase(boss, PHASE_UP);
	say(boss, "etcd back", &from);
	printf("}\n");
}

static void server_start(struct boss *boss, struct cluster_url *url)
{
	char text[64];

	etcd_server_init(&boss->server);
	boss->server.quota = UINT64_C(4) << 30;
	etcd_server_start(&boss->server);
	snprintf(text, sizeof(text), "etcd://127.0.0.1:%s/bench", boss->server.port);
	if (cluster_url_parse(text, url) < 0)
		die(text);
}

int main(int argc, char **argv)
{
	static struct boss boss;
	struct rlimit files;
	struct cluster_url url;

	boss.count = argc > 1 ? (unsigned int)strtoul(argv[1], NULL, 10) : 10000;
	if (boss.count == 0 || boss.count > WORKERS_MAX * WORKER_MEMBERS) {
		fprintf(stderr, "bench_etcd: 1 to %u members\n",
			WORKERS_MAX * WORKER_MEMBERS);
		return 2;
	}
	if (access("/usr/bin/etcd", X_OK) != 0 &&
	    system("command -v etcd >/dev/null") != 0) {
		printf("bench_etcd: etcd-server is missing\n");
		return 77;
	}
	if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
		files.rlim_cur = files.rlim_max;
		setrlimit(RLIMIT_NOFILE, &files);
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	log_set_level(LOG_LEVEL_ERROR);
	server_start(&boss, &url);
	boss_hire(&boss, &url);
	bench_start(&boss);
	bench_leases(&boss);
	bench_loads(&boss);
	bench_restart(&boss);
	for (unsigned int i = 0; i < boss.worker_count; i++)
		close(boss.workers[i].fd); /* which ends it */
	etcd_server_free(&boss.server);
	return 0;
}
