/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cover: the shard selection. Given the layout of each source rank, choose exactly one
 * source for each unit interval of each field of each layer of a destination.
 *
 * Replicated GQA heads are read from the lowest rank that holds them. A field with one
 * unit that several sources hold (MLA latent) is distributed over them by room number.
 * Where sources hold shards of the tokens (struct token_shard), this is done for each
 * shard that has tokens of the destination; the tokens of a want are those of both
 * shards. The receiver's daemon computes the cover and sends each source its wants; the
 * sender checks them (cover_check_wants) and computes no cover.
 */
#ifndef KVD_PLAN_COVER_H
#define KVD_PLAN_COVER_H

#include "daemon/plan/layout.h"
#include "daemon/plan/plan.h"

struct cover_source {
	const struct layout *layout; /* layout->rank is the source's rank */
};

struct cover {
	/* wants[i] belongs to sources[i] of the call; none = idle */
	struct {
		struct plan_want *wants;
		size_t count;
	} * per_source;
	size_t source_count;
};

/*
 * ERR_COVER names the uncovered units ("view kv layer 7 field k units [4,8): no source
 * holds them"); ERR_LAYOUT a contradiction; ERR_DUP two sources of one rank with the same
 * units. `views` limits the cover to the named views (those of a bind); NULL = all views
 * of the destination.
 */
int cover_make(const struct cover_source *sources, size_t source_count,
	       const struct layout *dst, const char *const *views, size_t view_count,
	       uint64_t room, struct cover **cover_p);
/* The same in steps, each of a source or a layer. The layouts must outlive the work. */
struct cover_work;
int cover_begin(const struct cover_source *sources, size_t source_count,
		const struct layout *dst, const char *const *views, size_t view_count,
		uint64_t room, struct cover_work **work_p);
int cover_step(struct cover_work *work); /* outcome 1: there is more */
const struct cover *cover_of(const struct cover_work *work); /* after the last step */
void cover_end(struct cover_work *work);		     /* NULL is allowed */
void cover_free(struct cover *cover);
void cover_freep(struct cover **cover_p);

/* A sender's check of received wants: views, layers, fields and unit intervals exist
 * in both layouts and the source holds them; no interval is repeated. */
int cover_check_wants(const struct layout *src, const struct layout *dst,
		      const struct plan_want *wants, size_t want_count);

#endif
