/* SPDX-License-Identifier: Apache-2.0 */
/* The option `cluster` as an etcd's URL, and places as keys. */
#include "daemon/cluster/cluster_url.h"

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
#include "daemon/cluster/etcd_key.h"
#include "daemon/cluster/roster.h"

/* "tls PREFIX HOST PORT literal, …" */
static void url_show(const struct cluster_url *url, char *out, size_t size)
{
	int len = snprintf(out, size, "%d %s", url->tls, url->prefix);

	for (unsigned int i = 0; i < url->count; i++)
		len += snprintf(out + len, size - (size_t)len, " %s:%s/%d",
				url->endpoints[i].host, url->endpoints[i].port,
				url->endpoints[i].literal);
}

static void url_good_is_read(void **state)
{
	static const char *const good[][2] = {
		{"etcd://etcd.svc", "0 /kvd etcd.svc:2379/0"},
		{"etcd://10.0.0.1:2379", "0 /kvd 10.0.0.1:2379/1"},
		{"etcd://10.0.0.1:2379/", "0 /kvd 10.0.0.1:2379/1"},
		{"etcds://a:1,b:65535,[fe80::1]:3,[::1]/x/y/",
		 "1 /x/y a:1/0 b:65535/0 fe80::1:3/1 ::1:2379/1"},
	};
	struct cluster_url url;
	char out[256];

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(good); i++) {
		assert_true(cluster_url_is_etcd(good[i][0]));
		assert_int_equal(cluster_url_parse(good[i][0], &url), 0);
		url_show(&url, out, sizeof(out));
		assert_string_equal(out, good[i][1]);
	}
	assert_false(cluster_url_is_etcd("tcp://10.0.0.1:2379"));
	assert_false(cluster_url_is_etcd(""));
}

/* The message says which part, and what may stand there. */
static void url_bad_names_the_part(void **state)
{
	static const char *const bad[][2] = {
		{"http://a:1", "etcd://HOST:PORT"},
		{"etcd://", "host"},
		{"etcd:///kvd", "host"},
		{"etcd://a,,b", "host"},
		{"etcd://a,", "host"},
		{"etcd://a:", "port"},
		{"etcd://a:0", "1 to 65535"},
		{"etcd://a:65536", "1 to 65535"},
		{"etcd://a:1x", "port"},
		{"etcd://a:123456", "port"},
		{"etcd://u:p@a:1", "port"},
		{"etcd://u@a:1", "cluster_user_file"},
		{"etcd://fe80::1", "port"},
		{"etcd://[fe80::1", "']'"},
		{"etcd://[fe80::1]x", "']'"},
		{"etcd://[1.2.3.4]:1", "IPv6"},
		{"etcd://a b", "host"},
		{"etcd://a/x?y", "prefix"},
		{"etcd://a/x\n", "prefix"},
		{"etcd://1,2,3,4,5,6,7,8,9,a,b,c,d,e,f,g,h", "16"},
	};
	static char text[600];
	struct cluster_url url;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
		assert_true(cluster_url_parse(bad[i][0], &url) < 0);
		assert_int_equal(err_last()->code, ERR_CONFIG);
		if (!strstr(err_last()->text, bad[i][1]))
			print_error("%s: %s\n", bad[i][0], err_last()->text);
		assert_non_null(strstr(err_last()->text, bad[i][1]));
		err_clear();
	}
	snprintf(text, sizeof(text), "etcd://%0300d", 1);
	assert_true(cluster_url_parse(text, &url) < 0);
	snprintf(text, sizeof(text), "etcd://a/%0300d", 1);
	assert_true(cluster_url_parse(text, &url) < 0);
	err_clear();
}

static void key_is_read_as_it_is_written(void **state)
{
	static const char *const names[] = {"a", "-a",	     "..",	    "a/b",
					    "%", "\xc3\xa4", "kvd.daemons", " "};
	struct place place, again;
	char key[ETCD_NAME_MAX];
	enum etcd_side side;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(names); i++)
		for (size_t j = 0; j <= ARRAY_LEN(names); j++) {
			memset(&place, 0, sizeof(place));
			snprintf(place.group, sizeof(place.group), "%s", names[i]);
			if (j < ARRAY_LEN(names))
				snprintf(place.worker, sizeof(place.worker), "%s",
					 names[j]);
			place.rank[PLACE_TP] = 65535;
			place.rank[PLACE_CP] = (uint32_t)j;
			assert_int_equal(place_check(&place), 0);
			etcd_place_key("/x/y", ETCD_LOADS, &place, key);
			assert_true(
				etcd_key_read("/x/y", key, strlen(key), &side, &again));
			assert_int_equal(side, ETCD_LOADS);
			assert_memory_equal(&place, &again, sizeof(place));
		}
}

static void key_of_other_user_is_refused(void **state)
{
	static const char *const keys[] = {
		"",
		"/kvd",
		"/kvd/groups/",
		"/kvd/groups/g",
		"/kvd/groups/g/",
		"/kvd/groups/g/w",
		"/kvd/groups/g/w/",
		"/kvd/groups/g/w/0.0.0",
		"/kvd/groups/g/w/0.0.0.0.0",
		"/kvd/groups/g/w/0.0.0.00",
		"/kvd/groups/g/w/0.0.0.65536",
		"/kvd/groups/g/w/0.0.0.99999999999999999999",
		"/kvd/groups/g/w/0.0.0.-1",
		"/kvd/groups/g/w/0.0.0. 1",
		"/kvd/groups/g/w/x/0.0.0.0",
		"/kvd/groups//w/0.0.0.0",
		"/kvd/groups/g//0.0.0.0",
		"/kvd/groups/g/w%/0.0.0.0",
		"/kvd/groups/g/w%4/0.0.0.0",
		"/kvd/groups/g/%41/0.0.0.0", /* A */
		"/kvd/groups/g/%2D/0.0.0.0", /* - */
		"/kvd/groups/g/%2F%2f/0.0.0.0",
		"/kvd/groups/g/%00/0.0.0.0",
		"/kvd/groups/g/%ff/0.0.0.0",
		"/kvd/groups/g/\xc3\xa4/0.0.0.0",
		"/kvd/other/g/w/0.0.0.0",
		"/kve/groups/g/w/0.0.0.0",
		"/kvd/groups/g/w/0.0.0.0/",
	};
	struct place place;
	enum etcd_side side;
	char key[ETCD_NAME_MAX * 2];

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(keys); i++) {
		if (etcd_key_read("/kvd", keys[i], strlen(keys[i]), &side, &place))
			print_error("taken: %s\n", keys[i]);
		assert_false(
			etcd_key_read("/kvd", keys[i], strlen(keys[i]), &side, &place));
	}
	snprintf(key, sizeof(key), "/kvd/groups/%0128d/w/0.0.0.0", 0);
	assert_false(etcd_key_read("/kvd", key, strlen(key), &side, &place));
	snprintf(key, sizeof(key), "/kvd/groups/g/%064d/0.0.0.0", 0);
	assert_false(etcd_key_read("/kvd", key, strlen(key), &side, &place));
	snprintf(key, sizeof(key), "/kvd/groups/g/w/0.0.0.0");
	assert_true(etcd_key_read("/kvd", key, strlen(key), &side, &place));
	assert_false(
		etcd_key_read("/kvd", key, strlen(key) + 1, &side, &place)); /* NUL */
}

static void place_bad_names_the_part(void **state)
{
	struct place place = {.group = "g", .worker = "-"};

	(void)state;
	assert_true(place_check(&place) < 0);
	assert_non_null(strstr(err_last()->text, "worker"));
	place.worker[0] = '\0';
	place.rank[PLACE_PP] = PLACE_SIZE_MAX;
	assert_true(place_check(&place) < 0);
	assert_non_null(strstr(err_last()->text, "rank"));
	place.rank[PLACE_PP] = 0;
	memcpy(place.group, "\xff", 2);
	assert_true(place_check(&place) < 0);
	assert_non_null(strstr(err_last()->text, "group"));
	place.group[0] = '\0';
	assert_true(place_check(&place) < 0);
	memset(place.group, 'g', sizeof(place.group));
	assert_true(place_check(&place) < 0);
	err_clear();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(url_good_is_read),
		cmocka_unit_test(url_bad_names_the_part),
		cmocka_unit_test(key_is_read_as_it_is_written),
		cmocka_unit_test(key_of_other_user_is_refused),
		cmocka_unit_test(place_bad_names_the_part),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
