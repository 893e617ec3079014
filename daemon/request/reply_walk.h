/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reply_walk: a reply over thousands of objects, made piece by piece, some in each
 * turn of the loop. Until it is given its session's next line waits. Embedded in its
 * owner, which says what a piece is.
 */
#ifndef KVD_REPLY_WALK_H
#define KVD_REPLY_WALK_H

#include "daemon/base/text.h"
#include "daemon/loop/work.h"

struct request;
struct session;

struct reply_walk {
	struct request
		*req; /* its session may end: then no piece is asked for any more */
	struct text text;
	/* Append one piece. 1: there is more; 0: that was all; negative: raised. */
	int (*piece)(struct reply_walk *walk);
	void (*end)(struct reply_walk *walk); /* once: frees the owner */
	/* private */
	struct session *session; /* held */
	struct loop_work work;
	int result; /* of the last piece */
};

/* Takes the request: it is answered, or fails, now or in later turns. `piece` and
 * `end` are set; `text` follows the reply's head (request_text_begin). */
void reply_walk_begin(struct reply_walk *walk, struct request *req);

#endif
