/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/request/reply_walk.h"

#include <assert.h>

#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "daemon/session/session.h"

#define PIECES_A_LOOK 8u /* at the clock */

static void walk_over(struct reply_walk *walk, int r)
{
	struct request *req = walk->req;
	struct session *session = walk->session;
	struct text text = walk->text;
	struct err why;

	if (r < 0)
		err_take(&why);
	session->walking--;
	walk->end(walk);     /* first: its places are in what the request owns */
	if (!req->session) { /* nobody is there to be told */
		request_drop(req);
	} else if (r < 0) {
		request_fail(req, &why);
	} else if (request_text_reply(req, &text) < 0) {
		request_fail_last(req);
	}
	text_fini(&text);
	session_drain_end(session);
}

static void walk_on(struct reply_walk *walk)
{
	const struct kvd *kvd = walk->req->kvd;
	unsigned int pieces = 0;
	int r = 1;

	while (r > 0 && walk->req->session) {
		r = walk->piece(walk);
		if (r > 0 && walk->text.len > kvd->config->client_queue_bytes)
			r = 0; /* request_text_reply() refuses it */
		pieces++;
		if (r > 0 && (r == REPLY_WALK_LARGE || pieces % PIECES_A_LOOK == 0) &&
		    loop_enough(kvd->loop)) {
			loop_defer(kvd->loop, &walk->go);
			return;
		}
	}
	walk_over(walk, r);
}

static void reply_walk_on_go(struct loop_defer *defer)
{
	walk_on(container_of(defer, struct reply_walk, go));
}

void reply_walk_begin(struct reply_walk *walk, struct request *req)
{
	assert(req->session && !req->session->ending);
	walk->req = req;
	walk->session = req->session;
	loop_defer_init(&walk->go, reply_walk_on_go);
	request_text_begin(req, &walk->text);
	walk->session->walking++;
	session_drain_begin(walk->session);
	walk_on(walk);
}
