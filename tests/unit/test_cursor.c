/* SPDX-License-Identifier: Apache-2.0 */
/* The bounded cursor: what it writes it reads back, and nothing past the end. */
#include "daemon/base/cursor.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"

static void put_and_get_agree_and_are_little_endian(void **state)
{
	uint8_t buf[128];
	char text[16];
	struct cursor w, r;
	const void *blob;
	size_t len;

	(void)state;
	cursor_write(&w, buf, sizeof(buf));
	cursor_put_u8(&w, 0xab);
	cursor_put_u16(&w, 0x1234);
	cursor_put_u32(&w, 0xdeadbeef);
	cursor_put_u64(&w, UINT64_C(0x0102030405060708));
	cursor_put_str(&w, "room");
	cursor_put_blob(&w, "\0\1\2", 3);
	cursor_put_bytes(&w, "xy", 2);
	assert_int_equal(cursor_check(&w, "w"), 0);
	assert_memory_equal(buf, "\xab\x34\x12\xef\xbe\xad\xde\x08\x07", 9);
	cursor_read(&r, buf, w.pos);
	assert_int_equal(cursor_get_u8(&r), 0xab);
	assert_int_equal(cursor_get_u16(&r), 0x1234);
	assert_int_equal(cursor_get_u32(&r), 0xdeadbeef);
	assert_int_equal(cursor_get_u64(&r), UINT64_C(0x0102030405060708));
	cursor_get_str(&r, text, sizeof(text));
	assert_string_equal(text, "room");
	blob = cursor_get_blob(&r, 3, &len);
	assert_int_equal(len, 3);
	assert_memory_equal(blob, "\0\1\2", 3);
	assert_memory_equal(cursor_get_bytes(&r, 2), "xy", 2);
	assert_int_equal(cursor_left(&r), 0);
	assert_int_equal(cursor_check(&r, "r"), 0);
}

/* Cut at every byte: the reader gets bad, then zeros, and touches nothing past
 * the end (each cut lies in a heap block of its own for the sanitizer). */
static void message_cut_anywhere_is_bad_and_stays_bad(void **state)
{
	uint8_t buf[64];
	char text[8];
	struct cursor w;
	size_t len;

	(void)state;
	cursor_write(&w, buf, sizeof(buf));
	cursor_put_u64(&w, 1);
	cursor_put_str(&w, "abc");
	cursor_put_blob(&w, "defgh", 5);
	cursor_put_u16(&w, 7);
	for (size_t cut = 0; cut < w.pos; cut++) {
		uint8_t *copy = malloc(cut + 1);
		struct cursor r;

		memcpy(copy, buf, cut);
		copy = realloc(copy, cut ? cut : 1);
		cursor_read(&r, copy, cut);
		(void)cursor_get_u64(&r);
		cursor_get_str(&r, text, sizeof(text));
		(void)cursor_get_blob(&r, 64, &len);
		assert_int_equal(cursor_get_u16(&r), 0);
		assert_true(r.bad);
		assert_int_equal(cursor_left(&r), 0);
		assert_int_equal(cursor_get_u8(&r), 0);
		assert_null(cursor_get_bytes(&r, 0));
		assert_int_equal(cursor_check(&r, "HELLO"), -EPROTO);
		assert_non_null(strstr(err_last()->text, "HELLO"));
		free(copy);
	}
}

static void put_past_the_end_writes_nothing(void **state)
{
	uint8_t buf[8];
	struct cursor w;

	(void)state;
	memset(buf, 0x55, sizeof(buf));
	cursor_write(&w, buf, 7);
	cursor_put_u64(&w, 0);
	assert_true(w.bad);
	cursor_put_u8(&w, 1); /* would fit, but the cursor is bad */
	for (size_t i = 0; i < sizeof(buf); i++)
		assert_int_equal(buf[i], 0x55);
	assert_true(cursor_check(&w, "x") < 0);
}

static void str_too_long_or_with_a_nul_is_bad(void **state)
{
	static char far[65537];
	uint8_t buf[16];
	char text[4] = "old";
	struct cursor c;

	(void)state;
	cursor_write(&c, buf, sizeof(buf));
	cursor_put_str(&c, "abcd");
	cursor_read(&c, buf, 6);
	cursor_get_str(&c, text, sizeof(text)); /* 4 bytes and a NUL need 5 */
	assert_true(c.bad);
	assert_string_equal(text, "");
	cursor_read(&c, "\2\0a\0", 4);
	cursor_get_str(&c, text, sizeof(text));
	assert_true(c.bad);
	memset(far, 'x', sizeof(far) - 1);
	cursor_write(&c, far, sizeof(far));
	cursor_put_str(&c, far);
	assert_true(c.bad);
}

static void blob_and_count_are_capped_before_use(void **state)
{
	struct cursor c;
	size_t len = 9;

	(void)state;
	cursor_read(&c, "\4\0\0\0abcd", 8);
	assert_null(cursor_get_blob(&c, 3, &len));
	assert_true(c.bad);
	assert_int_equal(len, 0);
	cursor_read(&c, "\xff\xff\xff\xff....", 8);
	assert_null(cursor_get_blob(&c, SIZE_MAX, &len));
	assert_true(c.bad);
	cursor_read(&c, "\3\0\0\0........", 12);
	assert_int_equal(cursor_get_count(&c, 3, 2), 3);
	cursor_read(&c, "\3\0\0\0........", 12);
	assert_int_equal(cursor_get_count(&c, 2, 2), 0); /* over the cap */
	assert_true(c.bad);
	cursor_read(&c, "\3\0\0\0........", 12);
	assert_int_equal(cursor_get_count(&c, 100, 3), 0); /* 9 bytes in 8 */
	assert_true(c.bad);
	cursor_read(&c, "\xff\xff\xff\xff........", 12);
	assert_int_equal(cursor_get_count(&c, UINT32_MAX, UINT32_MAX), 0);
	assert_true(c.bad);
}

static void format_of_another_protocol_or_version_is_refused(void **state)
{
	uint8_t buf[8];
	struct cursor c;

	(void)state;
	cursor_write(&c, buf, sizeof(buf));
	cursor_put_format(&c, 0x11223344, 0x0102);
	assert_int_equal(c.pos, 6);
	for (size_t cut = 0; cut <= 6; cut++) {
		cursor_read(&c, buf, cut);
		assert_int_equal(cursor_get_format(&c, "x", 0x11223344, 0x0102),
				 cut < 6 ? -err_errno(ERR_PROTO) : 0);
	}
	cursor_read(&c, buf, 6);
	assert_int_equal(cursor_get_format(&c, "x", 0x11223345, 0x0102),
			 -err_errno(ERR_PROTO));
	assert_string_equal(err_last()->text, "x: not kvd's protocol");
	cursor_read(&c, buf, 6);
	assert_int_equal(cursor_get_format(&c, "x", 0x11223344, 0x0103),
			 -err_errno(ERR_VERSION));
	assert_string_equal(err_last()->text,
			    "x: the peer's version 258, this daemon's 259");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(put_and_get_agree_and_are_little_endian),
		cmocka_unit_test(message_cut_anywhere_is_bad_and_stays_bad),
		cmocka_unit_test(put_past_the_end_writes_nothing),
		cmocka_unit_test(str_too_long_or_with_a_nul_is_bad),
		cmocka_unit_test(blob_and_count_are_capped_before_use),
		cmocka_unit_test(format_of_another_protocol_or_version_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
