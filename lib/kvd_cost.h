/* SPDX-License-Identifier: Apache-2.0 */
/* Route, fetch or recompute: the part of kvd.h that estimates their cost. Include
 * kvd.h. */
#ifndef KVD_COST_H
#define KVD_COST_H

#include "kvd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- route, fetch or local ----------------------------------------------- */

/*
 * A query attends to KV that other instances hold. There are three methods: route the
 * query rows to the holders and merge their results, in each layer and step; fetch the KV
 * once and attend here; or compute the KV again here. kvd_decide() estimates the cost of
 * each from constants in a cost page. It only computes: it sends nothing, makes no system
 * call, takes at most a microsecond, and moves no data.
 */
struct kvd_cost_page;
/* A page of this process with the constants of a published fabric, for planning:
 * "h100-ibgda", "h100-nvlink4", "a100-nvlink3", "rtx6000-pcie5", "a40-pcie4". It has
 * one peer, whose id is zeros. -KVD_E_NOTFOUND: another name. */
int kvd_cost_preset(const char *name, struct kvd_cost_page **page_p);

/* The daemon's page: measurements of its peers, which start when the page is first
 * opened by any client. It is mapped, so it changes as the daemon measures. It keeps
 * its last contents when the daemon exits or restarts: open it again with the new
 * session. With a callback page_p is set before the callback. -KVD_E_STATE: the chunk
 * store is off. */
int kvd_cost_open(struct kvd_client *client, const struct kvd_call *call,
		  struct kvd_cost_page **page_p);
void kvd_cost_close(struct kvd_cost_page *page);

enum kvd_cost_way {
	KVD_COST_NONE = 0,
	KVD_COST_ROUTE = 1,
	KVD_COST_FETCH = 2,
	KVD_COST_LOCAL = 3,
};

enum kvd_cost_kind {
	KVD_COST_GQA = 0, /* a key of dqk and a value of dv for each of kv_heads */
	KVD_COST_MLA = 1, /* one row of dqk for all heads, whose first dv are the value */
};

#define KVD_COST_HOLDERS_MAX 8

struct kvd_cost_holder {
	uint8_t peer[16];  /* its instance */
	uint64_t tokens;   /* tokens of the context that it has */
	uint64_t selected; /* of these, those that a query token attends to; with
			    * args.selected */
	bool gpu;	   /* they are in its GPU memory: struct kvd_holder */
};

struct kvd_decide_args {
	/* the model, for one rank */
	enum kvd_cost_kind kind;
	uint32_t layers, heads, kv_heads, dqk, dv;
	uint32_t value_bytes; /* bytes per value of q and of KV; 0: 2 */
	uint32_t out_bytes;   /* bytes per returned value; 0: 2. kvd's attention: 4, or
			       * 2 with out_bf16 */
	uint32_t token_bytes; /* bytes of KV per token and layer; 0: computed from the
			       * above */
	/* the step: heads times query_tokens rows are sent */
	uint32_t query_tokens; /* 0: 1 */
	/* Expected further steps; 0: unknown. Then steps_made is used: a fetch pays
	 * off when routing has cost as much as the fetch would. */
	uint32_t steps, steps_made;
	const struct kvd_cost_holder *holders;
	size_t holder_count; /* 1 to KVD_COST_HOLDERS_MAX */
	bool selected; /* each query token attends to selected tokens, chosen in each
			* step */
	bool shifted;  /* the KV is used at another position than it was computed at */
	bool no_pages; /* no local memory to fetch to or compute into */
	enum kvd_cost_way last; /* previous choice, kept unless another one is clearly
				 * better */
	/* known only to the engine; 0: unknown */
	double attend_us;    /* local attention, per layer and step */
	double hidden_us;    /* part of a layer's round trip that overlaps with other
			      * work */
	double recompute_us; /* computing KV, per token and layer. 0: never compute */
};

struct kvd_cost_price {
	double us, error_us; /* INFINITY: not possible; one standard deviation */
};

struct kvd_decide_result {
	enum kvd_cost_way way;
	bool sure; /* cheaper than the others by twice the error of the difference, and
		    * neither route nor fetch lacks a cost only because it was not
		    * measured */
	bool replicate; /* a holder serves more requesters than it can at the cost of
			 * one */
	struct kvd_cost_price route, fetch, local; /* for all layers and steps */
	struct kvd_cost_price round, attend;	   /* per layer and step: routed; local */
	struct kvd_cost_price once;		   /* of a fetch, before the first step */
	double even_steps; /* number of steps from which fetching is cheaper; INFINITY */
	size_t slowest;	   /* the holder that replies last */
	char transport[8]; /* transport to it */
};

/* -KVD_E_INVAL: an argument; -KVD_E_NOTFOUND: no method has a known cost, or none is
 * possible; -KVD_E_BUSY: the page is being written: retry. The result is zeroed then.
 * Any thread; kvd_last_error() is not set. */
int kvd_decide(const struct kvd_decide_args *args, const struct kvd_cost_page *page,
	       struct kvd_decide_result *result);

#ifdef __cplusplus
}
#endif

#endif
