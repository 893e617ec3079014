/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/log_lines.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static int saved = -1, reader = -1;

void log_lines_begin(void)
{
	int fds[2];

	assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
	saved = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
	assert_true(dup2(fds[1], STDERR_FILENO) >= 0);
	close(fds[1]);
	assert_int_equal(fcntl(fds[0], F_SETFL, O_NONBLOCK), 0);
	reader = fds[0];
}

const char *log_lines_end(void)
{
	static char text[65536];
	size_t len = 0;
	ssize_t n;

	while ((n = read(reader, text + len, sizeof(text) - 1 - len)) > 0)
		len += (size_t)n;
	text[len] = '\0';
	assert_true(dup2(saved, STDERR_FILENO) >= 0);
	close(saved);
	close(reader);
	return text;
}

unsigned int log_lines_with(const char *text, const char *words)
{
	unsigned int count = 0;

	while ((text = strstr(text, words))) {
		count++;
		text += strcspn(text, "\n");
	}
	return count;
}
