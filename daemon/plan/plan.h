/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan: maps the bytes of a source to a destination.
 *
 * A plan is an immutable list of strided runs made from two layouts and two page lists
 * (or, by the builder, from explicit rows). Its rows, in the order of its runs, define
 * one byte stream: row 0's bytes, row 1's bytes, … Both daemons of a transfer make the
 * same plan from the same inputs, so the sender can gather that stream and the receiver
 * can scatter it; `digest` is then equal on both sides.
 *
 * Pure: no fd, clock, thread or device; any thread may read a plan.
 */
#ifndef KVD_PLAN_PLAN_H
#define KVD_PLAN_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/plan/layout.h"

#define PLAN_RUNS_MAX (1u << 24)
#define PLAN_ENDS_MAX 4096u

/* `count` rows of `len` bytes; row i is at src + i * src_stride, dst + i *
 * dst_stride. Offsets are relative to the buffer. Strides are two's complement
 * (a descending run has a negative one); unused when count is 1. */
struct plan_run {
	uint64_t src;
	uint64_t dst;
	uint64_t len;
	uint64_t count;
	int64_t src_stride;
	int64_t dst_stride;
	uint32_t src_buffer; /* index into the source layout's buffers */
	uint32_t dst_buffer;
};

struct plan {
	const struct plan_run *runs; /* ascending by (dst_buffer, dst) of row 0 */
	size_t run_count;
	uint64_t rows;	     /* sum of the runs' counts */
	uint64_t bytes;	     /* sum of len * count */
	uint64_t row_median; /* bytes, by row count; 0 without rows */
	uint64_t serial;     /* unique number of this object in this process */
	uint64_t digest;     /* over runs in order; equal plans, equal digests */
	/* The end of the rows in each buffer, 0: no rows; so bounds are checked per
	 * buffer, not per run. NULL, both: check the runs (over PLAN_ENDS_MAX buffers,
	 * or a row that starts before its buffer). */
	const uint64_t *src_ends, *dst_ends;
	uint32_t src_ends_count, dst_ends_count;
};

/* A half-open range of model layers; {0, UINT32_MAX} is all. */
struct plan_layers {
	uint32_t begin, end;
};

/* One view's pages on both sides (docs/internals/planner.md, "map"). Token t lies
 * in pages[(t - first) / page_tokens] at (t - first) % page_tokens. */
struct plan_map {
	const char *view;
	const uint32_t *src_pages;
	size_t src_page_count;
	uint64_t src_first_token;
	const uint32_t *dst_pages;
	size_t dst_page_count;
	uint64_t dst_first_token;
	/* token_end 0 with token_begin 0 means all tokens of both lists, unless
	 * tokens_set marks an empty range */
	uint64_t token_begin, token_end;
	bool tokens_set;
	struct plan_layers layers; /* {0, 0} is all, too */
	/* Of the tokens, only token_begin + select[i], ascending. The i-th has place
	 * dst_first_token + i in dst_pages. NULL: all of them. */
	const uint32_t *select;
	size_t select_count;
};

/* The units of one field that one source must send: computed by the cover. */
struct plan_want {
	uint16_t view;	/* index into the DESTINATION layout's views */
	uint16_t field; /* index into that layer's fields (destination layout) */
	uint32_t layer; /* the model's number */
	uint32_t first_unit, units;
};

struct plan_request {
	const struct layout *src, *dst;
	const struct plan_map *maps;
	size_t map_count;
	/* NULL: all common units; else only these unit intervals */
	const struct plan_want *wants;
	size_t want_count;
	uint64_t max_rows;  /* 0: no limit; ERR_LIMIT above it */
	uint64_t max_bytes; /* of plan_memory(), approximately; likewise */
	/* A plan that needs more than PLAN_RUNS_MAX runs is always ERR_LIMIT: request
	 * fewer pages at a time. */
};

/*
 * Make the plan. Rows are merged wherever bytes are neighbours on both sides. Errors
 * (ERR_INVAL, ERR_RANGE, ERR_DUP, ERR_LAYOUT, ERR_NOMEM, ERR_LIMIT) name the field and
 * the limit. Sides without common bytes give a plan of 0 runs. A destination byte reached
 * twice is ERR_DUP; source pages may repeat.
 */
int plan_make(const struct plan_request *req, struct plan **plan_p);
void plan_free(struct plan *plan); /* NULL is fine */
void plan_freep(struct plan **plan_p);

/* Heap bytes that the plan holds. */
size_t plan_memory(const struct plan *plan);
/* ERR_PLAN: the plan of the other side differs, or it requests another number of
 * bytes. */
int plan_check(const struct plan *plan, uint64_t digest, uint64_t bytes, uint64_t asked);

/*
 * Explicit rows (the xfer layer: descriptor lists). Overlaps and repeats are
 * legal, order is kept, neighbours merge and equal strides fold into runs.
 */
struct plan_builder;
int plan_builder_new(struct plan_builder **builder_p);
/* As plan_request.max_bytes. */
void plan_builder_limit(struct plan_builder *builder, uint64_t max_bytes);
void plan_builder_free(struct plan_builder *builder);
int plan_builder_add(struct plan_builder *builder, const struct plan_run *run);
/* Takes the builder's runs; the builder is empty afterwards. */
int plan_builder_finish(struct plan_builder *builder, struct plan **plan_p);

/*
 * Iterate over a plan's rows in stream order, from any byte position. A span is a piece
 * of one row; `plan_walk_next` returns at most max_bytes of it, and false at the end.
 * O(log runs) to seek, O(1) a step.
 */
struct plan_span {
	uint64_t src, dst, len;
	uint32_t src_buffer, dst_buffer;
};
struct plan_walk {
	const struct plan *plan;
	size_t run;	     /* current run */
	uint64_t row;	     /* row in that run */
	uint64_t row_offset; /* byte in that row */
};
void plan_walk_begin(struct plan_walk *walk, const struct plan *plan);
int plan_walk_seek(struct plan_walk *walk, const struct plan *plan, uint64_t byte);
bool plan_walk_next(struct plan_walk *walk, uint64_t max_bytes, struct plan_span *span_p);

/* Steps over finished and empty runs; false at the plan's end. */
static inline bool plan_walk_settle(struct plan_walk *walk)
{
	for (; walk->run < walk->plan->run_count; walk->run++) {
		const struct plan_run *run = &walk->plan->runs[walk->run];

		if (run->len > 0 && walk->row < run->count)
			return true;
		walk->row = 0;
		walk->row_offset = 0;
	}
	return false;
}

/* Whole rows of one run, or a part of one row. */
struct plan_block {
	const struct plan_run *run;
	uint64_t src, dst; /* of their first byte */
	uint64_t len, count;
};

/* The next rows, after plan_walk_settle(): the rest of a started row, or whole rows, or
 * the first part of a row. Inline: a run may be one short row. */
static inline struct plan_block plan_walk_rows(struct plan_walk *walk, uint64_t max_bytes,
					       uint64_t max_rows)
{
	const struct plan_run *run = &walk->plan->runs[walk->run];
	uint64_t off = walk->row_offset, row = walk->row;
	uint64_t rows = off ? 0 : run->count - row, len = run->len;

	/* a division costs as much as a short row: only where rows are left out */
	if (rows * len > max_bytes)
		rows = max_bytes / len;
	if (rows > max_rows)
		rows = max_rows;
	walk->row += rows;
	if (rows == 0) {
		rows = 1;
		len = run->len - off < max_bytes ? run->len - off : max_bytes;
		walk->row_offset += len;
		if (walk->row_offset == run->len) {
			walk->row_offset = 0;
			walk->row++;
		}
	}
	return (struct plan_block){
		.run = run,
		.src = run->src + row * (uint64_t)run->src_stride + off,
		.dst = run->dst + row * (uint64_t)run->dst_stride + off,
		.len = len,
		.count = rows,
	};
}

#endif
