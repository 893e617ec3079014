/* SPDX-License-Identifier: Apache-2.0 */
/* The metrics endpoint when the loop does not turn: tests/metrics has the rest. */
#include "daemon/metrics/http.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/context.h"
#include "daemon/config/config.h"
#include "daemon/loop/loop.h"
#include "daemon/metrics/http_lib.h"
#include "tests/lib/tmp.h"

static int http_connect(const char *path)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);

	assert_true(strlen(path) < sizeof(addr.sun_path));
	memcpy(addr.sun_path, path, strlen(path) + 1);
	assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	return fd;
}

/* The answer's head; the loop turns while it is waited for, or does not. */
static void http_get(const char *path, const char *what, struct loop *turns,
		     char answer[256])
{
	char ask[128];
	int fd = http_connect(path), len;
	struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
	ssize_t n;

	len = snprintf(ask, sizeof(ask), "GET %s HTTP/1.1\r\nHost: a\r\n\r\n", what);
	assert_int_equal(write(fd, ask, (size_t)len), len);
	while (poll(&poll_fd, 1, turns ? 0 : 60000) == 0) {
		assert_non_null(turns);
		loop_turn(turns, LOOP_NS_PER_MS);
	}
	n = read(fd, answer, 255);
	assert_true(n > 0);
	answer[n] = '\0';
	close(fd);
}

static void loop_blocked_is_reported(void **state)
{
	static struct config config;
	static struct kvd kvd;
	const struct http_lib *lib;
	char dir[TMP_ROOT_MAX + 32], answer[256];
	const char *path = config.metrics_listen + 5;
	struct http *http;

	(void)state;
	if (http_lib_load(&lib) < 0) {
		print_message("libmicrohttpd12\n");
		skip();
	}
	assert_non_null(mkdtemp(tmp_path(dir, sizeof(dir), "kvd-http-XXXXXX")));
	snprintf(config.metrics_listen, sizeof(config.metrics_listen), "unix:%s/m", dir);
	snprintf(config.socket_path, sizeof(config.socket_path), "%s", dir);
	config.socket_mode = 0600;
	memset(&kvd, 0, sizeof(kvd));
	kvd.config = &config;
	assert_int_equal(loop_new(&kvd.loop), 0);
	assert_int_equal(http_new(&kvd, &http), 0);
	http_get(path, "/livez", kvd.loop, answer);
	assert_non_null(strstr(answer, "HTTP/1.1 200 "));
	while (!strstr(answer, "HTTP/1.1 503 ")) /* until the last copy is old */
		http_get(path, "/livez", NULL, answer);
	assert_non_null(strstr(answer, "the event loop does not respond"));
	http_get(path, "/metrics", NULL, answer);
	assert_non_null(strstr(answer, "HTTP/1.1 503 "));
	http_get(path, "/readyz", kvd.loop, answer);
	assert_non_null(strstr(answer, "HTTP/1.1 200 "));
	http_free(http);
	assert_int_equal(access(path, F_OK), -1);
	loop_free(kvd.loop);
	assert_int_equal(rmdir(dir), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(loop_blocked_is_reported),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
