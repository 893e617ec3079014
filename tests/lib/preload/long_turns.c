/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into a daemon: who holds its loop. From each return of the loop's
 * epoll_wait() on a timer runs; when the thread had a core for 200 us and is not
 * back, its stack is written to $KVD_LONG_TURNS.PID, and once more for each
 * further 200 us (tests/bench/bench_turns.py makes names of the addresses). When
 * it is back, the turn's length follows. Time that others had the core for does
 * not count: the timer looks at the thread's own clock and waits for the rest.
 */
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LIMIT_NS 200000
#define FRAMES 24

static int out = -1;
static timer_t timer;
static long begin_ns;	    /* CPU time of the thread when the poll returned */
static volatile int stacks; /* of this turn */

static long cpu_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
	return ts.tv_sec * 1000000000L + ts.tv_nsec;
}

/* No stdio: what it interrupts may have malloc's lock. */
static void say(const char *word, long ns)
{
	char line[64];
	int n = snprintf(line, sizeof(line), "%s %ld us\n", word, ns / 1000);

	if (write(out, line, (size_t)n) < 0)
		abort();
}

static void arm(long ns)
{
	struct itimerspec when = {.it_value.tv_nsec = ns};

	timer_settime(timer, 0, &when, NULL);
}

static void on_timer(int signum)
{
	long had = cpu_ns() - begin_ns;
	void *frames[FRAMES];

	(void)signum;
	if (had < LIMIT_NS * (stacks + 1L)) {
		long rest = LIMIT_NS * (stacks + 1L) - had;

		arm(rest < 10000 ? 10000 : rest);
		return;
	}
	if (stacks++ < 20) {
		say("at", had);
		backtrace_symbols_fd(frames, backtrace(frames, FRAMES), out);
	}
	arm(LIMIT_NS);
}

static void begin(void)
{
	const char *path = getenv("KVD_LONG_TURNS");
	struct sigevent ev = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMAX};
	struct sigaction act = {.sa_handler = on_timer, .sa_flags = SA_RESTART};
	void *frame;
	char name[512];

	snprintf(name, sizeof(name), "%s.%d", path ? path : "/dev/null", (int)getpid());
	out = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_APPEND, 0600);
	ev._sigev_un._tid = (int)syscall(SYS_gettid);
	if (out < 0 || timer_create(CLOCK_MONOTONIC, &ev, &timer) < 0)
		abort();
	backtrace(&frame, 1); /* it loads a library the first time */
	sigaction(SIGRTMAX, &act, NULL);
}

int epoll_wait(int fd, struct epoll_event *events, int count, int timeout_ms)
{
	static int (*real)(int, struct epoll_event *, int, int);
	int r;

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "epoll_wait");
	if (syscall(SYS_gettid) != getpid()) /* a thread of ZeroMQ's */
		return real(fd, events, count, timeout_ms);
	if (out < 0)
		begin();
	arm(0);
	if (stacks)
		say("turn", cpu_ns() - begin_ns);
	r = real(fd, events, count, timeout_ms);
	stacks = 0;
	begin_ns = cpu_ns();
	arm(LIMIT_NS);
	return r;
}
