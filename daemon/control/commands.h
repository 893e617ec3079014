/* SPDX-License-Identifier: Apache-2.0 */
/* commands: tables of the commands of the module control. */
#ifndef KVD_CONTROL_COMMANDS_H
#define KVD_CONTROL_COMMANDS_H

#include "daemon/request/commands.h"

extern const struct command session_commands[];
extern const struct command region_commands[];
extern const struct command pool_commands[];
extern const struct command peer_commands[];
extern const struct command device_commands[];
extern const struct command stats_commands[];
extern const struct command admin_commands[];
extern const struct command keys_commands[];

/* Version, name, instance, pid and endpoint of the daemon. */
void put_daemon(struct text *out, const struct session *session);

#endif
