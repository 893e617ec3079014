/* SPDX-License-Identifier: Apache-2.0 */
/* commands_attend: attends, and what moving costs. */
#ifndef KVD_COMMANDS_ATTEND_H
#define KVD_COMMANDS_ATTEND_H

#include "daemon/request/commands.h"

extern const struct command attend_commands[];
extern const struct command cost_commands[];

#endif
