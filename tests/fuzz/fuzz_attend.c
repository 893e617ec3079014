/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_attend: two daemons with chunks, one of which asks; and what the input says in the
 * name of each to the other: ATTEND that is right but for what the input changes, or is
 * the input's bytes; ATTENTION_RESULT and ATTENTION_CANCEL of numbers that there are, or
 * not; posts, cancels, holds that end.
 *
 * Whatever comes: a seat whose post has ended is still, nothing is left at the end, and
 * memory outside is not touched (the sanitizer's part).
 *
 * Input: steps of [what] and what it takes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/attend/attend.h"
#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/loop/offload.h"
#include "tests/fuzz/lib/fuzz.h"
#include "tests/lib/attend_world.h"

#define STEPS_MAX 48
#define SEATS 4u
#define MARK 0x77

static struct attend_world w;
static bool begun;
/* fp8 with scales, whose results are fp32; without, in bf16; with the same seats */
static uint64_t attends[2];
static uint8_t bodies[WIRE_T_ATTENTION_CANCEL + 1]
		     [8192]; /* the first of each that came */
static size_t lengths[WIRE_T_ATTENTION_CANCEL + 1];
static uint64_t numbers[4];
static unsigned int number_at;

static void need(bool holds)
{
	if (!holds)
		abort();
}

static bool tap(unsigned int node, const struct wire_header *h, struct cursor body,
		void *arg)
{
	size_t len = cursor_left(&body);
	struct wire_attend msg;

	(void)node;
	(void)arg;
	if (len <= sizeof(bodies[0]) && !lengths[h->type]) {
		memcpy(bodies[h->type], cursor_get_bytes(&body, len), len);
		lengths[h->type] = len;
		return false;
	}
	if (h->type == WIRE_T_ATTEND && wire_attend_get(&body, &msg) == 0)
		numbers[number_at++ % 4] = msg.attend;
	return false;
}

/* As if the other had said it. What breaks the protocol would end the line. */
static void say(unsigned int to, enum wire_type type, const void *body, size_t len)
{
	const struct wire_header h = {.type = (uint16_t)type};
	uint8_t *exact = malloc(len + !len); /* so that a read behind it is seen */
	struct cursor in;

	memcpy(exact, body, len);
	cursor_read(&in, exact, len);
	(void)attends_on_message(attend_world_remote(&w, to), &h, &in);
	err_clear();
	free(exact);
}

/* ---- steps ---- */

static void seat_mark(unsigned int seat)
{
	memset(attend_world_floats(&w, seat, w.o), MARK, w.seat_bytes - w.o);
}

static void post(struct cursor *in)
{
	uint8_t how = cursor_get_u8(in), more = cursor_get_u8(in);
	unsigned int seat = how & 3;
	struct kvd_ring_part part = attend_world_part(how & 4 ? w.near : w.hold);
	uint32_t select[4];

	if (attend_world_state(&w, seat) == KVD_TRANSFERRING)
		return;
	part.first = how >> 3 & 1;
	part.count -= part.first;
	part.tokens = more & 63;
	if (how & 16)
		part.per_token = 2;
	for (unsigned int i = 0; i < 4; i++)
		select[i] = more % (17 + i);
	attend_world_rows(&w, seat, more);
	seat_mark(seat);
	if (how & 32)
		attend_world_post_for(&w, seat, &part, 1000);
	else
		attend_world_post(&w, seat, how >> 6, &part, 1, select,
				  part.per_token ? 4 : 0);
}

static void cancel(unsigned int seat)
{
	const struct kvd_ring_entry e = {.op = KVD_RING_CANCEL,
					 .a = KVD_RING_IDS + AW_SLOT + seat};

	entry_give(&w.c, w.engine[AW_REQUESTER], &e, NULL);
}

/* The first ATTEND that came, with some bytes of it changed. */
static void forge_ask(struct cursor *in)
{
	uint8_t body[sizeof(bodies[0])], n = cursor_get_u8(in);
	size_t len = lengths[WIRE_T_ATTEND];

	memcpy(body, bodies[WIRE_T_ATTEND], len);
	for (unsigned int i = 0; i < (n & 7); i++) {
		size_t at = cursor_get_u16(in) % len;

		body[at] ^= cursor_get_u8(in);
	}
	if (n & 128)
		len -= cursor_get_u8(in) % len;
	say(AW_HOLDER, WIRE_T_ATTEND, body, len);
}

static void forge_answer(struct cursor *in)
{
	uint8_t how = cursor_get_u8(in);
	static const uint8_t values[AW_ROWS * (AW_DIMS + 2) * 4];
	struct wire_attention_result msg = {.attend =
						    how & 4 ? how >> 3 : numbers[how & 3],
					    .code = how & 16 ? cursor_get_u16(in) : 0,
					    .together = 3,
					    .text = "no"};
	uint8_t body[1024];
	struct cursor out;

	msg.values.data = values;
	msg.values.len = how & 32 ? cursor_get_u8(in) : sizeof(values);
	cursor_write(&out, body, sizeof(body));
	need(wire_attention_result_put(&out, &msg) == 0);
	say(AW_REQUESTER, WIRE_T_ATTENTION_RESULT, body, out.pos);
}

static void forge_stop(struct cursor *in)
{
	uint8_t how = cursor_get_u8(in);
	const struct wire_attention_cancel msg = {.attend = how & 4 ? how
								    : numbers[how & 3]};
	uint8_t body[64];
	struct cursor out;

	cursor_write(&out, body, sizeof(body));
	need(wire_attention_cancel_put(&out, &msg) == 0);
	say(AW_HOLDER, WIRE_T_ATTENTION_CANCEL, body, out.pos);
}

static void garbage(struct cursor *in)
{
	uint8_t how = cursor_get_u8(in);
	size_t len = cursor_get_u8(in);
	const void *body = cursor_get_bytes(in, len);

	if (body)
		say(how & 1, WIRE_T_ATTEND + how % 3, body, len);
}

static void hold_again(uint64_t *hold, unsigned int first)
{
	cluster_ok(&w.c, w.engine[AW_REQUESTER], "{'cmd':'chunk.release','hold':%llu}",
		   (unsigned long long)*hold);
	*hold = attend_world_hold(&w, AW_REQUESTER, first, AW_CHUNKS, 600000);
}

static void step(struct cursor *in)
{
	uint8_t what = cursor_get_u8(in);

	switch (what & 7) {
	case 0:
	case 1:
		post(in);
		break;
	case 2:
		forge_ask(in);
		break;
	case 3:
		forge_answer(in);
		break;
	case 4:
		if (what & 8)
			cancel(what >> 4 & 3);
		else
			forge_stop(in);
		break;
	case 5:
		garbage(in);
		break;
	case 6:
		if (what & 64)
			hold_again(&w.hold, 1);
		else if (what & 32)
			w.attend = attends[what >> 3 & 1];
		else
			offload_hold(w.c.nodes[what >> 3 & 1].kvd.offload, what & 16);
		break;
	default:
		cluster_run(&w.c, (what >> 3) * LOOP_NS_PER_MS / 8 + 1);
		break;
	}
}

/* ---- one input ---- */

/* What failed is as it was before it was posted. */
static void seats_are_still(void)
{
	for (unsigned int seat = 0; seat < SEATS; seat++) {
		const uint8_t *at = (const uint8_t *)attend_world_floats(&w, seat, w.o);
		unsigned int state = attend_world_state(&w, seat);

		need(state != KVD_TRANSFERRING);
		for (uint64_t i = 0; state == KVD_FAILED && i < w.seat_bytes - w.o; i++)
			need(at[i] == MARK);
	}
}

static void world_begin(void)
{
	struct kvd_ring_part part;

	attend_world_tap = tap;
	attend_world_scaled = true;
	attend_world_new(&w, 1);
	attends[0] = w.attend =
		attend_world_open(&w, ",'key_scale':'k_scale','value_scale':'v_scale'");
	attends[1] = attend_world_open(&w, ",'out_type':'bf16'");
	for (unsigned int seat = 0; seat < SEATS; seat++) {
		part = attend_world_part(w.hold);
		attend_world_rows(&w, seat, 1);
		attend_world_post(&w, seat, 0, &part, 1, NULL, 0);
		cluster_run(&w.c, LOOP_NS_PER_S);
		need(attend_world_state(&w, seat) == KVD_SUCCESS);
	}
	need(lengths[WIRE_T_ATTEND] && lengths[WIRE_T_ATTENTION_RESULT]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct cursor in;

	if (!begun)
		world_begin();
	begun = true;
	w.attend = attends[0];
	for (unsigned int seat = 0; seat < SEATS; seat++)
		seat_mark(seat);
	cursor_read(&in, data, size);
	for (unsigned int i = 0; i < STEPS_MAX && cursor_left(&in) > 0; i++)
		step(&in);
	for (unsigned int i = 0; i < 2; i++)
		offload_hold(w.c.nodes[i].kvd.offload, false);
	cluster_run(&w.c, 2 * LOOP_NS_PER_S); /* the deadline of those that lost legs */
	seats_are_still();
	attend_world_quiet(&w);
	err_clear();
	return 0;
}
