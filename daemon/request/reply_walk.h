/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reply_walk: a reply over thousands of objects, written in pieces, some in each turn of
 * the loop. Until it is sent, the next line of its session waits. Embedded in its owner,
 * which writes one piece per call.
 */
#ifndef KVD_REPLY_WALK_H
#define KVD_REPLY_WALK_H

#include "daemon/base/text.h"
#include "daemon/loop/work.h"

struct request;
struct session;

struct reply_walk {
	struct request *req; /* its session may end: then no further piece is requested */
	struct text text;
	const char *list; /* of the first array, which is open then; or NULL */
	/* Append one piece. 1: more follow; 0: done; negative: raised. */
	int (*piece)(struct reply_walk *walk);
	/* Once: frees the owner. NULL: this is its first member, and mem_free() all that
	 * there is to do. */
	void (*end)(struct reply_walk *walk);
	/* private */
	struct session *session; /* held */
	struct loop_work work;
	int result; /* of the last piece */
};

/* Takes the request, which succeeds or fails now or in a later turn. `piece` is
 * set; `text` follows the head of the reply (request_text_begin). */
void reply_walk_begin(struct reply_walk *walk, struct request *req);

#endif
