/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_cost: what kvd_decide() takes, in ns of CPU time, beside the arithmetic alone.
 *
 *   1, 8 holders  dense, by a page of one peer
 *   selected      of 8 holders
 *   full page     96 peers and 192 geometries: those of the holders among them
 *   written       1 holder, while another thread writes its row 100 000 times a second
 *   arithmetic    the closed form of 1 holder without the page
 *
 * Each line: the median and the largest of ROUNDS rounds of CALLS calls. A promise of
 * kvd_decide() is a microsecond; what passes it is told, and the exit status is 1.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/cost/page.h"
#include "lib/kvd.h"

#define ROUNDS 31
#define CALLS 20000
#define PROMISE_NS 1000.0

static struct kvd_cost_holder holders[KVD_COST_HOLDERS_MAX];
static volatile double sink;

struct case_of {
	const char *name;
	size_t holders;
	bool selected, full, written;
};

static const struct case_of cases[] = {
	{"1 holder", 1, false, false, false},
	{"8 holders", 8, false, false, false},
	{"8 holders, selected", 8, true, false, false},
	{"1 holder, full page", 1, false, true, false},
	{"8 holders, full page", 8, false, true, false},
	{"1 holder, written", 1, false, false, true},
};

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static void key_of(unsigned int n, uint8_t key[COST_KEY_BYTES])
{
	memset(key, 0, COST_KEY_BYTES);
	memcpy(key, &n, sizeof(n));
}

/* Every row is taken. */
static void page_fill(struct cost_page *page, const struct kvd_decide_args *args)
{
	static const struct cost_shape any;
	struct cost_peer peer;
	struct cost_speed speed;

	cost_page_peer(page, cost_self, &peer);
	cost_page_speed(page, cost_self, &any, COST_HOST, &speed);
	speed.shape = cost_shape_mla(args->heads, args->dqk, args->dv, 2, 2);
	for (unsigned int i = 1; i < COST_PAGE_PEERS; i++) {
		key_of(i, peer.key);
		memcpy(speed.key, peer.key, sizeof(speed.key));
		cost_page_set_peer(page, &peer);
		speed.shape.heads++;
		cost_page_set_speed(page, &speed);
		speed.shape.heads--;
		cost_page_set_speed(page, &speed);
	}
	for (size_t i = 0; i < KVD_COST_HOLDERS_MAX; i++)
		key_of(COST_PAGE_PEERS - 1 - (unsigned int)i, holders[i].peer);
}

struct writer {
	struct cost_page *page;
	bool stop;
};

static void *write_on(void *arg)
{
	struct writer *writer = arg;
	struct cost_peer peer;

	cost_page_peer(writer->page, cost_self, &peer);
	while (!__atomic_load_n(&writer->stop, __ATOMIC_ACQUIRE)) {
		uint64_t until = clock_ns() + 10000;

		cost_page_set_peer(writer->page, &peer);
		while (clock_ns() < until)
			continue;
	}
	return NULL;
}

static void measure(const struct kvd_decide_args *args, const struct kvd_cost_page *page,
		    double ns[ROUNDS], unsigned int *busy)
{
	struct kvd_decide_result result;

	for (unsigned int round = 0; round < ROUNDS; round++) {
		uint64_t begin = clock_of(CLOCK_THREAD_CPUTIME_ID);

		for (unsigned int i = 0; i < CALLS; i++) {
			*busy += kvd_decide(args, page, &result) == -KVD_E_BUSY;
			sink += result.route.us;
		}
		ns[round] = (double)(clock_of(CLOCK_THREAD_CPUTIME_ID) - begin) / CALLS;
	}
	qsort(ns, ROUNDS, sizeof(*ns), by_value);
}

static bool run(const struct case_of *of)
{
	struct kvd_decide_args args = {.kind = KVD_COST_MLA,
				       .layers = 61,
				       .heads = 128,
				       .dqk = 576,
				       .dv = 512,
				       .holders = holders,
				       .holder_count = of->holders,
				       .selected = of->selected,
				       .shifted = true};
	struct kvd_cost_page *page;
	struct writer writer = {0};
	double ns[ROUNDS];
	unsigned int busy = 0;
	pthread_t thread;

	memset(holders, 0, sizeof(holders));
	for (size_t i = 0; i < KVD_COST_HOLDERS_MAX; i++)
		holders[i].tokens = holders[i].selected = 4096;
	if (kvd_cost_preset("h100-ibgda", &page) < 0)
		return false;
	writer.page = (struct cost_page *)page;
	if (of->full)
		page_fill(writer.page, &args);
	if (of->written && pthread_create(&thread, NULL, write_on, &writer) != 0)
		return false;
	measure(&args, page, ns, &busy);
	if (of->written) {
		__atomic_store_n(&writer.stop, true, __ATOMIC_RELEASE);
		pthread_join(thread, NULL);
	}
	printf("%-24s %7.0f ns  at most %7.0f", of->name, ns[ROUNDS / 2], ns[ROUNDS - 1]);
	if (of->written)
		printf("   %.1f %% told to try again", 100.0 * busy / ROUNDS / CALLS);
	printf("%s\n", ns[ROUNDS / 2] > PROMISE_NS ? "   over a microsecond" : "");
	kvd_cost_close(page);
	return of->written || ns[ROUNDS / 2] <= PROMISE_NS;
}

static void arithmetic(void)
{
	const struct cost_preset *preset = cost_preset_find("h100-ibgda");
	struct cost_link link = cost_preset_link(preset);
	struct cost_compute compute = cost_preset_compute(preset);
	struct cost_holder holder = {.links = &link,
				     .link_count = 1,
				     .compute = &compute,
				     .requesters = 1,
				     .tokens = 4096};
	struct cost_case c = {.shape = cost_shape_mla(128, 576, 512, 2, 2),
			      .holders = &holder,
			      .holder_count = 1,
			      .home = cost_preset_home(),
			      .layers = 61,
			      .query = 1,
			      .shifted = true};
	struct cost_prices prices;
	double ns[ROUNDS];

	for (unsigned int round = 0; round < ROUNDS; round++) {
		uint64_t begin = clock_of(CLOCK_THREAD_CPUTIME_ID);

		for (unsigned int i = 0; i < CALLS; i++) {
			c.steps = 1 + i;
			cost_all(&c, &prices);
			sink += cost_choose(&prices, COST_ROUTE).way;
		}
		ns[round] = (double)(clock_of(CLOCK_THREAD_CPUTIME_ID) - begin) / CALLS;
	}
	qsort(ns, ROUNDS, sizeof(*ns), by_value);
	printf("%-24s %7.0f ns  at most %7.0f\n", "arithmetic alone", ns[ROUNDS / 2],
	       ns[ROUNDS - 1]);
}

int main(void)
{
	bool kept = true;

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		kept = run(&cases[i]) && kept;
	arithmetic();
	return kept ? 0 : 1;
}
