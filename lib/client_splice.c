/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys of a fetch, for other positions. The daemon copies chunks as they were computed;
 * their keys are rotated here, in the engine's own memory: on the caller's thread, or by
 * the GPU that has them (client_splice_gpu.c). A rotation in place cannot be repeated: it
 * rounds once, and a second one would be of rotated keys. So it is done after the success
 * of the fetch, for all of its views at once, and a move remembers it.
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
#include "gpu/attend_kern.h"
#include "lib/client_splice.h"

struct keys {
	struct kvd_client *client;
	const struct kvd_splice *args;
	struct layout *layout;
	struct rope_turn turn;
	enum value_type type;
	struct strip {
		const struct kvd_view *view;
		const struct layout_view *there;
		const struct layout_field *field;
		uint64_t address; /* of the buffer */
		size_t first;	  /* of its view's pages, among those of all views */
	} * strips;
	size_t count, pages;
	bool gpu; /* all of them are in GPU memory */
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

static int field_check(struct keys *k, const struct kvd_view *view,
		       const struct layout_view *there, const struct layout_field *f)
{
	uint32_t bytes = value_bytes(k->type);
	struct strip strip = {view, there, f, 0, k->pages};
	bool gpu = false;
	void *more;
	int r;

	if (f->unit_bytes % bytes ||
	    f->unit_bytes / bytes < (uint64_t)k->turn.first + k->turn.dims)
		return client_fail(
			k->client, KVD_E_INVAL,
			"field %s: a head of %llu bytes does not have the rope "
			"values [%u, +%u) of %u bytes",
			f->name, (unsigned long long)f->unit_bytes, k->turn.first,
			k->turn.dims, bytes);
	r = client_pool_address(k->args->pool, f->buffer, &strip.address, &gpu);
	if (!r && k->count && gpu != k->gpu)
		r = client_fail(k->client, KVD_E_REQUIRE,
				"field %s: some keys are in GPU memory, and some are not",
				f->name);
	if (!r && gpu &&
	    (k->type != VALUE_BF16 || (strip.address | f->offset | f->page_stride |
				       f->token_stride | f->unit_stride) %
					      2))
		r = client_fail(k->client, KVD_E_REQUIRE,
				"field %s: keys in GPU memory must be bf16, at even "
				"addresses",
				f->name);
	more = r ? NULL : mem_regrow(k->strips, k->count + 1, sizeof(*k->strips));
	if (!more)
		return r ? r : client_fail_nomem(k->client);
	k->strips = more;
	k->strips[k->count++] = strip;
	k->gpu = gpu;
	return 0;
}

static int pages_check(const struct keys *k, const struct kvd_view *view,
		       const struct layout_view *there)
{
	uint64_t begin, end;

	if (view->select)
		return client_fail(k->client, KVD_E_INVAL,
				   "view %s: selected tokens keep their positions",
				   there->name);
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
	if (begin >= end || end > view->page_count * (uint64_t)there->page_tokens ||
	    end > UINT32_MAX)
		return client_fail(
			k->client, KVD_E_RANGE,
			"view %s: tokens [%llu, %llu) are not in its %zu pages",
			there->name, (unsigned long long)view->token_begin,
			(unsigned long long)view->token_end, view->page_count);
	return 0;
}

static int view_check(struct keys *k, const struct kvd_view *view)
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
		r = f ? field_check(k, view, there, f)
		      : client_fail(k->client, KVD_E_INVAL,
				    "view %s: layer %u has no field %s", there->name,
				    layer->layer, k->args->key);
	}
	if (!r && !layers)
		r = client_fail(k->client, KVD_E_RANGE,
				"view %s: none of its layers is in [%u, %u)", there->name,
				view->layer_begin, view->layer_end);
	k->pages += view->page_count;
	return r;
}

/* ---- rotation ---- */

static void strip_turn(const struct keys *k, const struct strip *strip)
{
	const struct layout_view *there = strip->there;
	const struct layout_field *f = strip->field;
	const struct splice splice = {
		.turn = &k->turn,
		.type = k->type,
		.values = (uint32_t)(f->unit_bytes / value_bytes(k->type)),
		.dst_stride = f->token_stride,
		.src_stride = f->token_stride};
	uint64_t begin, end;

	view_tokens(strip->view, there, &begin, &end);
	while (begin < end) {
		uint64_t in_page = begin % there->page_tokens, rows = there->page_tokens;
		uint64_t page = strip->view->pages[begin / there->page_tokens];

		rows -= in_page;
		if (rows > end - begin)
			rows = end - begin;
		for (uint32_t u = 0; u < f->units; u++) {
			uint8_t *at = (uint8_t *)(uintptr_t)strip->address + f->offset +
				      page * f->page_stride + in_page * f->token_stride +
				      u * f->unit_stride;

			splice_rows(&splice, at, at, rows);
		}
		begin += rows;
	}
}

/* For a kernel; its pages are behind the table of angles. */
static struct attend_kern_splice strip_kern(const struct keys *k,
					    const struct strip *strip)
{
	const struct layout_field *f = strip->field;
	const struct attend_kern_field at = {strip->address + f->offset, f->page_stride,
					     f->token_stride, f->unit_stride};
	uint64_t begin, end;

	view_tokens(strip->view, strip->there, &begin, &end);
	return (struct attend_kern_splice){
		.dst = at,
		.src = at,
		.to = {k->turn.dims * sizeof(float) + strip->first * sizeof(uint32_t),
		       strip->there->page_tokens, (uint32_t)begin,
		       (uint32_t)(end - begin), 0},
		.turn = {0, k->turn.first, k->turn.dims, k->turn.pairs, 0},
		.tokens = (uint32_t)(end - begin),
		.heads = f->units,
		.values = (uint32_t)(f->unit_bytes / value_bytes(k->type))};
}

static int keys_turn_gpu(const struct keys *k, bool *written_p)
{
	cleanup_free struct attend_kern_splice *fields =
		mem_calloc(k->count, sizeof(*fields));
	struct err why;

	if (!fields)
		return client_fail_nomem(k->client);
	for (size_t i = 0; i < k->count; i++)
		fields[i] = strip_kern(k, &k->strips[i]);
	if (splice_gpu(k->args, &k->turn, fields, k->count, k->pages, written_p) >= 0)
		return 0;
	err_take(&why);
	return client_fail(k->client, (int)why.code, "%.300s%s", why.text,
			   *written_p ? "; the keys are undefined: fetch them again"
				      : "");
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

int client_splice(struct kvd_client *client, const struct kvd_splice *splice,
		  bool *written_p)
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
	if (!r && k.gpu && splice->delta) {
		r = keys_turn_gpu(&k, written_p);
	} else if (!r) {
		*written_p = true;
		for (size_t i = 0; i < k.count; i++)
			strip_turn(&k, &k.strips[i]);
	}
	mem_free(k.strips);
	layout_free(k.layout);
	return r;
}
