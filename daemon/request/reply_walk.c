/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/request/reply_walk.h"

#include <assert.h>

#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "proto/out.h"
#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "daemon/session/session.h"

static bool walk_step(struct loop_work *work)
{
	struct reply_walk *walk = container_of(work, struct reply_walk, work);

	walk->result = walk->req->session ? walk->piece(walk) : 0;
	return walk->result > 0 &&
	       walk->text.len <= walk->req->kvd->config->client_queue_bytes;
}

static void walk_done(struct loop_work *work)
{
	struct reply_walk *walk = container_of(work, struct reply_walk, work);
	struct request *req = walk->req;
	struct session *session = walk->session;
	struct text text = walk->text;
	int r = walk->result;
	struct err why;

	if (r < 0)
		err_take(&why);
	session->walking--;
	/* first, because its cursors refer to objects owned by the request */
	if (walk->end)
		walk->end(walk);
	else
		mem_free(walk);
	if (!req->session) { /* the client has disconnected */
		request_drop(req);
	} else if (r < 0) {
		request_fail(req, &why);
	} else if (request_text_reply(req, &text) < 0) { /* larger than the queue, too */
		request_fail_last(req);
	}
	text_fini(&text);
	session_drain_end(session);
}

void reply_walk_begin(struct reply_walk *walk, struct request *req)
{
	assert(req->session && !req->session->ending);
	walk->req = req;
	walk->session = req->session;
	request_text_begin(req, &walk->text);
	if (walk->list)
		out_array(&walk->text, walk->list);
	walk->session->walking++;
	session_drain_begin(walk->session);
	loop_work_init(&walk->work, req->kvd->loop, walk_step, walk_done);
	loop_work_start(&walk->work);
}
