/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_room: a peer behind the handshake that says what the input says. Its daemon is a
 * real one, whose messages are right until the input changes them on their way: any
 * message of any kind, with the header, sequence and generations that fit, comes with
 * other bytes in its body, or not at all, or twice; and others come that it never said.
 * Meanwhile both engines open, bind, send, abort and leave rooms.
 *
 * Input: steps of [what][and what it takes].
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/peer/peer.h"
#include "proto/wire.h"
#include "tests/fuzz/lib/fuzz.h"
#include "tests/fuzz/lib/world.h"

#define STEPS_MAX 48u
#define CHANGES 8u
#define KEPT_BYTES 4096u

/* Of one message that is to come. */
struct change {
	uint8_t skip; /* so many others first */
	uint8_t how;
	uint16_t at;
	uint8_t bytes[8], len;
};

static struct {
	struct world w;
	void (*on_frame)(void *owner, const struct link_frame *frame);
	struct change changes[CHANGES];
	unsigned int count;
	/* the last body of each kind, to be said again */
	struct kept {
		size_t len;
		uint8_t body[KEPT_BYTES];
	} kept[WIRE_T_END];
} f;

static void change_body(const struct change *change, uint8_t *body, uint32_t *len)
{
	if (change->how & 1 && *len) /* shorter */
		*len = change->at % *len;
	for (unsigned int i = 0; *len && i < change->len; i++) {
		uint8_t *byte = &body[(change->at + i) % *len];

		*byte = change->how & 2 ? change->bytes[i] : *byte ^ change->bytes[i];
	}
}

static void on_frame(void *owner, const struct link_frame *frame)
{
	struct change change = {.how = 0};
	struct link_frame out = *frame;
	struct wire_header h;
	struct cursor body;
	const uint8_t *bytes = (const uint8_t *)frame->data + WIRE_HEADER_BYTES;
	uint8_t *copy;

	if (wire_frame_get(frame->data, frame->len, &h, &body) < 0 ||
	    h.type <= WIRE_T_BYE) {
		err_clear();
		f.on_frame(owner, frame);
		return;
	}
	if (h.body_len <= KEPT_BYTES) {
		f.kept[h.type].len = h.body_len;
		memcpy(f.kept[h.type].body, bytes, h.body_len);
	}
	if (f.count && f.changes[0].skip-- == 0) {
		change = f.changes[0];
		memmove(&f.changes[0], &f.changes[1], --f.count * sizeof(change));
	} else {
		f.on_frame(owner, frame);
		return;
	}
	if (change.how & 4) /* does not come: the sequence has a gap */
		return;
	copy = malloc(frame->len);
	if (!copy)
		abort();
	memcpy(copy + WIRE_HEADER_BYTES, bytes, h.body_len);
	change_body(&change, copy + WIRE_HEADER_BYTES, &h.body_len);
	if (change.how & 8)
		h.type = (uint16_t)(change.how >> 3);
	wire_frame_put(copy, &h, copy + WIRE_HEADER_BYTES);
	out.data = copy;
	out.len = WIRE_HEADER_BYTES + h.body_len;
	f.on_frame(owner, &out);
	free(copy);
}

/* The peer's daemon says it, so that header and sequence are right. */
static void say(uint8_t type, const void *body, size_t len)
{
	struct peer *peer = world_peer(&f.w, 1);

	if (peer && peer_send(peer, (enum wire_type)type, body, len) < 0)
		err_clear();
}

static void say_again(struct cursor *in)
{
	uint8_t type = cursor_get_u8(in) % WIRE_T_END;
	struct change change = {.how = 2, .at = cursor_get_u16(in)};
	static struct kept kept;
	uint32_t len;
	const void *bytes;

	change.len = cursor_get_u8(in) % (sizeof(change.bytes) + 1);
	bytes = cursor_get_bytes(in, change.len);
	if (bytes)
		memcpy(change.bytes, bytes, change.len);
	kept = f.kept[type];
	len = (uint32_t)kept.len;
	change_body(&change, kept.body, &len);
	if (type > WIRE_T_BYE)
		say(type, kept.body, len);
}

static void add_change(struct cursor *in)
{
	struct change change = {.skip = cursor_get_u8(in) & 15};
	const void *bytes;

	change.how = cursor_get_u8(in);
	change.at = cursor_get_u16(in);
	change.len = cursor_get_u8(in) % (sizeof(change.bytes) + 1);
	bytes = cursor_get_bytes(in, change.len);
	if (bytes)
		memcpy(change.bytes, bytes, change.len);
	if (f.count < CHANGES)
		f.changes[f.count++] = change;
}

/* What engines do, with numbers of the input's. */
static void engine(struct cursor *in)
{
	static const char *const lines[] = {
		"{'cmd':'room.open','room':'%u','role':'send','pool':%llu}",
		"{'cmd':'room.open','room':'%u','role':'recv','pool':%llu,"
		"'sources':['%s']}",
		"{'cmd':'room.open','room':'%u','role':'offer','pool':%llu}",
		"{'cmd':'room.open','room':'%u','role':'pull','pool':%llu,"
		"'sources':['%s']}",
		"{'cmd':'room.bind','room':'%u','views':{'kv':{'pages':[%llu,2,3]}}}",
		"{'cmd':'room.send','room':'%u','seq':0,'last':true,"
		"'views':{'kv':{'pages':[%llu,2,3]}}}",
		"{'cmd':'room.send','room':'%u','seq':0,'views':{'kv':{'pages':[%llu]}}}",
		"{'cmd':'room.abort','room':'%u'}",
		"{'cmd':'room.close','room':'%u'}",
		"{'cmd':'pool.unregister','pool':%u}",
	};
	uint8_t what = cursor_get_u8(in), number = cursor_get_u8(in);
	unsigned int node = what >> 7;
	unsigned long long second = (what & 15) < 4 ? f.w.caches[node].pool : number & 15;
	char line[256];
	int len = snprintf(line, sizeof(line), lines[(what & 15) % ARRAY_LEN(lines)],
			   number >> 4, second, f.w.c.nodes[!node].endpoint);

	for (char *p = line; *p; p++)
		*p = *p == '\'' ? '"' : *p;
	world_say(&f.w, node, line, (size_t)len, -1);
}

static void step(struct cursor *in)
{
	uint8_t what = cursor_get_u8(in);
	size_t len;
	const void *body;

	switch (what & 7) {
	case 0:
	case 1:
		engine(in);
		break;
	case 2:
	case 3:
		add_change(in);
		break;
	case 4:
		say_again(in);
		break;
	case 5:
		what = cursor_get_u8(in);
		len = cursor_get_u8(in);
		len = len < cursor_left(in) ? len : cursor_left(in);
		body = cursor_get_bytes(in, len);
		if (what > WIRE_T_BYE && what < WIRE_T_END && body)
			say(what, body, len);
		break;
	default:
		cluster_run(&f.w.c, (what >> 3) * 40 * LOOP_NS_PER_MS);
		break;
	}
	if (what & 128)
		cluster_run(&f.w.c, LOOP_NS_PER_MS);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct cursor in;
	struct link *link;

	f.count = 0;
	memset(f.kept, 0, sizeof(f.kept));
	world_begin(&f.w);
	link = f.w.c.nodes[0].kvd.link;
	f.on_frame = link->on_frame;
	link->on_frame = on_frame;
	cursor_read(&in, data, size);
	for (unsigned int i = 0; i < STEPS_MAX && cursor_left(&in) > 0; i++)
		step(&in);
	cluster_run(&f.w.c, LOOP_NS_PER_S);
	f.count = 0;
	link->on_frame = f.on_frame;
	world_end(&f.w);
	return 0;
}
