/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVD_CLIENT_SPLICE_H
#define KVD_CLIENT_SPLICE_H

#include "lib/kvd_attend.h"

struct attend_kern_splice;
struct rope_turn;

/* Rotates the keys, or refuses before the first of them; as kvd_move_splice().
 * *written_p: it did not refuse. */
int client_splice(struct kvd_client *client, const struct kvd_splice *splice,
		  bool *written_p);

/* Keys of bf16 in GPU memory: fields, each in place, all but `from` and turn.at; to.pages
 * are bytes from the angles on, behind which the pages of all views lie (`pages`). Raises
 * (err.h); *written_p: some keys may have been rotated. */
int splice_gpu(const struct kvd_splice *splice, const struct rope_turn *turn,
	       struct attend_kern_splice *fields, size_t count, size_t pages,
	       bool *written_p);

#endif
