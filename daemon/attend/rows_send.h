/* SPDX-License-Identifier: Apache-2.0 */
/* rows_send: the two messages that carry rows, written directly into the buffer of the
 * data connection: rows are copied once, and a kernel writes values into their message.
 */
#ifndef KVD_ATTEND_ROWS_SEND_H
#define KVD_ATTEND_ROWS_SEND_H

#include <stddef.h>
#include <stdint.h>

struct remote;
struct wire_attend;
struct wire_attention_result;

/* A written message that is sent later. */
struct rows_made {
	uint8_t *bytes; /* NULL: none */
	size_t len;
	uint32_t type;
};
int rows_make_attend(const struct wire_attend *msg, struct rows_made *made);
int rows_make_attention_result(const struct wire_attention_result *msg,
			       struct rows_made *made);
/* An ATTENTION_RESULT with memory for `count` values, which are written first; then all
 * the rest of it, without a text. Its values may be fewer bytes than there was memory
 * for.
 */
int rows_room_attention_result(size_t count, struct rows_made *made, float **values_p);
int rows_fill_attention_result(const struct wire_attention_result *msg,
			       struct rows_made *made);
int rows_send(struct remote *remote, struct rows_made *made); /* it is taken */
void rows_made_drop(struct rows_made *made);

int rows_send_attend(struct remote *remote, const struct wire_attend *msg);
/* There is always one reply: without memory for the values it is an error, which needs
 * none. If that cannot be sent, the peering ends. */
int rows_send_attention_result(struct remote *remote,
			       const struct wire_attention_result *msg);

#endif
