/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout_json: the layout as JSON.
 *
 * cJSON keeps numbers as doubles, so an integer is accepted only when it is whole and at
 * most 2^53 - 1: above that two different texts read as the same number. The first fault
 * ends the parse, and its message has the path of the member in the input, with the
 * input's own indices. Layers may have any order; they are sorted here, and then the
 * common checks of layout.c run on the result.
 *
 * Arrays of cJSON are linked lists. They are iterated in order, never indexed.
 */
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/layout.h"
#include "daemon/plan/layout_private.h"
#include "daemon/plan/layout_text.h"

#define JSON_WHOLE_MAX 9007199254740991.0 /* 2^53 - 1 */

static int layout_json_number_read(const cJSON *item, const char *path, const char *key,
				   uint64_t max, uint64_t *v_p)
{
	double v;

	if (!item)
		return err_raise(ERR_INVAL, "%s.%s: missing", path, key);
	if (!cJSON_IsNumber(item))
		return err_raise(ERR_INVAL, "%s.%s: must be an integer", path, key);
	v = item->valuedouble;
	if (!(v >= 0 && v <= JSON_WHOLE_MAX))
		return err_raise(ERR_RANGE, "%s.%s: %g is not in 0 … 2^53 - 1", path, key,
				 v);
	if ((double)(uint64_t)v != v)
		return err_raise(ERR_INVAL, "%s.%s: %g is not an integer", path, key, v);
	if ((uint64_t)v > max)
		return err_raise(ERR_RANGE, "%s.%s: %.0f, the limit is %llu", path, key,
				 v, (unsigned long long)max);
	*v_p = (uint64_t)v;
	return 0;
}

static int member_u64(const cJSON *json, const char *path, const char *key, uint64_t *v_p)
{
	return layout_json_number_read(cJSON_GetObjectItemCaseSensitive(json, key), path,
				       key, UINT64_MAX, v_p);
}

static int member_u32(const cJSON *json, const char *path, const char *key, uint32_t *v_p)
{
	uint64_t v = 0;
	int r = layout_json_number_read(cJSON_GetObjectItemCaseSensitive(json, key), path,
					key, UINT32_MAX, &v);

	*v_p = (uint32_t)v;
	return r;
}

/* An array member and its length, at most `cap`. */
static int member_array(const cJSON *json, const char *path, const char *key,
			uint32_t cap, const cJSON **array_p, uint32_t *count_p)
{
	const cJSON *array = cJSON_GetObjectItemCaseSensitive(json, key);
	int count;

	if (!cJSON_IsArray(array))
		return err_raise(ERR_INVAL, "%s%s%s: %s", path, *path ? "." : "", key,
				 array ? "must be a list" : "missing");
	count = cJSON_GetArraySize(array);
	if (count < 0 || (uint32_t)count > cap)
		return err_raise(ERR_LIMIT, "%s%s%s: %d entries, the limit is %u", path,
				 *path ? "." : "", key, count, cap);
	*array_p = array;
	*count_p = (uint32_t)count;
	return 0;
}

/* An unknown member would be lost, with its meaning for the bytes. */
static int members_only(const cJSON *json, const char *path, const char *const *names)
{
	const cJSON *it;

	cJSON_ArrayForEach(it, json) {
		size_t i = 0;

		while (names[i] && strcmp(names[i], it->string) != 0)
			i++;
		if (!names[i])
			return err_raise(ERR_INVAL, "%s.%.64s: unknown member", path,
					 it->string);
	}
	return 0;
}

static int field_format(const cJSON *json, const char *path, struct layout_field *f)
{
	const cJSON *format = cJSON_GetObjectItemCaseSensitive(json, "format");
	char full[LAYOUT_PATH_MAX + 8];
	int r;

	if (!format)
		return 0;
	snprintf(full, sizeof(full), "%s.format", path);
	if (!cJSON_IsString(format))
		return err_raise(ERR_INVAL, "%s: must be a string", full);
	r = layout_format_check(format->valuestring, full);
	if (r < 0)
		return err_pass(r);
	memcpy(f->format, format->valuestring, strlen(format->valuestring) + 1);
	return 0;
}

static int parse_field(const cJSON *json, const char *path, struct layout_field *f)
{
	static const char *const names[] = {
		"name",		"buffer",      "offset",     "page_stride",
		"token_stride", "unit_stride", "unit_bytes", "first_unit",
		"units",	"total_units", "format",     NULL,
	};
	const cJSON *name = cJSON_GetObjectItemCaseSensitive(json, "name");
	char name_path[LAYOUT_PATH_MAX + 8];
	int r;

	if (!cJSON_IsObject(json))
		return err_raise(ERR_INVAL, "%s: must be an object", path);
	if (!cJSON_IsString(name))
		return err_raise(ERR_INVAL, "%s.name: %s", path,
				 name ? "must be a string" : "missing");
	snprintf(name_path, sizeof(name_path), "%s.name", path);
	r = layout_name_check(name->valuestring, name_path);
	if (r == 0)
		r = field_format(json, path, f);
	if (r < 0)
		return err_pass(r);
	memcpy(f->name, name->valuestring, strlen(name->valuestring) + 1);
	if ((r = member_u32(json, path, "buffer", &f->buffer)) < 0 ||
	    (r = member_u64(json, path, "offset", &f->offset)) < 0 ||
	    (r = member_u64(json, path, "page_stride", &f->page_stride)) < 0 ||
	    (r = member_u64(json, path, "token_stride", &f->token_stride)) < 0 ||
	    (r = member_u64(json, path, "unit_stride", &f->unit_stride)) < 0 ||
	    (r = member_u64(json, path, "unit_bytes", &f->unit_bytes)) < 0 ||
	    (r = member_u32(json, path, "first_unit", &f->first_unit)) < 0 ||
	    (r = member_u32(json, path, "units", &f->units)) < 0 ||
	    (r = member_u32(json, path, "total_units", &f->total_units)) < 0)
		return err_pass(r);
	return members_only(json, path, names);
}

static int parse_layer(const cJSON *json, const struct layout *layout,
		       const struct layout_view *view, uint32_t index,
		       struct layout_layer *layer)
{
	static const char *const names[] = {"layer", "fields", NULL};
	char path[LAYOUT_PATH_MAX];
	const cJSON *fields, *it;
	uint32_t count, i = 0;
	int r;

	snprintf(path, sizeof(path), "views.%.31s.layers[%u]", view->name, index);
	if (!cJSON_IsObject(json))
		return err_raise(ERR_INVAL, "%s: must be an object", path);
	r = member_u32(json, path, "layer", &layer->layer);
	if (r < 0)
		return err_pass(r);
	r = member_array(json, path, "fields", LAYOUT_FIELDS_MAX, &fields, &count);
	if (r == 0)
		r = members_only(json, path, names);
	if (r < 0)
		return err_pass(r);
	layer->fields = mem_calloc(count, sizeof(*layer->fields));
	if (!layer->fields)
		return -err_errno(ERR_NOMEM);
	layer->field_count = count;
	cJSON_ArrayForEach(it, fields) {
		layout_path(path, view, index, i);
		r = parse_field(it, path, &layer->fields[i]);
		if (r == 0)
			r = layout_field_check(layout, view, layer, i, path);
		if (r < 0)
			return err_pass(r);
		i++;
	}
	return 0;
}

static int layer_compare(const void *a, const void *b)
{
	uint32_t x = ((const struct layout_layer *)a)->layer;
	uint32_t y = ((const struct layout_layer *)b)->layer;

	return (x > y) - (x < y);
}

static int parse_shard(const cJSON *json, struct layout_view *view)
{
	static const char *const names[] = {"size", "rank", "run", NULL};
	const cJSON *shard = cJSON_GetObjectItemCaseSensitive(json, "shard");
	char path[LAYOUT_PATH_MAX];
	int r;

	view->shard = (struct token_shard){0};
	if (!shard)
		return 0;
	snprintf(path, sizeof(path), "views.%.31s.shard", view->name);
	if (!cJSON_IsObject(shard))
		return err_raise(ERR_INVAL, "%s: must be an object", path);
	if ((r = members_only(shard, path, names)) < 0 ||
	    (r = member_u32(shard, path, "size", &view->shard.size)) < 0 ||
	    (r = member_u32(shard, path, "rank", &view->shard.rank)) < 0 ||
	    (r = member_u32(shard, path, "run", &view->shard.run)) < 0)
		return err_pass(r);
	if (view->shard.size == 1 && view->shard.rank == 0)
		view->shard = (struct token_shard){0}; /* all tokens */
	return 0;
}

static int layout_json_parse_view(const cJSON *json, struct layout *layout,
				  struct layout_view *view)
{
	static const char *const names[] = {"page_tokens", "pages", "shard", "layers",
					    NULL};
	char path[LAYOUT_PATH_MAX];
	const cJSON *layers, *it;
	uint32_t count, i = 0;
	int r;

	r = layout_name_check(json->string, "views");
	if (r < 0)
		return err_pass(r);
	memcpy(view->name, json->string, strlen(json->string) + 1);
	layout_view_path(path, view->name);
	if (!cJSON_IsObject(json))
		return err_raise(ERR_INVAL, "%s: must be an object", path);
	if ((r = parse_shard(json, view)) < 0 ||
	    (r = member_u32(json, path, "page_tokens", &view->page_tokens)) < 0 ||
	    (r = member_u32(json, path, "pages", &view->pages)) < 0 ||
	    (r = member_array(json, path, "layers", LAYOUT_LAYERS_MAX, &layers, &count)) <
		    0 ||
	    (r = members_only(json, path, names)) < 0)
		return err_pass(r);
	r = layout_view_check(layout, view); /* its own members, before its layers */
	if (r < 0)
		return err_pass(r);
	view->layers = mem_calloc(count, sizeof(*view->layers));
	if (!view->layers)
		return -err_errno(ERR_NOMEM);
	view->layer_count = count;
	cJSON_ArrayForEach(it, layers) {
		r = parse_layer(it, layout, view, i, &view->layers[i]);
		if (r < 0)
			return err_pass(r);
		i++;
	}
	qsort(view->layers, count, sizeof(*view->layers), layer_compare);
	r = layout_view_check(layout, view);
	return r < 0 ? err_pass(r) : 0;
}

static int parse_buffers(const cJSON *json, struct layout *layout)
{
	const cJSON *buffers, *it;
	uint32_t count, i = 0;
	int r;

	r = member_array(json, "", "buffers", LAYOUT_BUFFERS_MAX, &buffers, &count);
	if (r < 0)
		return err_pass(r);
	layout->buffers = mem_calloc(count, sizeof(*layout->buffers));
	if (!layout->buffers)
		return -err_errno(ERR_NOMEM);
	layout->buffer_count = count;
	cJSON_ArrayForEach(it, buffers) {
		char key[24];

		snprintf(key, sizeof(key), "[%u]", i);
		r = layout_json_number_read(it, "buffers", key, UINT64_MAX,
					    &layout->buffers[i]);
		if (r < 0)
			return err_pass(r);
		i++;
	}
	return 0;
}

static int parse_members(const cJSON *json, struct layout *layout)
{
	const cJSON *views = cJSON_GetObjectItemCaseSensitive(json, "views"), *it;
	const cJSON *rank = cJSON_GetObjectItemCaseSensitive(json, "rank");
	static const char *const names[] = {"rank", "buffers", "views", NULL};
	bool cover_only = layout->unbounded;
	int count, r = 0;

	layout->unbounded =
		cover_only && !cJSON_GetObjectItemCaseSensitive(json, "buffers");
	if (rank)
		r = member_u32(json, "layout", "rank", &layout->rank);
	if (r == 0 && !layout->unbounded)
		r = parse_buffers(json, layout);
	if (r < 0)
		return err_pass(r);
	if (!cJSON_IsObject(views))
		return err_raise(ERR_INVAL, "views: %s",
				 views ? "must be an object" : "missing");
	r = members_only(json, "layout", names);
	if (r < 0)
		return err_pass(r);
	count = cJSON_GetArraySize(views);
	if (count < 0 || (uint32_t)count > LAYOUT_VIEWS_MAX)
		return err_raise(ERR_LIMIT, "views: %d, the limit is %u", count,
				 LAYOUT_VIEWS_MAX);
	layout->views = mem_calloc((size_t)count, sizeof(*layout->views));
	if (!layout->views)
		return -err_errno(ERR_NOMEM);
	cJSON_ArrayForEach(it, views) {
		/* counted first, so that a failed view is freed with the rest */
		r = layout_json_parse_view(it, layout,
					   &layout->views[layout->view_count++]);
		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

static int layout_json_parse(const cJSON *json, bool cover_only, struct layout **layout_p)
{
	struct layout *layout mem_cleanup(layout_freep) = NULL;
	int r;

	*layout_p = NULL;
	if (!cJSON_IsObject(json))
		return err_raise(ERR_INVAL, "layout: must be an object");
	layout = mem_zalloc(sizeof(*layout));
	if (!layout)
		return -err_errno(ERR_NOMEM);
	layout->unbounded = cover_only;
	r = parse_members(json, layout);
	if (r < 0)
		return err_pass(r);
	*layout_p = mem_steal(layout);
	return 0;
}

int layout_parse(const struct cJSON *json, struct layout **layout_p)
{
	return layout_json_parse(json, false, layout_p);
}

int layout_parse_ranks(const struct cJSON *json, struct layout **layout_p)
{
	return layout_json_parse(json, true, layout_p);
}

/* ---- printing ---- */

int layout_print(const struct layout *layout, struct cJSON **json_p)
{
	struct layout_writer writer = {0};
	struct text text = {0};

	while (layout_write_some(&writer, layout, &text))
		continue;
	*json_p = text.failed ? NULL : cJSON_Parse(text.data);
	text_fini(&text);
	return *json_p ? 0 : err_raise(ERR_NOMEM, "layout: no memory to print it");
}
