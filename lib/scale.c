/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How many workers are wanted, from what is measured of those that there are.
 *
 * Prefill: prompt tokens that arrive a second (those computed, and what the queue grew
 * by) over what a worker computes, of which `prefill_busy` is to be used; and enough more
 * to compute what waits within wait_s. Decode: KV in use, and what requests without room
 * need, over `decode_full` of a worker's. Both are smoothed (Holt: a level and its slope)
 * and looked ahead by the time that a worker takes to start, since what is wanted now
 * works only then.
 *
 * A step up follows at once, but for up_s after the one before it, and goes a band
 * further than needed. A step down is made when the most that was needed in the last
 * down_s is three bands below, and goes to one band above that: so nothing is given back
 * for down_s after a step up, and what a step gave or took is not taken or given for less
 * than a band. The most is kept in bins, so the state is small, and may be copied and
 * written down.
 */
#include <math.h>
#include <string.h>

#include "lib/pick_impl.h"

#define LEVEL_S 30.0
#define SLOPE_S 180.0
#define AHEAD_MAX 1.5	 /* times the level */
#define DOWN_BANDS 3.0	 /* so far below before a step down */
#define WAITING_S 600.0	 /* of a worker's speed: no queue is believed to be longer */
#define ROUND_DOWN 0.001 /* workers, of which nobody is started */

/* ---- options ---- */

static bool scale_share(double *value, double usual, double most)
{
	if (!(*value >= 0) || *value > most)
		return false;
	*value = *value > 0 ? *value : usual;
	return true;
}

/* With what is usual instead of zeros. */
static bool scale_options_ok(struct kvd_scale_options *o)
{
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++) {
		if (!o->min[side])
			o->min[side] = 1;
		if (!o->max[side])
			o->max[side] = KVD_PICK_WORKERS_MAX;
		if (o->min[side] > o->max[side] || o->max[side] > KVD_PICK_WORKERS_MAX)
			return false;
	}
	return scale_share(&o->prefill_busy, 0.7, 1) &&
	       scale_share(&o->decode_full, 0.75, 1) &&
	       scale_share(&o->wait_s, 60, 86400) &&
	       scale_share(&o->start_s, 180, 86400) && scale_share(&o->up_s, 60, 86400) &&
	       scale_share(&o->down_s, 900, 86400) && scale_share(&o->band, 0.1, 10);
}

/* ---- a step ---- */

static bool scale_sane(const struct kvd_scale_side *side)
{
	return side->speed > 0 && side->speed <= PICK_AMOUNT_MAX && side->served >= 0 &&
	       side->served <= PICK_AMOUNT_MAX && side->waiting >= 0 &&
	       side->waiting <= PICK_AMOUNT_MAX;
}

/* Workers that the load needs, when one that is started now works. */
static double scale_need(struct kvd_scale_memory *m, const struct kvd_scale_options *o,
			 enum kvd_pick_side which, const struct kvd_scale_side *side,
			 uint64_t now_ns)
{
	bool prefill = which == KVD_PICK_PREFILL;
	double share = prefill ? o->prefill_busy : o->decode_full;
	double past = pick_seconds(m->last_ns, now_ns);
	double load = side->served, level = m->rate, ahead;

	if (!prefill)
		load += side->waiting;
	else if (m->last_ns)
		load = fmax(0, load + (side->waiting - m->waiting) / past);
	if (m->last_ns) {
		m->rate += (1 - exp(-past / LEVEL_S)) * (load - m->rate);
		m->slope += (1 - exp(-past / SLOPE_S)) *
			    ((m->rate - level) / past - m->slope);
	} else {
		m->rate = load;
	}
	m->waiting = side->waiting;
	m->last_ns = now_ns;
	ahead = fmin(m->rate + fmax(0, m->slope) * o->start_s, AHEAD_MAX * m->rate);
	return ahead / (side->speed * share) +
	       (prefill ? side->waiting / (side->speed * o->wait_s) : 0);
}

/* The most that was needed in the last down_s, or INFINITY while that is not known. */
static double scale_most(struct kvd_scale_memory *m, const struct kvd_scale_options *o,
			 double need, uint64_t now_ns)
{
	uint64_t bin_ns = (uint64_t)(o->down_s * 1e9 / (KVD_SCALE_BINS - 1)) + 1;
	double most = 0;

	if (!m->bin_ns) {
		for (unsigned int i = 0; i < KVD_SCALE_BINS; i++)
			m->need[i] = INFINITY;
		m->bin_ns = now_ns;
		m->need[m->bin] = need;
	}
	for (unsigned int i = 0; i < KVD_SCALE_BINS && now_ns >= m->bin_ns + bin_ns;
	     i++) {
		m->bin = (m->bin + 1) % KVD_SCALE_BINS;
		m->need[m->bin] = need; /* also of a time in which nobody looked */
		m->bin_ns += bin_ns;
	}
	if (now_ns >= m->bin_ns + bin_ns)
		m->bin_ns = now_ns;
	m->need[m->bin] = fmax(m->need[m->bin], need);
	for (unsigned int i = 0; i < KVD_SCALE_BINS; i++)
		most = fmax(most, m->need[i]);
	return most;
}

static unsigned int scale_round(double need, const struct kvd_scale_options *o,
				unsigned int which)
{
	double up = fmin(ceil(fmax(need - ROUND_DOWN, 0)), o->max[which]);

	return up < o->min[which] ? o->min[which] : (unsigned int)up;
}

static void scale_side(struct kvd_scale_memory *m, const struct kvd_scale_options *o,
		       unsigned int which, const struct kvd_scale_side *side,
		       uint64_t now_ns, struct kvd_scale_wanted *wanted)
{
	unsigned int before = m->wanted, up, down;
	double most;

	if (!before)
		m->wanted = scale_round(side->workers, o, which);
	m->wanted = scale_round(m->wanted, o, which); /* limits may have changed */
	wanted->known[which] = scale_sane(side) && now_ns > m->last_ns;
	if (wanted->known[which]) {
		wanted->need[which] =
			scale_need(m, o, (enum kvd_pick_side)which, side, now_ns);
		most = scale_most(m, o, wanted->need[which], now_ns);
		up = scale_round(wanted->need[which], o, which);
		if (up > m->wanted)
			up = scale_round(wanted->need[which] * (1 + o->band), o, which);
		down = most * (1 + DOWN_BANDS * o->band) <= m->wanted
			       ? scale_round(most * (1 + o->band), o, which)
			       : m->wanted;
		if (up > m->wanted &&
		    (!m->up_ns || pick_seconds(m->up_ns, now_ns) >= o->up_s)) {
			m->wanted = up;
			m->up_ns = now_ns;
		} else if (down < m->wanted) {
			m->wanted = down;
		}
	}
	wanted->workers[which] = m->wanted;
	wanted->changed = wanted->changed || m->wanted != before;
}

int kvd_scale_step(struct kvd_scale_state *state, const struct kvd_scale_options *options,
		   const struct kvd_scale_sample *sample, uint64_t now_ns,
		   struct kvd_scale_wanted *wanted)
{
	struct kvd_scale_options o =
		options ? *options : (struct kvd_scale_options){.band = 0};

	*wanted = (struct kvd_scale_wanted){.changed = false};
	if (!scale_options_ok(&o))
		return -KVD_E_INVAL;
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++)
		scale_side(&state->side[side], &o, side, &sample->side[side], now_ns,
			   wanted);
	return 0;
}

/* ---- what a picker's loads say ---- */

static void measure_prefill(const struct kvd_picker *picker,
			    const struct pick_member *member, struct kvd_scale_side *side)
{
	double speed = pick_speed(picker, member);

	if (pick_known(member->load.prompt_tokens_s))
		side->served += fmin(member->load.prompt_tokens_s, speed);
	side->waiting +=
		fmin(pick_load_prompts(picker, &member->load), WAITING_S * speed);
}

/* `running` and KV in use say how much KV a request has. */
static void measure_decode(const struct pick_member *member, struct kvd_scale_side *side,
			   double *running_p, double *waiting_p)
{
	const struct kvd_pick_load *load = &member->load;

	if (pick_known(load->kv_free_tokens) && load->kv_total_tokens > 0)
		side->served += fmax(0, load->kv_total_tokens - load->kv_free_tokens);
	*running_p += fmax(load->running, 0);
	*waiting_p += fmax(load->waiting, 0);
}

void kvd_scale_measure(struct kvd_picker *picker, uint64_t now_ns,
		       struct kvd_scale_sample *sample)
{
	*sample = (struct kvd_scale_sample){.side[0].workers = 0};
	pick_now(picker, now_ns);
	for (unsigned int which = 0; which < KVD_PICK_SIDES; which++) {
		struct kvd_scale_side *side = &sample->side[which];
		struct pick_side *of = &picker->side[which];
		double running = 0, waiting = 0;
		unsigned int told = 0;

		pick_usual_refresh(picker, which, true);
		side->workers = of->serving;
		side->speed =
			which == KVD_PICK_PREFILL ? of->usual.speed : of->usual.kv_total;
		for (uint32_t i = 0; i < of->count; i++) {
			struct pick_member *member = of->members[of->order[i]];

			if (!pick_is_fresh(picker, which, member))
				continue;
			told += i < of->serving;
			if (which == KVD_PICK_PREFILL)
				measure_prefill(picker, member, side);
			else
				measure_decode(member, side, &running, &waiting);
		}
		if (which == KVD_PICK_DECODE && running > 0)
			side->waiting = waiting * side->served / running;
		if (!told) /* nothing is known */
			side->speed = 0;
		else if (told < of->serving) /* the others are as these */
			side->served *= (double)of->serving / told;
	}
}
