/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/attend/rows_send.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/peer/peer.h"
#include "proto/wire.h"

/* All fields but the blobs, and their lengths. */
#define FIELDS_BYTES (256u + 2 * WIRE_STR_MAX)
#define BEFORE_VALUES 30u /* in an ATTENTION_RESULT without a text */
#define VALUES_ALIGN 16u  /* as mem_alloc() aligns */

_Static_assert((PEER_EXPRESS_HEAD + BEFORE_VALUES) % VALUES_ALIGN == 0,
	       "values in the kernels' format");

#define ROWS_MAKE(NAME, name, blobs)                                                \
	int rows_make_##name(const struct wire_##name *msg, struct rows_made *made) \
	{                                                                           \
		size_t room = FIELDS_BYTES + (blobs);                               \
		struct cursor out;                                                  \
		int r;                                                              \
                                                                                    \
		made->bytes = mem_alloc(PEER_EXPRESS_HEAD + room);                  \
		if (!made->bytes)                                                   \
			return err_pass(-ENOMEM);                                   \
		cursor_write(&out, made->bytes + PEER_EXPRESS_HEAD, room);          \
		r = wire_##name##_put(&out, msg);                                   \
		made->len = out.pos;                                                \
		made->type = WIRE_T_##NAME;                                         \
		if (r < 0)                                                          \
			rows_made_drop(made);                                       \
		return err_pass(r);                                                 \
	}

void rows_made_drop(struct rows_made *made)
{
	mem_free(made->bytes);
	made->bytes = NULL;
}

int rows_send(struct remote *remote, struct rows_made *made)
{
	return err_pass(handshake_send_made(remote, (enum wire_type)made->type,
					    mem_steal(made->bytes), made->len));
}

ROWS_MAKE(ATTEND, attend, msg->form.len + msg->rope.len + msg->select.len + msg->q.len)
ROWS_MAKE(ATTENTION_RESULT, attention_result, msg->values.len)

int rows_send_attend(struct remote *remote, const struct wire_attend *msg)
{
	struct rows_made made;
	int r = rows_make_attend(msg, &made);

	return r < 0 ? err_pass(r) : err_pass(rows_send(remote, &made));
}

int rows_send_attention_result(struct remote *remote,
			       const struct wire_attention_result *msg)
{
	struct wire_attention_result no = {.attend = msg->attend};
	struct rows_made made;
	struct err why;

	if (rows_make_attention_result(msg, &made) >= 0)
		return err_pass(rows_send(remote, &made));
	err_take(&why);
	no.code = why.code;
	snprintf(no.text, sizeof(no.text), "%.200s", why.text);
	return err_pass(handshake_send_attention_result(remote, &no));
}

int rows_room_attention_result(size_t count, struct rows_made *made, float **values_p)
{
	made->len = BEFORE_VALUES + count * sizeof(float);
	made->type = WIRE_T_ATTENTION_RESULT;
	made->bytes = mem_alloc(PEER_EXPRESS_HEAD + made->len);
	if (!made->bytes)
		return err_pass(-ENOMEM);
	*values_p = (float *)(void *)(made->bytes + PEER_EXPRESS_HEAD + BEFORE_VALUES);
	return 0;
}

int rows_fill_attention_result(const struct wire_attention_result *msg,
			       struct rows_made *made)
{
	struct cursor out;
	int r;

	cursor_write(&out, made->bytes + PEER_EXPRESS_HEAD, made->len);
	r = wire_attention_result_put(&out, msg);
	assert(r < 0 || out.pos <= made->len);
	made->len = out.pos;
	return err_pass(r);
}
