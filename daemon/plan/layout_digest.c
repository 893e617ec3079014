/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include <xxhash.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/layout.h"

/* Upper bounds of the output of layout_encode(). */
#define HEAD_BYTES 16u
#define VIEW_BYTES (28u + LAYOUT_NAME_MAX)
#define LAYER_BYTES 16u
#define FIELD_BYTES (64u + LAYOUT_NAME_MAX + LAYOUT_FORMAT_MAX)

static size_t bytes_most(const struct layout *layout)
{
	size_t bytes = HEAD_BYTES + 8 * (size_t)layout->buffer_count;

	for (uint32_t i = 0; i < layout->view_count; i++) {
		const struct layout_view *view = &layout->views[i];

		bytes += VIEW_BYTES + (size_t)view->layer_count * LAYER_BYTES;
		for (uint32_t j = 0; j < view->layer_count; j++)
			bytes += (size_t)view->layers[j].field_count * FIELD_BYTES;
	}
	return bytes;
}

int layout_pack(const struct layout *layout, uint8_t **bytes_p, size_t *len_p,
		uint64_t *digest_p)
{
	size_t most = bytes_most(layout);
	cleanup_free uint8_t *bytes = mem_alloc(most);
	struct cursor out;
	int r;

	if (!bytes)
		return err_pass(-ENOMEM);
	cursor_write(&out, bytes, most);
	r = layout_encode(layout, &out);
	if (r < 0)
		return err_pass(r);
	*digest_p = XXH3_64bits(bytes, out.pos);
	*bytes_p = mem_dup(bytes, out.pos);
	*len_p = out.pos;
	return *bytes_p ? 0 : err_pass(-ENOMEM);
}
