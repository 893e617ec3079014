/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The runner. Without arguments it runs every backend, each in a process of
 * its own so that a crash of one is a failure and not the end, and then the
 * planted bugs: a suite that passes over a broken promise is itself broken.
 *
 *   conform                      all; TEST_SHARD=K/N: one of N shares of them
 *   conform --backend shm        one
 *   conform --backend fake --case abort   cases whose name contains it
 *   conform --backend verbs --part 2/4    the second quarter of the cases
 *   conform --backend fake --bug done-twice --seed 7
 *   conform --backend shm --boot-ids 50   as if the kernel had booted as often
 *   conform --list
 *   conform --keeper tcp 127.0.0.1:7500   for ends on this machine, and on another:
 *   KVD_CONFORM_FAR=127.0.0.1:7500 conform --backend tcp
 *
 * Lines are TAP's; the last one is "N passed, N failed, N skipped".
 */
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "tests/sim/fake.h"
#include "tests/conform/conform.h"
#include "tests/conform/keeper.h"
#include "tests/lib/sweep.h"

#define SEED_DEFAULT 20261120u
#define CASE_SECONDS 240u /* a hang is a failure; a slow machine is none */

struct score {
	unsigned int passed, failed, skipped;
};

struct options {
	const char *backend, *filter;
	unsigned int seconds;	  /* a backend may take; 0: each case CASE_SECONDS */
	unsigned int part, parts; /* of the cases, from 1; 0: all */
	unsigned int boot_ids;	  /* not 0: BY_ADDRESS cases, with so many of them */
	uint64_t seed;
	enum fake_bug bug;
	bool quiet; /* only the score */
};

uint64_t wait_ns = 20 * LOOP_NS_PER_S;
static struct options options = {.seed = SEED_DEFAULT};
static struct score score;
static jmp_buf leave;
static char verdict[512];
static enum { RUNNING, FAILED, SKIPPED } state;

static const struct conform_case *const groups[] = {
	cases_data, cases_order,   cases_memory, cases_abort,
	cases_loss, cases_hostile, cases_alloc,	 cases_fake,
};

void case_fail(const char *file, int line, const char *fmt, ...)
{
	char words[400];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(words, sizeof(words), fmt, ap);
	va_end(ap);
	snprintf(verdict, sizeof(verdict), "%s:%d: %s", file, line, words);
	state = FAILED;
	longjmp(leave, 1);
}

void case_skip(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(verdict, sizeof(verdict), fmt, ap);
	va_end(ap);
	state = SKIPPED;
	longjmp(leave, 1);
}

static int score_say(void)
{
	printf("%u passed, %u failed, %u skipped\n", score.passed, score.failed,
	       score.skipped);
	fflush(stdout);
	return score.failed ? 1 : 0;
}

static void report(const char *where, const char *name, double ms)
{
	const unsigned int number = score.passed + score.failed + score.skipped + 1;

	if (options.boot_ids && state != FAILED)
		return; /* all of them are one line */
	if (state == FAILED)
		score.failed++;
	else if (state == SKIPPED)
		score.skipped++;
	else
		score.passed++;
	if (!options.quiet && state == FAILED)
		printf("not ok %u %s %s (%.0f ms)\n# %s\n", number, where, name, ms,
		       verdict);
	else if (!options.quiet && state == SKIPPED)
		printf("ok %u %s %s # SKIP needs %s\n", number, where, name, verdict);
	else if (!options.quiet)
		printf("ok %u %s %s (%.0f ms)\n", number, where, name, ms);
	fflush(stdout);
	if (state == FAILED && options.bug) { /* found: that was the question */
		score_say();
		_exit(1);
	}
}

/* ---- one case ---- */

/* Its time begins anew, unless the backend's is counted. */
static void watch_begin(void)
{
	if (!options.seconds)
		alarm(CASE_SECONDS);
}

static const char *missing(const struct world *world, const struct conform_case *c)
{
	if (c->needs & (NEED_TWO | NEED_THREE | NEED_PROCESS) && world->self)
		return "two daemons";
	if (c->needs & NEED_PROCESS && world->backend->is_virtual)
		return "a process of its own";
	if (c->needs & NEED_RAW && !world->backend->raw_connect)
		return world->backend->raw_missing;
	return NULL;
}

static void audit(struct world *world)
{
	for (unsigned int i = 0; i < ENDS_MAX; i++) {
		struct end *end = world->end[i];
		const struct cmd cmd = {.type = CMD_AUDIT};
		const void *blob;
		struct reply reply;
		int fd;

		if (!end || !end->alive)
			continue;
		reply = end_call_full(end, &cmd, NULL, -1, &blob, &fd);
		CHECK(reply.v[0] == 0, "%c: %llu broken promises: %s", 'A' + (char)i,
		      (unsigned long long)reply.v[0], (const char *)blob);
	}
}

/* What every case must leave behind. */
static void epilogue(struct world *world)
{
	struct area *area;
	struct deal *deal;

	world_settle(world);
	audit(world);
	list_foreach(area, &world->areas, link)
		area_verify(area);
	list_foreach_safe(deal, &world->deals, link)
		deal_free(deal);
	list_foreach_safe(area, &world->areas, link)
		area_free(area);
	for (unsigned int i = 0; i < ENDS_MAX; i++) {
		if (world->end[i] && world->end[i]->alive)
			end_policy(world->end[i], POLICY_LAND);
	}
	/* a real clock is not waited for here, but who is due is looked at, and freed */
	CHECK(stills_check(world, world->hub != NULL) == 0,
	      "torn memory moved within 1 s");
}

static void run_guarded(struct world *world, void (*run)(struct world *world))
{
	state = RUNNING;
	if (setjmp(leave) == 0)
		run(world);
}

/* A skipped or failed case may leave things about: clean up, quietly. */
static void case_run(struct world *world, const struct conform_case *c)
{
	char words[sizeof(verdict)];

	run_guarded(world, c->run);
	if (state == RUNNING) {
		run_guarded(world, epilogue);
	} else if (state == SKIPPED) {
		memcpy(words, verdict, sizeof(words));
		run_guarded(world, epilogue);
		if (state != FAILED) {
			memcpy(verdict, words, sizeof(words));
			state = SKIPPED;
		}
	}
	if (state == FAILED) {
		world->spent = true;
		world->failed = true;
	}
}

/* ---- one world after the other ---- */

struct run {
	const struct backend *backend;
	bool self;
	struct world *world;
	unsigned int number; /* cases so far, this part's and others' */
	char where[64];
};

static bool world_ensure(struct run *run)
{
	if (run->world)
		return true;
	state = RUNNING;
	if (setjmp(leave) == 0) {
		int r = world_new(run->backend, run->self, options.seed, &run->world);

		if (r < 0)
			FAIL("the world does not start: %s", err_last()->text);
	}
	if (state == RUNNING && run->world->hub)
		fake_plant(run->world->hub, options.bug);
	return state == RUNNING;
}

static void stills_end(struct world *world)
{
	unsigned int moved = stills_check(world, true);

	CHECK(moved == 0, "%u torn areas moved within 1 s of their done", moved);
}

static void world_close(struct world *world)
{
	CHECK(world_free(world), "an end did not end cleanly");
}

/* The world's own case: what was torn stayed still, and it ends cleanly. A world
 * whose case failed is only taken down; what it says then is not news. */
static void world_end(struct run *run)
{
	struct world *world = run->world;
	double begin = clock_us() / 1e3;

	run->world = NULL;
	if (!world)
		return;
	watch_begin();
	if (world->failed) {
		world_abandon(world);
		return;
	}
	run_guarded(world, stills_end);
	if (state == FAILED)
		world_abandon(world);
	else
		run_guarded(world, world_close);
	report(run->where, "still and clean at the end", clock_us() / 1e3 - begin);
}

static unsigned int cases_of(const struct backend *backend)
{
	unsigned int n = 0;

	for (size_t i = 0; i < ARRAY_LEN(groups); i++)
		for (const struct conform_case *c = groups[i]; c->name; c++)
			n += backend->is_virtual || !(c->needs & NEED_FAKE);
	return n;
}

/* Is it another part's? */
static bool elsewhere(struct run *run)
{
	unsigned int number = run->number++, all = cases_of(run->backend);

	return options.parts && number * options.parts / all + 1 != options.part;
}

static void group_run(struct run *run, const struct conform_case *group)
{
	for (const struct conform_case *c = group; c->name; c++) {
		double begin = clock_us() / 1e3;
		const char *need;

		if (options.filter && !strstr(c->name, options.filter))
			continue;
		if (c->needs & HEAVY && options.bug)
			continue;
		if (options.boot_ids && !(c->needs & BY_ADDRESS))
			continue;
		if (c->needs & NEED_FAKE && !run->backend->is_virtual)
			continue; /* scripted faults: not a property of a real one */
		if (elsewhere(run))
			continue;
		watch_begin();
		if (!world_ensure(run)) {
			report(run->where, c->name, clock_us() / 1e3 - begin);
			run->world = NULL;
			continue;
		}
		need = missing(run->world, c);
		if (need) {
			snprintf(verdict, sizeof(verdict), "%s", need);
			state = SKIPPED;
		} else {
			case_run(run->world, c);
		}
		report(run->where, c->name, clock_us() / 1e3 - begin);
		if (run->world->spent)
			world_end(run);
	}
}

static void backend_run_world(const struct backend *backend, bool self)
{
	struct run run = {.backend = backend, .self = self};

	snprintf(run.where, sizeof(run.where), "%s%s", backend->name,
		 self ? " (self)" : "");
	for (size_t i = 0; i < ARRAY_LEN(groups); i++)
		group_run(&run, groups[i]);
	world_end(&run);
}

/* An address holds the boot id as it is: no byte of it may be a reason to fail. */
static void backend_run_boots(const struct backend *backend)
{
	const unsigned int count = options.boot_ids;
	double begin = clock_us() / 1e3;
	unsigned int played = 0;
	char what[48];

	for (unsigned int i = 0; i < count; i++) {
		if (sweep_leaves_out(i, 8))
			continue;
		played++;
		backend_boot_id(i);
		backend_run_world(backend, false);
		if (score.failed) {
			printf("# with boot id %s\n", getenv("KVD_CONFORM_BOOT_ID"));
			return;
		}
	}
	options.boot_ids = 0;
	snprintf(what, sizeof(what), "found by its address with %u boot ids", played);
	state = RUNNING;
	report(backend->name, what, clock_us() / 1e3 - begin);
}

static void backend_run(const struct backend *backend, size_t number)
{
	const struct transport_ops *ops = backend_ops(backend);
	struct xp_env env = {0};
	uint32_t caps = 0;
	int r;

	if (strcmp(backend->name, "shm-ring") == 0)
		setenv("KVD_CONFORM_RING", "1", 1);
	else
		unsetenv("KVD_CONFORM_RING");
	if (backend->gpu)
		setenv("KVD_CONFORM_GPU", "1", 1);
	else
		unsetenv("KVD_CONFORM_GPU");
	if (backend->crypto)
		setenv("KVD_CONFORM_CRYPTO", backend->crypto, 1);
	else
		unsetenv("KVD_CONFORM_CRYPTO");
	r = backend_env_new(backend->transport, backend->is_virtual, &env);

	if (r == 0)
		r = ops->probe(env.config, &caps);
	if (r < 0) {
		state = SKIPPED;
		snprintf(verdict, sizeof(verdict), "the backend here: %s",
			 err_last()->text);
		report(backend->name, "all", 0);
		return;
	}
	backend_env_free(&env);
	if (options.boot_ids) {
		if (caps & XP_CAP_SAME_HOST)
			backend_run_boots(backend);
		return;
	}
	backend_run_world(backend, false);
	/* the same cases: of two backends in a row one, chosen by the commit */
	if ((caps & XP_CAP_SELF) && !sweep_leaves_out(number, 2))
		backend_run_world(backend, true);
}

/* A crash that comes once in a thousand runs must tell where it was. */
static void on_fatal(int signum)
{
	void *frames[48];
	int n = backtrace(frames, ARRAY_LEN(frames));

	backtrace_symbols_fd(frames, n, STDERR_FILENO);
	signal(signum, SIG_DFL);
	raise(signum);
}

static void fatal_install(void)
{
	static const int signums[] = {SIGSEGV, SIGABRT, SIGILL, SIGFPE, SIGALRM};
	struct sigaction sa = {.sa_handler = on_fatal, .sa_flags = SA_NODEFER}, was;
	void *frame;

	sigaction(SIGSEGV, NULL, &was);
	if (was.sa_handler != SIG_DFL)
		return;	      /* a sanitizer's own tells more */
	backtrace(&frame, 1); /* loads what it needs now, not in a broken heap */
	for (size_t i = 0; i < ARRAY_LEN(signums); i++)
		sigaction(signums[i], &sa, NULL);
}

static int run_one(const char *name)
{
	const struct backend *backend;

	for (size_t i = 0; (backend = backend_at(i)); i++) {
		if (strcmp(backend->name, name))
			continue;
		signal(SIGPIPE, SIG_IGN);
		if (memory_guard_install() < 0)
			return 2;
		fatal_install();
		alarm(options.seconds);
		watch_begin();
		backend_run(backend, i);
		return score_say();
	}
	fprintf(stderr, "conform: no backend '%s'\n", name);
	return 2;
}

/* ---- all, each in a process of its own ---- */

static void say_end(const char *name, const char *last, int status)
{
	printf("not ok %s: the run crashed or hung\n", name);
	if (WIFSIGNALED(status))
		printf("# died of signal %d (%s)", WTERMSIG(status),
		       strsignal(WTERMSIG(status)));
	else
		printf("# ended with status %d", WEXITSTATUS(status));
	printf(" after: %s%s", last, strchr(last, '\n') ? "" : "\n");
}

/* Runs this binary with the arguments; its score from its last line. What it says is
 * shown under a name, if any. */
static bool child_run(char *const argv[], const char *show, struct score *score_p)
{
	char line[1024] = "";
	bool scored = false;
	int pipes[2], status;
	FILE *out;
	pid_t pid;

	if (pipe2(pipes, O_CLOEXEC) < 0)
		return false;
	fflush(stdout);
	pid = fork();
	if (pid == 0) {
		unsetenv("TEST_SHARD"); /* the parent has chosen */
		dup2(pipes[1], STDOUT_FILENO);
		if (!show)
			dup2(open("/dev/null", O_WRONLY | O_CLOEXEC), STDERR_FILENO);
		execv("/proc/self/exe", argv);
		_exit(127);
	}
	close(pipes[1]);
	out = fdopen(pipes[0], "r");
	while (out && fgets(line, sizeof(line), out)) {
		scored =
			sscanf(line, "%u passed, %u failed, %u skipped", &score_p->passed,
			       &score_p->failed, &score_p->skipped) == 3;
		if (show && !scored)
			fputs(line, stdout);
	}
	if (out)
		fclose(out);
	waitpid(pid, &status, 0);
	if (scored && WIFEXITED(status) &&
	    WEXITSTATUS(status) == (score_p->failed ? 1 : 0))
		return true;
	if (show)
		say_end(show, line, status);
	return false;
}

/* Is the next of run_all()'s processes another shard's? */
static bool other_shard(void)
{
	static unsigned int number;

	return options.parts && number++ % options.parts + 1 != options.part;
}

static void score_add(const struct score *got, bool ended)
{
	score.passed += got->passed;
	score.failed += got->failed + !ended;
	score.skipped += got->skipped;
}

static void backend_child(const char *name, const char *what, const char *value)
{
	char *argv[] = {(char *)"conform",	  (char *)"--backend",
			(char *)(uintptr_t)name,  (char *)(uintptr_t)what,
			(char *)(uintptr_t)value, NULL};
	struct score got = {0};

	if (!other_shard())
		score_add(&got, child_run(argv, name, &got));
}

/* A bug that the suite does not notice is a failure of the suite; a crash
 * counts as noticed. */
static void bug_child(const char *backend, enum fake_bug bug)
{
	const char *name = fake_bug_name(bug);
	char *argv[] = {(char *)"conform",
			(char *)"--backend",
			(char *)(uintptr_t)backend,
			(char *)"--bug",
			(char *)(uintptr_t)name,
			(char *)"--quiet",
			NULL};
	struct score got = {0};
	char what[96];
	bool ended;

	if (other_shard())
		return;
	ended = child_run(argv, NULL, &got);
	snprintf(what, sizeof(what), "planted bug %s is found", name);
	state = ended && got.failed == 0 ? FAILED : RUNNING;
	snprintf(verdict, sizeof(verdict), "no case failed");
	report(backend, what, 0);
}

/* A keeper on this machine, and where it listens; its pid, 0 when it does not. */
static pid_t keeper_start(char where[32])
{
	int pipes[2];
	FILE *out;
	pid_t pid;
	bool said;

	if (pipe2(pipes, O_CLOEXEC) < 0)
		return 0;
	pid = fork();
	if (pid == 0) {
		dup2(pipes[1], STDOUT_FILENO);
		execl("/proc/self/exe", "conform", "--keeper", "tcp", "127.0.0.1:0",
		      NULL);
		_exit(127);
	}
	close(pipes[1]);
	out = fdopen(pipes[0], "r");
	said = out && fscanf(out, "listening on %31[0-9.:]", where) == 1;
	if (out)
		fclose(out);
	if (!said && pid > 0) {
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
	}
	return said && pid > 0 ? pid : 0;
}

/* The ends in other processes, as if those were another machine's: what the
 * suite needs there (two guests of tests/rdma-vm) is proven here. */
static void far_child(void)
{
	char *argv[] = {(char *)"conform", (char *)"--backend", (char *)"tcp",
			(char *)"--case",  (char *)"loss",	NULL};
	char where[32] = "";
	struct score got = {0};
	bool ended = false;
	pid_t keeper;

	if (other_shard())
		return;
	keeper = keeper_start(where);
	setenv("KVD_CONFORM_FAR", where, 1);
	if (!keeper)
		printf("not ok tcp, with a keeper: it does not start\n");
	else
		ended = child_run(argv, "tcp, with a keeper", &got);
	unsetenv("KVD_CONFORM_FAR");
	if (keeper) {
		kill(keeper, SIGKILL);
		waitpid(keeper, NULL, 0);
	}
	score_add(&got, ended);
}

static int run_all(void)
{
	double begin = clock_us() / 1e3;
	const struct backend *backend;

	for (size_t i = 0; (backend = backend_at(i)); i++) {
		backend_child(backend->name, "--part", "1/2");
		backend_child(backend->name, "--part", "2/2");
	}
	for (size_t i = 0; transport_table[i]; i++)
		backend_child(transport_table[i]->name, "--boot-ids", "50");
	far_child();
	for (unsigned int bug = FAKE_BUG_NONE + 1; bug < FAKE_BUG_COUNT; bug++)
		bug_child("fake", (enum fake_bug)bug);
	printf("# %.1f s\n", (clock_us() / 1e3 - begin) / 1e3);
	return score_say();
}

static int list_cases(void)
{
	for (size_t i = 0; i < ARRAY_LEN(groups); i++) {
		for (const struct conform_case *c = groups[i]; c->name; c++)
			puts(c->name);
	}
	return 0;
}

static enum fake_bug bug_by_name(const char *name)
{
	for (unsigned int bug = 0; bug < FAKE_BUG_COUNT; bug++) {
		if (strcmp(fake_bug_name((enum fake_bug)bug), name) == 0)
			return (enum fake_bug)bug;
	}
	fprintf(stderr, "conform: no bug '%s'\n", name);
	exit(2);
}

static void parse_part(const char *value)
{
	if (sscanf(value, "%u/%u", &options.part, &options.parts) == 2 &&
	    options.part >= 1 && options.part <= options.parts)
		return;
	fprintf(stderr, "conform: no part '%s'\n", value);
	exit(2);
}

static void parse(int argc, char **argv)
{
	for (int i = 1; i < argc; i++) {
		const char *value = i + 1 < argc ? argv[i + 1] : "";

		if (strcmp(argv[i], "--quiet") == 0) {
			options.quiet = true;
			continue;
		}
		if (strcmp(argv[i], "--backend") == 0)
			options.backend = value;
		else if (strcmp(argv[i], "--case") == 0)
			options.filter = value;
		else if (strcmp(argv[i], "--seed") == 0)
			options.seed = strtoull(value, NULL, 0);
		else if (strcmp(argv[i], "--seconds") == 0)
			options.seconds = (unsigned int)strtoul(value, NULL, 0);
		else if (strcmp(argv[i], "--boot-ids") == 0)
			options.boot_ids = (unsigned int)strtoul(value, NULL, 0);
		else if (strcmp(argv[i], "--part") == 0)
			parse_part(value);
		else if (strcmp(argv[i], "--bug") == 0)
			options.bug = bug_by_name(value);
		else {
			fprintf(stderr, "conform: what is '%s'?\n", argv[i]);
			exit(2);
		}
		i++;
	}
}

int main(int argc, char **argv)
{
	gpu_owner_main(argc, argv);
	setvbuf(stdout, NULL, _IOLBF, 0); /* a log is read while it is written */
	/* slow enough for a transfer to be seen in flight; for all processes */
	setenv("FAKE_CUDA_NS_PER_KIB", "1000", 0);
	if (argc == 4 && strcmp(argv[1], "--puppet") == 0)
		return puppet_main(argv[2], atoi(argv[3]));
	if (argc == 4 && strcmp(argv[1], "--keeper") == 0)
		return keeper_main(argv[2], argv[3]);
	if (argc == 4 && strcmp(argv[1], "--owner") == 0)
		return owner_main(atoi(argv[2]), strtoull(argv[3], NULL, 10));
	if (argc == 2 && strcmp(argv[1], "--list") == 0)
		return list_cases();
	if (getenv("TEST_SHARD") && *getenv("TEST_SHARD"))
		parse_part(getenv("TEST_SHARD"));
	parse(argc, argv);
	if (getenv("KVD_CONFORM_WAIT_S")) /* a machine that is slow */
		wait_ns =
			strtoull(getenv("KVD_CONFORM_WAIT_S"), NULL, 10) * LOOP_NS_PER_S;
	log_set_level(LOG_LEVEL_WARN);
	return options.backend ? run_one(options.backend) : run_all();
}
