/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Other processes. In a bundle nothing of the machine's libraries may be used, so
 * programs are started by the bundle's own loader: KVD_BUNDLE names its folder.
 */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/gpu/works/works.h"
#include "tests/lib/tmp.h"

/* In a child: `program` of ours, with `args` behind its name. */
static noreturn void run(const char *program, const char *const *args)
{
	const char *bundle = getenv("KVD_BUNDLE"), *libraries = getenv("KVD_BUNDLE_PATH");
	const char *argv[16];
	char self[4096] = "", path[4200], loader[4200];
	unsigned int n = 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (!bundle) {
		if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0)
			_exit(126);
		*strrchr(self, '/') = '\0';
	}
	snprintf(path, sizeof(path), "%s/%s", bundle ? bundle : self, program);
	if (bundle) {
		snprintf(loader, sizeof(loader), "%s/lib/ld.so", bundle);
		argv[n++] = loader;
		argv[n++] = "--library-path";
		argv[n++] = libraries;
	}
	argv[n++] = path;
	while (*args && n + 1 < sizeof(argv) / sizeof(argv[0]))
		argv[n++] = *args++;
	argv[n] = NULL;
	execv(argv[0], (char *const *)argv);
	_exit(127);
}

static void config_write(const char *path, const struct rig *rig, unsigned int index,
			 const char *transports)
{
	FILE *config = fopen(path, "we");

	if (!config)
		die("%s: %s", path, strerror(errno));
	/* a busy machine is no dead peer: this is not about peers */
	fprintf(config,
		"[daemon]\nname = d%u\nrun_dir = %s\nlog_level = warn\n"
		"[peer]\ndead_after = 20 s\n"
		"[transport]\ntransports = %s\ncuda_library = %s\n%s",
		index, rig->dir, transports, cuda_library(), rig->more ? rig->more : "");
	fclose(config);
}

static void daemon_start(struct rig *rig, unsigned int index, const char *transports)
{
	char config[160], log[160], control[160];
	const char *const args[] = {"--config", config, NULL};
	int fd;

	snprintf(config, sizeof(config), "%s/d%u.conf", rig->dir, index);
	snprintf(log, sizeof(log), "%s/d%u.log", rig->dir, index);
	config_write(config, rig, index, transports);
	rig->pids[index] = fork();
	if (rig->pids[index] < 0)
		die("fork: %s", strerror(errno));
	if (rig->pids[index])
		return;
	fd = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0)
		_exit(126);
	snprintf(control, sizeof(control), "%s/d%u.fake", rig->dir, index);
	if (access(control, F_OK) == 0)
		setenv("FAKE_CUDA_CONTROL", control, 1);
	run("kvd", args);
}

void rig_folder(struct rig *rig)
{
	if (!mkdtemp(tmp_path(rig->dir, sizeof(rig->dir), "kvd-works-XXXXXX")))
		die("%s: %s", rig->dir, strerror(errno));
}

void rig_start(struct rig *rig, unsigned int count, const char *transports)
{
	if (!rig->dir[0])
		rig_folder(rig);
	for (unsigned int i = 0; i < count; i++)
		daemon_start(rig, i, transports);
}

void rig_socket(const struct rig *rig, unsigned int index, char socket[128])
{
	snprintf(socket, 128, "%s/d%u.sock", rig->dir, index);
}

static int on_file(const char *path, const struct stat *st, int type, struct FTW *at)
{
	(void)st;
	(void)type;
	(void)at;
	return remove(path);
}

static bool log_show(const struct rig *rig, unsigned int index)
{
	char path[160], line[400];
	bool some = false;
	FILE *log;

	snprintf(path, sizeof(path), "%s/d%u.log", rig->dir, index);
	log = fopen(path, "re");
	while (log && fgets(line, sizeof(line), log)) {
		printf("    kvd %u: %s", index, line);
		some = true;
	}
	if (log)
		fclose(log);
	return some;
}

void rig_logs(const struct rig *rig)
{
	for (unsigned int i = 0; i < RIG_DAEMONS; i++)
		if (rig->pids[i])
			(void)log_show(rig, i);
}

void rig_stop(struct rig *rig)
{
	int status = 0;

	for (unsigned int i = 0; i < RIG_DAEMONS; i++) {
		if (!rig->pids[i])
			continue;
		kill(rig->pids[i], SIGTERM);
		if (waitpid(rig->pids[i], &status, 0) != rig->pids[i] || status) {
			log_show(rig, i);
			die("daemon %u ended with status %#x", i, status);
		}
		if (!rig->quiet)
			(void)log_show(rig, i);
	}
	(void)nftw(rig->dir, on_file, 8, FTW_DEPTH | FTW_PHYS);
}

/* ---- helpers ---- */

void helper_start(struct helper *helper, const char *role, const char *word,
		  const char *more)
{
	const char *const args[] = {"--role", role, word ? word : "", more ? more : "",
				    NULL};
	int to[2], from[2];

	if (pipe2(to, O_CLOEXEC) < 0 || pipe2(from, O_CLOEXEC) < 0)
		die("pipe: %s", strerror(errno));
	helper->pid = fork();
	if (helper->pid < 0)
		die("fork: %s", strerror(errno));
	if (!helper->pid) {
		if (dup2(to[0], 0) < 0 || dup2(from[1], 1) < 0)
			_exit(126);
		run("gpu-works", args);
	}
	close(to[0]);
	close(from[1]);
	helper->to = to[1];
	helper->from = from[0];
}

void helper_hear(struct helper *helper, void *data, size_t bytes)
{
	struct pollfd ready = {.fd = helper->from, .events = POLLIN};

	for (size_t at = 0; at < bytes;) {
		ssize_t n = -1;

		if (poll(&ready, 1, WAIT_MS) == 1)
			n = read(helper->from, (char *)data + at, bytes - at);
		if (n <= 0)
			die("the helper %s", n ? "is silent" : "has ended");
		at += (size_t)n;
	}
}

void helper_tell(struct helper *helper, char what)
{
	char done = 0;

	if (write(helper->to, &what, 1) != 1)
		die("the helper has ended");
	helper_hear(helper, &done, 1);
	if (done != what)
		die("the helper says %c to %c", done, what);
}

void helper_kill(struct helper *helper)
{
	kill(helper->pid, SIGKILL);
	waitpid(helper->pid, NULL, 0);
	close(helper->to);
	close(helper->from);
}
