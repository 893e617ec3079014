/* SPDX-License-Identifier: Apache-2.0 */
/* sandbox_calls: the system calls that each kind of process may make. */
#ifndef KVD_GATE_SANDBOX_CALLS_H
#define KVD_GATE_SANDBOX_CALLS_H

#include <seccomp.h>
#include <stdbool.h>
#include <stddef.h>

#include "daemon/gate/sandbox.h"

struct sandbox_call {
	unsigned int kinds; /* bits of enum sandbox_kind */
	const char *names;  /* names; those unknown to this libseccomp or machine are
			     * skipped */
	bool asked;
	struct scmp_arg_cmp where; /* asked: only with these arguments; several rows of
				    * one name: alternatives */
};

extern const struct sandbox_call sandbox_calls[];
extern const size_t sandbox_calls_count;

#endif
