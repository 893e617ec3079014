/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer, or a stranger, that does not play by the rules: wrong tokens, forged
 * keys, garbage at the door. Whatever he does, others are not disturbed and
 * memory beside the plan does not change.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "tests/conform/conform.h"

#define LEN 20000u

static const struct plan_run plain = {.src = 100,
				      .dst = 200,
				      .len = 9000,
				      .count = 2,
				      .src_stride = 9100,
				      .dst_stride = 9200};

static void still_works(struct world *world, struct end *a, struct end *b)
{
	deal_run(deal_simple(world, XP_WRITE, area_new(world, a, MEMORY_SEALED, LEN),
			     area_new(world, b, MEMORY_SEALED, LEN), &plain, 1));
	deal_run(deal_simple(world, XP_READ, area_new(world, a, MEMORY_SEALED, LEN),
			     area_new(world, b, MEMORY_SEALED, LEN), &plain, 1));
}

/* ---- tokens ---- */

static void random_token(struct world *world, uint8_t *token)
{
	for (unsigned int i = 0; i < XP_TOKEN_BYTES; i++)
		token[i] = (uint8_t)world_random(world, 256);
}

static void disconnect(struct world *world, struct end *a, struct end *b)
{
	end_peer_close(a, b);
	CHECK(AWAIT(world, end_peer(b, a).lost == 1), "the other side is not told");
	end_peer_close(b, a);
}

/* A waits for B, who dials within seconds of it: a backend need not wait longer. On a
 * machine that took them for what came before, A waits anew. */
static void wait_for(struct world *world, struct end *a, struct end *b,
		     const uint8_t *token_in, const uint8_t *token_out,
		     uint64_t *since_ns_p)
{
	uint64_t now_ns = world_now_ns(world);
	struct err err = {0};

	if (*since_ns_p && now_ns - *since_ns_p < 2 * LOOP_NS_PER_S)
		return;
	if (*since_ns_p)
		end_peer_close(a, b);
	*since_ns_p = now_ns;
	CHECK(end_peer_open(a, b, false, token_in, token_out, &err) == 0, "peer_open: %s",
	      err.text);
}

/* C dials A, who waits for B, with tokens that A did not give out; A goes on
 * waiting for the right one, which then gets in. */
static void token_wrong_dialer(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1], *c = world->end[2];
	uint8_t a_to_b[XP_TOKEN_BYTES], b_to_a[XP_TOKEN_BYTES], forged[XP_TOKEN_BYTES];
	struct err err = {0};
	uint64_t since_ns = 0;

	disconnect(world, a, b);
	disconnect(world, a, c);
	random_token(world, a_to_b);
	random_token(world, b_to_a);
	for (unsigned int try = 0; try < 3; try++) {
		wait_for(world, a, b, b_to_a, a_to_b, &since_ns);
		memcpy(forged, b_to_a, XP_TOKEN_BYTES);
		if (try == 0)
			memset(forged, 0, XP_TOKEN_BYTES);
		else if (try == 1)
			random_token(world, forged);
		else
			forged[XP_TOKEN_BYTES - 1] ^= 1;
		CHECK(end_peer_open(c, a, true, a_to_b, forged, &err) == 0,
		      "peer_open: %s", err.text);
		AWAIT_NS(world, 300 * MS,
			 end_peer(c, a).lost || end_peer(c, a).ready ||
				 end_peer(a, b).ready);
		CHECK(!end_peer(a, b).ready, "a forged token got in");
		CHECK(!end_peer(c, a).ready, "the forger believes that he is in");
		CHECK(!end_peer(a, b).lost, "a forger made the waiting side give up");
		end_peer_close(c, a);
	}
	wait_for(world, a, b, b_to_a, a_to_b, &since_ns);
	CHECK(end_peer_open(b, a, true, a_to_b, b_to_a, &err) == 0, "peer_open: %s",
	      err.text);
	CHECK(AWAIT(world, end_peer(a, b).ready && end_peer(b, a).ready),
	      "the right token does not get in after forged ones");
	still_works(world, a, b);
	world_connect(world, a, c);
	still_works(world, c, a);
}

/* A, who waits, shows B the wrong token: B must not believe him. */
static void token_wrong_listener(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	uint8_t a_to_b[XP_TOKEN_BYTES], b_to_a[XP_TOKEN_BYTES], forged[XP_TOKEN_BYTES];
	struct err err = {0};

	disconnect(world, a, b);
	random_token(world, a_to_b);
	random_token(world, b_to_a);
	random_token(world, forged);
	CHECK(end_peer_open(a, b, false, b_to_a, forged, &err) == 0, "peer_open: %s",
	      err.text);
	CHECK(end_peer_open(b, a, true, a_to_b, b_to_a, &err) == 0, "peer_open: %s",
	      err.text);
	CHECK(AWAIT(world, end_peer(b, a).lost || end_peer(b, a).ready),
	      "the dialer neither gets in nor gives up");
	CHECK(!end_peer(b, a).ready, "a forged token was believed");
	end_peer_close(b, a);
	end_peer_close(a, b);
	world_connect(world, a, b);
	still_works(world, a, b);
}

/* ---- addresses ---- */

static void address_garbage(struct world *world)
{
	static const size_t lens[] = {0, 1, 7, 16, 100, 1000, XP_ADDRESS_MAX};
	struct end *a = world->end[0], *b = world->end[1];

	disconnect(world, a, b);
	for (size_t i = 0; i < ARRAY_LEN(lens) * 3; i++) {
		struct end stranger = *b;
		uint8_t token[XP_TOKEN_BYTES];
		struct err err = {0};

		/* random bytes; a cut real one; a real one with one bit turned */
		if (i % 3 == 0 || lens[i / 3] > b->address_len) {
			stranger.address_len = lens[i / 3];
			for (size_t j = 0; j < stranger.address_len; j++)
				stranger.address[j] = (uint8_t)world_random(world, 256);
		} else if (i % 3 == 1) {
			stranger.address_len = lens[i / 3];
		} else if (b->address_len) {
			stranger.address[world_random(world, b->address_len)] ^= 4;
		}
		random_token(world, token);
		if (end_peer_open(a, &stranger, true, token, token, &err) < 0) {
			CHECK(err.code != ERR_OK, "refused without an error");
			continue;
		}
		AWAIT_NS(world, 30 * MS, end_peer(a, b).lost);
		CHECK(!end_peer(a, b).ready, "garbage as an address connected");
		end_peer_close(a, b);
	}
	world_connect(world, a, b);
	still_works(world, a, b);
}

/* ---- keys ---- */

static size_t key_bytes(struct area *area, struct end *other, uint8_t *key)
{
	struct cmd cmd = {.type = CMD_KEY_PACK, .a = {area->slot, other->index}};
	const void *blob;
	struct reply reply;
	int fd;

	reply = end_call_full(area->at, &cmd, NULL, -1, &blob, &fd);
	CHECK(reply.result == 0, "key_pack: %s", reply.err.text);
	CHECK(reply.blob_len > 0 && reply.blob_len <= XP_KEY_MAX, "a key of %u bytes",
	      reply.blob_len);
	memcpy(key, blob, reply.blob_len);
	return reply.blob_len;
}

#define BAD_KEY_NS (20 * MS) /* it may never be decided */

/* Unpack at `end` as a key of `other`; state as CMD_KEY_STATE, 2 when refused. */
static uint64_t key_try(struct end *end, struct end *other, const uint8_t *key,
			size_t len, uint64_t patience_ns)
{
	struct cmd cmd = {.type = CMD_KEY_UNPACK, .blob_len = (uint32_t)len};
	uint32_t slot = slot_take(&end->keys, PUPPET_KEYS);
	const void *blob;
	uint64_t state = 2;
	int fd;

	cmd.a[0] = slot;
	cmd.a[1] = other->index;
	if (end_call_full(end, &cmd, key, -1, &blob, &fd).result == 0) {
		AWAIT_NS(end->world, patience_ns,
			 end_call(end, CMD_KEY_STATE, slot, 0, 0, 0).v[0]);
		state = end_call(end, CMD_KEY_STATE, slot, 0, 0, 0).v[0];
		end_call(end, CMD_KEY_DROP, slot, 0, 0, 0);
	}
	end->keys.used[slot] = false;
	return state;
}

static void key_garbage(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	struct area *area = area_new(world, a, MEMORY_SEALED, LEN);
	uint8_t key[XP_KEY_MAX], bad[XP_KEY_MAX];
	size_t len = key_bytes(area, b, key);

	for (size_t cut = 0; cut < len; cut += 1 + len / 16)
		CHECK(key_try(b, a, key, cut, BAD_KEY_NS) != 1,
		      "a key cut to %zu bytes is usable", cut);
	for (unsigned int i = 0; i < 24; i++) {
		memcpy(bad, key, len);
		for (size_t j = 0; j < len; j++)
			bad[j] = i < 8 ? (uint8_t)world_random(world, 256) : bad[j];
		if (i >= 8)
			bad[world_random(world, len)] ^= (uint8_t)(1u << (i % 8));
		(void)key_try(b, a, bad, len, BAD_KEY_NS); /* it must survive that */
	}
	CHECK(key_try(b, a, key, len, world->self ? BAD_KEY_NS : wait_ns) == 1 ||
		      world->self,
	      "the right key fails after all");
	CHECK(!end_peer(a, b).lost && !end_peer(b, a).lost, "a bad key cost the peer");
	still_works(world, a, b);
}

/* A READ that asks for more than the key's memory has. */
static void key_beyond_memory(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	struct area *from = area_new(world, a, MEMORY_SEALED, 4096);
	struct area *to = area_new(world, b, MEMORY_SEALED, 1 << 20);
	static const struct plan_run runs[] = {
		{.src = 4000, .len = 97, .count = 1},
		{.src = 8192, .len = 4096, .count = 1},
		{.len = 4096, .count = 100, .src_stride = 4096, .dst_stride = 4096},
	};

	for (size_t i = 0; i < ARRAY_LEN(runs); i++) {
		const struct place src = {from, 0, 1 << 20}, dst = {to, 0, to->length};
		struct deal *deal =
			deal_new(world, XP_READ, a, b, &src, 1, &dst, 1, &runs[i], 1);

		if (deal_post(deal, HEADER_BYTES) < 0)
			continue;
		world_settle(world);
		CHECK(deal_op(deal).code != ERR_OK, "bytes beyond the memory were read");
		area_resync(to); /* what came before the end of the memory may be there */
		CHECK(!end_peer(b, a).lost, "the reader lost its peer");
	}
	still_works(world, a, b);
}

/* ---- strangers at the door ---- */

static void raw_send(int fd, const void *bytes, size_t len)
{
	if (send(fd, bytes, len, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
		return; /* he hung up: fine */
}

static bool raw_hung_up(int fd)
{
	struct pollfd poll_fd = {.fd = fd, .events = POLLIN | POLLHUP};
	char byte[256];

	while (poll(&poll_fd, 1, 0) > 0) {
		ssize_t n = recv(fd, byte, sizeof(byte), MSG_DONTWAIT);

		if (n == 0 || (n < 0 && errno != EAGAIN))
			return true;
	}
	return false;
}

static void raw_garbage(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	cleanup_free uint8_t *bytes = mem_zalloc(1 << 16);

	CHECK(bytes, "no memory");
	for (unsigned int i = 0; i < 24; i++) {
		size_t len = i % 3 == 0 ? 1 + world_random(world, 64)
					: 1 + world_random(world, 1 << 16);
		int fd = world->backend->raw_connect(a->address, a->address_len);

		CHECK(fd >= 0, "the door is closed: %s", strerror(errno));
		for (size_t j = 0; j < len; j++)
			bytes[j] = i % 4 == 0	? 0xff
				   : i % 4 == 1 ? 0
						: (uint8_t)world_random(world, 256);
		raw_send(fd, bytes, len);
		world_run_ns(world, 2 * MS);
		raw_send(fd, bytes, len);
		close(fd);
	}
	world_run_ns(world, 20 * MS);
	CHECK(!end_peer(a, b).lost, "a stranger cost a peer");
	still_works(world, a, b);
}

/* Many who say nothing: they must not keep the door, nor all fds. */
static void raw_silent(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	int fds[64], open_count = 0;

	for (size_t i = 0; i < ARRAY_LEN(fds); i++) {
		fds[i] = world->backend->raw_connect(a->address, a->address_len);
		open_count += fds[i] >= 0;
		world_run_ns(world, MS / 2);
	}
	CHECK(open_count > 0, "the door is closed");
	disconnect(world, a, b);
	world_connect(world, a, b);
	still_works(world, a, b);
	for (size_t i = 0; i < ARRAY_LEN(fds); i++) {
		if (fds[i] >= 0)
			close(fds[i]);
	}
	world_run_ns(world, 20 * MS);
	still_works(world, a, b);
}

/* One byte at a time of garbage ends in a hang-up, not in a buffer. */
static void raw_endless(struct world *world)
{
	struct end *a = world->end[0], *b = world->end[1];
	int fd = world->backend->raw_connect(a->address, a->address_len);
	uint8_t bytes[4096];
	bool gone = false;

	CHECK(fd >= 0, "the door is closed: %s", strerror(errno));
	memset(bytes, 'A', sizeof(bytes));
	for (unsigned int i = 0; i < 2000 && !gone; i++) {
		raw_send(fd, bytes, sizeof(bytes));
		world_step(world, MS / 10);
		gone = raw_hung_up(fd);
	}
	gone = gone || AWAIT(world, raw_hung_up(fd));
	close(fd);
	CHECK(gone, "8 MiB of garbage did not end the connection");
	still_works(world, a, b);
}

const struct conform_case cases_hostile[] = {
	{"hostile: forged token of a dialer", token_wrong_dialer, NEED_THREE},
	{"hostile: forged token of a listener", token_wrong_listener, NEED_TWO},
	{"hostile: garbage as an address", address_garbage, NEED_TWO | BY_ADDRESS},
	{"hostile: garbage as a key", key_garbage, 0},
	{"hostile: a read beyond the key's memory", key_beyond_memory, 0},
	{"hostile: garbage from a stranger", raw_garbage,
	 NEED_TWO | NEED_RAW | BY_ADDRESS},
	{"hostile: endless bytes from a stranger", raw_endless, NEED_TWO | NEED_RAW},
	{"hostile: silent strangers", raw_silent, NEED_TWO | NEED_RAW},
	{NULL, NULL, 0},
};
