/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_SPLICE_H
#define KVD_CLIENT_SPLICE_H

#include "lib/kvd_attend.h"

/* Rotates the keys, or refuses before the first of them; as kvd_move_splice(). */
int client_splice(struct kvd_client *client, const struct kvd_splice *splice);

#endif
