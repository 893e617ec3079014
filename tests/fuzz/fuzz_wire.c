/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_wire: the input once as a whole frame, and once as [type][body], which is
 * put into a frame with a right checksum, so that the decoders behind it are
 * reached. What is decoded must encode, and decode again to the same bytes.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "proto/wire.h"
#include "tests/fuzz/lib/fuzz.h"

static uint8_t first[WIRE_FRAME_MAX + 4096], second[WIRE_FRAME_MAX + 4096];

#define ROUND(num, NAME, name, owner, cap, about)                            \
	static void round_##name(struct cursor *body)                        \
	{                                                                    \
		struct wire_##name *m = malloc(sizeof(*m));                  \
		struct cursor c;                                             \
		size_t len;                                                  \
                                                                             \
		if (wire_##name##_get(body, m) == 0) {                       \
			cursor_write(&c, first, sizeof(first));              \
			if (wire_##name##_put(&c, m) < 0)                    \
				abort();                                     \
			len = c.pos;                                         \
			cursor_read(&c, first, len);                         \
			if (wire_##name##_get(&c, m) < 0 || cursor_left(&c)) \
				abort();                                     \
			cursor_write(&c, second, sizeof(second));            \
			if (wire_##name##_put(&c, m) < 0 || c.pos != len ||  \
			    memcmp(first, second, len) != 0)                 \
				abort();                                     \
		}                                                            \
		free(m);                                                     \
	}
WIRE_MESSAGES(ROUND)

static void (*const rounds[WIRE_T_END])(struct cursor *) = {
#define ROUND_ROW(num, NAME, name, owner, cap, about) [num] = round_##name,
	WIRE_MESSAGES(ROUND_ROW)};

static void try_frame(const uint8_t *frame, size_t len)
{
	struct wire_header h;
	struct cursor body;

	if (wire_frame_get(frame, len, &h, &body) < 0)
		return;
	if (h.type >= WIRE_T_END || !rounds[h.type] || h.body_len != body.size)
		abort();
	rounds[h.type](&body);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct wire_header h = {.version = WIRE_VERSION_MAX};
	uint8_t *frame;

	try_frame(data, size);
	if (!size || size > 70000)
		return 0;
	frame = malloc(WIRE_HEADER_BYTES + size);
	h.type = data[0];
	h.body_len = (uint32_t)size - 1;
	wire_frame_put(frame, &h, data + 1);
	try_frame(frame, WIRE_HEADER_BYTES + size - 1);
	free(frame);
	err_clear();
	return 0;
}
