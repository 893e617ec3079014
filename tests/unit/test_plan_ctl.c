/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd-ctl plan: the answers, and the refusals.
 *
 * Every refusal is one change to an accepted input: `from` becomes `to`, and the message
 * must contain `needle`, which names the field.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "ctl/plan.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"

/* 8 heads of 256 bytes here, 4 of them there; 2 buffers each. */
#define FIELD(name, buffer, page, token, first, units)                   \
	"{\"name\":\"" name "\",\"buffer\":" buffer                      \
	",\"offset\":0,\"page_stride\":" page ",\"token_stride\":" token \
	",\"unit_stride\":256,\"unit_bytes\":256,\"first_unit\":" first  \
	",\"units\":" units ",\"total_units\":8}"

static const char accepted[] =
	"{\"src\":{\"rank\":0,\"buffers\":[524288,524288],\"views\":{\"kv\":{"
	"\"page_tokens\":16,\"pages\":16,\"layers\":[{\"layer\":0,\"fields\":"
	"[" FIELD("k", "0", "32768", "2048", "0", "8") "," FIELD(
		"v", "1", "32768", "2048", "0",
		"8") "]}]}}},"
		     "\"dst\":{\"rank\":1,\"buffers\":[262144,262144],\"views\":{"
		     "\"kv\":{"
		     "\"page_tokens\":16,\"pages\":16,\"layers\":[{\"layer\":0,"
		     "\"fields\":[" FIELD("k", "0", "16384", "1024", "4", "4") "," FIELD(
			     "v", "1", "16384", "1024", "4",
			     "4") "]}]}}},"
				  "\"map\":[{\"view\":\"kv\",\"src_"
				  "pages\":[3,4],\"src_first_token\":"
				  "0,"
				  "\"dst_pages\":[0,7],\"dst_first_"
				  "token\":0,\"tokens\":[0,32]}]}";

#define DST_K "\"page_stride\":16384,\"token_stride\":1024"

#define WANT(view, layer, field, first, units)                          \
	"{\"view\":\"" view "\",\"layer\":" layer ",\"field\":\"" field \
	"\",\"first_unit\":" first ",\"units\":" units "}"
#define WANTS(wants) "\"wants\":[" wants "],\"map\":["

static const struct refusal {
	const char *from, *to, *needle;
	enum err_code code;
} refusals[] = {
	/* text */
	{"{\"src\"", "[{\"src\"", "byte", ERR_PROTO},
	{"[0,32]}]}", "[0,32]}]}x", "byte", ERR_PROTO},
	{"[0,32]}]}", "[0,32]}]", "byte", ERR_PROTO},
	{"\"rank\":0", "\"rank\":0,\"rank\":0", "duplicate key", ERR_PROTO},
	{"\"name\":\"k\"", "\"name\":\"\xc3\x28\"", "byte", ERR_PROTO},
	{"\"name\":\"k\"", "\"name\":\"k\\u0000\"", "byte", ERR_PROTO},
	{"\"rank\":0", "\"rank\":00", "byte", ERR_PROTO},
	{"\"tokens\":[0,32]",
	 "\"tokens\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[0]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]"
	 "]",
	 "byte", ERR_PROTO},
	/* members that are missing or of another type */
	{"\"src\":", "\"sorc\":", "src", ERR_INVAL},
	{"\"dst\":", "\"dest\":", "dst", ERR_INVAL},
	{"\"map\":", "\"maps\":", "map", ERR_INVAL},
	{"\"rank\":1", "\"rank\":\"1\"", "rank", ERR_INVAL},
	{"\"rank\":1", "\"rank\":-1", "rank", ERR_RANGE},
	{"\"buffers\":[262144", "\"bufers\":[262144", "buffers: missing", ERR_INVAL},
	{"\"buffers\":[262144,262144]", "\"buffers\":262144", "buffers", ERR_INVAL},
	{"[262144,262144]", "[262144,\"262144\"]", "buffers.[1]", ERR_INVAL},
	{"[262144,262144]", "[262144,-1]", "buffers.[1]", ERR_RANGE},
	{"[262144,262144]", "[262144,1e999]", "byte", ERR_PROTO},
	{"[262144,262144]", "[262144,18446744073709551615]", "buffers.[1]", ERR_RANGE},
	{"[262144,262144]", "[262144,0.5]", "buffers.[1]", ERR_INVAL},
	{"\"views\":{", "\"views\":[{", "byte", ERR_PROTO},
	{"\"kv\":{\"page_tokens\":16", "\"kv\":null,\"w\":{\"page_tokens\":16",
	 "views.kv", ERR_INVAL},
	{"\"kv\":{\"page_tokens\"",
	 "\"a_name_that_is_longer_than_31_bytes\":{\"page_tokens\"", "name", ERR_INVAL},
	{"\"kv\":{\"page_tokens\"", "\"\":{\"page_tokens\"", "name", ERR_INVAL},
	{"\"page_tokens\":16", "\"page_tokens\":0", "views.kv.page_tokens", ERR_INVAL},
	{"\"page_tokens\":16", "\"page_tokens\":16.5", "views.kv.page_tokens", ERR_INVAL},
	{"\"page_tokens\":16", "\"page_tokens\":4294967296", "views.kv.page_tokens",
	 ERR_RANGE},
	{"\"pages\":16", "\"pages\":true", "views.kv.pages", ERR_INVAL},
	{"\"pages\":16", "\"pages\":268435457", "views.kv.pages", ERR_RANGE},
	{"\"layers\":[{", "\"layers\":[7,{", "views.kv.layers[0]", ERR_INVAL},
	{"\"layer\":0", "\"layer\":null", "views.kv.layers[0].layer", ERR_INVAL},
	{"\"layers\":[{", "\"layers\":[{\"layer\":0,\"fields\":[]},{", "is repeated",
	 ERR_INVAL},
	{"\"fields\":[", "\"fields\":[3,", "views.kv.layers[0].fields[0]", ERR_INVAL},
	{"\"name\":\"v\"", "\"name\":\"k\"", "fields[1].name", ERR_INVAL},
	{"\"name\":\"v\"", "\"name\":7", "fields[1].name", ERR_INVAL},
	{"\"name\":\"v\"", "\"name\":\"a b\"", "fields[1].name", ERR_INVAL},
	{"\"buffer\":1", "\"buffer\":2", "fields[1].buffer", ERR_RANGE},
	{"\"unit_stride\":256,", "", "fields[0].unit_stride", ERR_INVAL},
	{"\"unit_bytes\":256", "\"unit_bytes\":0", "fields[0].unit_bytes", ERR_INVAL},
	{"\"total_units\":8", "\"total_units\":0", "fields[0].total_units", ERR_INVAL},
	{"\"first_unit\":4", "\"first_unit\":5", "fields[0]", ERR_RANGE},
	{"\"first_unit\":4", "\"first_unit\":4294967295", "past total_units", ERR_RANGE},
	/* addresses */
	{"\"offset\":0", "\"offset\":1", "reaches byte 524289", ERR_RANGE},
	{"\"offset\":0", "\"offset\":524289", "fields[0].offset", ERR_RANGE},
	{DST_K, "\"page_stride\":16385,\"token_stride\":1024", "reaches byte", ERR_RANGE},
	{DST_K, "\"page_stride\":9007199254740991,\"token_stride\":1024", "reaches byte",
	 ERR_RANGE},
	{"\"pages\":16,\"layers\":[{\"layer\":0,\"fields\":[{\"name\":\"k\",\"buffer\":0,"
	 "\"offset\":0,\"page_stride\":32768",
	 "\"pages\":268435456,\"layers\":[{\"layer\":0,\"fields\":[{\"name\":\"k\","
	 "\"buffer\":0,\"offset\":0,\"page_stride\":9007199254740991",
	 "page_stride: 9007199254740991 x 268435456 pages overflows", ERR_RANGE},
	{"\"page_tokens\":16,\"pages\":16,\"layers\":[{\"layer\":0,\"fields\":[{\"name\":"
	 "\"k\",\"buffer\":0,\"offset\":0,\"page_stride\":32768,\"token_stride\":2048",
	 "\"page_tokens\":4294967295,\"pages\":16,\"layers\":[{\"layer\":0,\"fields\":[{"
	 "\"name\":\"k\",\"buffer\":0,\"offset\":0,\"page_stride\":32768,\"token_"
	 "stride\":"
	 "9007199254740991",
	 "token_stride", ERR_RANGE},
	/* two sides that contradict each other */
	{"\"total_units\":8", "\"total_units\":9",
	 "total_units, heads of the model: 9 (the source), 8 (the destination)",
	 ERR_LAYOUT},
	{"\"unit_stride\":256,\"unit_bytes\":256,\"first_unit\":0",
	 "\"unit_stride\":256,\"unit_bytes\":128,\"first_unit\":0", "field k: unit_bytes",
	 ERR_LAYOUT},
	{"\"name\":\"v\"", "\"name\":\"w\"", "field w: only in the source", ERR_LAYOUT},
	/* destination bytes twice */
	{DST_K, "\"page_stride\":16384,\"token_stride\":512", "twice", ERR_DUP},
	{DST_K ",\"unit_stride\":256", DST_K ",\"unit_stride\":255", "field k", ERR_DUP},
	{DST_K, "\"page_stride\":0,\"token_stride\":1024", "twice", ERR_DUP},
	{"\"buffer\":1,\"offset\":0,\"page_stride\":16384",
	 "\"buffer\":0,\"offset\":0,\"page_stride\":16384", "field k", ERR_DUP},
	{"\"dst_pages\":[0,7]", "\"dst_pages\":[7,7]", "dst_pages", ERR_DUP},
	{"\"tokens\":[0,32]}]",
	 "\"tokens\":[0,32]},{\"view\":\"kv\",\"src_pages\":[1],\"dst_pages\":[7]}]",
	 "map[1]", ERR_DUP},
	/* page lists and token ranges */
	{"\"map\":[", "\"map\":[3,", "map[0]", ERR_INVAL},
	{"\"view\":\"kv\"", "\"view\":\"kw\"", "unknown view kw", ERR_INVAL},
	{"\"view\":\"kv\"", "\"view\":1", "map[0]: view", ERR_INVAL},
	{"\"view\":\"kv\",", "", "map[0]: view: missing", ERR_INVAL},
	{"\"src_pages\":[3,4]", "\"src_pages\":[3,16]", "src_pages[1] = 16", ERR_RANGE},
	{"\"dst_pages\":[0,7]", "\"dst_pages\":[0,16]", "dst_pages[1] = 16", ERR_RANGE},
	{"\"src_pages\":[3,4]", "\"src_pages\":[3,-4]", "src_pages", ERR_INVAL},
	{"\"src_pages\":[3,4]", "\"src_pages\":[3,4294967297]", "src_pages", ERR_RANGE},
	{"\"src_pages\":[3,4]", "\"src_pages\":[3,4.5]", "src_pages", ERR_INVAL},
	{"\"src_pages\":[3,4]", "\"src_pages\":\"3\"", "src_pages", ERR_INVAL},
	{"\"src_pages\":[3,4]", "\"src_pages\":[3,[4,1]]", "src_pages", ERR_INVAL},
	{"\"src_pages\":[3,4]", "\"src_pages\":[[3,2,1]]", "src_pages", ERR_INVAL},
	{"\"src_pages\":[3,4]", "\"src_pages\":[[3,4294967295]]", "src_pages", ERR_RANGE},
	{"\"src_first_token\":0", "\"src_first_token\":1", "src_pages", ERR_RANGE},
	{"\"src_first_token\":0", "\"src_first_token\":-1", "src_first_token", ERR_RANGE},
	{"\"dst_first_token\":0", "\"dst_first_token\":\"0\"", "dst_first_token",
	 ERR_INVAL},
	{"\"tokens\":[0,32]", "\"tokens\":[0,33]", "tokens [0,33)", ERR_RANGE},
	{"\"tokens\":[0,32]", "\"tokens\":[8,4]", "reversed", ERR_RANGE},
	{"\"tokens\":[0,32]", "\"tokens\":[-1,4]", "tokens", ERR_RANGE},
	{"\"tokens\":[0,32]", "\"tokens\":[0]", "tokens", ERR_INVAL},
	{"\"tokens\":[0,32]", "\"tokens\":{\"0\":32}", "tokens", ERR_INVAL},
	{"\"tokens\":[0,32]", "\"tokens\":[0,0.5]", "tokens", ERR_INVAL},
	{"\"tokens\":[0,32]", "\"layers\":[1,0]", "layers", ERR_RANGE},
	/* wants */
	{"\"map\":[", "\"wants\":3,\"map\":[", "wants", ERR_INVAL},
	{"\"map\":[", "\"wants\":[7],\"map\":[", "wants[0]: must be an object",
	 ERR_INVAL},
	{"\"map\":[", WANTS(WANT("kw", "0", "k", "4", "4")), "wants[0]: dst has no view",
	 ERR_RANGE},
	{"\"map\":[", WANTS(WANT("kv", "1", "k", "4", "4")), "layer 1", ERR_RANGE},
	{"\"map\":[", WANTS(WANT("kv", "0", "w", "4", "4")), "field w", ERR_RANGE},
	{"\"map\":[", WANTS(WANT("kv", "0", "k", "4", "0")), "wants[0]: units",
	 ERR_RANGE},
	{"\"map\":[", WANTS(WANT("kv", "0", "k", "-1", "4")), "wants[0]: first_unit",
	 ERR_RANGE},
	{"\"map\":[", WANTS(WANT("kv", "0", "k", "3", "4")), "want", ERR_RANGE},
	{"\"map\":[", WANTS(WANT("kv", "0", "k", "6", "4")), "want", ERR_RANGE},
	{"\"map\":[",
	 WANTS(WANT("kv", "0", "k", "5", "2") "," WANT("kv", "0", "k", "4", "2")),
	 "unit 5 twice", ERR_DUP},
};

static char *answer(const char *text, size_t len, int *r_p)
{
	char *out = NULL;
	size_t out_len;
	FILE *f = open_memstream(&out, &out_len);

	assert_non_null(f);
	*r_p = plan_answer(text, len, PLAN_ROWS_MAX, f);
	fclose(f);
	return out;
}

static char *replaced(const char *text, const char *from, const char *to)
{
	const char *at = strstr(text, from);
	char *out;

	if (!at)
		print_error("the accepted input holds no %s\n", from);
	assert_non_null(at);
	out = malloc(strlen(text) + strlen(to) + 1);
	assert_non_null(out);
	sprintf(out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
	return out;
}

static void input_refused_names_the_field(void **state)
{
	(void)state;
	assert_true(ARRAY_LEN(refusals) >= 40);
	for (size_t i = 0; i < ARRAY_LEN(refusals); i++) {
		const struct refusal *want = &refusals[i];
		char *text = replaced(accepted, want->from, want->to), *out;
		int r;

		err_clear();
		out = answer(text, strlen(text), &r);
		if (r >= 0 || err_last()->code != want->code ||
		    !strstr(err_last()->text, want->needle) || out[0]) {
			print_error(
				"%s -> %s\n  answered %d %s: %s %s\n  wanted %s: %s\n",
				want->from, want->to, r, err_name(err_last()->code),
				err_last()->text, out, err_name(want->code),
				want->needle);
			fail();
		}
		free(out);
		free(text);
	}
}

static void assert_answer(const char *text, const char *want)
{
	int r;
	char *out = answer(text, strlen(text), &r);

	if (r < 0)
		print_error("%s\n", err_last()->text);
	assert_int_equal(r, 0);
	assert_string_equal(out, want);
	free(out);
}

static void plan_of_slices_is_rows_of_half_a_token(void **state)
{
	char *text = replaced(accepted, "\"tokens\":[0,32]", "\"tokens\":[15,17]");

	(void)state;
	assert_answer(text, "{\"rows\":[[0,130048,0,15360,1024],[0,132096,0,114688,1024],"
			    "[1,130048,1,15360,1024],[1,132096,1,114688,1024]],"
			    "\"runs\":2,\"descriptors\":4,\"bytes\":4096}\n");
	free(text);
}

static void plan_of_wants_has_no_other_rows(void **state)
{
	char *tokens = replaced(accepted, "\"tokens\":[0,32]", "\"tokens\":[15,17]");
	char *text = replaced(tokens, "\"map\":[", WANTS(WANT("kv", "0", "k", "6", "2")));
	char *none = replaced(tokens, "\"map\":[", WANTS(""));

	(void)state;
	assert_answer(text, "{\"rows\":[[0,130560,0,15872,512],[0,132608,0,115200,512]],"
			    "\"runs\":1,\"descriptors\":2,\"bytes\":1024}\n");
	assert_answer(none, "{\"rows\":[],\"runs\":0,\"descriptors\":0,\"bytes\":0}\n");
	free(none);
	free(text);
	free(tokens);
}

static void plan_of_nothing_in_common_has_no_rows(void **state)
{
	char *text = replaced(accepted, "\"layer\":0", "\"layer\":1");

	(void)state;
	assert_answer(text, "{\"rows\":[],\"runs\":0,\"descriptors\":0,\"bytes\":0}\n");
	free(text);
}

static void plan_of_an_empty_range_has_no_rows(void **state)
{
	char *text = replaced(accepted, "\"tokens\":[0,32]", "\"tokens\":[0,0]");

	(void)state;
	assert_answer(text, "{\"rows\":[],\"runs\":0,\"descriptors\":0,\"bytes\":0}\n");
	free(text);
}

static void pages_as_runs_are_pages(void **state)
{
	char *a = replaced(accepted, "\"src_pages\":[3,4]", "\"src_pages\":[[3,2]]");
	int r;
	char *plain = answer(accepted, strlen(accepted), &r);

	(void)state;
	assert_int_equal(r, 0);
	assert_answer(a, plain);
	free(a);
	free(plain);
}

/* Two sources of equal layout; neighbours by address, not by list order. */
static void pages_in_descending_order_are_one_row(void **state)
{
#define SIDE                                                                             \
	"{\"buffers\":[64],\"views\":{\"kv\":{\"page_tokens\":2,\"pages\":8,\"layers\":" \
	"["                                                                              \
	"{\"layer\":5,\"fields\":[{\"name\":\"k\",\"buffer\":0,\"offset\":0,"            \
	"\"page_stride\":8,\"token_stride\":4,\"unit_stride\":4,\"unit_bytes\":4,"       \
	"\"first_unit\":0,\"units\":1,\"total_units\":1}]}]}}}"
	(void)state;
	assert_answer(
		"{\"src\":" SIDE ",\"dst\":" SIDE ",\"map\":[{\"view\":\"kv\","
		"\"src_pages\":[4,3],\"dst_pages\":[1,0]}]}",
		"{\"rows\":[[0,24,0,0,16]],\"runs\":1,\"descriptors\":1,\"bytes\":16}"
		"\n");
}

/* Fields side by side in each token: rows of one field lie between rows of the
 * other, and the answer is in order of the destination all the same. */
static void rows_are_sorted_by_destination(void **state)
{
#define BESIDE(name, at, total, stride)                                             \
	"{\"name\":\"" name "\",\"buffer\":0,\"offset\":" at ",\"page_stride\":64," \
	"\"token_stride\":" stride                                                  \
	",\"unit_stride\":4,\"unit_bytes\":4,\"first_unit\":0,"                     \
	"\"units\":1,\"total_units\":" total "}"
#define PAGE "{\"page_tokens\":3,\"pages\":1,\"layers\":[{\"layer\":0,\"fields\":["
	(void)state;
	assert_answer(
		"{\"src\":{\"buffers\":[64],\"views\":{\"a\":" PAGE
			BESIDE("x", "0", "1", "4") "," BESIDE(
				"y", "32", "1",
				"4") "]}]}}},"
				     "\"dst\":{\"buffers\":[64],\"views\":{\"a\":" PAGE
					     BESIDE("x", "0", "1", "8") "," BESIDE(
						     "y", "4", "1",
						     "8") "]}]}}},"
							  "\"map\":[{\"view\":\"a\","
							  "\"src_pages\":[0],\"dst_"
							  "pages\":[0]}]}",
		"{\"rows\":[[0,0,0,0,4],[0,32,0,4,4],[0,4,0,8,4],[0,36,0,12,4],"
		"[0,8,0,16,4],[0,40,0,20,4]],\"runs\":2,\"descriptors\":6,\"bytes\":24}"
		"\n");
}

/* ---- the file ---- */

static void file_missing_is_refused(void **state)
{
	FILE *saved = stderr;

	(void)state;
	stderr = fopen("/dev/null", "w");
	assert_non_null(stderr);
	assert_int_equal(plan_file("/nonexistent/file"), 1);
	fclose(stderr);
	stderr = saved;
}

/* If any allocation fails, the answer is an error and nothing is leaked. */
static void memory_exhausted_is_an_error(void **state)
{
	uint64_t count;
	int r;
	char *whole, *out;

	(void)state;
	mem_fail_at(0);
	whole = answer(accepted, strlen(accepted), &r);
	assert_int_equal(r, 0);
	count = mem_count();
	assert_true(count > 10);
	for (uint64_t n = 1; n <= count; n++) {
		mem_fail_at(n);
		out = answer(accepted, strlen(accepted), &r);
		mem_fail_at(0);
		assert_true(r < 0);
		assert_int_equal(err_last()->code, ERR_NOMEM);
		assert_string_equal(out, "");
		free(out);
	}
	assert_answer(accepted, whole);
	free(whole);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(input_refused_names_the_field),
		cmocka_unit_test(plan_of_slices_is_rows_of_half_a_token),
		cmocka_unit_test(plan_of_wants_has_no_other_rows),
		cmocka_unit_test(plan_of_nothing_in_common_has_no_rows),
		cmocka_unit_test(plan_of_an_empty_range_has_no_rows),
		cmocka_unit_test(pages_as_runs_are_pages),
		cmocka_unit_test(pages_in_descending_order_are_one_row),
		cmocka_unit_test(rows_are_sorted_by_destination),
		cmocka_unit_test(file_missing_is_refused),
		cmocka_unit_test(memory_exhausted_is_an_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
