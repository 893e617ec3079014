/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Echoes are taken in one go and fitted directly (fit.c). Pulls occur when engines fetch,
 * in any size: their line uses exponentially weighted sums, so that a changed network
 * shows after some dozens of them. While there were none, or all were of one size, a pull
 * is priced like an echo's bytes, with half of the price as its error: the choice is
 * uncertain then, but a fetch remains possible.
 *
 * Rounds of rows have a line of their own, separate from echoes: a thread is woken to
 * compute and wakes the loop, which an echo, answered at once, does not show. If rounds
 * of several sizes determine it, that fixed part is the link's turn. Congestion is the
 * recent ratio of the time of bytes to the prediction with the turn: the holder itself
 * measures its queue and its computation separately. A new calibration starts at 1,
 * without a turn. Kernels are measured on scratch memory of an idle holder: their recent
 * slowdown is a factor of its own, which a calibration does not reset. So drift concerns
 * the path alone. Speeds are measured again from time to time, and their change increases
 * the error of prices.
 *
 * A dozen rounds of two sizes hardly determine a slope: a line through them may be nearly
 * level, and its fixed part, by that slope, a thousand times the truth. So the bandwidth
 * is bounded by that of the echoes, and by the certainty of the line; the turn moves as
 * slowly as congestion does, and congestion compensates each change of the turn at once,
 * so that the price of past sizes does not change.
 *
 * Prices of pulls are multiplied by congestion, too. Measured pulls include it, so it is
 * divided out of their constants.
 */
#include "daemon/cost/live.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define LINE_DECAY (1 - 1 / FIT_LIVE_PART)
#define HALF_BYTES 262144.0 /* half of the time of so many bytes is fixed, about */
#define PULL_UNKNOWN_ERROR 0.5
#define FACTOR_MOST 1e3	  /* and least: one part of it */
#define SIZES_DIFFER 0.01 /* minimum relative scatter for a line */
#define TURN_ROUNDS 4u	  /* of fewer, two sizes have no scatter */
#define REQUESTERS_PART FIT_LIVE_PART

/* Weighted sums, x: bytes, y: us. Times scatter with their length: longer ones have less
 * weight, or they would determine a line's fixed part. */
struct line_sums {
	double n, w, x, y, xx, xy, yy;
	uint32_t count;
};

struct live_peer {
	struct cost_peer row;
	bool gone; /* no row of the page: kept while there is space, for asked_ns */
	struct fit_drift drift;
	uint64_t asked_ns;		/* it was to be measured; 0: never */
	struct line_sums pulls, rounds; /* of its link */
};

struct live {
	struct cost_page *page;
	unsigned int count;
	uint64_t refused; /* peers, of which there were too many */
	struct live_peer *peers[COST_PAGE_PEERS];
};

int live_new(struct live **live_p)
{
	struct live *live = mem_zalloc(sizeof(*live));
	int r;

	if (!live)
		return err_pass(-ENOMEM);
	r = cost_page_new(true, &live->page);
	if (r < 0) {
		mem_free(live);
		return err_pass(r);
	}
	*live_p = live;
	return 0;
}

void live_free(struct live *live)
{
	if (!live)
		return;
	for (unsigned int i = 0; i < live->count; i++)
		mem_free(live->peers[i]);
	cost_page_free(live->page);
	mem_free(live);
}

struct cost_page *live_page(const struct live *live)
{
	return live->page;
}

uint64_t live_refused(const struct live *live)
{
	return live->refused;
}

/* ---- peers and their links ---- */

static struct live_peer *live_find(const struct live *live, const uint8_t *key)
{
	for (unsigned int i = 0; i < live->count; i++) {
		if (memcmp(live->peers[i]->row.key, key, COST_KEY_BYTES) == 0)
			return live->peers[i];
	}
	return NULL;
}

static struct live_peer *live_gone(const struct live *live)
{
	for (unsigned int i = 0; i < live->count; i++) {
		if (live->peers[i]->gone)
			return live->peers[i];
	}
	return NULL;
}

static int live_peer_get(struct live *live, const uint8_t *key, struct live_peer **peer_p)
{
	struct live_peer *peer = live_find(live, key);

	if (!peer && live->count == COST_PAGE_PEERS) {
		peer = live_gone(live);
		live->refused += !peer;
		if (!peer)
			return err_raise(ERR_LIMIT, "cost page: %u peers",
					 COST_PAGE_PEERS);
		peer->asked_ns = 0;
	} else if (!peer) {
		peer = mem_zalloc(sizeof(*peer));
		if (!peer)
			return err_pass(-ENOMEM);
		live->peers[live->count++] = peer;
	}
	if (memcmp(peer->row.key, key, COST_KEY_BYTES) != 0) {
		memcpy(peer->row.key, key, COST_KEY_BYTES);
		peer->row.requesters[COST_HOST] = peer->row.requesters[COST_GPU] = 1;
	}
	*peer_p = peer;
	return 0;
}

/* A peer has one connection at a time, and its end drops the row (live_drop()). */
static struct cost_link *live_link(struct live_peer *peer, const char *transport)
{
	struct cost_link *link = &peer->row.links[0];

	if (peer->row.link_count && strcmp(link->name, transport) == 0)
		return link;
	peer->row.link_count = 1;
	*link = (struct cost_link){.congestion.value = 0};
	peer->pulls = peer->rounds = (struct line_sums){.count = 0};
	snprintf(link->name, sizeof(link->name), "%s", transport);
	return link;
}

static int live_tell(struct live *live, struct live_peer *peer)
{
	peer->gone = false;
	return err_pass(cost_page_set_peer(live->page, &peer->row));
}

/* ---- pulls ---- */

static void sums_add(struct line_sums *sums, double bytes, double us)
{
	double w = 1 / ((1 + bytes / HALF_BYTES) * (1 + bytes / HALF_BYTES));

	sums->n = sums->n * LINE_DECAY + 1;
	sums->w = sums->w * LINE_DECAY + w;
	sums->x = sums->x * LINE_DECAY + w * bytes;
	sums->y = sums->y * LINE_DECAY + w * us;
	sums->xx = sums->xx * LINE_DECAY + w * bytes * bytes;
	sums->xy = sums->xy * LINE_DECAY + w * bytes * us;
	sums->yy = sums->yy * LINE_DECAY + w * us * us;
	sums->count += sums->count < UINT32_MAX;
}

/* False: its sizes do not differ enough for a line that grows. */
static bool sums_line(const struct line_sums *s, double *fixed_p, double *slope_p)
{
	double det = s->w * s->xx - s->x * s->x;

	if (!(det > SIZES_DIFFER * s->w * s->xx))
		return false;
	*slope_p = (s->w * s->xy - s->x * s->y) / det;
	*fixed_p = (s->y - *slope_p * s->x) / s->w;
	return *slope_p > 0 && *fixed_p >= 0;
}

/* The distance of the times from the line, for a weight of 1. */
static double sums_left(const struct line_sums *s, double fixed, double slope)
{
	double left = s->yy - 2 * fixed * s->y - 2 * slope * s->xy +
		      fixed * fixed * s->w + 2 * fixed * slope * s->x +
		      slope * slope * s->xx;

	return sqrt(fmax(left, 0) / s->n);
}

static void pull_figure(struct cost_figure *figure, double value, double error,
			const struct line_sums *p, uint32_t now_s)
{
	*figure = (struct cost_figure){.value = value,
				       .mad = error / 1.4826,
				       .error = error,
				       .count = p->count,
				       .at_s = now_s};
}

/* A line, if sizes differ enough for one; else the fixed part is an echo's and the mean
 * determines the rate. */
static void pulls_fit(const struct line_sums *p, struct cost_link *link, uint32_t now_s)
{
	double det = p->w * p->xx - p->x * p->x;
	double mean_x = p->x / p->w, mean_y = p->y / p->w, slope = 0, fixed = 0, left;

	if (!sums_line(p, &fixed, &slope)) {
		fixed = link->probe.count ? fmin(link->probe.value, mean_y / 2) : 0;
		slope = (mean_y - fixed) / mean_x;
		det = 0;
	}
	left = sums_left(p, fixed, slope);
	if (det > 0) {
		pull_figure(&link->pull_probe, fixed, left * sqrt(p->xx / det), p, now_s);
		pull_figure(&link->pull_bandwidth, 1 / slope,
			    left * sqrt(p->w / det) / (slope * slope), p, now_s);
	} else {
		pull_figure(&link->pull_probe, fixed, fixed / 2, p, now_s);
		pull_figure(&link->pull_bandwidth, 1 / slope,
			    (left / sqrt(p->w) + fixed / 2) / (mean_y * slope), p, now_s);
	}
}

static void figure_scale(struct cost_figure *figure, double by)
{
	figure->value *= by;
	figure->mad *= by;
	figure->error *= by;
}

/* From past pulls, without congestion. */
static void live_pulls(const struct live_peer *peer, struct cost_link *link,
		       uint32_t now_s)
{
	const struct line_sums *p = &peer->pulls;
	double congestion = link->congestion.value;

	if (p->count == 0)
		return;
	pulls_fit(p, link, now_s);
	if (congestion > 0) {
		figure_scale(&link->pull_probe, 1 / congestion);
		figure_scale(&link->pull_bandwidth, congestion);
	}
}

void live_pull(struct live *live, const struct live_way *way, double bytes, double us)
{
	struct live_peer *peer;
	struct cost_link *link;

	if (!(bytes > 0) || !(us > 0))
		return;
	if (live_peer_get(live, way->key, &peer) < 0) {
		err_clear();
		return;
	}
	link = live_link(peer, way->transport);
	sums_add(&peer->pulls, bytes, us);
	live_pulls(peer, link, way->now_s);
	if (live_tell(live, peer) < 0)
		err_clear();
}

/* ---- echoes and rounds ---- */

int live_echoes(struct live *live, const struct live_way *way, const struct fit *fit)
{
	struct live_peer *peer;
	struct cost_link *link;
	struct fit_line line;
	int r = fit_line(fit, way->now_s, &line);

	if (r)
		return err_raise(ERR_STATE, "the echo times do not grow with their "
					    "size; measure again");
	r = live_peer_get(live, way->key, &peer);
	if (r < 0)
		return err_pass(r);
	link = live_link(peer, way->transport);
	link->probe = line.fixed;
	link->turn = (struct cost_figure){.count = line.fixed.count,
					  .at_s = way->now_s}; /* is in the probe */
	link->bandwidth = line.rate;
	link->model_error = line.residual;
	link->congestion = (struct cost_figure){.count = 0};
	peer->rounds = (struct line_sums){.count = 0};
	if (peer->pulls.count == 0) { /* like bytes of an echo, with doubt */
		link->pull_probe = link->probe;
		link->pull_bandwidth = link->bandwidth;
		link->pull_probe.error = PULL_UNKNOWN_ERROR * link->probe.value;
		link->pull_bandwidth.error = PULL_UNKNOWN_ERROR * link->bandwidth.value;
	}
	live_pulls(peer, link, way->now_s);
	peer->drift = (struct fit_drift){.outside = 0};
	peer->row.stale = 0;
	return err_pass(live_tell(live, peer));
}

/* Of the path, by the constants before this round. True: stale for the first time. */
static bool live_drift(struct live_peer *peer, const struct cost_link *link,
		       const struct live_round *round)
{
	const struct cost_holder holder = {.links = link, .link_count = 1};
	double took = round->us - round->queue_us - round->attend_us;
	const struct cost_link *used;
	bool stale;

	if (!(took > 0))
		return false;
	stale = fit_drift_add(&peer->drift, took,
			      cost_transfer(&holder, round->bytes, &used).us);
	peer->row.stale = peer->drift.stale;
	return stale;
}

/* As a decision prices it: for the number of requesters in the call. The factor is of the
 * geometry, as its speed. */
static void live_attend(const struct live *live, const uint8_t *key,
			const struct live_round *round, uint32_t now_s)
{
	struct cost_speed speed;
	double us;

	if (cost_page_speed(live->page, key, &round->shape, round->kind, &speed))
		return;
	us = cost_attend(&speed.compute, &round->shape, round->query, round->tokens,
			 round->selected)
		     .us *
	     fmax(round->requesters / COST_FAN_IN_FLAT, 1);
	if (!(us > 0))
		return;
	fit_live(&speed.attend,
		 fmin(fmax(round->attend_us / us, 1 / FACTOR_MOST), FACTOR_MOST), now_s);
	if (cost_page_set_speed(live->page, &speed) < 0)
		err_clear();
}

/* The fixed part of rounds compared with an echo, so that one factor on the time of each
 * byte fits all sizes. The error is the line's at zero bytes: the turn compensates an
 * error of the factor at the measured sizes. */
static void turn_fit(const struct line_sums *s, const struct cost_link *link,
		     struct cost_figure *turn)
{
	double det = s->w * s->xx - s->x * s->x, rate = link->bandwidth.value;
	double slope = (s->w * s->xy - s->x * s->y) / det;
	double mean_x = s->x / s->w, mean_y = s->y / s->w;
	double left = sums_left(s, mean_y - slope * mean_x, slope);
	double factor = fmax((slope - left * sqrt(s->w / det)) * rate, 1);

	turn->value = fmax(mean_y / factor - mean_x / rate - link->probe.value, 0);
	turn->error = left * sqrt(s->xx / det) / factor;
}

static void live_turn(struct cost_link *link, const struct line_sums *rounds,
		      double plain, uint32_t now_s)
{
	double det = rounds->w * rounds->xx - rounds->x * rounds->x;
	double before = plain + link->turn.value;
	struct cost_figure turn;

	if (rounds->count < TURN_ROUNDS || !(det > SIZES_DIFFER * rounds->w * rounds->xx))
		return;
	turn_fit(rounds, link, &turn);
	link->turn = (struct cost_figure){.value = link->turn.value +
						   (turn.value - link->turn.value) /
							   FIT_LIVE_PART,
					  .mad = turn.error / 1.4826,
					  .error = turn.error,
					  .count = rounds->count,
					  .at_s = now_s};
	link->congestion.value *= before / (plain + link->turn.value);
}

static void live_congestion(struct live_peer *peer, struct cost_link *link,
			    const struct live_round *round, uint32_t now_s)
{
	struct line_sums *rounds = &peer->rounds;
	double took = round->us - round->queue_us - round->attend_us;
	double plain = link->probe.value + round->bytes / link->bandwidth.value;

	if (!(plain > 0 && took > 0))
		return;
	sums_add(rounds, round->bytes, took);
	live_turn(link, rounds, plain, now_s);
	fit_live(&link->congestion, fmin(took / (plain + link->turn.value), FACTOR_MOST),
		 now_s);
	live_pulls(peer, link, now_s);
}

bool live_round(struct live *live, const struct live_way *way,
		const struct live_round *round)
{
	struct live_peer *peer = live_find(live, way->key);
	struct cost_link *link;
	double *requesters;
	bool stale;

	if (!peer)
		return false;
	link = live_link(peer, way->transport);
	if (!link->probe.count || !(link->bandwidth.value > 0))
		return false;
	stale = live_drift(peer, link, round);
	live_attend(live, way->key, round, way->now_s);
	live_congestion(peer, link, round, way->now_s);
	fit_live(&peer->row.wait[round->kind], round->queue_us, way->now_s);
	requesters = &peer->row.requesters[round->kind];
	*requesters += (round->requesters - *requesters) / REQUESTERS_PART;
	if (live_tell(live, peer) < 0)
		err_clear();
	return stale;
}

/* ---- the rest ---- */

int live_speed(struct live *live, const uint8_t key[COST_KEY_BYTES],
	       const struct cost_shape *shape, uint32_t kind,
	       const struct cost_compute *compute)
{
	struct cost_compute before;
	struct cost_speed speed;

	/* after a new measurement the recent factor is kept */
	if (cost_page_speed(live->page, key, shape, kind, &speed) ||
	    memcmp(&speed.shape, shape, sizeof(*shape)) != 0)
		speed = (struct cost_speed){.kind = kind};
	memcpy(speed.key, key, COST_KEY_BYTES);
	speed.shape = *shape;
	before = speed.compute;
	speed.compute = *compute;
	fit_anew(&speed.compute.fixed, &before.fixed);
	fit_anew(&speed.compute.row, &before.row);
	fit_anew(&speed.compute.memory, &before.memory);
	fit_anew(&speed.compute.flops, &before.flops);
	return err_pass(cost_page_set_speed(live->page, &speed));
}

void live_no_attend(struct live *live, const uint8_t key[COST_KEY_BYTES], uint32_t kind,
		    bool cannot)
{
	struct live_peer *peer = live_find(live, key);

	if (!peer || peer->gone || peer->row.no_attend[kind] == cannot)
		return;
	peer->row.no_attend[kind] = cannot;
	if (live_tell(live, peer) < 0)
		err_clear();
}

void live_home(struct live *live, const struct cost_home *home)
{
	struct cost_home now = *home, before;

	if (cost_page_home(live->page, &before) == 0) {
		fit_anew(&now.merge, &before.merge);
		fit_anew(&now.merge_row, &before.merge_row);
		fit_anew(&now.splice, &before.splice);
		fit_anew(&now.splice_token, &before.splice_token);
	}
	cost_page_set_home(live->page, &now);
}

void live_home_round(struct live *live, const struct live_round *round, uint32_t now_s)
{
	live_attend(live, cost_self, round, now_s);
}

void live_drop(struct live *live, const uint8_t key[COST_KEY_BYTES])
{
	struct live_peer *peer = live_find(live, key);

	if (!peer)
		return;
	*peer = (struct live_peer){.gone = true, .asked_ns = peer->asked_ns};
	memcpy(peer->row.key, key, COST_KEY_BYTES);
	peer->row.requesters[COST_HOST] = peer->row.requesters[COST_GPU] = 1;
	cost_page_drop(live->page, key);
}

bool live_peer_at(const struct live *live, unsigned int i, struct cost_peer *peer_p)
{
	if (i >= live->count)
		return false;
	*peer_p = live->peers[i]->row;
	return true;
}

bool live_stale(const struct live *live, const uint8_t key[COST_KEY_BYTES])
{
	const struct live_peer *peer = live_find(live, key);

	return peer && peer->drift.stale;
}

uint64_t live_ask(struct live *live, const uint8_t key[COST_KEY_BYTES], uint64_t now_ns,
		  uint64_t again_ns)
{
	struct live_peer *peer;

	if (live_peer_get(live, key, &peer) < 0) {
		err_clear();
		return again_ns;
	}
	if (peer->asked_ns && now_ns - peer->asked_ns < again_ns)
		return again_ns - (now_ns - peer->asked_ns);
	peer->asked_ns = now_ns;
	return 0;
}

bool live_knows(const struct live *live, const uint8_t key[COST_KEY_BYTES])
{
	const struct live_peer *peer = live_find(live, key);

	return peer && peer->row.link_count > 0 && peer->row.links[0].probe.count > 0;
}
