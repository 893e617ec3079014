/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines of JSON, written front to back into one growing buffer. A chunk's page list is
 * most of a request, so there is no tree and no printf for each number. Lists that are
 * mostly runs are sent as runs, which keeps a request of thousands of contiguous pages
 * under a hundred bytes. Running out of memory is recorded in the text and checked once,
 * when the line is sent.
 */
#include "lib/client.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void client_text_printf(struct text *text, const char *fmt, ...)
{
	char buf[256];
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(buf, sizeof(buf), fmt, ap);
	va_end(ap);
	if (n < 0 || (size_t)n >= sizeof(buf))
		text->failed = true;
	else
		text_put(text, buf, (size_t)n);
}

void client_text_str(struct text *text, const char *name, const char *value)
{
	if (!value)
		return;
	client_text_printf(text, ",\"%s\":", name);
	text_json(text, value);
}

void client_text_int(struct text *text, const char *name, uint64_t value)
{
	client_text_printf(text, ",\"%s\":%llu", name, (unsigned long long)value);
}

void client_text_some(struct text *text, const char *name, uint64_t value)
{
	if (value)
		client_text_int(text, name, value);
}

void client_text_u64(struct text *text, const char *name, uint64_t value)
{
	client_text_printf(text, ",\"%s\":\"%llu\"", name, (unsigned long long)value);
}

void client_text_names(struct text *text, const char *name, const char *const *names,
		       size_t count)
{
	client_text_printf(text, ",\"%s\":[", name);
	for (size_t i = 0; i < count; i++) {
		text_puts(text, i ? "," : "");
		text_json(text, names[i]);
	}
	text_put(text, "]", 1);
}

/* A list of numbers, or of runs [[first,count],…] when that is half as long. */
static void text_pages(struct text *text, const uint32_t *pages, size_t count)
{
	size_t runs = 0, end;

	for (size_t i = 0; i < count; i++)
		runs += !i || pages[i] != pages[i - 1] + 1;
	text_put(text, "[", 1);
	if (runs * 2 > count)
		for (size_t i = 0; i < count; i++)
			text_number(text, i ? "," : "", pages[i]);
	else
		for (size_t i = 0; i < count; i = end) {
			for (end = i + 1;
			     end < count && pages[end] == pages[end - 1] + 1;)
				end++;
			client_text_printf(text, "%s[%u,%zu]", i ? "," : "", pages[i],
					   end - i);
		}
	text_put(text, "]", 1);
}

static void text_view(struct text *text, const struct kvd_view *view)
{
	text_json(text, view->name ? view->name : "kv");
	client_text_printf(text, ":{\"pages\":");
	text_pages(text, view->pages, view->page_count);
	client_text_some(text, "first_token", view->first_token);
	if (view->token_begin || view->token_end)
		client_text_printf(text, ",\"tokens\":[%llu,%llu]",
				   (unsigned long long)view->token_begin,
				   (unsigned long long)view->token_end);
	if (view->layer_begin || view->layer_end)
		client_text_printf(text, ",\"layers\":[%u,%u]", view->layer_begin,
				   view->layer_end);
	text_put(text, "}", 1);
}

void client_text_views(struct text *text, bool first, const struct kvd_view *views,
		       size_t count)
{
	client_text_printf(text, "%s\"views\":{", first ? "" : ",");
	for (size_t i = 0; i < count; i++) {
		if (i)
			text_put(text, ",", 1);
		text_view(text, &views[i]);
	}
	text_put(text, "}", 1);
}
