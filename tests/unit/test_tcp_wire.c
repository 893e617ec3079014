/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp_wire against hostile bytes: each field of a hello, a head, a
 * trailer and an address with values that no honest daemon sends, under a right
 * checksum; then every bit turned, and every cut.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/transport/tcp/tcp_wire.h"

static uint64_t random_word(void)
{
	static uint64_t x = 88172645463325252u;

	x ^= x << 13;
	x ^= x >> 7;
	x ^= x << 17;
	return x;
}

static void assert_refused(int r, enum err_code code, const char *words)
{
	assert_int_equal(r, -err_errno(code));
	if (!strstr(err_last()->text, words))
		fail_msg("\"%s\" is not in \"%s\"", words, err_last()->text);
	err_clear();
}

/* ---- hello ---- */

static const struct tcp_hello good_hello = {.role = TCP_CONTROL,
					    .crypto = TCP_CRYPTO_AES128GCM,
					    .streams = 4,
					    .number = TCP_STREAMS_MAX - 1,
					    .id = {1, 2, 3},
					    .nonce = {4, 5},
					    .proof = {6, 7}};

static void hello_round_trip(void **state)
{
	uint8_t bytes[TCP_HELLO_BYTES];
	struct tcp_hello hello;

	(void)state;
	for (unsigned int role = TCP_CONTROL; role < TCP_ROLE_END; role++) {
		hello = good_hello;
		hello.role = (enum tcp_role)role;
		tcp_hello_put(&hello, bytes);
		memset(&hello, 0xff, sizeof(hello));
		assert_int_equal(tcp_hello_get(bytes, &hello), 0);
		assert_int_equal(hello.role, role);
		assert_int_equal(hello.crypto, TCP_CRYPTO_AES128GCM);
		assert_int_equal(hello.streams, 4);
		assert_int_equal(hello.number, TCP_STREAMS_MAX - 1);
		assert_memory_equal(hello.id, good_hello.id, TCP_ID_BYTES);
		assert_memory_equal(hello.nonce, good_hello.nonce, TCP_NONCE_BYTES);
		assert_memory_equal(hello.proof, good_hello.proof, TCP_PROOF_BYTES);
	}
}

static void refuse_hello(struct tcp_hello hello, const char *words)
{
	uint8_t bytes[TCP_HELLO_BYTES];

	tcp_hello_put(&hello, bytes);
	assert_refused(tcp_hello_get(bytes, &hello), ERR_PROTO, words);
}

static void hello_field_out_of_range_is_refused(void **state)
{
	struct tcp_hello bad = good_hello;

	(void)state;
	for (unsigned int role = 0; role < 256; role++) {
		bad.role = (enum tcp_role)role;
		if (role == 0 || role >= TCP_ROLE_END)
			refuse_hello(bad, "role");
	}
	bad = good_hello;
	for (unsigned int crypto = TCP_CRYPTO_END; crypto < 256; crypto++) {
		bad.crypto = (enum tcp_crypto)crypto;
		refuse_hello(bad, "crypto");
	}
	bad = good_hello;
	bad.number = TCP_STREAMS_MAX;
	refuse_hello(bad, "stream 32");
	bad = good_hello;
	bad.streams = 0;
	refuse_hello(bad, "0 streams");
	bad.streams = TCP_STREAMS_MAX + 1;
	refuse_hello(bad, "streams");
	bad.role = TCP_WELCOME;
	bad.streams = UINT16_MAX;
	refuse_hello(bad, "streams");
}

/* ---- heads ---- */

static const struct tcp_head good_heads[] = {
	{.type = TCP_REQUEST, .id = 1, .at = 1 << 30, .code = XP_READ, .length = 100},
	{.type = TCP_REQUEST, .id = UINT64_MAX, .length = XP_HEADER_MAX},
	{.type = TCP_REQUEST,
	 .flags = TCP_FLAG_EAGER,
	 .id = 9,
	 .at = TCP_EAGER_MAX,
	 .length = XP_HEADER_MAX + TCP_EAGER_MAX},
	{.type = TCP_GO, .id = 5},
	{.type = TCP_CANCEL, .id = 5, .code = 3, .length = TCP_TEXT_MAX},
	{.type = TCP_DONE, .id = 5},
	{.type = TCP_DONE, .flags = TCP_FLAG_EAGER, .id = 5, .length = TCP_EAGER_MAX},
	{.type = TCP_BYE, .code = 18, .length = 1},
	{.type = TCP_DATA, .id = 3, .at = UINT64_MAX - 9, .length = 9},
	{.type = TCP_SERVE, .id = 3, .at = 0, .length = TCP_DATA_MAX},
	{.type = TCP_BEAT},
};

static void head_round_trip(void **state)
{
	uint8_t bytes[TCP_HEAD_BYTES];
	struct tcp_head head;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(good_heads); i++) {
		const struct tcp_head *want = &good_heads[i];

		tcp_head_put(want, bytes);
		memset(&head, 0xff, sizeof(head));
		assert_int_equal(tcp_head_get(bytes, tcp_head_is_data(want), &head), 0);
		assert_int_equal(head.type, want->type);
		assert_int_equal(head.flags, want->flags);
		assert_int_equal(head.id, want->id);
		assert_int_equal(head.at, want->at);
		assert_int_equal(head.code, want->code);
		assert_int_equal(head.length, want->length);
		/* a stream carries data, the control line all else */
		if (want->type == TCP_BEAT)
			assert_int_equal(tcp_head_get(bytes, true, &head), 0);
		else
			assert_refused(
				tcp_head_get(bytes, !tcp_head_is_data(want), &head),
				ERR_PROTO, "type");
	}
}

static void refuse_head(struct tcp_head head, const char *words)
{
	bool data = tcp_head_is_data(&head);
	uint8_t bytes[TCP_HEAD_BYTES];

	tcp_head_put(&head, bytes);
	assert_refused(tcp_head_get(bytes, data, &head), ERR_PROTO, words);
}

#define HEAD(...) ((struct tcp_head){__VA_ARGS__})

static void head_field_out_of_range_is_refused(void **state)
{
	(void)state;
	refuse_head(HEAD(.type = 0, .id = 1), "type 0");
	for (unsigned int type = TCP_TYPE_END; type < 256; type++)
		refuse_head(HEAD(.type = (uint8_t)type, .id = 1, .length = 1), "type");
	/* lengths over the cap of their type */
	refuse_head(HEAD(.type = TCP_GO, .id = 1, .length = 1), "1 bytes");
	refuse_head(HEAD(.type = TCP_CANCEL, .id = 1, .length = TCP_TEXT_MAX + 1),
		    "bytes");
	refuse_head(HEAD(.type = TCP_BYE, .length = UINT32_MAX), "bytes");
	refuse_head(HEAD(.type = TCP_DONE, .id = 1, .length = TCP_TEXT_MAX + 1),
		    "answer");
	refuse_head(HEAD(.type = TCP_DONE, .id = 1, .flags = TCP_FLAG_EAGER,
			 .length = TCP_EAGER_MAX + 1),
		    "bytes");
	refuse_head(HEAD(.type = TCP_DONE, .id = 1, .flags = TCP_FLAG_EAGER), "answer");
	refuse_head(HEAD(.type = TCP_DONE, .id = 1, .flags = TCP_FLAG_EAGER, .code = 3,
			 .length = 5),
		    "answer");
	refuse_head(HEAD(.type = TCP_REQUEST, .id = 1, .length = XP_HEADER_MAX + 1),
		    "request");
	refuse_head(HEAD(.type = TCP_REQUEST, .id = 1, .length = UINT32_MAX), "bytes");
	/* a request that brings bytes: more than it is long, too many, none */
	refuse_head(HEAD(.type = TCP_REQUEST, .id = 1, .flags = TCP_FLAG_EAGER, .at = 101,
			 .length = 100),
		    "request");
	refuse_head(HEAD(.type = TCP_REQUEST, .id = 1, .flags = TCP_FLAG_EAGER,
			 .at = TCP_EAGER_MAX + 1, .length = TCP_EAGER_MAX + 1),
		    "request");
	refuse_head(HEAD(.type = TCP_REQUEST, .id = 1, .flags = TCP_FLAG_EAGER, .at = 0,
			 .length = 100),
		    "request");
	refuse_head(HEAD(.type = TCP_REQUEST, .id = 1, .flags = TCP_FLAG_EAGER, .at = 1,
			 .length = XP_HEADER_MAX + 2),
		    "request");
	refuse_head(HEAD(.type = TCP_BEAT, .length = 1), "1 bytes");
	refuse_head(HEAD(.type = TCP_BEAT, .id = 1), "transfer 1");
	for (uint8_t type = TCP_GO; type < TCP_BEAT; type++)
		if (type != TCP_DONE)
			refuse_head(HEAD(.type = type, .id = type != TCP_BYE,
					 .flags = TCP_FLAG_EAGER,
					 .length = type >= TCP_DATA),
				    "carries");
	/* data: nothing, too much, around the end */
	refuse_head(HEAD(.type = TCP_DATA, .id = 1, .length = 0), "0 bytes");
	refuse_head(HEAD(.type = TCP_SERVE, .id = 1, .length = TCP_DATA_MAX + 1),
		    "bytes");
	refuse_head(HEAD(.type = TCP_DATA, .id = 1, .at = UINT64_MAX - 8, .length = 9),
		    "wrap");
	/* a transfer's number where there is none, and the reverse */
	refuse_head(HEAD(.type = TCP_BYE, .id = 1), "transfer 1");
	for (uint8_t type = TCP_REQUEST; type < TCP_TYPE_END; type++)
		if (type != TCP_BYE && type != TCP_BEAT)
			refuse_head(HEAD(.type = type, .length = type >= TCP_DATA),
				    "transfer 0");
}

static void head_with_any_bit_turned_is_refused(void **state)
{
	uint8_t bytes[TCP_HEAD_BYTES];
	struct tcp_head head;

	(void)state;
	tcp_head_put(&good_heads[0], bytes);
	for (size_t bit = 0; bit < sizeof(bytes) * 8; bit++) {
		bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
		assert_true(tcp_head_get(bytes, false, &head) < 0);
		bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
	}
	assert_int_equal(tcp_head_get(bytes, false, &head), 0);
}

static void fault_from_a_peer_is_made_harmless(void **state)
{
	char text[2 * TCP_TEXT_MAX];
	struct tcp_head head = {.type = TCP_DONE, .id = 1};
	struct err err, sent;

	(void)state;
	err_set(&sent, ERR_LEASE, "the lease has ended");
	head.code = sent.code;
	head.flags = net_fault_flags(&sent);
	net_fault_get(head.code, head.flags, sent.text, strlen(sent.text), &err);
	assert_int_equal(err.code, ERR_LEASE);
	assert_int_equal(err.scope, sent.scope);
	assert_int_equal(err.retryable, sent.retryable);
	assert_string_equal(err.text, "the lease has ended");
	memset(text, '\n', sizeof(text));
	head.code = 60000;
	head.flags = 0xff;
	net_fault_get(head.code, head.flags, text, sizeof(text), &err);
	assert_int_equal(err.code, ERR_INTERNAL);
	assert_true(err.scope <= ERR_SCOPE_DAEMON);
	assert_int_equal(strlen(err.text), TCP_TEXT_MAX);
	assert_int_equal(strspn(err.text, "?"), TCP_TEXT_MAX);
}

/* ---- trailers ---- */

static void trailer_is_good_or_void_and_nothing_else(void **state)
{
	uint8_t bytes[TCP_TRAILER_BYTES];
	bool good = false;

	(void)state;
	tcp_trailer_put(true, bytes);
	assert_int_equal(tcp_trailer_get(bytes, &good), 0);
	assert_true(good);
	tcp_trailer_put(false, bytes);
	assert_int_equal(tcp_trailer_get(bytes, &good), 0);
	assert_false(good);
	for (size_t bit = 0; bit < 32; bit++) {
		bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
		assert_refused(tcp_trailer_get(bytes, &good), ERR_PROTO, "mark");
		bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
	}
}

/* ---- addresses ---- */

static size_t address_bytes(uint8_t buf[XP_ADDRESS_MAX])
{
	struct tcp_address address = {.count = 3};
	size_t len;

	address.list[0].v4.sin_family = AF_INET;
	address.list[0].v4.sin_port = htons(4000);
	address.list[0].v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	address.list[1].v6.sin6_family = AF_INET6;
	address.list[1].v6.sin6_port = htons(4001);
	address.list[1].v6.sin6_addr = in6addr_loopback;
	address.list[2] = address.list[0];
	assert_int_equal(tcp_address_put(&address, buf, &len), 0);
	return len;
}

static void address_round_trip(void **state)
{
	uint8_t buf[XP_ADDRESS_MAX];
	size_t len = address_bytes(buf);
	struct tcp_address address;
	char text[64];

	(void)state;
	assert_int_equal(tcp_address_get(buf, len, &address), 0);
	assert_int_equal(address.count, 3);
	tcp_sockaddr_text(&address.list[0], text, sizeof(text));
	assert_string_equal(text, "127.0.0.1:4000");
	tcp_sockaddr_text(&address.list[1], text, sizeof(text));
	assert_string_equal(text, "[::1]:4001");
}

static void address_cut_or_foreign_is_refused(void **state)
{
	uint8_t buf[XP_ADDRESS_MAX], bad[XP_ADDRESS_MAX] = {0};
	size_t len = address_bytes(buf);
	struct tcp_address address;

	(void)state;
	for (size_t cut = 0; cut < len; cut++)
		assert_true(tcp_address_get(buf, cut, &address) < 0);
	assert_refused(tcp_address_get(buf, len + 1, &address), ERR_PROTO, "places");
	memcpy(bad, buf, len);
	bad[4] = 9;
	assert_refused(tcp_address_get(bad, len, &address), ERR_VERSION, "version 9");
	memcpy(bad, buf, len);
	bad[6] = 0;
	assert_refused(tcp_address_get(bad, len, &address), ERR_PROTO, "0 places");
	bad[6] = 255;
	assert_refused(tcp_address_get(bad, len, &address), ERR_PROTO, "255 places");
	memcpy(bad, buf, len);
	bad[7] = 5; /* a family that there is not */
	assert_refused(tcp_address_get(bad, len, &address), ERR_PROTO, "places");
	memcpy(bad, buf, len);
	bad[8] = bad[9] = 0; /* port 0 */
	assert_refused(tcp_address_get(bad, len, &address), ERR_PROTO, "places");
	for (unsigned int i = 0; i < 100000; i++) {
		size_t n = random_word() % sizeof(bad);

		memcpy(bad, buf, len);
		for (unsigned int turns = 0; turns < 4; turns++)
			bad[random_word() % len] = (uint8_t)random_word();
		(void)tcp_address_get(bad, i % 2 ? n : len, &address);
		assert_true(address.count <= UINT8_MAX);
	}
	err_clear();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(hello_round_trip),
		cmocka_unit_test(hello_field_out_of_range_is_refused),
		cmocka_unit_test(head_round_trip),
		cmocka_unit_test(head_field_out_of_range_is_refused),
		cmocka_unit_test(head_with_any_bit_turned_is_refused),
		cmocka_unit_test(fault_from_a_peer_is_made_harmless),
		cmocka_unit_test(trailer_is_good_or_void_and_nothing_else),
		cmocka_unit_test(address_round_trip),
		cmocka_unit_test(address_cut_or_foreign_is_refused),
	};

	return cmocka_run_group_tests_name("tcp wire", tests, NULL, NULL);
}
