/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/plan/layout_text.h"

static void layout_put_field(struct text *out, const struct layout_field *f)
{
	text_puts(out, "{\"name\":");
	text_json(out, f->name);
	text_number(out, ",\"buffer\":", f->buffer);
	text_number(out, ",\"offset\":", f->offset);
	text_number(out, ",\"page_stride\":", f->page_stride);
	text_number(out, ",\"token_stride\":", f->token_stride);
	text_number(out, ",\"unit_stride\":", f->unit_stride);
	text_number(out, ",\"unit_bytes\":", f->unit_bytes);
	text_number(out, ",\"first_unit\":", f->first_unit);
	text_number(out, ",\"units\":", f->units);
	text_number(out, ",\"total_units\":", f->total_units);
	if (f->format[0]) {
		text_puts(out, ",\"format\":");
		text_json(out, f->format);
	}
	text_puts(out, "}");
}

static void put_layer(struct text *out, const struct layout_layer *layer, bool first)
{
	text_number(out, first ? "{\"layer\":" : ",{\"layer\":", layer->layer);
	text_puts(out, ",\"fields\":[");
	for (uint32_t i = 0; i < layer->field_count; i++) {
		text_puts(out, i ? "," : "");
		layout_put_field(out, &layer->fields[i]);
	}
	text_puts(out, "]}");
}

static void put_view(struct text *out, const struct layout_view *view, bool first)
{
	text_puts(out, first ? "" : ",");
	text_json(out, view->name);
	text_number(out, ":{\"page_tokens\":", view->page_tokens);
	text_number(out, ",\"pages\":", view->pages);
	if (!token_shard_is_all(&view->shard)) {
		text_number(out, ",\"shard\":{\"size\":", view->shard.size);
		text_number(out, ",\"rank\":", view->shard.rank);
		text_number(out, ",\"run\":", view->shard.run);
		text_puts(out, "}");
	}
	text_puts(out, ",\"layers\":[");
}

static void put_layout_head(struct text *out, const struct layout *layout)
{
	text_number(out, "{\"rank\":", layout->rank);
	if (!layout->unbounded) {
		text_puts(out, ",\"buffers\":[");
		for (uint32_t i = 0; i < layout->buffer_count; i++)
			text_number(out, i ? "," : "", layout->buffers[i]);
		text_puts(out, "]");
	}
	text_puts(out, ",\"views\":{");
}

bool layout_write_some(struct layout_writer *writer, const struct layout *layout,
		       struct text *out)
{
	const struct layout_view *view;

	if (!writer->begun) {
		writer->begun = true;
		put_layout_head(out, layout);
		return true;
	}
	if (writer->view >= layout->view_count) {
		text_puts(out, "}}");
		return false;
	}
	view = &layout->views[writer->view];
	if (writer->layer == 0)
		put_view(out, view, writer->view == 0);
	if (writer->layer < view->layer_count) {
		put_layer(out, &view->layers[writer->layer], writer->layer == 0);
		writer->layer++;
	}
	if (writer->layer >= view->layer_count) {
		text_puts(out, "]}");
		writer->view++;
		writer->layer = 0;
	}
	return true;
}
