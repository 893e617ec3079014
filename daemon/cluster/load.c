/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rates are exponentially weighted means that lose a quarter each second: a burst is
 * visible within the second, and after ten it is not. A time to the first byte is
 * averaged over rooms instead of seconds, so it is unchanged while there are none.
 *
 * A step is a change that could change the choice of a router: a number that has changed
 * by an eighth, or from or to zero.
 */
#include "daemon/cluster/load.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "proto/out.h"

#define SECOND_NS UINT64_C(1000000000)
#define FORGET 0.25
#define STEP 8u

/* Clears the minute's seconds up to `second`. */
static void load_minute_move(struct load_meter *meter, uint64_t second)
{
	if (second <= meter->second)
		return;
	if (second - meter->second >= LOAD_MINUTE)
		memset(meter->failed, 0, sizeof(meter->failed));
	else
		for (uint64_t s = meter->second + 1; s <= second; s++)
			meter->failed[s % LOAD_MINUTE] = 0;
	meter->second = second;
}

static void load_meter_rates(struct load_meter *meter, const struct load_counts *counts,
			     uint64_t now_ns)
{
	double seconds = (double)(now_ns - meter->at_ns) / (double)SECOND_NS;
	double keep = pow(1 - FORGET, seconds);
	double gbps = (double)(counts->moved - meter->last.moved) / seconds / 1e9;
	uint64_t firsts = counts->firsts - meter->last.firsts;

	meter->gbps = meter->gbps * keep + gbps * (1 - keep);
	if (meter->gbps < 1e-6)
		meter->gbps = 0;
	if (firsts) {
		double mean = (double)(counts->first_ns - meter->last.first_ns) / 1e3 /
			      (double)firsts;

		keep = meter->ttfb_us > 0 ? pow(1 - FORGET, (double)firsts) : 0;
		meter->ttfb_us = meter->ttfb_us * keep + mean * (1 - keep);
	}
	meter->failed[meter->second % LOAD_MINUTE] +=
		(uint32_t)(counts->failed - meter->last.failed);
}

void load_meter_take(struct load_meter *meter, const struct load_counts *counts,
		     uint64_t now_ns, struct load *load_p)
{
	load_minute_move(meter, now_ns / SECOND_NS);
	if (!meter->begun || counts->moved < meter->last.moved ||
	    counts->failed < meter->last.failed || counts->firsts < meter->last.firsts ||
	    counts->first_ns < meter->last.first_ns) {
		meter->begun = true;
		meter->at_ns = now_ns;
		meter->last = *counts;
	} else if (now_ns > meter->at_ns) {
		load_meter_rates(meter, counts, now_ns);
		meter->at_ns = now_ns;
		meter->last = *counts;
	}
	load_p->waiting = counts->waiting;
	load_p->running = counts->running;
	load_p->queued = counts->queued;
	load_p->moving = counts->moving;
	load_p->gbps = meter->gbps;
	load_p->ttfb_us = (uint64_t)meter->ttfb_us;
	load_p->failed = 0;
	for (unsigned int i = 0; i < LOAD_MINUTE; i++)
		load_p->failed += meter->failed[i];
}

/* ---- published loads ---- */

static bool figure_differs(double from, double to)
{
	double most = fmax(fabs(from), fabs(to));

	return fabs(from - to) * STEP > most;
}

static bool engine_differs(const struct engine_load *from, const struct engine_load *to)
{
#define ENGINE_LOAD_FAR(name, help)                               \
	if (figure_differs((double)from->name, (double)to->name)) \
		return true;
	ENGINE_LOADS(ENGINE_LOAD_FAR)
#undef ENGINE_LOAD_FAR
	return false;
}

static bool load_differs(const struct load *from, const struct load *to)
{
	return figure_differs(from->waiting, to->waiting) ||
	       figure_differs(from->running, to->running) ||
	       figure_differs((double)(from->queued + from->moving),
			      (double)(to->queued + to->moving)) ||
	       figure_differs(from->gbps, to->gbps) ||
	       figure_differs((double)from->ttfb_us, (double)to->ttfb_us) ||
	       figure_differs((double)from->failed, (double)to->failed) ||
	       engine_differs(&from->engine, &to->engine);
}

void load_budget_fill(struct load_budget *budget, uint64_t now_ns)
{
	uint64_t most = LOAD_BURST * LOAD_EVERY_NS;
	uint64_t passed = budget->begun ? now_ns - budget->at_ns : most;

	assert(!budget->begun || now_ns >= budget->at_ns);
	budget->begun = true;
	budget->at_ns = now_ns;
	budget->tokens_ns =
		passed > most - budget->tokens_ns ? most : budget->tokens_ns + passed;
}

bool load_gate_pass(struct load_gate *gate, struct load_budget *budget,
		    const struct load *load)
{
	if (gate->told && !load_differs(&gate->last, load))
		return false;
	if (budget->tokens_ns < LOAD_EVERY_NS)
		return false;
	budget->tokens_ns -= LOAD_EVERY_NS;
	gate->told = true;
	gate->last = *load;
	return true;
}

/* ---- text ---- */

static void load_real(struct text *out, const char *name, double value)
{
	char word[32];

	snprintf(word, sizeof(word), "%.3f", value);
	out_json(out, name, word);
}

static void load_engine_text(const struct engine_load *engine, struct text *out)
{
	size_t begin = out->len, first;

	out_object(out, "engine");
	first = out->len;
#define ENGINE_LOAD_TEXT(name, help) \
	if (engine->name >= 0)       \
		out_number(out, #name, engine->name);
	ENGINE_LOADS(ENGINE_LOAD_TEXT)
#undef ENGINE_LOAD_TEXT
	if (out->len > first)
		out_close(out, '}');
	else
		out->len = begin;
}

void load_text(const struct load *load, uint64_t seq, struct text *out)
{
	out_object(out, NULL);
	out_number(out, "v", 1);
	out_number(out, "seq", seq);
	out_object(out, "rooms");
	out_number(out, "waiting", load->waiting);
	out_number(out, "running", load->running);
	out_close(out, '}');
	out_object(out, "bytes");
	out_number(out, "queued", load->queued);
	out_number(out, "moving", load->moving);
	out_close(out, '}');
	load_real(out, "gbps", load->gbps);
	out_some(out, "ttfb_us", load->ttfb_us);
	out_number(out, "failed", load->failed);
	load_engine_text(&load->engine, out);
	for (unsigned int i = 0; i < load->peer_count; i++) {
		if (i == 0)
			out_array(out, "peers");
		out_object(out, NULL);
		out_text(out, "instance", load->peers[i].instance);
		load_real(out, "gbps", load->peers[i].gbps);
		out_close(out, '}');
	}
	text_puts(out, load->peer_count ? "]}" : "}");
}
