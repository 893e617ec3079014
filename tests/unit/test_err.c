/* SPDX-License-Identifier: Apache-2.0 */
/* The fault record: one a thread, codes stable, texts bounded. */
#include "daemon/base/err.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/mem.h"

static void raise_fills_the_record_from_the_table(void **state)
{
	(void)state;
	assert_int_equal(err_raise(ERR_BUSY, "region %d: %d pins", 7, 2), -EBUSY);
	assert_int_equal(err_last()->code, ERR_BUSY);
	assert_int_equal(err_last()->scope, ERR_SCOPE_OP);
	assert_true(err_last()->retryable);
	assert_string_equal(err_last()->text, "region 7: 2 pins");
	assert_int_equal(err_pass(-EBUSY), -EBUSY);
	assert_int_equal(err_pass(0), 0);
	err_clear();
	assert_int_equal(err_last()->code, ERR_OK);
}

static void raise_with_its_own_old_text_is_fine(void **state)
{
	(void)state;
	(void)err_raise(ERR_INVAL, "inner");
	(void)err_raise(ERR_CONFIG, "outer: %s", err_last()->text);
	assert_string_equal(err_last()->text, "outer: inner");
	assert_int_equal(err_prefix(-EDOM, "file %d", 3), -EDOM);
	assert_string_equal(err_last()->text, "file 3: outer: inner");
	assert_int_equal(err_prefix(0, "never"), 0);
	assert_string_equal(err_last()->text, "file 3: outer: inner");
}

static void raise_of_long_text_is_cut(void **state)
{
	char words[2 * ERR_TEXT_MAX];

	(void)state;
	memset(words, 'w', sizeof(words) - 1);
	words[sizeof(words) - 1] = '\0';
	(void)err_raise(ERR_INVAL, "%s", words);
	assert_int_equal(strlen(err_last()->text), ERR_TEXT_MAX - 1);
	(void)err_prefix(-EINVAL, "%s", words);
	assert_int_equal(strlen(err_last()->text), ERR_TEXT_MAX - 1);
	(void)err_raise_errno(EIO, "%s", words);
	assert_non_null(strstr(err_last()->text, strerror(EIO)));
}

static void raise_errno_maps_by_cause(void **state)
{
	static const struct {
		int no;
		enum err_code code;
	} rows[] = {{ENOMEM, ERR_NOMEM}, {EMFILE, ERR_LIMIT}, {ENFILE, ERR_LIMIT},
		    {EACCES, ERR_PERM},	 {EPERM, ERR_PERM},   {EIO, ERR_IO},
		    {ENOENT, ERR_IO}};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
		assert_int_equal(err_raise_errno(rows[i].no, "open %s", "/x"),
				 -err_errno(rows[i].code));
		assert_int_equal(err_last()->code, rows[i].code);
		assert_non_null(strstr(err_last()->text, "open /x: "));
	}
}

static void take_and_reraise_carry_a_fault(void **state)
{
	struct err kept, made;

	(void)state;
	(void)err_raise(ERR_LEASE, "over");
	err_take(&kept);
	assert_int_equal(err_last()->code, ERR_OK);
	kept.scope = ERR_SCOPE_PEER; /* an owner of a wider scope */
	assert_int_equal(err_reraise(&kept), -EKEYEXPIRED);
	assert_int_equal(err_last()->scope, ERR_SCOPE_PEER);
	assert_string_equal(err_last()->text, "over");
	err_clear();
	err_set(&made, ERR_SHORT, "%d bytes missing", 9);
	assert_int_equal(err_last()->code, ERR_OK);
	assert_string_equal(made.text, "9 bytes missing");
	assert_int_equal(made.scope, ERR_SCOPE_ROOM);
}

static void *other_thread(void *arg)
{
	*(enum err_code *)arg = err_last()->code;
	(void)err_raise(ERR_DUP, "there");
	return NULL;
}

static void record_belongs_to_its_thread(void **state)
{
	enum err_code seen = ERR_INTERNAL;
	pthread_t tid;

	(void)state;
	(void)err_raise(ERR_RANGE, "here");
	assert_int_equal(pthread_create(&tid, NULL, other_thread, &seen), 0);
	pthread_join(tid, NULL);
	assert_int_equal(seen, ERR_OK);
	assert_int_equal(err_last()->code, ERR_RANGE);
}

/* The numbers travel; a change here breaks other daemons. */
static void codes_keep_their_numbers_and_are_unique(void **state)
{
	(void)state;
	assert_int_equal(ERR_INVAL, 1);
	assert_int_equal(ERR_ABORTED, 17);
	assert_int_equal(ERR_INTERNAL, 37);
	assert_string_equal(err_name(ERR_OK), "OK");
	for (unsigned int a = 1; a < ERR_CODE_END; a++) {
		assert_int_equal(err_name((enum err_code)a)[0], 'E');
		assert_true(err_errno((enum err_code)a) > 0);
		assert_true(strlen(err_meaning((enum err_code)a)) > 5);
		assert_true(strlen(err_remedy((enum err_code)a)) > 5);
		assert_int_equal(err_of_name(err_name((enum err_code)a)), a);
		assert_non_null(err_scope_name(err_default_scope((enum err_code)a)));
		assert_int_equal(err_from_wire(a), a);
		for (unsigned int b = 1; b < a; b++) {
			assert_string_not_equal(err_name((enum err_code)a),
						err_name((enum err_code)b));
			assert_int_not_equal(err_errno((enum err_code)a),
					     err_errno((enum err_code)b));
		}
	}
}

static void text_too_long_ends_after_whole_word(void **state)
{
	static const char word[] = "remedy ";
	char words[2 * ERR_TEXT_MAX] = "";
	struct err err;

	(void)state;
	while (strlen(words) < sizeof(words) - sizeof(word))
		strcat(words, word);
	err_set(&err, ERR_PEER, "%s", words);
	(void)err_raise(ERR_PEER, "%s", words);
	assert_string_equal(err_last()->text, err.text);
	assert_in_range(strlen(err.text), ERR_TEXT_MAX - 16, ERR_TEXT_MAX - 1);
	assert_string_equal(strrchr(err.text, ' '), " remedy...");
	(void)err_prefix(-1, "an object");
	assert_string_equal(strrchr(err_last()->text, ' '), " remedy...");
	memset(words, 'x', ERR_TEXT_MAX - 1); /* the longest that fits */
	words[ERR_TEXT_MAX - 1] = '\0';
	err_set(&err, ERR_PEER, "%s", words);
	assert_string_equal(err.text, words);
}

static void codes_from_elsewhere_become_internal(void **state)
{
	(void)state;
	assert_int_equal(err_from_wire(ERR_CODE_END), ERR_INTERNAL);
	assert_int_equal(err_from_wire(UINT32_MAX), ERR_INTERNAL);
	assert_string_equal(err_name((enum err_code)9999), "EINTERNAL");
	assert_int_equal(err_errno((enum err_code)9999), ENOTRECOVERABLE);
}

static void fault_of_another_daemon_fails_a_room(void **state)
{
	struct err err;

	(void)state;
	err_set(&err, ERR_IO, "its GPU");
	assert_int_equal(err.scope, ERR_SCOPE_DEVICE);
	err_foreign(&err);
	assert_int_equal(err.scope, ERR_SCOPE_ROOM);
	err_set(&err, ERR_CONFIG, "its configuration");
	err_foreign(&err);
	assert_int_equal(err.scope, ERR_SCOPE_ROOM);
	err_set(&err, ERR_PEER, "its own peer");
	err_foreign(&err);
	assert_int_equal(err.scope, ERR_SCOPE_PEER);
	err_set(&err, ERR_NOMEM, "a list");
	err_foreign(&err);
	assert_int_equal(err.scope, ERR_SCOPE_OP);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(raise_fills_the_record_from_the_table),
		cmocka_unit_test(raise_with_its_own_old_text_is_fine),
		cmocka_unit_test(raise_of_long_text_is_cut),
		cmocka_unit_test(raise_errno_maps_by_cause),
		cmocka_unit_test(take_and_reraise_carry_a_fault),
		cmocka_unit_test(record_belongs_to_its_thread),
		cmocka_unit_test(codes_keep_their_numbers_and_are_unique),
		cmocka_unit_test(fault_of_another_daemon_fails_a_room),
		cmocka_unit_test(text_too_long_ends_after_whole_word),
		cmocka_unit_test(codes_from_elsewhere_become_internal),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
