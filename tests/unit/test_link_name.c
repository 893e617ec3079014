/* SPDX-License-Identifier: Apache-2.0 */
/* link_name in virtual time; queries to the resolver end here, and the case answers
 * them. */
#include "daemon/link/link_name.h"

#include <errno.h>
#include <netdb.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/loop/lookup.h"
#include "daemon/loop/loop.h"

#define S LOOP_NS_PER_S
#define QUESTIONS_MAX 1000

struct asked {
	struct lookup *lookup;
	char host[32];
	bool answered;
};

struct seen {
	char address[128], why[128]; /* why: it has none */
	unsigned int calls;
};

static struct asked asked[QUESTIONS_MAX];
static unsigned int asked_count;
static struct loop *loop;
static struct seen seen;

/* ---- in the place of lookup.c ---- */

int lookup_start(struct lookup *lookup)
{
	struct asked *it = &asked[asked_count];

	assert_true(asked_count < QUESTIONS_MAX);
	*it = (struct asked){.lookup = lookup};
	snprintf(it->host, sizeof(it->host), "%s", lookup->host);
	asked_count++;
	return 0;
}

/* Its answer, or a failure: addresses as getaddrinfo lists them. */
static void answer_nth(unsigned int nth, int status, const char *first,
		       const char *second)
{
	const struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
				       .ai_flags = AI_NUMERICHOST};
	struct lookup *lookup = asked[nth].lookup;

	asked[nth].answered = true;
	lookup->status = status;
	if (first)
		assert_int_equal(getaddrinfo(first, NULL, &hints, &lookup->list), 0);
	if (second)
		assert_int_equal(
			getaddrinfo(second, NULL, &hints, &lookup->list->ai_next), 0);
	lookup->done(lookup);
	loop_turn(loop, 0);
	loop_turn(loop, 0);
}

static void answer(int status, const char *first, const char *second)
{
	answer_nth(asked_count - 1, status, first, second);
}

/* ---- stage ---- */

static void on_address(void *owner, const char *address)
{
	struct seen *it = owner;

	snprintf(it->address, sizeof(it->address), "%s", address);
	it->calls++;
}

static void on_none(void *owner, const char *host, const char *why)
{
	struct seen *it = owner;

	assert_string_equal(host, "peer.example");
	snprintf(it->why, sizeof(it->why), "%s", why);
}

static struct link_name *open_name(void)
{
	struct link_name *name = NULL;

	assert_int_equal(link_name_new(loop, "peer.example", "7400", on_address, on_none,
				       &seen, &name),
			 0);
	return name;
}

static void pass_time(uint64_t ns)
{
	uint64_t end = loop_now_ns(loop) + ns;

	while (loop_now_ns(loop) < end)
		loop_turn(loop, end - loop_now_ns(loop));
	loop_turn(loop, 0);
}

static int setup(void **state)
{
	(void)state;
	asked_count = 0;
	seen = (struct seen){0};
	return loop_new_virtual(1, &loop);
}

static int teardown(void **state)
{
	(void)state;
	loop_free(loop);
	return 0;
}

/* ---- cases ---- */

static void host_of_numbers_is_known(void **state)
{
	(void)state;
	assert_true(link_name_is_number("10.0.0.2"));
	assert_true(link_name_is_number("[fe80::1]"));
	assert_false(link_name_is_number("peer.example"));
	assert_false(link_name_is_number("localhost"));
	assert_false(link_name_is_number("10.0.0")); /* libc makes 10.0.0.0 of it */
	assert_false(link_name_is_number("10.0.0.2.example"));
}

static void name_answered_is_dialled_ipv4_first(void **state)
{
	struct link_name *name = open_name();

	(void)state;
	assert_int_equal(asked_count, 1);
	assert_string_equal(asked[0].host, "peer.example");
	assert_int_equal(seen.calls, 0); /* never from inside */
	answer(0, "2001:db8::7", "10.0.0.7");
	assert_int_equal(seen.calls, 1);
	assert_string_equal(seen.address, "tcp://10.0.0.7:7400");
	link_name_free(name);
}

static void address_not_connecting_is_followed_by_next(void **state)
{
	struct link_name *name = open_name();

	(void)state;
	answer(0, "10.0.0.7", "2001:db8::7");
	pass_time(19 * S / 10);
	assert_int_equal(seen.calls, 1);
	pass_time(2 * S / 10);
	assert_string_equal(seen.address, "tcp://[2001:db8::7]:7400");
	pass_time(21 * S / 10);
	assert_int_equal(asked_count, 2); /* all were tried: resolved again */
	answer(0, "10.0.0.8", NULL);
	assert_string_equal(seen.address, "tcp://10.0.0.8:7400");
	assert_int_equal(seen.calls, 3);
	link_name_free(name);
}

static void line_connected_is_not_redialled(void **state)
{
	struct link_name *name = open_name();

	(void)state;
	answer(0, "10.0.0.7", "10.0.0.8");
	link_name_line(name, true);
	pass_time(3600 * S);
	assert_int_equal(seen.calls, 1);
	assert_int_equal(asked_count, 1);
	/* full for a while, reported many times: the same line */
	for (int i = 0; i < 9; i++) {
		link_name_line(name, false);
		pass_time(1 * S);
	}
	link_name_line(name, true);
	pass_time(60 * S);
	assert_int_equal(seen.calls, 1);
	link_name_free(name);
}

static void host_moved_is_found_again(void **state)
{
	struct link_name *name = open_name();

	(void)state;
	answer(0, "10.0.0.7", NULL);
	link_name_line(name, true);
	link_name_line(name, false);
	pass_time(101 * S / 10);
	assert_int_equal(asked_count, 2);
	answer(0, "10.0.0.99", NULL);
	assert_string_equal(seen.address, "tcp://10.0.0.99:7400");
	link_name_free(name);
}

static void line_back_before_the_answer_stays(void **state)
{
	struct link_name *name = open_name();

	(void)state;
	answer(0, "10.0.0.7", NULL);
	link_name_line(name, true);
	link_name_line(name, false);
	pass_time(101 * S / 10);
	link_name_line(name, true);
	answer(0, "10.0.0.99", NULL);
	pass_time(60 * S);
	assert_int_equal(seen.calls, 1);
	link_name_free(name);
}

static void name_unknown_is_resolved_with_growing_pauses(void **state)
{
	struct link_name *name = open_name();
	uint64_t begin = loop_now_ns(loop);

	(void)state;
	for (int i = 0; i < 10; i++) {
		unsigned int before = asked_count;

		answer(EAI_NONAME, NULL, NULL);
		assert_string_equal(seen.why, gai_strerror(EAI_NONAME));
		while (asked_count == before)
			pass_time(S / 10);
	}
	/* 0.25 + 0.5 + 1 + 2 + 4 + 8 … */
	assert_in_range(loop_now_ns(loop) - begin, 47 * S, 50 * S);
	assert_int_equal(seen.calls, 0);
	answer(0, "10.0.0.7", NULL);
	assert_int_equal(seen.calls, 1);
	link_name_free(name);
}

static void name_freed_before_reply_makes_no_callback(void **state)
{
	struct link_name *name = open_name();

	(void)state;
	link_name_free(name);
	answer(0, "10.0.0.7", NULL);
	assert_int_equal(seen.calls, 0);
}

static void questions_without_end_are_bounded(void **state)
{
	static struct link_name *names[300];
	unsigned int first;

	(void)state;
	for (unsigned int i = 0; i < 300; i++)
		names[i] = open_name();
	assert_int_equal(asked_count, 64);
	for (unsigned int i = 0; i < 64; i++) /* freed or not, they run */
		link_name_free(names[i]);
	pass_time(S);
	assert_int_equal(asked_count, 64);
	answer_nth(0, EAI_AGAIN, NULL, NULL);
	first = asked_count;
	pass_time(S);
	assert_int_equal(asked_count, first + 1);
	for (unsigned int i = 1; i < 65; i++)
		answer_nth(i, EAI_AGAIN, NULL, NULL);
	pass_time(S);
	for (unsigned int i = 65; i < asked_count; i++)
		if (!asked[i].answered)
			answer_nth(i, EAI_AGAIN, NULL, NULL);
	for (unsigned int i = 64; i < 300; i++)
		link_name_free(names[i]);
	for (unsigned int i = 0; i < asked_count; i++)
		if (!asked[i].answered)
			answer_nth(i, EAI_AGAIN, NULL, NULL);
}

static void name_without_memory_is_resolved_later(void **state)
{
	struct link_name *name = NULL;

	(void)state;
	for (uint64_t n = 1;; n++) {
		int r;

		asked_count = 0;
		seen = (struct seen){0};
		mem_fail_at(n);
		r = link_name_new(loop, "peer.example", "7400", on_address, on_none,
				  &seen, &name);
		mem_fail_at(0);
		err_clear();
		if (r < 0)
			continue;
		if (asked_count == 1)
			break;
		pass_time(S);
		assert_int_equal(asked_count, 1);
		answer(0, "10.0.0.7", NULL);
		assert_int_equal(seen.calls, 1);
		link_name_free(name);
	}
	answer(0, "10.0.0.7", NULL);
	link_name_free(name);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(host_of_numbers_is_known),
		CASE(name_answered_is_dialled_ipv4_first),
		CASE(address_not_connecting_is_followed_by_next),
		CASE(line_connected_is_not_redialled),
		CASE(host_moved_is_found_again),
		CASE(line_back_before_the_answer_stays),
		CASE(name_unknown_is_resolved_with_growing_pauses),
		CASE(name_freed_before_reply_makes_no_callback),
		CASE(questions_without_end_are_bounded),
		CASE(name_without_memory_is_resolved_later),
	};

	log_threshold = -1; /* names without addresses are provoked */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
