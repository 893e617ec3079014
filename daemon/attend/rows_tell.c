/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/attend/rows_tell.h"

#include <errno.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/peer/peer.h"
#include "proto/wire.h"

/* All fields but the blobs, and their lengths. */
#define FIELDS_BYTES (256u + 2 * WIRE_STR_MAX)

#define ROWS_TELL(NAME, name, blobs)                                                \
	int rows_tell_##name(struct remote *remote, const struct wire_##name *msg)  \
	{                                                                           \
		size_t room = FIELDS_BYTES + (blobs);                               \
		uint8_t *made = mem_alloc(PEER_EXPRESS_HEAD + room);                \
		struct cursor out;                                                  \
		int r;                                                              \
                                                                                    \
		if (!made)                                                          \
			return err_pass(-ENOMEM);                                   \
		cursor_write(&out, made + PEER_EXPRESS_HEAD, room);                 \
		r = wire_##name##_put(&out, msg);                                   \
		if (r < 0) {                                                        \
			mem_free(made);                                             \
			return err_pass(r);                                         \
		}                                                                   \
		return err_pass(                                                    \
			handshake_send_made(remote, WIRE_T_##NAME, made, out.pos)); \
	}

ROWS_TELL(ATTEND, attend, msg->form.len + msg->rope.len + msg->select.len + msg->q.len)
ROWS_TELL(ATTENDED, attended, msg->values.len)
