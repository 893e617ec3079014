/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cost: what it takes to let query rows attend to KV that lies at other daemons, in the
 * three ways there are. Pure arithmetic: no state, no clock, no memory of its own.
 *
 *   route  ship the query rows to each holder, which attends in place; merge what returns
 *   fetch  pull the KV once (of a selection: what is selected, each time), attend at home
 *   local  compute the KV again, attend at home
 *
 * Units: µs, bytes, B/µs (the same as MB/s), FLOP/µs (the same as MFLOP/s). A count that
 * is not known to be whole is a double. docs/route.md derives the formulas.
 */
#ifndef KVD_COST_COST_H
#define KVD_COST_COST_H

#include <stdbool.h>
#include <stdint.h>

#define COST_LINKS_MAX 4u   /* ways to one holder */
#define COST_HOLDERS_MAX 8u /* of one decision */
#define COST_FAN_IN_FLAT 8  /* requesters that a holder serves at the price of one */

/* A constant as it was measured. `count` 0: it was not. */
struct cost_figure {
	double value, mad; /* the median, and the median distance from it */
	double error;	   /* one standard deviation of the value */
	uint32_t count;
	uint32_t at_s; /* CLOCK_MONOTONIC, of the last measurement */
};
static inline struct cost_figure cost_known(double value)
{
	return (struct cost_figure){.value = value, .count = 1};
}

/* What is attended with, per query row and per token of one layer. */
struct cost_shape {
	uint32_t heads, kv_heads, dqk, dv;
	uint32_t q_bytes, partial_bytes; /* of a row: there, and back */
	uint32_t token_bytes;		 /* of KV */
};

/* One way to one holder. The time of B bytes of query and answer there is
 * (probe + turn + B / bandwidth) * congestion; a pull has its own two constants. */
struct cost_link {
	char name[8];
	struct cost_figure probe, turn, bandwidth;
	struct cost_figure pull_probe, pull_bandwidth;
	struct cost_figure
		congestion; /* measured by predicted, lately; 0: as predicted */
	double model_error; /* of a predicted time, as a part of it */
};

/* One machine's attention in one geometry. */
struct cost_compute {
	struct cost_figure fixed, row;	  /* µs; and of each row */
	struct cost_figure memory, flops; /* B/µs, FLOP/µs */
	struct cost_figure gather;	  /* scattered rows: times the bytes; 0: once */
	double call; /* rows x tokens of a call, which reads KV once; 0: all are one */
};

/* What the requester does itself. */
struct cost_home {
	struct cost_figure merge, merge_row; /* of a layer and step; and of each part */
	struct cost_figure splice, splice_token; /* of a layer; and of each token */
};

struct cost_holder {
	const struct cost_link *links;
	unsigned int link_count;
	const struct cost_compute *compute; /* NULL: it cannot attend, or not priced */
	bool no_attend;			    /* NULL because it cannot */
	struct cost_figure wait;	    /* in its queue */
	struct cost_figure attend; /* times what `compute` says, lately; 0: once */
	double requesters;	   /* at work there, this one included */
	double tokens, selected;   /* of the context; of them a query token looks at */
	bool stale;		   /* its constants have stopped predicting */
};

struct cost_case {
	struct cost_shape shape;
	const struct cost_holder *holders;
	unsigned int holder_count;
	const struct cost_compute *compute; /* at home; NULL: as fast as the holders */
	struct cost_figure attend;	    /* as a holder's; 0: as the first holder's */
	struct cost_home home;
	double attend_us; /* A_o as the engine measured it; 0: by `compute` */
	double layers;	  /* L */
	double steps;	  /* S, that are to come; see cost_steps() */
	double query;	  /* tokens of a step: M = query * heads rows */
	double hidden;	  /* µs of a layer's round trip that other work covers */
	double recompute; /* µs a token and layer; 0: not known, never local */
	bool selected;	  /* query tokens look at `selected` tokens, not at all */
	bool shifted;	  /* the KV is used at another position: a fetch splices */
	bool no_pages;	  /* nowhere to fetch to, or to compute to */
};

/* µs, INFINITY: cannot be had or not priced. */
struct cost_price {
	double us, variance;
};

enum cost_way { COST_NONE, COST_ROUTE, COST_FETCH, COST_LOCAL };

struct cost_prices {
	struct cost_price route, fetch, local; /* of all layers and steps */
	struct cost_price round;  /* R: one layer and step, there and back and merged */
	struct cost_price attend; /* A_o: one layer and step at home */
	struct cost_price once;	  /* of a fetch, before its first step */
	double shared_home;	  /* variance that fetch and local have in common */
	double shared_route;	  /* and that route has with both */
	double even;		  /* S*: from so many steps on a fetch wins; INFINITY */
	unsigned int slowest;	  /* the holder that makes R what it is */
	const struct cost_link *link; /* to it */
	bool replicate; /* a holder serves more than it can at one's price */
	bool stale;
	bool unknown; /* route or fetch is possible, for all that is known, but not priced
		       */
};

struct cost_choice {
	enum cost_way way; /* COST_NONE: nothing is possible */
	bool sure;
};

/* A: rows * attended tokens on one machine, one layer. `tokens`: attended by each row. */
struct cost_price cost_attend(const struct cost_compute *compute,
			      const struct cost_shape *shape, double query, double tokens,
			      bool selected);
/* Of so many bytes of queries and answers by the way that is best for them. */
struct cost_price cost_transfer(const struct cost_holder *holder, double bytes,
				const struct cost_link **link_p);
/* The same of bytes that are pulled, with their request. */
struct cost_price cost_pull(const struct cost_holder *holder, double bytes);
/* Z: the positions of so many tokens, all layers. */
struct cost_price cost_splice(const struct cost_home *home, double layers, double tokens);
/* All of it. */
void cost_all(const struct cost_case *c, struct cost_prices *prices);

/* S for a request of which only the steps made so far are known (ski rental): then the
 * closed form turns to the fetch when what routing has cost more than attending at home
 * reaches what the fetch costs, so that both together are at most twice the better. */
static inline double cost_steps(double expected, double made)
{
	return expected > 0 ? expected : made + 1;
}

/* The cheapest. What is not cheaper by twice the error of the difference does not
 * displace `last` (COST_NONE: there is none), and nobody is sure of it; nor while another
 * way is not priced. */
struct cost_choice cost_choose(const struct cost_prices *prices, enum cost_way last);

/* MLA of `dqk` = latent + rope values a token, of which `dv` are the latent; or GQA. Of
 * `bytes` each in q and KV, `out_bytes` in the answer. */
struct cost_shape cost_shape_mla(uint32_t heads, uint32_t dqk, uint32_t dv,
				 uint32_t bytes, uint32_t out_bytes);
struct cost_shape cost_shape_gqa(uint32_t heads, uint32_t kv_heads, uint32_t dqk,
				 uint32_t dv, uint32_t bytes, uint32_t out_bytes);

/* ---- the five published fabrics ---- */

struct cost_preset {
	const char *name, *words;
	double probe, turn, bandwidth; /* turn 0: it was not told apart */
	double model_error;
	double memory, flops; /* of the card's data sheet: bounds */
};
extern const struct cost_preset cost_presets[];		      /* the last has no name */
const struct cost_preset *cost_preset_find(const char *name); /* or NULL */
struct cost_link cost_preset_link(const struct cost_preset *preset);
struct cost_compute cost_preset_compute(const struct cost_preset *preset);
struct cost_home cost_preset_home(void);

#endif
