/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each case runs in a process of its own: a driver does not survive a fork, a
 * context that broke does not outlive its case, and one that hangs or crashes is one
 * failure. Faults end the case at once (die()); its daemons and helpers die with it.
 */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "tests/gpu/works/works.h"

#define EXIT_SKIPPED 77
#ifdef __SANITIZE_THREAD__
#define CASE_S 960u
#else
#define CASE_S 240u /* one that takes longer hangs … */
#endif
#define CASE_GPU_S 100u /* … and a machine that is lent is not lent for long */

const struct role roles[] = {
	{"victim", victim_main},
	{"publisher", publisher_main},
	{"exporter", exporter_main},
	{"busy", busy_main},
	{NULL, NULL},
};

void die(const char *fmt, ...)
{
	va_list args;

	printf("    ");
	va_start(args, fmt);
	vprintf(fmt, args);
	va_end(args);
	printf("\n");
	fflush(stdout);
	_exit(1); /* the daemons go with us */
}

void skip(const char *fmt, ...)
{
	va_list args;

	printf("    skipped: ");
	va_start(args, fmt);
	vprintf(fmt, args);
	va_end(args);
	printf("\n");
	fflush(stdout);
	_exit(EXIT_SKIPPED);
}

void well(const struct kvd_client *client, int r, const char *what)
{
	if (r < 0)
		die("%s: %s: %s", what, kvd_code_name(r),
		    kvd_last_error(client)->message);
}

void *need(void *p)
{
	if (!p)
		die("out of memory");
	return p;
}

unsigned int shrink(void)
{
	const char *text = getenv("KVD_GPU_SHRINK");
	int n = text ? atoi(text) : 1;

	return n > 0 ? (unsigned int)n : 1;
}

/* A process of its own, since a driver does not survive a fork. */
static int work_run(const struct work *work)
{
	int status = -1;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid < 0)
		die("fork: %s", strerror(errno));
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		alarm(CASE_S);
		cuda_start();
		if (!cuda.fake)
			alarm(CASE_GPU_S);
		work->run();
		fflush(stdout);
		_exit(0);
	}
	if (waitpid(pid, &status, 0) != pid)
		return -1;
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static bool chosen(const struct work *work, char **words)
{
	if (!*words)
		return true;
	for (; *words; words++)
		if (strstr(work->name, *words))
			return true;
	return false;
}

static int works_run(const struct work *works, char **words, bool bench)
{
	static const char *const said[] = {"ok", "skip", "FAIL"};
	unsigned int counts[3] = {0};

	for (const struct work *w = works; w->name; w++) {
		double begin = clock_s();
		int status, which;

		if (!chosen(w, words))
			continue;
		if (bench)
			printf("%s: %s\n", w->name, w->what);
		status = work_run(w);
		which = status == 0 ? 0 : status == EXIT_SKIPPED ? 1 : 2;
		counts[which]++;
		if (!bench || which)
			printf("  %-4s %-34s %5.1f s  %s\n", said[which], w->name,
			       clock_s() - begin, w->what);
		if (status < 0)
			printf("    it hung, or died by a signal\n");
	}
	printf("%u passed, %u failed", counts[0], counts[2]);
	printf(counts[1] ? ", %u skipped\n" : "\n", counts[1]);
	if (counts[2])
		return 1;
	return counts[0] || !counts[1] ? 0 : EXIT_SKIPPED;
}

/* No driver, or no GPU: said once, by name. */
static bool gpu_there(void)
{
	int status = -1, count = 0;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		cuda_start();
		cu(cuda.drv.device_count(&count), "cuDeviceGetCount");
		printf("driver %d.%d, %d GPUs; %s %s%s\n", cuda.drv.version / 1000,
		       cuda.drv.version % 1000 / 10, count, cuda.name, cuda.uuid,
		       cuda.fake ? " (the tests' fake driver: times mean nothing)" : "");
		for (int i = 0; i < CUDRV_GROUPS; i++)
			if (!cuda.drv.has[i])
				printf("without %s: no %s\n",
				       cudrv_group_name((enum cudrv_group)i),
				       cuda.drv.missing[i]);
		fflush(stdout);
		_exit(0);
	}
	return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

static int role_run(char **argv)
{
	for (const struct role *role = roles; role->name; role++)
		if (strcmp(role->name, argv[0]) == 0)
			return role->run(argv[1], argv[2]);
	return 2;
}

int main(int argc, char **argv)
{
	/* pollers' pauses are a few microseconds, not what the kernel rounds them to */
	prctl(PR_SET_TIMERSLACK, 1);

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc == 5 && strcmp(argv[1], "--role") == 0)
		return role_run(argv + 2);
	if (argc >= 2 && strcmp(argv[1], "list") == 0) {
		for (const struct work *w = tests; w->name; w++)
			printf("test  %-34s %s\n", w->name, w->what);
		for (const struct work *w = benches; w->name; w++)
			printf("bench %-34s %s\n", w->name, w->what);
		return 0;
	}
	if (argc < 2 || (strcmp(argv[1], "test") != 0 && strcmp(argv[1], "sweep") != 0 &&
			 strcmp(argv[1], "bench") != 0)) {
		fprintf(stderr, "usage: gpu-works test|sweep|bench [WORDS] | list\n");
		return 2;
	}
	if (!gpu_there())
		return EXIT_SKIPPED;
	if (strcmp(argv[1], "test") == 0)
		return works_run(tests, argv + 2, false);
	if (strcmp(argv[1], "sweep") == 0)
		return works_run(sweeps, argv + 2, false);
	return works_run(benches, argv + 2, true);
}
