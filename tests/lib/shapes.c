/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/shapes.h"

#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/layout_private.h"

/* Append a zeroed element to an array. */
static void *grow(void *array, uint32_t count, uint32_t cap, size_t size,
		  const char *what)
{
	char *p;

	if (count >= cap) {
		err_raise(ERR_LIMIT, "layout: more than %u %s", cap, what);
		return NULL;
	}
	p = mem_regrow(array, (size_t)count + 1, size);
	if (p)
		memset(p + count * size, 0, size);
	return p;
}

int shape_new(uint32_t rank, struct layout **layout_p)
{
	struct layout *layout = mem_zalloc(sizeof(*layout));

	*layout_p = layout;
	if (!layout)
		return -err_errno(ERR_NOMEM);
	layout->rank = rank;
	return 0;
}

static int shapes_failed(void)
{
	return -err_errno(err_last()->code);
}

int shape_buffer(struct layout *layout, uint64_t len, uint32_t *index_p)
{
	uint64_t *p = grow(layout->buffers, layout->buffer_count, LAYOUT_BUFFERS_MAX,
			   sizeof(*p), "buffers");

	if (!p)
		return shapes_failed();
	layout->buffers = p;
	p[layout->buffer_count] = len;
	*index_p = layout->buffer_count++;
	return 0;
}

int shape_view(struct layout *layout, const char *name, uint32_t page_tokens,
	       uint32_t pages, struct layout_view **view_p)
{
	struct layout_view *p;
	int r = layout_name_check(name, "view");

	if (r < 0)
		return err_pass(r);
	p = grow(layout->views, layout->view_count, LAYOUT_VIEWS_MAX, sizeof(*p),
		 "views");
	if (!p)
		return shapes_failed();
	layout->views = p;
	p += layout->view_count++;
	memcpy(p->name, name, strlen(name) + 1);
	p->page_tokens = page_tokens;
	p->pages = pages;
	*view_p = p;
	return 0;
}

int shape_layer(struct layout_view *view, uint32_t layer, struct layout_layer **layer_p)
{
	struct layout_layer *p = grow(view->layers, view->layer_count, LAYOUT_LAYERS_MAX,
				      sizeof(*p), "layers");

	if (!p)
		return shapes_failed();
	view->layers = p;
	p += view->layer_count++;
	p->layer = layer;
	*layer_p = p;
	return 0;
}

int shape_field(struct layout_layer *layer, const char *name,
		const struct layout_field *field)
{
	struct layout_field *p;
	int r = layout_name_check(name, "field");

	if (r < 0)
		return err_pass(r);
	p = grow(layer->fields, layer->field_count, LAYOUT_FIELDS_MAX, sizeof(*p),
		 "fields");
	if (!p)
		return shapes_failed();
	layer->fields = p;
	p += layer->field_count++;
	*p = *field;
	memset(p->name, 0, sizeof(p->name));
	memcpy(p->name, name, strlen(name) + 1);
	return 0;
}
