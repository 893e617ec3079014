/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/cost_setup.h"

#include <assert.h>
#include <stddef.h>

/* DeepSeek-V2-Lite and V3: latent 512 and 64 rope values for all heads, bf16. */
const struct cost_shape setup_v2_lite = {.heads = 16,
					 .kv_heads = 1,
					 .dqk = 576,
					 .dv = 512,
					 .q_bytes = 1152,
					 .partial_bytes = 1032,
					 .token_bytes = 1152};
const struct cost_shape setup_v3 = {.heads = 128,
				    .kv_heads = 1,
				    .dqk = 576,
				    .dv = 512,
				    .q_bytes = 1152,
				    .partial_bytes = 1032,
				    .token_bytes = 1152};
/* Llama 8B: 32 heads on 8 of 128 values. */
const struct cost_shape setup_gqa_8b = {.heads = 32,
					.kv_heads = 8,
					.dqk = 128,
					.dv = 128,
					.q_bytes = 256,
					.partial_bytes = 264,
					.token_bytes = 4096};

void setup_make(struct cost_setup *setup, const char *fabric,
		const struct cost_shape *shape, double tokens)
{
	const struct cost_preset *preset = cost_preset_find(fabric);

	assert(preset);
	*setup = (struct cost_setup){.link = cost_preset_link(preset),
				     .compute = cost_preset_compute(preset)};
	setup->c = (struct cost_case){.shape = *shape,
				      .home = cost_preset_home(),
				      .layers = 1,
				      .steps = 1,
				      .query = 1,
				      .holders = setup->holders,
				      .compute = &setup->compute};
	setup->holders[0].tokens = tokens;
	setup_spread(setup, 1);
}

void setup_bare(struct cost_setup *setup, const char *fabric,
		const struct cost_shape *shape, double tokens)
{
	setup_make(setup, fabric, shape, tokens);
	setup->compute = (struct cost_compute){.memory = cost_known(1e30),
					       .flops = cost_known(1e30)};
	setup->c.home = (struct cost_home){.merge = cost_known(0)};
}

void setup_spread(struct cost_setup *setup, unsigned int holders)
{
	double tokens = 0, selected = 0;

	for (unsigned int i = 0; i < COST_HOLDERS_MAX; i++) {
		tokens += setup->holders[i].tokens;
		selected += setup->holders[i].selected;
	}
	for (unsigned int i = 0; i < COST_HOLDERS_MAX; i++) {
		bool used = i < holders;

		setup->holders[i] = (struct cost_holder){
			.links = &setup->link,
			.link_count = 1,
			.compute = &setup->compute,
			.requesters = 1,
			.tokens = used ? tokens / holders : 0,
			.selected = used ? selected / holders : 0,
		};
	}
	setup->c.holder_count = holders;
}

struct cost_prices setup_prices(const struct cost_setup *setup)
{
	struct cost_prices prices;

	cost_all(&setup->c, &prices);
	return prices;
}
