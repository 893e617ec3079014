/* SPDX-License-Identifier: Apache-2.0 */
/* rows_tell: the two messages that carry rows, written where the data line takes them
 * from: their bytes are copied once. */
#ifndef KVD_ATTEND_ROWS_TELL_H
#define KVD_ATTEND_ROWS_TELL_H

struct remote;
struct wire_attend;
struct wire_attended;

int rows_tell_attend(struct remote *remote, const struct wire_attend *msg);
int rows_tell_attended(struct remote *remote, const struct wire_attended *msg);

#endif
