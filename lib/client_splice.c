/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys of a fetch, for other positions. The daemon copies chunks as they were computed;
 * their keys are rotated here, in the engine's own memory, on the caller's thread. A
 * rotation in place cannot be repeated: it rounds once, and a second one would be of
 * rotated keys. So it is done after the success of the fetch, for all of its views at
 * once, and a move remembers it.
 *
 * Where the keys lie follows from the pool: its layout, as the daemon has accepted it,
 * and the addresses of its regions. All arguments are checked before the first byte is
 * written, so that a refusal leaves the fetched bytes as they are.
 */
#include "lib/client.h"

#include <string.h>

#include "daemon/base/err.h"
#include "daemon/math/splice.h"
#include "daemon/plan/layout.h"
#include "lib/client_splice.h"

struct keys {
	struct kvd_client *client;
	const struct kvd_splice *args;
	struct layout *layout;
	struct rope_turn turn;
	enum value_type type;
};

static const char *view_name(const struct kvd_view *view)
{
	return view->name ? view->name : "kv";
}

/* The tokens [*begin_p, *end_p) of the view's pages, counted from its first page's. */
static void view_tokens(const struct kvd_view *view, const struct layout_view *there,
			uint64_t *begin_p, uint64_t *end_p)
{
	*begin_p = 0;
	*end_p = view->page_count * (uint64_t)there->page_tokens;
	if (view->token_begin || view->token_end) {
		*begin_p = view->token_begin - view->first_token;
		*end_p = view->token_end - view->first_token;
	}
}

static bool layer_wanted(const struct kvd_view *view, uint32_t layer)
{
	return (!view->layer_begin && !view->layer_end) ||
	       (layer >= view->layer_begin && layer < view->layer_end);
}

/* ---- checks ---- */

static int rope_check(const struct keys *k)
{
	const struct kvd_rope *rope = &k->args->rope;

	if ((unsigned int)k->args->type >= VALUE_TYPES || !k->args->key ||
	    (unsigned int)rope->pairs > KVD_INTERLEAVED || !rope->inv_freq)
		return client_fail(k->client, KVD_E_INVAL,
				   "type, key or rope: missing or unknown");
	if (rope->dims == 0 || rope->dims % 2 || rope->dims > 2 * ROPE_PAIRS_MAX ||
	    rope->first > UINT16_MAX)
		return client_fail(k->client, KVD_E_RANGE,
				   "rope: values [%u, +%u) are not 1 to %u pairs",
				   rope->first, rope->dims, ROPE_PAIRS_MAX);
	if (k->args->delta == INT32_MIN)
		return client_fail(k->client, KVD_E_RANGE, "delta: %d is out of range",
				   k->args->delta);
	return 0;
}

static int field_check(const struct keys *k, const struct layout_field *f)
{
	uint32_t bytes = value_bytes(k->type);
	uint64_t address;

	if (f->unit_bytes % bytes ||
	    f->unit_bytes / bytes < (uint64_t)k->turn.first + k->turn.dims)
		return client_fail(
			k->client, KVD_E_INVAL,
			"field %s: a head of %llu bytes does not have the rope "
			"values [%u, +%u) of %u bytes",
			f->name, (unsigned long long)f->unit_bytes, k->turn.first,
			k->turn.dims, bytes);
	return client_pool_address(k->args->pool, f->buffer, &address);
}

static int pages_check(const struct keys *k, const struct kvd_view *view,
		       const struct layout_view *there)
{
	uint64_t begin, end;

	if (!token_shard_is_all(&there->shard))
		return client_fail(k->client, KVD_E_REQUIRE,
				   "view %s: its pages have the tokens of one rank",
				   there->name);
	for (size_t i = 0; i < view->page_count; i++) {
		if (view->pages[i] >= there->pages)
			return client_fail(k->client, KVD_E_RANGE,
					   "view %s: pages[%zu]: %u is not one of %u",
					   there->name, i, view->pages[i], there->pages);
	}
	view_tokens(view, there, &begin, &end);
	if (begin >= end || end > view->page_count * (uint64_t)there->page_tokens)
		return client_fail(
			k->client, KVD_E_RANGE,
			"view %s: tokens [%llu, %llu) are not in its %zu pages",
			there->name, (unsigned long long)view->token_begin,
			(unsigned long long)view->token_end, view->page_count);
	return 0;
}

static int view_check(const struct keys *k, const struct kvd_view *view)
{
	const struct layout_view *there = layout_view_find(k->layout, view_name(view));
	unsigned int layers = 0;
	int r = there ? pages_check(k, view, there)
		      : client_fail(k->client, KVD_E_INVAL, "view %s: not in the layout",
				    view_name(view));

	for (uint32_t i = 0; i < (r ? 0 : there->layer_count) && !r; i++) {
		const struct layout_layer *layer = &there->layers[i];
		const struct layout_field *f = layout_field_find(layer, k->args->key);

		if (!layer_wanted(view, layer->layer))
			continue;
		layers++;
		r = f ? field_check(k, f)
		      : client_fail(k->client, KVD_E_INVAL,
				    "view %s: layer %u has no field %s", there->name,
				    layer->layer, k->args->key);
	}
	if (!r && !layers)
		r = client_fail(k->client, KVD_E_RANGE,
				"view %s: none of its layers is in [%u, %u)", there->name,
				view->layer_begin, view->layer_end);
	return r;
}

/* ---- rotation ---- */

static void field_turn(const struct keys *k, const struct kvd_view *view,
		       const struct layout_view *there, const struct layout_field *f)
{
	const struct splice splice = {
		.turn = &k->turn,
		.type = k->type,
		.values = (uint32_t)(f->unit_bytes / value_bytes(k->type)),
		.dst_stride = f->token_stride,
		.src_stride = f->token_stride};
	uint64_t begin, end, address;

	client_pool_address(k->args->pool, f->buffer, &address); /* checked before */
	view_tokens(view, there, &begin, &end);
	while (begin < end) {
		uint64_t in_page = begin % there->page_tokens, rows = there->page_tokens;
		uint64_t page = view->pages[begin / there->page_tokens];

		rows -= in_page;
		if (rows > end - begin)
			rows = end - begin;
		for (uint32_t u = 0; u < f->units; u++) {
			uint8_t *at = (uint8_t *)(uintptr_t)address + f->offset +
				      page * f->page_stride + in_page * f->token_stride +
				      u * f->unit_stride;

			splice_rows(&splice, at, at, rows);
		}
		begin += rows;
	}
}

static void view_turn(const struct keys *k, const struct kvd_view *view)
{
	const struct layout_view *there = layout_view_find(k->layout, view_name(view));

	for (uint32_t i = 0; i < there->layer_count; i++) {
		const struct layout_layer *layer = &there->layers[i];

		if (layer_wanted(view, layer->layer))
			field_turn(k, view, there,
				   layout_field_find(layer, k->args->key));
	}
}

static int layout_of(struct keys *k)
{
	cJSON *json = cJSON_Parse(client_pool_layout(k->args->pool));
	struct err why;
	int r;

	if (!json)
		return client_fail_nomem(k->client);
	r = layout_parse(json, &k->layout);
	cJSON_Delete(json);
	if (r >= 0)
		return 0;
	err_take(&why);
	return client_fail(k->client, KVD_E_INVAL, "pool: %s", why.text);
}

int client_splice(struct kvd_client *client, const struct kvd_splice *splice)
{
	const struct kvd_rope *asked = &splice->rope;
	const struct rope rope = {.first = (uint16_t)asked->first,
				  .dims = (uint16_t)asked->dims,
				  .pairs = (uint8_t)asked->pairs,
				  .inv_freq = asked->inv_freq};
	struct keys k = {
		.client = client, .args = splice, .type = (enum value_type)splice->type};
	int r = rope_check(&k);

	if (!r && (!splice->pool || !splice->view_count))
		r = client_fail(client, KVD_E_INVAL, "pool or views: missing");
	if (!r)
		r = layout_of(&k);
	if (r)
		return r;
	rope_turn_make(&k.turn, &rope, splice->delta);
	for (size_t i = 0; i < splice->view_count && !r; i++)
		r = view_check(&k, &splice->views[i]);
	for (size_t i = 0; i < splice->view_count && !r; i++)
		view_turn(&k, &splice->views[i]);
	layout_free(k.layout);
	return r;
}
