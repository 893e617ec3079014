/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The filters are compiled once, before the first fork, by libseccomp, and loaded by the
 * kernel's own call: a child then needs no memory, file or other call to drop the rest.
 *
 * They stack: a call must pass the filter of each ancestor, too. So the warden's allows
 * the calls of its children.
 */
#include "daemon/gate/sandbox.h"

#include <errno.h>
#include <glob.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/gate/landlock.h"
#include "daemon/gate/sandbox_calls.h"

/* Sanitizers make additional calls: leaks are searched by a process that traces this
 * one. */
#ifdef __has_feature
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || \
	__has_feature(memory_sanitizer)
#define WITH_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define WITH_SANITIZER 1
#endif
#ifndef WITH_SANITIZER
#define WITH_SANITIZER 0
#endif

#define DEVICES_MAX 64u /* nodes in /dev */
#define KINDS (SANDBOX_OPEN + 1)

static struct {
	struct sock_fprog filters[KINDS];
	struct sock_fprog quiet; /* calls refused to the main process without a log
				  * line */
	bool seccomp;
	bool landlock; /* there is: gates are in it */
	bool files;    /* so is this process */
	char lacks[96];
} sandbox = {.lacks = "not started"};

/* ---- filters ---- */

static int filter_allow(scmp_filter_ctx filter, const struct sandbox_call *call)
{
	char name[32];
	int r = 0;

	for (const char *at = call->names; r == 0 && *at; at += strspn(at, " ")) {
		size_t len = strcspn(at, " ");
		int number;

		snprintf(name, sizeof(name), "%.*s", (int)len, at);
		number = seccomp_syscall_resolve_name(name);
		if (number >= 0)
			r = seccomp_rule_add_array(filter, SCMP_ACT_ALLOW, number,
						   call->asked, &call->where);
		at += len;
	}
	return r;
}

static int filter_fill(scmp_filter_ctx filter, enum sandbox_kind kind)
{
	/* bits of processes with calls that pass the filter of `kind` */
	unsigned int kinds = kind != SANDBOX_WARDEN
				     ? 1u << kind
				     : 1u << SANDBOX_WARDEN | 1u << SANDBOX_GATE |
					       1u << SANDBOX_VM | 1u << SANDBOX_OPEN;
	int r = 0;

	for (size_t i = 0; r == 0 && i < sandbox_calls_count; i++)
		if (sandbox_calls[i].kinds & kinds)
			r = filter_allow(filter, &sandbox_calls[i]);
	if (r == 0 && kind == SANDBOX_MAIN) /* raise(), abort(): itself only */
		r = seccomp_rule_add(filter, SCMP_ACT_ALLOW, SCMP_SYS(tgkill), 1,
				     SCMP_A0(SCMP_CMP_EQ, (scmp_datum_t)getpid(), 0));
	return r;
}

/* libseccomp writes to a descriptor only. */
static int filter_take(scmp_filter_ctx filter, struct sock_fprog *program_p)
{
	cleanup_close int fd = memfd_create("kvd-filter", MFD_CLOEXEC);
	struct stat st;
	void *code;

	if (fd < 0 || seccomp_export_bpf(filter, fd) < 0 || fstat(fd, &st) < 0)
		return err_raise(ERR_NOMEM, "creating a seccomp filter");
	code = mem_zalloc((size_t)st.st_size);
	if (!code)
		return err_pass(-ENOMEM);
	if (pread(fd, code, (size_t)st.st_size, 0) != st.st_size) {
		mem_free(code);
		return err_raise(ERR_IO, "reading back a seccomp filter");
	}
	program_p->filter = code;
	program_p->len =
		(unsigned short)((size_t)st.st_size / sizeof(struct sock_filter));
	return 0;
}

static int filter_done(scmp_filter_ctx filter, int r, struct sock_fprog *program_p)
{
	r = r < 0 ? err_raise(ERR_NOMEM, "creating a seccomp filter: %s", strerror(-r))
		  : filter_take(filter, program_p);
	seccomp_release(filter);
	return r;
}

/*
 * libc asks for clone3 at each thread, and falls back to clone(), whose flags a filter
 * can see. By TIOCSTI a daemon that was started at a terminal would type there.
 */
static int filter_make_quiet(void)
{
	scmp_filter_ctx filter = seccomp_init(SCMP_ACT_ALLOW);
	int r = filter ? 0 : -ENOMEM;

	if (r == 0)
		r = seccomp_rule_add(filter, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3), 0);
	if (r == 0)
		r = seccomp_rule_add(filter, SCMP_ACT_ERRNO(EPERM), SCMP_SYS(ioctl), 1,
				     SCMP_A1(SCMP_CMP_MASKED_EQ, UINT32_MAX, TIOCSTI));
	return filter_done(filter, r, &sandbox.quiet);
}

static int filter_make(enum sandbox_kind kind)
{
	uint32_t otherwise =
		kind == SANDBOX_MAIN ? SCMP_ACT_ERRNO(ENOSYS) : SCMP_ACT_KILL_PROCESS;
	scmp_filter_ctx filter = seccomp_init(otherwise);
	int r = filter ? 0 : -ENOMEM;

	if (r == 0)
		r = seccomp_attr_set(filter, SCMP_FLTATR_ACT_BADARCH,
				     SCMP_ACT_KILL_PROCESS);
	if (r == 0) /* a search, in the place of a row of comparisons */
		r = seccomp_attr_set(filter, SCMP_FLTATR_CTL_OPTIMIZE, 2);
	if (r == 0)
		r = filter_fill(filter, kind);
	return filter_done(filter, r, &sandbox.filters[kind]);
}

/* ---- interface ---- */

/* The kernel lacks it, or the container forbids it. */
static bool kernel_filters(void)
{
	uint32_t action = SECCOMP_RET_KILL_PROCESS;

	return syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) == 0 &&
	       prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0;
}

int sandbox_prepare(bool wanted)
{
	int r = 0;

	if (WITH_SANITIZER || !wanted) {
		snprintf(sandbox.lacks, sizeof(sandbox.lacks), "%s",
			 wanted ? "built with a sanitizer" : "sandbox = no");
		return 0;
	}
	if (!kernel_filters()) {
		snprintf(sandbox.lacks, sizeof(sandbox.lacks), "no seccomp: %s",
			 strerror(errno));
		return 0;
	}
	r = filter_make_quiet();
	for (int kind = 0; r == 0 && kind < KINDS; kind++)
		r = filter_make((enum sandbox_kind)kind);
	sandbox.seccomp = r == 0;
	sandbox.landlock = r == 0 && landlock_version() > 0;
	snprintf(sandbox.lacks, sizeof(sandbox.lacks), "%s",
		 sandbox.landlock ? "" : "no Landlock in this kernel or container");
	return r;
}

void sandbox_no_files(const char *why)
{
	if (sandbox.landlock)
		snprintf(sandbox.lacks, sizeof(sandbox.lacks), "%s", why);
}

int sandbox_files(const char *const *directories)
{
	static const char *const fixed[] = {"/dev/null", "/dev/zero", "/dev/infiniband",
					    "/dev/gdrdrv"};
	const char *devices[DEVICES_MAX + 1] = {NULL};
	glob_t found = {.gl_pathc = 0};
	size_t count = 0;
	int r;

	if (!sandbox.landlock)
		return 0;
	for (; count < ARRAY_LEN(fixed); count++)
		devices[count] = fixed[count];
	if (glob("/dev/nvidia*", GLOB_NOSORT, NULL, &found) == 0)
		for (size_t i = 0; i < found.gl_pathc && count < DEVICES_MAX; i++)
			devices[count++] = found.gl_pathv[i];
	r = landlock_no_change(directories, devices);
	sandbox.files = r == 0;
	if (r < 0)
		r = err_raise_errno(
			errno,
			"restricting file access (Landlock); sandbox = no disables it");
	globfree(&found);
	return r;
}

/* SPEC_ALLOW: no foreign code runs here that could read the rest of the process by
 * speculation; before Linux 5.16 a filter slows all loads and stores down against that.
 */
static int filter_load(const struct sock_fprog *program, unsigned int flags)
{
	long r = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
			 flags | SECCOMP_FILTER_FLAG_SPEC_ALLOW, program);

	if (r > 0) /* each thread has its own filter */
		errno = EBUSY;
	return r == 0 ? 0 : -1;
}

int sandbox_enter(enum sandbox_kind kind)
{
	const struct sock_fprog *program = &sandbox.filters[kind];
	unsigned int all = SECCOMP_FILTER_FLAG_TSYNC; /* threads */

	if (!sandbox.seccomp)
		return 0;
	if (sandbox.landlock && (kind == SANDBOX_GATE || kind == SANDBOX_VM) &&
	    landlock_nothing() < 0)
		return -1;
	if (kind != SANDBOX_MAIN)
		return filter_load(program, 0);
	if (filter_load(&sandbox.quiet, all) < 0)
		return -1;
	return filter_load(program, all | SECCOMP_FILTER_FLAG_LOG);
}

bool sandbox_hides_processes(void)
{
	return sandbox.files;
}

const char *sandbox_words(void)
{
	return sandbox.files ? "seccomp landlock" : sandbox.seccomp ? "seccomp" : "";
}

const char *sandbox_lacks(void)
{
	return sandbox.lacks;
}
