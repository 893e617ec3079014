/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What it costs to post one work request of a plan of 100 000 rows: everything that
 * the daemon does on the way from the plan to the adapter's post_send(), completions
 * included, and little of an adapter: of a chain it is given the end only.
 *
 *   verbs_post [ROWS [ROUNDS [write|read|gather]]]
 *
 * Prints a JSON line each: work requests, doorbells, and the least CPU time for one over
 * all rounds. scripts/bench-verbs-post.sh counts instructions of it, too.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tests/lib/fake_verbs_impl.h"
#include "tests/lib/verbs_pair.h"

#define ROW 256u

static int (*adapter_post)(struct ibv_qp *qp, struct ibv_send_wr *wr,
			   struct ibv_send_wr **bad);
static uint64_t wrs, doorbells;
static const char *only;

/* Of a chain only its end goes to the adapter, without bytes: for the completion. */
static int post(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct ibv_send_wr last = {.opcode = IBV_WR_RDMA_WRITE};

	if (wr->opcode != IBV_WR_RDMA_WRITE && wr->opcode != IBV_WR_RDMA_READ)
		return adapter_post(qp, wr, bad);
	doorbells++;
	for (; wr->next; wr = wr->next)
		wrs++;
	wrs++;
	last.wr_id = wr->wr_id;
	last.send_flags = IBV_SEND_SIGNALED;
	return adapter_post(qp, &last, bad);
}

static double round_ns(const struct plan_run *run, uint64_t bytes, enum xp_kind kind)
{
	struct vp_transfer x;
	double begin;

	vp_transfer_init(&x, kind, run, 1, bytes);
	vp_post(&x);
	wrs = doorbells = 0;
	begin = (double)clock_of(CLOCK_THREAD_CPUTIME_ID);
	while (!x.done)
		vp_turn();
	begin = (double)clock_of(CLOCK_THREAD_CPUTIME_ID) - begin;
	if (x.op.result)
		fprintf(stderr, "verbs_post: %s\n", x.op.err.text);
	vp_transfer_fini(&x);
	return begin / (double)wrs;
}

static void measure(const char *name, enum xp_kind kind, uint64_t rows,
		    unsigned int rounds, uint64_t src_stride, uint64_t dst_stride)
{
	const struct plan_run run = {.len = ROW,
				     .count = rows,
				     .src_stride = src_stride,
				     .dst_stride = dst_stride};
	uint64_t bytes = (rows + 1) * (src_stride > dst_stride ? src_stride : dst_stride);
	double best = 0;

	if (only && strcmp(only, name) != 0)
		return;
	for (unsigned int i = 0; i < rounds; i++) {
		double ns = round_ns(&run, bytes, kind);

		if (i == 0 || ns < best)
			best = ns;
	}
	printf("{\"name\": \"%s\", \"rows\": %llu, \"wrs\": %llu, \"doorbells\": %llu, "
	       "\"ns\": %.1f}\n",
	       name, (unsigned long long)rows, (unsigned long long)wrs,
	       (unsigned long long)doorbells, best);
}

int main(int argc, char **argv)
{
	uint64_t rows = argc > 1 ? strtoull(argv[1], NULL, 10) : 100000;
	unsigned int rounds = argc > 2 ? (unsigned int)strtoul(argv[2], NULL, 10) : 5;

	vp_begin_pair(NULL);
	adapter_post = fake_table.post_send;
	fake_table.post_send = post;
	only = argc > 3 ? argv[3] : NULL;
	measure("write", XP_WRITE, rows, rounds, 2 * ROW, 3 * ROW);
	measure("read", XP_READ, rows, rounds, 2 * ROW, 3 * ROW);
	measure("gather", XP_WRITE, rows, rounds, 2 * ROW, ROW);
	vp_end(NULL);
	return 0;
}
