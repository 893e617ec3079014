/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command cost: the times of routing query rows to a holder, fetching its KV and
 * recomputing it on a published fabric, by the closed form that kvd_decide() uses. This
 * needs no daemon; without a fabric cost_live.c queries one. A model is a name for a set
 * of dimensions, each of which can be overridden.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/table.h"
#include "daemon/base/mem.h"
#include "daemon/cost/cost.h"
#include "lib/kvd.h"

#define TOKENS_DEFAULT "2k,32k,128k"

static const struct model {
	const char *name;
	enum kvd_cost_kind kind;
	uint32_t layers, heads, kv_heads, dqk, dv;
} models[] = {
	{"v2-lite", KVD_COST_MLA, 27, 16, 1, 576, 512},
	{"v3", KVD_COST_MLA, 61, 128, 1, 576, 512},
	{"llama-8b", KVD_COST_GQA, 32, 32, 8, 128, 128},
	{"llama-70b", KVD_COST_GQA, 80, 64, 8, 128, 128},
};

struct asked {
	const struct cost_preset *preset;
	const struct model *model;
	struct kvd_decide_args args;
	uint64_t tokens[CTL_SIZES_MAX];
	unsigned int count, holders;
	double selected;
};

/* ---- the command line ---- */

static int cost_take_tokens(struct asked *asked, const char *text)
{
	if (ctl_sizes(text, 1000000000, asked->tokens, &asked->count))
		return CTL_OK;
	return ctl_usage("cost: --tokens: 1 to %u of N,N… like 2048,32k, not '%s'",
			 CTL_SIZES_MAX, text);
}

static int cost_take_preset(struct asked *asked, const char *name)
{
	asked->preset = name ? cost_preset_find(name) : NULL;
	if (asked->preset)
		return CTL_OK;
	fprintf(stderr, "kvd-ctl: cost: --preset NAME is one of\n");
	for (const struct cost_preset *p = cost_presets; p->name; p++)
		fprintf(stderr, "  %-14s %s\n", p->name, p->words);
	return CTL_USAGE;
}

static int cost_take_model(struct asked *asked, const char *name)
{
	for (size_t i = 0; i < ARRAY_LEN(models); i++)
		if (strcmp(models[i].name, name) == 0)
			asked->model = &models[i];
	if (asked->model)
		return CTL_OK;
	fprintf(stderr, "kvd-ctl: cost: --model NAME is one of");
	for (size_t i = 0; i < ARRAY_LEN(models); i++)
		fprintf(stderr, " %s", models[i].name);
	fputc('\n', stderr);
	return CTL_USAGE;
}

static uint32_t cost_or_given(uint32_t value, unsigned long given)
{
	return given ? (uint32_t)given : value;
}

static int cost_take_args(struct asked *asked, const struct ctl *ctl)
{
	const struct model *m = asked->model;
	char *end = NULL;
	double recompute = 0;

	if (ctl->cost.recompute) {
		recompute = strtod(ctl->cost.recompute, &end);
		if (end == ctl->cost.recompute || *end || !(recompute > 0) ||
		    !isfinite(recompute))
			return ctl_usage("cost: --recompute: µs per token and layer, not "
					 "'%s'",
					 ctl->cost.recompute);
	}
	asked->holders = ctl->cost.holders ? (unsigned int)ctl->cost.holders : 1;
	asked->selected = (double)ctl->cost.selected;
	asked->args = (struct kvd_decide_args){
		.kind = m->kind,
		.layers = cost_or_given(m->layers, ctl->cost.layers),
		.heads = cost_or_given(m->heads, ctl->cost.heads),
		.kv_heads = cost_or_given(m->kv_heads, ctl->cost.kv_heads),
		.dqk = cost_or_given(m->dqk, ctl->cost.dqk),
		.dv = cost_or_given(m->dv, ctl->cost.dv),
		.query_tokens = cost_or_given(1, ctl->cost.query),
		.steps = cost_or_given(1, ctl->cost.steps),
		.holder_count = asked->holders,
		.selected = ctl->cost.selected != 0,
		.shifted = ctl->cost.shifted,
		.recompute_us = recompute,
	};
	if (m->kind == KVD_COST_MLA && ctl->cost.kv_heads)
		return ctl_usage("cost: --kv-heads: %s has one KV row for all heads",
				 m->name);
	if (m->kind == KVD_COST_GQA && asked->args.kv_heads > asked->args.heads)
		return ctl_usage("cost: --kv-heads: at most the number of heads");
	return CTL_OK;
}

/* ---- the output ---- */

static const char *const way_names[] = {"none", "route", "fetch", "local"};

static void cost_add_number(cJSON *to, const char *name, double value)
{
	if (isinf(value)) /* JSON cannot represent it */
		cJSON_AddNullToObject(to, name);
	else
		cJSON_AddNumberToObject(to, name, value);
}

static int cost_add_row(const struct asked *asked, const struct kvd_cost_page *page,
			double tokens, cJSON *rows)
{
	struct kvd_cost_holder holders[KVD_COST_HOLDERS_MAX] = {0};
	struct kvd_decide_args args = asked->args;
	struct kvd_decide_result r;
	cJSON *row;
	int code;

	for (unsigned int i = 0; i < asked->holders; i++) {
		holders[i].tokens = (uint64_t)tokens / asked->holders;
		holders[i].selected =
			(uint64_t)fmin(asked->selected, tokens) / asked->holders;
	}
	args.holders = holders;
	code = kvd_decide(&args, page, &r);
	if (code < 0)
		return ctl_failed("cost: %.0f tokens: %s", tokens, kvd_code_name(code));
	row = cJSON_CreateObject();
	cJSON_AddNumberToObject(row, "tokens", tokens);
	cost_add_number(row, "round_us", r.round.us);
	cost_add_number(row, "attend_us", r.attend.us);
	cost_add_number(row, "once_us", r.once.us);
	cost_add_number(row, "even_steps", r.even_steps);
	cost_add_number(row, "route_us", r.route.us);
	cost_add_number(row, "fetch_us", r.fetch.us);
	cost_add_number(row, "local_us", r.local.us);
	cost_add_number(row, "route_error_us", r.route.error_us);
	cost_add_number(row, "fetch_error_us", r.fetch.error_us);
	cJSON_AddStringToObject(row, "way", way_names[r.way]);
	cJSON_AddBoolToObject(row, "sure", r.sure);
	cJSON_AddItemToArray(rows, row);
	return CTL_OK;
}

static cJSON *cost_answer_head(const struct asked *asked)
{
	const struct kvd_decide_args *args = &asked->args;
	cJSON *reply = cJSON_CreateObject();
	cJSON *preset = cJSON_AddObjectToObject(reply, "preset");
	cJSON *model = cJSON_AddObjectToObject(reply, "model");

	cJSON_AddStringToObject(preset, "name", asked->preset->name);
	cJSON_AddStringToObject(preset, "fabric", asked->preset->words);
	cJSON_AddNumberToObject(preset, "probe_us", asked->preset->probe);
	cJSON_AddNumberToObject(preset, "turn_us", asked->preset->turn);
	cJSON_AddNumberToObject(preset, "bytes_per_us", asked->preset->bandwidth);
	cJSON_AddNumberToObject(preset, "model_error", asked->preset->model_error);
	cJSON_AddStringToObject(model, "name", asked->model->name);
	cJSON_AddNumberToObject(model, "layers", args->layers);
	cJSON_AddNumberToObject(model, "heads", args->heads);
	cJSON_AddNumberToObject(model, "kv_heads", args->kv_heads);
	cJSON_AddNumberToObject(model, "dqk", args->dqk);
	cJSON_AddNumberToObject(model, "dv", args->dv);
	cJSON_AddNumberToObject(reply, "query_tokens", args->query_tokens);
	cJSON_AddNumberToObject(reply, "rows", (double)args->query_tokens * args->heads);
	cJSON_AddNumberToObject(reply, "steps", args->steps);
	cJSON_AddNumberToObject(reply, "holders", asked->holders);
	cJSON_AddNumberToObject(reply, "selected", asked->selected);
	cJSON_AddBoolToObject(reply, "shifted", args->shifted);
	return reply;
}

static void cost_cell_ms(struct table *table, const cJSON *row, const char *name)
{
	if (cJSON_IsNumber(cJSON_GetObjectItemCaseSensitive(row, name)))
		table_cellf(table, "%.3f", ctl_num(row, name) / 1000);
	else
		table_cell(table, NULL);
}

static int cost_print_text(const struct asked *asked, const cJSON *reply)
{
	const struct kvd_decide_args *args = &asked->args;
	struct table *table;
	const cJSON *row;

	printf("fabric   %s: probe %g µs, turnaround %g µs, %g GB/s, error %g %%\n",
	       asked->preset->words, asked->preset->probe, asked->preset->turn,
	       asked->preset->bandwidth / 1e3, 100 * asked->preset->model_error);
	printf("model    %s: %u layers; %s per step: %.0f rows; %s, %s\n",
	       asked->model->name, args->layers, ctl_count(args->query_tokens, "token"),
	       ctl_num(reply, "rows"), ctl_count(args->steps, "step"),
	       ctl_count(asked->holders, "holder"));
	printf("         times in ms; ROUND, ATTEND: per layer and step; S*: steps from "
	       "which a fetch is cheaper\n\n");
	table = table_new(
		">TOKENS >ROUND >ATTEND >FETCH_ONCE >S* >ROUTE >FETCH >LOCAL BEST");
	cJSON_ArrayForEach(row, ctl_list(reply, "prices")) {
		table_cellf(table, "%.0f", ctl_num(row, "tokens"));
		cost_cell_ms(table, row, "round_us");
		cost_cell_ms(table, row, "attend_us");
		cost_cell_ms(table, row, "once_us");
		if (cJSON_IsNumber(cJSON_GetObjectItemCaseSensitive(row, "even_steps")))
			table_cellf(table, "%.1f", ctl_num(row, "even_steps"));
		else
			table_cell(table, "never");
		cost_cell_ms(table, row, "route_us");
		cost_cell_ms(table, row, "fetch_us");
		cost_cell_ms(table, row, "local_us");
		table_cellf(table, "%s%s", ctl_str(row, "way", "?"),
			    ctl_true(row, "sure") ? "" : ", uncertain");
	}
	return ctl_print_table(table);
}

/* Whether no option of a preset or model was given. */
static bool cost_is_live(const struct ctl *ctl)
{
	const char *const words[] = {ctl->cost.preset, ctl->cost.model, ctl->cost.tokens,
				     ctl->cost.recompute};
	const unsigned long numbers[] = {
		ctl->cost.layers, ctl->cost.heads,   ctl->cost.kv_heads,
		ctl->cost.dqk,	  ctl->cost.dv,	     ctl->cost.query,
		ctl->cost.steps,  ctl->cost.holders, ctl->cost.selected};
	bool said = ctl->cost.shifted;

	for (size_t i = 0; i < ARRAY_LEN(words); i++)
		said |= words[i] != NULL;
	for (size_t i = 0; i < ARRAY_LEN(numbers); i++)
		said |= numbers[i] != 0;
	return !said;
}

int ctl_run_cost(struct ctl *ctl)
{
	struct asked asked = {.count = 0};
	struct kvd_cost_page *page;
	cJSON *reply, *rows;
	int r;

	if (cost_is_live(ctl))
		return ctl_cost_live(ctl);
	r = cost_take_preset(&asked, ctl->cost.preset);
	if (!r)
		r = cost_take_model(&asked,
				    ctl->cost.model ? ctl->cost.model : "v2-lite");
	if (!r)
		r = cost_take_tokens(&asked, ctl->cost.tokens ? ctl->cost.tokens
							      : TOKENS_DEFAULT);
	if (!r)
		r = cost_take_args(&asked, ctl);
	if (r)
		return r;
	if (kvd_cost_preset(asked.preset->name, &page) < 0)
		return ctl_failed("out of memory");
	reply = cost_answer_head(&asked);
	rows = cJSON_AddArrayToObject(reply, "prices");
	for (unsigned int i = 0; !r && i < asked.count; i++)
		r = cost_add_row(&asked, page, (double)asked.tokens[i], rows);
	kvd_cost_close(page);
	if (!r && ctl->json)
		ctl_print_json(reply);
	else if (!r)
		r = cost_print_text(&asked, reply);
	cJSON_Delete(reply);
	return r;
}
