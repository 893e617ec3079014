/* SPDX-License-Identifier: Apache-2.0 */
/*
 * still: runs a program and tells which calls of its main process may sleep for as long
 * as a stranger likes (rules.c).
 *
 *     still [--own DIR]... [--report FD] PROGRAM [ARGUMENT]...
 *
 * The program keeps this process's number. Its calls are told by seccomp's user
 * notification: each is looked at while it waits, and then goes on, whatever was found.
 * So none is made in vain, and the program behaves as ever, but slower. Processes that it
 * forks are not judged: these are where such calls belong.
 *
 * Why not strace or ptrace: they stop every thread at each call and signal, are the
 * parent of what they run, and the daemon could not be frozen or traced any more by a
 * test.
 *
 * A finding is a line, the first time that it is met: the call, its object, its thread,
 * why, and the program's return addresses that lie on the stack (some may be stale).
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "tests/still/rules.h"

#define CALLS_MAX 128u
#define SEEN_MAX 256u
#define STACK_BYTES 6144u
#define STACK_WORDS (STACK_BYTES / sizeof(uint64_t))
#define FRAMES 12u
#define SKIPPED 77

struct shared {
	atomic_int listener; /* a number in the program's table; -1: refused */
	atomic_int taken;
};

struct watch {
	struct watched watched;
	int listener, report;
	char *program;
	char seen[SEEN_MAX][TEXT_BYTES];
	unsigned int seen_count;
};

static int filter_install(void)
{
	struct sock_filter code[CALLS_MAX + 4];
	const int *calls = rules_calls();
	unsigned short n = 0, count = 0;

	while (calls[count] >= 0)
		count++;
	code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
						 offsetof(struct seccomp_data, nr));
	for (unsigned short i = 0; i < count; i++)
		code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K,
							 (uint32_t)calls[i],
							 (uint8_t)(count - i), 0);
	code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return -1;
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
			    SECCOMP_FILTER_FLAG_NEW_LISTENER,
			    &(struct sock_fprog){n, code});
}

/* ---- telling ---- */

/* Words on the stack that lie in the program's own code. */
static void stack_tell(const struct watch *watch, pid_t tid, char *at, size_t room)
{
	uint64_t words[STACK_WORDS], low = 0, high = 0, base = 0, sp = 0;
	char path[64], line[512], *last;
	unsigned int found = 0;
	FILE *file;
	ssize_t n;

	snprintf(path, sizeof(path), "/proc/%d/maps", (int)watch->watched.pid);
	file = fopen(path, "re");
	while (file && fgets(line, sizeof(line), file)) {
		uint64_t from, to, offset;
		char mode[5];

		if (!strstr(line, watch->program) ||
		    sscanf(line, "%lx-%lx %4s %lx", &from, &to, mode, &offset) != 4)
			continue;
		base = base ? base : from - offset;
		if (mode[2] == 'x') {
			low = from;
			high = to;
		}
	}
	if (file)
		fclose(file);
	snprintf(path, sizeof(path), "/proc/%d/syscall", (int)tid);
	file = fopen(path, "re");
	if (file && fgets(line, sizeof(line), file)) {
		last = strrchr(line, ' ');
		if (last) {
			*last = '\0';
			last = strrchr(line, ' ');
		}
		sp = last ? strtoull(last, NULL, 16) : 0;
	}
	if (file)
		fclose(file);
	n = process_vm_readv(tid, &(struct iovec){words, sizeof(words)}, 1,
			     &(struct iovec){(void *)(uintptr_t)sp, sizeof(words)}, 1, 0);
	for (size_t i = 0; i < (n > 0 ? (size_t)n : 0) / 8 && found < FRAMES; i++) {
		if (words[i] < low || words[i] >= high)
			continue;
		found++;
		n = snprintf(at, room, " %#lx", words[i] - base - 1);
		at += (size_t)n < room ? (size_t)n : room;
		room -= (size_t)n < room ? (size_t)n : room;
	}
}

/* Numbers, and hexadecimal ones, are another finding's no more. */
static void text_key(const char *text, char key[TEXT_BYTES])
{
	size_t n = 0;

	for (; *text && n < TEXT_BYTES - 1; text++)
		if (*text < '0' || *text > '9')
			key[n++] = *text;
	key[n] = '\0';
}

static void finding_tell(struct watch *watch, pid_t tid, const char *text)
{
	char key[TEXT_BYTES], line[TEXT_BYTES + 300], stack[256] = "";

	text_key(text, key);
	for (unsigned int i = 0; i < watch->seen_count; i++)
		if (strcmp(watch->seen[i], key) == 0)
			return;
	if (watch->seen_count == SEEN_MAX)
		return;
	memcpy(watch->seen[watch->seen_count++], key, sizeof(key));
	stack_tell(watch, tid, stack, sizeof(stack));
	snprintf(line, sizeof(line), "%s; at%s\n", text, stack);
	(void)!write(watch->report, line, strlen(line));
}

/* ---- watching ---- */

static bool is_thread(pid_t pid, pid_t tid)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/task/%d", (int)pid, (int)tid);
	return access(path, F_OK) == 0;
}

static void notice(struct watch *watch)
{
	struct seccomp_notif asked = {0};
	struct seccomp_notif_resp answer = {0};
	char text[TEXT_BYTES];

	if (ioctl(watch->listener, SECCOMP_IOCTL_NOTIF_RECV, &asked) < 0)
		return; /* its thread has ended, or was interrupted */
	if (is_thread(watch->watched.pid, (pid_t)asked.pid)) {
		struct call call = {.nr = asked.data.nr, .tid = (pid_t)asked.pid};

		for (unsigned int i = 0; i < 6; i++)
			call.args[i] = asked.data.args[i];
		if (rules_judge(&watch->watched, &call, text))
			finding_tell(watch, call.tid, text);
	}
	answer.id = asked.id;
	answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
	(void)ioctl(watch->listener, SECCOMP_IOCTL_NOTIF_SEND, &answer);
}

/* Its processes may outlive the program: they would be refused their calls if nobody
 * answered. The report ends with the program. */
static void watch_run(struct watch *watch)
{
	struct pollfd watched[] = {{.fd = watch->listener, .events = POLLIN},
				   {.fd = watch->watched.pidfd, .events = POLLIN}};

	for (;;) {
		if (poll(watched, 2, -1) < 0)
			continue;
		if (watched[0].revents & POLLIN)
			notice(watch);
		else if (watched[0].revents)
			return;
		if (watched[1].revents) {
			mem_closep(&watch->report);
			watched[1].fd = -1;
		}
	}
}

static _Noreturn void watcher_run(struct watch *watch, struct shared *shared)
{
	struct pollfd program = {.fd = watch->watched.pidfd, .events = POLLIN};
	sigset_t all;

	setsid();
	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, NULL);
	while (!atomic_load(&shared->listener)) {
		if (poll(&program, 1, 0) != 0) /* it died before it had one */
			_exit(1);
		sched_yield();
	}
	watch->listener = (int)syscall(SYS_pidfd_getfd, watch->watched.pidfd,
				       atomic_load(&shared->listener), 0);
	atomic_store(&shared->taken, watch->listener < 0 ? -1 : 1);
	if (watch->listener < 0)
		_exit(1);
	for (int fd = 3; fd < 1024; fd++)
		if (fd != watch->report && fd != watch->listener &&
		    fd != watch->watched.pidfd)
			close(fd);
	close(0);
	close(1);
	if (watch->report != 2)
		close(2);
	watch_run(watch);
	_exit(0);
}

/* Of this process, but not its child: what it runs sees its own children only. */
static void watcher_start(struct watch *watch, struct shared *shared)
{
	pid_t child = fork();

	if (child == 0) {
		if (fork() == 0)
			watcher_run(watch, shared);
		_exit(0);
	}
	(void)waitpid(child, NULL, 0);
}

static void refuse_to(const char *what)
{
	fprintf(stderr, "still: %s: %s\n", what, strerror(errno));
	exit(SKIPPED);
}

/* As /proc has it. */
static pid_t self_number(void)
{
	char text[16] = "";

	return readlink("/proc/self", text, sizeof(text) - 1) > 0 ? atoi(text) : 0;
}

static char **args_take(char **argv, struct watch *watch)
{
	for (argv++; *argv && strncmp(*argv, "--", 2) == 0 && argv[1]; argv += 2) {
		if (strcmp(*argv, "--report") == 0)
			watch->report = atoi(argv[1]);
		else if (watch->watched.own_count < OWN_MAX)
			watch->watched.own[watch->watched.own_count++] = argv[1];
	}
	return argv;
}

int main(int argc, char **argv)
{
	static struct watch watch = {.report = 2};
	struct shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
				     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	char **program = args_take(argv, &watch);
	int listener;

	if (argc < 2 || !*program || shared == MAP_FAILED)
		return 2;
	watch.program = *program;
	if (watch.report > 2)
		(void)fcntl(watch.report, F_SETFD, FD_CLOEXEC);
	watch.watched.pid = getpid();
	watch.watched.pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
	if (!is_thread(getpid(), getpid()) || self_number() != getpid()) {
		fprintf(stderr, "<6>still: /proc is of another PID namespace: nothing is "
				"judged\n");
		execv(*program, program);
		refuse_to(*program);
	}
	(void)prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
	watcher_start(&watch, shared);
	listener = filter_install();
	atomic_store(&shared->listener, listener < 0 ? -1 : listener);
	if (listener < 0)
		refuse_to("seccomp's user notification");
	while (!atomic_load(&shared->taken))
		sched_yield();
	if (atomic_load(&shared->taken) < 0)
		refuse_to("a descriptor of its own process (ptrace)");
	execv(*program, program);
	refuse_to(*program);
}
