/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_oracle: the definition, written down as loops.
 *
 * It is slow on purpose: every token from 0 up is tried against both lists, every
 * layer against every layer, every field by name, every unit of the model, every
 * byte. Nothing is sorted, merged or skipped, so there is nothing to get wrong
 * that the planner could get wrong the same way. The fewest rows then are the
 * places where a destination byte does not come from the byte behind the source
 * of the byte before it.
 */
#include "tests/lib/plan_oracle.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static uint64_t address(const struct layout_view *v, const struct layout_field *f,
			const uint32_t *pages, uint64_t slot, uint32_t unit)
{
	return f->offset + pages[slot / v->page_tokens] * f->page_stride +
	       (slot % v->page_tokens) * f->token_stride +
	       (unit - f->first_unit) * f->unit_stride;
}

/* The definition of a shard, token by token. */
static bool holds(const struct layout_view *v, uint64_t t)
{
	return v->shard.size == 0 || t / v->shard.run % v->shard.size == v->shard.rank;
}

static uint64_t slot_of(const struct layout_view *v, uint64_t first, uint64_t t)
{
	uint64_t slot = 0;

	for (uint64_t u = first; u < t; u++)
		slot += holds(v, u);
	return slot;
}

static bool held(const struct layout_field *f, uint32_t unit)
{
	return unit >= f->first_unit && unit - f->first_unit < f->units;
}

static bool wanted(const struct plan_request *req, size_t view, uint32_t layer,
		   size_t field, uint32_t unit)
{
	if (!req->wants)
		return true;
	for (size_t i = 0; i < req->want_count; i++) {
		const struct plan_want *w = &req->wants[i];

		if (w->view == view && w->layer == layer && w->field == field &&
		    unit >= w->first_unit && unit - w->first_unit < w->units)
			return true;
	}
	return false;
}

static void move(struct plan_oracle *o, const struct layout_field *sf, uint64_t src,
		 const struct layout_field *df, uint64_t dst)
{
	for (uint64_t i = 0; i < df->unit_bytes; i++) {
		uint64_t *from = &o->from[df->buffer][dst + i];

		assert(dst + i < o->req->dst->buffers[df->buffer]);
		assert(src + i < o->req->src->buffers[sf->buffer]);
		if (*from != ORACLE_NOWHERE)
			o->twice = true;
		*from = ((uint64_t)sf->buffer << 32) + src + i;
	}
}

static void move_unit(struct plan_oracle *o, const struct plan_map *m, uint64_t t,
		      uint64_t place, const struct layout_view *sv,
		      const struct layout_field *sf, const struct layout_view *dv,
		      const struct layout_field *df, uint32_t u)
{
	move(o, sf, address(sv, sf, m->src_pages, slot_of(sv, m->src_first_token, t), u),
	     df, address(dv, df, m->dst_pages, place, u));
}

/* `place`: of the token in the destination's list. */
static void token(struct plan_oracle *o, const struct plan_map *m, uint64_t t,
		  uint64_t place, size_t view, const struct layout_view *sv,
		  const struct layout_view *dv)
{
	for (uint32_t a = 0; a < sv->layer_count; a++)
		for (uint32_t b = 0; b < dv->layer_count; b++) {
			const struct layout_layer *sl = &sv->layers[a],
						  *dl = &dv->layers[b];
			bool all = m->layers.begin == 0 && m->layers.end == 0;

			if (sl->layer != dl->layer ||
			    (!all &&
			     (sl->layer < m->layers.begin || sl->layer >= m->layers.end)))
				continue;
			for (uint32_t i = 0; i < sl->field_count; i++)
				for (uint32_t j = 0; j < dl->field_count; j++) {
					const struct layout_field *sf = &sl->fields[i],
								  *df = &dl->fields[j];

					if (strcmp(sf->name, df->name) != 0)
						continue;
					for (uint32_t u = 0; u < sf->total_units; u++)
						if (held(sf, u) && held(df, u) &&
						    wanted(o->req, view, sl->layer, j, u))
							move_unit(o, m, t, place, sv, sf,
								  dv, df, u);
				}
		}
}

static void map(struct plan_oracle *o, const struct plan_map *m)
{
	const struct layout *src = o->req->src, *dst = o->req->dst;
	size_t s = 0, d = 0;

	while (strcmp(src->views[s].name, m->view) != 0)
		s++;
	while (strcmp(dst->views[d].name, m->view) != 0)
		d++;
	for (size_t i = 0; i < m->select_count; i++)
		if (holds(&src->views[s], m->token_begin + m->select[i]))
			token(o, m, m->token_begin + m->select[i], m->dst_first_token + i,
			      d, &src->views[s], &dst->views[d]);
	for (uint64_t t = 0; t < 1000 && !m->select; t++) {
		const struct layout_view *sv = &src->views[s], *dv = &dst->views[d];
		bool ranged = m->tokens_set || m->token_end > 0;

		if (ranged && (t < m->token_begin || t >= m->token_end))
			continue;
		if (t < m->src_first_token || t < m->dst_first_token)
			continue;
		if (!holds(sv, t) || !holds(dv, t))
			continue;
		if (slot_of(sv, m->src_first_token, t) / sv->page_tokens >=
			    m->src_page_count ||
		    slot_of(dv, m->dst_first_token, t) / dv->page_tokens >=
			    m->dst_page_count)
			continue;
		token(o, m, t, slot_of(dv, m->dst_first_token, t), d, sv, dv);
	}
}

void plan_oracle_init(struct plan_oracle *o, const struct plan_request *req)
{
	const struct layout *dst = req->dst;

	*o = (struct plan_oracle){.req = req};
	o->from = calloc(dst->buffer_count, sizeof(*o->from));
	for (uint32_t b = 0; b < dst->buffer_count; b++) {
		o->from[b] = malloc(dst->buffers[b] * sizeof(uint64_t) + 1);
		for (uint64_t i = 0; i < dst->buffers[b]; i++)
			o->from[b][i] = ORACLE_NOWHERE;
	}
	for (size_t i = 0; i < req->map_count; i++)
		map(o, &req->maps[i]);
	for (uint32_t b = 0; b < dst->buffer_count; b++) {
		uint64_t before = ORACLE_NOWHERE;

		for (uint64_t i = 0; i < dst->buffers[b]; i++) {
			uint64_t from = o->from[b][i];

			if (from != ORACLE_NOWHERE) {
				o->bytes++;
				if (before == ORACLE_NOWHERE || from != before + 1)
					o->rows++;
			}
			before = from;
		}
	}
}

void plan_oracle_fini(struct plan_oracle *o)
{
	for (uint32_t b = 0; b < o->req->dst->buffer_count; b++)
		free(o->from[b]);
	free(o->from);
}

static const char *check_row(const struct plan_oracle *o, const struct plan_run *run,
			     uint64_t row, uint8_t **seen)
{
	uint64_t src = run->src + row * (uint64_t)run->src_stride;
	uint64_t dst = run->dst + row * (uint64_t)run->dst_stride;

	if (run->dst_buffer >= o->req->dst->buffer_count ||
	    run->src_buffer >= o->req->src->buffer_count)
		return "a buffer that is not there";
	if (dst + run->len > o->req->dst->buffers[run->dst_buffer] ||
	    src + run->len > o->req->src->buffers[run->src_buffer])
		return "bytes past a buffer";
	for (uint64_t i = 0; i < run->len; i++) {
		if (seen[run->dst_buffer][dst + i]++)
			return "a byte moved twice";
		if (o->from[run->dst_buffer][dst + i] !=
		    ((uint64_t)run->src_buffer << 32) + src + i)
			return "a wrong byte moved";
	}
	return NULL;
}

static const char *check_rows(const struct plan_oracle *o, const struct plan *plan,
			      uint8_t **seen)
{
	uint64_t rows = 0, bytes = 0;

	for (size_t i = 0; i < plan->run_count; i++) {
		const struct plan_run *run = &plan->runs[i];

		if (run->count == 0 || run->len == 0)
			return "an empty run";
		if (i > 0 &&
		    (run->dst_buffer < run[-1].dst_buffer ||
		     (run->dst_buffer == run[-1].dst_buffer && run->dst <= run[-1].dst)))
			return "runs out of order";
		for (uint64_t r = 0; r < run->count; r++) {
			const char *fault = check_row(o, run, r, seen);

			if (fault)
				return fault;
		}
		rows += run->count;
		bytes += run->count * run->len;
	}
	if (bytes != o->bytes)
		return "bytes missing";
	if (rows != plan->rows || bytes != plan->bytes)
		return "totals wrong";
	if (rows != o->rows)
		return "more rows than needed";
	return NULL;
}

const char *plan_oracle_check(const struct plan_oracle *o, const struct plan *plan)
{
	uint32_t n = o->req->dst->buffer_count;
	uint8_t **seen = calloc(n, sizeof(*seen));
	const char *fault;

	for (uint32_t b = 0; b < n; b++)
		seen[b] = calloc(1, o->req->dst->buffers[b] + 1);
	fault = check_rows(o, plan, seen);
	for (uint32_t b = 0; b < n; b++)
		free(seen[b]);
	free(seen);
	return fault;
}
