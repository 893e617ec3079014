/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout: the checks that every other file of the planner relies on.
 *
 * A checked layout has one property that makes the rest of the arithmetic
 * simple: the highest byte of every field, at its last page, token and unit,
 * lies inside its buffer. All addresses and all differences of addresses that
 * a plan can form are therefore below the buffer's length and need no further
 * overflow checks, as long as strides are only multiplied by indices below
 * their counts (a stride of a dimension with one element is never used and may
 * be any number).
 *
 * Views hold their layers in ascending order, so that two layouts are compared
 * and planned by one merge walk. Names are kept as given; fields keep their
 * order, because a plan_want names them by index.
 */
#include "daemon/plan/layout.h"

#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/layout_private.h"

void layout_free(struct layout *layout)
{
	if (!layout)
		return;
	if (layout->views)
		for (uint32_t i = 0; i < layout->view_count; i++) {
			const struct layout_view *view = &layout->views[i];

			if (view->layers)
				for (uint32_t k = 0; k < view->layer_count; k++)
					mem_free(view->layers[k].fields);
			mem_free(view->layers);
		}
	mem_free(layout->views);
	mem_free(layout->buffers);
	mem_free(layout);
}

void layout_freep(struct layout **layout_p)
{
	layout_free(*layout_p);
}

size_t layout_memory(const struct layout *layout)
{
	size_t bytes = sizeof(*layout) + layout->buffer_count * sizeof(*layout->buffers) +
		       layout->view_count * sizeof(*layout->views);

	for (uint32_t v = 0; v < layout->view_count; v++) {
		const struct layout_view *view = &layout->views[v];

		bytes += view->layer_count * sizeof(*view->layers);
		for (uint32_t i = 0; i < view->layer_count; i++)
			bytes +=
				view->layers[i].field_count * sizeof(struct layout_field);
	}
	return bytes;
}

const struct layout_view *layout_view_find(const struct layout *layout, const char *name)
{
	for (uint32_t i = 0; i < layout->view_count; i++)
		if (strcmp(layout->views[i].name, name) == 0)
			return &layout->views[i];
	return NULL;
}

const struct layout_layer *layout_layer_find(const struct layout_view *view,
					     uint32_t layer)
{
	uint32_t lo = 0, hi = view->layer_count;

	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;

		if (view->layers[mid].layer < layer)
			lo = mid + 1;
		else
			hi = mid;
	}
	if (lo == view->layer_count || view->layers[lo].layer != layer)
		return NULL;
	return &view->layers[lo];
}

const struct layout_field *layout_field_find(const struct layout_layer *layer,
					     const char *name)
{
	for (uint32_t i = 0; i < layer->field_count; i++)
		if (strcmp(layer->fields[i].name, name) == 0)
			return &layer->fields[i];
	return NULL;
}

static int check_word(const char *word, const char *path, const char *noun, size_t least,
		      size_t most)
{
	size_t len = strlen(word);

	if (len < least || len > most)
		return err_raise(ERR_INVAL, "%s: a %s has %zu to %zu bytes, this has %zu",
				 path, noun, least, most, len);
	for (const char *c = word; *c; c++)
		if (*c <= ' ' || *c >= 0x7f)
			return err_raise(ERR_INVAL,
					 "%s: a %s is printable ASCII without spaces",
					 path, noun);
	return 0;
}

int layout_name_check(const char *name, const char *path)
{
	return check_word(name, path, "name", 1, LAYOUT_NAME_MAX - 1);
}

int layout_format_check(const char *format, const char *path)
{
	return check_word(format, path, "format", 0, LAYOUT_FORMAT_MAX - 1);
}

/* *sum_p += (count - 1) * stride, for count > 0. */
static bool add_extent(uint64_t count, uint64_t stride, uint64_t *sum_p)
{
	uint64_t span;

	return !__builtin_mul_overflow(count - 1, stride, &span) &&
	       !__builtin_add_overflow(*sum_p, span, sum_p);
}

static int check_units(const struct layout_field *f, const char *path)
{
	if (f->unit_bytes == 0)
		return err_raise(ERR_INVAL, "%s.unit_bytes: 0, must be at least 1", path);
	if (f->total_units == 0)
		return err_raise(ERR_INVAL, "%s.total_units: 0, must be at least 1",
				 path);
	if ((uint64_t)f->first_unit + f->units > f->total_units)
		return err_raise(ERR_RANGE,
				 "%s: first_unit %u + units %u is past total_units %u",
				 path, f->first_unit, f->units, f->total_units);
	return 0;
}

static int check_bounds(const struct layout *layout, const struct layout_view *view,
			const struct layout_field *f, const char *path)
{
	uint64_t end = f->offset;

	if (layout->unbounded)
		return 0;
	if (f->buffer >= layout->buffer_count)
		return err_raise(ERR_RANGE, "%s.buffer: %u, there are %u buffers", path,
				 f->buffer, layout->buffer_count);
	if (f->offset > layout->buffers[f->buffer])
		return err_raise(ERR_RANGE,
				 "%s.offset: %llu is past buffer %u of %llu bytes", path,
				 (unsigned long long)f->offset, f->buffer,
				 (unsigned long long)layout->buffers[f->buffer]);
	if (view->pages == 0 || f->units == 0)
		return 0;
	if (!add_extent(view->pages, f->page_stride, &end))
		return err_raise(ERR_RANGE, "%s.page_stride: %llu x %u pages overflows",
				 path, (unsigned long long)f->page_stride, view->pages);
	if (!add_extent(view->page_tokens, f->token_stride, &end))
		return err_raise(ERR_RANGE, "%s.token_stride: %llu x %u tokens overflows",
				 path, (unsigned long long)f->token_stride,
				 view->page_tokens);
	if (!add_extent(f->units, f->unit_stride, &end))
		return err_raise(ERR_RANGE, "%s.unit_stride: %llu x %u units overflows",
				 path, (unsigned long long)f->unit_stride, f->units);
	if (__builtin_add_overflow(end, f->unit_bytes, &end))
		return err_raise(ERR_RANGE, "%s.unit_bytes: %llu overflows", path,
				 (unsigned long long)f->unit_bytes);
	if (end > layout->buffers[f->buffer])
		return err_raise(ERR_RANGE,
				 "%s: reaches byte %llu, past buffer %u of %llu bytes",
				 path, (unsigned long long)end, f->buffer,
				 (unsigned long long)layout->buffers[f->buffer]);
	return 0;
}

int layout_field_check(const struct layout *layout, const struct layout_view *view,
		       const struct layout_layer *layer, uint32_t index, const char *path)
{
	const struct layout_field *f = &layer->fields[index];
	int r = layout_name_check(f->name, path);

	if (r == 0)
		r = layout_format_check(f->format, path);
	if (r < 0)
		return err_pass(r);
	for (uint32_t i = 0; i < index; i++)
		if (strcmp(layer->fields[i].name, f->name) == 0)
			return err_raise(ERR_INVAL, "%s.name: a second field %s", path,
					 f->name);
	r = check_units(f, path);
	return r < 0 ? err_pass(r) : check_bounds(layout, view, f, path);
}

static int check_shard(const struct layout_view *view)
{
	const struct token_shard *shard = &view->shard;

	if (shard->size == 0 && shard->rank == 0 && shard->run == 0)
		return 0;
	if (shard->size < 2 || shard->size > TOKEN_SHARD_SIZE_MAX)
		return err_raise(ERR_RANGE, "views.%s.shard.size: %u is not in 2 … %u",
				 view->name, shard->size, TOKEN_SHARD_SIZE_MAX);
	if (shard->rank >= shard->size)
		return err_raise(ERR_RANGE,
				 "views.%s.shard.rank: %u, must be below size %u",
				 view->name, shard->rank, shard->size);
	if (shard->run == 0 || shard->run > TOKEN_SHARD_RUN_MAX)
		return err_raise(ERR_RANGE, "views.%s.shard.run: %u is not in 1 … %u",
				 view->name, shard->run, TOKEN_SHARD_RUN_MAX);
	return 0;
}

int layout_view_check(const struct layout *layout, const struct layout_view *view)
{
	char path[LAYOUT_PATH_MAX];
	int bad;

	if (layout_view_find(layout, view->name) != view)
		return err_raise(ERR_INVAL, "views.%s: named twice", view->name);
	if (view->page_tokens == 0)
		return err_raise(ERR_INVAL, "views.%s.page_tokens: 0, must be at least 1",
				 view->name);
	if (view->pages > LAYOUT_PAGES_MAX)
		return err_raise(ERR_RANGE, "views.%s.pages: %u, the limit is %u",
				 view->name, view->pages, LAYOUT_PAGES_MAX);
	bad = check_shard(view);
	if (bad < 0)
		return err_pass(bad);
	for (uint32_t i = 1; i < view->layer_count; i++)
		if (view->layers[i].layer <= view->layers[i - 1].layer)
			return err_raise(ERR_INVAL, "views.%s.layers: layer %u %s",
					 view->name, view->layers[i].layer,
					 view->layers[i].layer ==
							 view->layers[i - 1].layer
						 ? "is repeated"
						 : "is out of order");
	for (uint32_t i = 0; i < view->layer_count; i++) {
		for (uint32_t j = 0; j < view->layers[i].field_count; j++) {
			const struct layout_layer *layer = &view->layers[i];

			if (layout_field_check(layout, view, layer, j, "") == 0)
				continue;
			/* writing the path takes longer than the check */
			layout_path(path, view, i, j);
			return err_pass(layout_field_check(layout, view, layer, j, path));
		}
	}
	return 0;
}

int layout_check(const struct layout *layout)
{
	if (layout->buffer_count > LAYOUT_BUFFERS_MAX)
		return err_raise(ERR_LIMIT, "buffers: %u, the limit is %u",
				 layout->buffer_count, LAYOUT_BUFFERS_MAX);
	if (layout->view_count > LAYOUT_VIEWS_MAX)
		return err_raise(ERR_LIMIT, "views: %u, the limit is %u",
				 layout->view_count, LAYOUT_VIEWS_MAX);
	for (uint32_t i = 0; i < layout->view_count; i++) {
		const struct layout_view *view = &layout->views[i];
		char path[LAYOUT_PATH_MAX];
		int r;

		layout_view_path(path, view->name);
		r = layout_name_check(view->name, path);
		if (r < 0)
			return err_pass(r);
		if (view->layer_count > LAYOUT_LAYERS_MAX)
			return err_raise(ERR_LIMIT, "%s.layers: %u, the limit is %u",
					 path, view->layer_count, LAYOUT_LAYERS_MAX);
		for (uint32_t j = 0; j < view->layer_count; j++)
			if (view->layers[j].field_count > LAYOUT_FIELDS_MAX)
				return err_raise(
					ERR_LIMIT,
					"%s.layers[%u].fields: %u, the limit is %u", path,
					j, view->layers[j].field_count,
					LAYOUT_FIELDS_MAX);
		r = layout_view_check(layout, view);
		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

/* ---- comparison ---- */

const struct layout_sides layout_from_source = {"the source", "the destination"};
const struct layout_sides layout_from_destination = {"the destination", "the source"};
const struct layout_sides layout_from_us = {"ours", "the peer's"};

static int field_compatible(const char *view, uint32_t layer,
			    const struct layout_field *one,
			    const struct layout_field *other,
			    const struct layout_sides *sides)
{
	if (one->unit_bytes != other->unit_bytes)
		return err_raise(ERR_LAYOUT,
				 "view %s layer %u field %s: unit_bytes %llu (%s), %llu "
				 "(%s)",
				 view, layer, one->name,
				 (unsigned long long)one->unit_bytes, sides->one,
				 (unsigned long long)other->unit_bytes, sides->other);
	if (one->total_units != other->total_units)
		return err_raise(ERR_LAYOUT,
				 "view %s layer %u field %s: total_units, heads of the "
				 "model: %u (%s), %u (%s)",
				 view, layer, one->name, one->total_units, sides->one,
				 other->total_units, sides->other);
	if (one->format[0] && other->format[0] && strcmp(one->format, other->format) != 0)
		return err_raise(ERR_LAYOUT,
				 "view %s layer %u field %s: format %s (%s), %s (%s)",
				 view, layer, one->name, one->format, sides->one,
				 other->format, sides->other);
	return 0;
}

int layout_layer_compatible(const char *view, const struct layout_layer *one,
			    const struct layout_layer *other,
			    const struct layout_sides *sides)
{
	for (uint32_t i = 0; i < one->field_count; i++) {
		const struct layout_field *f = &one->fields[i];
		const struct layout_field *g = layout_field_find(other, f->name);
		int r;

		if (!g)
			return err_raise(ERR_LAYOUT,
					 "view %s layer %u field %s: only in %s", view,
					 one->layer, f->name, sides->one);
		r = field_compatible(view, one->layer, f, g, sides);
		if (r < 0)
			return err_pass(r);
	}
	for (uint32_t i = 0; i < other->field_count; i++)
		if (!layout_field_find(one, other->fields[i].name))
			return err_raise(ERR_LAYOUT,
					 "view %s layer %u field %s: only in %s", view,
					 one->layer, other->fields[i].name, sides->other);
	return 0;
}

bool layout_layers_next(struct layout_layers *at)
{
	while (at->i < at->one->layer_count && at->j < at->other->layer_count) {
		at->a = &at->one->layers[at->i];
		at->b = &at->other->layers[at->j];
		at->i += at->a->layer <= at->b->layer;
		at->j += at->a->layer >= at->b->layer;
		if (at->a->layer == at->b->layer)
			return true;
	}
	return false;
}

int layout_view_compatible(const struct layout_view *one, const struct layout_view *other,
			   const struct layout_sides *sides)
{
	struct layout_layers at = {.one = one, .other = other};

	if (!token_shard_nests(&one->shard, &other->shard))
		return err_raise(ERR_LAYOUT,
				 "view %s: shard.run %u (%s), %u (%s): one must be a "
				 "multiple of the other",
				 one->name, one->shard.run, sides->one, other->shard.run,
				 sides->other);
	while (layout_layers_next(&at)) {
		int r = layout_layer_compatible(one->name, at.a, at.b, sides);

		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

int layout_compatible(const struct layout *one, const struct layout *other,
		      const struct layout_sides *sides)
{
	for (uint32_t i = 0; i < one->view_count; i++) {
		const struct layout_view *view =
			layout_view_find(other, one->views[i].name);
		int r = view ? layout_view_compatible(&one->views[i], view, sides) : 0;

		if (r < 0)
			return err_pass(r);
	}
	return 0;
}
