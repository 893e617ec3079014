/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_explain: a plan as text.
 *
 * For each field that both sides hold: the units to copy, the resulting row size, and the
 * first dimension in which rows are not contiguous, with the strides of both sides.
 * Consecutive layers with the same text are printed as one line.
 */
#include "ctl/plan.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/plan/pack.h"
#include "daemon/plan/plan.h"
#include "daemon/plan/plan_private.h"

#define LINE_MAX 480

struct pair {
	const struct layout_view *src_view, *dst_view;
	const struct layout_field *src, *dst;
	uint32_t first, units;
	uint32_t more; /* further wants of the field */
};

/* One step of merging: contiguous if both strides equal the row's length. */
struct step {
	const char *what;
	uint64_t count, src, dst;
};

static bool units_common(struct pair *p)
{
	uint64_t s_end = (uint64_t)p->src->first_unit + p->src->units;
	uint64_t d_end = (uint64_t)p->dst->first_unit + p->dst->units;
	uint64_t end = s_end < d_end ? s_end : d_end;

	p->first = p->src->first_unit > p->dst->first_unit ? p->src->first_unit
							   : p->dst->first_unit;
	p->units = end > p->first ? (uint32_t)(end - p->first) : 0;
	return p->units > 0;
}

/* Restricts the common units to the wanted ones. */
static void units_wanted(const struct plan_request *req, struct pair *p, uint32_t layer,
			 uint32_t field)
{
	struct plan_want key = {.view = (uint16_t)(p->dst_view - req->dst->views),
				.field = (uint16_t)field,
				.layer = layer};
	size_t from, to;

	if (!req->wants)
		return;
	from = plan_want_find(req->wants, req->want_count, &key);
	key.first_unit = UINT32_MAX;
	to = plan_want_find(req->wants, req->want_count, &key);
	p->first = from < to ? req->wants[from].first_unit : p->first;
	p->units = from < to ? req->wants[from].units : 0;
	p->more = from < to ? (uint32_t)(to - from - 1) : 0;
}

/* Units and tokens, the one with the smaller destination stride first. */
static void steps_of(const struct pair *p, struct step steps[3])
{
	uint32_t tokens = p->src_view->page_tokens < p->dst_view->page_tokens
				  ? p->src_view->page_tokens
				  : p->dst_view->page_tokens;
	struct step unit = {"units", p->units, p->src->unit_stride, p->dst->unit_stride};
	struct step token = {"tokens", tokens, p->src->token_stride,
			     p->dst->token_stride};
	bool token_first = tokens > 1 && p->dst->token_stride < p->dst->unit_stride;

	steps[0] = token_first ? token : unit;
	steps[1] = token_first ? unit : token;
	steps[2] = (struct step){"pages", 2, p->src->page_stride, p->dst->page_stride};
}

/* "rows of 2048 bytes, 16 per page; tokens are not contiguous: …" */
static void describe_rows(const struct pair *p, char *out, size_t size)
{
	struct step steps[3];
	uint64_t row = p->dst->unit_bytes, rows = 1;
	const struct step *apart = NULL;

	steps_of(p, steps);
	for (int i = 0; i < 3; i++) {
		const struct step *s = &steps[i];

		if (s->count <= 1)
			continue;
		if (!apart && s->src == row && s->dst == row) {
			row *= i < 2 ? s->count : 1;
			continue;
		}
		if (!apart)
			apart = s;
		if (i < 2)
			rows *= s->count;
	}
	if (!apart)
		snprintf(out, size,
			 "whole pages of %" PRIu64 " bytes; adjacent pages merge", row);
	else
		snprintf(out, size,
			 "rows of %" PRIu64 " bytes, %" PRIu64
			 " per page; %s are not contiguous: stride %" PRIu64
			 " in the source, %" PRIu64 " in the destination",
			 row, rows, apart->what, apart->src, apart->dst);
}

static void plan_explain_describe(const struct plan_request *req, const struct pair *p,
				  char *line)
{
	char rows[LINE_MAX / 2], more[48] = "";

	if (p->units == 0 && req->wants) {
		snprintf(line, LINE_MAX, "field %s: nothing wanted from rank %u",
			 p->dst->name, req->src->rank);
		return;
	}
	if (p->units == 0) {
		snprintf(line, LINE_MAX,
			 "field %s: nothing in common (rank %u holds units [%u,%u), rank "
			 "%u [%u,%u))",
			 p->dst->name, req->src->rank, p->src->first_unit,
			 p->src->first_unit + p->src->units, req->dst->rank,
			 p->dst->first_unit, p->dst->first_unit + p->dst->units);
		return;
	}
	describe_rows(p, rows, sizeof(rows));
	if (p->more)
		snprintf(more, sizeof(more), " and %u more ranges", p->more);
	snprintf(line, LINE_MAX,
		 "field %s: units [%u,%u)%s of %u, rank %u -> rank %u: %s", p->dst->name,
		 p->first, p->first + p->units, more, p->dst->total_units, req->src->rank,
		 req->dst->rank, rows);
}

static void layers_print(FILE *out, uint32_t first, uint32_t last, const char *line)
{
	if (first == last)
		fprintf(out, "  layer %u %s\n", first, line);
	else
		fprintf(out, "  layers %u-%u %s\n", first, last, line);
}

/* The text of a field in the destination's layer `index`; false: none. */
static bool layer_line(const struct plan_request *req, struct pair *p, uint32_t index,
		       uint32_t field, char *line)
{
	const struct layout_layer *d = &p->dst_view->layers[index];
	const struct layout_layer *s = layout_layer_find(p->src_view, d->layer);

	if (field >= d->field_count)
		return false;
	p->dst = &d->fields[field];
	if (!s) {
		snprintf(line, LINE_MAX, "field %s: not in the source (pipeline stage)",
			 p->dst->name);
		return true;
	}
	p->src = layout_field_find(s, p->dst->name);
	if (!p->src)
		return false;
	units_common(p);
	units_wanted(req, p, d->layer, field);
	plan_explain_describe(req, p, line);
	return true;
}

static void explain_field(const struct plan_request *req, struct pair *p, uint32_t field,
			  FILE *out)
{
	char line[LINE_MAX] = "", next[LINE_MAX] = "";
	uint32_t first = 0, last = 0;
	bool open = false;

	for (uint32_t i = 0; i < p->dst_view->layer_count; i++) {
		if (!layer_line(req, p, i, field, next))
			continue;
		if (open && strcmp(line, next) == 0) {
			last = p->dst_view->layers[i].layer;
			continue;
		}
		if (open)
			layers_print(out, first, last, line);
		memcpy(line, next, sizeof(line));
		first = last = p->dst_view->layers[i].layer;
		open = true;
	}
	if (open)
		layers_print(out, first, last, line);
}

static void explain_map(const struct plan_request *req, size_t index, FILE *out)
{
	const struct plan_map *map = &req->maps[index];
	struct pair p = {.src_view = layout_view_find(req->src, map->view),
			 .dst_view = layout_view_find(req->dst, map->view)};
	uint32_t fields = 0;

	fprintf(out,
		"map[%zu] view %s: %zu source pages of %u tokens from token %" PRIu64
		", %zu destination pages of %u from token %" PRIu64 "\n",
		index, map->view, map->src_page_count, p.src_view->page_tokens,
		map->src_first_token, map->dst_page_count, p.dst_view->page_tokens,
		map->dst_first_token);
	for (uint32_t i = 0; i < p.dst_view->layer_count; i++)
		if (p.dst_view->layers[i].field_count > fields)
			fields = p.dst_view->layers[i].field_count;
	for (uint32_t i = 0; i < fields; i++)
		explain_field(req, &p, i, out);
}

/* ---- per transport ---- */

/* The number of frames with too many rows on that side, which are staged. */
static uint64_t frames_packed(const struct plan *plan, bool is_src)
{
	uint64_t packed = 0;

	for (uint64_t at = 0; at < plan->bytes; at += PACK_FRAME_BYTES) {
		uint64_t end = at + PACK_FRAME_BYTES;

		packed += !pack_few_rows(plan, is_src, at,
					 end < plan->bytes ? end : plan->bytes,
					 PACK_FRAME_ROWS);
	}
	return packed;
}

static void explain_tcp(const struct plan *plan, FILE *out)
{
	uint64_t frames = (plan->bytes + PACK_FRAME_BYTES - 1) / PACK_FRAME_BYTES;

	if (plan->bytes <= PACK_EAGER_MAX)
		fprintf(out, "over tcp: copied into the request\n");
	else
		fprintf(out,
			"over tcp: %" PRIu64 " of %" PRIu64
			" frames packed at the source, "
			"%" PRIu64 " at the destination\n",
			frames_packed(plan, true), frames, frames_packed(plan, false));
}

static void explain_ucx(const struct plan *plan, FILE *out)
{
	uint64_t packed = 0, spread = 0, length;

	for (uint64_t at = 0; at < plan->bytes; at += length) {
		uint64_t left = plan->bytes - at;

		if (!pack_slice(plan, at,
				left < PACK_SLICE_BYTES ? left : PACK_SLICE_BYTES,
				PACK_SLICE_ROWS, &length))
			packed += length;
		if (!pack_few_rows(plan, false, at, at + length, PACK_SLICE_ROWS))
			spread += length;
	}
	fprintf(out,
		"over ucx by tcp: %" PRIu64 " of %" PRIu64
		" bytes packed at the source, %" PRIu64 " at the destination\n",
		packed, plan->bytes, spread);
}

static void explain_verbs(const struct plan *plan, FILE *out)
{
	uint32_t bytes = pack_request_bytes(plan, true, PACK_SGE_MAX);

	fprintf(out, "over verbs: work requests of %u bytes", bytes);
	if (pack_requests(plan->bytes, bytes))
		fprintf(out,
			", or packed if one costs more than copying %u bytes twice\n",
			bytes);
	else
		fprintf(out, ", not packed\n");
}

void plan_explain(const struct plan_request *req, const struct plan *plan, FILE *out)
{
	for (size_t i = 0; i < req->map_count; i++)
		explain_map(req, i, out);
	fprintf(out,
		"%" PRIu64 " bytes in %" PRIu64
		" rows (%zu strided runs): shortest %" PRIu64 ", median %" PRIu64 "\n",
		plan->bytes, plan->rows, plan->run_count, plan->row_min,
		plan->row_median);
	if (plan->bytes == 0)
		return;
	explain_tcp(plan, out);
	explain_ucx(plan, out);
	explain_verbs(plan, out);
}
