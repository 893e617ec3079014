/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The seat is one of 4096 rows, so that what is computed can take long: ROWS says how
 * many of them a part has. Behind them nothing may be written but what a row without
 * tokens is (o and l 0).
 */
#include "tests/integration/faults/engine.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 256u /* tokens */
#define CHUNKS 8u
#define PAGE 16u
#define PAGES (CHUNKS * CHUNK / PAGE)
#define LAYERS 2u
#define DIMS 64u
#define SEAT_ROWS 4096u
#define FIELD_BYTES ((uint64_t)PAGES * PAGE * DIMS * 2)
#define SEAT_AT (2 * LAYERS * FIELD_BYTES)
#define HOLD_MS 600000u
#define REMOTE_MS 3000u
#define PUT_MS 10000
#define PARTS 8u
#define NEAR 1e-3
#define WIPE 0xa5

/* Of V; a small multiple of 1/64, which bf16 has. */
static double value_of(uint32_t chunk, uint32_t layer, uint32_t token, uint32_t d)
{
	uint32_t x = ((chunk * 2 + layer) * CHUNK + token) * DIMS + d;

	return (double)((x * 2654435761u) >> 26) / 64;
}

static uint16_t bf16(double value)
{
	float f = (float)value;
	uint32_t bits;

	memcpy(&bits, &f, sizeof(bits));
	return (uint16_t)(bits >> 16);
}

static uint16_t *field_at(const struct rows *r, uint32_t layer, uint32_t field)
{
	return (uint16_t *)(void *)((char *)r->memory.address +
				    (2 * layer + field) * FIELD_BYTES);
}

static void pages_fill(const struct rows *r, uint32_t first)
{
	for (uint32_t i = 0; i < PAGES * PAGE * DIMS; i++)
		for (uint32_t l = 0; l < LAYERS; l++) {
			uint32_t token = i / DIMS, chunk = first + token / CHUNK;

			field_at(r, l, 0)[i] = bf16((double)(i % 7) / 8);
			field_at(r, l, 1)[i] =
				bf16(value_of(chunk, l, token % CHUNK, i % DIMS));
		}
}

/* ---- opening ---- */

static int pool_make(struct rows *r)
{
	struct kvd_layout *layout = kvd_layout_new(0);
	struct kvd_field field = {.unit_bytes = DIMS * 2, .units = 1};
	struct kvd_region *regions[2 * LAYERS];
	uint64_t offsets[2 * LAYERS];
	struct kvd_pool_args args = {.name = "rows",
				     .regions = regions,
				     .offsets = offsets,
				     .region_count = 2 * LAYERS};
	uint32_t view = kvd_layout_view(layout, "kv", PAGE, PAGES);
	int result;

	for (uint32_t f = 0; f < 2 * LAYERS; f++) {
		field.name = f % 2 ? "v" : "k";
		field.buffer = kvd_layout_buffer(layout, FIELD_BYTES);
		kvd_layout_heads(layout, view, f / 2, KVD_NHD, &field);
		regions[f] = r->region;
		offsets[f] = f * FIELD_BYTES;
	}
	result = kvd_layout_text(layout, &args.layout);
	if (!result)
		result = kvd_pool_register(r->client, &args, NULL, &r->pool);
	kvd_layout_free(layout);
	return result;
}

static int attend_make(struct rows *r)
{
	const struct kvd_attend_args args = {.region = r->region,
					     .offset = SEAT_AT,
					     .rows = SEAT_ROWS,
					     .seats = 1,
					     .kind = KVD_GQA,
					     .q_type = KVD_BF16,
					     .kv_type = KVD_BF16,
					     .heads = 1,
					     .kv_heads = 1,
					     .dqk = DIMS,
					     .dv = DIMS,
					     .scale = 1,
					     .key = "k",
					     .value = "v"};
	int result = kvd_attend_open(r->client, &args, NULL, &r->attend);

	return result ? result : kvd_attend_seat(r->attend, &r->seat);
}

static int rows_open(struct rows *r)
{
	struct kvd_space_args args = {.model = "faults", .scheme = "n", .tokens = CHUNK};
	int result;

	if (r->attend)
		return 0;
	result = kvd_memory_alloc(SEAT_AT + SEAT_ROWS * (DIMS * 6 + 8) + 4096, "rows",
				  &r->memory);
	if (!result)
		result = kvd_region_memory(r->client, &r->memory, NULL, &r->region);
	if (!result)
		result = pool_make(r);
	args.pool = r->pool;
	if (!result)
		result = kvd_space_open(r->client, &args, NULL, &r->space);
	if (!result)
		result = attend_make(r);
	if (!result)
		r->shadow = malloc(r->seat.bytes);
	return result;
}

/* ---- chunks ---- */

static int run_read(const char *args, uint8_t ids[CHUNKS][KVD_CHUNK_ID_BYTES],
		    struct kvd_chunks *chunks)
{
	uint32_t first, count;

	if (sscanf(args, "%" SCNu32 " %" SCNu32, &first, &count) != 2 || count > CHUNKS)
		return -KVD_E_INVAL;
	for (uint32_t i = 0; i < count; i++)
		memset(ids[i], (int)(first + i + 1), KVD_CHUNK_ID_BYTES);
	*chunks = (struct kvd_chunks){.ids = ids, .count = count, .first = first};
	return 0;
}

int rows_chunks(struct rows *r, const char *args)
{
	uint8_t ids[CHUNKS][KVD_CHUNK_ID_BYTES];
	uint32_t pages[PAGES];
	struct kvd_view view = {.name = "kv", .pages = pages};
	struct kvd_move_args put = {.view_count = 1, .views = &view};
	struct kvd_chunks chunks;
	struct kvd_move_facts facts;
	struct kvd_move *move;
	int result = run_read(args, ids, &chunks);

	if (!result)
		result = rows_open(r);
	if (result)
		return result;
	pages_fill(r, (uint32_t)chunks.first);
	for (uint32_t i = 0; i < PAGES; i++)
		pages[i] = i;
	view.page_count = (uint32_t)chunks.count * CHUNK / PAGE;
	view.first_token = view.token_begin = chunks.first * CHUNK;
	view.token_end = view.token_begin + chunks.count * CHUNK;
	put.pool = r->pool;
	result = kvd_put(r->space, &chunks, &put, NULL, &move);
	if (!result)
		result = kvd_move_wait(move, KVD_SUCCESS, PUT_MS);
	if (result >= 0)
		result = kvd_move_show(move, PUT_MS, &facts);
	if (!result && facts.done != chunks.count)
		return facts.error.code ? -facts.error.code : -KVD_E_LIMIT;
	return result ? result : kvd_move_close(move, NULL);
}

int rows_hold(struct rows *r, const char *args)
{
	uint8_t ids[CHUNKS][KVD_CHUNK_ID_BYTES];
	struct kvd_chunks chunks;
	struct kvd_found found;
	int result = run_read(args, ids, &chunks);

	if (!result)
		result = rows_open(r);
	if (!result)
		result =
			kvd_hold_open(r->space, &chunks, HOLD_MS, REMOTE_MS, 0, &r->hold);
	if (!result)
		result = kvd_hold_found(r->hold, &found, &chunks.first);
	r->first = (uint32_t)chunks.first;
	if (!result && found.chunks != chunks.count)
		return -KVD_E_NOTFOUND;
	return result;
}

/* ---- posts ---- */

static char *seat_at(const struct rows *r, uint64_t at)
{
	return (char *)r->memory.address + SEAT_AT + at;
}

/* As an engine would: q is its own again once it was read; the rest is wiped before. */
int rows_post(struct rows *r, const char *args)
{
	struct kvd_part part = {.hold = r->hold}, parts[PARTS];
	uint32_t layer, ms;
	int result;

	if (!r->hold ||
	    sscanf(args,
		   "%" SCNu64 " %" SCNu32 " %" SCNu32 " %" SCNu32 " %" SCNu64 " %" SCNu32
		   " %" SCNu32,
		   &r->number, &layer, &part.rows, &part.count, &part.tokens, &ms,
		   &r->times) != 7 ||
	    r->times > PARTS)
		return -KVD_E_INVAL;
	for (uint32_t i = 0; i < r->times; i++)
		parts[i] = part;
	r->layer = layer;
	r->posted = part.rows;
	r->chunks = part.count;
	r->tokens = part.tokens ? (uint32_t)part.tokens : part.count * CHUNK;
	memset(seat_at(r, 0), WIPE, r->seat.bytes);
	memset(seat_at(r, r->seat.q), 0, SEAT_ROWS * DIMS * 2);
	memcpy(r->shadow, seat_at(r, 0), r->seat.bytes);
	result = kvd_attend_post(r->attend, 0, layer, parts, r->times, ms * 1000);
	r->live = !result;
	r->ended = r->moved = false;
	r->state = -1;
	r->wrong = 0;
	return result;
}

/* Rows that no part names keep what was there. */
static bool wiped(const float *at, uint32_t count)
{
	const uint8_t *bytes = (const void *)at;

	for (size_t i = 0; i < count * sizeof(*at); i++)
		if (bytes[i] != WIPE)
			return false;
	return true;
}

static uint32_t rows_wrong(const struct rows *r)
{
	const float *o = (const float *)(void *)seat_at(r, r->seat.o);
	const float *m = (const float *)(void *)seat_at(r, r->seat.m);
	const float *l = (const float *)(void *)seat_at(r, r->seat.l);
	double mean[DIMS] = {0};
	uint32_t wrong = 0;

	for (uint32_t t = 0; t < r->tokens; t++)
		for (uint32_t d = 0; d < DIMS; d++)
			mean[d] +=
				value_of(r->first + t / CHUNK, r->layer, t % CHUNK, d) /
				r->tokens;
	for (uint32_t i = 0; i < r->posted; i++) {
		bool right = m[i] == 0 &&
			     fabs((double)l[i] / (r->tokens * r->times) - 1) < NEAR;

		for (uint32_t d = 0; d < DIMS; d++)
			right = right && fabs((double)o[i * DIMS + d] - mean[d]) < NEAR;
		wrong += !right;
	}
	for (uint32_t i = r->posted; i < SEAT_ROWS; i++)
		wrong += !wiped(m + i, 1) || !wiped(l + i, 1) ||
			 !wiped(o + (size_t)i * DIMS, DIMS);
	return wrong;
}

static uint32_t rows_written(const struct rows *r)
{
	uint32_t written = 0;

	for (uint64_t i = 0; i < r->seat.bytes; i++)
		written += (uint8_t)seat_at(r, 0)[i] != r->shadow[i];
	return written;
}

static void rows_print(const struct rows *r, const char *error, uint64_t late_ns,
		       uint64_t now_ns)
{
	printf("{\"event\":\"room\",\"room\":%" PRIu64
	       ",\"role\":\"attend\",\"state\":%d,\"aborting\":false,\"error\":\"%s\","
	       "\"retryable\":true,\"bytes\":0,\"wrong\":%u,\"t\":%" PRIu64
	       ",\"late\":%" PRIu64 "}\n",
	       r->number, r->state, error, r->wrong, now_ns, late_ns);
}

bool rows_look(struct rows *r, uint64_t late_ns, uint64_t now_ns)
{
	int state = r->live ? kvd_attend_state(r->attend, 0) : r->state;

	if (r->still_id && now_ns >= r->still_ns) {
		printf("{\"id\":%" PRIu64
		       ",\"result\":\"OK\",\"written\":%u,\"strayed\":0,"
		       "\"sticky\":%s}\n",
		       r->still_id, rows_written(r), r->moved ? "false" : "true");
		r->still_id = 0;
	}
	if (!r->live || state == r->state || state < 0)
		return false;
	r->moved |= r->ended;
	r->state = state;
	if (state == KVD_SUCCESS)
		r->wrong = rows_wrong(r);
	else if (state == KVD_FAILED) /* nothing was written, either */
		r->wrong = rows_written(r);
	if (!r->ended && (state == KVD_SUCCESS || state == KVD_FAILED)) {
		r->ended = true;
		r->ended_ns = now_ns;
		memcpy(r->shadow, seat_at(r, 0), r->seat.bytes);
	}
	rows_print(r, state == KVD_FAILED ? "EFAILED" : "", late_ns, now_ns);
	return true;
}

void rows_still(struct rows *r, uint64_t id, uint32_t ms)
{
	r->still_id = id;
	r->still_ns = r->ended_ns + ms * UINT64_C(1000000);
}

void rows_why(struct rows *r, uint64_t id)
{
	struct kvd_error error = {0};
	char words[400];
	int result = kvd_attend_error(r->attend, 0, 2000, &error);

	snprintf(words, sizeof(words), "%s: %s", kvd_code_name(error.code),
		 error.message);
	printf("{\"id\":%" PRIu64 ",\"result\":\"%s\",\"words\":", id,
	       result < 0 ? kvd_code_name(result) : "OK");
	engine_print_text(words);
	printf("}\n");
}
