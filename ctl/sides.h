/* SPDX-License-Identifier: Apache-2.0 */
/* sides: a prefill and a decode group with their loads, asked of the daemon again and
 * again or read from a file, in a picker. */
#ifndef KVD_CTL_SIDES_H
#define KVD_CTL_SIDES_H

#include <stdio.h>

#include "ctl/ctl.h"
#include "lib/kvd_pick.h"

struct sides {
	struct ctl *ctl;
	const char *name[KVD_PICK_SIDES];
	struct kvd_picker *picker;
	FILE *from; /* --from; NULL: the daemon is asked */
	unsigned long line;
	uint64_t now_ns; /* of the last look: the file's time, or the clock's */
};

/* The command's arguments: PREFILL DECODE, or none for groups of these names. An exit
 * code. */
int sides_open(struct sides *sides, struct ctl *ctl, const char *command);
void sides_close(struct sides *sides);
/* One look at both. CTL_OK, SIDES_END behind a file's last line, or an exit code;
 * `quiet`: what the daemon refused is in ctl->error and not told. */
#define SIDES_END (-1)
int sides_look(struct sides *sides, bool quiet);

#endif
