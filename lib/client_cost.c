/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd_decide(): the closed form of daemon/cost with an engine's case and a page's
 * constants. It is called once per layer group or step, during work of tens of
 * microseconds, so it only copies a few rows of the page and computes: no allocation, no
 * clock, no system call, and no error text, which would be costly for a million calls.
 *
 * A row that is being written is retried for a bounded time. Unknown constants are not
 * estimated: without a measurement of its attention a holder cannot be routed to, and
 * without a measured transfer it cannot be fetched from.
 */

#include <math.h>
#include <string.h>

#include "daemon/cost/cost.h"
#include "daemon/cost/page.h"
#include "lib/kvd_cost.h"

#define HEADS_MAX 65536u
#define VALUES_MAX 65536u
#define TOKENS_MAX (UINT64_C(1) << 40)

_Static_assert(KVD_COST_HOLDERS_MAX == COST_HOLDERS_MAX, "holders");
_Static_assert((int)KVD_COST_ROUTE == COST_ROUTE && (int)KVD_COST_FETCH == COST_FETCH &&
		       (int)KVD_COST_LOCAL == COST_LOCAL,
	       "ways");

static struct cost_page *decide_page(const struct kvd_cost_page *page)
{
	return (struct cost_page *)(uintptr_t)page;
}

int kvd_cost_preset(const char *name, struct kvd_cost_page **page_p)
{
	struct cost_page *page = NULL;
	int r;

	*page_p = NULL;
	if (!name || !cost_preset_find(name))
		return -KVD_E_NOTFOUND;
	r = cost_page_preset(name, &page);
	if (r < 0)
		return -KVD_E_NOMEM;
	*page_p = (struct kvd_cost_page *)page;
	return 0;
}

void kvd_cost_close(struct kvd_cost_page *page)
{
	cost_page_free(decide_page(page));
}

/* ---- arguments ---- */

static bool decide_within(uint32_t value, uint32_t max)
{
	return value && value <= max;
}

static bool decide_amount_ok(double value)
{
	return isfinite(value) && value >= 0;
}

static bool decide_args_ok(const struct kvd_decide_args *args)
{
	if (args->kind != KVD_COST_GQA && args->kind != KVD_COST_MLA)
		return false;
	if (!decide_within(args->layers, HEADS_MAX) ||
	    !decide_within(args->heads, HEADS_MAX) ||
	    !decide_within(args->dqk, VALUES_MAX) || !decide_within(args->dv, VALUES_MAX))
		return false;
	if (args->kind == KVD_COST_GQA && !decide_within(args->kv_heads, args->heads))
		return false;
	if (args->value_bytes > 8 || args->out_bytes > 8)
		return false;
	if (!args->holders || !args->holder_count ||
	    args->holder_count > KVD_COST_HOLDERS_MAX)
		return false;
	for (size_t i = 0; i < args->holder_count; i++) {
		const struct kvd_cost_holder *holder = &args->holders[i];

		if (holder->tokens > TOKENS_MAX || holder->selected > holder->tokens)
			return false;
	}
	return (unsigned int)args->last <= KVD_COST_LOCAL &&
	       decide_amount_ok(args->attend_us) && decide_amount_ok(args->hidden_us) &&
	       decide_amount_ok(args->recompute_us);
}

static struct cost_shape decide_shape(const struct kvd_decide_args *args)
{
	uint32_t value = args->value_bytes ? args->value_bytes : 2;
	uint32_t out = args->out_bytes ? args->out_bytes : 2;
	struct cost_shape shape =
		args->kind == KVD_COST_MLA
			? cost_shape_mla(args->heads, args->dqk, args->dv, value, out)
			: cost_shape_gqa(args->heads, args->kv_heads, args->dqk, args->dv,
					 value, out);

	if (args->token_bytes)
		shape.token_bytes = args->token_bytes;
	return shape;
}

/* ---- the page's constants ---- */

/* Rows as read; a case points to them. */
struct known {
	struct cost_holder holders[COST_HOLDERS_MAX];
	struct cost_peer peers[COST_HOLDERS_MAX];
	struct cost_speed speeds[COST_HOLDERS_MAX], home;
};

static int decide_holder(const struct cost_page *page, const struct cost_shape *shape,
			 const struct kvd_cost_holder *from, struct known *known,
			 size_t i)
{
	struct cost_holder *holder = &known->holders[i];
	struct cost_peer *peer = &known->peers[i];
	const uint32_t kind = from->gpu ? COST_GPU : COST_HOST;
	int r;

	*holder = (struct cost_holder){.tokens = (double)from->tokens,
				       .selected = (double)from->selected};
	r = cost_page_peer(page, from->peer, peer);
	if (r)
		return r;
	holder->links = peer->links;
	holder->link_count = peer->link_count;
	holder->wait = peer->wait[kind];
	holder->requesters = peer->requesters[kind];
	holder->stale = peer->stale;
	holder->no_attend = peer->no_attend[kind];
	r = cost_page_speed(page, from->peer, shape, kind, &known->speeds[i]);
	if (!r) {
		holder->compute = &known->speeds[i].compute;
		holder->attend = known->speeds[i].attend;
	}
	return r;
}

static int decide_read(const struct cost_page *page, const struct kvd_decide_args *args,
		       struct known *known, struct cost_case *c)
{
	int r;

	for (size_t i = 0; i < args->holder_count; i++)
		if (decide_holder(page, &c->shape, &args->holders[i], known, i) ==
		    COST_PAGE_BUSY)
			return COST_PAGE_BUSY;
	c->holders = known->holders;
	c->holder_count = (unsigned int)args->holder_count;
	r = cost_page_speed(page, cost_self, &c->shape, COST_HOST, &known->home);
	if (!r) {
		c->compute = &known->home.compute;
		c->attend = known->home.attend;
	}
	if (r == COST_PAGE_BUSY)
		return r;
	return cost_page_home(page, &c->home);
}

/* ---- the answer ---- */

static struct kvd_cost_price decide_price(struct cost_price price)
{
	return (struct kvd_cost_price){
		.us = price.us, .error_us = isinf(price.us) ? 0 : sqrt(price.variance)};
}

static void decide_answer(const struct cost_prices *prices, struct cost_choice choice,
			  struct kvd_decide_result *result)
{
	result->way = (enum kvd_cost_way)choice.way;
	result->sure = choice.sure;
	result->replicate = prices->replicate;
	result->route = decide_price(prices->route);
	result->fetch = decide_price(prices->fetch);
	result->local = decide_price(prices->local);
	result->round = decide_price(prices->round);
	result->attend = decide_price(prices->attend);
	result->once = decide_price(prices->once);
	result->even_steps = prices->even;
	result->slowest = prices->slowest;
	if (prices->link)
		memcpy(result->transport, prices->link->name,
		       sizeof(result->transport) - 1);
}

int kvd_decide(const struct kvd_decide_args *args, const struct kvd_cost_page *page,
	       struct kvd_decide_result *result)
{
	struct cost_prices prices;
	struct cost_choice choice;
	struct known known; /* the target has been read before */
	struct cost_case c;

	*result = (struct kvd_decide_result){.way = KVD_COST_NONE};
	if (!page || !decide_args_ok(args))
		return -KVD_E_INVAL;
	c = (struct cost_case){
		.shape = decide_shape(args),
		.attend_us = args->attend_us,
		.layers = args->layers,
		.steps = cost_steps(args->steps, args->steps_made),
		.query = args->query_tokens ? args->query_tokens : 1,
		.hidden = args->hidden_us,
		.recompute = args->recompute_us,
		.selected = args->selected,
		.shifted = args->shifted,
		.no_pages = args->no_pages,
	};
	if (decide_read(decide_page(page), args, &known, &c))
		return -KVD_E_BUSY;
	cost_all(&c, &prices);
	choice = cost_choose(&prices, (enum cost_way)args->last);
	if (choice.way == COST_NONE)
		return -KVD_E_NOTFOUND;
	decide_answer(&prices, choice, result);
	return 0;
}
