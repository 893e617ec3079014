/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout: how an engine's pages, tokens, heads and state lie in its buffers.
 *
 * A pool's layout is a list of buffers (lengths in bytes) and a list of views;
 * a view is a list of layers, a layer a list of fields, a field the affine map
 *
 *   addr(page, token, unit) = offset + page * page_stride + token * token_stride
 *                             + (unit - first_unit) * unit_stride
 *
 * inside one buffer, unit_bytes long. Pure: no fd, clock, thread or device.
 * A layout is immutable once made and may be read by any thread.
 */
#ifndef KVD_PLAN_LAYOUT_H
#define KVD_PLAN_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/plan/token_shard.h"

struct cJSON;
struct cursor;

#define LAYOUT_NAME_MAX 32   /* bytes of a view or field name, NUL included */
#define LAYOUT_FORMAT_MAX 16 /* of a field's format */

/* Limits on allocations that a hostile peer or client can cause (invariant 5). */
#define LAYOUT_BUFFERS_MAX 4096u
#define LAYOUT_VIEWS_MAX 64u
#define LAYOUT_LAYERS_MAX 1024u	    /* of one view */
#define LAYOUT_FIELDS_MAX 16u	    /* of one layer */
#define LAYOUT_PAGES_MAX (1u << 28) /* of one view */

struct layout_field {
	char name[LAYOUT_NAME_MAX];
	uint32_t buffer;      /* index into layout.buffers */
	uint64_t offset;      /* bytes, relative to the buffer */
	uint64_t page_stride; /* bytes */
	uint64_t token_stride;
	uint64_t unit_stride;
	uint64_t unit_bytes;
	uint32_t first_unit; /* this rank holds [first_unit, first_unit + units) */
	uint32_t units;
	uint32_t total_units; /* of the model, over all ranks */
	/* Data type of the bytes ("bf16", "fp8_e4m3"), "" when not given. */
	char format[LAYOUT_FORMAT_MAX];
};

struct layout_layer {
	uint32_t layer; /* the model's own number */
	uint32_t field_count;
	struct layout_field *fields;
};

struct layout_view {
	char name[LAYOUT_NAME_MAX];
	uint32_t page_tokens;
	uint32_t pages; /* page numbers are 0 … pages - 1 */
	struct token_shard shard;
	uint32_t layer_count;
	struct layout_layer *layers; /* ascending by layer */
};

struct layout {
	uint32_t rank;
	uint32_t buffer_count;
	uint64_t *buffers; /* length of each, bytes */
	uint32_t view_count;
	struct layout_view *views;
	bool unbounded; /* buffer lengths unknown: usable for a cover, not for a plan */
};

/*
 * Parse {"rank":…, "buffers":[…], "views":{…}} (docs/internals/layouts.md) and check it:
 * every address of every view is inside its buffer, strides and products do not overflow.
 * ERR_INVAL / ERR_RANGE name the path of the faulty member
 * ("views.kv.layers[3].fields[0].offset"). Defaults: "rank" 0, "shard" all tokens,
 * "format" unknown. An unknown member is ERR_INVAL, because it might change the meaning
 * of the bytes. Fields may overlap: a source may show the same bytes twice. A destination
 * may not; see layout_check_target().
 */
int layout_parse(const struct cJSON *json, struct layout **layout_p);
/* The same without "buffers" (a space of chunks needs no addresses): such a layout is
 * `unbounded` and plan_make() refuses it. */
int layout_parse_ranks(const struct cJSON *json, struct layout **layout_p);
/* Check a layout that C code has built; layout_parse() and layout_decode() include
 * this check. */
int layout_check(const struct layout *layout);
/*
 * May bytes be written here? ERR_LAYOUT when two fields of one view, or two pages, tokens
 * or units of one field, share a byte: a receiving pool is checked at registration, so
 * that it fails there and not at a bind. Views may share a buffer with each other.
 * Layouts that are too irregular for a cheap check pass: plan_make() finds every byte
 * that is really reached twice.
 */
int layout_check_target(const struct layout *layout);
/* The same layout as JSON; the caller owns the result (cJSON_Delete). */
int layout_print(const struct layout *layout, struct cJSON **json_p);
/* The wire form of REGISTER: O(fields) bytes, decoded with the same checks as
 * layout_parse(). Encoding into a cursor that is too small is ERR_TOOBIG. */
int layout_encode(const struct layout *layout, struct cursor *out);
int layout_decode(struct cursor *in, struct layout **layout_p);
/* That form in heap memory, and its XXH3: equal layouts have equal digests. ERR_NOMEM. */
int layout_pack(const struct layout *layout, uint8_t **bytes_p, size_t *len_p,
		uint64_t *digest_p);
void layout_free(struct layout *layout); /* NULL is fine */
void layout_freep(struct layout **layout_p);
size_t layout_memory(const struct layout *layout); /* bytes that it takes */

const struct layout_view *layout_view_find(const struct layout *layout, const char *name);
/* NULL when the view does not hold that layer / the layer that field. */
const struct layout_layer *layout_layer_find(const struct layout_view *view,
					     uint32_t layer);
const struct layout_field *layout_field_find(const struct layout_layer *layer,
					     const char *name);

/* How an error text names the two sides. Such a text may be sent to the other side, so
 * neither is "here". */
struct layout_sides {
	const char *one, *other; /* "the source", "the destination" */
};

/*
 * May bytes move between the two? For every view and layer that both hold: same fields,
 * same unit_bytes, total_units and, where both give it, format; shard runs that nest.
 * ERR_LAYOUT with the first difference: "view kv layer 3 field k: unit_bytes 256 (the
 * source), 128 (the destination)".
 */
int layout_compatible(const struct layout *one, const struct layout *other,
		      const struct layout_sides *sides);
/* The same for one view of each (of the same name). */
int layout_view_compatible(const struct layout_view *one, const struct layout_view *other,
			   const struct layout_sides *sides);
extern const struct layout_sides layout_from_source; /* one is the source's */
extern const struct layout_sides layout_from_destination;
extern const struct layout_sides layout_from_us; /* no bytes cross yet */

#endif
