/* SPDX-License-Identifier: Apache-2.0 */
/* Answers of etcd's JSON gateway, whole and in pieces, and what is none. */
#include "daemon/cluster/etcd_parse.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/base/text.h"

struct heard {
	struct etcd_parser parser; /* its first member */
	struct etcd_message message;
	struct etcd_kv kv;
	unsigned int messages, kvs;
	char log[4096]; /* all of it, to be compared */
};

static void heard_log(struct heard *h, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
static void heard_log(struct heard *h, const char *fmt, ...)
{
	size_t len = strlen(h->log);
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(h->log + len, sizeof(h->log) - len, fmt, ap);
	va_end(ap);
}

static void on_kv(struct etcd_parser *parser, const struct etcd_kv *kv)
{
	struct heard *h = container_of(parser, struct heard, parser);

	h->kv = *kv;
	h->kvs++;
	heard_log(h, "kv %.40s=%.40s del=%d bad=%d cut=%d rev=%ju lease=%ju\n", kv->key,
		  kv->value, kv->deleted, kv->bad, kv->key_cut, (uintmax_t)kv->revision,
		  (uintmax_t)kv->lease);
}

static void on_message(struct etcd_parser *parser, const struct etcd_message *m)
{
	struct heard *h = container_of(parser, struct heard, parser);

	h->message = *m;
	h->messages++;
	heard_log(h,
		  "msg rev=%ju lease=%ju ttl=%ju watch=%jd compact=%ju code=%ju kvs=%u "
		  "failed=%d created=%d canceled=%d more=%d ok=%d nested=%d "
		  "e=%s r=%s t=%s\n",
		  (uintmax_t)m->revision, (uintmax_t)m->lease, (uintmax_t)m->ttl,
		  (intmax_t)m->watch_id, (uintmax_t)m->compact_revision,
		  (uintmax_t)m->error_code, m->kvs, m->failed, m->created, m->canceled,
		  m->more, m->succeeded, m->nested, m->error, m->reason, m->token);
}

static struct heard *hear(const char *text, size_t len, size_t piece, int *r_p)
{
	struct heard *h = calloc(1, sizeof(*h));
	int r = 0;

	assert_non_null(h);
	etcd_parser_init(&h->parser);
	h->parser.on_kv = on_kv;
	h->parser.on_message = on_message;
	for (size_t at = 0; r == 0 && at < len; at += piece)
		r = etcd_parser_feed(&h->parser, text + at,
				     len - at < piece ? len - at : piece);
	if (r < 0) {
		assert_int_equal(err_last()->code, ERR_PROTO);
		err_clear();
		assert_true(etcd_parser_feed(&h->parser, " ", 1) < 0); /* for good */
		err_clear();
	}
	*r_p = r;
	return h;
}

/* In pieces of any length it is the same. */
static struct heard *hear_well(const char *text)
{
	struct heard *whole, *h;
	int r;

	whole = hear(text, strlen(text), SIZE_MAX / 2, &r);
	assert_int_equal(r, 0);
	for (size_t piece = 1; piece < 9; piece++) {
		h = hear(text, strlen(text), piece, &r);
		assert_int_equal(r, 0);
		assert_string_equal(h->log, whole->log);
		free(h);
	}
	return whole;
}

#define HEADER                                                                     \
	"\"header\":{\"cluster_id\":\"15118495548433857066\",\"member_id\":\"1\"," \
	"\"revision\":\"7\",\"raft_term\":\"2\"}"

static void range_is_read(void **state)
{
	struct heard *h = hear_well(
		"{" HEADER ",\"kvs\":[{\"key\":\"L2t2ZC9h\",\"create_revision\":\"2\","
		"\"mod_revision\":\"3\",\"version\":\"2\",\"value\":\"aGVsbG8y\","
		"\"lease\":\"77\"},{\"value\":\"\",\"key\":\"Yg==\"}],\"more\":true,"
		"\"count\":\"1\"}\n");

	(void)state;
	assert_string_equal(h->log,
			    "kv /kvd/a=hello2 del=0 bad=0 cut=0 rev=3 lease=77\n"
			    "kv b= del=0 bad=0 cut=0 rev=0 lease=0\n"
			    "msg rev=7 lease=0 ttl=0 watch=0 compact=0 code=0 kvs=2"
			    " failed=0 created=0 "
			    "canceled=0 more=1 ok=0 nested=0 e= r= t=\n");
	assert_true(etcd_parser_whole(&h->parser));
	free(h);
}

/* It becomes a header. */
static void token_is_one_word(void **state)
{
	static const struct {
		const char *token;
		int width;
		bool good;
	} cases[] = {
		{"eyJhbGciOiJSUzI1NiJ9.e30._-", 0, true},
		{"x", ETCD_TOKEN_MAX - 1, true},
		{"x", ETCD_TOKEN_MAX, false},
		{"x", 100000, false},
		{"a\\r\\nHost: b", 0, false},
		{"a b", 0, false},
		{"\xc3\xa4", 0, false},
	};
	static char text[100100];
	struct heard *h;
	int r;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		snprintf(text, sizeof(text), "{\"token\":\"%*s\"}", cases[i].width,
			 cases[i].token);
		for (char *at = text; cases[i].width && (at = strchr(at, ' '));)
			*at = 'x';
		h = hear(text, strlen(text), 1000, &r);
		assert_int_equal(r == 0, cases[i].good);
		if (cases[i].width && cases[i].good)
			assert_int_equal(strlen(h->message.token), cases[i].width);
		free(h);
	}
}

static void stream_is_read(void **state)
{
	struct heard *h = hear_well(
		"{\"result\":{" HEADER ",\"watch_id\":\"3\",\"created\":true}}\n"
		"{\"result\":{" HEADER ",\"watch_id\":3,\"events\":[{\"type\":\"DELETE\","
		"\"kv\":{\"key\":\"L2t2ZC9h\",\"mod_revision\":\"6\"}},{\"kv\":{\"key\":"
		"\"Yg==\",\"value\":\"aGk=\",\"lease\":\"9\"},"
		"\"prev_kv\":{\"key\":\"YQ==\"}}]}}"
		"{\"result\":{\"watch_id\":\"4\",\"canceled\":true,"
		"\"compact_revision\":\"3\",\"cancel_reason\":\"a \\\"b\\\" \\u00e4\"}}\n"
		"{\"error\":{\"grpc_code\":14,\"http_code\":503,\"message\":\"away\","
		"\"http_status\":\"x\"}}");

	(void)state;
	assert_string_equal(h->log,
			    "msg rev=7 lease=0 ttl=0 watch=3 compact=0 code=0 kvs=0"
			    " failed=0 created=1 "
			    "canceled=0 more=0 ok=0 nested=0 e= r= t=\n"
			    "kv /kvd/a= del=1 bad=0 cut=0 rev=6 lease=0\n"
			    "kv b=hi del=0 bad=0 cut=0 rev=0 lease=9\n"
			    "msg rev=7 lease=0 ttl=0 watch=3 compact=0 code=0 kvs=2"
			    " failed=0 created=0 "
			    "canceled=0 more=0 ok=0 nested=0 e= r= t=\n"
			    "msg rev=0 lease=0 ttl=0 watch=4 compact=3 code=0 kvs=0"
			    " failed=0 created=0 "
			    "canceled=1 more=0 ok=0 nested=0 e= r=a \"b\" \xc3\xa4 t=\n"
			    "msg rev=0 lease=0 ttl=0 watch=0 compact=0 code=14 kvs=0"
			    " failed=1 created=0 "
			    "canceled=0 more=0 ok=0 nested=0 e=away r= t=\n");
	free(h);
}

static void transaction_and_others_are_read(void **state)
{
	struct heard *h = hear_well(
		"{" HEADER
		",\"responses\":[{\"response_txn\":{\"header\":{\"revision\":\"99\"},"
		"\"succeeded\":true,\"responses\":[{\"response_range\":{\"header\":{"
		"\"revision\":\"98\"},\"kvs\":[{\"key\":\"YQ==\"}],\"more\":true}}]}}]}"
		"{\"succeeded\":true}{\"result\":{\"ID\":\"78\",\"TTL\":\"5\"}}"
		"{\"token\":\"a.b\"}{\"error\":\"no\",\"message\":\"not so\",\"code\":5}"
		"{\"x\":[1,-2.5e3,true,null,{\"kvs\":{}}],\"revision\":null}");

	(void)state;
	assert_non_null(strstr(h->log, "kv a="));
	assert_non_null(strstr(h->log, "msg rev=7 lease=0 ttl=0 watch=0 compact=0 code=0 "
				       "kvs=1"
				       " failed=0 created=0 canceled=0 more=0 ok=0 "
				       "nested=1"));
	assert_non_null(strstr(h->log, "ok=1 nested=0"));
	assert_non_null(strstr(h->log, "lease=78 ttl=5"));
	assert_non_null(strstr(h->log, "t=a.b"));
	assert_non_null(strstr(h->log, "code=5 kvs=0 failed=1"));
	assert_int_equal(h->messages, 6);
	free(h);
}

/* {"kvs":[{"key":…,"value":…}]} of so many bytes. */
static struct heard *hear_long(size_t key_len, size_t value_len)
{
	char *key = malloc(key_len + 1), *value = malloc(value_len + 1), *out;
	struct text text = {NULL};
	struct heard *h;
	int r;

	memset(key, 'k', key_len);
	memset(value, 'v', value_len);
	out = malloc(BASE64_CHARS(key_len + value_len) + 8);
	base64_encode(key, key_len, out);
	text_puts(&text, "{\"kvs\":[{\"key\":\"");
	text_puts(&text, out);
	base64_encode(value, value_len, out);
	text_puts(&text, "\",\"value\":\"");
	text_puts(&text, out);
	text_puts(&text, "\"}]}");
	h = hear(text.data, text.len, 4096, &r);
	assert_int_equal(r, 0);
	assert_int_equal(h->kvs, 1);
	free(key);
	free(value);
	free(out);
	text_fini(&text);
	return h;
}

static void long_ones_are_cut(void **state)
{
	struct heard *h = hear_long(ETCD_KEY_MAX, ETCD_VALUE_MAX);

	(void)state;
	assert_false(h->kv.bad || h->kv.key_cut);
	assert_int_equal(h->kv.key_len, ETCD_KEY_MAX);
	assert_int_equal(h->kv.value_len, ETCD_VALUE_MAX);
	free(h);
	h = hear_long(ETCD_KEY_MAX + 1, ETCD_VALUE_MAX + 1);
	assert_true(h->kv.bad && h->kv.key_cut);
	assert_int_equal(h->kv.key_len, ETCD_KEY_MAX);
	free(h);
	h = hear_long(100000, 1500000);
	assert_true(h->kv.bad && h->kv.key_cut);
	assert_int_equal(h->kv.key_len, ETCD_KEY_MAX);
	free(h);
}

/* Of a message of any length only its own members are kept, of a string its start. */
static void message_long_is_read(void **state)
{
	struct text text = {NULL};
	struct heard *h;
	int r;

	(void)state;
	text_puts(&text, "{ \"x\": \"");
	for (unsigned int i = 0; i < 9000; i++)
		text_puts(&text, i % 2 ? "\xc3\xa4" : "\\u00e4\\\"");
	text_puts(&text, "\", \"kvs\" : [ 1");
	for (unsigned int i = 0; i < 9000; i++)
		text_puts(&text, ", {\"key\": \"YQ==\"}\r\n");
	text_puts(&text, "], \"more\" :true }");
	for (size_t piece = 1; piece < 9; piece++) {
		h = hear(text.data, text.len, piece, &r);
		assert_int_equal(r, 0);
		assert_true(h->message.more && etcd_parser_whole(&h->parser));
		assert_int_equal(h->message.kvs, 9000);
		free(h);
	}
	text_fini(&text);
}

static void reply_invalid_is_refused(void **state)
{
	static const char *const texts[] = {
		"Not Found",
		"<html>",
		"[]",
		"1",
		"\"a\"",
		"{]",
		"{\"a\"}",
		"{\"a\":}",
		"{\"a\":1,}",
		"{\"a\":[1,]}",
		"{,}",
		"{\"a\":1 \"b\":2}",
		"{\"a\":tru}",
		"{\"a\":01}",
		"{\"a\":1e}",
		"{\"a\":\"\\x\"}",
		"{\"a\":\"\\u12g4\"}",
		"{\"a\":\"\n\"}",
		"}",
		"{\"more\":3}",
		"{\"header\":{\"revision\":\"x\"}}",
		"{\"header\":{\"revision\":\"99999999999999999999999\"}}",
		"{\"watch_id\":\"\"}",
		"{\"kvs\":[{\"key\":\"\",\"mod_revision\":true}]}",
		"{\"kvs\":[{\"key\":\"\"},]}",
		"{\"kvs\":[,{\"key\":\"\"}]}",
		"{\"kvs\":[{\"key\":\"\"}{\"key\":\"\"}]}",
		"{\"kvs\":[1{\"key\":\"\"}]}",
		"{\"kvs\":[{\"key\":\"\"]}",
		"{\"a\":1 2}",
		"{\"a\":\"\xff\"}",
		"{\"a\":[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]}",
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(texts); i++) {
		struct heard *h;
		int r = 0;

		h = hear(texts[i], strlen(texts[i]), 1, &r);
		if (r == 0)
			print_error("taken: %s\n", texts[i]);
		assert_true(r < 0);
		assert_false(etcd_parser_whole(&h->parser));
		free(h);
	}
}

static void cut_text_is_not_whole(void **state)
{
	const char *text = "{\"kvs\":[{\"key\":\"YQ==\"}],\"more\":true}";

	(void)state;
	for (size_t len = 0; len <= strlen(text); len++) {
		int r = 0;
		struct heard *h = hear(text, len, 3, &r);

		assert_int_equal(r, 0);
		assert_int_equal(etcd_parser_whole(&h->parser), len == strlen(text));
		free(h);
	}
}

static void base64_invalid_is_reported(void **state)
{
	struct heard *h = hear_well("{\"kvs\":[{\"key\":\"YQ==\",\"value\":\"a\"},"
				    "{\"key\":\"!!!!\",\"value\":\"\"},"
				    "{\"key\":\"YQ==\",\"value\":\"YQ==\"}]}");

	(void)state;
	assert_int_equal(h->kvs, 3);
	assert_non_null(strstr(h->log, "kv a= del=0 bad=1"));
	assert_non_null(strstr(h->log, "kv = del=0 bad=1"));
	assert_non_null(strstr(h->log, "kv a=a del=0 bad=0"));
	free(h);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(range_is_read),
		cmocka_unit_test(token_is_one_word),
		cmocka_unit_test(stream_is_read),
		cmocka_unit_test(transaction_and_others_are_read),
		cmocka_unit_test(long_ones_are_cut),
		cmocka_unit_test(message_long_is_read),
		cmocka_unit_test(reply_invalid_is_refused),
		cmocka_unit_test(cut_text_is_not_whole),
		cmocka_unit_test(base64_invalid_is_reported),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
