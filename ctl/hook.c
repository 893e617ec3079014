/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A hook. It has a process group of its own, which is killed whole at its limit; it dies
 * with this process. Its standard input is empty, and what it prints goes to our standard
 * error, for our standard output is data. One that fails is run again at the next turn
 * that wants nothing else: what it was to do is not done.
 */
#include "ctl/hook.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "daemon/base/clock.h"

#define LOOK_MS 20

static void hook_failed(struct hook *hook)
{
	hook->failures++;
	hook->wanted = true;
}

static void hook_reap(struct hook *hook, int status)
{
	hook->pid = 0;
	if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
		return;
	hook_failed(hook);
	if (WIFEXITED(status))
		ctl_failed("hook: %s: exit status %d", hook->program,
			   WEXITSTATUS(status));
	else
		ctl_failed("hook: %s: signal %d%s", hook->program, WTERMSIG(status),
			   clock_ns() >= hook->ends_ns ? ", at its time limit" : "");
}

void hook_watch(struct hook *hook)
{
	pid_t r;
	int status = 0;

	if (!hook->pid)
		return;
	if (clock_ns() >= hook->ends_ns)
		kill(-hook->pid, SIGKILL);
	r = waitpid(hook->pid, &status, WNOHANG);
	if (r == hook->pid)
		hook_reap(hook, status);
	else if (r < 0 && errno != EINTR)
		hook->pid = 0;
}

/* In the child. */
static void hook_become(const struct hook *hook, char *const environment[], pid_t parent)
{
	char *argv[] = {(char *)(uintptr_t)hook->program, NULL};
	int empty = open("/dev/null", O_RDONLY | O_CLOEXEC);

	setpgid(0, 0);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent || empty < 0 || dup2(empty, STDIN_FILENO) < 0 ||
	    dup2(STDERR_FILENO, STDOUT_FILENO) < 0)
		_exit(127);
	for (unsigned int i = 0; environment[i]; i++)
		putenv(environment[i]);
	execv(hook->program, argv);
	_exit(127);
}

static void hook_start(struct hook *hook, char *const environment[])
{
	pid_t parent = getpid(), pid = fork();

	if (pid == 0)
		hook_become(hook, environment, parent);
	hook->wanted = false;
	if (pid < 0) {
		ctl_failed("hook: %s", strerror(errno));
		hook_failed(hook);
		return;
	}
	setpgid(pid, pid); /* whoever is first */
	hook->pid = pid;
	hook->ends_ns = clock_ns() + hook->limit_ns;
}

void hook_turn(struct hook *hook, char *const environment[])
{
	hook_watch(hook);
	if (hook->program && hook->wanted && !hook->pid)
		hook_start(hook, environment);
}

void hook_end(struct hook *hook)
{
	while (hook->pid) {
		hook_watch(hook);
		if (hook->pid)
			poll(NULL, 0, LOOK_MS);
	}
}
