/* SPDX-License-Identifier: Apache-2.0 */
/* commands_group: groups of the cluster. */
#ifndef KVD_COMMANDS_GROUP_H
#define KVD_COMMANDS_GROUP_H

#include "daemon/request/commands.h"

extern const struct command group_commands[];

#endif
