/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json: cJSON with a strict check. cJSON accepts bad UTF-8, 1e999, trailing bytes,
 * duplicate keys and unlimited nesting. json_parse() refuses these with the byte offset,
 * then lets cJSON build the tree. Getters copy and range-check one member and name it in
 * the error; member names are case-sensitive.
 */
#ifndef KVD_PROTO_JSON_H
#define KVD_PROTO_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define JSON_DEPTH_MAX 32u
#define JSON_INT_MAX INT64_C(9007199254740991) /* 2^53 - 1 */

/* `text` need not end in NUL. ERR_PROTO: malformed, with the byte offset. */
int json_parse(const char *text, size_t len, size_t max_depth, cJSON **json_p);
/* The checks alone (any thread, allocates nothing but a key stack). */
int json_check(const char *text, size_t len, size_t max_depth);
/* Is it UTF-8 without a NUL? */
bool json_utf8(const char *s, size_t len);
/* Make a text valid in a reply: invalid UTF-8 (such as a message cut within a
 * character) and control characters become '?'. */
void json_sanitize(char *s);

/*
 * Members of `obj`. Absent: 0 and *out unchanged when not required, ERR_INVAL
 * "<where>.<name>: missing" when required; wrong type or range: ERR_INVAL /
 * ERR_RANGE with the limits. `where` may be "".
 */
int json_get_int(const cJSON *obj, const char *name, bool required, int64_t min,
		 int64_t max, int64_t *out_p);
/* decimal string, or a number in 0 … 2^53-1 */
int json_get_u64(const cJSON *obj, const char *name, bool required, uint64_t *out_p);
int json_get_bool(const cJSON *obj, const char *name, bool required, bool *out_p);
/* Borrowed from the tree; at most max bytes. */
int json_get_str(const cJSON *obj, const char *name, bool required, size_t max,
		 const char **out_p);
int json_get_array(const cJSON *obj, const char *name, bool required, size_t max,
		   const cJSON **out_p);
int json_get_object(const cJSON *obj, const char *name, bool required,
		    const cJSON **out_p);
/* A cJSON number to an integer, exactly: false if fractional, NaN or above 2^53 - 1. */
bool json_number_is_int(const cJSON *num, int64_t *out_p);
/* Decimal string to u64, no sign, no spaces, no leading zeros beyond "0". */
bool json_parse_u64(const char *s, uint64_t *out_p);
/* Page lists: [3,4,9] or runs [[3,2],[9,1]] (mixed is refused) into a heap
 * array; each < page_limit, at most max entries. */
int json_get_pages(const cJSON *obj, const char *name, uint32_t page_limit, size_t max,
		   uint32_t **pages_p, size_t *count_p);
/* The position of the first page that is named a second time; `count`: there is none.
 * ERR_NOMEM. */
int json_pages_repeat(const uint32_t *pages, size_t count, size_t *at_p);
/* The same of a member, as json_pack_lists() has found it; 0: it has not searched. Before
 * json_get_pages(). */
size_t json_packed_repeat(const cJSON *obj, const char *name);
/* Ids of chunks, JSON_ID_BYTES each, of a list that was read by json_get_array(). */
enum { JSON_ID_BYTES = 32 };
int json_ids(const cJSON *list, const char *name, uint8_t **ids_p, uint32_t *count_p);
/* On a helper thread, for the line of a command: reads long page lists in "views", those
 * of "remote", and "ids", so that json_get_pages() and json_ids() only take them, once;
 * searches the page lists for repeated pages; counts the other lists for
 * json_get_array(). The tree must not change afterwards, except that members are
 * detached. */
void json_pack_lists(cJSON *tree);
/* The memory of a tree. */
size_t json_bytes(const cJSON *tree);
/* Refuse members that are not in `names` (NULL-terminated): ERR_INVAL. */
int json_only(const cJSON *obj, const char *const *names);
void json_freep(cJSON **json);

#endif
