/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cost: predicts the cost of attention to KV at other daemons, for each of three methods.
 * Pure arithmetic: no state, no clock, no memory of its own.
 *
 *   route  send the query rows to each holder, which attends in place; merge the results
 *   fetch  pull the KV once (of a selection: the selected KV, each time), attend at home
 *   local  compute the KV again, attend at home
 *
 * Units: µs, bytes, B/µs (the same as MB/s), FLOP/µs (the same as MFLOP/s). A count that
 * may be fractional is a double. docs/route.md derives the formulas.
 */
#ifndef KVD_COST_COST_H
#define KVD_COST_COST_H

#include <stdbool.h>
#include <stdint.h>

#define COST_LINKS_MAX 4u   /* paths to one holder */
#define COST_HOLDERS_MAX 8u /* of one decision */
#define COST_FAN_IN_FLAT 8  /* requesters that a holder serves at the price of one */

/* A measured constant. `count` 0: not measured. */
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

/* The geometry of attention, per query row and per token of one layer. */
struct cost_shape {
	uint32_t heads, kv_heads, dqk, dv;
	uint32_t q_bytes, partial_bytes; /* of a row: request, and reply */
	uint32_t token_bytes;		 /* of KV */
};

/* One path to one holder. The time of B bytes of query and reply there is (probe + turn +
 * B / bandwidth) * congestion; a pull has its own two constants. */
struct cost_link {
	char name[8];
	struct cost_figure probe, turn, bandwidth;
	struct cost_figure pull_probe, pull_bandwidth;
	struct cost_figure
		congestion; /* recent ratio of measured to predicted; 0: as predicted */
	double model_error; /* of a predicted time, as a fraction of it */
};

/* The attention speed of one machine in one geometry. */
struct cost_compute {
	struct cost_figure fixed, row;	  /* µs; and of each row */
	struct cost_figure memory, flops; /* B/µs, FLOP/µs */
	struct cost_figure gather;	  /* scattered rows: factor on the bytes; 0: 1 */
	double call; /* rows x tokens of a call, which reads KV once; 0: unlimited */
};

/* The requester's own work. */
struct cost_home {
	struct cost_figure merge, merge_row; /* of a layer and step; and of each part */
	struct cost_figure splice, splice_token; /* of a layer; and of each token */
};

struct cost_holder {
	const struct cost_link *links;
	unsigned int link_count;
	const struct cost_compute *compute; /* NULL: none, or not priced */
	bool no_attend;			    /* it computes no attention */
	struct cost_figure wait;	    /* in its queue */
	struct cost_figure attend; /* factor on `compute`, measured lately; 0: 1 */
	double requesters;	   /* active there, including this one */
	double tokens, selected;   /* of the context; tokens per query token */
	bool stale;		   /* its constants no longer predict well */
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
	double steps;	  /* S, in the future; see cost_steps() */
	double query;	  /* tokens of a step: M = query * heads rows */
	double hidden;	  /* µs of a layer's round trip that other work hides */
	double recompute; /* µs a token and layer; 0: not known, never local */
	bool selected;	  /* query tokens attend to `selected` tokens, not to all */
	bool shifted;	  /* the KV is used at another position: a fetch splices */
	bool no_pages;	  /* no pages for a fetch or a computation */
};

/* µs, INFINITY: impossible or not priced. */
struct cost_price {
	double us, variance;
};

enum cost_way { COST_NONE, COST_ROUTE, COST_FETCH, COST_LOCAL };

struct cost_prices {
	struct cost_price route, fetch, local; /* of all layers and steps */
	struct cost_price round;  /* R: one layer and step, a round trip and the merge */
	struct cost_price attend; /* A_o: one layer and step at home */
	struct cost_price once;	  /* of a fetch, before its first step */
	double shared_home;	  /* common variance of fetch and local */
	double shared_route;	  /* and that route shares with both */
	double even;		  /* S*: from this step on a fetch is cheaper; INFINITY */
	unsigned int slowest;	  /* the holder that determines R */
	const struct cost_link *link; /* to it */
	bool replicate; /* a holder serves more requesters than at one's price */
	bool stale;
	bool unknown; /* route or fetch is possible, as far as known, but not priced */
};

struct cost_choice {
	enum cost_way way; /* COST_NONE: nothing is possible */
	bool sure;
};

/* A: rows * attended tokens on one machine, one layer. `tokens`: attended by each row. */
struct cost_price cost_attend(const struct cost_compute *compute,
			      const struct cost_shape *shape, double query, double tokens,
			      bool selected);
/* Of so many bytes of queries and replies on the best path for them. */
struct cost_price cost_transfer(const struct cost_holder *holder, double bytes,
				const struct cost_link **link_p);
/* The same of pulled bytes, with their request. */
struct cost_price cost_pull(const struct cost_holder *holder, double bytes);
/* Z: the positions of so many tokens, all layers. */
struct cost_price cost_splice(const struct cost_home *home, double layers, double tokens);
/* All of it. */
void cost_all(const struct cost_case *c, struct cost_prices *prices);

/* S for a request of which only the past steps are known (ski rental): the closed form
 * switches to the fetch when the extra cost of routing, compared with attending at home,
 * reaches the cost of the fetch, so that both together are at most twice the optimum. */
static inline double cost_steps(double expected, double made)
{
	return expected > 0 ? expected : made + 1;
}

/* The cheapest. Another one replaces `last` (COST_NONE: there is none) only if it is
 * cheaper by twice the error of the difference, and only if no other method lacks a
 * price; otherwise the result is uncertain. */
struct cost_choice cost_choose(const struct cost_prices *prices, enum cost_way last);

/* MLA of `dqk` = latent + rope values a token, of which `dv` are the latent; or GQA. Of
 * `bytes` each in q and KV, `out_bytes` in the reply. */
struct cost_shape cost_shape_mla(uint32_t heads, uint32_t dqk, uint32_t dv,
				 uint32_t bytes, uint32_t out_bytes);
struct cost_shape cost_shape_gqa(uint32_t heads, uint32_t kv_heads, uint32_t dqk,
				 uint32_t dv, uint32_t bytes, uint32_t out_bytes);

/* ---- the five published fabrics ---- */

struct cost_preset {
	const char *name;
	double probe, turn, bandwidth; /* turn 0: not measured separately */
	double model_error;
	double memory, flops; /* of the card's data sheet: bounds */
};
extern const struct cost_preset cost_presets[];		      /* the last has no name */
const struct cost_preset *cost_preset_find(const char *name); /* or NULL */
struct cost_link cost_preset_link(const struct cost_preset *preset);
struct cost_compute cost_preset_compute(const struct cost_preset *preset);
struct cost_home cost_preset_home(void);

#endif
