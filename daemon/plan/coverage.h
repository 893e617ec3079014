/* SPDX-License-Identifier: Apache-2.0 */
/*
 * coverage: the tokens of each layer of a view that one source has delivered, so that an
 * overlap is refused before any byte is written, and a failed room can report its
 * complete pages.
 *
 * Most senders send all layers of a token range at once: one interval set serves all
 * layers until a chunk names fewer.
 */
#ifndef KVD_COVERAGE_H
#define KVD_COVERAGE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/account.h"
#include "daemon/plan/plan.h"

#define COVERAGE_INTERVALS_MAX 65536u /* of one layer */

/* disjoint, ascending, merged */
struct coverage_set {
	struct {
		uint64_t begin, end;
	} * at;
	uint32_t count, cap;
};

struct coverage {
	struct token_shard shard; /* the tokens that this source holds */
	uint32_t *layers;	  /* the wanted layers of this source, ascending; owned */
	uint32_t layer_count;
	bool split; /* sets has layer_count entries, else 1 */
	struct coverage_set *sets;
	struct charge charge; /* of the sets, when coverage_charge() was called */
};

/* layers: ascending, copied. */
int coverage_init(struct coverage *cov, const uint32_t *layers, uint32_t layer_count);
/* Charge its memory, and later growth, to an account. ERR_LIMIT, also from later
 * additions. */
int coverage_charge(struct coverage *cov, struct account *account,
		    enum account_class class);
void coverage_fini(struct coverage *cov);
/* Add [begin, end) for the layers in range. ERR_DUP when a part of it is present
 * (nothing changes then), ERR_NOMEM, ERR_LIMIT. */
int coverage_add(struct coverage *cov, struct plan_layers layers, uint64_t begin,
		 uint64_t end);
/* Undo coverage_add() for a chunk that was not written. ERR_NOMEM when a split cannot
 * be stored: then the whole interval around it is dropped. */
int coverage_remove(struct coverage *cov, struct plan_layers layers, uint64_t begin,
		    uint64_t end);
/* Are all wanted layers covered over [begin, end), as far as this source holds them? */
bool coverage_whole(const struct coverage *cov, uint64_t begin, uint64_t end);

#endif
