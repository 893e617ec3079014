/* SPDX-License-Identifier: Apache-2.0 */
/* commands: tables of the commands of rooms. */
#ifndef KVD_ROOM_COMMANDS_H
#define KVD_ROOM_COMMANDS_H

#include "daemon/request/commands.h"

extern const struct command room_commands[];

#endif
