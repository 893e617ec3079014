/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_tcp: the tcp backend behind its data port, and at the other end of real
 * sockets the input. First the input is tried as each of the wire's parts: what
 * decodes must encode to the same. Then a dialer with the right token joins and does
 * what the input says: heads with fields of its choice and a right shape, heads that
 * are bytes, payloads, trailers, hang-ups, on the control line and on the streams, in
 * records or where records should be,
 * while the daemon has transfers of its own under way and its rooms answer, hold,
 * refuse or revoke.
 *
 * Whatever comes: the peer can be closed, every transfer and every request has ended
 * by then, once, and no byte outside of the planned rows was touched.
 *
 * Input: [how][steps of [what][a][b][c] and what it takes].
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/config/config.h"
#include "daemon/transport/tcp/tcp_impl.h"
#include "tests/fuzz/lib/fuzz.h"

#define STREAMS 2u
#define STEPS_MAX 64u
#define OPS 4u
#define HELD 8u
#define GUARD 4096u /* of memory on both sides of the rows */
#define ROWS 40u
#define STRIDE 8192u
#define MEMORY (GUARD + ROWS * STRIDE + GUARD)
#define PAINT 0xa5

enum how {
	HOW_ANSWER = 3,	       /* land, hold, refuse, land short rows */
	HOW_READ_ALL = 1 << 4, /* the dialer takes what comes */
	HOW_CRYPTO = 3 << 6,   /* none, aes128gcm twice, that with open records */
};

static struct {
	struct loop *loop;
	struct offload *offload;
	struct copier *copier;
	struct config config;
	struct transport *t;
	struct memory *memory;
	struct xp_reg *reg;
	struct xp_buffer buffer;
	struct plan *plans[3]; /* long rows, short rows, a few bytes */
	/* of one input */
	struct xp_peer *peer;
	uint8_t how;
	bool ready, lost, closed;
	struct xp_inbound *held[HELD];
	unsigned int requests, dones, posted, told;
	struct xp_op ops[OPS];
	int fds[1 + STREAMS]; /* control, streams */
	struct tcp_keys keys;
	struct tcp_seal *seals[1 + STREAMS]; /* of what the dialer says, or NULL */
	uint8_t records[1 + STREAMS][TCP_RECORD_BYTES];
} w;

static void need(bool ok)
{
	if (!ok)
		abort();
}

/* ---- the daemon's side ---- */

static const struct plan *plan_of(uint8_t which)
{
	return w.plans[which % ARRAY_LEN(w.plans)];
}

static void land(struct xp_inbound *in)
{
	struct xp_sides sides = {
		.src = &w.buffer, .dst = &w.buffer, .src_count = 1, .dst_count = 1};

	for (size_t i = 0; i < ARRAY_LEN(w.plans); i++)
		if (w.plans[i]->bytes == in->bytes)
			sides.plan = w.plans[i];
	if (!sides.plan && in->bytes)
		sides.plan = plan_of(w.how); /* the claim is refused */
	w.t->ops->land(in, &sides, NULL);
}

static void on_request(void *owner, struct xp_inbound *in)
{
	struct err err;

	(void)owner;
	w.requests++;
	switch (w.how & HOW_ANSWER) {
	case 1:
		for (unsigned int i = 0; i < HELD; i++) {
			if (w.held[i])
				continue;
			w.held[i] = in;
			return;
		}
		break;
	case 2:
		err_set(&err, ERR_REVOKED, "not this one");
		w.t->ops->land(in, NULL, &err);
		return;
	}
	land(in);
}

static void on_inbound_done(void *owner, struct xp_inbound *in, const struct err *err)
{
	(void)owner;
	(void)err;
	w.dones++;
	for (unsigned int i = 0; i < HELD; i++)
		if (w.held[i] == in)
			w.held[i] = NULL;
}

static void on_peer_ready(void *owner, struct xp_peer *peer)
{
	(void)owner;
	(void)peer;
	w.ready = true;
}

static void on_peer_lost(void *owner, struct xp_peer *peer, const struct err *why)
{
	(void)owner;
	(void)peer;
	(void)why;
	need(w.dones == w.requests && w.told == w.posted);
	w.lost = true;
}

static void on_key(void *owner, struct xp_key *key, const struct err *err)
{
	(void)owner;
	(void)key;
	(void)err;
}

static void on_closed(void *arg)
{
	(void)arg;
	w.closed = true;
}

static void on_done(struct xp_op *op)
{
	need(op->impl == NULL);
	w.told++;
}

static struct plan *plan_make_one(const struct plan_run *run)
{
	struct plan_builder *builder;
	struct plan *plan;

	need(plan_builder_new(&builder) == 0 && plan_builder_add(builder, run) == 0 &&
	     plan_builder_finish(builder, &plan) == 0);
	plan_builder_free(builder);
	return plan;
}

static void world_make(void)
{
	static const struct plan_run runs[] = {
		{.src = GUARD,
		 .dst = GUARD,
		 .len = 5000,
		 .count = ROWS,
		 .src_stride = STRIDE,
		 .dst_stride = STRIDE},
		{.src = GUARD,
		 .dst = GUARD,
		 .len = 48,
		 .count = 4000,
		 .src_stride = 64,
		 .dst_stride = 80},
		{.src = GUARD, .dst = GUARD, .len = 9, .count = 1},
	};
	struct xp_env env = {.config = &w.config};
	struct xp_callbacks up = {.on_request = on_request,
				  .on_inbound_done = on_inbound_done,
				  .on_peer_ready = on_peer_ready,
				  .on_peer_lost = on_peer_lost,
				  .on_key = on_key};

	log_set_level(LOG_LEVEL_ERROR);
	snprintf(w.config.listen, sizeof(w.config.listen), "tcp://127.0.0.1:7400");
	w.config.fence_timeout_ns = LOOP_NS_PER_S;
	w.config.connect_timeout_ns = 15 * LOOP_NS_PER_S;
	w.config.tcp_streams = STREAMS;
	w.config.tcp_threads = 1;
	need(loop_new(&w.loop) == 0 && offload_new(w.loop, 1, &w.offload) == 0 &&
	     copier_new(w.loop, 1, 0, &w.copier) == 0);
	env.loop = w.loop;
	env.offload = w.offload;
	env.copier = w.copier;
	need(tcp_transport.open(&env, &up, &w.t) == 0 &&
	     memory_new_linear(MEMORY, &w.memory) == 0 &&
	     w.t->ops->mem_reg(w.t, w.memory, &w.reg) == 0);
	w.buffer = (struct xp_buffer){.reg = w.reg, .length = MEMORY};
	for (size_t i = 0; i < ARRAY_LEN(runs); i++)
		w.plans[i] = plan_make_one(&runs[i]);
}

/* ---- the dialer ---- */

static void turns(unsigned int n)
{
	while (n-- > 0)
		loop_turn(w.loop, 0);
}

static void until(const bool *that)
{
	uint64_t end = loop_clock_ns(w.loop) + 15 * LOOP_NS_PER_S;

	while (!*that) {
		need(loop_clock_ns(w.loop) < end);
		loop_turn(w.loop, LOOP_NS_PER_MS);
	}
}

static int dial(void)
{
	struct tcp_address address;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	need(tcp_address_get(w.t->address, w.t->address_len, &address) == 0 && fd >= 0);
	/* libFuzzer's own alarm interrupts it every 11 s; the second call waits on */
	while (connect(fd, &address.list[0].any, tcp_sockaddr_len(&address.list[0])) < 0)
		need(errno == EINTR);
	return fd;
}

/* What the socket does not take is lost: the input asked for too much of it. */
static void say_bare(int fd, const void *bytes, size_t len)
{
	if (fd >= 0)
		(void)!send(fd, bytes, len, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* In records, where the connection has them and the input does not make them. */
static void say(int fd, const void *bytes, size_t len)
{
	struct iovec iov = {(void *)(uintptr_t)bytes, len};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	struct tcp_seal *seal = NULL;

	for (unsigned int i = 0; i <= STREAMS; i++)
		if (fd >= 0 && w.fds[i] == fd)
			seal = w.seals[i];
	if (!seal) {
		say_bare(fd, bytes, len);
		return;
	}
	while (len > 0) {
		ssize_t n = tcp_seal_sendmsg(seal, fd, &msg);

		if (n <= 0)
			return;
		len -= (size_t)n;
	}
}

static void hear(int fd, void *bytes, size_t len)
{
	uint8_t *p = bytes;

	while (len > 0) {
		ssize_t n = recv(fd, p, len, MSG_DONTWAIT);

		need(n > 0 || (n < 0 && errno == EAGAIN));
		if (n > 0) {
			p += n;
			len -= (size_t)n;
		} else {
			loop_turn(w.loop, LOOP_NS_PER_MS);
		}
	}
}

static void seal(unsigned int n, enum tcp_crypto crypto,
		 const struct tcp_traffic *traffic)
{
	if (crypto == TCP_CRYPTO_NONE || (w.how & HOW_CRYPTO) == HOW_CRYPTO)
		return;
	need(tcp_seal_new(&traffic->dialer, "it", &w.seals[n]) == 0);
	tcp_seal_lend(w.seals[n], w.records[n], sizeof(w.records[n]));
}

static enum tcp_crypto introduce_line(void)
{
	struct tcp_hello hello = {.role = TCP_CONTROL, .streams = STREAMS};
	uint8_t buf[TCP_HELLO_BYTES];

	need(tcp_keys_control(&w.keys, &hello, buf) == 0);
	say_bare(w.fds[0], buf, sizeof(buf));
	hear(w.fds[0], buf, sizeof(buf));
	need(tcp_hello_get(buf, &hello) == 0 && tcp_keys_take_welcome(&w.keys, buf) == 0);
	seal(0, hello.crypto, &w.keys.line);
	return hello.crypto;
}

static void introduce_stream(unsigned int number, enum tcp_crypto crypto)
{
	struct tcp_hello hello = {.role = TCP_STREAM, .number = (uint16_t)number};
	uint8_t said[TCP_HELLO_BYTES], buf[TCP_HELLO_BYTES];
	struct tcp_traffic traffic;
	int fd = w.fds[1 + number];

	need(tcp_keys_stream(&w.keys, &hello, said) == 0);
	say_bare(fd, said, sizeof(said));
	hear(fd, buf, sizeof(buf));
	need(tcp_hello_get(buf, &hello) == 0 &&
	     tcp_keys_take_stream_ok(&w.keys, said, buf, &traffic) == 0);
	seal(1 + number, crypto, &traffic);
}

static void join(void)
{
	struct tcp_transport *t = (struct tcp_transport *)w.t;
	struct xp_peer_args args = {.address = w.t->address,
				    .address_len = w.t->address_len};
	unsigned int crypto = (w.how & HOW_CRYPTO) >> 6;

	t->crypto = (enum tcp_crypto)(crypto < TCP_CRYPTO_END ? crypto
							      : TCP_CRYPTO_AES128GCM);
	memset(args.token_in, 2, sizeof(args.token_in));
	memset(args.token_out, 1, sizeof(args.token_out));
	need(tcp_keys_begin(&w.keys, args.token_in, args.token_out) == 0);
	need(w.t->ops->peer_open(w.t, &args, &w.peer) == 0);
	w.fds[0] = dial();
	t->crypto = introduce_line();
	for (unsigned int i = 0; i < STREAMS; i++) {
		w.fds[1 + i] = dial();
		introduce_stream(i, t->crypto);
	}
	until(&w.ready);
}

static void listen_all(void)
{
	uint8_t bytes[65536];

	for (unsigned int i = 0; i <= STREAMS; i++)
		for (unsigned int n = 0; n < 8 && w.fds[i] >= 0; n++)
			if (recv(w.fds[i], bytes, sizeof(bytes), MSG_DONTWAIT) <= 0)
				break;
}

/* ---- steps ---- */

struct input {
	const uint8_t *at;
	size_t left;
};

static uint8_t byte(struct input *in)
{
	if (in->left == 0)
		return 0;
	in->left--;
	return *in->at++;
}

static void say_payload(int fd, struct input *in, size_t len)
{
	static uint8_t bytes[TCP_DATA_MAX];
	size_t part = in->left < len ? in->left : len;

	len = len < sizeof(bytes) ? len : sizeof(bytes);
	part = part < 64 ? part : 64; /* the rest of the input is for other steps */
	memcpy(bytes, in->at, part);
	memset(bytes + part, 0x5c, sizeof(bytes) - part);
	in->at += part;
	in->left -= part;
	say(fd, bytes, len);
}

/* A head of the right shape, fields as the input wishes. */
static void say_head(struct input *in, unsigned int where)
{
	static const uint64_t offsets[] = {0,	  9,	  4096,	  5000,
					   65536, 192000, 199999, UINT64_MAX};
	static const uint32_t lengths[] = {0, 1, 9, 64, 5000, 8000, 65536, TCP_DATA_MAX};
	uint8_t a = byte(in), b = byte(in), c = byte(in), d = byte(in);
	struct tcp_head head = {
		.type = (uint8_t)(where == 0 ? 1 + a % 5 : 6 + a % 2),
		.flags = d & 1 ? TCP_FLAG_EAGER : 0,
		.id = b % 6u,
		.code = d >> 4,
		.at = offsets[c & 7],
		.length = lengths[(c >> 3) & 7],
	};
	uint8_t buf[TCP_HEAD_BYTES];

	if (a & 0x80)
		head.type = a & 15;
	if (head.type == TCP_REQUEST && !(d & 2))
		head.at = plan_of(c)->bytes;
	if (head.type == TCP_REQUEST && (d & 5) == 5)
		head.length = (uint32_t)head.at;
	tcp_head_put(&head, buf);
	say(w.fds[where], buf, sizeof(buf));
	if (d & 8)
		return; /* without its payload */
	say_payload(w.fds[where], in, head.length);
}

static void say_trailer(struct input *in, unsigned int where)
{
	uint8_t buf[TCP_TRAILER_BYTES];

	tcp_trailer_put(byte(in) & 1, buf);
	say(w.fds[where], buf, sizeof(buf));
}

static void post(struct input *in)
{
	uint8_t a = byte(in);
	struct xp_op *op = &w.ops[w.posted % OPS];

	if (w.posted >= OPS || w.lost)
		return;
	*op = (struct xp_op){
		.kind = a & 1 ? XP_READ : XP_WRITE,
		.sides = {.plan = plan_of(a >> 1),
			  .src = &w.buffer,
			  .dst = &w.buffer,
			  .src_count = 1,
			  .dst_count = 1},
		.header = "12345678",
		.header_len = 8,
		.on_done = on_done,
	};
	if (w.t->ops->post(w.peer, op) == 0)
		w.posted++;
	err_clear();
}

static void meddle(struct input *in)
{
	uint8_t a = byte(in);
	struct xp_inbound *held = w.held[(a >> 1) % HELD];
	struct err err;

	err_set(&err, ERR_ABORTED, "enough of it");
	if (a & 1) {
		w.t->ops->cancel(&w.ops[(a >> 1) % OPS], &err);
		return;
	}
	if (!held)
		return;
	if (a & 0x40) {
		w.t->ops->revoke(held, &err);
	} else {
		w.held[(a >> 1) % HELD] = NULL;
		land(held);
	}
}

static void step(struct input *in)
{
	uint8_t what = byte(in);
	unsigned int where = (what >> 4) % (1 + STREAMS);

	switch (what & 15) {
	case 0:
	case 1:
	case 2:
	case 3:
		say_head(in, where);
		break;
	case 4:
	case 5:
		say_trailer(in, where);
		break;
	case 6:
		say_payload(w.fds[where], in, byte(in));
		break;
	case 7:
		say_payload(w.fds[where], in, 300 * (size_t)byte(in));
		break;
	case 8:
	case 9:
		post(in);
		break;
	case 10:
	case 11:
		meddle(in);
		break;
	case 12:
		if (w.fds[where] >= 0)
			(void)shutdown(w.fds[where], SHUT_WR);
		break;
	case 13:
		usleep(50); /* a thread may look */
		break;
	case 14: /* between, or instead of, records */
		say_bare(w.fds[where], in->at, in->left < 40 ? in->left : 40);
		break;
	default:
		break;
	}
	turns(2);
	if (w.how & HOW_READ_ALL)
		listen_all();
}

/* ---- one input ---- */

/* What decodes must encode to the same bytes, but for the unused ones. */
static void try_parts(const uint8_t *data, size_t size)
{
	uint8_t buf[TCP_HEAD_BYTES], address_buf[XP_ADDRESS_MAX];
	struct tcp_address address;
	bool good;
	struct tcp_hello hello;
	struct tcp_head head, again;
	size_t len;

	for (int data_line = 0; data_line < 2 && size >= TCP_HEAD_BYTES; data_line++) {
		if (tcp_head_get(data, data_line, &head) < 0)
			continue;
		need(tcp_head_is_data(&head) == (data_line == 1));
		tcp_head_put(&head, buf);
		need(tcp_head_get(buf, data_line, &again) == 0 && again.id == head.id &&
		     again.at == head.at && again.length == head.length);
	}
	if (size >= TCP_TRAILER_BYTES)
		(void)tcp_trailer_get(data, &good);
	if (size >= TCP_HELLO_BYTES && tcp_hello_get(data, &hello) == 0)
		need(hello.number < TCP_STREAMS_MAX && hello.role < TCP_ROLE_END &&
		     hello.crypto < TCP_CRYPTO_END);
	if (tcp_address_get(data, size, &address) == 0)
		need(tcp_address_put(&address, address_buf, &len) == 0 &&
		     tcp_address_get(address_buf, len, &address) == 0);
	err_clear();
}

static void check_guards(void)
{
	static const uint8_t paint[GUARD] = {[0 ... GUARD - 1] = PAINT};
	const uint8_t *p = w.memory->base;

	need(memcmp(p, paint, GUARD) == 0 &&
	     memcmp(p + MEMORY - GUARD, paint, GUARD) == 0);
}

static void part(void)
{
	/* the ends first: then threads read to the end, and the close is quick */
	for (unsigned int i = 0; i <= STREAMS; i++)
		if (w.fds[i] >= 0)
			(void)shutdown(w.fds[i], SHUT_WR);
	turns(4);
	for (unsigned int i = 0; i <= STREAMS; i++) {
		mem_closep(&w.fds[i]);
		tcp_seal_free(w.seals[i]);
		w.seals[i] = NULL;
	}
	if (!w.lost)
		turns(2);
	w.t->ops->peer_close(w.peer, on_closed, NULL);
	until(&w.closed);
	need(w.dones == w.requests && w.told == w.posted);
	for (unsigned int i = 0; i < HELD; i++)
		need(!w.held[i]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input in = {data, size};

	if (!w.loop)
		world_make();
	try_parts(data, size);
	if (size < 2)
		return 0;
	w.how = byte(&in);
	w.ready = w.lost = w.closed = false;
	w.requests = w.dones = w.posted = w.told = 0;
	memset(w.held, 0, sizeof(w.held));
	memset(w.ops, 0, sizeof(w.ops));
	memset(w.memory->base, PAINT, MEMORY);
	join();
	for (unsigned int i = 0; i < STEPS_MAX && in.left > 0; i++)
		step(&in);
	part();
	check_guards();
	err_clear();
	return 0;
}
