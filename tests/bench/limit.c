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

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"

#define BOUNCE_BYTES (128u << 10)
#define IOVS 1024u

struct share {
	const struct rows *rows;
	const uint8_t *src;
	uint8_t *dst;
	uint64_t begin, end;
	pid_t pid;
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

static void vm_move(pid_t pid, bool reading, struct iovec *near, struct iovec *far,
		    size_t n)
{
	ssize_t done = reading ? process_vm_readv(pid, near, n, far, n, 0)
			       : process_vm_writev(pid, near, n, far, n, 0);

	if (done < 0)
		die("limit: process_vm_readv/writev");
}

/* Rows above the bounce buffer's size go through it in parts. */
static void *share_vm(void *arg)
{
	const struct share *s = arg;
	const struct rows *r = s->rows;
	uint8_t *bounce = malloc(BOUNCE_BYTES);
	uint64_t part = r->bytes < BOUNCE_BYTES ? r->bytes : BOUNCE_BYTES;
	static _Thread_local struct iovec near[IOVS], src[IOVS], dst[IOVS];
	uint64_t i = s->begin, at = 0;

	if (!bounce)
		die("limit: bounce buffer");
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
	pid_t owner = getpid(), child;
	struct limit_took took = {0};
	int pipes[2];

	if (pipe(pipes) < 0)
		die("limit: pipe");
	child = fork();
	if (child == 0) {
		took = run_all(
			(struct share){
				.rows = rows, .src = src, .dst = dst, .pid = owner},
			threads, share_vm);
		_exit(write(pipes[1], &took, sizeof(took)) != sizeof(took));
	}
	close(pipes[1]);
	if (child < 0 || read(pipes[0], &took, sizeof(took)) != sizeof(took))
		die("limit: the other process");
	close(pipes[0]);
	waitpid(child, NULL, 0);
	return took;
}
