/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_peer: a daemon's peers over link_mem, and a stranger at
 * another endpoint that says what the input tells it, with right checksums and,
 * when the input wishes, with the epoch and nonce that the daemon told it. So
 * the input gets past the handshake and into everything behind it.
 *
 * Input: steps of [what][how][length u16][body]; what 0 is a good HELLO, other
 * values are the frame's type.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "tests/sim/link_mem.h"
#include "daemon/loop/loop.h"
#include "daemon/peer/peer.h"
#include "tests/fuzz/lib/fuzz.h"

#define US "tcp://us:1"
#define THEM "tcp://them:1"
#define STEPS_MAX 64
#define OUR_EPOCH 77u

enum {
	HOW_SENDER_OURS = 1 << 0,
	HOW_SENDER_ZERO = 1 << 1,
	HOW_TARGET_ZERO = 1 << 2,
	HOW_EPOCH_WRONG = 1 << 3,
	HOW_REPLAY = 1 << 4,
	HOW_GAP = 1 << 5,
	HOW_WAIT = 1 << 6,
	HOW_LONG = 1 << 7,
};

static struct world {
	struct loop *loop;
	struct mem_hub *hub;
	struct link *us, *them;
	struct link_line *line;
	struct peers *peers;
	uint64_t epoch, nonce, sequence; /* as the daemon told the stranger */
} w;

static void need(int r)
{
	if (r < 0)
		abort();
}

/* The stranger listens. */
static void on_frame(void *owner, const struct link_frame *frame)
{
	struct wire_header h;
	struct wire_hello m;
	struct cursor body;

	(void)owner;
	need(wire_frame_get(frame->data, frame->len, &h, &body));
	if (h.type != WIRE_T_HELLO && h.type != WIRE_T_WELCOME)
		return;
	need(wire_hello_get(&body, &m));
	if (h.epoch != w.epoch)
		w.sequence = 0;
	w.epoch = h.epoch;
	if (h.type == WIRE_T_HELLO)
		w.nonce = m.nonce;
}

static int on_message(void *owner, struct peer *peer, const struct wire_header *h,
		      struct cursor *body)
{
	(void)owner;
	(void)body;
	if (sm_state(&peer->sm) != PEER_UP || h->epoch != peer->epoch)
		abort();
	if (h->type == WIRE_T_TRANSFER_INFO) /* rooms keep it */
		mem_free(peer_body_take(peer));
	return 0;
}

static void run_for(uint64_t ns)
{
	uint64_t end_ns = loop_now_ns(w.loop) + ns;

	while (loop_now_ns(w.loop) < end_ns)
		loop_turn(w.loop, end_ns - loop_now_ns(w.loop));
}

static void open_world(void)
{
	struct peers_callbacks callbacks = {.on_message = on_message};
	struct peers_options options;
	struct peers_args args = {
		.callbacks = &callbacks, .options = &options, .name = "us"};

	memset(&w, 0, sizeof(w));
	log_set_level(LOG_LEVEL_ERROR);
	peers_options_default(&options);
	options.peers_max = 8;
	options.message_bytes = 1 << 16; /* its buffer is made anew for each input */
	need(loop_new_virtual(1, &w.loop));
	need(mem_hub_new(w.loop, &w.hub));
	need(link_mem_new(w.hub, US, "", &w.us));
	need(link_mem_new(w.hub, THEM, "", &w.them));
	w.them->on_frame = on_frame;
	need(w.them->ops->dial(w.them, US, NULL, &w.line));
	args.loop = w.loop;
	args.link = w.us;
	need(peers_new(&args, &w.peers));
	run_for(LOOP_NS_PER_MS);
}

static void close_world(void)
{
	peers_free(w.peers);
	w.us->ops->free(w.us);
	w.them->ops->free(w.them);
	mem_hub_free(w.hub);
	loop_free(w.loop);
}

static void say(const struct wire_header *h, const void *body)
{
	size_t len = WIRE_HEADER_BYTES + h->body_len;
	uint8_t *frame = malloc(len);
	struct link_frame out = {.data = frame, .len = len};

	wire_frame_put(frame, h, body);
	w.us->on_frame(w.us->owner, &out);
	free(frame);
}

static void say_hello(uint8_t how)
{
	struct wire_header h = {
		.version = WIRE_VERSION_MAX, .type = WIRE_T_HELLO, .epoch = OUR_EPOCH};
	struct wire_hello m = {.version_min = WIRE_VERSION_MIN,
			       .version_max = WIRE_VERSION_MAX,
			       .features = PEER_FEATURE_BASE};
	uint8_t body[512];
	struct cursor c;

	memset(h.sender, 9, sizeof(h.sender));
	h.sender[0] = (uint8_t)(how & 3);
	h.epoch += how >> 4;
	m.nonce = 5;
	if (how & HOW_GAP) { /* the answer to its own HELLO */
		h.type = WIRE_T_WELCOME;
		memcpy(h.target, peers_instance(w.peers), sizeof(h.target));
		m.nonce = w.nonce;
	}
	strcpy(m.endpoint, THEM);
	cursor_write(&c, body, sizeof(body));
	need(wire_hello_put(&c, &m));
	h.body_len = (uint32_t)c.pos;
	say(&h, body);
}

static void step(struct cursor *in)
{
	uint8_t what = cursor_get_u8(in), how = cursor_get_u8(in);
	size_t len = cursor_get_u16(in);
	struct wire_header h = {.version = WIRE_VERSION_MAX, .type = what};
	const void *body;

	if (len > cursor_left(in))
		len = cursor_left(in);
	body = cursor_get_bytes(in, len);
	if (what == 0 || !body) {
		say_hello(how);
	} else {
		memset(h.sender, how & HOW_SENDER_ZERO ? 0 : 9, sizeof(h.sender));
		h.sender[0] = 0;
		if (how & HOW_SENDER_OURS)
			memcpy(h.sender, peers_instance(w.peers), sizeof(h.sender));
		if (!(how & HOW_TARGET_ZERO))
			memcpy(h.target, peers_instance(w.peers), sizeof(h.target));
		h.epoch = how & HOW_EPOCH_WRONG ? 1234 : w.epoch;
		h.from_epoch = OUR_EPOCH;
		h.sequence = how & HOW_REPLAY ? w.sequence : ++w.sequence;
		h.sequence += how & HOW_GAP ? 3 : 0;
		h.body_len = (uint32_t)len;
		say(&h, body);
	}
	if (how & HOW_WAIT)
		run_for(how & HOW_LONG ? 3 * LOOP_NS_PER_S : LOOP_NS_PER_MS);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct peer *peer = NULL;
	struct cursor in;

	open_world();
	cursor_read(&in, data, size);
	uint8_t start = cursor_get_u8(&in);

	if (start & 1)
		need(peers_dial(w.peers, THEM, NULL, &peer));
	if (start & 4)
		need(peers_dial(w.peers, US, NULL, &peer));
	run_for(LOOP_NS_PER_MS);
	for (unsigned int i = 0; i < STEPS_MAX && cursor_left(&in) >= 4; i++)
		step(&in);
	run_for(10 * LOOP_NS_PER_S);
	if (start & 8)
		peers_close(w.peers, ERR_DRAIN, "the end");
	close_world();
	err_clear();
	return 0;
}
