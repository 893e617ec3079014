/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cost.*: the page of constants that kvd_decide() uses (daemon/cost/live.h), and their
 * measurement.
 *
 * The first request for the page makes the daemon measure all peers that support
 * attention, now and when they connect. Without such a request it sends no measurement
 * traffic.
 */
#include <errno.h>
#include <string.h>

#include "daemon/attend/attend.h"
#include "daemon/attend/calibrate.h"
#include "daemon/attend/commands_attend.h"
#include "daemon/base/context.h"
#include "daemon/request/commands.h"
#include "daemon/cost/live.h"
#include "daemon/store/store.h"
#include "daemon/handshake/handshake.h"
#include "daemon/peer/peer.h"

static int cost_needs(const struct kvd *kvd)
{
	if (attends_of(kvd) && store_costs(kvd))
		return 0;
	return err_raise(ERR_STATE, "the chunk store is off; set chunk_memory");
}

/* ---- cost.page ---- */

static int cost_page_run(struct request *req)
{
	cJSON *result;
	int fd, r = cost_needs(req->kvd);

	if (r < 0)
		return err_pass(r);
	result = request_result();
	if (!result)
		return err_pass(-ENOMEM);
	fd = cost_page_fd(live_page(store_costs(req->kvd)));
	calibrate_all(attends_of(req->kvd));
	request_reply_fds(req, result, &fd, 1);
	return 0;
}

/* ---- cost.show ---- */

static bool add_figure(cJSON *to, const char *name, const struct cost_figure *figure)
{
	cJSON *f = figure->count ? cJSON_AddObjectToObject(to, name) : NULL;

	if (!figure->count)
		return cJSON_AddNullToObject(to, name);
	return f && cJSON_AddNumberToObject(f, "value", figure->value) &&
	       cJSON_AddNumberToObject(f, "mad", figure->mad) &&
	       cJSON_AddNumberToObject(f, "error", figure->error) &&
	       cJSON_AddNumberToObject(f, "count", figure->count) &&
	       cJSON_AddNumberToObject(f, "at_s", figure->at_s);
}

static bool add_link(cJSON *list, const struct cost_link *link)
{
	cJSON *json = cJSON_CreateObject();

	return json && cJSON_AddItemToArray(list, json) &&
	       cJSON_AddStringToObject(json, "transport", link->name) &&
	       add_figure(json, "probe_us", &link->probe) &&
	       add_figure(json, "turn_us", &link->turn) &&
	       add_figure(json, "bytes_per_us", &link->bandwidth) &&
	       add_figure(json, "pull_us", &link->pull_probe) &&
	       add_figure(json, "pull_bytes_per_us", &link->pull_bandwidth) &&
	       add_figure(json, "congestion", &link->congestion) &&
	       cJSON_AddNumberToObject(json, "model_error", link->model_error);
}

static const struct remote *remote_of(const struct kvd *kvd, const uint8_t *key)
{
	const struct remote *remote;

	list_foreach(remote, handshake_remotes(kvd->handshake), link) {
		if (memcmp(remote->peer->instance, key, COST_KEY_BYTES) == 0)
			return remote;
	}
	return NULL;
}

static bool add_peer(cJSON *list, const struct kvd *kvd, const struct cost_peer *peer)
{
	const struct remote *remote = remote_of(kvd, peer->key);
	cJSON *json = cJSON_CreateObject(), *links = NULL;
	bool ok = json && cJSON_AddItemToArray(list, json) &&
		  result_add_hex(json, "instance", peer->key, COST_KEY_BYTES) &&
		  cJSON_AddStringToObject(json, "endpoint",
					  remote ? remote->peer->endpoint : "") &&
		  cJSON_AddBoolToObject(json, "stale", peer->stale) &&
		  add_figure(json, "wait_us", &peer->wait) &&
		  cJSON_AddNumberToObject(json, "requesters", peer->requesters);

	if (ok)
		links = cJSON_AddArrayToObject(json, "links");
	ok = links;
	for (unsigned int i = 0; ok && i < peer->link_count; i++)
		ok = add_link(links, &peer->links[i]);
	return ok;
}

static bool add_speed(cJSON *list, const struct cost_speed *speed)
{
	const struct cost_shape *s = &speed->shape;
	cJSON *json = cJSON_CreateObject();

	return json && cJSON_AddItemToArray(list, json) &&
	       result_add_hex(json, "instance", speed->key, COST_KEY_BYTES) &&
	       cJSON_AddNumberToObject(json, "heads", s->heads) &&
	       cJSON_AddNumberToObject(json, "kv_heads", s->kv_heads) &&
	       cJSON_AddNumberToObject(json, "dqk", s->dqk) &&
	       cJSON_AddNumberToObject(json, "dv", s->dv) &&
	       add_figure(json, "fixed_us", &speed->compute.fixed) &&
	       add_figure(json, "row_us", &speed->compute.row) &&
	       add_figure(json, "bytes_per_us", &speed->compute.memory) &&
	       add_figure(json, "flop_per_us", &speed->compute.flops) &&
	       add_figure(json, "attend", &speed->attend);
}

static bool add_home(cJSON *to, const struct cost_page *page)
{
	struct cost_home home;
	cJSON *json = cJSON_AddObjectToObject(to, "home");

	if (cost_page_home(page, &home))
		return json;
	return json && add_figure(json, "merge_us", &home.merge) &&
	       add_figure(json, "merge_row_us", &home.merge_row) &&
	       add_figure(json, "splice_us", &home.splice) &&
	       add_figure(json, "splice_token_us", &home.splice_token);
}

static int cost_show_run(struct request *req)
{
	const struct kvd *kvd = req->kvd;
	cJSON *result, *peers, *speeds;
	struct cost_speed speed;
	struct cost_peer peer;
	int r = cost_needs(kvd);
	bool ok;

	if (r < 0)
		return err_pass(r);
	result = request_result();
	if (!result)
		return err_pass(-ENOMEM);
	peers = cJSON_AddArrayToObject(result, "peers");
	speeds = cJSON_AddArrayToObject(result, "speeds");
	ok = peers && speeds && add_home(result, live_page(store_costs(kvd)));
	for (unsigned int i = 0; ok && live_peer_at(store_costs(kvd), i, &peer); i++) {
		if (peer.link_count)
			ok = add_peer(peers, kvd, &peer);
	}
	for (unsigned int i = 0;
	     ok && cost_page_speed_at(live_page(store_costs(kvd)), &i, &speed);)
		ok = add_speed(speeds, &speed);
	return request_finish(req, result, ok);
}

/* ---- cost.calibrate ---- */

struct calibrate_fields {
	const char *endpoint;
	uint32_t rows, rounds;
};
static const struct field calibrate_fields[] = {
	F_STR("endpoint", calibrate_fields, endpoint, REQUIRED, 255,
	      "Endpoint, name or instance of a connected peer"),
	F_INT("rows", calibrate_fields, rows, OPTIONAL, 0, CALIBRATE_ROWS_MAX,
	      "Measure only this number of rows of 1152 bytes, sent and returned, "
	      "without updating the page; default 0: the standard sizes"),
	F_INT("rounds", calibrate_fields, rounds, DEFAULT(0), 0, CALIBRATE_ROUNDS_MAX,
	      "Repetitions; default 0: 24"),
	F_END,
};

static void calibrate_done(void *owner, const struct calibrate_result *result,
			   const struct err *why)
{
	struct request *req = owner;
	cJSON *json = why ? NULL : request_result(), *list = NULL;
	bool ok = json;

	if (why) {
		request_fail(req, why);
		return;
	}
	if (ok)
		list = cJSON_AddArrayToObject(json, "echoes");
	ok = list && cJSON_AddNumberToObject(json, "bytes", (double)result->bytes);
	for (uint32_t i = 0; ok && i < result->size_count; i++) {
		cJSON *one = cJSON_CreateObject();

		ok = one && cJSON_AddItemToArray(list, one) &&
		     cJSON_AddNumberToObject(one, "bytes",
					     (double)result->sizes[i].bytes) &&
		     cJSON_AddNumberToObject(one, "us", result->sizes[i].us) &&
		     cJSON_AddNumberToObject(one, "mad_us", result->sizes[i].mad_us) &&
		     cJSON_AddNumberToObject(one, "count", result->sizes[i].count);
	}
	if (!ok) {
		cJSON_Delete(json);
		err_raise(ERR_NOMEM, "out of memory for the reply");
		request_fail_last(req);
		return;
	}
	request_reply(req, json);
}

static struct remote *cost_remote(const struct kvd *kvd, const char *words)
{
	struct remote *remote;

	list_foreach(remote, handshake_remotes(kvd->handshake), link) {
		const struct peer *peer = remote->peer;

		if (endpoint_same(peer->endpoint, words) ||
		    strcmp(peer->name, words) == 0 ||
		    strcmp(peer->instance_text, words) == 0)
			return remote;
	}
	err_raise(ERR_NOTFOUND, "endpoint: no connected peer %.100s; see kvd-ctl peers",
		  words);
	return NULL;
}

static int cost_calibrate_run(struct request *req)
{
	const struct calibrate_fields *args = request_args(req);
	struct calibrate_args run = {.rows = args->rows,
				     .rounds = args->rounds,
				     .owner = req,
				     .on_done = calibrate_done};
	int r = cost_needs(req->kvd);

	if (r < 0)
		return err_pass(r);
	run.remote = cost_remote(req->kvd, args->endpoint);
	return run.remote ? err_pass(calibrate_begin(attends_of(req->kvd), &run))
			  : err_pass(-ENOENT);
}

const struct command cost_commands[] = {
	{"cost.page",
	 "Get the page of cost constants that kvd_decide() reads; the daemon updates it "
	 "from then on",
	 NULL, 0, cost_page_run, "nothing; one read-only fd: the page"},
	{"cost.show", "Show the constants of the cost page", NULL, 0, cost_show_run,
	 "peers: each with stale, wait_us, requesters (computing there now), and "
	 "links, by transport: probe_us, turn_us, bytes_per_us, pull_us, "
	 "pull_bytes_per_us, congestion, model_error; speeds: attention speed by "
	 "instance (zeros: this daemon) and geometry; its attend: recent measured time "
	 "/ predicted time; home: merging and splicing. Each constant: value, mad, "
	 "error (one standard deviation), count, at_s (CLOCK_MONOTONIC); null: not "
	 "measured"},
	{"cost.calibrate", "Measure the link to a peer, and its attention speed",
	 calibrate_fields, COMMAND_ADMIN, cost_calibrate_run,
	 "echoes: {bytes sent and returned, us (median), mad_us, count}; bytes: total"},
	{.name = NULL},
};
