/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The order in a slot is that of the writer. Fields are placed in the order of their
 * addresses, so that neighbours in the writer's page are neighbours in the slot, and a
 * page of the slot holds as many tokens as the writer's if those divide a chunk: then a
 * field of a page is one row on both sides, in either head order, and adjacent fields
 * form one longer row.
 *
 * Pages of a few tokens are different: with one token per page, which engines use, such a
 * slot would be cut into rows of one token, although the writer's tokens mostly follow
 * each other. Below PAGE_MIN the slot's page is the chunk, token after token.
 *
 * Where a view holds a shard of the tokens, its chunk is smaller in proportion.
 */
#include "daemon/plan/canon.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define PAGE_MIN 16u
#define AUX_VIEW "aux" /* part of a request, not of a chunk */

void canon_free(struct canon *canon)
{
	if (!canon)
		return;
	layout_free(canon->layout);
	mem_free(canon->views);
	mem_free(canon);
}

void canon_freep(struct canon **canon_p)
{
	canon_free(*canon_p);
}

/* ---- fields of a view ---- */

struct placed {
	struct layout_field *field;
	size_t at; /* its number in the view */
};

static int by_place(const void *a, const void *b)
{
	const struct placed *x = a, *y = b;

	if (x->field->buffer != y->field->buffer)
		return x->field->buffer < y->field->buffer ? -1 : 1;
	if (x->field->offset != y->field->offset)
		return x->field->offset < y->field->offset ? -1 : 1;
	return (x->at > y->at) - (x->at < y->at); /* same address: in order */
}

static size_t count_fields(const struct layout_view *view)
{
	size_t n = 0;

	for (uint32_t i = 0; i < view->layer_count; i++)
		n += view->layers[i].field_count;
	return n;
}

/* In a page of `tokens` tokens, at *end_p, which is advanced. */
static int place(struct layout_field *f, const struct layout_view *view, uint32_t tokens,
		 uint64_t *end_p)
{
	bool by_unit = view->page_tokens > 1 && tokens > 1 && f->units > 1 &&
		       f->unit_stride > f->token_stride;
	uint64_t token, field, page_bytes;

	if (__builtin_mul_overflow(f->unit_bytes, (uint64_t)f->units, &token) ||
	    __builtin_mul_overflow(token, (uint64_t)tokens, &field) ||
	    __builtin_add_overflow(*end_p, field, &page_bytes) ||
	    page_bytes > CANON_SLOT_MAX)
		return err_raise(ERR_TOOBIG,
				 "view %s: a chunk page of %u tokens exceeds %llu MiB; "
				 "use fewer tokens per chunk",
				 view->name, tokens,
				 (unsigned long long)(CANON_SLOT_MAX >> 20));
	f->buffer = 0;
	f->offset = f->units ? *end_p : 0; /* of nothing: at no neighbour's place */
	f->page_stride = CANON_GRAIN;
	f->token_stride = by_unit ? f->unit_bytes : token;
	f->unit_stride = by_unit ? f->unit_bytes * tokens : f->unit_bytes;
	*end_p = page_bytes;
	return 0;
}

static int place_all(struct layout_view *out, const struct layout_view *view,
		     uint64_t *page_p)
{
	size_t count = count_fields(view), n = 0;
	cleanup_free struct placed *order = mem_calloc(count + 1, sizeof(*order));
	int r = 0;

	if (!order)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < out->layer_count; i++) {
		for (uint32_t k = 0; k < out->layers[i].field_count; k++, n++)
			order[n] = (struct placed){&out->layers[i].fields[k], n};
	}
	qsort(order, n, sizeof(*order), by_place); /* still in the pool's order */
	*page_p = 0;
	for (size_t i = 0; i < n && r >= 0; i++)
		r = place(order[i].field, view, out->page_tokens, page_p);
	return r < 0 ? err_pass(r) : 0;
}

static int copy_layers(struct layout_view *out, const struct layout_view *view)
{
	out->layers = mem_calloc(view->layer_count, sizeof(*out->layers));
	if (!out->layers)
		return err_pass(-ENOMEM);
	out->layer_count = view->layer_count;
	for (uint32_t i = 0; i < view->layer_count; i++) {
		const struct layout_layer *layer = &view->layers[i];

		out->layers[i].layer = layer->layer;
		out->layers[i].fields = mem_dup(
			layer->fields, layer->field_count * sizeof(*layer->fields));
		if (!out->layers[i].fields)
			return err_pass(-ENOMEM);
		out->layers[i].field_count = layer->field_count;
	}
	return 0;
}

/* ---- views ---- */

/* Number of tokens of a chunk that the view holds. */
static int chunk_tokens(const struct layout_view *view, uint32_t tokens, uint32_t *held_p)
{
	uint64_t turn = token_shard_turn(&view->shard);

	if (view->layer_count == 0 || view->page_tokens == 0)
		return err_raise(ERR_INVAL, "view %s: holds nothing", view->name);
	if (tokens % turn)
		return err_raise(ERR_INVAL,
				 "tokens: %u per chunk must be a multiple of one round "
				 "over all shards (view %s: %llu)",
				 tokens, view->name, (unsigned long long)turn);
	*held_p = token_shard_is_all(&view->shard) ? tokens : tokens / view->shard.size;
	return 0;
}

static int add_view(struct canon *canon, const struct layout_view *view,
		    const struct canon_args *args)
{
	struct layout_view *out = &canon->layout->views[canon->layout->view_count];
	struct canon_view *slot = &canon->views[canon->layout->view_count];
	uint64_t page = 0;
	uint32_t held = 0;
	int r = chunk_tokens(view, args->tokens, &held);

	if (r < 0)
		return err_pass(r);
	memcpy(out->name, view->name, sizeof(out->name));
	out->shard = view->shard;
	out->page_tokens = view->page_tokens >= PAGE_MIN && held % view->page_tokens == 0
				   ? view->page_tokens
				   : held;
	canon->layout->view_count++;
	r = copy_layers(out, view);
	if (r >= 0)
		r = place_all(out, view, &page);
	if (r < 0)
		return err_pass(r);
	slot->pages = held / out->page_tokens;
	slot->offset = page ? canon->slot_bytes : 0;
	slot->page_bytes = (page + CANON_GRAIN - 1) / CANON_GRAIN * CANON_GRAIN;
	canon->slot_bytes += slot->page_bytes * slot->pages;
	canon->chunk_bytes += page * slot->pages;
	if (canon->slot_bytes > CANON_SLOT_MAX || canon->slot_bytes > args->memory_bytes)
		return err_raise(
			ERR_TOOBIG,
			"a part of a chunk takes %llu bytes (chunk_memory %llu, limit "
			"%llu); use fewer tokens per chunk",
			(unsigned long long)canon->slot_bytes,
			(unsigned long long)args->memory_bytes,
			(unsigned long long)CANON_SLOT_MAX);
	out->pages = (uint32_t)((args->memory_bytes - slot->page_bytes) / CANON_GRAIN +
				(page > 0)); /* one of nothing lies in no slot's end */
	return 0;
}

static int add_views(struct canon *canon, const struct canon_args *args)
{
	const struct layout *layout = args->layout;
	uint32_t most = args->views ? args->view_count : layout->view_count;
	int r = 0;

	canon->layout->views = mem_calloc(most + 1, sizeof(*canon->layout->views));
	canon->views = mem_calloc(most + 1, sizeof(*canon->views));
	if (!canon->layout->views || !canon->views)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < most && r >= 0; i++) {
		const struct layout_view *view =
			args->views ? layout_view_find(layout, args->views[i])
				    : &layout->views[i];

		if (!view)
			return err_raise(ERR_NOTFOUND,
					 "views: the pool has no view %.31s",
					 args->views[i]);
		if (layout_view_find(canon->layout, view->name))
			return err_raise(ERR_INVAL, "views: %s named twice", view->name);
		if (args->views || strcmp(view->name, AUX_VIEW) != 0)
			r = add_view(canon, view, args);
	}
	if (r >= 0 && canon->layout->view_count == 0)
		r = err_raise(ERR_INVAL, "views: empty");
	if (r >= 0 && canon->chunk_bytes == 0)
		r = err_raise(ERR_INVAL, "views: this rank holds nothing of them");
	return r < 0 ? err_pass(r) : 0;
}

int canon_make(const struct canon_args *args, struct canon **canon_p)
{
	struct canon *canon mem_cleanup(canon_freep) = mem_zalloc(sizeof(*canon));
	int r;

	assert(args->memory_bytes <= CANON_MEMORY_MAX);
	if (args->tokens < CANON_TOKENS_MIN || args->tokens > CANON_TOKENS_MAX)
		return err_raise(ERR_RANGE, "tokens: %u per chunk is not in %u to %u",
				 args->tokens, CANON_TOKENS_MIN, CANON_TOKENS_MAX);
	if (!canon)
		return err_pass(-ENOMEM);
	canon->layout = mem_zalloc(sizeof(*canon->layout));
	if (!canon->layout)
		return err_pass(-ENOMEM);
	canon->layout->rank = args->rank;
	canon->layout->buffers = mem_calloc(1, sizeof(*canon->layout->buffers));
	if (!canon->layout->buffers)
		return err_pass(-ENOMEM);
	canon->layout->buffers[0] = args->memory_bytes;
	canon->layout->buffer_count = 1;
	r = add_views(canon, args);
	if (r >= 0)
		r = layout_check(canon->layout);
	if (r < 0)
		return err_pass(r);
	*canon_p = mem_steal(canon);
	return 0;
}

/* ---- comparing, pages ---- */

static bool same_fields(const struct layout_layer *a, const struct layout_layer *b)
{
	if (a->layer != b->layer || a->field_count != b->field_count)
		return false;
	for (uint32_t i = 0; i < a->field_count; i++) {
		const struct layout_field *f = &a->fields[i], *g = &b->fields[i];

		if (strcmp(f->name, g->name) != 0 || strcmp(f->format, g->format) != 0 ||
		    f->offset != g->offset || f->token_stride != g->token_stride ||
		    f->unit_stride != g->unit_stride || f->unit_bytes != g->unit_bytes ||
		    f->first_unit != g->first_unit || f->units != g->units ||
		    f->total_units != g->total_units)
			return false;
	}
	return true;
}

static bool same_view(const struct layout_view *a, const struct layout_view *b)
{
	if (strcmp(a->name, b->name) != 0 || a->page_tokens != b->page_tokens ||
	    a->layer_count != b->layer_count ||
	    memcmp(&a->shard, &b->shard, sizeof(a->shard)) != 0)
		return false;
	for (uint32_t i = 0; i < a->layer_count; i++) {
		if (!same_fields(&a->layers[i], &b->layers[i]))
			return false;
	}
	return true;
}

bool canon_equal(const struct canon *a, const struct canon *b)
{
	if (a->slot_bytes != b->slot_bytes ||
	    a->layout->view_count != b->layout->view_count)
		return false;
	for (uint32_t i = 0; i < a->layout->view_count; i++) {
		if (!same_view(&a->layout->views[i], &b->layout->views[i]))
			return false;
	}
	return true;
}

void canon_pages(const struct canon *canon, uint32_t view, uint64_t offset,
		 uint32_t *pages)
{
	const struct canon_view *slot = &canon->views[view];

	assert(offset % CANON_GRAIN == 0);
	for (uint32_t i = 0; i < slot->pages; i++)
		pages[i] = (uint32_t)((offset + slot->offset + i * slot->page_bytes) /
				      CANON_GRAIN);
}

/* ---- identity ---- */

#define KIND_MAX (2 * LAYOUT_NAME_MAX + LAYOUT_FORMAT_MAX + 40u)

static int by_text(const void *a, const void *b)
{
	return strcmp(a, b);
}

char *canon_identity(const struct canon *canon)
{
	cleanup_free char *kinds = NULL;
	char *text, *end;
	size_t count = 0, n = 0;

	for (uint32_t v = 0; v < canon->layout->view_count; v++)
		count += count_fields(&canon->layout->views[v]);
	kinds = mem_calloc(count + 1, KIND_MAX);
	text = mem_calloc(count + 1, KIND_MAX);
	if (!kinds || !text) {
		mem_free(text);
		return NULL;
	}
	for (uint32_t v = 0; v < canon->layout->view_count; v++) {
		const struct layout_view *view = &canon->layout->views[v];

		for (uint32_t i = 0; i < view->layer_count; i++) {
			for (uint32_t k = 0; k < view->layers[i].field_count; k++) {
				const struct layout_field *f = &view->layers[i].fields[k];

				snprintf(kinds + n++ * KIND_MAX, KIND_MAX,
					 "%s %s %llu %u %s\n", view->name, f->name,
					 (unsigned long long)f->unit_bytes,
					 f->total_units, f->format);
			}
		}
	}
	qsort(kinds, n, KIND_MAX, by_text);
	end = text;
	for (size_t i = 0; i < n; i++) {
		const char *kind = kinds + i * KIND_MAX;

		if (i == 0 || strcmp(kind, kind - KIND_MAX) != 0)
			end = stpcpy(end, kind);
	}
	return text;
}
