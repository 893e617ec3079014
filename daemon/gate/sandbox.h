/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sandbox: privileges that the daemon's processes drop permanently, so that a compromised
 * one can do no more than its work: system calls that it does not need (seccomp), and
 * files (Landlock).
 *
 * A process of the gate that makes another call is killed, which its owner handles like
 * any other exit. In the main process, where libraries and drivers run, such a call fails
 * with ENOSYS, as on a kernel that does not have it; the kernel's log names it
 * (type=1326).
 */
#ifndef KVD_GATE_SANDBOX_H
#define KVD_GATE_SANDBOX_H

#include <stdbool.h>

enum sandbox_kind {
	SANDBOX_MAIN,	/* all of its threads, once everything is loaded and opened */
	SANDBOX_WARDEN, /* and with it those below, which are more restricted */
	SANDBOX_GATE,
	SANDBOX_VM,
	SANDBOX_OPEN,
};

/*
 * Before the first fork and the first thread: makes the filters. `wanted` false, or a
 * kernel without seccomp: nothing is restricted, sandbox_lacks() gives the reason.
 */
int sandbox_prepare(bool wanted);
/* The main process, behind the warden's fork and before its first thread: it may change
 * only files in these directories (NULL at the end; missing ones are skipped), shared
 * memory and devices of NICs and GPUs. It can no longer open the memory of other
 * processes. */
int sandbox_files(const char *const *directories);
/* Not for this process, with the reason: sandbox_lacks(). */
void sandbox_no_files(const char *why);
/* Is this process one of those that cannot open the memory of others? */
bool sandbox_hides_processes(void);
/* Permanent. -1: errno; the process must not continue. 0 if there is nothing to
 * restrict. */
int sandbox_enter(enum sandbox_kind kind);
/* The restrictions in force: "seccomp landlock", one of them, "" for none. */
const char *sandbox_words(void);
/* Why a restriction is missing; "" if none is. */
const char *sandbox_lacks(void);

#endif
