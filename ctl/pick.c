/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command pick: which pair a request would get, and what is predicted of each worker.
 * It asks once, so speeds are what workers have computed lately, and what routers have
 * reserved is not known here: what is shown is what a router that starts now would do.
 */
#include <stdlib.h>
#include <string.h>

#include "ctl/sides.h"
#include "ctl/table.h"
#include "ctl/words.h"
#include "daemon/base/mem.h"

static const char *const pick_sides[KVD_PICK_SIDES] = {"prefill", "decode"};
static const char *const pick_states[] = {"serving", "draining", "gone"};

struct pick_asked {
	struct kvd_pick_args args;
	struct kvd_pick_near near[ARRAY_LEN(((struct ctl *)NULL)->near.word)];
	char names[ARRAY_LEN(((struct ctl *)NULL)->near.word)][KVD_PICK_NAME_MAX];
};

/* WORKER=TOKENS */
static int pick_take_near(struct pick_asked *asked, const char *text, unsigned int i)
{
	const char *equals = strrchr(text, '=');
	size_t length = equals ? (size_t)(equals - text) : 0;
	char *end = NULL;

	if (!length || length >= KVD_PICK_NAME_MAX || equals[1] < '0' || equals[1] > '9')
		return ctl_usage("pick: --near: WORKER=TOKENS, not '%s'", text);
	asked->near[i].tokens = (double)strtoul(equals + 1, &end, 10);
	if (*end)
		return ctl_usage("pick: --near: WORKER=TOKENS, not '%s'", text);
	memcpy(asked->names[i], text, length);
	asked->near[i].worker = asked->names[i];
	return CTL_OK;
}

static int pick_take_args(struct pick_asked *asked, const struct ctl *ctl)
{
	*asked = (struct pick_asked){.args = {.prompt_tokens = (double)ctl->pick.prompt,
					      .output_tokens = (double)ctl->pick.output,
					      .bytes = (double)ctl->pick.bytes,
					      .near_count = ctl->near.count}};
	asked->args.near = asked->near;
	for (unsigned int i = 0; i < ctl->near.count; i++) {
		int r = pick_take_near(asked, ctl->near.word[i], i);

		if (r)
			return r;
	}
	return CTL_OK;
}

/* ---- the answer ---- */

static cJSON *pick_score_json(const char *worker, const struct kvd_pick_score *score)
{
	cJSON *json = cJSON_CreateObject();

	cJSON_AddStringToObject(json, "worker", worker);
	cJSON_AddNumberToObject(json, "total_s", score->total_s);
	cJSON_AddNumberToObject(json, "queue_s", score->queue_s);
	cJSON_AddNumberToObject(json, "compute_s", score->compute_s);
	cJSON_AddNumberToObject(json, "transfer_s", score->transfer_s);
	cJSON_AddNumberToObject(json, "penalty_s", score->penalty_s);
	cJSON_AddBoolToObject(json, "last_resort", score->last_resort);
	cJSON_AddBoolToObject(json, "fresh", score->fresh);
	return json;
}

struct pick_row {
	char worker[KVD_PICK_NAME_MAX];
	enum kvd_pick_state state;
	struct kvd_pick_score score;
};

static int pick_order(const void *a, const void *b)
{
	const struct pick_row *x = a, *y = b;

	if (x->state != y->state)
		return (x->state > y->state) - (x->state < y->state);
	if (x->score.last_resort != y->score.last_resort)
		return x->score.last_resort ? 1 : -1;
	if (x->score.total_s != y->score.total_s)
		return x->score.total_s > y->score.total_s ? 1 : -1;
	return strcmp(x->worker, y->worker);
}

/* Each worker of a side, the best first. */
static cJSON *pick_rows(struct sides *sides, enum kvd_pick_side side,
			const struct kvd_pick_args *args)
{
	cJSON *list = cJSON_CreateArray();
	struct pick_row *rows;
	size_t all;

	kvd_picker_count(sides->picker, side, &all);
	rows = mem_calloc(all, sizeof(*rows));
	for (size_t i = 0; rows && i < all; i++)
		kvd_picker_score(sides->picker, side, i, args, sides->now_ns,
				 rows[i].worker, &rows[i].state, &rows[i].score);
	if (rows)
		qsort(rows, all, sizeof(*rows), pick_order);
	for (size_t i = 0; rows && i < all; i++) {
		cJSON *json = pick_score_json(rows[i].worker, &rows[i].score);

		cJSON_AddStringToObject(json, "state", pick_states[rows[i].state]);
		cJSON_AddItemToArray(list, json);
	}
	mem_free(rows);
	return list;
}

static void pick_print_side(const char *side, const char *worker, const cJSON *rows)
{
	struct table *table;
	const cJSON *row;

	printf("%s  %s\n", side, *worker ? worker : "none serves");
	if (!cJSON_GetArraySize(rows))
		return;
	if (table_new("WORKER STATE >FIRST_TOKEN >QUEUE >COMPUTE >TRANSFER >PENALTY NOTE",
		      &table))
		return;
	cJSON_ArrayForEach(row, rows) {
		table_cell(table, ctl_str(row, "worker", "-"));
		table_cell(table, ctl_str(row, "state", "-"));
		table_cell(table, ctl_ms(ctl_num(row, "total_s") * 1000));
		table_cell(table, ctl_ms(ctl_num(row, "queue_s") * 1000));
		table_cell(table, ctl_ms(ctl_num(row, "compute_s") * 1000));
		table_cell(table, ctl_ms(ctl_num(row, "transfer_s") * 1000));
		table_cell(table, ctl_ms(ctl_num(row, "penalty_s") * 1000));
		table_cell(table, ctl_true(row, "last_resort") ? "no room for its KV"
				  : ctl_true(row, "fresh")     ? ""
							       : "no load is known");
	}
	ctl_print_table(table);
}

static int pick_print(struct sides *sides, const struct kvd_pick_args *args,
		      const struct kvd_pick_result *r, cJSON *scores)
{
	cJSON *reply;

	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++)
		cJSON_AddItemToObject(scores, pick_sides[side],
				      pick_rows(sides, side, args));
	if (!sides->ctl->json) {
		words_clean_json(scores);
		for (unsigned int side = 0; side < KVD_PICK_SIDES; side++) {
			char worker[KVD_PICK_NAME_MAX];

			memcpy(worker, r->worker[side], sizeof(worker));
			words_clean(worker);
			pick_print_side(pick_sides[side], worker,
					ctl_list(scores, pick_sides[side]));
		}
		cJSON_Delete(scores);
		return CTL_OK;
	}
	reply = cJSON_CreateObject();
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++)
		if (*r->worker[side])
			cJSON_AddItemToObject(
				reply, pick_sides[side],
				pick_score_json(r->worker[side], &r->score[side]));
		else
			cJSON_AddNullToObject(reply, pick_sides[side]);
	cJSON_AddItemToObject(reply, "scores", scores);
	ctl_print_json(reply);
	cJSON_Delete(reply);
	return CTL_OK;
}

int ctl_run_pick(struct ctl *ctl)
{
	struct kvd_pick_result result;
	struct pick_asked asked;
	struct sides sides;
	cJSON *scores;
	int r, code;

	r = pick_take_args(&asked, ctl);
	if (r)
		return r;
	r = sides_open(&sides, ctl, "pick");
	if (!r)
		r = sides_look(&sides, false);
	while (!r && sides.from) /* the last of a file */
		r = sides_look(&sides, false);
	if (r == SIDES_END)
		r = sides.line > 1 ? CTL_OK : ctl_failed("%s: no line", ctl->from);
	if (!r) {
		scores = cJSON_CreateObject();
		code = kvd_pick(sides.picker, &asked.args, sides.now_ns, &result);
		/* without its own reservation */
		kvd_pick_release(sides.picker, result.id, sides.now_ns);
		if (code == 0 || code == -KVD_E_NOTFOUND)
			r = pick_print(&sides, &asked.args, &result, scores);
		else
			cJSON_Delete(scores);
		if (code == -KVD_E_NOTFOUND)
			r = ctl_failed(
				"pick: no worker of a group serves: kvd-ctl group");
		else if (code)
			r = ctl_failed("pick: %s", kvd_code_name(code));
	}
	sides_close(&sides);
	return r;
}
