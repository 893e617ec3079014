/* SPDX-License-Identifier: Apache-2.0 */
/* Route, fetch or recompute: the part of kvd.h that prices them. Include kvd.h. */
#ifndef KVD_COST_H
#define KVD_COST_H

#include "kvd.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- route, fetch or local ----------------------------------------------- */

/*
 * A query is to attend to KV that other instances hold. Three ways: route the query rows
 * to the holders and merge what they return, in each layer and step; fetch the KV once
 * and attend here; compute it again here. kvd_decide() prices all three from constants
 * in a cost page. It is arithmetic: it asks nobody, makes no system call and takes
 * at most a microsecond. It moves nothing, either.
 */
struct kvd_cost_page;
/* A page of this process with the constants of a published fabric, to plan with:
 * "h100-ibgda", "h100-nvlink4", "a100-nvlink3", "rtx6000-pcie5", "a40-pcie4". It knows
 * one peer, of zeros. -KVD_E_NOTFOUND: another name. */
int kvd_cost_preset(const char *name, struct kvd_cost_page **page_p);

/* The daemon's page: what it measures of its peers, from the first time on that somebody
 * opens it. It is mapped: it changes as the daemon measures, and stays as it was last
 * when the daemon is gone, or starts again: open it anew with the session. With a
 * callback page_p is set before that. -KVD_E_STATE: the daemon keeps no chunks. */
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
	uint64_t tokens;   /* of the context, that it holds */
	uint64_t selected; /* of them a query token attends to; with args.selected */
};

struct kvd_decide_args {
	/* the model, as one rank sees it */
	enum kvd_cost_kind kind;
	uint32_t layers, heads, kv_heads, dqk, dv;
	uint32_t value_bytes; /* of a value of q and of KV; 0: 2 */
	uint32_t out_bytes;   /* of a value that is returned; 0: 2. kvd's attends: 4 */
	uint32_t token_bytes; /* of KV, a token and layer; 0: by the above */
	/* the step: heads times query_tokens rows travel */
	uint32_t query_tokens; /* 0: 1 */
	/* Steps that are to come; 0: not known. Then steps_made counts: a fetch is
	 * worth it once routing has cost as much more as the fetch would. */
	uint32_t steps, steps_made;
	const struct kvd_cost_holder *holders;
	size_t holder_count; /* 1 to KVD_COST_HOLDERS_MAX */
	bool selected; /* each query token attends to some tokens, chosen each step */
	bool shifted;  /* the KV is used at another position than it was made for */
	bool no_pages; /* nowhere here to fetch to or compute to */
	enum kvd_cost_way last; /* what was chosen before: it stays while it is not clear
				 * that another is better */
	/* what only the engine knows; 0: not known */
	double attend_us;    /* to attend here: a layer and step */
	double hidden_us;    /* of a layer's round trip that other work covers */
	double recompute_us; /* to compute KV: a token and layer. 0: never local */
};

struct kvd_cost_price {
	double us, error_us; /* INFINITY: not possible; one standard deviation */
};

struct kvd_decide_result {
	enum kvd_cost_way way;
	bool sure; /* cheaper than the others by twice the error of the difference, and
		    * neither route nor fetch lacks a price only because nobody measured
		    */
	bool replicate; /* a holder serves more requesters than it can at the price of one
			 */
	struct kvd_cost_price route, fetch, local; /* of all layers and steps */
	struct kvd_cost_price round, attend;	   /* one layer and step: routed; here */
	struct kvd_cost_price once;		   /* of a fetch, before its first step */
	double even_steps; /* from so many on fetching wins; INFINITY */
	size_t slowest;	   /* the holder whose answer is waited for */
	char transport[8]; /* to it */
};

/* -KVD_E_INVAL: an argument; -KVD_E_NOTFOUND: no way can be priced, or none is possible;
 * -KVD_E_BUSY: the page is being written: try again. The result is zeroed then. Any
 * thread; kvd_last_error() is not set. */
int kvd_decide(const struct kvd_decide_args *args, const struct kvd_cost_page *page,
	       struct kvd_decide_result *result);

#ifdef __cplusplus
}
#endif

#endif
