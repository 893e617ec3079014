/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shm: connecting with the right token and with others, and a hostile peer that
 * is a bare socket: it loses itself, no fd, and nobody else. The same socket plays the
 * destination whose answer decides what became of a WRITE.
 */
#include "daemon/transport/shm/shm_private.h"

#include <fcntl.h>
#include <unistd.h>

#include "tests/lib/shm_duo.h"
#include "tests/lib/tmp.h"

/* ---- connecting ---- */

static void wrong_token_is_not_a_peer(void **state)
{
	struct duo *t = duo_new();

	(void)state;
	/* the welcome's token: the dialer notices */
	assert_int_equal(
		duo_peer_open(&t->b, t->a.xp, false, DUO_TOKEN_A, "not the token..."), 0);
	assert_int_equal(duo_peer_open(&t->a, t->b.xp, true, DUO_TOKEN_B, DUO_TOKEN_A),
			 0);
	DUO_WAIT(t, t->a.lost && t->b.lost);
	assert_int_equal(t->a.why.code, ERR_AUTH);
	assert_int_equal(t->a.ready, 0);
	duo_end(t);
}

static void unknown_token_waits_and_is_closed(void **state)
{
	struct duo *t = duo_new();

	(void)state;
	((struct shm *)(void *)t->a.xp)->acceptor.wait_ns = 300 * LOOP_NS_PER_MS;
	((struct shm *)(void *)t->b.xp)->acceptor.wait_ns = 300 * LOOP_NS_PER_MS;
	assert_int_equal(duo_peer_open(&t->b, t->a.xp, false, DUO_TOKEN_A, DUO_TOKEN_B),
			 0);
	assert_int_equal(
		duo_peer_open(&t->a, t->b.xp, true, DUO_TOKEN_B, "not the token..."), 0);
	DUO_WAIT(t, ((struct shm *)(void *)t->b.xp)->acceptor.counts[1] == 1);
	DUO_WAIT(t, t->a.lost && t->b.lost);
	assert_int_equal(t->a.ready + t->b.ready, 0);
	DUO_WAIT(t, ((struct shm *)(void *)t->b.xp)->acceptor.counts[1] == 0);
	duo_end(t);
}

static void dialer_first_waits_for_the_other(void **state)
{
	struct duo *t = duo_new();

	(void)state;
	assert_int_equal(duo_peer_open(&t->a, t->b.xp, true, DUO_TOKEN_B, DUO_TOKEN_A),
			 0);
	DUO_WAIT(t, ((struct shm *)(void *)t->b.xp)->acceptor.counts[1] == 1);
	loop_turn(t->loop, LOOP_NS_PER_MS);
	assert_int_equal(t->a.ready, 0);
	assert_int_equal(duo_peer_open(&t->b, t->a.xp, false, DUO_TOKEN_A, DUO_TOKEN_B),
			 0);
	DUO_WAIT(t, t->a.ready && t->b.ready);
	duo_end(t);
}

#define NAME_AT (1u + 16u + 2u + 8u) /* in the abstract name of an address */

/* So that another transport is taken; a peer that was opened would be lost and come again
 * for ever. */
static void address_without_listener_is_refused_at_once(void **state)
{
	struct duo *t = duo_new();
	struct transport gone = *t->b.xp;

	(void)state;
	gone.address[NAME_AT] = '\n';
	assert_int_equal(duo_peer_open(&t->a, &gone, true, DUO_TOKEN_B, DUO_TOKEN_A),
			 -err_errno(ERR_REQUIRE));
	if (!strstr(err_last()->text, "shm needs a network namespace or run_dir") ||
	    !strstr(err_last()->text, "refused") || strchr(err_last()->text, '\n'))
		fail_msg("%s", err_last()->text);
	t->a.peer = NULL;
	assert_int_equal(t->a.lost, 0);
	duo_end(t);
}

/* Where the network namespaces differ: by the path, if it is the peer's own file. */
static void path_of_other_process_is_refused(void **state)
{
	struct duo *t = duo_new();
	struct transport *xp, far, same_path;
	struct shm_address address;

	(void)state;
	strcpy(t->config.name, "b");
	tmp_path(t->config.run_dir, sizeof(t->config.run_dir), "kvd-shm-XXXXXX");
	assert_non_null(mkdtemp(t->config.run_dir));
	assert_int_equal(shm_transport.open(&t->b.xp->env, &t->b.xp->callbacks, &xp), 0);
	assert_int_equal(shm_address_parse(xp->address, xp->address_len, &address), 0);
	far = *xp;
	far.address[NAME_AT] ^= 1;
	same_path = far;
	same_path.address[far.address_len - 8] ^= 1; /* the inode */
	assert_int_equal(duo_peer_open(&t->a, &same_path, true, DUO_TOKEN_B, DUO_TOKEN_A),
			 -err_errno(ERR_REQUIRE));
	if (!strstr(err_last()->text, address.names[1]) ||
	    !strstr(err_last()->text, "another daemon's"))
		fail_msg("%s", err_last()->text);
	assert_int_equal(duo_peer_open(&t->a, &far, true, DUO_TOKEN_B, DUO_TOKEN_A), 0);
	DUO_WAIT(t, ((struct shm *)(void *)xp)->acceptor.counts[1] == 1);
	shm_transport.peer_close(t->a.peer, duo_on_closed, &t->a);
	DUO_WAIT(t, t->a.closed);
	shm_transport.close(xp);
	assert_int_equal(rmdir(t->config.run_dir), 0);
	duo_end(t);
}

static void address_of_another_machine_is_refused(void **state)
{
	struct duo *t = duo_new();
	struct transport far = *t->b.xp;

	(void)state;
	far.address[5] ^= 1;
	assert_int_equal(duo_peer_open(&t->a, &far, true, DUO_TOKEN_B, DUO_TOKEN_A),
			 -err_errno(ERR_REQUIRE));
	for (size_t len = 0; len < t->b.xp->address_len; len++) {
		far = *t->b.xp;
		far.address_len = len;
		assert_int_equal(
			duo_peer_open(&t->a, &far, true, DUO_TOKEN_B, DUO_TOKEN_A),
			-err_errno(ERR_PROTO));
	}
	t->a.peer = NULL;
	duo_end(t);
}

/* ---- a hostile peer ---- */

static int fd_count(void)
{
	int n = 0;

	for (int fd = 0; fd < 512; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

struct raw {
	uint8_t bytes[256];
	size_t len;
};

static void raw_frame(struct raw *raw, uint8_t type, uint8_t flags, uint64_t id,
		      const void *body, uint32_t len)
{
	struct cursor c;

	cursor_write(&c, raw->bytes + raw->len, sizeof(raw->bytes) - raw->len);
	cursor_put_u32(&c, len);
	cursor_put_u8(&c, type);
	cursor_put_u8(&c, flags);
	cursor_put_u16(&c, 0);
	cursor_put_u64(&c, id);
	cursor_put_bytes(&c, body, len);
	assert_false(c.bad);
	raw->len += c.pos;
}

static void raw_hello(struct raw *raw)
{
	uint8_t body[24];
	struct cursor c;

	cursor_write(&c, body, sizeof(body));
	cursor_put_u32(&c, SHM_MAGIC);
	cursor_put_u16(&c, SHM_VERSION);
	cursor_put_u16(&c, 0);
	cursor_put_bytes(&c, DUO_TOKEN_A, XP_TOKEN_BYTES);
	raw_frame(raw, SHM_HELLO, 0, 0, body, sizeof(body));
}

static void raw_send(int fd, const struct raw *raw, const int *fds, size_t fd_count_)
{
	char control[CMSG_SPACE(16 * sizeof(int))] = {0};
	struct iovec iov = {(void *)raw->bytes, raw->len};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

	if (fd_count_) {
		struct cmsghdr *h = (struct cmsghdr *)(void *)control;

		msg.msg_control = control;
		msg.msg_controllen = CMSG_SPACE(fd_count_ * sizeof(int));
		h->cmsg_level = SOL_SOCKET;
		h->cmsg_type = SCM_RIGHTS;
		h->cmsg_len = CMSG_LEN(fd_count_ * sizeof(int));
		memcpy(CMSG_DATA(h), fds, fd_count_ * sizeof(int));
	}
	assert_int_equal(sendmsg(fd, &msg, MSG_NOSIGNAL), raw->len);
}

/* A bare socket that b takes for its peer. */
static int hostile(struct duo *t)
{
	struct shm_address address;
	struct sockaddr_un sa;
	struct raw raw = {.len = 0};
	socklen_t len;
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_int_equal(duo_peer_open(&t->b, t->a.xp, false, DUO_TOKEN_A, DUO_TOKEN_B),
			 0);
	assert_int_equal(
		shm_address_parse(t->b.xp->address, t->b.xp->address_len, &address), 0);
	assert_int_equal(shm_sockaddr(address.names[0], &sa, &len), 0);
	assert_int_equal(connect(fd, (struct sockaddr *)&sa, len), 0);
	raw_hello(&raw);
	raw_send(fd, &raw, NULL, 0);
	DUO_WAIT(t, t->b.ready);
	return fd;
}

static const uint8_t request_ok[] = {XP_WRITE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};

struct attack {
	const char *name;
	struct {
		uint8_t type, flags;
		uint64_t id;
		uint8_t body[32];
		uint32_t len;
	} frames[4];
	unsigned int fds;
	uint32_t claim; /* body length to claim instead, of the last frame */
};

#define REQUEST_FRAME(id)                          \
	{                                          \
		SHM_REQUEST, 0, id, {XP_WRITE}, 13 \
	}

static const struct attack attacks[] = {
	{"type 0", {{0, 0, 0, {0}, 1}}, 0, 0},
	{"unknown type", {{99, 0, 0, {0}, 1}}, 0, 0},
	{"a second HELLO", {{SHM_HELLO, 0, 0, {0}, 24}}, 0, 0},
	{"WELCOME", {{SHM_WELCOME, 0, 0, {0}, 24}}, 0, 0},
	{"short", {{SHM_REQUEST, 0, 1, {0}, 12}}, 0, 0},
	{"length 4 GiB", {{SHM_REQUEST, 0, 1, {0}, 13}}, 0, UINT32_MAX},
	{"length over the cap", {{SHM_REQUEST, 0, 1, {0}, 13}}, 0, SHM_BODY_MAX + 1},
	{"kind", {{SHM_REQUEST, 0, 1, {3}, 13}}, 0, 0},
	{"header longer than frame",
	 {{SHM_REQUEST, 0, 1, {0, 0, 0, 0, 0, 0, 0, 0, 0, 9}, 13}},
	 0,
	 0},
	{"frame longer than header", {{SHM_REQUEST, 0, 1, {0}, 20}}, 0, 0},
	{"number 0", {{SHM_REQUEST, 0, 0, {0}, 13}}, 0, 0},
	{"number again", {REQUEST_FRAME(1), REQUEST_FRAME(1)}, 0, 0},
	{"number falls", {REQUEST_FRAME(9), REQUEST_FRAME(8)}, 0, 0},
	{"CONFIRM of nothing", {{SHM_CONFIRM, 0, 7, {0}, 0}}, 0, 0},
	{"CONFIRM before COPIED", {REQUEST_FRAME(1), {SHM_CONFIRM, 0, 1, {0}, 0}}, 0, 0},
	{"CANCEL of nothing", {{SHM_CANCEL, 0, 7, {1}, 6}}, 0, 0},
	{"CANCEL without a reason", {REQUEST_FRAME(1), {SHM_CANCEL, 0, 1, {0}, 6}}, 0, 0},
	{"DONE of nothing", {{SHM_DONE, 0, 1, {0}, 6}}, 0, 0},
	{"COPIED of nothing", {{SHM_COPIED, 0, 1, {0}, 0}}, 0, 0},
	{"STAGE of nothing", {{SHM_STAGE, 0, 1, {0}, 0}}, 0, 0},
	{"PROGRESS of nothing", {{SHM_PROGRESS, 0, 1, {0}, 8}}, 0, 0},
	{"DATA without a ring", {{SHM_DATA, 0, 1, {0}, 16}}, 0, 0},
	{"FREE without a ring", {{SHM_FREE, 0, 0, {0}, 0}}, 0, 0},
	{"FREE far away", {{SHM_FREE, 0, UINT64_MAX, {0}, 0}}, 0, 0},
	{"RING without an fd", {{SHM_RING, 0, 0, {1, 0, 0, 0, 0, 16}, 8}}, 0, 0},
	{"RING of 0 slots", {{SHM_RING, 0, 0, {0, 0, 0, 0, 0, 16}, 8}}, 1, 0},
	{"RING too large", {{SHM_RING, 0, 0, {0, 1, 0, 0, 0, 16}, 8}}, 1, 0},
	{"RING that is no memfd", {{SHM_RING, 0, 0, {1, 0, 0, 0, 0, 16}, 8}}, 1, 0},
	{"KEY_GIVE not asked for", {{SHM_KEY_GIVE, 0, 1, {0}, 17}}, 1, 0},
	{"KEY_DENY not asked for", {{SHM_KEY_DENY, 0, 1, {0}, 6}}, 0, 0},
	{"an fd with a frame that carries none", {REQUEST_FRAME(1)}, 1, 0},
	{"fds with a frame that carries none", {REQUEST_FRAME(1)}, 8, 0},
	{"more fds than anybody takes", {REQUEST_FRAME(1)}, 12, 0},
};

static void frames_hostile_lose_their_peer_only(void **state)
{
	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(attacks); i++) {
		struct duo *t = duo_new();
		/* and the gate's that receives for our user */
		int before = fd_count() + 1, fd = hostile(t), fds[12];
		struct raw raw = {.len = 0};
		size_t last = 0;

		t->b.answer = DUO_HOLD;
		for (size_t k = 0;
		     k < 4 && attacks[i].frames[k].len + attacks[i].frames[k].type; k++) {
			last = raw.len;
			raw_frame(&raw, attacks[i].frames[k].type,
				  attacks[i].frames[k].flags, attacks[i].frames[k].id,
				  attacks[i].frames[k].body, attacks[i].frames[k].len);
		}
		if (attacks[i].claim)
			memcpy(raw.bytes + last, &attacks[i].claim, 4);
		for (unsigned int k = 0; k < attacks[i].fds; k++)
			fds[k] = 0;
		raw_send(fd, &raw, fds, attacks[i].fds);
		DUO_WAIT(t, t->b.lost);
		if (t->b.why.code != ERR_PROTO && t->b.why.code != ERR_IMPORT)
			fail_msg("%s: %s %s", attacks[i].name, err_name(t->b.why.code),
				 t->b.why.text);
		close(fd);
		/* no fd is left of it, and the transport serves others */
		assert_int_equal(fd_count(), before);
		shm_transport.peer_close(t->b.peer, duo_on_closed, &t->b);
		DUO_WAIT(t, t->b.closed);
		t->b.closed = t->b.ready = 0;
		t->b.answer = DUO_LAND;
		assert_int_equal(
			duo_peer_open(&t->a, t->b.xp, true, DUO_TOKEN_B, DUO_TOKEN_A), 0);
		assert_int_equal(
			duo_peer_open(&t->b, t->a.xp, false, DUO_TOKEN_A, DUO_TOKEN_B),
			0);
		DUO_WAIT(t, t->a.ready && t->b.ready);
		duo_end(t);
	}
}

/* A frame byte by byte, then the connection ends in the middle of one. */
static void frames_in_pieces_are_put_together(void **state)
{
	struct duo *t = duo_new();
	int fd = hostile(t);
	struct raw raw = {.len = 0}, one = {.len = 1};

	(void)state;
	raw_frame(&raw, SHM_REQUEST, 0, 1, request_ok, sizeof(request_ok));
	raw_frame(&raw, SHM_REQUEST, 0, 2, request_ok, sizeof(request_ok));
	for (size_t i = 0; i < raw.len - 1; i++) {
		one.bytes[0] = raw.bytes[i];
		raw_send(fd, &one, NULL, 0);
		loop_turn(t->loop, 0);
	}
	DUO_WAIT(t, t->b.inbound_dones == 1);
	close(fd);
	DUO_WAIT(t, t->b.lost);
	assert_int_equal(t->b.why.code, ERR_PEER);
	assert_int_equal(t->b.requests, 1);
	duo_end(t);
}

/* ---- more frames at once than a turn handles ---- */

#define AT_ONCE 7u

/* Requests that take a turn's time each, and behind them a frame, arrive at once. */
static int flood(struct duo *t, uint8_t last_type)
{
	uint8_t body[SHM_REQUEST_BYTES + 4] = {XP_WRITE, [9] = 4};
	struct raw raw = {.len = 0};
	int fd = hostile(t);

	for (uint32_t i = 1; i <= AT_ONCE; i++) {
		memcpy(body + SHM_REQUEST_BYTES, &i, 4);
		raw_frame(&raw, i < AT_ONCE ? SHM_REQUEST : last_type, 0, i, body,
			  i < AT_ONCE || last_type == SHM_REQUEST ? sizeof(body) : 0);
	}
	t->b.answer = DUO_HOLD;
	t->b.slow_ns = LOOP_TURN_NS;
	raw_send(fd, &raw, NULL, 0);
	return fd;
}

/* Runs turns until so many requests were handed up: one per turn. */
static void flood_turns(struct duo *t, unsigned int until)
{
	uint64_t end_ns = loop_clock_ns(t->loop) + DUO_WAIT_NS;

	while (t->b.requests < until) {
		unsigned int before = t->b.requests;

		assert_true(loop_clock_ns(t->loop) < end_ns);
		loop_turn(t->loop, 20 * LOOP_NS_PER_MS);
		assert_in_range(t->b.requests, before, before + 1);
	}
}

/* No further byte arrives: the rest is not announced by the socket. */
static void frames_at_once_are_handled_some_per_turn(void **state)
{
	struct duo *t = duo_new();
	int fd = flood(t, SHM_REQUEST);

	(void)state;
	flood_turns(t, AT_ONCE);
	for (uint32_t i = 0; i < AT_ONCE; i++)
		assert_int_equal(t->b.seen[i].mark, i + 1);
	t->b.slow_ns = 0;
	close(fd);
	DUO_WAIT(t, t->b.lost);
	assert_int_equal(t->b.why.code, ERR_PEER);
	duo_end(t);
}

/* Frames sent before the end of the connection precede it, also if answers cannot be
 * sent any more. */
static void frames_precede_the_end(enum duo_answer answer)
{
	struct duo *t = duo_new();
	int fd = flood(t, SHM_REQUEST);

	flood_turns(t, 2);
	t->b.answer = answer;
	close(fd);
	DUO_WAIT(t, t->b.lost);
	assert_int_equal(t->b.requests, AT_ONCE);
	duo_end(t);
}

static void frames_at_once_precede_the_end(void **state)
{
	(void)state;
	frames_precede_the_end(DUO_HOLD);
	frames_precede_the_end(DUO_REFUSE);
}

static void bad_frame_among_many_loses_the_peer(void **state)
{
	struct duo *t = duo_new();
	int fd = flood(t, SHM_CONFIRM);

	(void)state;
	DUO_WAIT(t, t->b.lost);
	assert_int_equal(t->b.why.code, ERR_PROTO);
	assert_int_equal(t->b.requests, AT_ONCE - 1);
	close(fd);
	duo_end(t);
}

static void peer_closed_between_frames_gets_no_more(void **state)
{
	struct duo *t = duo_new();
	int fd = flood(t, SHM_REQUEST);

	(void)state;
	flood_turns(t, 2);
	shm_transport.peer_close(t->b.peer, duo_on_closed, &t->b);
	DUO_WAIT(t, t->b.closed);
	t->b.peer = NULL;
	assert_int_equal(t->b.requests, 2);
	assert_int_equal(t->b.inbound_dones, 2);
	close(fd);
	duo_end(t);
}

/* It asks and never reads: bounded, and the loop stays free. */
static void peer_never_reading_is_lost(void **state)
{
	struct duo *t = duo_new();
	int fd = hostile(t);
	struct raw raw = {.len = 0};
	uint64_t serial = 0;

	(void)state;
	assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
	while (!t->b.lost) {
		raw.len = 0;
		for (int i = 0; i < 8; i++, serial++)
			raw_frame(&raw, SHM_REQUEST, 0, serial + 1, request_ok,
				  sizeof(request_ok));
		if (send(fd, raw.bytes, raw.len, MSG_NOSIGNAL) < (ssize_t)raw.len)
			break; /* a part: enough sent for one turn */
		loop_turn(t->loop, 0);
		assert_true(((struct shm_peer *)(void *)t->b.peer)->wire.out_len <=
			    SHM_OUT_HARD);
		if (serial > 2000000)
			fail_msg("never lost");
	}
	close(fd);
	DUO_WAIT(t, t->b.lost);
	duo_end(t);
}

/* All of it, however little the socket takes at once. False: the peer was lost. */
static bool raw_pour(struct duo *t, int fd, const void *bytes, size_t len)
{
	for (size_t sent = 0; sent < len && !t->b.lost;) {
		ssize_t n = send(fd, (const uint8_t *)bytes + sent, len - sent,
				 MSG_NOSIGNAL | MSG_DONTWAIT);

		sent += n > 0 ? (size_t)n : 0;
		loop_turn(t->loop, 0);
	}
	return !t->b.lost;
}

/* Nobody has answered them yet: one more than there may be. */
static void requests_over_the_limit_lose_the_peer(void **state)
{
	struct duo *t = duo_new();
	int fd = hostile(t);
	struct raw raw;

	(void)state;
	t->b.answer = DUO_HOLD;
	for (uint64_t id = 1; id <= XP_INBOUND_MAX; id++) {
		raw.len = 0;
		raw_frame(&raw, SHM_REQUEST, 0, id, request_ok, sizeof(request_ok));
		assert_true(raw_pour(t, fd, raw.bytes, raw.len));
	}
	DUO_WAIT(t, t->b.requests == XP_INBOUND_MAX);
	assert_int_equal(t->b.lost, 0);
	raw.len = 0;
	raw_frame(&raw, SHM_REQUEST, 0, XP_INBOUND_MAX + 1, request_ok,
		  sizeof(request_ok));
	raw_send(fd, &raw, NULL, 0);
	DUO_WAIT(t, t->b.lost);
	assert_int_equal(t->b.why.code, ERR_PROTO);
	close(fd);
	duo_end(t);
}

static void headers_over_the_limit_lose_the_peer(void **state)
{
	enum { BODY = SHM_REQUEST_BYTES + XP_HEADER_MAX };
	struct duo *t = duo_new();
	int fd = hostile(t);
	uint8_t *frame = test_calloc(1, SHM_FRAME_BYTES + BODY);
	uint64_t held = 0;
	bool lives = true;

	(void)state;
	t->b.answer = DUO_HOLD;
	for (uint64_t id = 1; lives && id < 100; id++) {
		struct cursor c;

		cursor_write(&c, frame, SHM_FRAME_BYTES + SHM_REQUEST_BYTES);
		cursor_put_u32(&c, BODY);
		cursor_put_u32(&c, SHM_REQUEST);
		cursor_put_u64(&c, id);
		cursor_put_u8(&c, XP_WRITE);
		cursor_put_u64(&c, 0);
		cursor_put_u32(&c, XP_HEADER_MAX);
		lives = raw_pour(t, fd, frame, SHM_FRAME_BYTES + BODY);
		held = ((struct shm_peer *)(void *)t->b.peer)->held_bytes;
		assert_true(held <= NET_HEADERS_MAX);
	}
	DUO_WAIT(t, t->b.lost);
	assert_int_equal(t->b.why.code, ERR_PROTO);
	assert_int_equal(t->b.requests, NET_HEADERS_MAX / XP_HEADER_MAX);
	test_free(frame);
	close(fd);
	duo_end(t);
}

/* ---- the peer's answer to what we posted ---- */

/* The next frame from b, which must be of this type: the number in it. */
static uint64_t raw_expect(struct duo *t, int fd, enum shm_type type)
{
	uint8_t bytes[SHM_FRAME_BYTES + 512];
	struct cursor c;
	uint32_t body;

	DUO_WAIT(t, recv(fd, bytes, SHM_FRAME_BYTES, MSG_PEEK | MSG_DONTWAIT) ==
			    SHM_FRAME_BYTES);
	cursor_read(&c, bytes, SHM_FRAME_BYTES);
	body = cursor_get_u32(&c);
	assert_true(body <= 512);
	assert_int_equal(recv(fd, bytes, SHM_FRAME_BYTES + body, MSG_WAITALL),
			 SHM_FRAME_BYTES + body);
	assert_int_equal(cursor_get_u32(&c) & 0xff, type);
	return cursor_get_u64(&c);
}

static void raw_say(int fd, enum shm_type type, uint64_t id, uint8_t code)
{
	const uint8_t body[6] = {code};
	struct raw raw = {.len = 0};

	raw_frame(&raw, type, 0, id, body, type == SHM_DONE ? sizeof(body) : 0);
	raw_send(fd, &raw, NULL, 0);
}

static void raw_expect_nothing(struct duo *t, int fd)
{
	uint8_t byte;

	for (int i = 0; i < 20; i++)
		loop_turn(t->loop, LOOP_NS_PER_MS);
	assert_int_equal(recv(fd, &byte, 1, MSG_DONTWAIT), -1);
}

/* b posts to a bare socket, which has its request. */
struct posted {
	struct duo *t;
	struct duo_shared memory;
	struct xp_buffer here, there;
	struct plan *plan;
	struct duo_op top;
	uint64_t id;
	int fd;
};

static void posted_begin(struct posted *p, enum xp_kind kind)
{
	*p = (struct posted){.t = duo_new()};
	p->fd = hostile(p->t);
	duo_shared_new(&p->memory, &p->t->b, NULL, 4096, false);
	p->plan = duo_plan_rows(4, 64);
	p->here = (struct xp_buffer){.reg = p->memory.reg, .length = 4096};
	p->there = (struct xp_buffer){.length = 4096};
	p->top.test = p->t;
	p->top.op = (struct xp_op){.kind = kind, .on_done = duo_on_op_done};
	p->top.op.sides = (struct xp_sides){
		.plan = p->plan,
		.src_count = 1,
		.dst_count = 1,
		.src = kind == XP_WRITE ? &p->here : &p->there,
		.dst = kind == XP_WRITE ? &p->there : &p->here,
	};
	assert_int_equal(shm_transport.post(p->t->b.peer, &p->top.op), 0);
	raw_expect(p->t, p->fd, SHM_WELCOME);
	p->id = raw_expect(p->t, p->fd, SHM_REQUEST);
}

static void posted_cancel(struct posted *p)
{
	struct err why;

	err_set(&why, ERR_ABORTED, "the engine said so");
	shm_transport.cancel(&p->top.op, &why);
}

static void posted_end(struct posted *p)
{
	close(p->fd);
	DUO_WAIT(p->t, p->t->b.lost);
	duo_shared_free(&p->memory);
	plan_free(p->plan);
	duo_end(p->t);
}

/* Once it is confirmed the destination may have counted it: it says whether. */
static void write_canceled_after_confirmation_is_ended_by_peer(void **state)
{
	(void)state;
	for (int good = 0; good < 2; good++) {
		struct posted p;

		posted_begin(&p, XP_WRITE);
		raw_say(p.fd, SHM_COPIED, p.id, 0);
		assert_int_equal(raw_expect(p.t, p.fd, SHM_CONFIRM), p.id);
		posted_cancel(&p);
		raw_expect_nothing(p.t, p.fd); /* it cannot take that back */
		assert_int_equal(p.top.calls, 0);
		raw_say(p.fd, SHM_DONE, p.id, good ? 0 : ERR_RANGE);
		DUO_WAIT(p.t, p.top.calls);
		assert_int_equal(p.top.op.err.code, good ? ERR_OK : ERR_ABORTED);
		assert_int_equal(p.top.op.moved, good ? p.plan->bytes : 0);
		assert_int_equal(p.t->b.lost, 0);
		posted_end(&p);
	}
}

static void write_confirmed_without_reply_loses_the_peer(void **state)
{
	struct posted p;

	(void)state;
	posted_begin(&p, XP_WRITE);
	((struct shm *)(void *)p.t->b.xp)->net.fence_ns = 50 * LOOP_NS_PER_MS;
	raw_say(p.fd, SHM_COPIED, p.id, 0);
	raw_expect(p.t, p.fd, SHM_CONFIRM);
	posted_cancel(&p);
	DUO_WAIT(p.t, p.t->b.lost);
	assert_int_equal(p.t->b.why.code, ERR_FENCE);
	assert_int_equal(p.top.calls, 1);
	assert_int_equal(p.top.op.err.code, ERR_ABORTED);
	posted_end(&p);
}

/* A copy without our CONFIRM does not count, so the cancel waits for nobody. */
static void canceled_write_is_never_confirmed(void **state)
{
	struct posted p;

	(void)state;
	posted_begin(&p, XP_WRITE);
	posted_cancel(&p);
	DUO_WAIT(p.t, p.top.calls);
	assert_int_equal(p.top.op.err.code, ERR_ABORTED);
	assert_int_equal(raw_expect(p.t, p.fd, SHM_CANCEL), p.id);
	raw_say(p.fd, SHM_COPIED, p.id, 0);
	raw_say(p.fd, SHM_DONE, p.id, ERR_ABORTED);
	DUO_WAIT(p.t, ((struct shm_peer *)(void *)p.t->b.peer)->net.asked == 0);
	raw_expect_nothing(p.t, p.fd);
	assert_int_equal(p.t->b.lost, 0);
	posted_end(&p);
}

/* Success of bytes that were not confirmed, or did not come; a second answer. */
static void replies_impossible_lose_the_peer(void **state)
{
	(void)state;
	for (int way = 0; way < 4; way++) {
		struct posted p;

		posted_begin(&p, way == 1 ? XP_READ : XP_WRITE);
		if (way > 1) {
			raw_say(p.fd, SHM_COPIED, p.id, 0);
			raw_expect(p.t, p.fd, SHM_CONFIRM);
		}
		raw_say(p.fd, way == 2 ? SHM_COPIED : SHM_DONE, p.id, 0);
		if (way == 3)
			raw_say(p.fd, SHM_DONE, p.id, 0);
		DUO_WAIT(p.t, p.t->b.lost);
		assert_int_equal(p.t->b.why.code, ERR_PROTO);
		assert_int_equal(p.top.calls, 1);
		assert_int_equal(p.top.op.err.code, way == 3 ? ERR_OK : ERR_PROTO);
		posted_end(&p);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(wrong_token_is_not_a_peer),
		cmocka_unit_test(unknown_token_waits_and_is_closed),
		cmocka_unit_test(dialer_first_waits_for_the_other),
		cmocka_unit_test(address_without_listener_is_refused_at_once),
		cmocka_unit_test(path_of_other_process_is_refused),
		cmocka_unit_test(address_of_another_machine_is_refused),
		cmocka_unit_test(frames_hostile_lose_their_peer_only),
		cmocka_unit_test(frames_in_pieces_are_put_together),
		cmocka_unit_test(frames_at_once_are_handled_some_per_turn),
		cmocka_unit_test(frames_at_once_precede_the_end),
		cmocka_unit_test(bad_frame_among_many_loses_the_peer),
		cmocka_unit_test(peer_closed_between_frames_gets_no_more),
		cmocka_unit_test(peer_never_reading_is_lost),
		cmocka_unit_test(requests_over_the_limit_lose_the_peer),
		cmocka_unit_test(headers_over_the_limit_lose_the_peer),
		cmocka_unit_test(write_canceled_after_confirmation_is_ended_by_peer),
		cmocka_unit_test(write_confirmed_without_reply_loses_the_peer),
		cmocka_unit_test(canceled_write_is_never_confirmed),
		cmocka_unit_test(replies_impossible_lose_the_peer),
	};

	return cmocka_run_group_tests_name("shm_hostile", tests, NULL, NULL);
}
