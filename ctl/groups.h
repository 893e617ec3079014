/* SPDX-License-Identifier: Apache-2.0 */
/* groups: a prefill and a decode group with their loads, asked of the daemon again and
 * again or read from a file, in a picker. */
#ifndef KVD_CTL_GROUPS_H
#define KVD_CTL_GROUPS_H

#include <stdio.h>

#include "ctl/ctl.h"
#include "lib/kvd_pick.h"

struct groups {
	struct ctl *ctl;
	const char *name[KVD_PICK_SIDES];
	struct kvd_picker *picker;
	FILE *from; /* --from; NULL: the daemon is asked */
	unsigned long line;
	uint64_t now_ns; /* of the last look: the file's time, or the clock's */
};

/* The command's arguments: PREFILL DECODE, or none for groups of these names. An exit
 * code. */
int groups_open(struct groups *groups, struct ctl *ctl, const char *command);
void groups_close(struct groups *groups);
/* One look at both. CTL_OK, GROUPS_END behind a file's last line, or an exit code;
 * `quiet`: what the daemon refused is in ctl->error and not told. */
#define GROUPS_END (-1)
int groups_look(struct groups *groups, bool quiet);

#endif
