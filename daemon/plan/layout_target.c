/* SPDX-License-Identifier: Apache-2.0 */
/* layout_target: may bytes be written into this layout? */
#include <inttypes.h>

#include "daemon/base/err.h"
#include "daemon/plan/layout.h"
#include "daemon/plan/nest.h"

/* Layouts of engines need a few boxes a field; layouts that need more are left to
 * plan_make(), which checks the bytes that are really written. */
#define TARGET_BOXES_MAX (1u << 16)

static int layout_target_add_field(const struct layout_view *view,
				   const struct layout_field *f, uint32_t tag,
				   struct nest_boxes *boxes)
{
	struct nest_box box = {.dst = f->offset,
			       .src = f->offset,
			       .len = f->unit_bytes,
			       .dst_buffer = f->buffer,
			       .src_buffer = f->buffer,
			       .tag = tag};

	if (f->units == 0 || view->pages == 0)
		return 0;
	nest_box_add(&box, f->units, f->unit_stride, f->unit_stride);
	nest_box_add(&box, view->page_tokens, f->token_stride, f->token_stride);
	nest_box_add(&box, view->pages, f->page_stride, f->page_stride);
	return nest_boxes_add(boxes, &box);
}

/* Fields are numbered through all layers of a view. */
static const struct layout_field *target_field(const struct layout_view *view,
					       uint32_t tag, uint32_t *layer_p)
{
	const struct layout_layer *layer = view->layers;

	while (tag >= layer->field_count)
		tag -= layer++->field_count;
	*layer_p = layer->layer;
	return &layer->fields[tag];
}

static int raise_overlap(const struct layout_view *view, const struct nest_clash *clash)
{
	uint32_t a_layer, b_layer;
	const struct layout_field *a = target_field(view, clash->tag[0], &a_layer);
	const struct layout_field *b = target_field(view, clash->tag[1], &b_layer);

	if (a == b)
		return err_raise(ERR_LAYOUT,
				 "view %s layer %u field %s: two of its pages, tokens or "
				 "units share byte %" PRIu64 " of buffer %u",
				 view->name, a_layer, a->name, clash->dst,
				 clash->dst_buffer);
	return err_raise(ERR_LAYOUT,
			 "view %s layer %u field %s and layer %u field %s share byte "
			 "%" PRIu64 " of buffer %u",
			 view->name, a_layer, a->name, b_layer, b->name, clash->dst,
			 clash->dst_buffer);
}

static int check_view(const struct layout_view *view)
{
	struct nest_boxes in = {.limit = TARGET_BOXES_MAX}, out = {0};
	struct nest_clash clash = {0};
	uint32_t tag = 0;
	int r = 0;

	for (uint32_t i = 0; i < view->layer_count && r == 0; i++)
		for (uint32_t j = 0; j < view->layers[i].field_count && r == 0; j++)
			r = layout_target_add_field(view, &view->layers[i].fields[j],
						    tag++, &in);
	if (r == 0)
		r = nest_solve(&in, &out, &clash);
	if (r == NEST_TWICE)
		r = raise_overlap(view, &clash);
	else if (r < 0 && err_last()->code == ERR_LIMIT)
		r = 0;
	nest_boxes_fini(&in);
	nest_boxes_fini(&out);
	return r;
}

int layout_check_target(const struct layout *layout)
{
	if (layout->unbounded)
		return err_raise(ERR_INVAL, "layout: has no buffers to be written to");
	for (uint32_t i = 0; i < layout->view_count; i++) {
		int r = check_view(&layout->views[i]);

		if (r < 0)
			return err_pass(r);
	}
	return 0;
}
