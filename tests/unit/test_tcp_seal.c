/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp_keys and tcp_seal: the schedule and the records against the vectors of RFC 5869,
 * RFC 8448 and NIST; a meeting of two ends, and what is left of it when any bit of it is
 * turned; keys of many connections, none of which is another's; records in every wrong
 * order.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "daemon/base/mem.h"
#include "daemon/transport/tcp/tcp_openssl.h"
#include "daemon/transport/tcp/tcp_seal.h"

#define STREAMS 3u

static void random_fill(void *bytes, size_t len)
{
	assert_int_equal(getrandom(bytes, len, 0), len);
}

static size_t unhex(const char *hex, uint8_t *bytes)
{
	size_t n = strlen(hex) / 2;

	for (size_t i = 0; i < n; i++)
		bytes[i] = (uint8_t)strtoul((char[]){hex[2 * i], hex[2 * i + 1], 0}, NULL,
					    16);
	return n;
}

static void assert_hex(const void *bytes, const char *hex)
{
	uint8_t want[256];

	assert_memory_equal(bytes, want, unhex(hex, want));
}

static void assert_refused(int r, const char *words)
{
	assert_int_equal(r, -err_errno(ERR_AUTH));
	if (!strstr(err_last()->text, words))
		fail_msg("\"%s\" is not in \"%s\"", words, err_last()->text);
	err_clear();
}

/* ---- RFC 5869 ---- */

static void hkdf_is_rfc_5869s(void **state)
{
	uint8_t key[80], salt[80], info[80], out[82];
	struct tcp_secret secret;

	(void)state;
	memset(key, 0x0b, 22);
	for (unsigned int i = 0; i < 13; i++)
		salt[i] = (uint8_t)i;
	for (unsigned int i = 0; i < 10; i++)
		info[i] = (uint8_t)(0xf0 + i);
	assert_int_equal(tcp_hkdf_extract(salt, 13, key, 22, &secret), 0);
	assert_hex(secret.bytes,
		   "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844a"
		   "d7c2b3e5");
	assert_int_equal(tcp_hkdf_expand(secret.bytes, 32, info, 10, out, 42), 0);
	assert_hex(out,
		   "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34"
		   "007208d5b887185865");
	for (unsigned int i = 0; i < 80; i++) {
		key[i] = (uint8_t)i;
		salt[i] = (uint8_t)(0x60 + i);
		info[i] = (uint8_t)(0xb0 + i);
	}
	assert_int_equal(tcp_hkdf_extract(salt, 80, key, 80, &secret), 0);
	assert_hex(secret.bytes,
		   "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40"
		   "c15fc244");
	assert_int_equal(tcp_hkdf_expand(secret.bytes, 32, info, 80, out, 82), 0);
	assert_hex(out, "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
			"59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71"
			"cc30c58179ec3e87c14c01d5c1f3434f1d87");
}

/* ---- two ends meet ---- */

struct meeting {
	uint8_t tokens[2][XP_TOKEN_BYTES];
	struct tcp_keys dialer, dialed;
	union {
		struct {
			uint8_t control[TCP_HELLO_BYTES], welcome[TCP_HELLO_BYTES];
			uint8_t stream[STREAMS][TCP_HELLO_BYTES];
			uint8_t ok[STREAMS][TCP_HELLO_BYTES];
		};
		uint8_t said[(2 + 2 * STREAMS) * TCP_HELLO_BYTES];
	};
	struct tcp_traffic here[STREAMS], there[STREAMS];
};

static void meet_line(struct meeting *m)
{
	struct tcp_hello hello = {
		.role = TCP_CONTROL, .streams = STREAMS, .crypto = TCP_CRYPTO_AES128GCM};

	assert_int_equal(tcp_keys_begin(&m->dialer, m->tokens[0], m->tokens[1]), 0);
	assert_int_equal(tcp_keys_begin(&m->dialed, m->tokens[0], m->tokens[1]), 0);
	random_fill(hello.nonce, sizeof(hello.nonce));
	assert_int_equal(tcp_keys_control(&m->dialer, &hello, m->control), 0);
	assert_int_equal(tcp_keys_take_control(&m->dialed, m->control), 0);
	hello.role = TCP_WELCOME;
	random_fill(hello.nonce, sizeof(hello.nonce));
	assert_int_equal(tcp_keys_welcome(&m->dialed, &hello, m->welcome), 0);
	assert_int_equal(tcp_keys_take_welcome(&m->dialer, m->welcome), 0);
	assert_memory_equal(&m->dialer.line, &m->dialed.line, sizeof(m->dialer.line));
}

static void meet_stream(struct meeting *m, unsigned int i)
{
	struct tcp_hello hello = {.role = TCP_STREAM, .number = (uint16_t)i};

	random_fill(hello.nonce, sizeof(hello.nonce));
	assert_int_equal(tcp_keys_stream(&m->dialer, &hello, m->stream[i]), 0);
	assert_int_equal(tcp_keys_take_stream(&m->dialed, m->stream[i]), 0);
	hello.role = TCP_STREAM_OK;
	random_fill(hello.nonce, sizeof(hello.nonce));
	assert_int_equal(tcp_keys_stream_ok(&m->dialed, m->stream[i], &hello, m->ok[i],
					    &m->there[i]),
			 0);
	assert_int_equal(
		tcp_keys_take_stream_ok(&m->dialer, m->stream[i], m->ok[i], &m->here[i]),
		0);
	assert_memory_equal(&m->here[i], &m->there[i], sizeof(m->here[i]));
}

static void meet(struct meeting *m)
{
	meet_line(m);
	for (unsigned int i = 0; i < STREAMS; i++)
		meet_stream(m, i);
}

static struct meeting *meeting_new(void)
{
	struct meeting *m = mem_zalloc(sizeof(*m));

	random_fill(m->tokens, sizeof(m->tokens));
	return m;
}

static void tokens_are_never_sent(void **state)
{
	struct meeting *m = meeting_new();

	(void)state;
	meet(m);
	for (unsigned int i = 0; i < 2; i++)
		for (size_t part = 0; part + 8 <= XP_TOKEN_BYTES; part++)
			assert_null(
				memmem(m->said, sizeof(m->said), m->tokens[i] + part, 8));
	mem_free(m);
}

/* Also in what the ends wish: nobody in between can ask for less in their names. */
static void hello_with_any_bit_turned_is_refused(void **state)
{
	struct meeting *m = meeting_new();
	struct tcp_traffic traffic;
	struct tcp_keys before;

	(void)state;
	meet(m);
	for (size_t bit = 0; bit < 8 * TCP_HELLO_BYTES; bit++) {
		uint8_t turn = (uint8_t)(1u << bit % 8), byte = (uint8_t)(bit / 8);

		m->control[byte] ^= turn;
		assert_refused(tcp_keys_take_control(&m->dialed, m->control), "control");
		m->control[byte] ^= turn;
		m->welcome[byte] ^= turn;
		before = m->dialer;
		assert_refused(tcp_keys_take_welcome(&m->dialer, m->welcome), "welcome");
		assert_memory_equal(&before, &m->dialer, sizeof(before));
		m->welcome[byte] ^= turn;
		m->stream[0][byte] ^= turn;
		assert_refused(tcp_keys_take_stream(&m->dialed, m->stream[0]), "stream");
		/* the answer is to another one */
		assert_refused(tcp_keys_take_stream_ok(&m->dialer, m->stream[0], m->ok[0],
						       &traffic),
			       "answer");
		m->stream[0][byte] ^= turn;
		m->ok[0][byte] ^= turn;
		assert_refused(tcp_keys_take_stream_ok(&m->dialer, m->stream[0], m->ok[0],
						       &traffic),
			       "answer");
		m->ok[0][byte] ^= turn;
	}
	mem_free(m);
}

static void hellos_of_other_tokens_and_places_are_refused(void **state)
{
	struct meeting *m = meeting_new(), *other = meeting_new();
	struct tcp_traffic traffic;

	(void)state;
	meet(m);
	meet(other);
	assert_refused(tcp_keys_take_control(&m->dialed, other->control), "proof");
	assert_refused(tcp_keys_take_welcome(&m->dialer, other->welcome), "proof");
	/* the same tokens, the other way round: who dials is in the keys */
	memcpy(other->tokens[0], m->tokens[1], XP_TOKEN_BYTES);
	memcpy(other->tokens[1], m->tokens[0], XP_TOKEN_BYTES);
	meet(other);
	assert_refused(tcp_keys_take_control(&m->dialed, other->control), "proof");
	/* the same tokens, another session: its hellos are of no use in this one */
	memcpy(other->tokens, m->tokens, sizeof(m->tokens));
	meet(other);
	assert_int_equal(tcp_keys_take_control(&m->dialed, other->control), 0);
	assert_refused(tcp_keys_take_welcome(&m->dialer, other->welcome), "proof");
	assert_refused(tcp_keys_take_stream(&m->dialed, other->stream[0]), "proof");
	assert_refused(
		tcp_keys_take_stream_ok(&m->dialer, m->stream[0], m->ok[1], &traffic),
		"proof");
	/* a hello in another's place */
	assert_refused(tcp_keys_take_control(&m->dialed, m->welcome), "proof");
	assert_refused(tcp_keys_take_welcome(&m->dialer, m->control), "proof");
	assert_refused(tcp_keys_take_stream(&m->dialed, m->ok[0]), "proof");
	mem_free(m);
	mem_free(other);
}

#define CONNECTIONS 300u
struct seen {
	uint8_t key[TCP_KEY_BYTES], iv[TCP_IV_BYTES];
};

static void see(struct seen **at, const struct tcp_traffic *traffic)
{
	assert_int_equal(tcp_seal_key(&traffic->dialer, (*at)->key, (*at)->iv), 0);
	(*at)++;
	assert_int_equal(tcp_seal_key(&traffic->dialed, (*at)->key, (*at)->iv), 0);
	(*at)++;
}

static int by_key(const void *a, const void *b)
{
	return memcmp(a, b, TCP_KEY_BYTES);
}

/* One peering connects again and again: no key of any connection, stream or direction
 * comes twice, so no nonce can meet its key again. */
static void no_key_serves_twice_over_reconnects(void **state)
{
	static struct seen seen[CONNECTIONS * 2 * (1 + STREAMS)];
	struct meeting *m = meeting_new();
	struct seen *at = seen;

	(void)state;
	for (unsigned int i = 0; i < CONNECTIONS; i++) {
		meet(m);
		see(&at, &m->dialer.line);
		for (unsigned int n = 0; n < STREAMS; n++)
			see(&at, &m->here[n]);
	}
	qsort(seen, ARRAY_LEN(seen), sizeof(seen[0]), by_key);
	for (size_t i = 1; i < ARRAY_LEN(seen); i++)
		assert_true(memcmp(seen[i - 1].key, seen[i].key, TCP_KEY_BYTES) != 0);
	mem_free(m);
}

/* It is enough that one end's random bytes are new. */
static void one_ends_fresh_bytes_make_new_keys(void **state)
{
	struct tcp_hello control = {.role = TCP_CONTROL, .streams = 1};
	struct tcp_hello welcome = {.role = TCP_WELCOME, .streams = 1};
	struct meeting *m = meeting_new();
	uint8_t said[TCP_HELLO_BYTES];
	struct tcp_traffic first;

	(void)state;
	assert_int_equal(tcp_keys_begin(&m->dialed, m->tokens[0], m->tokens[1]), 0);
	assert_int_equal(tcp_keys_control(&m->dialed, &control, said), 0);
	assert_int_equal(tcp_keys_welcome(&m->dialed, &welcome, said), 0);
	first = m->dialed.line;
	welcome.nonce[31] = 1; /* CONTROL is repeated, the answer is new */
	assert_int_equal(tcp_keys_welcome(&m->dialed, &welcome, said), 0);
	assert_memory_not_equal(&first, &m->dialed.line, sizeof(first));
	welcome.nonce[31] = 0;
	control.nonce[31] = 1;
	assert_int_equal(tcp_keys_control(&m->dialed, &control, said), 0);
	assert_int_equal(tcp_keys_welcome(&m->dialed, &welcome, said), 0);
	assert_memory_not_equal(&first, &m->dialed.line, sizeof(first));
	mem_free(m);
}

/* ---- records ---- */

static uint8_t buffers[2][4 * TCP_RECORD_BYTES];

struct pair {
	struct tcp_seal *seal, *open;
};

static void pair_begin(struct pair *p)
{
	struct tcp_secret secret;

	random_fill(&secret, sizeof(secret));
	assert_int_equal(tcp_seal_new(&secret, "b", &p->seal), 0);
	assert_int_equal(tcp_seal_new(&secret, "a", &p->open), 0);
	tcp_seal_lend(p->seal, buffers[0], sizeof(buffers[0]));
	tcp_seal_lend(p->open, buffers[1], sizeof(buffers[1]));
}

static void pair_end(struct pair *p)
{
	tcp_seal_free(p->seal);
	tcp_seal_free(p->open);
}

/* One record; its bytes are taken out of the buffer. */
static size_t sealed(struct tcp_seal *seal, const void *bytes, size_t len,
		     uint8_t *record)
{
	struct iovec iov = {(void *)(uintptr_t)bytes, len};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	size_t n;

	assert_int_equal(tcp_seal_put(seal, &msg), len);
	n = seal->end;
	memcpy(record, seal->buf, n);
	seal->pos = seal->end = 0;
	return n;
}

static int opened(struct tcp_seal *open, const uint8_t *record, size_t len)
{
	open->broken = false; /* so that a wrong one can be followed */
	open->pos = 0;
	open->end = len;
	open->plain_len = 0;
	memcpy(open->buf, record, len);
	return tcp_seal_open(open, NULL, 0);
}

static void key_take(struct tcp_seal *seal, const char *key, const char *iv)
{
	uint8_t bytes[TCP_KEY_BYTES];

	unhex(key, bytes);
	assert_int_equal(EVP_EncryptInit_ex(seal->ctx, NULL, NULL, bytes, NULL), 1);
	unhex(iv, seal->iv);
}

/* RFC 8448, 3: the client's application data. */
static void record_is_rfc_8448s(void **state)
{
	uint8_t bytes[50], record[TCP_RECORD_BYTES];
	struct pair p;

	(void)state;
	for (unsigned int i = 0; i < sizeof(bytes); i++)
		bytes[i] = (uint8_t)i;
	pair_begin(&p);
	key_take(p.seal, "17422dda596ed5d9acd890e3c63f5051", "5b78923dee08579033e523d9");
	key_take(p.open, "17422dda596ed5d9acd890e3c63f5051", "5b78923dee08579033e523d9");
	assert_int_equal(sealed(p.seal, bytes, sizeof(bytes), record), 72);
	assert_hex(record,
		   "1703030043a23f7054b62c94d0affafe8228ba55cbefacea42f914aa66bcab3f2b"
		   "9819a8a5b46b395bd54a9a20441e2b62974e1f5a6292a2977014bd1e3deae63aee"
		   "bb21694915e4");
	assert_int_equal(opened(p.open, record, 72), 1);
	assert_int_equal(p.open->plain_len, 50);
	assert_memory_equal(p.open->plain, bytes, 50);
	pair_end(&p);
}

static void record_with_any_bit_turned_is_refused(void **state)
{
	uint8_t record[TCP_RECORD_BYTES];
	struct pair p;
	size_t n;

	(void)state;
	pair_begin(&p);
	n = sealed(p.seal, "twenty bytes of mine", 20, record);
	for (size_t bit = 0; bit < 8 * n; bit++) {
		int r;

		record[bit / 8] ^= (uint8_t)(1u << bit % 8);
		p.open->number = 0;
		r = opened(p.open, record, n);
		/* a longer one than came is waited for, and is wrong then */
		if (r == 0 && bit / 8 >= 3 && bit / 8 < 5) {
			memset(record + n, 0, sizeof(record) - n);
			r = opened(p.open, record, sizeof(record));
		}
		assert_refused(r, "tcp: authentication failed");
		record[bit / 8] ^= (uint8_t)(1u << bit % 8);
	}
	p.open->number = 0;
	assert_int_equal(opened(p.open, record, n), 1);
	pair_end(&p);
}

static void record_out_of_its_place_is_refused(void **state)
{
	static uint8_t records[4][TCP_RECORD_BYTES];
	struct pair p, other;
	size_t n = 0;

	(void)state;
	pair_begin(&p);
	for (unsigned int i = 0; i < 4; i++)
		n = sealed(p.seal, "a record", 8, records[i]);
	assert_refused(opened(p.open, records[1], n), "dropped"); /* 0 dropped */
	p.open->number = 0;
	assert_int_equal(opened(p.open, records[0], n), 1);
	assert_refused(opened(p.open, records[0], n), "replayed");
	p.open->number = 1;
	assert_refused(opened(p.open, records[2], n), "record 1"); /* reordered */
	memcpy(p.open->buf, records[1], n); /* the right one comes too late */
	p.open->number = 1;
	p.open->pos = 0;
	p.open->end = n;
	assert_refused(tcp_seal_open(p.open, NULL, 0), "authentication");
	p.open->number = 1;
	assert_int_equal(opened(p.open, records[1], n), 1);
	pair_begin(&other); /* another stream's, or direction's */
	assert_refused(opened(other.open, records[0], n), "reordered");
	pair_end(&other);
	pair_end(&p);
}

static void keys_change_with_records(void **state)
{
	uint8_t record[TCP_RECORD_BYTES];
	struct pair p, old;
	uint8_t first[32];
	size_t n;

	(void)state;
	pair_begin(&p);
	p.seal->key_records = p.open->key_records = 4;
	memcpy(first, p.seal->secret.bytes, sizeof(first));
	assert_int_equal(tcp_seal_new(&p.open->secret, "a", &old.open), 0);
	tcp_seal_lend(old.open, buffers[1], sizeof(buffers[1]));
	for (unsigned int i = 0; i < 40; i++) {
		n = sealed(p.seal, &i, sizeof(i), record);
		old.open->number = i;
		if (i < 4)
			assert_int_equal(opened(old.open, record, n), 1);
		else
			assert_refused(opened(old.open, record, n), "authentication");
		assert_int_equal(opened(p.open, record, n), 1);
		assert_memory_equal(p.open->plain, &i, sizeof(i));
	}
	assert_memory_not_equal(first, p.seal->secret.bytes, sizeof(first));
	assert_memory_equal(p.seal->secret.bytes, p.open->secret.bytes, sizeof(first));
	tcp_seal_free(old.open);
	pair_end(&p);
}

/* Any pieces in, any pieces out, through a socket that takes and gives some at a time. */
static void bytes_pass_in_any_pieces(void **state)
{
	static uint8_t from[300000], to[sizeof(from)];
	struct pair p;
	size_t sent = 0, got = 0;
	int fds[2], small = 4096;

	(void)state;
	random_fill(from, sizeof(from));
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
	(void)setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof(small));
	memset(to, 0, sizeof(to));
	pair_begin(&p);
	for (unsigned int turn = 0; got < sizeof(to); turn++) {
		size_t a = sent + (turn * 7919) % 3000, b = a + turn % 40000;
		struct iovec out[] = {{from + sent, 0}, {NULL, 0}, {NULL, 0}};
		struct iovec in[] = {{to + got, turn % 5000}, {NULL, 1000}};
		struct msghdr msg = {.msg_iov = out, .msg_iovlen = 3};
		ssize_t n;

		a = a < sizeof(from) ? a : sizeof(from);
		b = b < sizeof(from) ? b : sizeof(from);
		out[0].iov_len = a - sent;
		out[2] = (struct iovec){from + a, b - a};
		n = tcp_seal_sendmsg(p.seal, fds[0], &msg);
		assert_true(n >= 0 || errno == EAGAIN);
		sent += n > 0 ? (size_t)n : 0;
		if (in[0].iov_len > sizeof(to) - got)
			in[0].iov_len = sizeof(to) - got;
		in[1].iov_base = to + got + in[0].iov_len;
		if (in[1].iov_len > sizeof(to) - got - in[0].iov_len)
			in[1].iov_len = sizeof(to) - got - in[0].iov_len;
		msg = (struct msghdr){.msg_iov = in, .msg_iovlen = 2};
		n = tcp_seal_recvmsg(p.open, fds[1], &msg);
		assert_true(n >= 0 || errno == EAGAIN);
		got += n > 0 ? (size_t)n : 0;
	}
	assert_memory_equal(from, to, sizeof(from));
	pair_end(&p);
	close(fds[0]);
	close(fds[1]);
}

static int begin(void **state)
{
	(void)state;
	return tcp_keys_open();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(hkdf_is_rfc_5869s),
		cmocka_unit_test(tokens_are_never_sent),
		cmocka_unit_test(hello_with_any_bit_turned_is_refused),
		cmocka_unit_test(hellos_of_other_tokens_and_places_are_refused),
		cmocka_unit_test(no_key_serves_twice_over_reconnects),
		cmocka_unit_test(one_ends_fresh_bytes_make_new_keys),
		cmocka_unit_test(record_is_rfc_8448s),
		cmocka_unit_test(record_with_any_bit_turned_is_refused),
		cmocka_unit_test(record_out_of_its_place_is_refused),
		cmocka_unit_test(keys_change_with_records),
		cmocka_unit_test(bytes_pass_in_any_pieces),
	};

	return cmocka_run_group_tests_name("tcp seal", tests, begin, NULL);
}
