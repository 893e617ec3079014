/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The main process's calls are its own and those of its libraries and drivers: libc,
 * libev, ZeroMQ, UCX, rdma-core, CUDA, libmicrohttpd, on every architecture, hence also
 * calls that one of them has and another has not. Not needed, and not listed here: other
 * programs (execve) and processes (fork, kill, ptrace, process_vm_*), namespaces, mounts,
 * users, modules, bpf, perf, keyrings, io_uring, userfaultfd, SysV IPC,
 * clocks; devices, owners and attributes of files. The unit's SystemCallFilter= has all
 * that is here, too (tests/integration/test_sandbox.py).
 *
 * Calls of the hot path have no condition on their arguments: for such a call the
 * kernel does not run the filter at all (Linux 5.11, its bitmap of allowed calls).
 */
#include "daemon/gate/sandbox_calls.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include "daemon/base/mem.h"

#define M (1u << SANDBOX_MAIN)
#define W (1u << SANDBOX_WARDEN)
#define G (1u << SANDBOX_GATE)
#define V (1u << SANDBOX_VM)
#define O (1u << SANDBOX_OPEN)
#define ALL (M | W | G | V | O)

#define NAMESPACES                                                                     \
	(CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | \
	 CLONE_NEWPID | CLONE_NEWNET)
#define THREAD (CLONE_VM | CLONE_THREAD | CLONE_SIGHAND)
#define PR_NAME_OF_MAPPING 0x53564d41 /* PR_SET_VMA */

#define ANY false, SCMP_CMP(0, SCMP_CMP_GE, 0, 0)
#define WHERE(n, bits, value) true, SCMP_CMP(n, SCMP_CMP_MASKED_EQ, bits, value)
/* of an int: the kernel takes the low half */
#define WHERE_INT(n, value) WHERE(n, UINT32_MAX, value)

const struct sandbox_call sandbox_calls[] = {
	/* ends, signals, time */
	{ALL, "exit exit_group restart_syscall rt_sigreturn", ANY},
	{M | W, "rt_sigprocmask", ANY},
	{M,
	 "rt_sigaction rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack "
	 "clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times",
	 ANY},

	/* threads, and no process. clone3, whose flags lie in memory, is refused by
	 * another filter (sandbox.c). */
	{M, "clone", WHERE(0, NAMESPACES | THREAD, THREAD)},
	{M, "clone3", ANY},
	{M | W, "futex set_robust_list rseq set_tid_address gettid getpid", ANY},
	{M,
	 "get_robust_list membarrier arch_prctl getcpu sched_yield sched_getaffinity "
	 "sched_setaffinity sched_getattr sched_setattr sched_getparam "
	 "sched_getscheduler sched_setscheduler sched_get_priority_max "
	 "sched_get_priority_min getpriority",
	 ANY},
	{M | W, "prctl", WHERE_INT(0, PR_SET_NAME)},
	{M, "prctl", WHERE_INT(0, PR_GET_NAME)},
	{M, "prctl", WHERE_INT(0, PR_SET_TIMERSLACK)},
	{M, "prctl", WHERE_INT(0, PR_GET_DUMPABLE)},
	{M, "prctl", WHERE_INT(0, PR_CAPBSET_READ)},
	{M, "prctl", WHERE_INT(0, PR_NAME_OF_MAPPING)},

	/* the warden: forks, kills and waits; its children give up more */
	{W, "clone", WHERE(0, NAMESPACES, 0)},
	{W, "kill", WHERE_INT(1, SIGKILL)},
	{W, "wait4 waitid seccomp landlock_create_ruleset landlock_restrict_self", ANY},
	{M | W, "close_range", ANY},

	/* memory */
	{M | V, "mmap mmap2", ANY},
	{M,
	 "brk munmap mremap mprotect madvise msync mlock mlock2 munlock memfd_create "
	 "get_mempolicy set_mempolicy move_pages",
	 ANY},

	/* queries about the machine and the process */
	{M,
	 "getrandom uname sysinfo getrusage getrlimit ugetrlimit getuid geteuid getgid "
	 "getegid getresuid getresgid getgroups getppid getpgrp getpgid getsid capget "
	 "kcmp pidfd_open",
	 ANY},
	{M, "prlimit64", WHERE_INT(0, 0)},

	/* descriptors. fstat() is newfstatat() or statx() in some versions of libc */
	{ALL, "close", ANY},
	{M | W, "read", ANY},
	{M | G | V, "pread64", ANY},
	{M | V, "pwrite64", ANY},
	{M | G,
	 "fcntl fcntl64 fstat fstat64 fstatfs fstatfs64 newfstatat fstatat64 statx "
	 "readlink readlinkat",
	 ANY},
	{M,
	 "readv preadv preadv2 write writev pwritev pwritev2 dup dup2 dup3 flock lseek "
	 "_llseek ioctl ftruncate ftruncate64 fallocate fsync fdatasync getdents "
	 "getdents64 sendfile sendfile64 pipe pipe2",
	 ANY},

	/* files by name */
	{M | O, "open openat", ANY},
	{M,
	 "openat2 stat stat64 lstat lstat64 statfs statfs64 access faccessat "
	 "faccessat2 getcwd umask mkdir mkdirat rmdir unlink unlinkat rename renameat "
	 "renameat2 fchmod",
	 ANY},

	/* events */
	{M | W, "poll ppoll", ANY},
	{M,
	 "epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 "
	 "select pselect6 eventfd eventfd2 signalfd4 timerfd_create timerfd_settime "
	 "timerfd_gettime",
	 ANY},

	/* sockets. Netlink lists interfaces and RDMA devices. */
	{M, "socket", WHERE_INT(0, AF_UNIX)},
	{M, "socket", WHERE_INT(0, AF_INET)},
	{M, "socket", WHERE_INT(0, AF_INET6)},
	{M, "socket", WHERE_INT(0, AF_NETLINK)},
	{ALL, "recvmsg", ANY},
	{M | G | V | O, "sendmsg", ANY},
	{M | G, "recv recvfrom", ANY},
	{M | W, "send sendto", ANY},
	{M,
	 "socketpair bind listen accept accept4 connect shutdown getsockname getpeername "
	 "getsockopt setsockopt sendmmsg recvmmsg",
	 ANY},
};

const size_t sandbox_calls_count = ARRAY_LEN(sandbox_calls);
