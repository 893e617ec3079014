/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A batch becomes jobs of daemon/math. The page tables of all requests, one behind the
 * other, are the pages of one "chunk", so a request's tokens are a range of it and every
 * query token is a span.
 *
 * Spans of the same range are one group of rows, for which the kernel reads K and V once.
 * A prefill has another range for each query token; so its tokens are taken in tiles of
 * 16: all of a tile attend to the tokens before the tile together, then each one to its
 * part of the triangle behind them, and both parts are merged. The triangle reads up to
 * 16 tokens for each query token, which is one step of the vector kernels.
 *
 * Threads, if more than one is asked for, are started and joined in the call, and take
 * jobs in turn: one costs about as much as attention of 2000 rows to a token, so each
 * has SHARE_WORK at least. The memory of a call (MLA: 4 MiB) is kept for the next one:
 * malloc would map, zero and unmap it in each. A call that finds it taken makes its own.
 * There is no lock, so a fork may happen at any time.
 */
#include "python/src/paged.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"
#include "daemon/math/merge.h"

#define TILE 16u			/* query tokens */
#define JOB_ROWS 1024u			/* and as many for the triangles */
#define SHARE_WORK (UINT64_C(1) << 14)	/* rows x tokens of a thread */
#define SHARE_JOBS 4u			/* of a thread, so that all end together */
#define KEPT_BYTES (UINT64_C(64) << 20) /* a larger block is freed */
#define ALIGN 64u

_Static_assert(2 * JOB_ROWS <= ATTEND_ROWS_MAX, "a job is one call of the kernel");

struct block {
	size_t bytes;
	uint8_t memory[];
};

static _Atomic(struct block *) kept;

/* Adjacent query tokens of one request. */
struct tile {
	uint32_t first, count;
	uint64_t begin; /* of the request's tokens, in the chunk */
};

struct run {
	const struct paged *paged;
	struct attend_kv kv;
	struct tile *tiles;
	uint32_t *jobs; /* first tile of each, and the end */
	uint32_t tile_count, job_count;
	uint32_t tile, job_tokens; /* query tokens, at most */
	unsigned int threads;
	_Atomic uint32_t next; /* job */
};

struct result {
	float *o, *m, *l;
};

/* What a thread works with. */
struct lane {
	struct run *run;
	pthread_t thread;
	struct attend_span *spans;
	uint32_t *cut; /* numbers of the spans whose triangle is the next span */
	uint32_t span_count, cut_count;
	uint32_t first;		 /* query token of the job */
	struct result out, rest; /* of the job's rows; rest: of their triangles */
	uint8_t *scratch;
};

/* ---- checks ---- */

/* Does the last byte of a field have an address? */
static bool field_fits(const struct paged *paged, const struct attend_field *field,
		       uint64_t bytes)
{
	const uint64_t count[3] = {paged->pages, paged->page_tokens,
				   paged->shape.kv_heads};
	const uint64_t stride[3] = {field->page_stride, field->token_stride,
				    field->head_stride};
	uint64_t end = (uint64_t)(uintptr_t)field->base, part;

	for (size_t i = 0; i < ARRAY_LEN(count); i++) {
		if (__builtin_mul_overflow(count[i] - 1, stride[i], &part) ||
		    __builtin_add_overflow(end, part, &end))
			return false;
	}
	return !__builtin_add_overflow(end, bytes, &end) && end <= PTRDIFF_MAX;
}

static int cache_check(const struct paged *paged)
{
	const struct attend_shape *shape = &paged->shape;
	const uint64_t value = value_bytes(shape->kv_type);
	const char *why = attend_shape_fault(shape);

	if (why)
		return err_raise(ERR_INVAL, "%s", why);
	if (shape->heads > ATTEND_ROWS_MAX)
		return err_raise(ERR_INVAL, "heads: %u (at most %u)", shape->heads,
				 ATTEND_ROWS_MAX);
	if (!paged->pages || !paged->page_tokens)
		return err_raise(ERR_INVAL, "cache: no tokens");
	if (!field_fits(paged, &paged->k, shape->dqk * value) ||
	    (shape->kind == ATTEND_GQA &&
	     !field_fits(paged, &paged->v, shape->dv * value)) ||
	    !field_fits(paged, &paged->k_scale, sizeof(float)) ||
	    !field_fits(paged, &paged->v_scale, sizeof(float)))
		return err_raise(ERR_INVAL, "cache: ends behind the last address");
	return 0;
}

static int table_check(const struct paged *paged)
{
	uint64_t most = UINT32_MAX / paged->page_tokens, sum = 0, queries = 0;

	for (uint32_t i = 0; i < paged->request_count; i++) {
		sum += paged->counts[i];
		queries += paged->queries[i];
	}
	if (queries != paged->tokens)
		return err_raise(ERR_INVAL, "queries: %llu in all, but q has %u tokens",
				 (unsigned long long)queries, paged->tokens);
	if (sum != paged->table_count)
		return err_raise(ERR_INVAL, "page_counts: %llu in all, but pages has %u",
				 (unsigned long long)sum, paged->table_count);
	if (sum > most)
		return err_raise(ERR_INVAL, "pages: %llu (at most %llu of %u tokens)",
				 (unsigned long long)sum, (unsigned long long)most,
				 paged->page_tokens);
	for (uint32_t i = 0; i < paged->table_count; i++) {
		if (paged->table[i] >= paged->pages)
			return err_raise(
				ERR_INVAL, "pages[%u]: %u, but the cache has %llu pages",
				i, paged->table[i], (unsigned long long)paged->pages);
	}
	return 0;
}

int paged_check(const struct paged *paged)
{
	uint32_t token = 0;
	int r = cache_check(paged);

	if (r >= 0)
		r = table_check(paged);
	if (r < 0)
		return err_pass(r);
	for (uint32_t i = 0; i < paged->request_count; i++) {
		uint64_t most = (uint64_t)paged->counts[i] * paged->page_tokens;

		for (uint32_t n = paged->queries[i]; n > 0; n--, token++) {
			if (paged->ends[token] > most)
				return err_raise(
					ERR_INVAL,
					"ends[%u]: %u, but the pages of request %u "
					"have %llu tokens",
					token, paged->ends[token], i,
					(unsigned long long)most);
		}
	}
	return 0;
}

/* ---- tiles and jobs ---- */

/* Query tokens [first, first + count) of one request, as tiles. */
static void run_tiles(struct run *run, uint32_t first, uint32_t count, uint64_t begin)
{
	uint32_t n;

	for (; count > 0; first += n, count -= n) {
		struct tile *tile = &run->tiles[run->tile_count];
		uint32_t job = run->jobs[run->job_count];

		n = count < run->tile ? count : run->tile;
		*tile = (struct tile){.first = first, .count = n, .begin = begin};
		if (first + n - run->tiles[job].first > run->job_tokens)
			run->jobs[++run->job_count] = run->tile_count;
		run->tile_count++;
	}
}

static void run_plan(struct run *run)
{
	const struct paged *paged = run->paged;
	uint64_t begin = 0;
	uint32_t first = 0;

	run->jobs[0] = 0;
	for (uint32_t i = 0; i < paged->request_count; i++) {
		run_tiles(run, first, paged->queries[i], begin);
		first += paged->queries[i];
		begin += (uint64_t)paged->counts[i] * paged->page_tokens;
	}
	run->jobs[++run->job_count] = run->tile_count;
}

/* ---- a job ---- */

/* The rows of a query token, and of the tokens [begin, end) of its request. */
static void lane_span(struct lane *lane, const struct tile *tile, uint32_t token,
		      struct result to, uint32_t begin, uint32_t end)
{
	const struct paged *paged = lane->run->paged;
	size_t row = (size_t)(token - lane->first) * paged->shape.heads;

	lane->spans[lane->span_count++] = (struct attend_span){
		.q = paged->q + token * paged->q_stride,
		.o = to.o + row * paged->shape.dv,
		.m = to.m + row,
		.l = to.l + row,
		.rows = paged->shape.heads,
		.begin = (uint32_t)(tile->begin + begin),
		.end = (uint32_t)(tile->begin + end),
	};
}

/* A tile behind few tokens, or of one query token, needs no triangle. */
static void lane_tile(struct lane *lane, const struct tile *tile)
{
	const uint32_t *ends = lane->run->paged->ends;
	uint32_t least = UINT32_MAX, last = tile->first + tile->count, i;
	bool cut;

	for (i = tile->first; i < last; i++)
		least = ends[i] < least ? ends[i] : least;
	cut = tile->count > 1 && least >= TILE;
	for (i = tile->first; i < last; i++) {
		lane_span(lane, tile, i, lane->out, 0, cut ? least : ends[i]);
		if (!cut || ends[i] == least)
			continue;
		lane->cut[lane->cut_count++] = lane->span_count;
		lane_span(lane, tile, i, lane->rest, least, ends[i]);
	}
}

/* m and l of `rows` rows become the logarithm, in place of m. */
static void lane_log(const struct lane *lane, size_t rows)
{
	float *m = lane->out.m;

	for (size_t i = 0; i < rows; i++)
		m[i] = lane->out.l[i] == 0 ? -INFINITY : m[i] + logf(lane->out.l[i]);
}

static void lane_job(struct lane *lane, const struct tile *tile, const struct tile *end)
{
	const struct paged *paged = lane->run->paged;
	uint32_t heads = paged->shape.heads, dv = paged->shape.dv, i;
	struct attend_job job = {
		.shape = &paged->shape, .kv = &lane->run->kv, .spans = lane->spans};

	lane->first = tile->first;
	lane->span_count = lane->cut_count = 0;
	lane->out.o = paged->o + (size_t)tile->first * heads * dv;
	lane->out.m = paged->lse + (size_t)tile->first * heads;
	for (; tile < end; tile++)
		lane_tile(lane, tile);
	job.span_count = lane->span_count;
	(void)attend_run(paged->isa, &job, lane->scratch);
	for (i = 0; i < lane->cut_count; i++) {
		const struct attend_span *rest = &lane->spans[lane->cut[i]],
					 *span = rest - 1;
		const struct merge_part parts[2] = {{span->o, span->m, span->l},
						    {rest->o, rest->m, rest->l}};

		merge_rows(span->o, span->m, span->l, parts, 2, heads, dv);
	}
	lane_log(lane, (size_t)(end[-1].first + end[-1].count - lane->first) * heads);
}

static void *lane_work(void *arg)
{
	struct lane *lane = arg;
	struct run *run = lane->run;
	uint32_t job;

	while ((job = atomic_fetch_add(&run->next, 1)) < run->job_count)
		lane_job(lane, run->tiles + run->jobs[job],
			 run->tiles + run->jobs[job + 1]);
	return NULL;
}

/* ---- a call ---- */

/* The next piece of a block; of none: only its size counts. */
static void *piece(uint8_t *block, size_t *at, size_t bytes)
{
	void *begin = block ? block + *at : NULL;

	*at += (bytes + ALIGN - 1) / ALIGN * ALIGN;
	return begin;
}

static void lane_place(struct run *run, struct lane *lane, uint8_t *block, size_t *at)
{
	const struct attend_shape *shape = &run->paged->shape;
	uint32_t tokens = run->job_tokens, rows = tokens * shape->heads;

	lane->run = run;
	lane->spans = piece(block, at, 2 * tokens * sizeof(*lane->spans));
	lane->cut = piece(block, at, tokens * sizeof(*lane->cut));
	lane->out.l = piece(block, at, rows * sizeof(float));
	lane->rest.o = piece(block, at, (size_t)rows * shape->dv * sizeof(float));
	lane->rest.m = piece(block, at, rows * sizeof(float));
	lane->rest.l = piece(block, at, rows * sizeof(float));
	lane->scratch = piece(block, at, attend_scratch_bytes(shape, 2 * rows));
}

/* The bytes of all that a call needs; places it in the block, if there is one. */
static size_t run_place(struct run *run, struct lane *lanes, uint8_t *block)
{
	size_t tokens = run->paged->tokens, at = 0;

	run->tiles = piece(block, &at, tokens * sizeof(*run->tiles));
	run->jobs = piece(block, &at, (tokens + 1) * sizeof(*run->jobs));
	for (unsigned int i = 0; i < run->threads; i++)
		lane_place(run, &lanes[i], block, &at);
	return at;
}

/* How many threads, and how large a job. */
static void run_share(struct run *run)
{
	const struct paged *paged = run->paged;
	uint32_t heads = paged->shape.heads, most = JOB_ROWS / heads, share;
	uint64_t work = 0;

	most = most ? most : 1;
	run->tile = most < TILE ? most : TILE;

	for (uint32_t i = 0; i < paged->tokens; i++)
		work += (uint64_t)paged->ends[i] * heads;
	work /= SHARE_WORK;
	run->threads = work < paged->threads ? (unsigned int)work : paged->threads;
	run->threads = run->threads ? run->threads : 1;
	share = run->threads > 1 ? paged->tokens / (run->threads * SHARE_JOBS) : most;
	share = share > run->tile ? share : run->tile;
	run->job_tokens = share < most ? share : most;
}

static struct block *block_take(size_t bytes)
{
	struct block *block = atomic_exchange(&kept, NULL);

	if (block && block->bytes >= bytes)
		return block;
	mem_free(block);
	block = mem_alloc(sizeof(*block) + bytes + ALIGN);
	if (block)
		block->bytes = bytes;
	return block;
}

int paged_run(const struct paged *paged)
{
	struct lane lanes[PAGED_THREADS_MAX] = {0};
	struct run run = {.paged = paged,
			  .kv = {.k = paged->k,
				 .v = paged->v,
				 .k_scale = paged->k_scale,
				 .v_scale = paged->v_scale,
				 .pages = paged->table,
				 .page_tokens = paged->page_tokens,
				 .tokens = paged->table_count * paged->page_tokens}};
	struct block *block;
	unsigned int i, started;

	if (paged->tokens == 0)
		return 0;
	run_share(&run);
	block = block_take(run_place(&run, lanes, NULL));
	if (!block)
		return -ENOMEM;
	run_place(&run, lanes,
		  block->memory + (ALIGN - (uintptr_t)block->memory % ALIGN) % ALIGN);
	run_plan(&run);
	for (started = 1; started < run.threads; started++)
		if (thread_start("kvd-attend", lane_work, &lanes[started],
				 &lanes[started].thread) < 0) {
			err_clear(); /* the others do its work */
			break;
		}
	lane_work(&lanes[0]);
	for (i = 1; i < started; i++)
		pthread_join(lanes[i].thread, NULL);
	if (block->bytes <= KEPT_BYTES)
		block = atomic_exchange(&kept, block);
	mem_free(block);
	return 0;
}
