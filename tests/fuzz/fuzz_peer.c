/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_peer: a daemon's peers and board over link_mem, and a stranger at
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
#include "daemon/cluster/board.h"
#include "daemon/cluster/board_directory.h"
#include "daemon/cluster/roster.h"
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
	struct board *board;
	struct directory *directory;	 /* on the stranger's board */
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

static void on_up(void *owner, struct peer *peer)
{
	(void)owner;
	if (w.directory)
		board_directory_peer_up(w.directory, peer);
}

static void on_down(void *owner, struct peer *peer)
{
	(void)owner;
	board_peer_down(w.board, peer);
	if (w.directory)
		board_directory_peer_down(w.directory, peer);
}

static int on_message(void *owner, struct peer *peer, const struct wire_header *h,
		      struct cursor *body)
{
	(void)owner;
	if (sm_state(&peer->sm) != PEER_UP || h->epoch != peer->epoch)
		abort();
	if (h->type == WIRE_T_TRANSFER_INFO) /* rooms keep it */
		mem_free(peer_body_take(peer));
	if (board_handles(h->type))
		return board_on_message(w.board, peer, h->type, body);
	if (board_directory_handles(h->type) && w.directory)
		return board_directory_on_message(w.directory, peer, h->type, body);
	return 0;
}

static void on_done(struct publication *publication, const struct err *err)
{
	(void)publication;
	if (err && err->code == ERR_OK)
		abort();
}

static void on_entry(struct watch *watch, const struct place *place, const char *record,
		     const char *load)
{
	(void)watch;
	if (strcmp(place->group, "g") != 0 || place_check(place) < 0 ||
	    (record && strlen(record) >= DIRECTORY_RECORD_MAX) ||
	    (load && strlen(load) >= DIRECTORY_LOAD_MAX))
		abort();
}

static void run_for(uint64_t ns)
{
	uint64_t end_ns = loop_now_ns(w.loop) + ns;

	while (loop_now_ns(w.loop) < end_ns)
		loop_turn(w.loop, end_ns - loop_now_ns(w.loop));
}

static void open_world(void)
{
	struct peers_callbacks callbacks = {
		.on_up = on_up, .on_down = on_down, .on_message = on_message};
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
	need(board_new(w.loop, NULL, &w.board));
	run_for(LOOP_NS_PER_MS);
}

static void close_world(void)
{
	if (w.directory)
		w.directory->ops->free(w.directory);
	board_free(w.board);
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
	struct wire_header h = {.version = 1, .type = WIRE_T_HELLO, .epoch = OUR_EPOCH};
	struct wire_hello m = {.version_min = 1,
			       .version_max = 1,
			       .features = PEER_FEATURE_BASE | PEER_FEATURE_PARTS |
					   PEER_FEATURE_BOARD};
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
	struct wire_header h = {.version = 1, .type = what};
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

static void open_directory(struct publication *publication, struct watch *watch,
			   const struct place *place)
{
	struct board_directory_args args = {.loop = w.loop,
					    .peers = w.peers,
					    .board = w.board,
					    .own = US,
					    .endpoints = {THEM},
					    .count = 1,
					    .lease_ns = 2 * LOOP_NS_PER_S};

	need(board_directory_new(&args, &w.directory));
	need(w.directory->ops->watch(w.directory, watch, "g", true));
	need(w.directory->ops->publish(w.directory, publication, place, "{}", "{}"));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct publication publication = {.on_done = on_done};
	struct watch watch = {.on_entry = on_entry};
	struct place place = {.group = "g"};
	struct peer *peer = NULL;
	struct cursor in;

	open_world();
	cursor_read(&in, data, size);
	uint8_t start = cursor_get_u8(&in);

	if (start & 1)
		need(peers_dial(w.peers, THEM, &peer));
	if (start & 2)
		open_directory(&publication, &watch, &place);
	if (start & 4)
		need(peers_dial(w.peers, US, &peer));
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
