/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_home: a home of chunks, and peers that tell it and ask it what the input says.
 * Some messages are made of fields of the input's choice, others are its bytes.
 *
 * Whatever comes: what is known never passes what there is room for, an answer is in
 * form, and where home and holder agree on the sum, the home names that holder for what
 * it has and for nothing else. Notes that nobody counts twice are what the holder said,
 * so sums are judged for holders that sent no bytes of their own.
 *
 * Input: steps of [what][holder] and what it takes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/config/config.h"
#include "daemon/handshake/handshake.h"
#include "daemon/loop/loop.h"
#include "daemon/store/home.h"
#include "daemon/store/homes_impl.h"
#include "daemon/store/store_impl.h"
#include "tests/fuzz/lib/fuzz.h"
#include "tests/lib/index_update.h"

#define HOLDERS 5u
#define KEYS 96u
#define SPACE UINT64_C(7)
#define STEPS_MAX 400u

static struct {
	struct kvd kvd;
	struct link link;
	struct config config;
	struct store store;
	struct home *home;
	struct remote remotes[HOLDERS];
	struct peer peers[HOLDERS];
	bool has[HOLDERS][KEYS];
	bool raw[HOLDERS]; /* it has sent bytes */
} w;

static void need(bool holds, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "fuzz_home: %s\n", what);
	abort();
}
#define NEED(holds) need(holds, #holds)

static struct home_key key_of(unsigned int n)
{
	return (struct home_key){.id = home_mix(n + 1), .space = SPACE};
}

static void send_bytes(unsigned int holder, const void *bytes, size_t len)
{
	const struct wire_header h = {.type = WIRE_T_INDEX_UPDATE};
	struct cursor in;

	cursor_read(&in, bytes, len);
	if (home_on_message(w.home, &w.remotes[holder], &h, &in) < 0)
		err_clear();
}

static void do_note(unsigned int holder, struct cursor *in)
{
	struct index_update note;
	uint8_t how = cursor_get_u8(in);
	unsigned int count = how >> 1;
	struct cursor body;

	if (how & 1)
		memset(w.has[holder], 0, sizeof(w.has[holder]));
	index_update_begin(&note, how & 1);
	for (unsigned int i = 0; i < count && i < KEYS && cursor_left(in); i++) {
		uint8_t byte = cursor_get_u8(in);
		unsigned int n = (byte & 0x7f) % KEYS;
		struct home_key key = key_of(n);

		w.has[holder][n] = byte & 0x80;
		index_update_add(&note, &key, byte & 0x80);
	}
	NEED(index_update_end(&note, &body) == 0);
	send_bytes(holder, note.body, cursor_left(&body));
}

/* Which holders are named for the one key, as bits. */
static unsigned int named(unsigned int requester, const struct home_key *key)
{
	const struct wire_index_query msg = {.space = key->space,
					     .ids = {.data = &key->id, .len = 8}};
	char endpoint[LINK_ENDPOINT_MAX];
	uint8_t answer[HOME_FOUND_BYTES_MAX];
	unsigned int of[HOLDERS], bits = 0;
	uint32_t count;
	struct cursor out;

	cursor_write(&out, answer, sizeof(answer));
	NEED(home_found(w.home, requester < HOLDERS ? &w.remotes[requester] : NULL, &msg,
			&out) == 0);
	cursor_read(&out, answer, out.pos);
	count = cursor_get_u32(&out);
	NEED(count <= HOLDERS);
	for (uint32_t i = 0; i < count; i++) {
		cursor_get_str(&out, endpoint, sizeof(endpoint));
		of[i] = (unsigned int)(endpoint[strlen("tcp://h")] - '0');
		NEED(of[i] < HOLDERS && of[i] != requester);
	}
	for (unsigned int n = cursor_get_u8(&out); n > 0; n--) {
		uint8_t at = cursor_get_u8(&out);

		NEED(at < count && !(bits >> of[at] & 1));
		bits |= 1u << of[at];
	}
	NEED(!out.bad && cursor_left(&out) == 0);
	return bits;
}

static void do_sum(unsigned int holder)
{
	struct wire_index_digest msg = {.count = 0};

	for (unsigned int n = 0; n < KEYS; n++) {
		struct home_key key = key_of(n);

		if (!w.has[holder][n])
			continue;
		msg.count++;
		msg.sum ^= home_key_mix(&key);
	}
	if (home_wants_all(w.home, &w.remotes[holder], &msg) || w.raw[holder])
		return;
	for (unsigned int n = 0; n < KEYS; n++) {
		struct home_key key = key_of(n);

		NEED((named(UINT32_MAX, &key) >> holder & 1) == w.has[holder][n]);
	}
}

static void do_find(unsigned int holder, struct cursor *in)
{
	uint8_t answer[HOME_FOUND_BYTES_MAX];
	struct wire_index_query msg;
	struct cursor body, out;
	size_t len = cursor_get_u8(in);
	struct home_key key = key_of((unsigned int)len % KEYS);

	named(holder, &key);
	len = len < cursor_left(in) ? len : cursor_left(in);
	cursor_read(&body, cursor_get_bytes(in, len), len);
	cursor_write(&out, answer, sizeof(answer));
	if (wire_index_query_get(&body, &msg) < 0 ||
	    home_found(w.home, &w.remotes[holder], &msg, &out) < 0)
		err_clear();
}

static void do_bytes(unsigned int holder, struct cursor *in)
{
	size_t len = cursor_get_u8(in);

	len = len < cursor_left(in) ? len : cursor_left(in);
	w.raw[holder] = true;
	send_bytes(holder, cursor_get_bytes(in, len), len);
}

static void step(struct cursor *in)
{
	uint8_t what = cursor_get_u8(in), holder = cursor_get_u8(in) % HOLDERS;
	struct store_home f;

	switch (what % 8) {
	case 0:
		home_on_down(w.home, &w.remotes[holder]);
		memset(w.has[holder], 0, sizeof(w.has[holder]));
		w.raw[holder] = false;
		break;
	case 1:
		loop_turn(w.kvd.loop, 0); /* a slice is swept */
		break;
	case 2:
		do_sum(holder);
		break;
	case 3:
		do_find(holder, in);
		break;
	case 4:
		do_bytes(holder, in);
		break;
	default:
		do_note(holder, in);
	}
	home_figures(w.home, &f);
	NEED(f.used <= f.most && f.holders <= HOLDERS);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct cursor in;

	memset(&w, 0, sizeof(w));
	NEED(loop_new_virtual(3, &w.kvd.loop) == 0);
	w.kvd.config = &w.config;
	w.kvd.link = &w.link;
	w.store.kvd = &w.kvd;
	NEED(home_new(&w.store, &w.home) == 0);
	for (unsigned int i = 0; i < HOLDERS; i++) {
		w.remotes[i].peer = &w.peers[i];
		snprintf(w.peers[i].endpoint, sizeof(w.peers[i].endpoint), "tcp://h%u:1",
			 i);
	}
	cursor_read(&in, data, size);
	for (unsigned int i = 0; i < STEPS_MAX && cursor_left(&in) > 0; i++)
		step(&in);
	while (loop_turn(w.kvd.loop, 0))
		;
	for (unsigned int i = 0; i < HOLDERS; i++)
		do_sum(i);
	home_free(w.home);
	loop_free(w.kvd.loop);
	return 0;
}
