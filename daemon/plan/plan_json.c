/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The planner's own JSON: the input is read completely and planned, and only then the
 * answer is written, so that a refusal leaves the output empty. The tree has passed the
 * strict check of proto/json (UTF-8, duplicate keys, depth, bytes after the object),
 * because a layout with a duplicate key is ambiguous.
 *
 * Rows are written in order of destination. The runs of a plan are in order of their
 * first rows only: where fields interleave in a page the expanded rows are sorted once
 * more.
 */
#include "daemon/plan/plan_json.h"

#include <inttypes.h>
#include <stdlib.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/cover.h"
#include "daemon/plan/plan.h"
#include "daemon/plan/plan_private.h"
#include "proto/json.h"

struct input {
	struct layout *src, *dst;
	struct plan_map *maps;
	size_t map_count;
	struct plan_want *wants; /* NULL: all */
	size_t want_count;
};

static void input_fini(struct input *in)
{
	layout_free(in->src);
	layout_free(in->dst);
	for (size_t i = 0; i < in->map_count; i++) {
		mem_free((void *)in->maps[i].src_pages);
		mem_free((void *)in->maps[i].dst_pages);
	}
	mem_free(in->maps);
	mem_free(in->wants);
}

/* ---- reading ---- */

static int read_layout(const cJSON *root, const char *name, struct layout **layout_p)
{
	const cJSON *json;
	int r = json_get_object(root, name, true, &json);

	if (r < 0)
		return err_pass(r);
	r = layout_parse(json, layout_p);
	return r < 0 ? err_prefix(r, "%s", name) : 0;
}

/* A member [begin, end]: two integers. */
static int read_range(const cJSON *json, const char *name, uint64_t *begin_p,
		      uint64_t *end_p, bool *set_p)
{
	const cJSON *list = NULL;
	int64_t begin, end;
	int r = json_get_array(json, name, false, 2, &list);

	if (r < 0)
		return err_pass(r);
	*set_p = list != NULL;
	if (!list)
		return 0;
	if (cJSON_GetArraySize(list) != 2 || !json_number_is_int(list->child, &begin) ||
	    !json_number_is_int(list->child->next, &end))
		return err_raise(ERR_INVAL, "%s: must be [begin, end], two integers",
				 name);
	if (begin < 0 || end < 0)
		return err_raise(ERR_RANGE, "%s: [%" PRId64 ", %" PRId64 "] is negative",
				 name, begin, end);
	if (begin > end)
		return err_raise(ERR_RANGE, "%s: [%" PRId64 ", %" PRId64 "] is reversed",
				 name, begin, end);
	*begin_p = (uint64_t)begin;
	*end_p = (uint64_t)end;
	return 0;
}

static int read_layers(const cJSON *json, struct plan_layers *layers)
{
	uint64_t begin = 0, end = UINT32_MAX;
	bool set;
	int r = read_range(json, "layers", &begin, &end, &set);

	if (r < 0)
		return err_pass(r);
	if (begin > UINT32_MAX || end > UINT32_MAX)
		return err_raise(ERR_RANGE, "layers: past 2^32 - 1");
	*layers = (struct plan_layers){.begin = (uint32_t)begin, .end = (uint32_t)end};
	return 0;
}

static int read_first(const cJSON *json, const char *name, uint64_t *first_p)
{
	int64_t first = 0;
	int r = json_get_int(json, name, false, 0, JSON_INT_MAX, &first);

	*first_p = (uint64_t)first;
	return r;
}

static int read_map(const cJSON *json, struct plan_map *map)
{
	uint32_t *src = NULL, *dst = NULL;
	int r;

	if (!cJSON_IsObject(json))
		return err_raise(ERR_INVAL, "must be an object");
	r = json_get_str(json, "view", true, LAYOUT_NAME_MAX - 1, &map->view);
	if (r == 0)
		r = json_get_pages(json, "src_pages", UINT32_MAX, 1u << 24, &src,
				   &map->src_page_count);
	map->src_pages = src;
	if (r == 0)
		r = json_get_pages(json, "dst_pages", UINT32_MAX, 1u << 24, &dst,
				   &map->dst_page_count);
	map->dst_pages = dst;
	if (r < 0 ||
	    (r = read_first(json, "src_first_token", &map->src_first_token)) < 0 ||
	    (r = read_first(json, "dst_first_token", &map->dst_first_token)) < 0 ||
	    (r = read_range(json, "tokens", &map->token_begin, &map->token_end,
			    &map->tokens_set)) < 0 ||
	    (r = read_layers(json, &map->layers)) < 0)
		return err_pass(r);
	return 0;
}

/* Names are converted to the destination's numbers. */
static int read_want(const cJSON *json, const struct layout *dst, struct plan_want *want)
{
	const struct layout_field *field = NULL;
	const struct layout_layer *layer;
	const struct layout_view *view;
	const char *names[2];
	int64_t n[3];
	int r;

	if (!cJSON_IsObject(json))
		return err_raise(ERR_INVAL, "must be an object");
	if ((r = json_get_str(json, "view", true, LAYOUT_NAME_MAX - 1, &names[0])) < 0 ||
	    (r = json_get_str(json, "field", true, LAYOUT_NAME_MAX - 1, &names[1])) < 0 ||
	    (r = json_get_int(json, "layer", true, 0, UINT32_MAX, &n[0])) < 0 ||
	    (r = json_get_int(json, "first_unit", true, 0, UINT32_MAX, &n[1])) < 0 ||
	    (r = json_get_int(json, "units", true, 1, UINT32_MAX, &n[2])) < 0)
		return err_pass(r);
	view = layout_view_find(dst, names[0]);
	layer = view ? layout_layer_find(view, (uint32_t)n[0]) : NULL;
	field = layer ? layout_field_find(layer, names[1]) : NULL;
	if (!field)
		return err_raise(ERR_RANGE,
				 "dst has no view %s layer %" PRId64 " field %s",
				 names[0], n[0], names[1]);
	*want = (struct plan_want){.view = (uint16_t)(view - dst->views),
				   .field = (uint16_t)(field - layer->fields),
				   .layer = (uint32_t)n[0],
				   .first_unit = (uint32_t)n[1],
				   .units = (uint32_t)n[2]};
	return 0;
}

static int read_wants(const cJSON *root, struct input *in)
{
	const cJSON *list = NULL, *it;
	int r = json_get_array(root, "wants", false, PLAN_JSON_WANTS_MAX, &list);

	if (r < 0 || !list)
		return err_pass(r);
	/* one more: an empty list does not mean all */
	in->wants = mem_calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof(*in->wants));
	if (!in->wants)
		return -err_errno(ERR_NOMEM);
	cJSON_ArrayForEach(it, list) {
		r = read_want(it, in->dst, &in->wants[in->want_count]);
		if (r < 0)
			return err_prefix(r, "wants[%zu]", in->want_count);
		in->want_count++;
	}
	qsort(in->wants, in->want_count, sizeof(*in->wants), plan_want_compare);
	return err_pass(cover_check_wants(in->src, in->dst, in->wants, in->want_count));
}

static int plan_json_read_input(const cJSON *root, struct input *in)
{
	const cJSON *list, *it;
	int r;

	if ((r = read_layout(root, "src", &in->src)) < 0 ||
	    (r = read_layout(root, "dst", &in->dst)) < 0 ||
	    (r = json_get_array(root, "map", true, 1024, &list)) < 0)
		return err_pass(r);
	in->maps = mem_calloc((size_t)cJSON_GetArraySize(list), sizeof(*in->maps));
	if (!in->maps)
		return -err_errno(ERR_NOMEM);
	cJSON_ArrayForEach(it, list) {
		/* counted first, so that a failed map is freed with the rest */
		r = read_map(it, &in->maps[in->map_count++]);
		if (r < 0)
			return err_prefix(r, "map[%zu]", in->map_count - 1);
	}
	return err_pass(read_wants(root, in));
}

/* ---- writing ---- */

static int plan_json_span_compare(const void *a, const void *b)
{
	const struct plan_span *x = a, *y = b;

	if (x->dst_buffer != y->dst_buffer)
		return x->dst_buffer < y->dst_buffer ? -1 : 1;
	return (x->dst > y->dst) - (x->dst < y->dst);
}

/* All rows, by destination. */
static struct plan_span *plan_json_rows_of(const struct plan *plan)
{
	struct plan_span *rows = mem_calloc(plan->rows, sizeof(*rows));
	struct plan_walk walk;
	bool sorted = true;
	size_t n = 0;

	if (!rows)
		return NULL;
	plan_walk_begin(&walk, plan);
	while (plan_walk_next(&walk, UINT64_MAX, &rows[n])) {
		if (n > 0 && plan_json_span_compare(&rows[n - 1], &rows[n]) > 0)
			sorted = false;
		if (++n == plan->rows)
			break;
	}
	if (!sorted)
		qsort(rows, n, sizeof(*rows), plan_json_span_compare);
	return rows;
}

static int write_plan(const struct plan *plan, FILE *out)
{
	struct plan_span *rows cleanup_free = plan_json_rows_of(plan);

	if (!rows)
		return -err_errno(ERR_NOMEM);
	fputs("{\"rows\":[", out);
	for (uint64_t i = 0; i < plan->rows; i++)
		fprintf(out, "%s[%u,%" PRIu64 ",%u,%" PRIu64 ",%" PRIu64 "]",
			i ? "," : "", rows[i].src_buffer, rows[i].src, rows[i].dst_buffer,
			rows[i].dst, rows[i].len);
	fprintf(out,
		"],\"runs\":%zu,\"descriptors\":%" PRIu64 ",\"bytes\":%" PRIu64 "}\n",
		plan->run_count, plan->rows, plan->bytes);
	return 0;
}

int plan_json_rows(const cJSON *root, uint64_t max_rows, FILE *out)
{
	struct plan *plan mem_cleanup(plan_freep) = NULL;
	struct input in = {0};
	struct plan_request req;
	int r = plan_json_read_input(root, &in);

	if (r == 0) {
		req = (struct plan_request){.src = in.src,
					    .dst = in.dst,
					    .maps = in.maps,
					    .map_count = in.map_count,
					    .wants = in.wants,
					    .want_count = in.want_count,
					    .max_rows = max_rows};
		r = plan_make(&req, &plan);
		if (r == 0)
			r = write_plan(plan, out);
	}
	input_fini(&in);
	return r < 0 ? err_pass(r) : 0;
}
