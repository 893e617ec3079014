/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cost: the closed form.
 *
 * The price of a method is a sum of few terms, each a measured constant times a known
 * size. There are no special cases for decode or for small chunks: the winner follows
 * from the sums alone, and tests check the rules that must follow.
 *
 *   M = query * heads                                 rows of a layer and step
 *   A = a0 + a1 M + c D / Bm + 2 (dqk + dv) n M / F   attention on one machine
 *   R = max over holders of ( (f + (M (q + p) + 4 k query) / BW) * congestion
 *                             + wait + A_h * lately * max(1, N / 8) ) + merges
 *   route = S L max(0, R - hidden)
 *   fetch = sum of pulls + Z + S L A_o                a selection: S L (gathers + A_o)
 *   local = C L t + S L A_o
 *
 * c: calls of a kernel, each of which reads the KV. Reading and arithmetic add: on one
 * core a kernel does one after the other.
 *
 * Three properties distinguish these sums from plausible wrong ones: a row is a token
 * *and head*; routing is paid per layer and step, because the next layer's query needs
 * this layer's output, while a pull is paid once; and after a fetch the requester still
 * attends, at the cost of the holder's attention.
 *
 * Holders work in parallel, so a round trip is as long as the slowest; pulls end in one
 * receiver's memory, so they add up.
 *
 * Errors. Each price carries its variance: a term's is that of its constant, scaled;
 * terms add in quadrature. Attention at home is one figure in fetch and local, so its
 * error cancels between them; and between all three if home is taken to be as fast as the
 * only holder, or as much slower than it was measured. A link's congestion, which route
 * and fetch share, is taken as independent: that overstates the error of their
 * difference, which only keeps the last choice longer. A maximum's variance is that of
 * the larger term.
 */
#include "daemon/cost/cost.h"

#include <math.h>
#include <stddef.h>

static const struct cost_price price_nothing = {0, 0};
static const struct cost_price price_never = {INFINITY, 0};

static struct cost_price price_add(struct cost_price a, struct cost_price b)
{
	return (struct cost_price){a.us + b.us, a.variance + b.variance};
}

static struct cost_price price_scale(struct cost_price a, double by)
{
	if (!(by > 0))
		return price_nothing; /* zero steps cost nothing */
	return (struct cost_price){a.us * by, a.variance * by * by};
}

static struct cost_price price_of(const struct cost_figure *figure, double times)
{
	double error = figure->error * times;

	return (struct cost_price){figure->value * times, error * error};
}

/* amount / rate: its relative error is the rate's. */
static struct cost_price price_by_rate(double amount, const struct cost_figure *rate)
{
	double us, error;

	if (!(amount > 0))
		return price_nothing;
	if (!(rate->value > 0))
		return price_never;
	us = amount / rate->value;
	error = us * rate->error / rate->value;
	return (struct cost_price){us, error * error};
}

static double cost_at_least_one(double value)
{
	return value > 1 ? value : 1;
}

/* ---- the terms ---- */

struct cost_price cost_attend(const struct cost_compute *compute,
			      const struct cost_shape *shape, double query, double tokens,
			      bool selected)
{
	double rows = query * shape->heads, read = tokens;
	double work = 2.0 * (shape->dqk + shape->dv) * tokens * rows;
	struct cost_price price;

	if (selected) /* each query token's selection, scattered */
		read *= query * cost_at_least_one(compute->gather.value);
	else if (compute->call > 0)
		read *= cost_at_least_one(rows * tokens / compute->call);
	price = price_add(price_of(&compute->fixed, 1), price_of(&compute->row, rows));
	price = price_add(price,
			  price_by_rate(read * shape->token_bytes, &compute->memory));
	return price_add(price, price_by_rate(work, &compute->flops));
}

/* `pull`: by the constants of a pull. */
static struct cost_price cost_link_price(const struct cost_link *link, double bytes,
					 bool pull)
{
	const struct cost_figure *probe = pull ? &link->pull_probe : &link->probe;
	const struct cost_figure *rate = pull ? &link->pull_bandwidth : &link->bandwidth;
	struct cost_price price;
	double error;

	if (!probe->count || !(rate->value > 0))
		return price_never;
	price = price_add(price_of(probe, 1), price_by_rate(bytes, rate));
	if (!pull)
		price = price_add(price, price_of(&link->turn, 1));
	error = price.us * link->model_error;
	price.variance += error * error;
	if (link->congestion.value > 0) {
		error = price.us * link->congestion.error;
		price = price_scale(price, link->congestion.value);
		price.variance += error * error;
	}
	return price;
}

static struct cost_price cost_link_best(const struct cost_holder *holder, double bytes,
					bool pull, const struct cost_link **link_p)
{
	struct cost_price best = price_never;

	*link_p = NULL;
	for (unsigned int i = 0; i < holder->link_count; i++) {
		struct cost_price price = cost_link_price(&holder->links[i], bytes, pull);

		if (price.us < best.us) {
			best = price;
			*link_p = &holder->links[i];
		}
	}
	return best;
}

struct cost_price cost_transfer(const struct cost_holder *holder, double bytes,
				const struct cost_link **link_p)
{
	return cost_link_best(holder, bytes, false, link_p);
}

struct cost_price cost_pull(const struct cost_holder *holder, double bytes)
{
	const struct cost_link *link;

	return cost_link_best(holder, bytes, true, &link);
}

struct cost_price cost_splice(const struct cost_home *home, double layers, double tokens)
{
	return price_scale(price_add(price_of(&home->splice, 1),
				     price_of(&home->splice_token, tokens)),
			   layers);
}

/* At its recent speed: other programs use cores, and KV may be uncached. */
static struct cost_price cost_attend_at(const struct cost_holder *holder,
					const struct cost_case *c, double tokens)
{
	struct cost_price price =
		cost_attend(holder->compute, &c->shape, c->query, tokens, c->selected);
	double error = price.us * holder->attend.error;

	if (!(holder->attend.value > 0))
		return price;
	price = price_scale(price, holder->attend.value);
	price.variance += error * error;
	return price;
}

/* ---- the methods ---- */

static double cost_holder_tokens(const struct cost_case *c,
				 const struct cost_holder *holder)
{
	return c->selected ? holder->selected : holder->tokens;
}

/* One layer and step at one holder, without the merge. */
static struct cost_price cost_round_at(const struct cost_case *c,
				       const struct cost_holder *holder,
				       const struct cost_link **link_p)
{
	double rows = c->query * c->shape.heads;
	double bytes = rows * (c->shape.q_bytes + (double)c->shape.partial_bytes);
	struct cost_price attend;

	*link_p = NULL;
	if (!holder->compute)
		return price_never;
	if (c->selected) /* the indices are sent, too; heads share them */
		bytes += 4 * holder->selected * c->query;
	attend = cost_attend_at(holder, c, cost_holder_tokens(c, holder));
	attend = price_scale(attend,
			     cost_at_least_one(holder->requesters / COST_FAN_IN_FLAT));
	attend = price_add(attend, price_of(&holder->wait, 1));
	return price_add(attend, cost_transfer(holder, bytes, link_p));
}

/* R. */
static struct cost_price cost_round(const struct cost_case *c, struct cost_prices *prices)
{
	double parts = c->query * c->shape.heads * c->holder_count;
	struct cost_price slowest = {-1, 0};

	for (unsigned int i = 0; i < c->holder_count; i++) {
		const struct cost_link *link;
		struct cost_price price = cost_round_at(c, &c->holders[i], &link);

		if (price.us > slowest.us) {
			slowest = price;
			prices->slowest = i;
			prices->link = link;
		}
	}
	if (!c->holder_count)
		return price_never;
	slowest = price_add(slowest, price_of(&c->home.merge, 1));
	return price_add(slowest, price_of(&c->home.merge_row, parts));
}

/* Home as a holder. Without a measurement, or without its recent factor: as the first
 * holder that has one, because then it cancels; and if none computes attention, it is in
 * each remaining method, and cancels, too. *from_other_p: it has that holder's recent
 * factor.
 */
static struct cost_holder cost_home_as(const struct cost_case *c, bool *from_other_p)
{
	struct cost_holder home = {.compute = c->compute, .attend = c->attend};

	*from_other_p = false;
	for (unsigned int i = 0; i < c->holder_count; i++) {
		if (!c->holders[i].compute)
			continue;
		if (!home.compute)
			return c->holders[i];
		if (!(home.attend.value > 0)) {
			home.attend = c->holders[i].attend;
			*from_other_p = true;
		}
		break;
	}
	return home;
}

static double cost_tokens(const struct cost_case *c)
{
	double tokens = 0;

	for (unsigned int i = 0; i < c->holder_count; i++)
		tokens += cost_holder_tokens(c, &c->holders[i]);
	return tokens;
}

/* A_o. */
static struct cost_price cost_attend_home(const struct cost_case *c)
{
	struct cost_holder home;
	bool from_other;

	if (c->attend_us > 0)
		return (struct cost_price){c->attend_us, 0};
	home = cost_home_as(c, &from_other);
	return home.compute ? cost_attend_at(&home, c, cost_tokens(c)) : price_nothing;
}

/* The common errors of attention at the only holder and at home. */
static double cost_shared_attend(const struct cost_case *c)
{
	const struct cost_holder *holder = &c->holders[0];
	double tokens = cost_tokens(c), there, here;
	bool from_other;

	if (c->attend_us > 0 || c->holder_count != 1 || !holder->compute)
		return 0;
	if (!c->compute)
		return cost_attend_home(c).variance;
	(void)cost_home_as(c, &from_other);
	if (!from_other)
		return 0;
	there = cost_attend(holder->compute, &c->shape, c->query, tokens, c->selected).us;
	here = cost_attend(c->compute, &c->shape, c->query, tokens, c->selected).us;
	return there * here * holder->attend.error * holder->attend.error *
	       cost_at_least_one(holder->requesters / COST_FAN_IN_FLAT);
}

/* The pulls before the first step, and those in each layer and step. */
static void cost_pulls(const struct cost_case *c, struct cost_price *once_p,
		       struct cost_price *each_p)
{
	struct cost_price sum = price_nothing;
	double tokens = 0;

	*once_p = *each_p = price_nothing;
	for (unsigned int i = 0; i < c->holder_count; i++) {
		const struct cost_holder *holder = &c->holders[i];
		double bytes = c->shape.token_bytes * cost_holder_tokens(c, holder);

		sum = price_add(
			sum,
			cost_pull(holder, bytes * (c->selected ? c->query : c->layers)));
		tokens += holder->tokens;
	}
	if (c->selected) {
		*each_p = sum;
		return;
	}
	*once_p = sum;
	if (c->shifted)
		*once_p = price_add(sum, cost_splice(&c->home, c->layers, tokens));
}

/* A constant is missing, although the method is possible. */
static bool cost_unknown(const struct cost_case *c, const struct cost_holder *holder)
{
	const struct cost_link *link;

	if (!holder->compute && !holder->no_attend)
		return true;
	if (!holder->no_attend && isinf(cost_transfer(holder, 1, &link).us))
		return true;
	return !c->no_pages && isinf(cost_pull(holder, 1).us);
}

/* S*: route - fetch is `once` less a constant per step. */
static double cost_even_steps(const struct cost_prices *prices, double layers,
			      double round, double each)
{
	double surplus = layers * (round - prices->attend.us - each);

	if (isinf(round) || isinf(prices->once.us))
		return isinf(prices->once.us) ? INFINITY : 0;
	return surplus > 0 ? prices->once.us / surplus : INFINITY;
}

void cost_all(const struct cost_case *c, struct cost_prices *prices)
{
	double turns = c->steps * c->layers, tokens = 0;
	struct cost_price round, each, local = price_never;

	*prices = (struct cost_prices){0};
	for (unsigned int i = 0; i < c->holder_count; i++) {
		if (c->holders[i].requesters > COST_FAN_IN_FLAT)
			prices->replicate = true;
		if (c->holders[i].stale)
			prices->stale = true;
		if (cost_unknown(c, &c->holders[i]))
			prices->unknown = true;
	}
	prices->round = cost_round(c, prices);
	prices->attend = cost_attend_home(c);
	cost_pulls(c, &prices->once, &each);
	if (c->no_pages)
		prices->once = price_never;
	for (unsigned int i = 0; i < c->holder_count; i++)
		tokens += c->holders[i].tokens;
	if (c->recompute > 0 && !c->no_pages)
		local = (struct cost_price){c->recompute * c->layers * tokens, 0};
	round = prices->round;
	round.us = round.us > c->hidden ? round.us - c->hidden : 0;
	prices->route = price_scale(round, turns);
	prices->fetch = price_add(prices->once,
				  price_scale(price_add(each, prices->attend), turns));
	prices->local = price_add(local, price_scale(prices->attend, turns));
	prices->even = cost_even_steps(prices, c->layers, round.us, each.us);
	prices->shared_home = prices->attend.variance * turns * turns;
	prices->shared_route = cost_shared_attend(c) * turns * turns;
}

/* ---- the choice ---- */

/* Is b cheaper than a by more than twice the error of the difference? */
static bool cost_below(const struct cost_prices *prices, enum cost_way b, enum cost_way a)
{
	const struct cost_price way[] = {price_never, prices->route, prices->fetch,
					 prices->local};
	double gap = way[a].us - way[b].us, variance, shared;

	if (isinf(way[a].us))
		return !isinf(way[b].us);
	/* less the common variance of the two methods */
	shared = a == COST_ROUTE || b == COST_ROUTE ? prices->shared_route
						    : prices->shared_home;
	variance = way[a].variance + way[b].variance - 2 * shared;
	return gap > 0 && gap >= 2 * sqrt(variance > 0 ? variance : 0);
}

struct cost_choice cost_choose(const struct cost_prices *prices, enum cost_way last)
{
	const struct cost_price way[] = {price_never, prices->route, prices->fetch,
					 prices->local};
	struct cost_choice choice = {COST_NONE, !prices->stale && !prices->unknown};
	enum cost_way best = COST_NONE;

	for (enum cost_way w = COST_ROUTE; w <= COST_LOCAL; w++)
		if (way[w].us < way[best].us)
			best = w;
	choice.way = best;
	for (enum cost_way w = COST_ROUTE; w <= COST_LOCAL && best; w++)
		if (w != best && !cost_below(prices, best, w))
			choice.sure = false;
	if (best == COST_NONE)
		choice.sure = false;
	else if (!isinf(way[last].us) &&
		 (prices->stale || !cost_below(prices, best, last)))
		choice.way = last;
	return choice;
}

/* ---- shapes ---- */

#define SOFTMAX_BYTES 8u /* a row's maximum and denominator in fp32 */

struct cost_shape cost_shape_mla(uint32_t heads, uint32_t dqk, uint32_t dv,
				 uint32_t bytes, uint32_t out_bytes)
{
	return (struct cost_shape){.heads = heads,
				   .kv_heads = 1,
				   .dqk = dqk,
				   .dv = dv,
				   .q_bytes = dqk * bytes,
				   .partial_bytes = dv * out_bytes + SOFTMAX_BYTES,
				   .token_bytes = dqk * bytes}; /* V lies in K */
}

struct cost_shape cost_shape_gqa(uint32_t heads, uint32_t kv_heads, uint32_t dqk,
				 uint32_t dv, uint32_t bytes, uint32_t out_bytes)
{
	return (struct cost_shape){.heads = heads,
				   .kv_heads = kv_heads,
				   .dqk = dqk,
				   .dv = dv,
				   .q_bytes = dqk * bytes,
				   .partial_bytes = dv * out_bytes + SOFTMAX_BYTES,
				   .token_bytes = kv_heads * (dqk + dv) * bytes};
}
