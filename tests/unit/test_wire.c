/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire: every message of the table goes through its encoder and decoder with
 * generated contents; every byte of a frame is flipped; every shorter length is
 * tried. The generic tests are made from the same table as the code, so a new
 * message is tested by being there; the layout itself is pinned by one HELLO
 * and one header that were written by hand.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "proto/wire.h"

static uint8_t junk[600];

/* ---- generated contents ---- */

struct gen {
	unsigned int n; /* rises with each field: all values differ */
};

static uint64_t gen_word(struct gen *g)
{
	return ++g->n * UINT64_C(0x9e3779b97f4a7c15);
}

#define FILL_u8(f) m->f = (uint8_t)gen_word(g);
#define FILL_u16(f) m->f = (uint16_t)gen_word(g);
#define FILL_u32(f) m->f = (uint32_t)gen_word(g);
#define FILL_u64(f) m->f = gen_word(g);
#define FILL_id(f)                      \
	for (size_t i = 0; i < 16; i++) \
		m->f[i] = (uint8_t)gen_word(g);
#define FILL_str(f) snprintf(m->f, sizeof(m->f), "text of %s, %u", #f, ++g->n);
#define FILL_blob(f)               \
	m->f.data = junk + ++g->n; \
	m->f.len = 17 + g->n;
#define FILL(type, f) FILL_##type(f)

#define SAME_u8(f) assert_int_equal(a->f, b->f);
#define SAME_u16(f) SAME_u8(f)
#define SAME_u32(f) SAME_u8(f)
#define SAME_u64(f) SAME_u8(f)
#define SAME_id(f) assert_memory_equal(a->f, b->f, 16);
#define SAME_str(f) assert_string_equal(a->f, b->f);
#define SAME_blob(f)                          \
	assert_int_equal(a->f.len, b->f.len); \
	assert_memory_equal(a->f.data, b->f.data, a->f.len);
#define SAME(type, f) SAME_##type(f)

/* put, get, compare; get of every shorter body fails and names the message; a
 * longer body is read. Returns the length. */
#define CASE(num, NAME, name, owner, cap, about)                                     \
	static void fill_##name(struct wire_##name *m, struct gen *g)                \
	{                                                                            \
		WIRE_##NAME(FILL)                                                    \
	}                                                                            \
	static void same_##name(const struct wire_##name *a,                         \
				const struct wire_##name *b)                         \
	{                                                                            \
		WIRE_##NAME(SAME)                                                    \
	}                                                                            \
	static size_t try_##name(uint8_t *buf, size_t size)                          \
	{                                                                            \
		struct gen g = {0};                                                  \
		struct wire_##name a = {0}, b;                                       \
		struct cursor c;                                                     \
		size_t len;                                                          \
                                                                                     \
		fill_##name(&a, &g);                                                 \
		cursor_write(&c, buf, size);                                         \
		assert_int_equal(wire_##name##_put(&c, &a), 0);                      \
		len = c.pos;                                                         \
		cursor_read(&c, buf, len);                                           \
		assert_int_equal(wire_##name##_get(&c, &b), 0);                      \
		assert_int_equal(cursor_left(&c), 0);                                \
		same_##name(&a, &b);                                                 \
		cursor_read(&c, buf, len + 9);                                       \
		assert_int_equal(wire_##name##_get(&c, &b), 0);                      \
		same_##name(&a, &b);                                                 \
		for (size_t n = 0; n < len; n++) {                                   \
			cursor_read(&c, buf, n);                                     \
			assert_true(wire_##name##_get(&c, &b) < 0);                  \
			assert_int_equal(err_last()->code, ERR_PROTO);               \
			assert_non_null(strstr(err_last()->text, #NAME ": field ")); \
			cursor_write(&c, buf, n);                                    \
			assert_true(wire_##name##_put(&c, &a) < 0);                  \
			assert_int_equal(err_last()->code, ERR_TOOBIG);              \
		}                                                                    \
		return len;                                                          \
	}
WIRE_MESSAGES(CASE)

static void body_roundtrip_of_every_message_is_equal(void **state)
{
	uint8_t *buf = calloc(1, 1 << 16);
	size_t tried = 0;

	(void)state;
	for (size_t i = 0; i < sizeof(junk); i++)
		junk[i] = (uint8_t)(i * 7);
#define TRY(num, NAME, name, owner, cap, text)             \
	memset(buf, 0, 1 << 16);                           \
	assert_in_range(try_##name(buf, 1 << 16), 1, cap); \
	tried++;
	WIRE_MESSAGES(TRY)
	assert_true(tried >= 27);
	free(buf);
}

static void body_over_cap_refused(void **state)
{
	struct wire_attach_nak nak = {.cookie = 1};
	struct wire_bye bye = {.code = 3};
	struct wire_register reg = {.object = 1};
	uint8_t *buf = calloc(1, 2u << 20);
	struct wire_register got;
	struct cursor c;

	(void)state;
	/* the longest text still fits: caps hold what the fields can be */
	memset(nak.text, 'x', sizeof(nak.text) - 1);
	memset(bye.text, 'x', sizeof(bye.text) - 1);
	cursor_write(&c, buf, 2u << 20);
	assert_int_equal(wire_attach_nak_put(&c, &nak), 0);
	assert_int_equal(wire_bye_put(&c, &bye), 0);
	/* no NUL: not a text */
	bye.text[sizeof(bye.text) - 1] = 'x';
	cursor_write(&c, buf, 2u << 20);
	assert_true(wire_bye_put(&c, &bye) < 0);
	assert_int_equal(err_last()->code, ERR_TOOBIG);
	/* a blob over the message's cap, either way */
	reg.layout = (struct wire_blob){buf + 1, 1048001};
	cursor_write(&c, buf + (1u << 20), 1u << 20);
	assert_true(wire_register_put(&c, &reg) < 0);
	assert_int_equal(err_last()->code, ERR_TOOBIG);
	reg.layout.len = 10;
	cursor_write(&c, buf, 2u << 20);
	assert_int_equal(wire_register_put(&c, &reg), 0);
	size_t at = c.pos - 4 - 4 - 10 - 4; /* the length of layout */

	buf[at + 2] = 0x10; /* 10 -> 1048586 */
	cursor_read(&c, buf, 2u << 20);
	assert_true(wire_register_get(&c, &got) < 0);
	assert_non_null(strstr(err_last()->text, "REGISTER: field layout"));
	free(buf);
}

static void text_with_bad_bytes_is_printable(void **state)
{
	static const struct {
		const char *in, *out;
	} cases[] = {
		{"plain", "plain"},
		{"two\nlines\x1b[0m\x7f", "two?lines?[0m?"},
		{"gr\xc3\xbc\xc3\x9f", "gr\xc3\xbc\xc3\x9f"},
		{"\xe2\x82\xac \xf0\x9f\x98\x80", "\xe2\x82\xac \xf0\x9f\x98\x80"},
		{"cut \xe2\x82", "cut ??"},
		{"\xc0\xaf \xe0\x80\xaf \xf0\x80\x80\xaf", "?? ??? ????"}, /* overlong */
		{"\xed\xa0\x80 \xf4\x90\x80\x80 \xff", "??? ???? ?"},
		{"\xc2\x85 \xc2\xa0", "?? \xc2\xa0"}, /* C1 control; NBSP */
		{"\xc3(", "?("},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		struct wire_bye bye = {.code = 1}, got;
		uint8_t buf[512];
		struct cursor c;

		snprintf(bye.text, sizeof(bye.text), "%s", cases[i].in);
		cursor_write(&c, buf, sizeof(buf));
		assert_int_equal(wire_bye_put(&c, &bye), 0);
		cursor_read(&c, buf, c.pos);
		assert_int_equal(wire_bye_get(&c, &got), 0);
		assert_string_equal(got.text, cases[i].out);
	}
}

/* ---- frames ---- */

static size_t make_frame(uint8_t *frame, unsigned int type, size_t body_len)
{
	struct wire_header h = {.version = WIRE_VERSION_MAX,
				.type = (uint16_t)type,
				.epoch = 0x1122334455667788u,
				.sequence = 9,
				.from_epoch = 0x99aabbccddeeff01u,
				.body_len = (uint32_t)body_len};
	uint8_t *body = malloc(body_len + 1);

	memset(h.sender, 0xaa, 16);
	memset(h.target, 0xbb, 16);
	memset(body, 0x5c, body_len + 1);
	wire_frame_put(frame, &h, body);
	free(body);
	return WIRE_HEADER_BYTES + body_len;
}

static void assert_refused(const uint8_t *frame, size_t len, enum err_code code)
{
	struct wire_header h;
	struct cursor body;

	assert_true(wire_frame_get(frame, len, &h, &body) < 0);
	assert_int_equal(err_last()->code, code);
}

static void frame_put_get_roundtrip_is_equal(void **state)
{
	uint8_t frame[200];
	struct wire_header h;
	struct cursor body;
	size_t len = make_frame(frame, WIRE_T_PING, 8);

	(void)state;
	assert_int_equal(wire_frame_get(frame, len, &h, &body), 0);
	assert_int_equal(h.version, WIRE_VERSION_MAX);
	assert_int_equal(h.type, WIRE_T_PING);
	assert_int_equal(h.flags, 0);
	assert_int_equal(h.sender[0], 0xaa);
	assert_int_equal(h.target[15], 0xbb);
	assert_int_equal(h.epoch, 0x1122334455667788u);
	assert_int_equal(h.sequence, 9);
	assert_int_equal(h.from_epoch, 0x99aabbccddeeff01u);
	assert_int_equal(h.body_len, 8);
	assert_int_equal(cursor_get_u64(&body), 0x5c5c5c5c5c5c5c5cu);
	assert_int_equal(cursor_left(&body), 0);
	assert_int_equal(
		wire_frame_get(frame, make_frame(frame, WIRE_T_PONG, 0), &h, &body), 0);
}

static void frame_layout_is_pinned(void **state)
{
	static const uint8_t head[WIRE_HEADER_BYTES] = {
		'K',  'V',  'D',  '1',	2,    0,    3,	  0,
		0,    0,    0,	  0, /* magic … flags */
		0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa,
		0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, 0xaa, /* sender */
		0xbb, 0xbb, 0xbb, 0xbb, 0xbb, 0xbb, 0xbb, 0xbb,
		0xbb, 0xbb, 0xbb, 0xbb, 0xbb, 0xbb, 0xbb, 0xbb, /* target */
		0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, /* epoch */
		9,    0,    0,	  0,	0,    0,    0,	  0,	/* sequence */
		8,    0,    0,	  0,				/* body length */
	};
	static const uint8_t from_epoch[] = {0x01, 0xff, 0xee, 0xdd,
					     0xcc, 0xbb, 0xaa, 0x99};
	uint8_t frame[200];

	(void)state;
	make_frame(frame, WIRE_T_PING, 8);
	assert_memory_equal(frame, head, 64);
	assert_memory_equal(frame + 68, from_epoch, sizeof(from_epoch));
	assert_memory_equal(frame + 76, head + 76, 20);
}

static void hello_layout_is_pinned(void **state)
{
	static const uint8_t want[] = {
		1, 0, 1,   0, /* versions */
		5, 0, 0,   0,	0,   0,	  0,   0,   7,
		0, 0, 0,   0,	0,   0,	  0, /* features, nonce */
		1, 0, 0,   0,	0,   0,	  0,   0,   0,
		0, 0, 0,   0,	0,   0,	  0, /* boot id */
		0, 0, 0,   0,	0,   0,	  0,   0,   0,
		0, 0, 0,   0,	0,   0,	  2, /* token */
		1, 0, 'a', 2,	0,   't', ':', 3,   0,
		0, 0, 'x', 'y', 'z', 1,	  0,   'k', /* product */
	};
	struct wire_hello m = {
		.version_min = 1, .version_max = 1, .features = 5, .nonce = 7};
	uint8_t buf[200];
	struct cursor c;

	(void)state;
	m.boot_id[0] = 1;
	m.token[15] = 2;
	strcpy(m.name, "a");
	strcpy(m.endpoint, "t:");
	m.addresses = (struct wire_blob){"xyz", 3};
	strcpy(m.product, "k");
	cursor_write(&c, buf, sizeof(buf));
	assert_int_equal(wire_hello_put(&c, &m), 0);
	assert_int_equal(c.pos, sizeof(want));
	assert_memory_equal(buf, want, sizeof(want));
}

static void frame_of_rows_is_summed_at_its_begin(void **state)
{
	enum { BODY = 4 * WIRE_SUMMED };
	static uint8_t frame[WIRE_HEADER_BYTES + BODY];
	struct wire_header h = {.version = WIRE_VERSION_MAX,
				.type = WIRE_T_ATTENTION_RESULT,
				.flags = WIRE_FLAG_ROWS,
				.sender = {1},
				.target = {2},
				.epoch = 3,
				.from_epoch = 4,
				.sequence = 5,
				.body_len = BODY};
	struct cursor body;

	(void)state;
	memset(frame, 3, sizeof(frame)); /* the body lies there already */
	wire_frame_put(frame, &h, frame + WIRE_HEADER_BYTES);
	assert_int_equal(wire_frame_get(frame, sizeof(frame), &h, &body), 0);
	assert_int_equal(((const uint8_t *)body.base)[BODY - 1], 3);
	frame[WIRE_HEADER_BYTES + WIRE_SUMMED] ^= 1;
	assert_int_equal(wire_frame_get(frame, sizeof(frame), &h, &body), 0);
	frame[WIRE_HEADER_BYTES + WIRE_SUMMED - 1] ^= 1;
	assert_true(wire_frame_get(frame, sizeof(frame), &h, &body) < 0);
	frame[WIRE_HEADER_BYTES + WIRE_SUMMED - 1] ^= 1;
	frame[11] ^= 0x80; /* the flag itself */
	assert_true(wire_frame_get(frame, sizeof(frame), &h, &body) < 0);
	err_clear();
}

static void frame_with_any_bit_flipped_refused(void **state)
{
	uint8_t frame[200];
	size_t len = make_frame(frame, WIRE_T_PING, 8);
	struct wire_header h;
	struct cursor body;

	(void)state;
	for (size_t bit = 0; bit < 8 * len; bit++) {
		frame[bit / 8] ^= (uint8_t)(1u << (bit % 8));
		assert_true(wire_frame_get(frame, len, &h, &body) < 0);
		frame[bit / 8] ^= (uint8_t)(1u << (bit % 8));
	}
	assert_int_equal(wire_frame_get(frame, len, &h, &body), 0);
}

static void frame_of_wrong_length_refused(void **state)
{
	uint8_t frame[300] = {0};
	size_t len = make_frame(frame, WIRE_T_PING, 8);
	uint8_t *huge = calloc(1, WIRE_FRAME_MAX + 1);

	(void)state;
	for (size_t n = 0; n < sizeof(frame); n++) {
		if (n != len)
			assert_refused(frame, n, ERR_PROTO);
	}
	memcpy(huge, frame, len);
	assert_refused(huge, WIRE_FRAME_MAX + 1, ERR_PROTO);
	free(huge);
}

/* with a right checksum, so that the check behind it is reached */
static void frame_with_bad_header_refused(void **state)
{
	uint8_t frame[300];
	struct wire_header h = {
		.version = WIRE_VERSION_MAX, .type = WIRE_T_PING, .body_len = 8};
	static const uint8_t body[100];

	(void)state;
	wire_frame_put(frame, &h, body);
	assert_refused(frame, WIRE_HEADER_BYTES + 7, ERR_PROTO);
	h.type = 0;
	wire_frame_put(frame, &h, body);
	assert_refused(frame, WIRE_HEADER_BYTES + 8, ERR_PROTO);
	assert_non_null(strstr(err_last()->text, "type 0"));
	h.type = WIRE_T_END;
	wire_frame_put(frame, &h, body);
	assert_refused(frame, WIRE_HEADER_BYTES + 8, ERR_PROTO);
	h = (struct wire_header){
		.version = WIRE_VERSION_MAX, .type = WIRE_T_PING, .body_len = 65};
	wire_frame_put(frame, &h, body);
	assert_refused(frame, WIRE_HEADER_BYTES + 65, ERR_PROTO);
	assert_non_null(strstr(err_last()->text, "at most 64"));
	h = (struct wire_header){
		.version = WIRE_VERSION_MAX + 1, .type = WIRE_T_PING, .body_len = 8};
	wire_frame_put(frame, &h, body);
	assert_refused(frame, WIRE_HEADER_BYTES + 8, ERR_VERSION);
	h.version = 0;
	wire_frame_put(frame, &h, body);
	assert_refused(frame, WIRE_HEADER_BYTES + 8, ERR_VERSION);
	h.version = WIRE_VERSION_MAX;
	wire_frame_put(frame, &h, body);
	assert_refused(frame, WIRE_HEADER_BYTES + 8, ERR_PROTO);
	assert_non_null(strstr(err_last()->text, "no sender"));
}

static void handshake_of_any_version_is_read(void **state)
{
	static const unsigned int types[] = {WIRE_T_HELLO, WIRE_T_WELCOME, WIRE_T_BYE};
	uint8_t frame[200];
	struct wire_header got;
	struct cursor body;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(types); i++) {
		struct wire_header h = {
			.version = 900, .type = (uint16_t)types[i], .sender = {1}};

		wire_frame_put(frame, &h, NULL);
		assert_int_equal(wire_frame_get(frame, WIRE_HEADER_BYTES, &got, &body),
				 0);
		assert_int_equal(got.version, 900);
		h.version = 0;
		wire_frame_put(frame, &h, NULL);
		assert_refused(frame, WIRE_HEADER_BYTES, ERR_VERSION);
	}
}

/* ---- the table ---- */

static void table_names_every_type(void **state)
{
	(void)state;
	assert_string_equal(wire_type_name(WIRE_T_HELLO), "HELLO");
	assert_string_equal(wire_type_name(WIRE_T_OFFER_NAK), "OFFER_NAK");
	assert_int_equal(wire_body_cap(WIRE_T_PING), 64);
	assert_string_equal(wire_type_name(0), "?");
	assert_string_equal(wire_type_name(WIRE_T_END), "?");
	assert_string_equal(wire_type_name(UINT32_MAX), "?");
	assert_int_equal(wire_body_cap(0), 0);
	assert_int_equal(wire_body_cap(WIRE_T_END), 0);
}

/* Their last field; a new one behind it would hide it. */
static void secrets_in_messages_are_found(void **state)
{
#define SHOWS(NAME, name, field)                                                   \
	do {                                                                       \
		struct wire_##name m = {0};                                        \
		struct cursor c;                                                   \
                                                                                   \
		cursor_write(&c, buf, sizeof(buf));                                \
		assert_int_equal(wire_##name##_put(&c, &m), 0);                    \
		assert_false(wire_shows_secret(WIRE_T_##NAME, buf, c.pos));        \
		for (size_t i = 0; i < sizeof(m.field); i++) {                     \
			memset(m.field, 0, sizeof(m.field));                       \
			m.field[i] = 1;                                            \
			cursor_write(&c, buf, sizeof(buf));                        \
			assert_int_equal(wire_##name##_put(&c, &m), 0);            \
			assert_true(wire_shows_secret(WIRE_T_##NAME, buf, c.pos)); \
		}                                                                  \
	} while (0)
	uint8_t buf[1024];

	(void)state;
	SHOWS(ATTACH, attach, secret);
	SHOWS(TRANSFER_INFO, transfer_info, ticket);
	SHOWS(OFFER_QUERY, offer_query, ticket);
	SHOWS(ABORT, abort, ticket);
#undef SHOWS
	assert_false(wire_shows_secret(WIRE_T_ATTACH, buf, 0));
	memset(buf, 1, sizeof(buf));
	assert_false(wire_shows_secret(WIRE_T_OFFER, buf, sizeof(buf)));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(body_roundtrip_of_every_message_is_equal),
		cmocka_unit_test(body_over_cap_refused),
		cmocka_unit_test(secrets_in_messages_are_found),
		cmocka_unit_test(text_with_bad_bytes_is_printable),
		cmocka_unit_test(frame_put_get_roundtrip_is_equal),
		cmocka_unit_test(frame_layout_is_pinned),
		cmocka_unit_test(hello_layout_is_pinned),
		cmocka_unit_test(frame_of_rows_is_summed_at_its_begin),
		cmocka_unit_test(frame_with_any_bit_flipped_refused),
		cmocka_unit_test(frame_of_wrong_length_refused),
		cmocka_unit_test(frame_with_bad_header_refused),
		cmocka_unit_test(handshake_of_any_version_is_read),
		cmocka_unit_test(table_names_every_type),
	};

	return cmocka_run_group_tests_name("wire", tests, NULL, NULL);
}
