/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sandbox: what the daemon's processes give up for good, so that one that is taken over
 * can do no more than its work: system calls that it does not need (seccomp), and files
 * (Landlock).
 *
 * A process of the gate that makes another call is killed, which its owner sees as any
 * other end. In the main process, where libraries and drivers run, such a call fails with
 * ENOSYS, as on a kernel that does not have it; the kernel's log names it (type=1326).
 */
#ifndef KVD_GATE_SANDBOX_H
#define KVD_GATE_SANDBOX_H

#include <stdbool.h>
#include <sys/types.h>

enum sandbox_kind {
	SANDBOX_MAIN,	/* all of its threads, once all is loaded and opened */
	SANDBOX_WARDEN, /* and with it those below, which give up more */
	SANDBOX_GATE,
	SANDBOX_VM,
	SANDBOX_OPEN,
};

/*
 * Before the first fork and the first thread: makes the filters. `wanted` false, or a
 * kernel without seccomp: nothing is given up, sandbox_lacks() says so.
 */
int sandbox_prepare(bool wanted);
/* The main process, behind the warden's fork and before its first thread: of files it may
 * change only what lies in these directories (NULL at the end; one that is not there is
 * passed over), shared memory and devices of NICs and GPUs. Memory of processes that are
 * not its own it opens no more. */
int sandbox_files(const char *const *directories);
/* Not for this process, and why: sandbox_lacks(). */
void sandbox_no_files(const char *why);
/* Is this process one of those that cannot open the memory of others? */
bool sandbox_hides_processes(void);
/* For good. -1: errno; the process must not go on. 0 if there is nothing to give up. */
int sandbox_enter(enum sandbox_kind kind);
/* What is in force: "seccomp landlock", one of them, "" for none. */
const char *sandbox_words(void);
/* Why that is not all; "" if it is. */
const char *sandbox_lacks(void);

#endif
