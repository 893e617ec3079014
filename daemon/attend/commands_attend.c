/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attention.*: buffers ("seats") for query rows, and attention over chunks on the daemon
 * that has them (daemon/attend/attend.h).
 *
 * Attention requests are entries of the submission ring and have no command: a reply is
 * needed within microseconds, which a line of JSON exceeds.
 */

#include <errno.h>
#include <stdio.h>

#include "daemon/attend/attend.h"
#include "daemon/attend/commands_attend.h"
#include "daemon/base/context.h"
#include "proto/out.h"
#include "daemon/session/session.h"

static const char *const kinds[] = {"mla", "gqa", NULL};
static const char *const types[] = {"bf16", "fp16", "fp32", "fp8_e4m3", NULL};
static const char *const outs[] = {"fp32", "bf16", NULL};
static const char *const pairs[] = {"halves", "interleaved", NULL};

/* ---- attention.open ---- */

struct open_args {
	uint64_t region, offset;
	uint32_t rows, seats;
	int kind, q_type, kv_type, out_type;
	uint32_t heads, kv_heads, first_head, dqk, dv;
	double scale, softcap;
	const char *view, *key, *value, *key_scale, *value_scale;
	const cJSON *rope;
};
static const struct field open_fields[] = {
	F_ID("region", open_args, region, REQUIRED,
	     "Region of this session that contains the seats; its kind is memfd"),
	F_ID("offset", open_args, offset, OPTIONAL,
	     "Byte offset of the first seat in the region, a multiple of 64; default 0"),
	F_INT("rows", open_args, rows, REQUIRED, 1, ATTEND_ROWS_MAX,
	      "Query rows per seat: query tokens x heads"),
	F_INT("seats", open_args, seats, DEFAULT(1), 1, ATTEND_SEATS_MAX,
	      "Number of seats, laid out contiguously; default 1"),
	F_CHOICE("kind", open_args, kind, REQUIRED, kinds,
		 "mla: one latent vector per token, whose first dv values are v; gqa: "
		 "separate heads of k and v"),
	F_CHOICE("q_type", open_args, q_type, REQUIRED, types,
		 "Data type of the query rows"),
	F_CHOICE("kv_type", open_args, kv_type, REQUIRED, types,
		 "Data type of the chunks; the requester applies scales of a tensor or "
		 "a head of fp8 to q and o"),
	F_CHOICE("out_type", open_args, out_type, DEFAULT(0), outs,
		 "Data type of o in the replies of other daemons; default fp32"),
	F_INT("heads", open_args, heads, REQUIRED, 1, UINT16_MAX,
	      "Query heads per token"),
	F_INT("kv_heads", open_args, kv_heads, DEFAULT(1), 1, UINT16_MAX,
	      "KV heads; default 1; must be 1 for mla"),
	F_INT("first_head", open_args, first_head, OPTIONAL, 0, INT32_MAX,
	      "Index of the first KV head among the model's; default 0"),
	F_INT("dqk", open_args, dqk, REQUIRED, 1, ATTEND_DIMS_MAX,
	      "Values per query row and per key"),
	F_INT("dv", open_args, dv, REQUIRED, 1, ATTEND_DIMS_MAX, "Values per v row"),
	F_NUMBER("scale", open_args, scale, REQUIRED, "Factor applied to the scores"),
	F_NUMBER("softcap", open_args, softcap, OPTIONAL,
		 "Scores become softcap x tanh(score / softcap); default 0: off"),
	F_STR("view", open_args, view, OPTIONAL, FORM_NAME_MAX - 1,
	      "View of the chunks; default: the only view"),
	F_STR("key", open_args, key, REQUIRED, FORM_NAME_MAX - 1,
	      "Field of the view that contains the keys; for mla: the latents"),
	F_STR("value", open_args, value, OPTIONAL, FORM_NAME_MAX - 1,
	      "gqa: field of the view that contains v"),
	F_STR("key_scale", open_args, key_scale, OPTIONAL, FORM_NAME_MAX - 1,
	      "fp8_e4m3: field of the view with an fp32 for each head of a token, by "
	      "which k is multiplied; for mla: k and v"),
	F_STR("value_scale", open_args, value_scale, OPTIONAL, FORM_NAME_MAX - 1,
	      "The same for v; not for mla"),
	F_OBJECT("rope", open_args, rope, OPTIONAL,
		 "Rotary embedding {first, dims, pairs: halves or interleaved, "
		 "inv_freq: [dims / 2 numbers]}, for chunks used at other positions "
		 "than they were computed at"),
	F_END,
};

struct rope_args {
	uint32_t first, dims;
	int pairs;
	const cJSON *inv_freq;
};
static const struct field rope_fields[] = {
	F_INT("first", rope_args, first, REQUIRED, 0, ATTEND_DIMS_MAX, ""),
	F_INT("dims", rope_args, dims, REQUIRED, 2, FORM_ROPE_MAX, ""),
	F_CHOICE("pairs", rope_args, pairs, REQUIRED, pairs, ""),
	F_ARRAY("inv_freq", rope_args, inv_freq, REQUIRED, ROPE_PAIRS_MAX, ""),
	F_END,
};

static int rope_read(const cJSON *json, struct form_rope *rope)
{
	struct rope_args args;
	const cJSON *item;
	uint32_t n = 0;
	int r = fields_read_all(rope_fields, json, &args);

	if (r < 0)
		return err_prefix(r, "rope");
	if ((uint32_t)cJSON_GetArraySize(args.inv_freq) * 2 != args.dims)
		return err_raise(ERR_INVAL,
				 "rope.inv_freq: %d numbers for %u values; give dims / "
				 "2 numbers",
				 cJSON_GetArraySize(args.inv_freq), args.dims);
	rope->first = args.first;
	rope->dims = args.dims;
	rope->pairs = (uint8_t)args.pairs;
	cJSON_ArrayForEach(item, args.inv_freq) {
		if (!cJSON_IsNumber(item))
			return err_raise(ERR_INVAL, "rope.inv_freq[%u]: not a number", n);
		rope->inv_freq[n++] = item->valuedouble;
	}
	return 0;
}

static int open_read(const struct open_args *args, struct attend_args *out)
{
	struct form *form = &out->form;

	*out = (struct attend_args){.region = args->region,
				    .offset = args->offset,
				    .rows = args->rows,
				    .seats = args->seats};
	form->shape = (struct attend_shape){.kind = (uint8_t)args->kind,
					    .q_type = (uint8_t)args->q_type,
					    .kv_type = (uint8_t)args->kv_type,
					    .heads = (uint16_t)args->heads,
					    .kv_heads = (uint16_t)args->kv_heads,
					    .dqk = (uint16_t)args->dqk,
					    .dv = (uint16_t)args->dv,
					    .scale = (float)args->scale,
					    .softcap = (float)args->softcap};
	form->out_bf16 = args->out_type;
	form->first_head = args->first_head;
	field_copy(form->view, sizeof(form->view), args->view);
	snprintf(form->key, sizeof(form->key), "%s", args->key);
	field_copy(form->value, sizeof(form->value), args->value);
	field_copy(form->key_scale, sizeof(form->key_scale), args->key_scale);
	field_copy(form->value_scale, sizeof(form->value_scale), args->value_scale);
	if (args->kind == ATTEND_GQA && !args->value)
		return err_raise(ERR_INVAL, "value: missing; required for gqa");
	return args->rope ? err_pass(rope_read(args->rope, &form->rope)) : 0;
}

static int open_run(struct request *req)
{
	struct attend_facts facts;
	struct attend_args args;
	struct attend *attend;
	struct reply reply;
	struct text *out;
	int r;

	if (!attends_of(req->kvd))
		return err_raise(ERR_STATE, "the chunk store is off; set chunk_memory");
	r = open_read(request_args(req), &args);
	if (r >= 0)
		r = attend_open(req->session, &args, &attend);
	if (r < 0)
		return err_pass(r);
	attend_facts(attend, &facts);
	out = reply_begin(&reply, req);
	out_number(out, "attend", facts.id);
	out_number(out, "seat_bytes", facts.seat_bytes);
	out_number(out, "q", facts.q);
	out_number(out, "o", facts.o);
	out_number(out, "m", facts.m);
	out_number(out, "l", facts.l);
	out_number(out, "ready", facts.ready);
	out_number(out, "done", facts.done);
	return reply_end(&reply);
}

/* ---- attention.close ---- */

static const struct field key_fields[] = {
	F_ID("attend", request_id_args, id, REQUIRED,
	     "Attention context of this session"),
	F_END,
};

static int close_run(struct request *req)
{
	const struct request_id_args *args = request_args(req);
	struct attend *attend = attend_find(req->session, args->id);

	if (!attend)
		return err_pass(-ENOENT);
	attend_close(attend);
	return request_reply(req);
}

const struct command attend_commands[] = {
	{"attention.open",
	 "Open an attention context with buffers (seats) for query rows", open_fields, 0,
	 open_run,
	 "attend: the context; seat_bytes: distance between seats; q, o, m, l, ready, "
	 "done: byte offsets within a seat. o, m and l are fp32, ready and done the "
	 "64-bit words of ordered requests"},
	{"attention.close", "Close an attention context; its requests end", key_fields, 0,
	 close_run, "nothing"},
	{.name = NULL},
};
