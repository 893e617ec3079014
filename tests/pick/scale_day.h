/* SPDX-License-Identifier: Apache-2.0 */
/* scale_day: a day of load, and the workers that kvd_scale_step() wants for it. */
#ifndef KVD_TESTS_SCALE_DAY_H
#define KVD_TESTS_SCALE_DAY_H

#include <stdint.h>

#include "lib/kvd_pick.h"

struct day {
	double peak;  /* prompt tokens a second at the busiest hour */
	double noise; /* share, slow; beside 5 % that are new at each look */
	double spike, spike_at, spike_s; /* times as much, when, how long */
	double residence_s;		 /* of a request's KV on its decode worker */
	double bound_s;			 /* waiting that is accepted */
	unsigned int first;		 /* workers at midnight */
	uint64_t seed;
	struct kvd_scale_options options;
};

struct day_result {
	double kept;	/* share of prompt tokens that waited at most so long */
	double worst_s; /* the longest wait */
	int code;	/* of kvd_scale_step() */
	struct day_side {
		unsigned int steps, turns, flaps, most; /* turns: changes of direction */
		double hours, fixed_hours; /* of workers; of a pool for the peak */
	} side[KVD_PICK_SIDES];
};

void day_play(const struct day *day, struct day_result *result);

#endif
