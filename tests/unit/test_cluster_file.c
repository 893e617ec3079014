/* SPDX-License-Identifier: Apache-2.0 */
/* The option `cluster` as a file of members. */
#include "daemon/cluster/cluster_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/record.h"

#define KEY "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
#define AT " tcp://10.0.0.1:7400#" KEY

static char option[] = "file:/tmp/kvd-test-members-XXXXXX";
static char *const path = option + sizeof("file:") - 1;

static void file_write(const void *bytes, size_t len)
{
	FILE *out = fopen(path, "w");

	assert_non_null(out);
	assert_int_equal(fwrite(bytes, 1, len, out), len);
	assert_int_equal(fclose(out), 0);
}

static int file_load(const char *text, struct cluster_file **file_p)
{
	file_write(text, strlen(text));
	return cluster_file_load(option, file_p);
}

static void lines_become_records(void **state)
{
	struct cluster_file *file;
	struct record *record = calloc(1, sizeof(*record));
	const struct cluster_line *line;

	(void)state;
	if (file_load("# comment\r\n\n"
		      "\tprefill  w%20x 3.0.1.0" AT " engine=sglang url=https://h:1/ "
		      "bootstrap=h:8998 model=m pool=kv\r\n"
		      "prefill w%20x 0.0.0.0 tcp://[::1]:7400\n"
		      "decode - 0.0.0.0" AT,
		      &file) < 0)
		fail_msg("%s", err_last()->text);
	assert_int_equal(file->count, 3);
	line = &file->lines[0];
	assert_int_equal(line->number, 3);
	assert_string_equal(line->place.group, "prefill");
	assert_string_equal(line->place.worker, "w x");
	assert_int_equal(line->place.rank[PLACE_TP], 3);
	assert_int_equal(line->place.rank[PLACE_DP], 1);
	assert_int_equal(record_read(line->record, record), 0);
	assert_int_equal(record_check(record, &line->place), 0);
	assert_string_equal(record->endpoint, "tcp://10.0.0.1:7400");
	assert_string_equal(record->key, KEY);
	assert_string_equal(record->url, "https://h:1/");
	assert_string_equal(record->engine, "sglang");
	assert_string_equal(record->bootstrap, "h:8998");
	assert_int_equal(record->pool_count, 1);
	assert_string_equal(record->pools[0].name, "kv");
	assert_string_equal(record->pools[0].model, "m");
	assert_string_equal(record->instance, "");
	/* a worker has the ranks of all its lines */
	assert_int_equal(record->size[PLACE_TP], 4);
	assert_int_equal(record->size[PLACE_DP], 2);
	assert_int_equal(record_read(file->lines[1].record, record), 0);
	assert_int_equal(record->size[PLACE_TP], 4);
	assert_string_equal(record->key, "");
	assert_int_equal(record->pool_count, 0);
	assert_string_equal(file->lines[2].place.worker, "");
	assert_int_equal(record_read(file->lines[2].record, record), 0);
	assert_int_equal(record->size[PLACE_TP], 1);
	cluster_file_free(file);
	free(record);
}

static void bad_lines_are_named(void **state)
{
	static const struct {
		const char *text, *words;
	} bad[] = {
		{"g w 0.0.0.0", ":1: must be: GROUP WORKER TP.PP.DP.CP ENDPOINT#KEY"},
		{"g w 0.0.0.0" AT " 1 2 3 4 5 6", "must be: GROUP"},
		{"\n\ng w 0.0.0.0" AT " x", ":3: 'x': must be: GROUP"},
		{"g w 0.0.0" AT, "ranks have the form 0.0.0.0"},
		{"g w 0.0.0.65536" AT, "place 'g w 0.0.0.65536'"},
		{"g w 00.0.0.0" AT, "place"},
		{"g w -1.0.0.0" AT, "place"},
		{"g/h w 0.0.0.0" AT, "%XX"},
		{"g w\x01 0.0.0.0" AT, "place"},
		{"g w%01 0.0.0.0" AT, "printable text"},
		{"kvd.daemons w 0.0.0.0" AT, "choose another"},
		{"g w 0.0.0.0 10.0.0.1:7400", "endpoint"},
		{"g w 0.0.0.0 tcp://10.0.0.1:0", "endpoint"},
		{"g w 0.0.0.0 tcp://10.0.0.1:7400#short", "40 characters"},
		{"g w 0.0.0.0" AT " url=ftp://h", "url: must be http"},
		{"g w 0.0.0.0" AT " pool=", "pool= has 0 bytes (1 to 63)"},
		{"g w 0.0.0.0" AT " pool=a pool=b", "pool= is given twice"},
		{"g w 0.0.0.0" AT " engine=\x7fx",
		 "engine: must not contain control characters"},
		{"g w 0.0.0.0" AT "\ng w 0.0.0.0" AT, ":2: the place is in line 1"},
	};
	struct cluster_file *file;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
		assert_true(file_load(bad[i].text, &file) < 0);
		assert_null(file);
		assert_int_equal(err_last()->code, ERR_CONFIG);
		if (!strstr(err_last()->text, bad[i].words))
			fail_msg("%s: %s", bad[i].text, err_last()->text);
		assert_non_null(strstr(err_last()->text, path));
		err_clear();
	}
}

static void file_is_checked(void **state)
{
	struct cluster_file *file;
	static char text[1u << 21];

	(void)state;
	assert_true(cluster_file_is("file:members"));
	assert_true(cluster_file_load("file:members", &file) < 0);
	assert_non_null(strstr(err_last()->text, "must be an absolute path"));
	assert_true(cluster_file_load("file:/nowhere/at/all", &file) < 0);
	assert_non_null(strstr(err_last()->text, "/nowhere/at/all: No such file"));
	assert_true(cluster_file_load("file:/tmp", &file) < 0);
	assert_non_null(strstr(err_last()->text, "must be a file"));
	memset(text, '#', sizeof(text));
	file_write(text, sizeof(text));
	assert_true(cluster_file_load(option, &file) < 0);
	assert_non_null(strstr(err_last()->text, "at most 1048576 bytes"));
	assert_int_equal(file_load("", &file), 0);
	assert_int_equal(file->count, 0);
	cluster_file_free(file);
	assert_int_equal(chmod(path, 0666), 0);
	assert_true(cluster_file_load(option, &file) < 0);
	assert_non_null(strstr(err_last()->text, "chmod o-w"));
	assert_int_equal(chmod(path, 0600), 0);
}

static void lines_are_bounded(void **state)
{
	struct cluster_file *file;
	char *text = calloc(CLUSTER_FILE_LINES_MAX + 1, 64), *at = text;

	(void)state;
	for (unsigned int i = 0; i < CLUSTER_FILE_LINES_MAX; i++)
		at += sprintf(at, "g w%u 0.0.0.0 tcp://10.0.0.1:7400\n", i);
	assert_int_equal(file_load(text, &file), 0);
	assert_int_equal(file->count, CLUSTER_FILE_LINES_MAX);
	cluster_file_free(file);
	strcpy(at, "g one-more 0.0.0.0 tcp://10.0.0.1:7400\n");
	assert_true(file_load(text, &file) < 0);
	assert_non_null(strstr(err_last()->text, "use etcd"));
	free(text);
}

static void bytes_of_any_kind_are_read(void **state)
{
	char text[] = "g a%20 1.0.2.0" AT " pool=kv url=http://h:1\nh - 0.0.0.0" AT "\n";
	struct cluster_file *file;

	(void)state;
	for (size_t i = 0; i < strlen(text); i++) {
		char kept = text[i];

		for (unsigned int c = 0; c < 256; c += 3) {
			text[i] = (char)c;
			file_write(text, sizeof(text) - 1);
			if (cluster_file_load(option, &file) < 0)
				assert_int_equal(err_last()->code, ERR_CONFIG);
			cluster_file_free(file);
		}
		text[i] = kept;
	}
}

static void want_of_memory_is_an_error(void **state)
{
	struct cluster_file *file;
	int r = -1;

	(void)state;
	file_write("g a 0.0.0.0" AT "\n", strlen("g a 0.0.0.0" AT "\n"));
	for (uint64_t i = 1; r < 0; i++) {
		mem_fail_at(i);
		r = cluster_file_load(option, &file);
		mem_fail_at(0);
		if (r < 0)
			assert_int_equal(err_last()->code, ERR_NOMEM);
	}
	cluster_file_free(file);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(lines_become_records),
		cmocka_unit_test(bad_lines_are_named),
		cmocka_unit_test(file_is_checked),
		cmocka_unit_test(lines_are_bounded),
		cmocka_unit_test(bytes_of_any_kind_are_read),
		cmocka_unit_test(want_of_memory_is_an_error),
	};
	int fd = mkstemp(path), failed;

	if (fd < 0)
		return 1;
	close(fd);
	failed = cmocka_run_group_tests_name("cluster_file", tests, NULL, NULL);
	unlink(path);
	return failed;
}
