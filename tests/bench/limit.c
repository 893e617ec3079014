/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Both limits share out the rows in equal parts, one a thread; the calling
 * thread takes the first. Starting the others is in the time, as it is a few
 * microseconds of many milliseconds.
 *
 * The limit of `vm` forks, so the memory that it moves must be MADV_DONTFORK, or
 * its first run would measure copies on write.
 */
#include "tests/bench/limit.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"

#define BOUNCE_BYTES (128u << 10)

struct share {
	const struct rows *rows;
	const uint8_t *src;
	uint8_t *dst;
	uint64_t begin, end;
	int mem; /* /proc/PID/mem of their owner */
	pthread_t thread;
};

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void *share_memcpy(void *arg)
{
	const struct share *s = arg;
	const struct rows *r = s->rows;

	for (uint64_t i = s->begin; i < s->end; i++)
		memcpy(s->dst + r->to[i], s->src + r->from[i], r->bytes);
	return NULL;
}

/* Rows above the bounce buffer's size go through it in parts. */
static void *share_vm(void *arg)
{
	const struct share *s = arg;
	const struct rows *r = s->rows;
	uint8_t *bounce = malloc(BOUNCE_BYTES);

	if (!bounce)
		die("limit: bounce buffer");
	for (uint64_t i = s->begin; i < s->end; i++) {
		for (uint64_t at = 0, len; at < r->bytes; at += len) {
			len = r->bytes - at < BOUNCE_BYTES ? r->bytes - at : BOUNCE_BYTES;
			if (pread(s->mem, bounce, len,
				  (off_t)(uintptr_t)(s->src + r->from[i] + at)) < 0 ||
			    pwrite(s->mem, bounce, len,
				   (off_t)(uintptr_t)(s->dst + r->to[i] + at)) < 0)
				die("limit: /proc/PID/mem");
		}
	}
	free(bounce);
	return NULL;
}

static struct limit_took run_all(struct share proto, unsigned int threads,
				 void *(*run)(void *))
{
	struct share shares[LIMIT_THREADS_MAX];
	uint64_t count = proto.rows->count;
	double begin = clock_s(), cpu_begin = clock_s_of(CLOCK_PROCESS_CPUTIME_ID);

	for (unsigned int t = 0; t < threads; t++) {
		shares[t] = proto;
		shares[t].begin = count * t / threads;
		shares[t].end = count * (t + 1) / threads;
		if (t > 0 && pthread_create(&shares[t].thread, NULL, run, &shares[t]))
			die("limit: pthread_create");
	}
	run(&shares[0]);
	for (unsigned int t = 1; t < threads; t++)
		pthread_join(shares[t].thread, NULL);
	return (struct limit_took){clock_s() - begin,
				   clock_s_of(CLOCK_PROCESS_CPUTIME_ID) - cpu_begin};
}

struct limit_took limit_memcpy(const struct rows *rows, const uint8_t *src, uint8_t *dst,
			       unsigned int threads)
{
	return run_all((struct share){.rows = rows, .src = src, .dst = dst}, threads,
		       share_memcpy);
}

struct limit_took limit_vm(const struct rows *rows, const uint8_t *src, uint8_t *dst,
			   unsigned int threads)
{
	int pipes[2], mem = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
	struct limit_took took = {0};
	pid_t child;

	if (mem < 0 || pipe(pipes) < 0)
		die("limit: /proc/self/mem, a pipe");
	child = fork();
	if (child == 0) {
		took = run_all(
			(struct share){.rows = rows, .src = src, .dst = dst, .mem = mem},
			threads, share_vm);
		_exit(write(pipes[1], &took, sizeof(took)) != sizeof(took));
	}
	close(pipes[1]);
	if (child < 0 || read(pipes[0], &took, sizeof(took)) != sizeof(took))
		die("limit: the other process");
	close(pipes[0]);
	close(mem);
	waitpid(child, NULL, 0);
	return took;
}
