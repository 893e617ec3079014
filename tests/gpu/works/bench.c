/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How fast, beside what the driver does by itself with the same bytes in the same
 * run. kvd's times are the whole way: from the post by an engine to the state that
 * its poller sees, each the median of many; the driver's are of one call, enqueued
 * and waited for, the best of many, so a share can only be understated.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "tests/gpu/works/works.h"

#define TIMES 15

struct form {
	const char *name;
	uint64_t bytes, count;
	double goal;
};

static const struct form forms[] = {
	{"64 KiB x 8192", 64 * KIB, 8192, 0.8},
	{"4 KiB x 16384", 4 * KIB, 16384, 0.8},
	{"256 B x 40960", 256, 40960, 0.4},
};
#define FORMS (sizeof(forms) / sizeof(forms[0]))

static uint64_t count_of(const struct form *form)
{
	uint64_t n = form->count / shrink();

	return n ? n : 1;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static double median(double *s, size_t n)
{
	qsort(s, n, sizeof(*s), by_value);
	return s[n / 2];
}

static double gbs(uint64_t bytes, double s)
{
	return (double)bytes / s * 1e-9;
}

/* ---- the driver by itself ---- */

/* Best seconds of one copy of so many bytes, whatever the two ends are. */
static double plain(uint64_t dst, uint64_t src, uint64_t bytes)
{
	double best = 1e9;

	for (int i = 0; i < TIMES; i++) {
		double begin = clock_s(), s;

		cu(cuda.drv.copy(dst, src, bytes, cuda.stream), "cuMemcpyAsync");
		cuda_sync();
		s = clock_s() - begin;
		best = s < best ? s : best;
	}
	return best;
}

static double plain_dtod(uint64_t bytes)
{
	uint64_t a = cuda_alloc(bytes), b = cuda_alloc(bytes);
	double s = plain(b, a, bytes);

	cu(cuda.mem_free(a), "cuMemFree");
	cu(cuda.mem_free(b), "cuMemFree");
	return s;
}

double plain_pinned(uint64_t bytes, bool to_device)
{
	uint64_t device = cuda_alloc(bytes);
	void *pinned = NULL;
	double s;

	cu(cuda.drv.host_alloc(&pinned, bytes, 0), "cuMemHostAlloc");
	memset(pinned, 1, bytes);
	s = to_device ? plain(device, (uintptr_t)pinned, bytes)
		      : plain((uintptr_t)pinned, device, bytes);
	cu(cuda.drv.host_free(pinned), "cuMemFreeHost");
	cu(cuda.mem_free(device), "cuMemFree");
	return s;
}

/* ---- kvd ---- */

struct pair {
	struct rig rig;
	struct engine src, dst;
	uint64_t bytes;
};

static const char *options; /* more of the daemons' configuration */

static void pair_start(struct pair *p, const char *transports, unsigned int daemons,
		       enum where from, enum where to)
{
	*p = (struct pair){.rig = {.more = options}};
	for (size_t i = 0; i < FORMS; i++)
		if (forms[i].bytes * count_of(&forms[i]) * 2 > p->bytes)
			p->bytes = forms[i].bytes * count_of(&forms[i]) * 2;
	if (p->bytes < 2 * MIB)
		p->bytes = 2 * MIB;
	rig_start(&p->rig, daemons, transports);
	engine_open(&p->src, &p->rig, 0, from, p->bytes);
	engine_open(&p->dst, &p->rig, daemons - 1, to, p->bytes);
	engine_pattern(&p->src, 7);
}

static void pair_stop(struct pair *p)
{
	engine_close(&p->src);
	engine_close(&p->dst);
	rig_stop(&p->rig);
}

/* Median seconds; the bytes are verified. */
static double run_form(struct pair *p, const struct form *form, bool dst_asks)
{
	double s[TIMES], warm = clock_s() + (cuda.fake ? 0 : 0.2);
	struct kvd_xfer *xfer;
	struct rows rows;

	rows_make(&rows, form->bytes, count_of(form), p->bytes);
	engine_fill(&p->dst, 0xee);
	xfer = rows_xfer(&rows, &p->src, &p->dst, dst_asks);
	/* opens, pins, grows what it needs; kernels are loaded behind the first */
	for (int i = 0; i < 2 || clock_s() < warm; i++)
		(void)xfer_run(xfer);
	for (int i = 0; i < TIMES; i++)
		s[i] = xfer_run(xfer);
	rows_check(&rows, &p->src, &p->dst);
	rows_free(&rows);
	return median(s, TIMES);
}

static void line(const char *what, const struct form *form, uint64_t bytes, double s,
		 const char *beside, double limit_s, double goal)
{
	printf("  %-22s %-15s %9.3f ms %8.2f GB/s %7.3f us a row   %.2f of %s (%.2f "
	       "GB/s)",
	       what, form->name, s * 1e3, gbs(bytes, s), s * 1e6 / (double)count_of(form),
	       limit_s / s, beside, gbs(bytes, limit_s));
	if (goal > 0 && !cuda.fake)
		printf(", goal %.1f: %s", goal, limit_s / s >= goal ? "met" : "missed");
	printf("\n");
}

static void same_device(unsigned int daemons)
{
	struct pair p;

	pair_start(&p, "local", daemons, AT_GPU, AT_GPU);
	for (size_t i = 0; i < FORMS; i++) {
		uint64_t bytes = forms[i].bytes * count_of(&forms[i]);
		double limit = plain_dtod(bytes);

		for (int asks = 1; asks >= 0; asks--)
			line(asks ? "read" : "write", &forms[i], bytes,
			     run_form(&p, &forms[i], asks), "cuMemcpyDtoD", limit,
			     forms[i].goal);
	}
	pair_stop(&p);
}

static void one_daemon(void)
{
	same_device(1);
}

static void two_daemons(void)
{
	same_device(2);
}

/* Copy engines alone. */
static void engines(void)
{
	options = "gpu_kernels = off\n";
	two_daemons();
}

/* From which length on the engines do as well as the kernel (GPU_KERNEL_ROW_BYTES). In
 * between lie what a launch costs, and a call of the driver. */
static void crossover_by(const char *what, const char *by)
{
	static const uint64_t lens[] = {4 * KIB,   16 * KIB, 64 * KIB,
					256 * KIB, MIB,	     4 * MIB};
	struct pair p;

	options = by;
	pair_start(&p, "local", 2, AT_GPU, AT_GPU);
	for (size_t i = 0; i < sizeof(lens) / sizeof(lens[0]); i++) {
		uint64_t count = p.bytes / 4 / lens[i];
		char name[32];
		const struct form form = {name, lens[i], (count ? count : 1) * shrink(),
					  0};

		snprintf(name, sizeof(name), "%ju KiB x %ju", (uintmax_t)(lens[i] / KIB),
			 (uintmax_t)count_of(&form));
		line(what, &form, lens[i] * count_of(&form), run_form(&p, &form, true),
		     "cuMemcpyDtoD", plain_dtod(lens[i] * count_of(&form)), 0);
	}
	pair_stop(&p);
}

static void crossover(void)
{
	crossover_by("by kernel", NULL);
	crossover_by("by copy engine", "gpu_kernels = off\n");
}

static void staged(const char *transports, unsigned int daemons, enum where from,
		   enum where to)
{
	struct pair p;

	pair_start(&p, transports, daemons, from, to);
	for (size_t i = 0; i < FORMS; i++) {
		uint64_t bytes = forms[i].bytes * count_of(&forms[i]);
		double out = plain_pinned(bytes, false), in = plain_pinned(bytes, true);
		double limit = from == AT_HOST ? in
			       : to == AT_HOST ? out
			       : in > out      ? in
					       : out;

		line("read", &forms[i], bytes, run_form(&p, &forms[i], true),
		     "a pinned copy", limit, 0.9);
	}
	pair_stop(&p);
}

static void staged_local_out(void)
{
	staged("local", 1, AT_GPU, AT_HOST);
}

static void staged_local_in(void)
{
	staged("local", 1, AT_HOST, AT_GPU);
}

static void staged_local_far(void)
{
	staged("local", 2, AT_HOST, AT_GPU);
}

static void staged_shm(void)
{
	staged("shm", 2, AT_GPU, AT_GPU);
}

static void staged_tcp(void)
{
	staged("tcp", 2, AT_GPU, AT_GPU);
}

/* A request's whole way: rooms of one page, as short as they get. */
static void room_latency(void)
{
	double s[64];
	struct pair p;

	pair_start(&p, "local", 2, AT_GPU, AT_GPU);
	engine_pool(&p.src, 64 * KIB);
	engine_pool(&p.dst, 64 * KIB);
	for (uint64_t i = 0; i < 64; i++) {
		double begin = clock_s();
		struct kvd_room *recv = room_recv(&p.dst, &p.src, i + 1, 1, NULL);
		struct kvd_room *send = room_send(&p.src, i + 1, 0, NULL);

		room_done(send, recv);
		s[i] = clock_s() - begin;
	}
	printf("  open, bind, send, success on both sides, close: median %.0f us\n",
	       median(s, 64) * 1e6);
	pair_stop(&p);
}

/* What a daemon has of the device's memory, whatever it moves: its context. */
static void context_cost(void)
{
	struct rig rig = {.more = options};
	size_t before = 0, after = 0, total = 0;
	struct engine e;
	double begin;

	engine_memory(&e, AT_GPU, 2 * MIB);
	cu(cuda.drv.mem_info(&before, &total), "cuMemGetInfo");
	rig_start(&rig, 1, "local");
	engine_connect(&e, &rig, 0);
	begin = clock_s();
	well(e.client, engine_register(&e), "region.register");
	begin = clock_s() - begin;
	cu(cuda.drv.mem_info(&after, &total), "cuMemGetInfo");
	printf("  the first region took %.0f ms, and %.0f MiB of the device's %.0f\n",
	       begin * 1e3, ((double)before - (double)after) / (double)MIB,
	       (double)total / (double)MIB);
	engine_close(&e);
	rig_stop(&rig);
}

/* ---- beside a process that keeps the GPU busy ---- */

/* Kernels without end, which fill memory of its own as an engine's read theirs: 'c'
 * answers how many it has run since the last time. */
int busy_main(const char *seconds, const char *more)
{
	uint64_t bytes = 256 * MIB / shrink(), rounds = 0, a;
	struct pollfd asked = {.fd = 0, .events = POLLIN};
	char what;

	(void)seconds;
	(void)more;
	cuda_start();
	a = cuda_alloc(bytes);
	for (;;) {
		for (int i = 0; i < 8; i++)
			cu(cuda.fill(a, (unsigned char)i, bytes, cuda.stream), "a fill");
		cuda_sync();
		rounds += 8;
		if (poll(&asked, 1, 0) == 0)
			continue;
		if (read(0, &what, 1) != 1 ||
		    write(1, &rounds, sizeof(rounds)) != sizeof(rounds))
			return 0;
		rounds = 0;
	}
}

double busy_rate(struct helper *helper, double since)
{
	uint64_t rounds = 0;

	if (write(helper->to, "c", 1) != 1)
		die("the busy process has ended");
	helper_hear(helper, &rounds, sizeof(rounds));
	return (double)rounds / (clock_s() - since);
}

void busy_while(double seconds)
{
	double end = clock_s() + seconds;

	while (clock_s() < end)
		(void)poll(NULL, 0, 5);
}

/* Transfers without a pause: median seconds of one, and the busy process's rounds a
 * second of the same time. */
static double run_beside(struct pair *p, const struct form *form, struct helper *helper,
			 double window_s, double *rate_p)
{
	double s[TIMES], warm = clock_s() + (cuda.fake ? 0 : 0.5), begin;
	struct kvd_xfer *xfer;
	struct rows rows;

	rows_make(&rows, form->bytes, count_of(form), p->bytes);
	engine_fill(&p->dst, 0xee);
	xfer = rows_xfer(&rows, &p->src, &p->dst, true);
	for (int i = 0; i < 3 || clock_s() < warm; i++)
		(void)xfer_run(xfer);
	(void)busy_rate(helper, clock_s());
	begin = clock_s();
	for (unsigned int i = 0; i < TIMES || clock_s() < begin + window_s; i++)
		s[i % TIMES] = xfer_run(xfer);
	*rate_p = busy_rate(helper, begin);
	rows_check(&rows, &p->src, &p->dst);
	rows_free(&rows);
	return median(s, TIMES);
}

static void beside_busy_from(enum where from, enum where to)
{
	double alone, beside, begin, window = cuda.fake ? 0.1 : 0.5;
	struct helper helper;
	struct pair p;

	pair_start(&p, "local", 2, from, to);
	helper_start(&helper, "busy", NULL, NULL);
	begin = clock_s();
	(void)busy_rate(&helper, begin);
	begin = clock_s();
	busy_while(window);
	alone = busy_rate(&helper, begin);
	for (size_t i = 0; i < FORMS; i++) {
		uint64_t bytes = forms[i].bytes * count_of(&forms[i]);
		bool inside = from == AT_GPU && to == AT_GPU;
		double limit =
			inside ? plain_dtod(bytes) : plain_pinned(bytes, to == AT_GPU);
		double s = run_beside(&p, &forms[i], &helper, window, &beside);

		line(inside	    ? "within the device"
		     : to == AT_GPU ? "from host"
				    : "to host",
		     &forms[i], bytes, s,
		     inside ? "cuMemcpyDtoD there" : "a pinned copy there", limit, 0);
		printf("    the busy process ran %.0f kernels a second, %.0f alone: "
		       "%.2f\n",
		       beside, alone, beside / alone);
	}
	helper_kill(&helper);
	pair_stop(&p);
}

static void beside_busy(void)
{
	beside_busy_from(AT_GPU, AT_GPU);
	beside_busy_from(AT_GPU, AT_HOST);
	beside_busy_from(AT_HOST, AT_GPU);
}

static void beside_busy_engines(void)
{
	options = "gpu_kernels = off\n";
	beside_busy();
}

const struct work benches[] = {
	{"one-daemon", "GPU to GPU, same device, one daemon", one_daemon},
	{"two-daemons", "GPU to GPU, same device, two daemons, by IPC", two_daemons},
	{"engines", "the same by copy engines alone (gpu_kernels = off)", engines},
	{"crossover", "rows of each length by the kernel, and by copy engines",
	 crossover},
	{"gpu-to-host", "GPU to a memfd, one daemon", staged_local_out},
	{"host-to-gpu", "a memfd to GPU, one daemon", staged_local_in},
	{"host-of-another", "another daemon's memfd to GPU", staged_local_far},
	{"staged-shm", "GPU to GPU over shared host memory", staged_shm},
	{"staged-tcp", "GPU to GPU over TCP", staged_tcp},
	{"chunks", "chunks of a cache on the GPU, into the daemon's memory and back",
	 chunks_bench},
	{"attend", "attention by attend.cu, of launches one behind the other",
	 attend_bench},
	{"streams", "copies dealt out to 1 to 8 streams: the driver's gain",
	 streams_bench},
	{"attend-daemon", "rows of an engine for pages on the GPU, by its daemon",
	 attend_daemon_bench},
	{"busy-attend", "rows for pages on the GPU beside kernels without end, by share",
	 busy_attend_bench},
	{"room", "a request of one page", room_latency},
	{"context", "a daemon's context: time and memory", context_cost},
	{"busy", "beside a process that runs kernels without end", beside_busy},
	{"busy-engines", "the same by copy engines alone", beside_busy_engines},
	{NULL, NULL, NULL},
};
