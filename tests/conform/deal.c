/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Deals: one transfer with both sides' knowledge, and the model of what it must
 * do to memory. The model is the plain definition: rows in the order of the
 * runs, byte by byte from the source's image into the destination's. Nothing
 * of the daemon's own plan code is used for it.
 */
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "tests/conform/conform.h"

#define SAMPLES 64u

/* ---- the model ---- */

/* Into the destination's images, in place: no area is on both sides. */
static void rows_apply(const struct deal *deal)
{
	for (size_t i = 0; i < deal->run_count; i++) {
		const struct plan_run *run = &deal->runs[i];
		const struct place *src = &deal->src_places[run->src_buffer];
		const struct place *dst = &deal->dst_places[run->dst_buffer];
		uint64_t src_at = src->offset + run->src, dst_at = dst->offset + run->dst;

		for (uint64_t row = 0; row < run->count; row++) {
			memcpy(dst->area->image + dst_at, src->area->image + src_at,
			       run->len);
			src_at += (uint64_t)run->src_stride;
			dst_at += (uint64_t)run->dst_stride;
		}
	}
}

/* ---- making ---- */

static uint32_t plan_make_at(struct end *end, const struct plan_run *runs, size_t count)
{
	uint32_t slot = slot_take(&end->plans, PUPPET_PLANS);
	struct cmd cmd = {.type = CMD_PLAN,
			  .blob_len = (uint32_t)(count * sizeof(*runs)),
			  .a = {slot}};
	const void *blob;
	struct reply reply;
	int fd;

	reply = end_call_full(end, &cmd, runs, -1, &blob, &fd);
	CHECK(reply.result == 0, "plan: %s", reply.err.text);
	return slot;
}

/* Memory of the side itself by its registration, the other's by its key. */
static struct cmd_buffer buffer_at(struct end *end, const struct place *place, bool own)
{
	struct cmd_buffer buffer = {.mem = PUPPET_NONE,
				    .key = PUPPET_NONE,
				    .offset = place->offset,
				    .length = place->length};

	if (own)
		buffer.mem = place->area->slot;
	else
		buffer.key = area_key(place->area, end);
	return buffer;
}

static void sides_make(struct deal *deal, struct end *end, uint32_t slot, uint32_t plan,
		       bool is_src)
{
	uint32_t count = deal->src_count + deal->dst_count;
	size_t len = sizeof(struct cmd_sides) + count * sizeof(struct cmd_buffer);
	struct cmd_sides *head = mem_zalloc(len);
	struct cmd_buffer *buffers = (void *)(head + 1);
	struct cmd cmd = {
		.type = CMD_SIDES, .blob_len = (uint32_t)len, .a = {slot, plan}};
	const void *blob;
	int fd;

	CHECK(head, "no memory");
	*head = (struct cmd_sides){deal->src_count, deal->dst_count, PUPPET_NONE,
				   PUPPET_NONE};
	for (uint32_t i = 0; i < deal->src_count; i++)
		buffers[i] = buffer_at(end, &deal->src_places[i], is_src);
	for (uint32_t i = 0; i < deal->dst_count; i++)
		buffers[deal->src_count + i] =
			buffer_at(end, &deal->dst_places[i], !is_src);
	/* small deals in a large area would hash it once each: nobody asks */
	if (!is_src && deal->dst_places[0].area->length <= 4 * deal->bytes + (1 << 16))
		head->hash_mem = deal->dst_places[0].area->slot;
	else if (deal->poison)
		head->poison_mem = deal->src_places[0].area->slot;
	end_call_full(end, &cmd, head, -1, &blob, &fd);
	mem_free(head);
}

/* In a self world both sides live at one end, in slots of their own. */
static void deal_publish(struct deal *deal)
{
	if (deal->dst_sides == PUPPET_NONE || deal->run_count == 0)
		return;
	sides_make(deal, deal->src, deal->src_sides, deal->src_plan, true);
	sides_make(deal, deal->dst, deal->dst_sides, deal->dst_plan, false);
}

static void *dup_or_fail(const void *p, size_t len)
{
	void *copy = mem_dup(p, len);

	CHECK(copy, "no memory");
	return copy;
}

struct deal *deal_new(struct world *world, enum xp_kind kind, struct end *src,
		      struct end *dst, const struct place *src_places, uint32_t src_count,
		      const struct place *dst_places, uint32_t dst_count,
		      const struct plan_run *runs, size_t run_count)
{
	struct deal *deal = mem_zalloc(sizeof(*deal));

	CHECK(deal, "no memory");
	*deal = (struct deal){
		.world = world,
		.kind = kind,
		.src = src,
		.dst = dst,
		.src_places = dup_or_fail(src_places, src_count * sizeof(*src_places)),
		.dst_places = dup_or_fail(dst_places, dst_count * sizeof(*dst_places)),
		.src_count = src_count,
		.dst_count = dst_count,
		.runs = dup_or_fail(runs, run_count * sizeof(*runs)),
		.run_count = run_count,
		.op = PUPPET_NONE,
		.sequence = ++world->sequence,
		.src_plan = PUPPET_NONE,
		.dst_plan = PUPPET_NONE,
		.src_sides = PUPPET_NONE,
		.dst_sides = PUPPET_NONE,
	};
	deal->init = kind == XP_WRITE ? src : dst;
	deal->ans = kind == XP_WRITE ? dst : src;
	for (size_t i = 0; i < run_count; i++) {
		deal->bytes += runs[i].len * runs[i].count;
		deal->rows += runs[i].count;
	}
	list_push_back(&world->deals, &deal->link);
	if (run_count == 0)
		return deal;
	deal->src_plan = plan_make_at(src, runs, run_count);
	deal->dst_plan = plan_make_at(dst, runs, run_count);
	deal->src_sides = slot_take(&src->sides, PUPPET_SIDES);
	deal->dst_sides = slot_take(&dst->sides, PUPPET_SIDES);
	deal_publish(deal);
	return deal;
}

struct deal *deal_simple(struct world *world, enum xp_kind kind, struct area *src,
			 struct area *dst, const struct plan_run *runs, size_t run_count)
{
	const struct place from = {src, 0, src->length}, to = {dst, 0, dst->length};

	/* in a self world src and dst lie at one end */
	return deal_new(world, kind, src->at, dst->at, &from, 1, &to, 1, runs, run_count);
}

struct deal *deal_message(struct world *world, struct end *from, struct end *to)
{
	return deal_new(world, XP_WRITE, from, to, NULL, 0, NULL, 0, NULL, 0);
}

void deal_answer_with(struct deal *deal, const struct plan_run *runs, size_t run_count)
{
	bool at_dst = deal->kind == XP_WRITE;
	uint32_t *plan_p = at_dst ? &deal->dst_plan : &deal->src_plan;

	end_call(deal->ans, CMD_PLAN_FREE, *plan_p, 0, 0, 0);
	deal->ans->plans.used[*plan_p] = false;
	*plan_p = plan_make_at(deal->ans, runs, run_count);
	sides_make(deal, deal->ans, at_dst ? deal->dst_sides : deal->src_sides, *plan_p,
		   !at_dst);
}

/* ---- driving ---- */

static uint32_t init_sides(const struct deal *deal)
{
	return deal->kind == XP_WRITE ? deal->src_sides : deal->dst_sides;
}

static uint32_t ans_sides(const struct deal *deal)
{
	return deal->kind == XP_WRITE ? deal->dst_sides : deal->src_sides;
}

int deal_post(struct deal *deal, size_t header_len)
{
	struct cmd cmd = {.type = CMD_POST};
	const void *blob;
	struct reply reply;
	int fd;

	if (deal->poison)
		deal_publish(deal);
	deal->op = slot_take(&deal->init->ops, PUPPET_OPS);
	deal->header_len = header_len;
	cmd.a[0] = deal->op;
	cmd.a[1] = deal->ans->index;
	cmd.a[2] = deal->kind;
	cmd.a[3] = init_sides(deal);
	cmd.a[4] = header_len;
	cmd.a[5] = deal->sequence;
	cmd.a[6] = ans_sides(deal);
	reply = end_call_full(deal->init, &cmd, NULL, -1, &blob, &fd);
	deal->posted = reply.result == 0;
	if (reply.result < 0)
		deal->refused = reply.err;
	return reply.result;
}

static uint32_t in_of(struct deal *deal)
{
	uint32_t requests;

	if (deal->header_len >= PUPPET_HEADER_MIN)
		return (uint32_t)end_call(deal->ans, CMD_IN_FIND, deal->sequence, 0, 0, 0)
			.v[0];
	/* no room for a number: the case has nothing else under way */
	requests = (uint32_t)end_requests(deal->ans);
	return requests ? requests - 1 : PUPPET_NONE;
}

bool deal_asked(struct deal *deal)
{
	return in_of(deal) != PUPPET_NONE;
}

void deal_land(struct deal *deal)
{
	end_call(deal->ans, CMD_LAND, in_of(deal), ans_sides(deal), 0, 0);
}

static void say_to_in(struct deal *deal, enum cmd_type type, enum err_code code,
		      const char *words)
{
	struct cmd cmd = {.type = type,
			  .blob_len = (uint32_t)strlen(words) + 1,
			  .a = {in_of(deal), code}};
	const void *blob;
	int fd;

	if (cmd.a[0] != PUPPET_NONE)
		end_call_full(deal->ans, &cmd, words, -1, &blob, &fd);
}

void deal_refuse(struct deal *deal, enum err_code code, const char *words)
{
	say_to_in(deal, CMD_REFUSE, code, words);
}

void deal_revoke(struct deal *deal, enum err_code code, const char *words)
{
	say_to_in(deal, CMD_REVOKE, code, words);
}

void deal_cancel(struct deal *deal, enum err_code code)
{
	end_call(deal->init, CMD_CANCEL, deal->op, code, 0, 0);
}

struct outcome deal_op(struct deal *deal)
{
	struct cmd cmd = {.type = CMD_OP_STATE, .a = {deal->op}};
	const void *blob;
	struct reply reply;
	struct outcome outcome = {.there = deal->posted, .bytes = deal->bytes};
	int fd;

	reply = end_call_full(deal->init, &cmd, NULL, -1, &blob, &fd);
	outcome.dones = (unsigned int)reply.v[0];
	outcome.code = (int64_t)reply.v[1] < 0 ? (enum err_code)reply.v[3] : ERR_OK;
	outcome.moved = reply.v[2];
	outcome.hash = reply.v[4];
	if (reply.blob_len)
		snprintf(outcome.text, sizeof(outcome.text), "%s", (const char *)blob);
	return outcome;
}

struct outcome deal_in(struct deal *deal)
{
	uint32_t in = in_of(deal);
	struct cmd cmd = {.type = CMD_IN_STATE, .a = {in}};
	const void *blob;
	struct reply reply;
	struct outcome outcome = {.there = in != PUPPET_NONE};
	int fd;

	if (!outcome.there)
		return outcome;
	reply = end_call_full(deal->ans, &cmd, NULL, -1, &blob, &fd);
	outcome.kind = (enum xp_kind)reply.v[0];
	outcome.header_len = reply.v[1];
	outcome.header_ok = reply.v[2] != 0;
	outcome.bytes = reply.v[3];
	outcome.moved = reply.v[4];
	outcome.dones = (unsigned int)reply.v[5];
	outcome.code = (enum err_code)reply.v[6];
	outcome.hash = reply.v[7];
	if (reply.blob_len)
		snprintf(outcome.text, sizeof(outcome.text), "%s", (const char *)blob);
	return outcome;
}

/* ---- looking ---- */

/* Where byte `at` of the stream goes; false when its row ends before 8 more. */
static bool stream_place(const struct deal *deal, uint64_t at,
			 const struct place **place_p, uint64_t *offset_p)
{
	for (size_t i = 0; i < deal->run_count; i++) {
		const struct plan_run *run = &deal->runs[i];
		uint64_t row, byte;

		if (at >= run->len * run->count) {
			at -= run->len * run->count;
			continue;
		}
		row = at / run->len;
		byte = at % run->len;
		*place_p = &deal->dst_places[run->dst_buffer];
		*offset_p = (*place_p)->offset + run->dst +
			    row * (uint64_t)run->dst_stride + byte;
		return run->len - byte >= AREA_SAMPLE;
	}
	return false;
}

/* of one area */
struct samples {
	const struct area *area;
	uint64_t offsets[SAMPLES];
	unsigned int count, seen, changed;
};

static void samples_take(struct samples *s)
{
	uint8_t now[SAMPLES][AREA_SAMPLE];

	if (s->count && area_samples(s->area, s->offsets, s->count, now)) {
		s->seen += s->count;
		for (unsigned int i = 0; i < s->count; i++)
			s->changed += memcmp(now[i], s->area->image + s->offsets[i],
					     AREA_SAMPLE) != 0;
	}
	s->count = 0;
}

bool deal_flying(struct deal *deal)
{
	struct samples s = {0};

	for (unsigned int i = 0; i < SAMPLES; i++) {
		const struct place *place;
		uint64_t offset;

		if (!stream_place(deal, deal->bytes / SAMPLES * i, &place, &offset))
			continue;
		if (place->area != s.area)
			samples_take(&s);
		s.area = place->area;
		s.offsets[s.count++] = offset;
	}
	samples_take(&s);
	return s.changed > 0 && s.changed < s.seen;
}

void deal_succeeded(struct deal *deal)
{
	struct outcome op = deal_op(deal), in = deal_in(deal);

	CHECK(op.dones == 1, "on_done came %u times", op.dones);
	CHECK(op.code == ERR_OK, "the op failed: %s: %s", err_name(op.code), op.text);
	CHECK(in.there && in.dones == 1, "on_inbound_done came %u times", in.dones);
	CHECK(in.code == ERR_OK, "the inbound failed: %s: %s", err_name(in.code),
	      in.text);
	CHECK(in.header_ok && in.header_len == deal->header_len, "the header is wrong");
	CHECK(in.kind == deal->kind || (deal->kind == XP_READ && in.kind == XP_CHECK),
	      "a request of kind %d", (int)in.kind);
	CHECK(in.bytes == deal->bytes, "announced %llu bytes of %llu",
	      (unsigned long long)in.bytes, (unsigned long long)deal->bytes);
	CHECK(op.moved == deal->bytes, "op->moved is %llu of %llu",
	      (unsigned long long)op.moved, (unsigned long long)deal->bytes);
	rows_apply(deal);
}

/* What was read after the source's done may be anything the source did then,
 * as long as the destination does not call it a success. */
static bool may_be_poison(struct deal *deal)
{
	struct outcome dst;

	if (!deal->poison)
		return false;
	if (!(deal->dst == deal->init ? deal->init : deal->ans)->alive)
		return true;
	dst = deal->kind == XP_WRITE ? deal_in(deal) : deal_op(deal);
	return !(dst.dones && dst.code == ERR_OK);
}

/* One row of a torn deal: old or new, and from now on what is there is right. */
static bool torn_row(struct deal *deal, bool poison, uint8_t *image, const uint8_t *now,
		     const uint8_t *final, uint64_t len)
{
	bool fine = true;

	for (uint64_t i = 0; i < len; i++) {
		if (now[i] == image[i])
			continue;
		fine = fine &&
		       (now[i] == final[i] || (poison && now[i] == PUPPET_POISON));
		deal->written++;
		image[i] = now[i];
	}
	return fine;
}

/* The rows of a run; the destination's do not overlap in such a deal. */
static bool torn_run(struct deal *deal, const struct plan_run *run, bool poison)
{
	const struct place *src = &deal->src_places[run->src_buffer];
	const struct place *dst = &deal->dst_places[run->dst_buffer];
	uint64_t src_at = src->offset + run->src, dst_at = dst->offset + run->dst;
	uint64_t last = dst_at + (run->count - 1) * (uint64_t)run->dst_stride;
	uint64_t low = last < dst_at ? last : dst_at;
	uint64_t span = (last < dst_at ? dst_at : last) + run->len - low;
	uint8_t *now = mem_zalloc(span);
	bool fine = true;

	CHECK(now && area_read(dst->area, low, now, span), "an area's memory is gone");
	for (uint64_t row = 0; row < run->count; row++) {
		fine = torn_row(deal, poison, dst->area->image + dst_at,
				now + (dst_at - low), src->area->image + src_at,
				run->len) &&
		       fine;
		src_at += (uint64_t)run->src_stride;
		dst_at += (uint64_t)run->dst_stride;
	}
	mem_free(now);
	return fine;
}

void deal_torn(struct deal *deal)
{
	bool fine = true, poison = may_be_poison(deal);

	deal->written = 0;
	for (size_t i = 0; i < deal->run_count; i++)
		fine = torn_run(deal, &deal->runs[i], poison) && fine;
	CHECK(fine, "a torn row has bytes that are neither old nor new");
}

static void slot_give(struct end *end, struct slots *slots, enum cmd_type type,
		      uint32_t slot)
{
	const struct cmd cmd = {.type = type, .a = {slot}};

	if (slot == PUPPET_NONE)
		return;
	if (end->alive)
		end_post(end, &cmd, NULL);
	slots->used[slot] = false;
}

void deal_free(struct deal *deal)
{
	slot_give(deal->init, &deal->init->ops, CMD_OP_CLEAR, deal->op);
	slot_give(deal->src, &deal->src->sides, CMD_SIDES_CLEAR, deal->src_sides);
	slot_give(deal->dst, &deal->dst->sides, CMD_SIDES_CLEAR, deal->dst_sides);
	slot_give(deal->src, &deal->src->plans, CMD_PLAN_FREE, deal->src_plan);
	slot_give(deal->dst, &deal->dst->plans, CMD_PLAN_FREE, deal->dst_plan);
	list_remove(&deal->link);
	mem_free(deal->src_places);
	mem_free(deal->dst_places);
	mem_free(deal->runs);
	mem_free(deal);
}

void deal_run(struct deal *deal)
{
	CHECK(deal_post(deal, HEADER_BYTES) == 0, "post: %s", deal->refused.text);
	world_settle(deal->world);
	deal_succeeded(deal);
}
