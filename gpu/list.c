/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A launch costs the GPU the bytes it moves and the list it reads, over the bus if the
 * list is in host memory; it costs the processor the writing of the list, while the GPU
 * waits for it. So three forms, by the common structure of rows:
 *
 *   - rows at equal distances, at two levels, share an entry of 64 bytes up to the
 *     work of one warp (KERN_ENTRY_BYTES): tokens of a page, heads of tokens;
 *   - rows without order have a place each, 16 bytes, and an entry for each
 *     KERN_PLACES_MAX of them. The caller writes the places (gpu_list_places()) in its
 *     own loop, two stores per row: to pass each as an object from function to function
 *     took ten times as long;
 *   - rows longer than an entry are cut: parts of a row are rows, too.
 *
 * Regular rows are seldom passed singly: a plan has folded them into runs.
 */
#include "gpu/list.h"

#include "gpu/lane.h"

void gpu_list_begin(struct gpu_list *list, void *memory)
{
	list->places = memory; /* first: both are then aligned as they should be */
	list->entries = (struct kern_rows *)(void *)(list->places + GPU_LIST_PLACES);
	list->count = list->place_count = 0;
	list->open.count = 0;
}

/* ---- rows at distances ---- */

/* Make `e` part of the last entry, if the two together are of one form. */
static bool entry_join(struct kern_rows *last, const struct kern_rows *e)
{
	int64_t dst = (int64_t)(e->dst - last->dst), src = (int64_t)(e->src - last->src);
	uint64_t rows = (uint64_t)last->count * last->outer + e->count;

	if (last->count == 0 || last->len != e->len || rows * e->len > KERN_ENTRY_BYTES)
		return false;
	if (last->outer == 1 && e->count == 1 &&
	    (last->count == 1 || (dst == last->dst_stride * last->count &&
				  src == last->src_stride * last->count))) {
		if (last->count == 1) {
			last->dst_stride = dst;
			last->src_stride = src;
		}
		last->count++;
		return true;
	}
	if (last->count != e->count || last->count == 1 ||
	    last->dst_stride != e->dst_stride || last->src_stride != e->src_stride)
		return false;
	if (last->outer > 1 && (dst != last->dst_outer * last->outer ||
				src != last->src_outer * last->outer))
		return false;
	if (last->outer == 1) {
		last->dst_outer = dst;
		last->src_outer = src;
	}
	last->outer++;
	return true;
}

static uint64_t entry_bits(const struct kern_rows *e)
{
	uint64_t bits = e->dst | e->src | e->len;

	if (e->count > 1)
		bits |= (uint64_t)e->dst_stride | (uint64_t)e->src_stride;
	if (e->outer > 1)
		bits |= (uint64_t)e->dst_outer | (uint64_t)e->src_outer;
	return bits;
}

/* The open entry becomes one of the list's, for which there is room. */
static void entry_close(struct gpu_list *list)
{
	if (list->open.count == 0)
		return;
	list->open.flags = entry_bits(&list->open) % 16 ? 0 : KERN_ROWS_ALIGNED;
	list->entries[list->count++] = list->open;
	list->open.count = 0;
}

/* False: the list is full. */
static bool entry_add(struct gpu_list *list, const struct kern_rows *e)
{
	if (entry_join(&list->open, e))
		return true;
	if (list->count + 1 >= GPU_LIST_ENTRIES)
		return false;
	entry_close(list);
	list->open = *e;
	return true;
}

/* Entries of about KERN_ENTRY_BYTES. */
static bool rows_add(struct gpu_list *list, struct gpu_rows *rows)
{
	uint64_t most = rows->count;

	if (most * rows->len > KERN_ENTRY_BYTES) /* else: a division is a row's time */
		most = KERN_ENTRY_BYTES / rows->len;
	while (rows->count > 0) {
		struct kern_rows e = {
			.dst = rows->dst,
			.src = rows->src,
			.dst_stride = rows->dst_stride,
			.src_stride = rows->src_stride,
			.len = (uint32_t)rows->len,
			.count = (uint32_t)(rows->count < most ? rows->count : most),
			.outer = 1};

		if (!entry_add(list, &e))
			return false;
		rows->dst += (uint64_t)rows->dst_stride * e.count;
		rows->src += (uint64_t)rows->src_stride * e.count;
		rows->count -= e.count;
	}
	return true;
}

/* Parts of a row that is longer than an entry. */
static bool row_add(struct gpu_list *list, uint64_t dst, uint64_t src, uint64_t len)
{
	struct gpu_rows parts = {.dst = dst,
				 .src = src,
				 .len = KERN_ENTRY_BYTES,
				 .count = len / KERN_ENTRY_BYTES,
				 .dst_stride = KERN_ENTRY_BYTES,
				 .src_stride = KERN_ENTRY_BYTES};
	struct gpu_rows rest = {.dst = dst + parts.count * KERN_ENTRY_BYTES,
				.src = src + parts.count * KERN_ENTRY_BYTES,
				.len = len % KERN_ENTRY_BYTES,
				.count = 1};

	/* moved twice where the list ends in between: by the kernel and an engine */
	return rows_add(list, &parts) && (rest.len == 0 || rows_add(list, &rest));
}

bool gpu_list_rows(struct gpu_list *list, struct gpu_rows *rows)
{
	if (rows->len <= KERN_ENTRY_BYTES)
		return rows_add(list, rows);
	while (rows->count > 0) {
		if (!row_add(list, rows->dst, rows->src, rows->len))
			return false;
		rows->dst += (uint64_t)rows->dst_stride;
		rows->src += (uint64_t)rows->src_stride;
		rows->count--;
	}
	return true;
}

/* ---- places ---- */

static uint32_t places_per_entry(uint64_t len)
{
	uint64_t most = KERN_ENTRY_BYTES / len;

	return most < KERN_PLACES_MAX ? (uint32_t)most : KERN_PLACES_MAX;
}

struct kern_place *gpu_list_places(struct gpu_list *list, uint64_t len, uint32_t *room_p)
{
	uint32_t room = GPU_LIST_PLACES - list->place_count, entries;

	*room_p = 0;
	if (len == 0 || len > KERN_ENTRY_BYTES)
		return NULL;
	entry_close(list); /* entry_add() has left room for it */
	entries = GPU_LIST_ENTRIES - 1 - list->count;
	if (room / places_per_entry(len) >= entries)
		room = entries * places_per_entry(len);
	*room_p = room;
	return list->places + list->place_count;
}

void gpu_list_placed(struct gpu_list *list, uint64_t len, uint32_t count, uint64_t bits)
{
	const uint32_t most = places_per_entry(len);
	const uint32_t flags =
		KERN_ROWS_PLACES | ((bits | len) % 16 ? 0 : KERN_ROWS_ALIGNED);

	while (count > 0) {
		const uint32_t n = count < most ? count : most;

		list->entries[list->count++] =
			(struct kern_rows){.dst = list->place_count,
					   .len = (uint32_t)len,
					   .count = n,
					   .outer = 1,
					   .flags = flags};
		list->place_count += n;
		count -= n;
	}
}

/* ---- the whole ---- */

uint32_t gpu_list_end(struct gpu_list *list)
{
	entry_close(list);
	return list->count;
}

static int entry_each(const struct gpu_list *list, const struct kern_rows *e,
		      int (*take)(void *arg, const struct gpu_rows *rows), void *arg)
{
	int r = 0;

	for (uint32_t i = 0; kern_has_places(e) && i < e->count && r == 0; i++) {
		const struct kern_place *place = &list->places[e->dst + i];
		const struct gpu_rows row = {
			.dst = place->dst, .src = place->src, .len = e->len, .count = 1};

		r = take(arg, &row);
	}
	for (uint32_t o = 0; !kern_has_places(e) && o < e->outer && r == 0; o++) {
		const struct gpu_rows rows = {.dst = e->dst + (uint64_t)e->dst_outer * o,
					      .src = e->src + (uint64_t)e->src_outer * o,
					      .len = e->len,
					      .count = e->count,
					      .dst_stride = e->dst_stride,
					      .src_stride = e->src_stride};

		r = take(arg, &rows);
	}
	return r;
}

int gpu_list_each(const struct gpu_list *list,
		  int (*take)(void *arg, const struct gpu_rows *rows), void *arg)
{
	int r = 0;

	for (uint32_t i = 0; i < list->count && r == 0; i++)
		r = entry_each(list, &list->entries[i], take, arg);
	return r;
}
