/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard: the engines' rules of which rank holds what.
 *
 * As SGLang at commit a4ffb996d behaves (common/conn.py _resolve_rank_mapping,
 * common/utils.py, prefill.py) and vLLM at commit b8fb56d97 (nixl/tp_mapping.py).
 * tests/golden holds what their own functions answer; test_plan_golden compares.
 *
 * Replicated heads: with more ranks than heads the head of a rank is a division
 * (rank / (size / heads)), not a remainder; a remainder gives ranks that share a
 * head different heads (sglang #19086, #30997, #31295).
 */
#include "python/src/shard.h"

#include "daemon/base/err.h"

int shard_units(uint32_t total, uint32_t size, uint32_t rank, uint32_t *first_p,
		uint32_t *units_p)
{
	if (total == 0 || size == 0)
		return err_raise(ERR_INVAL, "shard: %s is 0", total ? "size" : "total");
	if (rank >= size)
		return err_raise(ERR_RANGE, "shard: rank %u of %u", rank, size);
	if (total % size == 0) {
		*units_p = total / size;
		*first_p = rank * *units_p;
		return 0;
	}
	if (size % total == 0) {
		*units_p = 1;
		*first_p = rank / (size / total);
		return 0;
	}
	return err_raise(
		ERR_INVAL,
		"shard: %u units do not divide over %u ranks, nor ranks over units",
		total, size);
}

/* ---- which prefill ranks ---- */

static int ratio(const char *name, uint32_t a, uint32_t b, uint32_t *ratio_p)
{
	if (a == 0 || b == 0)
		return err_raise(ERR_INVAL, "shard: %s size is 0", name);
	if ((a > b ? a % b : b % a) != 0)
		return err_raise(ERR_INVAL, "shard: %s sizes %u and %u do not divide",
				 name, a, b);
	*ratio_p = a > b ? a / b : b / a;
	return 0;
}

int shard_sglang_ranks(const struct shard_sglang *in, struct shard_sglang_ranks *out_p)
{
	struct shard_sglang_ranks out = {.tp_count = 1, .cp_count = 1, .pp_count = 1};
	uint32_t rank, n;
	int r = ratio("tp", in->prefill_tp, in->decode_tp, &n);

	if (r < 0)
		return err_pass(r);
	if (in->prefill_cp == 0 || in->prefill_pp == 0 || in->decode_pp == 0)
		return err_raise(ERR_INVAL, "shard: a cp or pp size is 0");
	if (in->decode_pp != 1 && in->decode_pp != in->prefill_pp)
		return err_raise(ERR_INVAL, "shard: pp %u here, %u there", in->decode_pp,
				 in->prefill_pp);
	if (in->decode_pp_rank >= in->decode_pp)
		return err_raise(ERR_RANGE, "shard: pp rank %u of %u", in->decode_pp_rank,
				 in->decode_pp);
	rank = in->decode_rank % in->decode_tp;
	out.dst_info = out.responses = 1;
	if (in->decode_tp >= in->prefill_tp) {
		out.tp_first = rank / n;
		out.dst_info = n;
	} else {
		out.tp_first = rank * n;
		out.tp_count = n;
		out.dummies = in->mla && !in->hybrid_mla;
		out.responses = out.dummies ? 1 : n;
	}
	if (in->all_cp)
		out.cp_count = in->prefill_cp;
	if (in->decode_pp == 1)
		out.pp_count = in->prefill_pp;
	else
		out.pp_first = in->decode_pp_rank;
	out.responses *= out.cp_count * out.pp_count;
	*out_p = out;
	return 0;
}

static uint32_t head_of(const struct shard_vllm *in, uint32_t remote_rank)
{
	return (uint32_t)((uint64_t)remote_rank * in->kv_heads / in->remote_tp);
}

int shard_vllm_sources(const struct shard_vllm *in, bool state, uint32_t *ranks,
		       size_t cap, size_t *count_p)
{
	uint32_t n, first, count = 1;
	size_t found = 0;
	int r = ratio("tp", in->local_tp, in->remote_tp, &n);

	if (r < 0)
		return err_pass(r);
	if (in->local_rank >= in->local_tp || in->kv_heads == 0)
		return err_raise(ERR_RANGE, "shard: rank %u of %u, %u heads",
				 in->local_rank, in->local_tp, in->kv_heads);
	if (in->local_tp >= in->remote_tp || (in->mla && !state)) {
		first = (uint32_t)((uint64_t)in->local_rank * in->remote_tp /
				   in->local_tp);
	} else {
		first = in->local_rank * n;
		count = n;
	}
	for (uint32_t i = 0; i < count; i++) {
		bool repeats = !state && i > 0 && in->remote_tp > in->kv_heads &&
			       head_of(in, first + i) == head_of(in, first + i - 1);

		if (repeats)
			continue;
		if (found == cap)
			return err_raise(ERR_LIMIT, "shard: more than %zu sources", cap);
		ranks[found++] = first + i;
	}
	*count_p = found;
	return 0;
}

/* ---- a request's pages and tokens ---- */

void shard_cp_pages(uint64_t pages, uint32_t size, uint32_t rank, uint64_t *begin_p,
		    uint64_t *end_p)
{
	uint64_t each = pages / size, more = pages % size;

	*begin_p = rank * each + (rank < more ? rank : more);
	*end_p = *begin_p + each + (rank < more ? 1 : 0);
}

int shard_dcp_tokens(const struct shard_dcp *in, uint32_t *src, uint32_t *dst, size_t cap,
		     size_t *count_p)
{
	uint64_t tokens = in->tokens, held, begin;
	size_t n = 0;

	*count_p = 0;
	if (in->page_size == 0 || in->size == 0 || in->rank >= in->size)
		return err_raise(ERR_INVAL, "dcp: page size %u, rank %u of %u",
				 in->page_size, in->rank, in->size);
	held = (uint64_t)in->src_page_count * in->page_size;
	if (tokens == 0)
		tokens = held;
	if (tokens > held)
		return err_raise(ERR_RANGE, "dcp: %llu tokens, src_pages hold %llu",
				 (unsigned long long)tokens, (unsigned long long)held);
	if (in->prefix % in->size != 0)
		return err_raise(ERR_INVAL, "dcp: prefix %llu is no multiple of size %u",
				 (unsigned long long)in->prefix, in->size);
	begin = in->prefix + in->chunk_page * in->page_size;
	/* the first token of the chunk that is this rank's */
	for (uint64_t i = (in->rank + in->size - begin % in->size) % in->size; i < tokens;
	     i += in->size) {
		uint64_t at = (begin + i) / in->size - in->prefix / in->size;

		if (at / in->page_size >= in->dst_page_count)
			return err_raise(ERR_RANGE,
					 "dcp: dst_pages hold %zu pages, token %llu of "
					 "the rank needs one more",
					 in->dst_page_count, (unsigned long long)at);
		if (n == cap)
			return err_raise(ERR_LIMIT, "dcp: more than %zu tokens", cap);
		src[n] = in->src_pages[i / in->page_size] * in->page_size +
			 (uint32_t)(i % in->page_size);
		dst[n] = in->dst_pages[at / in->page_size] * in->page_size +
			 (uint32_t)(at % in->page_size);
		n++;
	}
	*count_p = n;
	return 0;
}

/* ---- chunks ---- */

static uint64_t min_u64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

bool shard_chunks_next(struct shard_chunks *c, struct shard_chunk *chunk_p)
{
	if (!c->started) {
		c->computed = c->sent = min_u64(c->prefix, c->prompt);
		c->started = true;
	}
	while (!c->done) {
		uint64_t begin = c->sent, end;

		c->computed =
			c->chunk ? min_u64(c->computed + c->chunk, c->prompt) : c->prompt;
		c->done = c->computed == c->prompt;
		end = c->done ? c->prompt : c->computed - c->computed % c->page_size;
		if (end <= begin && !c->done)
			continue;
		*chunk_p = (struct shard_chunk){
			.token_begin = begin,
			.token_end = end,
			.page_begin = (begin - c->prefix) / c->page_size,
			.page_end = (end - c->prefix + c->page_size - 1) / c->page_size,
			.last = c->done};
		c->sent = end;
		return true;
	}
	return false;
}

uint64_t shard_grid_end(uint64_t begin, uint64_t end, uint64_t base, uint64_t grid)
{
	uint64_t next = base + ((begin - base) / grid + 1) * grid;

	return min_u64(next, end);
}
