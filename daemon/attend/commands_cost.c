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
#include "proto/out.h"
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
	struct reply reply;
	int fd, r = cost_needs(req->kvd);

	if (r < 0)
		return err_pass(r);
	reply_begin(&reply, req);
	fd = cost_page_fd(live_page(store_costs(req->kvd)));
	calibrate_all(attends_of(req->kvd));
	return reply_end_fds(&reply, &fd, 1);
}

/* ---- cost.show ---- */

static void put_figure(struct text *out, const char *name,
		       const struct cost_figure *figure)
{
	if (!figure->count) {
		out_null(out, name);
		return;
	}
	out_object(out, name);
	out_double(out, "value", figure->value);
	out_double(out, "mad", figure->mad);
	out_double(out, "error", figure->error);
	out_number(out, "count", figure->count);
	out_number(out, "at_s", figure->at_s);
	out_close(out, '}');
}

static void put_link(struct text *out, const struct cost_link *link)
{
	out_object(out, NULL);
	out_text(out, "transport", link->name);
	put_figure(out, "probe_us", &link->probe);
	put_figure(out, "turn_us", &link->turn);
	put_figure(out, "bytes_per_us", &link->bandwidth);
	put_figure(out, "pull_us", &link->pull_probe);
	put_figure(out, "pull_bytes_per_us", &link->pull_bandwidth);
	put_figure(out, "congestion", &link->congestion);
	out_double(out, "model_error", link->model_error);
	out_close(out, '}');
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

static void put_peer(struct text *out, const struct kvd *kvd,
		     const struct cost_peer *peer)
{
	const struct remote *remote = remote_of(kvd, peer->key);

	out_object(out, NULL);
	out_hex(out, "instance", peer->key, COST_KEY_BYTES);
	out_text(out, "endpoint", remote ? remote->peer->endpoint : "");
	out_bool(out, "stale", peer->stale);
	put_figure(out, "wait_us", &peer->wait[COST_HOST]);
	out_double(out, "requesters", peer->requesters[COST_HOST]);
	put_figure(out, "gpu_wait_us", &peer->wait[COST_GPU]);
	out_double(out, "gpu_requesters", peer->requesters[COST_GPU]);
	out_array(out, "links");
	for (unsigned int i = 0; i < peer->link_count; i++)
		put_link(out, &peer->links[i]);
	out_close(out, ']');
	out_close(out, '}');
}

static void put_speed(struct text *out, const struct cost_speed *speed)
{
	const struct cost_shape *s = &speed->shape;

	out_object(out, NULL);
	out_hex(out, "instance", speed->key, COST_KEY_BYTES);
	out_number(out, "heads", s->heads);
	out_number(out, "kv_heads", s->kv_heads);
	out_number(out, "dqk", s->dqk);
	out_number(out, "dv", s->dv);
	out_bool(out, "gpu", speed->kind == COST_GPU);
	put_figure(out, "fixed_us", &speed->compute.fixed);
	put_figure(out, "row_us", &speed->compute.row);
	put_figure(out, "bytes_per_us", &speed->compute.memory);
	put_figure(out, "flop_per_us", &speed->compute.flops);
	put_figure(out, "attend", &speed->attend);
	out_close(out, '}');
}

static void put_home(struct text *out, const struct cost_page *page)
{
	struct cost_home home;

	out_object(out, "home");
	if (!cost_page_home(page, &home)) {
		put_figure(out, "merge_us", &home.merge);
		put_figure(out, "merge_row_us", &home.merge_row);
		put_figure(out, "splice_us", &home.splice);
		put_figure(out, "splice_token_us", &home.splice_token);
	}
	out_close(out, '}');
}

static int cost_show_run(struct request *req)
{
	const struct kvd *kvd = req->kvd;
	const struct live *costs = store_costs(kvd);
	struct cost_speed speed;
	struct cost_peer peer;
	struct reply reply;
	struct text *out;
	int r = cost_needs(kvd);

	if (r < 0)
		return err_pass(r);
	out = reply_begin(&reply, req);
	out_array(out, "peers");
	for (unsigned int i = 0; live_peer_at(costs, i, &peer); i++) {
		if (peer.link_count)
			put_peer(out, kvd, &peer);
	}
	out_close(out, ']');
	out_array(out, "speeds");
	for (unsigned int i = 0; cost_page_speed_at(live_page(costs), &i, &speed);)
		put_speed(out, &speed);
	out_close(out, ']');
	put_home(out, live_page(costs));
	return reply_end(&reply);
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
	struct reply reply;
	struct text *out;

	if (why) {
		request_fail(req, why);
		return;
	}
	out = reply_begin(&reply, req);
	out_array(out, "echoes");
	for (uint32_t i = 0; i < result->size_count; i++) {
		out_object(out, NULL);
		out_number(out, "bytes", result->sizes[i].bytes);
		out_double(out, "us", result->sizes[i].us);
		out_double(out, "mad_us", result->sizes[i].mad_us);
		out_number(out, "count", result->sizes[i].count);
		out_close(out, '}');
	}
	out_close(out, ']');
	out_number(out, "bytes", result->bytes);
	reply_end(&reply);
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
	 "peers: each with stale, wait_us, requesters (computing there now), the same of "
	 "chunks in its GPU memory (gpu_wait_us, gpu_requesters), and links, by "
	 "transport: probe_us, turn_us, bytes_per_us, pull_us, pull_bytes_per_us, "
	 "congestion, model_error; speeds: attention speed by instance (zeros: this "
	 "daemon), geometry and memory (gpu); its attend: recent measured time / "
	 "predicted time; home: merging and splicing. Each constant: value, mad, error "
	 "(one standard deviation), count, at_s (CLOCK_MONOTONIC); null: not measured"},
	{"cost.calibrate", "Measure the link to a peer, and its attention speed",
	 calibrate_fields, COMMAND_ADMIN, cost_calibrate_run,
	 "echoes: {bytes sent and returned, us (median), mad_us, count}; bytes: total"},
	{.name = NULL},
};
