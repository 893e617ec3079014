/* SPDX-License-Identifier: Apache-2.0 */
/*
 * control: the Unix socket for engines and kvd-ctl: one JSON object per line, descriptors
 * attached to the line that names them, one reply per request.
 *
 * A client that violates the protocol, does not read its replies or does not complete a
 * request is disconnected with a reason. Other clients are not affected.
 */
#ifndef KVD_CONTROL_H
#define KVD_CONTROL_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/context.h"

struct control;
struct err;

extern const struct module control_module;
static inline struct control *control_of(const struct kvd *kvd)
{
	return kvd->part[MODULE_CONTROL];
}
/* Listen at the configured path, or on `listen_fd` (taken; bound and listening
 * already: socket activation) when it is not -1. */
int control_new(struct kvd *kvd, int listen_fd, struct control **control_p);
/* True if clients cannot connect; *why_p is the reason. */
bool control_is_lost(const struct control *control, struct err *why_p);
/* Stop listening, remove the socket's name, end every session. Idempotent. */
void control_close(struct control *control);
/* There are no connections and sessions: control_free() may be called. */
bool control_idle(const struct control *control);
/* Closes remaining connections. There must be no sessions. */
void control_free(struct control *control);

/* allow_uids, allow_gids and admin_uids were reloaded: sessions of users that are no
 * longer admitted end in the next turn. Returns their number. */
unsigned int control_recheck(struct control *control);
/* Timeout for an incomplete request line, a missing hello, and the unread last line of
 * the daemon. Tests shorten it. */
void control_set_timeout(struct control *control, uint64_t ns);

#endif
