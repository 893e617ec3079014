/* SPDX-License-Identifier: Apache-2.0 */
/* commands_xfer: transfers, grants of memory. */
#ifndef KVD_COMMANDS_XFER_H
#define KVD_COMMANDS_XFER_H

#include "daemon/request/commands.h"

extern const struct command xfer_commands[];
extern const struct command secret_commands[];

#endif
