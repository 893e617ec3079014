/* SPDX-License-Identifier: Apache-2.0 */
/* kvd_cost_open(): the daemon's page of constants, mapped. */
#include "lib/client.h"

#include "daemon/base/err.h"
#include "daemon/cost/page.h"
#include "lib/kvd_cost.h"

static int cost_opened(struct client_request *req, const cJSON *reply)
{
	struct client_conn *conn = &req->client->conn;
	struct kvd_cost_page **page_p = req->out;
	struct cost_page *page = NULL;
	int r;

	(void)reply;
	if (conn->in_fd_count < 1)
		return client_fail(req->client, KVD_E_PROTO,
				   "cost.page: the reply has no descriptor");
	r = cost_page_map(conn->in_fds[0], &page);
	if (r < 0) {
		r = client_fail(req->client, KVD_E_PROTO, "cost.page: %s",
				err_last()->text);
		err_clear();
		return r;
	}
	*page_p = (struct kvd_cost_page *)page;
	return 0;
}

int kvd_cost_open(struct kvd_client *client, const struct kvd_call *call,
		  struct kvd_cost_page **page_p)
{
	struct client_op op;
	int r = client_begin(client, call);

	*page_p = NULL;
	if (r)
		return r;
	client_op_begin(client, &op, "cost.page");
	return client_op_ask(client, &op, call, cost_opened, page_p);
}
