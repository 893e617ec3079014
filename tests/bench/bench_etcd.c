/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Members of a cluster in one etcd: as many directories as daemons have, each with its
 * own connection and lease, on one loop, beside a real etcd. How long a start of all
 * takes, what etcd and a member use while leases are kept and loads are told as often as
 * they may be, how old a load is when it is heard, and how soon all are back when etcd
 * is.
 *
 *     bench_etcd [members]
 *
 * One line of JSON a phase.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/cluster/etcd.h"
#include "daemon/cluster/load.h"
#include "daemon/loop/loop.h"
#include "tests/lib/etcd_server.h"

#define GROUP 100u /* workers of a group */
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

struct bench {
	struct loop *loop;
	struct etcd_server server;
	struct member *members;
	unsigned int count, done;
	struct watch watch;
	bool synced;
	unsigned int entries;
	uint64_t heard, age_ns, oldest_ns; /* loads: how old when they were heard */
	uint64_t told;
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

struct mark {
	uint64_t ns;
	double etcd_cpu, own_cpu;
};

static struct mark mark(const struct bench *b)
{
	return (struct mark){.ns = loop_clock_ns(b->loop),
			     .etcd_cpu = cpu_of(b->server.pid),
			     .own_cpu = cpu_of(getpid())};
}

static double since_s(const struct bench *b, const struct mark *from)
{
	return (double)(loop_clock_ns(b->loop) - from->ns) / 1e9;
}

static void say(const struct bench *b, const char *phase, const struct mark *from)
{
	struct mark now = mark(b);
	double s = since_s(b, from);

	printf("{\"phase\":\"%s\",\"members\":%u,\"seconds\":%.2f,\"etcd_cores\":%.2f,"
	       "\"etcd_mib\":%.0f,\"member_cores\":%.6f,\"member_kib\":%.1f",
	       phase, b->count, s, (now.etcd_cpu - from->etcd_cpu) / s,
	       resident_mib(b->server.pid), (now.own_cpu - from->own_cpu) / s / b->count,
	       resident_mib(getpid()) * 1024 / b->count);
}

static void run_until(struct bench *b, bool (*holds)(const struct bench *b),
		      const char *what)
{
	struct mark from = mark(b);

	while (!holds(b)) {
		if (since_s(b, &from) > LIMIT_S)
			die(what);
		loop_turn(b->loop, LOOP_NS_PER_S / 10);
	}
}

static void run_for(struct bench *b, unsigned int seconds)
{
	struct mark from = mark(b);

	while (since_s(b, &from) < seconds)
		loop_turn(b->loop, LOOP_NS_PER_S / 10);
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
	snprintf(place.group, sizeof(place.group), "group%u", i / GROUP);
	snprintf(place.worker, sizeof(place.worker), "w%u", i);
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
	member->b->told++;
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
	b->entries++;
	if (!at)
		return;
	age_ns = now_ns - strtoull(at + strlen("\"failed\":"), NULL, 10);
	if (age_ns > now_ns)
		return;
	b->heard++;
	b->age_ns += age_ns;
	if (age_ns > b->oldest_ns)
		b->oldest_ns = age_ns;
}

static void on_synced(struct watch *watch)
{
	container_of(watch, struct bench, watch)->synced = true;
}

static bool is_synced(const struct bench *b)
{
	return b->synced;
}

/* ---- phases ---- */

static void bench_start(struct bench *b, const struct etcd_args *args)
{
	struct mark from = mark(b);

	for (unsigned int i = 0; i < b->count; i++) {
		member_begin(b, i, args);
		loop_turn(b->loop, 0);
	}
	run_until(b, all_done, "not all are in the directory");
	say(b, "start", &from);
	printf("}\n");
}

static void bench_read(struct bench *b)
{
	struct mark from = mark(b);

	b->watch.on_entry = on_entry;
	b->watch.on_synced = on_synced;
	if (b->members[0].directory->ops->watch(b->members[0].directory, &b->watch,
						"group0", true) < 0)
		die("watch");
	run_until(b, is_synced, "a group is not read");
	say(b, "a group read", &from);
	printf(",\"entries\":%u}\n", b->entries);
}

static void bench_leases(struct bench *b)
{
	struct mark from = mark(b);

	run_for(b, STEADY_S);
	say(b, "leases", &from);
	printf("}\n");
}

static void bench_loads(struct bench *b)
{
	struct mark from;

	for (unsigned int i = 0; i < b->count; i++) {
		struct member *member = &b->members[i];

		loop_timer_init(&member->timer, b->loop, on_member_timer);
		loop_timer_start(&member->timer, LOAD_EVERY_NS * i / b->count);
	}
	run_for(b, LOAD_EVERY_NS / LOOP_NS_PER_S);
	b->heard = b->age_ns = b->oldest_ns = b->told = 0;
	from = mark(b);
	run_for(b, STEADY_S);
	say(b, "leases and loads", &from);
	printf(",\"loads_s\":%.0f,\"heard\":%" PRIu64
	       ",\"age_ms\":%.1f,\"oldest_ms\":%.1f}\n",
	       (double)b->told / since_s(b, &from), b->heard,
	       b->heard ? (double)b->age_ns / 1e6 / (double)b->heard : 0,
	       (double)b->oldest_ns / 1e6);
	for (unsigned int i = 0; i < b->count; i++)
		loop_timer_stop(&b->members[i].timer);
}

static void bench_restart(struct bench *b)
{
	struct mark from;

	etcd_server_stop(&b->server, SIGTERM);
	from.ns = loop_clock_ns(b->loop);
	while (since_s(b, &from) < AWAY_S)
		loop_turn(b->loop, LOOP_NS_PER_S / 10);
	etcd_server_start(&b->server);
	from = mark(b);
	run_until(b, all_up, "not all come back");
	say(b, "etcd back", &from);
	printf("}\n");
}

int main(int argc, char **argv)
{
	static struct bench bench;
	struct bench *b = &bench;
	struct rlimit files;
	struct cluster_url url;
	struct etcd_args args = {.url = &url, .lease_s = LEASE_S};
	char text[256];

	b->count = argc > 1 ? (unsigned int)strtoul(argv[1], NULL, 10) : 10000;
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
	if (loop_new(&b->loop) < 0)
		die("loop");
	etcd_server_init(&b->server);
	b->server.quota = UINT64_C(4) << 30;
	etcd_server_start(&b->server);
	snprintf(text, sizeof(text), "etcd://127.0.0.1:%s/bench", b->server.port);
	args.loop = b->loop;
	b->members = calloc(b->count, sizeof(*b->members));
	if (!b->members || cluster_url_parse(text, &url) < 0)
		die(text);
	bench_start(b, &args);
	bench_read(b);
	bench_leases(b);
	bench_loads(b);
	bench_restart(b);
	etcd_server_free(&b->server);
	return 0; /* the rest ends with the process */
}
