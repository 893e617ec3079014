/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/transport/spans.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

void spans_fini(struct spans *spans)
{
	mem_free(spans->items);
	*spans = (struct spans){0};
}

static int insert(struct spans *spans, size_t at, uint64_t begin, uint64_t end)
{
	struct span *items;
	size_t cap;

	if (spans->count == SPANS_MAX)
		return err_raise(ERR_PROTO,
				 "too many separate ranges of bytes (limit %u)",
				 SPANS_MAX);
	if (spans->count == spans->cap) {
		cap = spans->cap ? 2 * spans->cap : 4;
		items = mem_regrow(spans->items, cap, sizeof(*items));
		if (!items)
			return err_pass(-ENOMEM);
		spans->items = items;
		spans->cap = cap;
	}
	memmove(&spans->items[at + 1], &spans->items[at],
		(spans->count - at) * sizeof(*spans->items));
	spans->items[at] = (struct span){begin, end};
	spans->count++;
	return 0;
}

int spans_add(struct spans *spans, uint64_t begin, uint64_t length)
{
	uint64_t end = begin + length;
	struct span *before, *after;
	size_t at = spans->count;
	int r;

	/* from the end: the newest bytes are the likely neighbours */
	while (at > 0 && spans->items[at - 1].begin >= end)
		at--;
	before = at > 0 ? &spans->items[at - 1] : NULL;
	after = at < spans->count ? &spans->items[at] : NULL;
	if (before && before->end > begin)
		return err_raise(ERR_PROTO, "bytes %llu to %llu received twice",
				 (unsigned long long)begin, (unsigned long long)end);
	if (before && before->end == begin) {
		before->end = end;
		if (after && after->begin == end) {
			before->end = after->end;
			spans->count--;
			memmove(after, after + 1, (spans->count - at) * sizeof(*after));
		}
	} else if (after && after->begin == end) {
		after->begin = begin;
	} else {
		r = insert(spans, at, begin, end);
		if (r < 0)
			return err_pass(r);
	}
	spans->bytes += length;
	return 0;
}
