/* SPDX-License-Identifier: Apache-2.0 */
/* commands_pool: commands of pools that have a file of their own. */
#ifndef KVD_COMMANDS_POOL_H
#define KVD_COMMANDS_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/fields.h"

struct layout;
struct request;
struct text;

/* A layout as JSON, a layer at a time: zeroed at first. False: that was all. */
struct layout_writer {
	uint32_t view, layer; /* next */
	bool begun;
};
bool layout_write_some(struct layout_writer *writer, const struct layout *layout,
		       struct text *out);

int pool_layout_run(struct request *req);
extern const struct field pool_layout_fields[];

#endif
