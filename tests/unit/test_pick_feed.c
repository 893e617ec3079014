/* SPDX-License-Identifier: Apache-2.0 */
/* Answers of group.query in a picker: ranks put together, changes, and what is not an
 * answer. */
#include "lib/kvd_pick.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define SEC UINT64_C(1000000000)

static struct kvd_picker *picker;
static uint64_t now;

static int setup(void **state)
{
	struct kvd_pick_options o = {.seed = 3};

	(void)state;
	now = 100 * SEC;
	return kvd_picker_new(&o, &picker);
}

static int teardown(void **state)
{
	(void)state;
	kvd_picker_free(picker);
	return 0;
}

static int feed(const char *answer)
{
	return kvd_picker_feed(picker, KVD_PICK_PREFILL, answer, strlen(answer), now);
}

static void counts(size_t serving, size_t all)
{
	size_t there;

	assert_int_equal(kvd_picker_count(picker, KVD_PICK_PREFILL, &there), serving);
	assert_int_equal(there, all);
}

static double queue_of(const char *worker)
{
	struct kvd_pick_args args = {.prompt_tokens = 1};
	struct kvd_pick_score score;
	enum kvd_pick_state is;
	char name[KVD_PICK_NAME_MAX];

	for (size_t i = 0; kvd_picker_score(picker, KVD_PICK_PREFILL, i, &args, now, name,
					    &is, &score) == 0;
	     i++)
		if (strcmp(name, worker) == 0)
			return score.fresh ? score.queue_s : -1;
	fail();
	return 0;
}

static void whole_answer_replaces_what_was_known(void **state)
{
	(void)state;
	assert_int_equal(feed("{\"revision\":1,\"ranks\":[{\"worker\":\"a\"},{\"worker\":"
			      "\"b\",\"state\":\"draining\"},{\"endpoint\":\"x\"}]}"),
			 0);
	counts(2, 3); /* the one without a name is the group's only one: "-" */
	assert_int_equal(feed("{\"ranks\":[{\"worker\":\"b\",\"state\":\"serving\"}]}"),
			 0);
	counts(1, 1);
	assert_int_equal(feed("{\"ranks\":[]}"), 0);
	counts(0, 0);
}

static void change_leaves_the_others(void **state)
{
	(void)state;
	assert_int_equal(feed("{\"ranks\":[{\"worker\":\"a\"},{\"worker\":\"b\"}]}"), 0);
	assert_int_equal(
		feed("{\"ranks\":[{\"worker\":\"c\"}],\"gone\":[{\"worker\":\"a\"},"
		     "{\"worker\":\"never\"}]}"),
		0);
	counts(2, 2);
	assert_int_equal(feed("{\"ranks\":[{\"worker\":\"b\",\"state\":\"draining\"}],"
			      "\"gone\":[]}"),
			 0);
	counts(1, 2);
	assert_int_equal(
		feed("{\"ranks\":[{\"worker\":\"d\"}],\"gone\":[],\"whole\":true}"), 0);
	counts(1, 1);
}

static void worker_without_all_its_ranks_is_not_picked(void **state)
{
	static const char two[] =
		"{\"ranks\":[{\"worker\":\"a\",\"tp_rank\":0,\"tp_size\":2},"
		"{\"worker\":\"a\",\"tp_rank\":1,\"tp_size\":2}]}";

	(void)state;
	assert_int_equal(
		feed("{\"ranks\":[{\"worker\":\"a\",\"tp_rank\":0,\"tp_size\":2}]}"), 0);
	counts(0, 1);
	assert_int_equal(feed(two), 0);
	counts(1, 1);
	assert_int_equal(feed("{\"ranks\":[{\"worker\":\"a\",\"tp_rank\":1,\"tp_size\":2,"
			      "\"state\":\"draining\"}],\"gone\":[]}"),
			 0);
	counts(0, 1);
	assert_int_equal(feed(two), 0);
	counts(1, 1);
	assert_int_equal(
		feed("{\"ranks\":[],\"gone\":[{\"worker\":\"a\",\"tp_rank\":0}]}"), 0);
	counts(0, 1);
	assert_int_equal(
		feed("{\"ranks\":[],\"gone\":[{\"worker\":\"a\",\"tp_rank\":1}]}"), 0);
	counts(0, 0);
}

#define RANK(dp, tp, seq, waiting)                                             \
	"{\"worker\":\"a\",\"dp_rank\":" #dp ",\"dp_size\":2,\"tp_rank\":" #tp \
	",\"tp_size\":2,\"load\":{\"v\":1,\"seq\":" #seq                       \
	",\"engine\":{\"prompt_tokens_waiting\":" #waiting ",\"prompt_tokens_s\":0}}}"

/* Of tensor ranks the one that spoke last counts; data-parallel ones add up. */
static void ranks_loads_are_put_together(void **state)
{
	(void)state;
	assert_int_equal(
		feed("{\"ranks\":[" RANK(0, 0, 1, 1000) "," RANK(0, 1, 1, 1000) "," RANK(
			1, 0, 1, 3000) "," RANK(1, 1, 1, 3000) "]}"),
		0);
	counts(1, 1);
	assert_float_equal(queue_of("a"), 0.4, 1e-6); /* of 10 000 a second */
	now += SEC;
	assert_int_equal(feed("{\"ranks\":[" RANK(0, 1, 2, 8000) "],\"gone\":[]}"), 0);
	assert_float_equal(queue_of("a"), 1.1, 1e-6);
	now += SEC;
	assert_int_equal(feed("{\"ranks\":[" RANK(0, 0, 2, 500) "],\"gone\":[]}"), 0);
	assert_float_equal(queue_of("a"), 0.35, 1e-6);
	/* the same number: the same load, which is drained since */
	now += SEC / 10;
	assert_int_equal(feed("{\"ranks\":[" RANK(0, 0, 2, 9999) "],\"gone\":[]}"), 0);
	assert_float_equal(queue_of("a"), 0.25, 1e-6);
}

/* What the directory vouches for does not age; what it does not, does. */
static void synced_answer_keeps_loads_fresh(void **state)
{
	(void)state;
	assert_int_equal(
		feed("{\"ranks\":[{\"worker\":\"a\",\"load\":{\"seq\":1,\"engine\":{"
		     "\"prompt_tokens_waiting\":0}}}]}"),
		0);
	now += 60 * SEC;
	assert_float_equal(queue_of("a"), -1, 0);
	assert_int_equal(feed("{\"ranks\":[],\"gone\":[],\"synced\":false}"), 0);
	assert_float_equal(queue_of("a"), -1, 0);
	assert_int_equal(feed("{\"ranks\":[],\"gone\":[],\"synced\":true}"), 0);
	assert_true(queue_of("a") >= 0);
}

static void what_is_no_answer_changes_nothing(void **state)
{
	static const char *const bad[] = {
		"",
		"{",
		"[]",
		"null",
		"{\"ranks\":{}}",
		"{\"gone\":[]}",
		"{\"ranks\":[],\"gone\":{}}",
		"{\"ranks\":[1]}",
		"{\"ranks\":[{\"worker\":7}]}",
		"{\"ranks\":[{\"worker\":\"c\"},{\"worker\":\"d\",\"tp_rank\":-1}]}",
		"{\"ranks\":[{\"worker\":\"d\",\"tp_size\":1e99}]}",
		"{\"ranks\":[{\"worker\":\"d\",\"pp_rank\":\"0\"}]}",
		"{\"ranks\":[{\"worker\":\"0123456789012345678901234567890123456789012345"
		"678901234567890123\"}]}",
	};

	(void)state;
	assert_int_equal(feed("{\"ranks\":[{\"worker\":\"a\"}]}"), 0);
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		assert_int_equal(feed(bad[i]), -KVD_E_PROTO);
		counts(1, 1);
	}
}

static void wrong_figures_are_not_known(void **state)
{
	struct kvd_pick_args args = {.prompt_tokens = 100};
	struct kvd_pick_score score;
	enum kvd_pick_state is;
	char name[KVD_PICK_NAME_MAX];

	(void)state;
	assert_int_equal(
		feed("{\"ranks\":[{\"worker\":\"a\",\"load\":{\"seq\":\"x\",\"gbps\":-1,"
		     "\"bytes\":7,\"rooms\":{\"waiting\":1e308},\"engine\":[{}],"
		     "\"failed\":"
		     "{}}},{\"worker\":\"b\",\"load\":[]},{\"worker\":\"c\",\"load\":{"
		     "\"engine\":{\"prompt_tokens_waiting\":1e400,\"prompt_tokens"
		     "_s\":null}}}"
		     "]}"),
		0);
	counts(3, 3);
	for (size_t i = 0; i < 3; i++) {
		assert_int_equal(kvd_picker_score(picker, KVD_PICK_PREFILL, i, &args, now,
						  name, &is, &score),
				 0);
		assert_true(score.queue_s < 1);
	}
}

static void ranks_of_a_worker_have_a_limit(void **state)
{
	size_t size = 100 + 1100 * 64, at;
	char *text = malloc(size);

	(void)state;
	assert_non_null(text);
	at = (size_t)snprintf(text, size, "{\"ranks\":[");
	for (unsigned int i = 0; i < 1100; i++)
		at += (size_t)snprintf(
			text + at, size - at,
			"%s{\"worker\":\"a\",\"dp_rank\":%u,\"dp_size\":1100}",
			i ? "," : "", 1099 - i);
	snprintf(text + at, size - at, "]}");
	assert_int_equal(feed(text), -KVD_E_LIMIT);
	counts(0, 1);
	free(text);
}

/* Bytes that are changed at random: whatever comes of it, nothing breaks. */
static void mangled_answers_break_nothing(void **state)
{
	static const char good[] =
		"{\"revision\":9,\"ranks\":["
		"" RANK(0, 0, 1, 1000) "," RANK(
			1, 1, 7,
			1e3) "],"
			     "\"gone\":[{\"worker\":\"b\",\"tp_rank\":0}],\"whole\":false"
			     ",\"synced\":true}";
	struct kvd_pick_args args = {.prompt_tokens = 5, .only_prefill = true};
	struct kvd_pick_result r;
	uint64_t random = 5;
	char text[sizeof(good)];

	(void)state;
	for (unsigned int i = 0; i < 20000; i++) {
		memcpy(text, good, sizeof(good));
		for (unsigned int k = 0; k < 3; k++) {
			random = random * UINT64_C(6364136223846793005) + 1;
			text[(random >> 33) % (sizeof(good) - 1)] = (char)(random >> 20);
		}
		now += SEC / 100;
		kvd_picker_feed(picker, KVD_PICK_PREFILL, text, sizeof(good) - 1, now);
		kvd_pick(picker, &args, now, &r);
	}
}

int main(void)
{
#define WITH(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		WITH(whole_answer_replaces_what_was_known),
		WITH(change_leaves_the_others),
		WITH(worker_without_all_its_ranks_is_not_picked),
		WITH(ranks_loads_are_put_together),
		WITH(synced_answer_keeps_loads_fresh),
		WITH(what_is_no_answer_changes_nothing),
		WITH(wrong_figures_are_not_known),
		WITH(ranks_of_a_worker_have_a_limit),
		WITH(mangled_answers_break_nothing),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
