/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pack: which bytes of a plan use a staging buffer (gather or scatter), and which are
 * addressed in place. Used by the transports.
 *
 * Properties outside the plan are not considered: memory that a transport cannot address
 * at all (of another process, or of a GPU) uses a buffer regardless of its rows.
 *
 * Pure; any thread.
 */
#ifndef KVD_PLAN_PACK_H
#define KVD_PLAN_PACK_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/plan/plan.h"

/* ---- tcp ---- */
/* A transfer up to this size is sent inside its request, or the answer. */
#define PACK_EAGER_MAX (64u << 10)
#define PACK_FRAME_BYTES (256u << 10)
/* Rows are passed to the kernel while a frame has at most so many; more, and therefore
 * shorter, rows are packed. */
#define PACK_FRAME_ROWS 128u
/* Does one side of [begin, end) have at most `rows_max` rows, neighbours counted as
 * one? Takes time in proportion to the runs of the range, at most rows_max of them. */
bool pack_few_rows(const struct plan *plan, bool is_src, uint64_t begin, uint64_t end,
		   unsigned int rows_max);

/* ---- ucx ---- */
/* A row of this size or more is sent in place. */
#define PACK_DIRECT_MIN (16u << 10)
/* Rows of a slice that are moved in place where libucp moves bytes by the CPU (tcp);
 * with an adapter it is one. */
#define PACK_SLICE_ROWS 32u
/* The slice that the source sends next, from byte `at`, at most `most` bytes; true:
 * from at most `rows_max` rows in place; false: gathered from rows that are not
 * adjacent. It is written in place if it is as few rows at the destination
 * (pack_few_rows()). */
bool pack_slice(const struct plan *plan, uint64_t at, uint64_t most,
		unsigned int rows_max, uint64_t *length_p);

/* ---- verbs ---- */
#define PACK_SGE_MAX 30u
/* Bytes per work request, on average over the first rows. A request has one range on
 * the remote side and up to sge_max on the local one. 0: no bytes. */
uint32_t pack_request_bytes(const struct plan *plan, bool write, uint32_t sge_max);
/* Are requests so short and so many that the cost of packing should be computed? */
bool pack_requests(uint64_t bytes, uint32_t request_bytes);
/* Packing pays if a request costs more than copying its bytes at both ends. */
static inline bool pack_cheaper(double request_ns, double copy_ns)
{
	return request_ns > 2 * copy_ns;
}

#endif
