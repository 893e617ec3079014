/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/plan/layout_text.h"

#include "proto/out.h"

static void put_field(struct text *out, const struct layout_field *f)
{
	out_object(out, NULL);
	out_text(out, "name", f->name);
	out_number(out, "buffer", f->buffer);
	out_number(out, "offset", f->offset);
	out_number(out, "page_stride", f->page_stride);
	out_number(out, "token_stride", f->token_stride);
	out_number(out, "unit_stride", f->unit_stride);
	out_number(out, "unit_bytes", f->unit_bytes);
	out_number(out, "first_unit", f->first_unit);
	out_number(out, "units", f->units);
	out_number(out, "total_units", f->total_units);
	out_filled(out, "format", f->format);
	out_close(out, '}');
}

static void put_layer(struct text *out, const struct layout_layer *layer)
{
	out_object(out, NULL);
	out_number(out, "layer", layer->layer);
	out_array(out, "fields");
	for (uint32_t i = 0; i < layer->field_count; i++)
		put_field(out, &layer->fields[i]);
	text_puts(out, "]}");
}

static void put_view(struct text *out, const struct layout_view *view)
{
	out_object(out, view->name);
	out_number(out, "page_tokens", view->page_tokens);
	out_number(out, "pages", view->pages);
	if (!token_shard_is_all(&view->shard)) {
		out_object(out, "shard");
		out_number(out, "size", view->shard.size);
		out_number(out, "rank", view->shard.rank);
		out_number(out, "run", view->shard.run);
		out_close(out, '}');
	}
	out_array(out, "layers");
}

bool layout_write_some(struct layout_writer *writer, const struct layout *layout,
		       struct text *out)
{
	const struct layout_view *view;

	if (!writer->begun) {
		writer->begun = true;
		out_object(out, writer->name);
		out_number(out, "rank", layout->rank);
		if (!layout->unbounded) {
			out_array(out, "buffers");
			for (uint32_t i = 0; i < layout->buffer_count; i++)
				out_number(out, NULL, layout->buffers[i]);
			out_close(out, ']');
		}
		out_object(out, "views");
		return true;
	}
	if (writer->view >= layout->view_count) {
		text_puts(out, "}}");
		return false;
	}
	view = &layout->views[writer->view];
	if (writer->layer == 0)
		put_view(out, view);
	if (writer->layer < view->layer_count) {
		put_layer(out, &view->layers[writer->layer]);
		writer->layer++;
	}
	if (writer->layer >= view->layer_count) {
		text_puts(out, "]}");
		writer->view++;
		writer->layer = 0;
	}
	return true;
}
