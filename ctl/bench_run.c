/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transfers of `kvd-ctl bench`.
 *
 * The other end only serves memory, so this end verifies the data: it pulls the pushed
 * bytes back to another address and compares them. Each word of the source encodes its
 * position and the case, so stale or misplaced bytes are detected.
 *
 * The poller sleeps for 1/50 of the duration of the last transfer, at most 100 us. Busy
 * polling would take a core from the daemons on small hosts.
 */
#include "ctl/bench.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ctl/ctl.h"
#include "daemon/base/clock.h"

#define PAUSE_NS_MIN 5000
#define PAUSE_NS_MAX 100000

struct run {
	struct kvd_client *client;
	const struct bench_case *c;
	uint8_t *source, *landing; /* halves of the local memory */
	uint64_t *near, *far;	   /* offsets of the rows */
	struct kvd_dlist *local[BENCH_OPS], *remote;
	struct kvd_xfer *xfer[BENCH_OPS];
	double last_s[BENCH_OPS];
};

int bench_report(struct kvd_client *client, const char *what)
{
	const struct kvd_error *why = kvd_last_error(client);

	return ctl_failed("%s: %s: %s", what, kvd_code_name(why->code), why->message);
}

/* ---- memory ---- */

int bench_memory_new(struct kvd_client *client, uint64_t bytes,
		     struct bench_memory *out_p)
{
	*out_p = (struct bench_memory){.memory = {.fd = -1}};
	if (kvd_memory_alloc(bytes, "kvd-ctl-bench", &out_p->memory) < 0)
		return bench_report(NULL, "memory");
	if (kvd_region_memory(client, &out_p->memory, NULL, &out_p->region) < 0) {
		kvd_memory_free(&out_p->memory);
		return bench_report(client, "region");
	}
	return 0;
}

void bench_memory_free(struct bench_memory *memory)
{
	if (memory->region) /* not yet freed */
		kvd_region_unregister(memory->region, NULL);
	memory->region = NULL;
	if (memory->memory.address)
		kvd_memory_free(&memory->memory);
	memory->memory = (struct kvd_memory){.fd = -1};
}

/* ---- rows ---- */

static void shuffle(uint64_t *v, uint64_t n, uint64_t seed)
{
	for (uint64_t i = n - 1; i > 0; i--) {
		uint64_t j, t;

		seed ^= seed << 13;
		seed ^= seed >> 7;
		seed ^= seed << 17;
		j = seed % (i + 1);
		t = v[i];
		v[i] = v[j];
		v[j] = t;
	}
}

static uint64_t *places(const struct bench_case *c, uint64_t bytes, uint64_t seed)
{
	uint64_t n = bytes / c->size;
	uint64_t *at = calloc(n, sizeof(*at));

	for (uint64_t i = 0; at && i < n; i++)
		at[i] = i * c->size;
	if (at && !c->flat)
		shuffle(at, n, seed);
	return at;
}

static void bench_run_fill(struct run *r, uint64_t bytes)
{
	uint64_t *word = (uint64_t *)(void *)r->source;
	uint64_t salt = r->c->size << 40;

	for (uint64_t i = 0; i < bytes / sizeof(*word); i++)
		word[i] = (i + salt) * UINT64_C(0x9e3779b97f4a7c15);
	memset(r->landing, 0, bytes);
}

static int bench_run_compare(const struct run *r)
{
	for (uint64_t i = 0; i < r->c->rows; i++)
		if (memcmp(r->landing + r->near[i], r->source + r->near[i], r->c->size) !=
		    0)
			return ctl_failed("row %" PRIu64 " of %" PRIu64
					  " bytes: the data read back differs",
					  i, r->c->size);
	return 0;
}

static int dlist(struct run *r, uint64_t attach, uint64_t base, const uint64_t *at,
		 struct kvd_dlist **dlist_p)
{
	struct kvd_desc *descs = calloc(r->c->rows, sizeof(*descs));
	int e;

	if (!descs)
		return ctl_failed("out of memory");
	for (uint64_t i = 0; i < r->c->rows; i++)
		descs[i] =
			(struct kvd_desc){.address = base + at[i], .bytes = r->c->size};
	e = kvd_dlist_prep(r->client, attach, descs, r->c->rows, 4, dlist_p);
	if (e == 0)
		e = kvd_dlist_wait(*dlist_p, 0);
	free(descs);
	return e < 0 ? bench_report(r->client, "dlist.prep") : 0;
}

static int bench_run_prepare(struct run *r, uint64_t attach,
			     const struct bench_ticket *ticket)
{
	struct bench_case far = *r->c;

	r->near = places(r->c, ticket->bytes, 88172645463325252);
	far.flat |= far.gather;
	r->far = places(&far, ticket->bytes, 11400714819323198485u);
	if (!r->near || !r->far)
		return ctl_failed("out of memory");
	bench_run_fill(r, ticket->bytes);
	if (dlist(r, 0, (uintptr_t)r->source, r->near, &r->local[BENCH_PUSH]) ||
	    dlist(r, 0, (uintptr_t)r->landing, r->near, &r->local[BENCH_PULL]))
		return CTL_ERROR;
	return dlist(r, attach, ticket->address, r->far, &r->remote);
}

/* ---- transfers ---- */

static int bench_run_post(struct run *r, enum bench_op op)
{
	struct kvd_xfer_args args = {.op = op == BENCH_PUSH ? KVD_WRITE : KVD_READ,
				     .local = r->local[op],
				     .remote = r->remote};
	int e = r->xfer[op] ? 0 : kvd_xfer_make(r->client, &args, &r->xfer[op]);

	if (e == 0)
		e = kvd_xfer_post(r->xfer[op], NULL, 0);
	return e < 0 ? bench_report(r->client, op == BENCH_PUSH ? "push" : "pull") : 0;
}

static int bench_run_failed(const struct run *r, enum bench_op op,
			    const struct kvd_room_status *s)
{
	struct kvd_error why = {0};

	if (s->state == KVD_FAILED)
		kvd_xfer_error(r->xfer[op], 0, &why);
	return ctl_failed(
		"%s: %s after %" PRIu64 " of %" PRIu64 " bytes%s%s",
		op == BENCH_PUSH ? "push" : "pull",
		s->state == KVD_FAILED ? kvd_code_name(s->error) : "no progress",
		s->bytes, r->c->rows * r->c->size, why.code ? ": " : "", why.message);
}

/* Waits for success; CTL_ERROR: it failed, or made no progress for timeout_ms. */
static int bench_run_finish(struct run *r, enum bench_op op)
{
	long ns = (long)(r->last_s[op] * 1e9 / 50);
	const struct timespec pause = {.tv_nsec = ns < PAUSE_NS_MIN   ? PAUSE_NS_MIN
						  : ns > PAUSE_NS_MAX ? PAUSE_NS_MAX
								      : ns};
	double end = clock_s() + r->c->timeout_ms / 1e3;
	struct kvd_room_status s;
	uint64_t moved = 0;
	int state;

	while ((state = kvd_xfer_state(r->xfer[op])) != KVD_SUCCESS) {
		if (state < 0 || kvd_xfer_read(r->xfer[op], &s) < 0)
			return bench_report(r->client, "transfer");
		if (state == KVD_FAILED)
			return bench_run_failed(r, op, &s);
		if (s.bytes != moved) {
			moved = s.bytes;
			end = clock_s() + r->c->timeout_ms / 1e3;
		} else if (clock_s() > end) {
			return bench_run_failed(r, op, &s);
		}
		nanosleep(&pause, NULL);
	}
	return 0;
}

static int timed(struct run *r, enum bench_op op, double *seconds_p)
{
	double begin = clock_s();

	if (bench_run_post(r, op) || bench_run_finish(r, op))
		return CTL_ERROR;
	*seconds_p = r->last_s[op] = clock_s() - begin;
	return 0;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static int bench_run_measure(struct run *r, struct bench_times times[BENCH_OPS])
{
	for (int op = 0; op < BENCH_OPS; op++)
		if (timed(r, (enum bench_op)op, &times[op].first_s))
			return CTL_ERROR;
	if (bench_run_compare(r))
		return CTL_ERROR;
	for (unsigned int i = 0; i < r->c->reps; i++)
		for (int op = 0; op < BENCH_OPS; op++)
			if (r->c->ops[op] && timed(r, (enum bench_op)op, &times[op].s[i]))
				return CTL_ERROR;
	for (int op = 0; op < BENCH_OPS; op++)
		qsort(times[op].s, r->c->reps, sizeof(double), by_value);
	return 0;
}

int bench_run(struct kvd_client *client, uint64_t attach,
	      const struct bench_ticket *ticket, const struct bench_memory *local,
	      const struct bench_case *c, struct bench_times times[BENCH_OPS])
{
	uint8_t *base = local->memory.address;
	struct run r = {.client = client,
			.c = c,
			.source = base,
			.landing = base + ticket->bytes};
	int e = bench_run_prepare(&r, attach, ticket);

	if (e == 0)
		e = bench_run_measure(&r, times);
	for (int op = 0; op < BENCH_OPS; op++) {
		if (r.xfer[op])
			kvd_xfer_release(r.xfer[op]);
		if (r.local[op])
			kvd_dlist_release(r.local[op]);
	}
	if (r.remote)
		kvd_dlist_release(r.remote);
	free(r.near);
	free(r.far);
	return e;
}
