/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shard: how ranks share a model and a request: heads over tensor-parallel
 * ranks, pages over context-parallel ranks, tokens over decode-context ranks,
 * chunks over time, and which prefill ranks a decode rank talks to.
 *
 * These are the engines' own rules, for adapters that must answer as the engine
 * would. The plan itself needs none of them: it works on the intervals that the
 * layouts state, even or not.
 */
#ifndef KVD_PYTHON_SHARD_H
#define KVD_PYTHON_SHARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * The units (heads, channels, groups) of one rank: total / size each when total
 * divides by size; one each, shared by size / total neighbouring ranks, when
 * size divides by total. Anything else is refused (ERR_INVAL), as both engines
 * do: 6 heads on 4 ranks, 4 heads on 6.
 */
int shard_units(uint32_t total, uint32_t size, uint32_t rank, uint32_t *first_p,
		uint32_t *units_p);

/* ---- which prefill ranks ---- */

struct shard_sglang {
	uint32_t prefill_tp, prefill_cp, prefill_pp; /* attention sizes */
	uint32_t decode_tp, decode_pp;
	uint32_t decode_rank; /* engine rank; wraps at decode_tp */
	uint32_t decode_pp_rank;
	bool mla, hybrid_mla;
	bool all_cp; /* every context-parallel rank transfers */
};

/* tp ranks are [tp_first, tp_first + tp_count), and so on. */
struct shard_sglang_ranks {
	uint32_t tp_first, tp_count;
	uint32_t cp_first, cp_count;
	uint32_t pp_first, pp_count;
	uint32_t dst_info;  /* TransferInfos that a prefill rank waits for */
	uint32_t responses; /* prefill ranks that a decode rank waits for */
	/* pure MLA with more prefill ranks: all but tp_first are asked, but send
	 * nothing */
	bool dummies;
};

/* ERR_INVAL for sizes that do not divide, and for different PP sizes unless the
 * decode side has one stage. SGLang a4ffb996d, common/conn.py. */
int shard_sglang_ranks(const struct shard_sglang *in, struct shard_sglang_ranks *out_p);

/*
 * The prefill ranks that vLLM's decode rank reads attention heads from, lowest
 * first, one per distinct head interval; at most `cap`. `state`: SSM groups,
 * which are read from every rank of the ratio. vLLM b8fb56d97, nixl/tp_mapping.py.
 */
struct shard_vllm {
	uint32_t local_tp, local_rank, remote_tp;
	uint32_t kv_heads;
	bool mla;
};
int shard_vllm_sources(const struct shard_vllm *in, bool state, uint32_t *ranks,
		       size_t cap, size_t *count_p);

/* ---- a request's pages and tokens ---- */

/* Pages [begin, end) of `pages` that context-parallel rank `rank` sends: the
 * first pages % size ranks have one more. */
void shard_cp_pages(uint64_t pages, uint32_t size, uint32_t rank, uint64_t *begin_p,
		    uint64_t *end_p);

/*
 * Decode context parallelism: the token at position i lives on rank i % size,
 * its pages filled without gaps. Source and destination token slots (page *
 * page_size + offset) of one chunk for one rank: page lists of a view of one
 * token a page.
 */
struct shard_dcp {
	const uint32_t *src_pages, *dst_pages;
	size_t src_page_count, dst_page_count;
	uint32_t page_size, size, rank;
	uint64_t chunk_page; /* pages of the request before this chunk */
	uint64_t prefix;     /* tokens that the decode side had, in no page here */
	uint64_t tokens;     /* of the chunk; 0 = all of its pages */
};
/* `src` and `dst` hold `cap` entries each; ERR_RANGE when the destination pages
 * end before the tokens do. */
int shard_dcp_tokens(const struct shard_dcp *in, uint32_t *src, uint32_t *dst, size_t cap,
		     size_t *count_p);

/* ---- chunks ---- */

/*
 * The sends of a chunked prefill: a chunk that is not the last is cut down to
 * whole pages, one that is empty after that is not sent; the last is always
 * sent, even empty (its aux bytes). SGLang a4ffb996d, prefill.py send_kv_chunk.
 */
struct shard_chunks {
	uint64_t prompt, page_size, chunk, prefix; /* tokens */
	uint64_t computed, sent;		   /* tokens; start with zero */
	bool started, done;
};
struct shard_chunk {
	uint64_t token_begin, token_end;
	uint64_t page_begin, page_end; /* in the request's page list after the prefix */
	bool last;
};
/* False after the last. */
bool shard_chunks_next(struct shard_chunks *chunks, struct shard_chunk *chunk_p);

/* The next piece of [begin, end) on a grid of `grid` tokens from `base` on:
 * returns where it ends. */
uint64_t shard_grid_end(uint64_t begin, uint64_t end, uint64_t base, uint64_t grid);

#endif
