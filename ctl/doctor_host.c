/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks of the host and of the daemon's process, by /proc and /sys. Limits and rights
 * are read from the daemon's process, not from this one.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "ctl/doctor.h"

#define NOFILE_LEAST 4096
#define CAP_IPC_LOCK 14
#define SHM_LEAST (UINT64_C(1) << 30)

/* The soft limit in a line of /proc/PID/limits; -1: unlimited, -2: no such line. */
static long long limit_of(const char *limits, const char *name)
{
	const char *at = strstr(limits, name);
	long long value;

	if (!at)
		return -2;
	at += strlen(name);
	at += strspn(at, " ");
	return sscanf(at, "%lld", &value) == 1 ? value : -1;
}

static unsigned long long status_hex(const char *status, const char *name)
{
	const char *at = strstr(status, name);

	return at ? strtoull(at + strlen(name), NULL, 16) : 0;
}

void doctor_limits(struct doctor *d)
{
	char limits[4096], status[4096];
	long long memory, files;
	bool locks, few;

	if (!d->pid ||
	    !doctor_read(d, limits, sizeof(limits), "/proc/%d/limits", d->pid) ||
	    !doctor_read(d, status, sizeof(status), "/proc/%d/status", d->pid))
		return;
	memory = limit_of(limits, "Max locked memory");
	files = limit_of(limits, "Max open files");
	locks = memory == -1 || status_hex(status, "\nCapEff:") >> CAP_IPC_LOCK & 1;
	few = files >= 0 && files < NOFILE_LEAST;
	if (!locks && doctor_has_transport(d, "verbs"))
		doctor_say(d, DOCTOR_FAIL, "LimitMEMLOCK=infinity",
			   "RLIMIT_MEMLOCK is %s: adapters cannot pin engines' memory",
			   ctl_bytes((double)memory));
	if (few)
		doctor_say(d, DOCTOR_WARN, "LimitNOFILE=65536",
			   "RLIMIT_NOFILE is %lld: each region, engine and stream needs "
			   "a descriptor",
			   files);
	if (!few && (locks || !doctor_has_transport(d, "verbs")))
		doctor_say(d, DOCTOR_OK, "", "RLIMIT_NOFILE %lld, RLIMIT_MEMLOCK %s",
			   files, memory < 0 ? "unlimited" : ctl_bytes((double)memory));
}

/* ---- rights ---- */

/* The name of a client of another user that registered plain memory; NULL: none. */
static const char *foreign_vm(const struct doctor *d, unsigned int *foreign_p)
{
	const cJSON *session, *region;
	const char *found = NULL;

	cJSON_ArrayForEach(session, ctl_list(d->sessions, "sessions")) {
		if (ctl_true(session, "own") || d->uid < 0 ||
		    (long)ctl_num(session, "uid") == d->uid)
			continue;
		++*foreign_p;
		cJSON_ArrayForEach(region, ctl_list(d->regions, "regions")) {
			if (ctl_num(region, "session") == ctl_num(session, "session") &&
			    strcmp(ctl_str(region, "kind", ""), "vm") == 0)
				found = ctl_str(session, "client", "?");
		}
	}
	return found;
}

void doctor_rights(struct doctor *d)
{
	unsigned long long caps, seccomp;
	unsigned int foreign = 0;
	const char *vm;
	char status[4096];

	if (!d->pid || !doctor_read(d, status, sizeof(status), "/proc/%d/status", d->pid))
		return;
	caps = status_hex(status, "\nCapEff:");
	seccomp = status_hex(status, "\nSeccomp:");
	vm = foreign_vm(d, &foreign);
	if (d->uid == 0)
		doctor_say(d, DOCTOR_WARN, "use kvd@.service or another user",
			   "the daemon runs as root: a compromise would affect the host");
	else if (caps)
		doctor_say(d, DOCTOR_WARN, "CapabilityBoundingSet= as in kvd@.service",
			   "the daemon has unneeded capabilities (%llx)", caps);
	if (vm)
		doctor_say(d, DOCTOR_WARN,
			   "use a memfd: kvd_memory_alloc() or kvd_adopt()",
			   "engine '%s' of another user registered plain memory (vm): "
			   "each row takes a system call",
			   vm);
	if (d->uid != 0 && !caps && !vm)
		doctor_say(d, DOCTOR_OK, "",
			   "uid %ld without capabilities, %s; %s of other users", d->uid,
			   seccomp == 2 ? "seccomp filter" : "no seccomp filter",
			   ctl_count(foreign, "engine"));
}

/* "pid:[4026531836]"; "" if not readable. */
static void namespace_of(const struct doctor *d, int pid, const char *kind, char text[64])
{
	char path[500];
	ssize_t n;

	snprintf(path, sizeof(path), "%s/proc/%d/ns/%s", d->root, pid, kind);
	n = readlink(path, text, 63);
	text[n < 0 ? 0 : n] = '\0';
}

static bool shares_namespaces(const struct doctor *d, int pid)
{
	static const char *const kinds[] = {"pid", "ipc"};
	char ours[64], theirs[64];

	for (unsigned int i = 0; i < 2; i++) {
		namespace_of(d, d->pid, kinds[i], ours);
		namespace_of(d, pid, kinds[i], theirs);
		if (*ours && *theirs && strcmp(ours, theirs) != 0)
			return false;
	}
	return true;
}

/* CUDA IPC handles are valid within a PID and IPC namespace only. */
void doctor_namespaces(struct doctor *d)
{
	bool gpus = doctor_exists(d, "/proc/driver/nvidia/version");
	unsigned int apart = 0, all = 0;
	const char *who = "";
	const cJSON *one;

	if (!d->pid || !d->sessions)
		return;
	cJSON_ArrayForEach(one, ctl_list(d->sessions, "sessions")) {
		int pid = (int)ctl_num(one, "pid");

		if (ctl_true(one, "own") || pid == d->pid) /* kvd-ctl or the daemon */
			continue;
		all++;
		if (pid && shares_namespaces(d, pid))
			continue;
		apart++;
		who = ctl_str(one, "client", "?");
	}
	if (apart)
		doctor_say(d, gpus ? DOCTOR_WARN : DOCTOR_OK,
			   gpus ? "use --pid=host --ipc=host, or a pod with shared "
				  "namespaces"
				: "",
			   "%s ('%s') in other PID or IPC namespaces: memfd works, GPU "
			   "memory does not",
			   ctl_count(apart, "engine"), who);
	else if (all)
		doctor_say(d, DOCTOR_OK, "", "%s in the daemon's namespaces",
			   ctl_count(all, "engine"));
}

/* ---- kernel and memory ---- */

void doctor_kernel(struct doctor *d)
{
	unsigned int major = 0, minor = 0;
	char release[128];
	bool old, no_collapse;

	if (!doctor_read(d, release, sizeof(release), "/proc/sys/kernel/osrelease") ||
	    sscanf(release, "%u.%u", &major, &minor) != 2)
		return;
	old = major < 5 || (major == 5 && minor < 14);
	no_collapse = major < 6 || (major == 6 && minor < 1);
	doctor_say(d,
		   old		 ? DOCTOR_FAIL
		   : no_collapse ? DOCTOR_WARN
				 : DOCTOR_OK,
		   old		 ? "use Linux 5.14 or later"
		   : no_collapse ? "use Linux 6.1 or later for huge pages on request"
				 : "",
		   "Linux %s", release);
}

void doctor_huge_pages(struct doctor *d)
{
	const char *dir = "/sys/kernel/mm/transparent_hugepage";
	char words[128];

	if (!doctor_read(d, words, sizeof(words), "%s/shmem_enabled", dir))
		doctor_say(d, DOCTOR_WARN,
			   "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
			   "none for shared memory: memfds use small pages");
	else if (strstr(words, "[deny]"))
		doctor_say(d, DOCTOR_WARN,
			   "echo advise > /sys/kernel/mm/transparent_hugepage/"
			   "shmem_enabled",
			   "shmem_enabled is deny: memfds use small pages");
	else
		doctor_say(d, DOCTOR_OK, "", "shmem_enabled: %s", words);
}

void doctor_shm(struct doctor *d)
{
	char path[500];
	struct statvfs fs;
	uint64_t size, left;

	snprintf(path, sizeof(path), "%s/dev/shm", d->root);
	if (statvfs(path, &fs) < 0) {
		doctor_say(d, DOCTOR_WARN, "mount -t tmpfs tmpfs /dev/shm",
			   "/dev/shm: %m: memory of kind shm is not available");
		return;
	}
	size = (uint64_t)fs.f_frsize * fs.f_blocks;
	left = (uint64_t)fs.f_frsize * fs.f_bavail;
	if (size < SHM_LEAST)
		doctor_say(d, DOCTOR_WARN,
			   "raise --shm-size=, or use an emptyDir of medium Memory",
			   "/dev/shm has %s: too small for caches of kind shm",
			   ctl_bytes((double)size));
	else if (left < size / 20)
		doctor_say(d, DOCTOR_WARN,
			   "check the owners of the files: ls -l /dev/shm",
			   "/dev/shm is full: %s of %s free", ctl_bytes((double)left),
			   ctl_bytes((double)size));
	else
		doctor_say(d, DOCTOR_OK, "", "/dev/shm: %s of %s free",
			   ctl_bytes((double)left), ctl_bytes((double)size));
}

void doctor_userfaultfd(struct doctor *d)
{
	bool device = doctor_exists(d, "/dev/userfaultfd");
	char allowed[16];

	if (!doctor_read(d, allowed, sizeof(allowed),
			 "/proc/sys/vm/unprivileged_userfaultfd"))
		doctor_say(d, DOCTOR_WARN, "use a kernel with CONFIG_USERFAULTFD",
			   "not available: memory can be adopted only while nothing "
			   "writes to it");
	else if (strcmp(allowed, "0") == 0 && !device)
		doctor_say(d, DOCTOR_WARN, "sysctl vm.unprivileged_userfaultfd=1",
			   "restricted to root: while an engine's memory is adopted, its "
			   "read() into it fails");
	else
		doctor_say(d, DOCTOR_OK, "", "vm.unprivileged_userfaultfd = %s%s",
			   allowed, device ? ", /dev/userfaultfd" : "");
}
