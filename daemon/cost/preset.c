/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The five fabrics for which "Move the Query, Not the Cache" gives constants: probe, the
 * bandwidth that its own fit found, and the error of that fit for 256 rows or more. The
 * 9 µs of `turn` are a kernel's turnaround that the text names for the first one alone.
 * Memory and arithmetic are peaks that the cards' vendor states (SXM, 80 GB of the A100;
 * bf16, dense; of the RTX Pro 6000 an eighth of the stated sparse FP4): no attention
 * reaches them, so a price from a preset is a bound, and is for planning.
 */
#include "daemon/cost/cost.h"

#include <stddef.h>
#include <string.h>

#define LAUNCH_US 20.0		/* attention at decode: "tens of µs" */
#define MERGE_US 5.0		/* of a layer and step */
#define SPLICE_US (3000.0 / 27) /* 2.8 to 3.1 ms for 27 layers, flat in the tokens */
#define SPLICE_ERROR_US (75.0 / 27)

const struct cost_preset cost_presets[] = {
	/* InfiniBand NDR 200, device-initiated, across nodes; the others: one node */
	{"h100-ibgda", 16, 9, 25e3, 0.07, 3.35e6, 989e6},
	{"h100-nvlink4", 1.2, 0, 21e3, 0.03, 3.35e6, 989e6},
	{"a100-nvlink3", 1.6, 0, 18e3, 0.04, 2.039e6, 312e6},
	{"rtx6000-pcie5", 4.8, 0, 22e3, 0.02, 1.792e6, 500e6},
	{"a40-pcie4", 8.7, 0, 19e3, 0.13, 0.696e6, 149.7e6},
	{NULL, 0, 0, 0, 0, 0, 0},
};

const struct cost_preset *cost_preset_find(const char *name)
{
	for (const struct cost_preset *p = cost_presets; p->name; p++)
		if (strcmp(p->name, name) == 0)
			return p;
	return NULL;
}

struct cost_link cost_preset_link(const struct cost_preset *preset)
{
	return (struct cost_link){
		.name = "preset",
		.probe = cost_known(preset->probe),
		.turn = cost_known(preset->turn),
		.bandwidth = cost_known(preset->bandwidth),
		/* a pull waits for the same turnaround */
		.pull_probe = cost_known(preset->probe + preset->turn),
		.pull_bandwidth = cost_known(preset->bandwidth),
		.model_error = preset->model_error,
	};
}

struct cost_compute cost_preset_compute(const struct cost_preset *preset)
{
	return (struct cost_compute){.fixed = cost_known(LAUNCH_US),
				     .memory = cost_known(preset->memory),
				     .flops = cost_known(preset->flops)};
}

struct cost_home cost_preset_home(void)
{
	struct cost_home home = {.merge = cost_known(MERGE_US),
				 .splice = cost_known(SPLICE_US)};

	home.splice.error = SPLICE_ERROR_US;
	return home;
}
