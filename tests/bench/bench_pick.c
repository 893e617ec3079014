/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_pick: what kvd_pick() of a pair takes, with its settle and release, in ns of CPU
 * time; of each group size and sample, loads known and 1000 reservations held. Each line:
 * the median and the largest of ROUNDS rounds of CALLS. A promise is 20 µs among 1000
 * workers; what passes it is told, and the exit status is 1. Then what an answer of
 * group.query with 1000 workers takes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "lib/kvd_pick.h"

#define ROUNDS 31
#define CALLS 2000
#define HELD 1000
#define PROMISE_NS 20000.0

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void fill(struct kvd_picker *picker, unsigned int workers, uint64_t now)
{
	for (unsigned int i = 0; i < 2 * workers; i++) {
		struct kvd_pick_load load;
		char name[KVD_PICK_NAME_MAX];

		snprintf(name, sizeof(name), "worker-%u", i / 2);
		kvd_pick_load_unknown(&load);
		load.seq = now;
		load.prompt_tokens_waiting = (i * 7919) % 20000;
		load.prompt_tokens_s = 20000;
		load.gbps = 10;
		load.bytes_queued = 1e6;
		load.kv_total_tokens = 400000;
		load.kv_free_tokens = 300000;
		if (kvd_picker_set(picker, i % 2, name, KVD_PICK_SERVING, &load, now,
				   now))
			abort();
	}
}

static double measure(unsigned int workers, unsigned int sample)
{
	struct kvd_pick_options o = {.results = true, .sample = sample, .seed = 1};
	struct kvd_pick_near near[4] = {{"worker-1", 1000},
					{"worker-2", 2000},
					{"worker-3", 512},
					{"worker-4", 4000}};
	struct kvd_pick_args args = {
		.prompt_tokens = 4000, .bytes = 5e8, .near = near, .near_count = 4};
	uint64_t ids[HELD] = {0}, now = 1000000000;
	struct kvd_picker *picker;
	double ns[ROUNDS];

	if (kvd_picker_new(&o, &picker))
		abort();
	for (unsigned int r = 0; r < ROUNDS; r++) {
		uint64_t begun;

		fill(picker, workers, now);
		begun = clock_of(CLOCK_THREAD_CPUTIME_ID);
		for (unsigned int i = 0; i < CALLS; i++) {
			struct kvd_pick_result result;
			uint64_t *id = &ids[i % HELD];

			now += 200000;
			kvd_pick_settle(picker, *id, 0.2, 0, now);
			kvd_pick_release(picker, *id, now);
			if (kvd_pick(picker, &args, now, &result))
				abort();
			*id = result.id;
		}
		ns[r] = (double)(clock_of(CLOCK_THREAD_CPUTIME_ID) - begun) / CALLS;
	}
	kvd_picker_free(picker);
	qsort(ns, ROUNDS, sizeof(*ns), by_value);
	printf("%5u workers a side, looks at %-4u %8.0f ns  at most %8.0f%s\n", workers,
	       workers > 64 ? sample : workers, ns[ROUNDS / 2], ns[ROUNDS - 1],
	       ns[ROUNDS / 2] > PROMISE_NS ? "   over 20 µs" : "");
	return ns[ROUNDS / 2];
}

static void measure_feed(unsigned int workers)
{
	size_t size = workers * 400 + 100, at = 0;
	char *text = malloc(size);
	struct kvd_picker *picker;
	uint64_t begun;

	if (!text || kvd_picker_new(NULL, &picker))
		abort();
	at += (size_t)snprintf(text, size, "{\"revision\":1,\"ranks\":[");
	for (unsigned int i = 0; i < workers; i++)
		at += (size_t)snprintf(
			text + at, size - at,
			"%s{\"worker\":\"w%u\",\"tp_rank\":0,\"tp_size\":1,\"endp"
			"oint\":\"tcp:"
			"//10.0.0.1:18515\",\"state\":\"serving\",\"load\":{\"v"
			"\":1,\"seq\":1,"
			"\"gbps\":12.5,\"engine\":{\"running\":12,\"waiting\":3,"
			"\"prompt_tokens_"
			"waiting\":9000,\"prompt_tokens_s\":51000}}}",
			i ? "," : "", i);
	at += (size_t)snprintf(text + at, size - at, "]}");
	begun = clock_of(CLOCK_THREAD_CPUTIME_ID);
	for (unsigned int i = 0; i < ROUNDS; i++)
		if (kvd_picker_feed(picker, KVD_PICK_PREFILL, text, at, i + 1))
			abort();
	printf("an answer with %u workers, %zu bytes: %.2f ms\n", workers, at,
	       (double)(clock_of(CLOCK_THREAD_CPUTIME_ID) - begun) / ROUNDS / 1e6);
	kvd_picker_free(picker);
	free(text);
}

int main(void)
{
	bool late = measure(16, 2) > PROMISE_NS;

	late |= measure(64, 2) > PROMISE_NS;
	late |= measure(1000, 2) > PROMISE_NS;
	late |= measure(1000, 8) > PROMISE_NS;
	measure(4096, 2);
	measure_feed(1000);
	return late;
}
