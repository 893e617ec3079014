/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/live_daemon.h"
#include "daemon/base/clock.h"
#include "tests/lib/tmp.h"

#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#define START_MS 20000u

uint64_t live_now_ms(void)
{
	return clock_ns() / 1000000;
}

void live_daemon_start(struct live_daemon *daemon)
{
	char program[4096];
	ssize_t n = readlink("/proc/self/exe", program, sizeof(program) - 8);

	assert_true(n > 0);
	program[n] = '\0';
	strcpy(strrchr(program, '/'), "/kvd");
	daemon->pid = fork();
	assert_true(daemon->pid >= 0);
	if (!daemon->pid) {
		int log = open(daemon->log, O_WRONLY | O_CREAT | O_APPEND, 0600);

		prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test may end anyhow */
		dup2(log, STDOUT_FILENO);
		dup2(log, STDERR_FILENO);
		execl(program, "kvd", "--config", daemon->config, (char *)NULL);
		_exit(127);
	}
}

void live_daemon_log(const struct live_daemon *daemon)
{
	char line[512];
	FILE *log = fopen(daemon->log, "r");

	while (log && fgets(line, sizeof(line), log))
		fprintf(stderr, "  kvd: %s", line);
	if (log)
		fclose(log);
}

void live_daemon_kill(struct live_daemon *daemon)
{
	kill(daemon->pid, SIGKILL);
	assert_int_equal(waitpid(daemon->pid, NULL, 0), daemon->pid);
	daemon->pid = 0;
}

void live_daemon_stop(struct live_daemon *daemon)
{
	int status = -1;

	kill(daemon->pid, SIGTERM);
	assert_int_equal(waitpid(daemon->pid, &status, 0), daemon->pid);
	daemon->pid = 0;
	if (status)
		live_daemon_log(daemon);
	assert_int_equal(status, 0);
}

struct kvd_client *live_daemon_client(const struct live_daemon *daemon, const char *name,
				      unsigned int timeout_ms)
{
	struct kvd_options o = {
		.socket = daemon->socket, .client = name, .timeout_ms = timeout_ms};
	struct kvd_client *client;
	uint64_t end = live_now_ms() + START_MS;
	int r;

	/* a daemon that starts is not there yet: seconds, on a slow machine */
	while ((r = kvd_open(&o, &client)) == -KVD_E_NODAEMON && live_now_ms() <= end)
		poll(NULL, 0, 1);
	if (r)
		live_daemon_log(daemon);
	assert_int_equal(r, 0);
	return client;
}

void live_daemon_init(struct live_daemon *daemon)
{
	FILE *config;

	assert_non_null(
		mkdtemp(tmp_path(daemon->dir, sizeof(daemon->dir), "kvd-live-XXXXXX")));
	snprintf(daemon->config, sizeof(daemon->config), "%s/live.conf", daemon->dir);
	snprintf(daemon->socket, sizeof(daemon->socket), "%s/live.sock", daemon->dir);
	snprintf(daemon->log, sizeof(daemon->log), "%s/log", daemon->dir);
	config = fopen(daemon->config, "w");
	assert_non_null(config);
	fprintf(config,
		"[daemon]\nname = live\nrun_dir = %s\nlog_level = warn\n"
		"[peer]\nping = 50 ms\ndead_after = 800 ms\n[transport]\ntransports = "
		"shm\n",
		daemon->dir);
	fclose(config);
	live_daemon_start(daemon);
	/* before it listens it does not know what to do with a SIGTERM */
	kvd_close(live_daemon_client(daemon, "is it there?", START_MS));
}

void live_daemon_fini(struct live_daemon *daemon)
{
	if (daemon->pid)
		live_daemon_stop(daemon);
	unlink(daemon->config);
	unlink(daemon->log);
	unlink(daemon->socket);
	snprintf(daemon->config, sizeof(daemon->config), "%s/live.lock", daemon->dir);
	unlink(daemon->config);
	rmdir(daemon->dir);
}

void live_well(const struct kvd_client *client, int r)
{
	if (r < 0)
		fail_msg("%s: %s", kvd_code_name(r), kvd_last_error(client)->message);
}
