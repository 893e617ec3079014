/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into a daemon: the wall clock is off by as many seconds as the first
 * eight bytes of $KVD_CLOCK_FILE say, at any moment. The monotonic clocks are the
 * real ones. libev asks the kernel by syscall() where it can.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset_s;

__attribute__((constructor)) static void attach(void)
{
	const char *path = getenv("KVD_CLOCK_FILE");
	int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	void *at = fd < 0 ? MAP_FAILED
			  : mmap(NULL, sizeof(*offset_s), PROT_READ, MAP_SHARED, fd, 0);

	if (at == MAP_FAILED)
		abort();
	offset_s = at;
	close(fd);
}

static int is_wall(clockid_t clock)
{
	return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE ||
	       clock == CLOCK_TAI;
}

static long kernel(long number, long a, long b, long c, long d, long e, long f)
{
	static long (*real)(long, ...);

	if (!real)
		*(void **)&real = dlsym(RTLD_NEXT, "syscall");
	return real(number, a, b, c, d, e, f);
}

int clock_gettime(clockid_t clock, struct timespec *ts)
{
	int r = (int)kernel(SYS_clock_gettime, clock, (long)ts, 0, 0, 0, 0);

	if (r == 0 && offset_s && is_wall(clock))
		ts->tv_sec += *offset_s;
	return r;
}

long syscall(long number, ...)
{
	long a[6];
	va_list args;

	va_start(args, number);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(args, long);
	va_end(args);
	if (number == SYS_clock_gettime)
		return clock_gettime((clockid_t)a[0], (struct timespec *)a[1]);
	return kernel(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone)
{
	struct timespec ts;

	(void)zone;
	if (clock_gettime(CLOCK_REALTIME, &ts) < 0)
		return -1;
	*tv = (struct timeval){ts.tv_sec, ts.tv_nsec / 1000};
	return 0;
}

time_t time(time_t *out)
{
	struct timespec ts = {0};

	clock_gettime(CLOCK_REALTIME, &ts);
	if (out)
		*out = ts.tv_sec;
	return ts.tv_sec;
}
