/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines as they reach stderr, read back through a pipe. */
#include "daemon/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <regex.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "tests/lib/log_lines.h"
#include "tests/lib/tmp.h"

static void line_has_priority_object_words_and_values(void **state)
{
	(void)state;
	log_set_level(LOG_LEVEL_TRACE);
	log_lines_begin();
	log_error("room", "42", "failed", "code=%s n=%d", "EPEER", 3);
	log_warn("peer", NULL, "slow", "ms=%d", 5);
	log_info("a", "b", "c", "%s", "d=1");
	log_debug("a", "b", "c", "%s", "d=2");
	log_trace("a", "b", "c", "%s", "d=3");
	assert_string_equal(log_lines_end(), "<3>room 42: failed code=EPEER n=3\n"
					     "<4>peer: slow ms=5\n"
					     "<6>a b: c d=1\n"
					     "<7>a b: c d=2\n"
					     "<7>a b: c d=3\n");
}

static void level_below_the_threshold_is_silent(void **state)
{
	(void)state;
	log_set_level(LOG_LEVEL_WARN);
	log_lines_begin();
	log_info("a", "b", "c", "d=%d", 1);
	log_warn("a", "b", "c", "d=%d", 2);
	assert_string_equal(log_lines_end(), "<4>a b: c d=2\n");
	log_set_level(LOG_LEVEL_INFO);
}

static void level_names_parse_and_others_are_refused(void **state)
{
	enum log_level level;

	(void)state;
	for (int i = LOG_LEVEL_ERROR; i <= LOG_LEVEL_TRACE; i++) {
		assert_int_equal(
			log_level_parse(log_level_name((enum log_level)i), &level), 0);
		assert_int_equal(level, i);
	}
	assert_int_equal(log_level_parse("INFO", &level), -EINVAL);
	assert_int_equal(log_level_parse("", &level), -EINVAL);
}

static void bytes_of_a_client_cannot_forge_a_line(void **state)
{
	(void)state;
	log_lines_begin();
	log_warn("session", "x\n<3>room", "said", "name=%s", "a\r\x1b[2Jb\x7f");
	assert_string_equal(log_lines_end(),
			    "<4>session x?<3>room: said name=a??[2Jb?\n");
}

/* C1, right-to-left, no width, no UTF-8; what people write stays. */
static void bytes_of_a_client_cannot_turn_a_terminal(void **state)
{
	(void)state;
	log_lines_begin();
	log_warn("session",
		 "x\302\233"
		 "2Jy",
		 "said", "name=%s why=%s",
		 "de\342\200\256mo\342\200\213\342\201\246\357\273\277",
		 "gr\303\266\303\237e \344\275\240 \233\377");
	assert_string_equal(log_lines_end(), "<4>session x?2Jy: said name=de?mo??? "
					     "why=gr\303\266\303\237e \344\275\240 ??\n");
}

static void line_too_long_is_cut_to_one_line(void **state)
{
	static char far[5000];
	const char *text;

	(void)state;
	memset(far, 'x', sizeof(far) - 1);
	log_lines_begin();
	log_warn("a", "b", "c", "v=%s", far);
	log_warn(far, far, far, "v=%s", far);
	text = log_lines_end();
	assert_true(strlen(text) < 2100);
	assert_ptr_equal(strchr(strchr(text, '\n') + 1, '\n') + 1, text + strlen(text));
}

static uint64_t coarse_second(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
	return (uint64_t)now.tv_sec;
}

/* 300 calls of one site: a burst a second goes out, the next line says how many
 * did not. The next second is waited for by its clock. */
static void site_is_limited_and_reports_dropped_count(void **state)
{
	static struct log_site site;
	unsigned int lines = 0, dropped = 0, calls = 0;
	uint64_t last;
	const char *text;

	(void)state;
	log_lines_begin();
	for (; calls < 300; calls++)
		log_write(&site, LOG_LEVEL_INFO, NULL, "a", NULL, "hit", "n=%u", calls);
	for (last = coarse_second(); coarse_second() <= last + 1;)
		;
	log_write(&site, LOG_LEVEL_INFO, NULL, "a", NULL, "hit", "n=%u", calls);
	text = log_lines_end();
	for (const char *p = text; *p; p = strchr(p, '\n') + 1) {
		const char *tail = strstr(p, " dropped=");
		unsigned int n = 0;

		if (tail && tail < strchr(p, '\n')) {
			assert_int_equal(sscanf(tail, " dropped=%u", &n), 1);
			dropped += n;
		}
		lines++;
	}
	/* the 300 may lie in two seconds when the machine is slow */
	assert_true(lines <= 2 * LOG_BURST + 1);
	assert_int_equal(lines + dropped, 301);
}

static void plain_format_has_time_and_level(void **state)
{
	const char *text;
	regex_t re;

	(void)state;
	log_set_format(LOG_FORMAT_PLAIN);
	log_lines_begin();
	log_warn("peer", "p", "slow", "ms=%d", 5);
	text = log_lines_end();
	log_set_format(LOG_FORMAT_JOURNAL);
	assert_int_equal(regcomp(&re,
				 "^[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}\\.[0-9]{3} warn  "
				 "peer p: slow ms=5\n$",
				 REG_EXTENDED | REG_NOSUB),
			 0);
	assert_int_equal(regexec(&re, text, 0, NULL, 0), 0);
	regfree(&re);
}

static void stderr_closed_or_full_has_no_effect(void **state)
{
	int fds[2];

	(void)state;
	signal(SIGPIPE, SIG_IGN);
	log_lines_begin();
	close(STDERR_FILENO);
	log_error("a", NULL, "b", "c=%d", 1);
	assert_int_equal(pipe2(fds, O_NONBLOCK | O_CLOEXEC), 0);
	assert_true(dup2(fds[1], STDERR_FILENO) >= 0);
	while (write(fds[1], "full", 4) > 0)
		;
	log_error("a", NULL, "b", "c=%d", 2);
	close(fds[0]);
	log_error("a", NULL, "b", "c=%d", 3); /* EPIPE */
	close(fds[1]);
	log_lines_end();
}

/* What the journal was sent; "" = nothing. */
static const char *journal_got(int fd)
{
	static char text[8192];
	ssize_t n = recv(fd, text, sizeof(text) - 1, MSG_DONTWAIT);

	text[n > 0 ? n : 0] = '\0';
	return text;
}

static void fields_are_sent_to_journal_or_stderr(void **state)
{
	char dir[80], huge[8000];
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	struct log_field fields[] = {{"KVD_ROOM", "42"},
				     {"KVD_ENGINE", "a\nFORGED=1\x1b\302\233"},
				     {NULL, NULL}};
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	(void)state;
	assert_non_null(mkdtemp(tmp_path(dir, sizeof(dir), "kvd-log-XXXXXX")));
	snprintf(at.sun_path, sizeof(at.sun_path), "%s/socket", dir);
	assert_int_equal(bind(fd, (const struct sockaddr *)&at, sizeof(at)), 0);
	log_journal_open(at.sun_path);
	log_lines_begin();
	LOG_FIELDS_AT(LOG_LEVEL_WARN, fields, "room", "42", "failed", "why=%s", "x\ny");
	assert_string_equal(log_lines_end(), "");
	assert_string_equal(journal_got(fd),
			    "MESSAGE=room 42: failed why=x?y\nPRIORITY=4\n"
			    "SYSLOG_IDENTIFIER=kvd\nKVD_ROOM=42\n"
			    "KVD_ENGINE=a?FORGED=1??\n");
	memset(huge, 'h', sizeof(huge) - 1);
	huge[sizeof(huge) - 1] = '\0';
	fields[1].value = huge; /* does not fit: the line is all there is */
	log_lines_begin();
	LOG_FIELDS_AT(LOG_LEVEL_WARN, fields, "room", "42", "failed", "%s", "n=1");
	assert_non_null(strstr(log_lines_end(), "room 42: failed n=1\n"));
	assert_string_equal(journal_got(fd), "");
	close(fd); /* journald is gone */
	fields[1].value = "e";
	log_lines_begin();
	LOG_FIELDS_AT(LOG_LEVEL_WARN, fields, "room", "42", "failed", "%s", "n=2");
	assert_non_null(strstr(log_lines_end(), "room 42: failed n=2\n"));
	unlink(at.sun_path);
	rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(fields_are_sent_to_journal_or_stderr),
		cmocka_unit_test(line_has_priority_object_words_and_values),
		cmocka_unit_test(level_below_the_threshold_is_silent),
		cmocka_unit_test(level_names_parse_and_others_are_refused),
		cmocka_unit_test(bytes_of_a_client_cannot_forge_a_line),
		cmocka_unit_test(bytes_of_a_client_cannot_turn_a_terminal),
		cmocka_unit_test(line_too_long_is_cut_to_one_line),
		cmocka_unit_test(site_is_limited_and_reports_dropped_count),
		cmocka_unit_test(plain_format_has_time_and_level),
		cmocka_unit_test(stderr_closed_or_full_has_no_effect),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
