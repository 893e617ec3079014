/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Getters for cJSON's tree. They hide three habits of cJSON from callers: its default
 * look-up ignores case, its numbers are doubles whose `valueint` saturates silently, and
 * a missing member is NULL like an empty one. A getter finds a member by its exact name,
 * accepts an integer only if the double holds one exactly, and distinguishes absent from
 * wrong: every error names the member and the limits. Numbers that may need all 64 bits
 * are sent as decimal strings; a small number is accepted too, since {"address":0} is
 * unambiguous.
 *
 * Page lists are read in two passes, count then fill, so that the array is allocated
 * once, after the limits have been checked: a run [0, 4294967295] returns an error to its
 * sender instead of allocating 16 GiB.
 */
#include "proto/json.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "daemon/base/mem.h"

int json_parse(const char *text, size_t len, size_t max_depth, cJSON **json_p)
{
	int r = json_check(text, len, max_depth);

	if (r < 0)
		return err_pass(r);
	*json_p = cJSON_ParseWithLength(text, len);
	if (!*json_p) /* the text is valid, so this is the only cause */
		return err_raise(ERR_NOMEM, "out of memory for %zu bytes of JSON", len);
	return 0;
}

/* 0 with *item_p NULL when absent and not required. */
static int json_member(const cJSON *obj, const char *name, bool required,
		       const cJSON **item_p)
{
	*item_p = cJSON_GetObjectItemCaseSensitive(obj, name);
	if (!*item_p && required)
		return err_raise(ERR_INVAL, "%s: missing", name);
	return 0;
}

static int wrong_type(const char *name, const char *wanted)
{
	return err_raise(ERR_INVAL, "%s: %s was expected", name, wanted);
}

bool json_number_is_int(const cJSON *num, int64_t *out_p)
{
	double d;

	if (!cJSON_IsNumber(num))
		return false;
	d = num->valuedouble;
	/* the negation also excludes NaN */
	if (!(d >= -(double)JSON_INT_MAX && d <= (double)JSON_INT_MAX))
		return false;
	if ((double)(int64_t)d != d)
		return false;
	*out_p = (int64_t)d;
	return true;
}

int json_get_int(const cJSON *obj, const char *name, bool required, int64_t min,
		 int64_t max, int64_t *out_p)
{
	const cJSON *item;
	int64_t v;
	int r = json_member(obj, name, required, &item);

	if (r < 0 || !item)
		return err_pass(r);
	if (!json_number_is_int(item, &v))
		return wrong_type(name, "an integer within 2^53 - 1");
	if (v < min || v > max)
		return err_raise(ERR_RANGE,
				 "%s: %" PRId64 " is not in %" PRId64 " … %" PRId64, name,
				 v, min, max);
	*out_p = v;
	return 0;
}

bool json_parse_u64(const char *s, uint64_t *out_p)
{
	uint64_t v = 0;

	if (!*s || (*s == '0' && s[1]))
		return false;
	for (; *s; s++) {
		if (*s < '0' || *s > '9' || __builtin_mul_overflow(v, 10, &v) ||
		    __builtin_add_overflow(v, (uint64_t)(*s - '0'), &v))
			return false;
	}
	*out_p = v;
	return true;
}

int json_get_u64(const cJSON *obj, const char *name, bool required, uint64_t *out_p)
{
	const cJSON *item;
	int64_t v;
	int r = json_member(obj, name, required, &item);

	if (r < 0 || !item)
		return err_pass(r);
	if (cJSON_IsString(item) && json_parse_u64(item->valuestring, out_p))
		return 0;
	if (!json_number_is_int(item, &v) || v < 0)
		return wrong_type(name, "a decimal string below 2^64");
	*out_p = (uint64_t)v;
	return 0;
}

int json_get_bool(const cJSON *obj, const char *name, bool required, bool *out_p)
{
	const cJSON *item;
	int r = json_member(obj, name, required, &item);

	if (r < 0 || !item)
		return err_pass(r);
	if (!cJSON_IsBool(item))
		return wrong_type(name, "true or false");
	*out_p = cJSON_IsTrue(item);
	return 0;
}

int json_get_str(const cJSON *obj, const char *name, bool required, size_t max,
		 const char **out_p)
{
	const cJSON *item;
	size_t len;
	int r = json_member(obj, name, required, &item);

	if (r < 0 || !item)
		return err_pass(r);
	if (!cJSON_IsString(item))
		return wrong_type(name, "a string");
	len = strlen(item->valuestring);
	if (len > max)
		return err_raise(ERR_RANGE, "%s: %zu bytes, limit %zu", name, len, max);
	*out_p = item->valuestring;
	return 0;
}

/* The result of json_pack_lists() is in valueint, which cJSON leaves 0. */
static size_t list_length(const cJSON *list)
{
	const cJSON *it;
	size_t n = 0;

	if (list->valueint > 0)
		return (size_t)list->valueint;

	cJSON_ArrayForEach(it, list)
		n++;
	return n;
}

/* Replaces a long page list that json_pack_lists() has read: no text produces an item
 * of type Raw, and the memory at valuestring is freed with the tree. It contains
 * valueint pages, followed by the list's length, the highest page, and the position of
 * the first repeated one. */
struct packed {
	uint32_t *pages; /* NULL: not a packed list */
	uint32_t count, entries, top, repeat;
};
enum { PACKED_ENTRIES, PACKED_TOP, PACKED_REPEAT, PACKED_MORE };

static struct packed packed_of(const cJSON *item)
{
	struct packed p = {0};

	if (cJSON_IsRaw(item)) {
		p.pages = (uint32_t *)(void *)item->valuestring;
		p.count = (uint32_t)item->valueint;
		p.entries = p.pages[p.count + PACKED_ENTRIES];
		p.top = p.pages[p.count + PACKED_TOP];
		p.repeat = p.pages[p.count + PACKED_REPEAT];
	}
	return p;
}

int json_get_array(const cJSON *obj, const char *name, bool required, size_t max,
		   const cJSON **out_p)
{
	struct packed packed;
	const cJSON *item;
	size_t len;
	int r = json_member(obj, name, required, &item);

	if (r < 0 || !item)
		return err_pass(r);
	packed = packed_of(item);
	if (!cJSON_IsArray(item) && !packed.pages)
		return wrong_type(name, "an array");
	len = packed.pages ? packed.entries : list_length(item);
	if (len > max)
		return err_raise(ERR_RANGE, "%s: %zu entries, limit %zu", name, len, max);
	*out_p = item;
	return 0;
}

int json_get_object(const cJSON *obj, const char *name, bool required,
		    const cJSON **out_p)
{
	const cJSON *item;
	int r = json_member(obj, name, required, &item);

	if (r < 0 || !item)
		return err_pass(r);
	if (!cJSON_IsObject(item))
		return wrong_type(name, "an object");
	*out_p = item;
	return 0;
}

/* ---- page lists ---- */

#define MALLOC_BYTES 16u /* overhead of an allocation */
#define PACK_MIN 256u	 /* shorter ones take no noticeable time on the loop */
#define PACK_MAX (1u << 20)
#define FEW_PAGES 32u		/* compared without a bitmap */
#define BITMAP_PAGES (1u << 26) /* a pool with more of them is searched by its room */

struct page_list {
	const char *name;
	uint32_t page_limit;
	size_t max;
	bool runs; /* the first entry decides the form of all */
};

static int entry_fault(const struct page_list *l, size_t at, const char *wanted)
{
	return err_raise(ERR_INVAL, "%s[%zu]: %s was expected", l->name, at, wanted);
}

static int entry_read(const struct page_list *l, size_t at, const cJSON *entry,
		      uint32_t *first_p, uint32_t *count_p)
{
	const cJSON *num = entry;
	int64_t first = 0, count = 1;

	if (l->runs) {
		if (!cJSON_IsArray(entry) || list_length(entry) != 2)
			return entry_fault(l, at, "a run [first, count]");
		num = entry->child;
		if (!json_number_is_int(num->next, &count) || count < 1)
			return entry_fault(l, at, "a count of 1 or more");
	}
	if (!json_number_is_int(num, &first) || first < 0)
		return entry_fault(l, at,
				   l->runs ? "a page number" : "a page number (no run)");
	/* both are below 2^53: the sum cannot overflow */
	if (first + count > (int64_t)l->page_limit)
		return err_raise(ERR_RANGE,
				 "%s[%zu]: page %" PRId64
				 " is not below the pool's %u pages",
				 l->name, at, first + count - 1, l->page_limit);
	*first_p = (uint32_t)first;
	*count_p = (uint32_t)count;
	return 0;
}

/* Check all entries and count their pages; fill `pages` unless it is NULL. */
static int pages_walk(const struct page_list *l, const cJSON *list, uint32_t *pages,
		      size_t *total_p)
{
	const cJSON *entry;
	size_t total = 0, at = 0;
	uint32_t first = 0, count = 0;

	cJSON_ArrayForEach(entry, list) {
		int r = entry_read(l, at++, entry, &first, &count);

		if (r < 0)
			return err_pass(r);
		if (count > l->max - total)
			return err_raise(ERR_RANGE, "%s: more than %zu pages", l->name,
					 l->max);
		for (uint32_t i = 0; pages && i < count; i++)
			pages[total + i] = first + i;
		total += count;
	}
	*total_p = total;
	return 0;
}

/* `named`: a bit a page, of the pages before; NULL: they are compared. */
static bool named_before(const uint32_t *pages, size_t at, uint64_t *named)
{
	uint64_t bit = UINT64_C(1) << (pages[at] % 64);
	size_t i = 0;

	if (named) {
		uint64_t *word = &named[pages[at] / 64], old = *word;

		*word |= bit;
		return old & bit;
	}
	while (i < at && pages[i] != pages[at])
		i++;
	return i < at;
}

int json_pages_repeat(const uint32_t *pages, size_t count, size_t *at_p)
{
	cleanup_free uint64_t *named = NULL;
	uint32_t top = 0;
	size_t at = 0;

	for (size_t i = 0; i < count; i++)
		top = pages[i] > top ? pages[i] : top;
	if (count > FEW_PAGES) {
		named = mem_calloc(top / 64u + 1u, sizeof(*named));
		if (!named)
			return err_pass(-ENOMEM);
	}
	while (at < count && !named_before(pages, at, named))
		at++;
	*at_p = at;
	return 0;
}

size_t json_packed_repeat(const cJSON *obj, const char *name)
{
	const cJSON *list = cJSON_GetObjectItemCaseSensitive(obj, name);

	return list ? packed_of(list).repeat : 0;
}

/* The caller takes the list's memory; the tree keeps nothing of it. */
static uint32_t *packed_take(cJSON *list)
{
	uint32_t *pages = mem_adopt(list->valuestring);

	list->valuestring = NULL;
	list->type = (list->type & ~0xff) | cJSON_NULL;
	return pages;
}

static int take_packed(const struct page_list *l, cJSON *list, uint32_t **pages_p,
		       size_t *count_p)
{
	const struct packed packed = packed_of(list);
	size_t at = 0;

	if (packed.count > l->max)
		return err_raise(ERR_RANGE, "%s: more than %zu pages", l->name, l->max);
	if (packed.top >= l->page_limit) {
		while (packed.pages[at] < l->page_limit)
			at++;
		return err_raise(ERR_RANGE,
				 "%s: the %zuth page, %u, is not below the pool's "
				 "%u pages",
				 l->name, at + 1, packed.pages[at], l->page_limit);
	}
	*pages_p = packed_take(list);
	*count_p = packed.count;
	return 0;
}

static void packed_put(cJSON *list, uint32_t *pages, size_t count, size_t entries,
		       uint32_t top, size_t repeat)
{
	pages[count + PACKED_ENTRIES] = (uint32_t)entries;
	pages[count + PACKED_TOP] = top;
	pages[count + PACKED_REPEAT] = (uint32_t)repeat;
	cJSON_Delete(list->child);
	list->child = NULL;
	list->type = (list->type & ~0xff) | cJSON_Raw;
	list->valuestring = (char *)pages;
	list->valueint = (int)count;
}

/* A list of `least` entries or more, if its pages are among the *left_p that a line may
 * have: runs expand. Errors of a list are reported by its command. */
static void pack(cJSON *list, size_t least, size_t *left_p)
{
	struct page_list l = {.name = "", .page_limit = UINT32_MAX, .max = *left_p};
	size_t count = 0, entries, repeat = 0;
	uint32_t *pages = NULL, top = 0;

	if (!cJSON_IsArray(list) || (entries = list_length(list)) < least ||
	    entries > PACK_MAX)
		return;
	l.runs = cJSON_IsArray(list->child);
	if (pages_walk(&l, list, NULL, &count) == 0)
		pages = cJSON_malloc((count + PACKED_MORE) * sizeof(*pages));
	err_clear();
	if (!pages)
		return;
	(void)pages_walk(&l, list, pages, &count);
	for (size_t i = 0; i < count; i++)
		top = pages[i] > top ? pages[i] : top;
	if (top < BITMAP_PAGES && json_pages_repeat(pages, count, &repeat) < 0)
		err_clear(); /* the command searches, or has no memory either */
	packed_put(list, pages, count, entries, top, repeat);
	*left_p -= count;
}

/* ---- lists of ids ---- */

#define ID_WORDS(entries) ((entries) * (JSON_ID_BYTES / sizeof(uint32_t)))

static int ids_walk(const cJSON *list, const char *name, uint8_t *ids)
{
	const cJSON *entry;
	size_t at = 0;

	cJSON_ArrayForEach(entry, list) {
		const char *text = cJSON_GetStringValue(entry);

		if (!text || strlen(text) != HEX_CHARS(JSON_ID_BYTES) ||
		    !hex_read(text, ids + at * JSON_ID_BYTES, JSON_ID_BYTES))
			return err_raise(ERR_INVAL,
					 "%s[%zu]: not an id; give %zu hex digits", name,
					 at, (size_t)HEX_CHARS(JSON_ID_BYTES));
		at++;
	}
	return 0;
}

static void pack_ids(cJSON *list)
{
	size_t entries;
	uint32_t *ids;

	if (!cJSON_IsArray(list) || (entries = list_length(list)) < PACK_MIN ||
	    entries > PACK_MAX / JSON_ID_BYTES)
		return;
	ids = cJSON_malloc((ID_WORDS(entries) + PACKED_MORE) * sizeof(*ids));
	if (ids && ids_walk(list, "", (uint8_t *)ids) == 0) {
		packed_put(list, ids, ID_WORDS(entries), entries, UINT32_MAX, 0);
		return;
	}
	cJSON_free(ids);
	err_clear();
}

int json_ids(const cJSON *list, const char *name, uint8_t **ids_p, uint32_t *count_p)
{
	const struct packed packed = packed_of(list);
	size_t count = packed.pages ? packed.entries : list_length(list);
	uint8_t *ids;

	if (packed.pages) {
		ids = (uint8_t *)packed_take((cJSON *)(uintptr_t)list);
	} else {
		ids = mem_calloc(count + 1, JSON_ID_BYTES);
		if (!ids)
			return err_pass(-ENOMEM);
		if (ids_walk(list, name, ids) < 0) {
			mem_free(ids);
			return err_pass(-EINVAL);
		}
	}
	*ids_p = ids;
	*count_p = (uint32_t)count;
	return 0;
}

static void pack_views(const cJSON *tree, size_t least, size_t *left_p)
{
	const cJSON *views = cJSON_GetObjectItemCaseSensitive(tree, "views"), *view;

	if (!cJSON_IsObject(views))
		return;
	cJSON_ArrayForEach(view, views)
		pack(cJSON_GetObjectItemCaseSensitive(view, "pages"), least, left_p);
}

void json_pack_lists(cJSON *tree)
{
	cJSON *remote = cJSON_GetObjectItemCaseSensitive(tree, "remote"), *entry, *member;
	size_t left = PACK_MAX;

	pack_ids(cJSON_GetObjectItemCaseSensitive(tree, "ids"));
	cJSON_ArrayForEach(member, tree) {
		if (cJSON_IsArray(member))
			member->valueint = (int)list_length(member);
	}
	pack_views(tree, PACK_MIN, &left);
	cJSON_ArrayForEach(entry, remote)
		pack_views(entry, 1, &left); /* there may be very many short ones */
}

size_t json_bytes(const cJSON *tree)
{
	size_t bytes = sizeof(*tree) + MALLOC_BYTES;
	const cJSON *it = NULL;

	if (packed_of(tree).pages)
		return bytes + packed_of(tree).count * sizeof(uint32_t);
	cJSON_ArrayForEach(it, tree)
		bytes += json_bytes(it);
	return bytes;
}

int json_get_pages(const cJSON *obj, const char *name, uint32_t page_limit, size_t max,
		   uint32_t **pages_p, size_t *count_p)
{
	struct page_list l = {.name = name, .page_limit = page_limit, .max = max};
	const cJSON *list = NULL;
	uint32_t *pages;
	size_t count = 0;
	int r = json_get_array(obj, name, true, max, &list);

	if (r < 0)
		return err_pass(r);
	if (packed_of(list).pages)
		return take_packed(&l, (cJSON *)(uintptr_t)list, pages_p, count_p);
	l.runs = cJSON_IsArray(list->child);
	r = pages_walk(&l, list, NULL, &count);
	if (r < 0)
		return err_pass(r);
	pages = mem_calloc(count, sizeof(*pages));
	if (!pages)
		return err_pass(-ENOMEM);
	(void)pages_walk(&l, list, pages, &count);
	*pages_p = pages;
	*count_p = count;
	return 0;
}

/* ---- the rest ---- */

int json_only(const cJSON *obj, const char *const *names)
{
	const cJSON *it;

	cJSON_ArrayForEach(it, obj) {
		size_t i = 0;

		while (names[i] && strcmp(names[i], it->string) != 0)
			i++;
		if (!names[i])
			return err_raise(ERR_INVAL, "%.64s: unknown member", it->string);
	}
	return 0;
}

void json_freep(cJSON **json)
{
	cJSON_Delete(*json);
}
