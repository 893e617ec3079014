/* SPDX-License-Identifier: Apache-2.0 */
/* commands_pool: commands of pools that have a file of their own. */
#ifndef KVD_COMMANDS_POOL_H
#define KVD_COMMANDS_POOL_H

#include "proto/fields.h"

struct request;

int pool_layout_run(struct request *req);
extern const struct field pool_layout_fields[];

#endif
