/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulation's driver. Scripts run in a child process, many one after the
 * other; the child's death is the failure of the seed that it had just begun.
 * That script is then made short in children of its own, and printed; the seed
 * replays it exactly:
 *
 *   sim [--seconds N] [--rooms N] [--seed S [--scripts N]] [--first 1]
 *
 * By itself it plays the same scripts every time, SCRIPTS of them from seed 1, in `make
 * test` a third of them; `make sim` draws the first seed from the clock. --first 1 stops
 * at the first failure and makes nothing short.
 */
#include <errno.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "tests/lib/sweep.h"
#include "tests/sim/sim.h"

#define BATCH 200u
#ifdef __SANITIZE_THREAD__ /* it has one thread */
#define SCRIPTS 100u
#else
#define SCRIPTS 3000u
#endif
#define SHRINK_TRIES 1500u
#define SCRIPT_S 60u /* of real time: longer is a hang */

struct sim_totals *sim_totals;

static struct {
	double seconds;
	uint64_t rooms, seed, scripts;
	bool first;
} options;

/* Every eighth script has liars in it. */
static bool has_liars(uint64_t seed)
{
	return seed % 8 == 7;
}

/* ---- children ---- */

static void run_one(const struct sim_script *script)
{
	sim_totals->seed = script->seed;
	sim_totals->broken[0] = '\0';
	alarm(SCRIPT_S);
	sim_play(script);
	sim_totals->scripts++;
	sim_totals->events += script->count;
}

static int wait_for(pid_t pid)
{
	int status;

	while (waitpid(pid, &status, 0) < 0) {
		if (errno != EINTR)
			return -1;
	}
	return status;
}

/* Seeds [first, first + n); the wait status of the child. */
static int run_batch(uint64_t first, uint64_t n)
{
	static struct sim_script script;
	pid_t pid = fork();

	if (pid == 0) {
		for (uint64_t i = 0; i < n; i++) {
			sim_script_write(&script, first + i, has_liars(first + i));
			run_one(&script);
		}
		_exit(0);
	}
	return pid < 0 ? -1 : wait_for(pid);
}

static bool quiet = true;
static char first_broken[sizeof(((struct sim_totals *)0)->broken)];

/* Does it fail, and in the same way? What a promise is called stands before ':'. */
static bool fails(const struct sim_script *script)
{
	size_t word = strcspn(first_broken, ":");
	pid_t pid;

	fflush(NULL);
	pid = fork();
	if (pid == 0) {
		if (quiet && (!freopen("/dev/null", "w", stderr) ||
			      !freopen("/dev/null", "w", stdout)))
			_exit(0);
		run_one(script);
		_exit(0);
	}
	return pid > 0 && wait_for(pid) != 0 &&
	       strncmp(first_broken, sim_totals->broken, word + 1) == 0;
}

static void report_failure(uint64_t seed, int status)
{
	static struct sim_script script;
	struct sim_totals kept = *sim_totals; /* shrinking counts for nothing */

	if (WIFSIGNALED(status))
		printf("FAILED: seed %llu ends with signal %d (%s)\n",
		       (unsigned long long)seed, WTERMSIG(status),
		       strsignal(WTERMSIG(status)));
	else
		printf("FAILED: seed %llu: %s\n", (unsigned long long)seed,
		       sim_totals->broken[0] ? sim_totals->broken : "see above");
	if (options.first)
		return;
	quiet = true;
	memcpy(first_broken, sim_totals->broken, sizeof(first_broken));
	sim_script_write(&script, seed, has_liars(seed));
	sim_shrink(&script, fails, SHRINK_TRIES);
	printf("the shortest script found that fails so:\n");
	sim_script_print(&script);
	quiet = !getenv("SIM_SHOW");
	if (fails(&script) && sim_totals->broken[0])
		printf("  it ends with: %s\n", sim_totals->broken);
	printf("again: sim --seed %llu --scripts 1\n", (unsigned long long)seed);
	*sim_totals = kept;
}

/* ---- options and the end ---- */

static void parse(int argc, char **argv)
{
	options.seconds = 1e9;
	options.seed = 1;
	if (argc < 2)
		options.scripts = sweep_part(&options.seed, SCRIPTS, 6);
	for (int i = 1; i < argc; i += 2) {
		const char *value = i + 1 < argc ? argv[i + 1] : NULL;

		if (value && strcmp(argv[i], "--seconds") == 0) {
			options.seconds = strtod(value, NULL);
		} else if (value && strcmp(argv[i], "--rooms") == 0) {
			options.rooms = strtoull(value, NULL, 10);
		} else if (value && strcmp(argv[i], "--seed") == 0) {
			options.seed = strtoull(value, NULL, 10);
		} else if (value && strcmp(argv[i], "--first") == 0) {
			options.first = true;
		} else if (value && strcmp(argv[i], "--scripts") == 0) {
			options.scripts = strtoull(value, NULL, 10);
		} else {
			fprintf(stderr, "usage: sim [--seconds N] [--rooms N] [--seed S] "
					"[--scripts N] [--first 1]\n");
			exit(2);
		}
	}
}

static void print_totals(double seconds)
{
	const struct sim_totals *t = sim_totals;

	printf("%llu scripts, %llu events, %llu rooms (%llu met trouble, %llu in calm), "
	       "%llu "
	       "ends with success, %llu with failure; %llu posts of rows, %llu with "
	       "success; %.0f s of virtual time, %.0f rooms/s\n",
	       (unsigned long long)t->scripts, (unsigned long long)t->events,
	       (unsigned long long)t->rooms, (unsigned long long)t->troubled_rooms,
	       (unsigned long long)t->calm_rooms, (unsigned long long)t->sides_succeeded,
	       (unsigned long long)t->sides_failed, (unsigned long long)t->posts,
	       (unsigned long long)t->posts_succeeded, (double)t->virtual_ms / 1000,
	       (double)t->rooms / seconds);
	sim_pairs_print();
}

static bool enough(double began)
{
	if (options.scripts && sim_totals->scripts >= options.scripts)
		return true;
	if (options.rooms && sim_totals->troubled_rooms >= options.rooms)
		return true;
	return clock_s() - began >= options.seconds;
}

int main(int argc, char **argv)
{
	uint64_t seed, failed = 0;
	double began = clock_s();

	parse(argc, argv);
	/* a script's clusters are made in the memory of the last one's */
	mallopt(M_MMAP_THRESHOLD, 32 << 20);
	mallopt(M_TRIM_THRESHOLD, 1 << 30);
	mallopt(M_TOP_PAD, 64 << 20);
	sim_totals = mmap(NULL, sizeof(*sim_totals), PROT_READ | PROT_WRITE,
			  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (sim_totals == MAP_FAILED)
		return 2;
	printf("seed %llu\n", (unsigned long long)options.seed);
	for (seed = options.seed; !enough(began) && failed < 5;) {
		uint64_t n = options.scripts && options.scripts < BATCH ? options.scripts
									: BATCH / 10;
		int status;

		fflush(NULL);
		status = run_batch(seed, n);
		if (status == 0) {
			seed += n;
			continue;
		}
		failed++;
		seed = sim_totals->seed;
		report_failure(seed++, status);
		if (options.scripts == 1 || options.first)
			break;
	}
	print_totals(clock_s() - began);
	printf("%llu passed, %llu failed\n", (unsigned long long)sim_totals->scripts,
	       (unsigned long long)failed);
	return failed != 0;
}
