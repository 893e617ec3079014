/* SPDX-License-Identifier: Apache-2.0 */
/* layout_text: a layout as JSON, in the form that pool.register takes. */
#ifndef KVD_LAYOUT_TEXT_H
#define KVD_LAYOUT_TEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/text.h"
#include "daemon/plan/layout.h"

struct layout_writer {
	const char *name; /* of the member; NULL: the layout is the whole text */
	/* zeroed at first */
	uint32_t view, layer; /* next */
	bool begun;
};
/* Write one layer. False: that was the last. */
bool layout_write_some(struct layout_writer *writer, const struct layout *layout,
		       struct text *out);

#endif
