/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory of one transfer: one side's registrations, or the other's keys, as the plan
 * numbers them, held until the transfer is over. The buffers of the plan decide how it
 * can move: memory that no adapter has registered is staged.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <errno.h>
#include <xxhash.h>

#include "daemon/base/mem.h"

static uint32_t verbs_places_buffer_of(const struct plan_run *run, bool is_src)
{
	return is_src ? run->src_buffer : run->dst_buffer;
}

static bool rails_covered(const struct verbs_key *key, const struct verbs_peer *peer)
{
	for (uint32_t i = 0; i < peer->qp_count; i++)
		if (peer->qps[i].rail->index >= key->remote.rails)
			return false;
	return true;
}

static int verbs_places_remote_check(const struct xp_buffer *buffer,
				     const struct verbs_peer *peer, uint32_t number)
{
	const struct verbs_key *key = (const struct verbs_key *)buffer->key;

	if (!key)
		return err_raise(ERR_NOTFOUND, "verbs: no key for the peer's buffer %u",
				 number);
	if (key->base.peer != (const struct xp_peer *)peer)
		return err_raise(ERR_INVAL,
				 "verbs: buffer %u: a key of another connection", number);
	if (key->remote.pieces && !rails_covered(key, peer))
		return err_raise(ERR_PROTO, "verbs: buffer %u: a key of %u rails", number,
				 key->remote.rails);
	if (buffer->offset > key->remote.length ||
	    buffer->length > key->remote.length - buffer->offset)
		return err_raise(
			ERR_RANGE,
			"verbs: the peer's buffer %u: %ju + %ju bytes are beyond its "
			"memory's %ju",
			number, (uintmax_t)buffer->offset, (uintmax_t)buffer->length,
			(uintmax_t)key->remote.length);
	return 0;
}

static void note_kind(struct verbs_places *places, const struct xp_buffer *buffer,
		      bool remote)
{
	const struct verbs_reg *reg = (const struct verbs_reg *)buffer->reg;

	if (remote) {
		places->staged |=
			((const struct verbs_key *)buffer->key)->remote.pieces == 0;
		return;
	}
	places->staged |= reg->pieces == 0;
	places->device |= reg->net.base.memory->kind == MEMORY_DEVICE;
	places->guarded |= reg->net.base.memory->kind == MEMORY_GUARDED;
}

/* A table may have holes where this plan has no rows. */
static int named_check(struct verbs_places *places, const struct plan *plan,
		       const struct xp_buffer *buffers, bool is_src,
		       const struct verbs_peer *remote_of)
{
	uint32_t last = UINT32_MAX;
	int r = 0;

	for (size_t i = 0; i < plan->run_count && r == 0; i++) {
		uint32_t number = verbs_places_buffer_of(&plan->runs[i], is_src);

		if (number == last)
			continue;
		last = number;
		if (remote_of)
			r = verbs_places_remote_check(&buffers[number], remote_of,
						      number);
		else if (!buffers[number].reg)
			r = err_raise(ERR_INVAL, "verbs: buffer %u is not registered",
				      number);
		if (r == 0)
			note_kind(places, &buffers[number], remote_of != NULL);
	}
	return err_pass(r);
}

int verbs_places_init(struct verbs_places *places, const struct plan *plan,
		      const struct xp_buffer *buffers, uint32_t count, bool is_src,
		      const struct verbs_peer *remote_of)
{
	int r;

	*places = (struct verbs_places){0};
	r = named_check(places, plan, buffers, is_src, remote_of);
	if (r < 0)
		return err_pass(r);
	places->at = mem_calloc(count, sizeof(*places->at));
	if (!places->at)
		return err_pass(-ENOMEM);
	places->count = count;
	for (uint32_t i = 0; i < count; i++) {
		struct verbs_place *at = &places->at[i];

		at->offset = buffers[i].offset;
		if (remote_of) {
			at->key = (struct verbs_key *)buffers[i].key;
			if (at->key)
				at->key->refs++;
		} else {
			at->reg = (struct verbs_reg *)buffers[i].reg;
			if (at->reg)
				net_reg_ref(&at->reg->net);
		}
	}
	return 0;
}

void verbs_places_fini(struct verbs_places *places)
{
	for (uint32_t i = 0; i < places->count; i++) {
		if (places->at[i].reg)
			net_reg_put(&places->at[i].reg->net);
		if (places->at[i].key)
			verbs_key_put(places->at[i].key);
	}
	mem_free(places->at);
	*places = (struct verbs_places){0};
}

uint64_t verbs_places_digest(const struct verbs_places *places, const struct plan *plan,
			     bool is_src)
{
	uint64_t text[4] = {plan->digest};
	uint32_t last = UINT32_MAX;

	for (size_t i = 0; i < plan->run_count; i++) {
		uint32_t number = verbs_places_buffer_of(&plan->runs[i], is_src);
		const struct verbs_place *at = &places->at[number];

		if (number == last)
			continue;
		last = number;
		text[1] = number;
		text[2] = at->reg ? at->reg->net.id : at->key->remote.id;
		text[3] = at->offset;
		text[0] = XXH3_64bits(text, sizeof(text));
	}
	return text[0];
}
