/* SPDX-License-Identifier: Apache-2.0 */
/* commands_peer: peer.connect requests that wait hear of changes here. */
#ifndef KVD_COMMANDS_PEER_H
#define KVD_COMMANDS_PEER_H

struct err;
struct remote;

void peer_commands_on_change(struct remote *remote);
/* The daemon stops: fail what waits. */
void peer_commands_stop(const struct err *why);

#endif
