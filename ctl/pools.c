/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command pools. With --layout a line for each field of each view; consecutive layers
 * that differ only in their base address are one line.
 */
#include <stdio.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/table.h"
#include "daemon/base/mem.h"

static void pool_row(struct table *table, const cJSON *pool)
{
	char views[256];
	const cJSON *view;
	size_t n = 0;

	*views = '\0';
	cJSON_ArrayForEach(view, ctl_list(pool, "views"))
		if (cJSON_IsString(view) && n < sizeof(views) - 40)
			n += (size_t)snprintf(views + n, sizeof(views) - n, "%s%.32s",
					      n ? "," : "", view->valuestring);
	ctl_cells(table, pool, "session pool name rank bytes:B rooms");
	table_cell(table, views);
}

static int print_pools(const cJSON *reply)
{
	return ctl_print_list(ctl_list(reply, "pools"),
			      ">SESSION >POOL NAME >RANK >BYTES >ROOMS VIEWS", pool_row);
}

/* ---- --layout ---- */

static bool fields_alike(const cJSON *a, const cJSON *b)
{
	static const char *const members[] = {
		"page_stride", "token_stride", "unit_stride", "unit_bytes",
		"first_unit",  "units",	       "total_units"};
	const cJSON *f = ctl_list(a, "fields"), *g = ctl_list(b, "fields");

	f = f ? f->child : NULL;
	g = g ? g->child : NULL;
	for (; f && g; f = f->next, g = g->next) {
		if (strcmp(ctl_str(f, "name", ""), ctl_str(g, "name", "")) != 0 ||
		    strcmp(ctl_str(f, "format", ""), ctl_str(g, "format", "")) != 0)
			return false;
		for (size_t i = 0; i < ARRAY_LEN(members); i++) {
			if (ctl_num(f, members[i]) != ctl_num(g, members[i]))
				return false;
		}
	}
	return !f && !g;
}

static void shard_cell(struct table *table, const cJSON *shard)
{
	if (shard)
		table_cellf(table, "%.0f of %.0f by %.0f", ctl_num(shard, "rank"),
			    ctl_num(shard, "size"), ctl_num(shard, "run"));
	else
		table_cell(table, NULL);
}

static void field_row(struct table *table, const cJSON *pool, const cJSON *view,
		      const cJSON *first, const cJSON *last, const cJSON *field)
{
	double from = ctl_num(first, "layer"), to = ctl_num(last, "layer");
	double unit = ctl_num(field, "first_unit");

	ctl_cells(table, pool, "pool name layout.rank digest");
	table_cell(table, view->string);
	ctl_cells(table, view, "pages page_tokens");
	shard_cell(table, ctl_list(view, "shard"));
	table_cellf(table, from < to ? "%.0f-%.0f" : "%.0f", from, to);
	table_cell(table, ctl_str(field, "name", NULL));
	table_cellf(table, "%.0f-%.0f of %.0f", unit, unit + ctl_num(field, "units") - 1,
		    ctl_num(field, "total_units"));
	ctl_cells(table, field,
		  "unit_bytes:B format unit_stride token_stride page_stride");
}

static void view_rows(struct table *table, const cJSON *pool, const cJSON *view)
{
	const cJSON *layers = ctl_list(view, "layers"), *first, *last, *field;

	for (first = layers ? layers->child : NULL; first; first = last->next) {
		last = first;
		while (last->next &&
		       ctl_num(last->next, "layer") == ctl_num(last, "layer") + 1 &&
		       fields_alike(first, last->next))
			last = last->next;
		cJSON_ArrayForEach(field, ctl_list(first, "fields"))
			field_row(table, pool, view, first, last, field);
	}
}

static int print_layouts(const cJSON *layouts)
{
	const cJSON *pool, *view;
	struct table *table = table_new(
		">POOL NAME >RANK DIGEST VIEW >PAGES >PAGE_TOKENS SHARD LAYERS FIELD "
		"UNITS >UNIT FORMAT >UNIT_STRIDE >TOKEN_STRIDE >PAGE_STRIDE");

	cJSON_ArrayForEach(pool, ctl_list(layouts, "pools")) {
		cJSON_ArrayForEach(view, ctl_list(ctl_list(pool, "layout"), "views"))
			view_rows(table, pool, view);
	}
	return ctl_print_table(table);
}

static int take_layouts(struct ctl *ctl, const cJSON *reply, cJSON *layouts)
{
	const cJSON *pool;

	cJSON_ArrayForEach(pool, ctl_list(reply, "pools")) {
		cJSON *args = cJSON_CreateObject(), *layout;
		int r;

		cJSON_AddNumberToObject(args, "pool", ctl_num(pool, "pool"));
		r = ctl_ask(ctl, "pool.layout", args, &layout);
		if (r)
			return r;
		cJSON_DeleteItemFromObjectCaseSensitive(layout, "id");
		cJSON_DeleteItemFromObjectCaseSensitive(layout, "ok");
		cJSON_AddItemToArray(cJSON_GetObjectItemCaseSensitive(layouts, "pools"),
				     layout);
	}
	return CTL_OK;
}

static int show_layouts(struct ctl *ctl)
{
	cJSON *layouts = cJSON_CreateObject(), *reply = NULL;
	int r = cJSON_AddArrayToObject(layouts, "pools")
			? ctl_ask(ctl, "pool.list", ctl_args_all(), &reply)
			: ctl_failed("out of memory");

	if (!r)
		r = take_layouts(ctl, reply, layouts);
	if (!r && ctl->json)
		ctl_print_json(layouts);
	else if (!r)
		r = print_layouts(layouts);
	cJSON_Delete(reply);
	cJSON_Delete(layouts);
	return r;
}

int ctl_run_pools(struct ctl *ctl)
{
	return ctl->layout ? show_layouts(ctl)
			   : ctl_show(ctl, "pool.list", ctl_args_all(), print_pools);
}
