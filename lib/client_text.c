/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines of JSON, written front to back into one growing buffer.
 *
 * A chunk's page list is most of a request, so there is no tree in between and no
 * printf for each number. Lists that are mostly runs are told as runs, which
 * keeps a request of thousands of contiguous pages under a hundred bytes. Running
 * out of memory is kept in the text and found once, when the line is sent.
 */
#include "lib/client.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void client_text_fini(struct client_text *text)
{
	mem_free(text->data);
	*text = (struct client_text){0};
}

static char *text_room(struct client_text *text, size_t more)
{
	size_t cap = text->cap ? text->cap : 256;
	char *data;

	if (text->failed)
		return NULL;
	while (cap < text->len + more + 1)
		cap *= 2;
	if (cap != text->cap) {
		data = mem_regrow(text->data, cap, 1);
		if (!data) {
			text->failed = true;
			return NULL;
		}
		text->data = data;
		text->cap = cap;
	}
	return text->data + text->len;
}

void client_text_bytes(struct client_text *text, const char *bytes, size_t len)
{
	char *at = text_room(text, len);

	if (!at)
		return;
	memcpy(at, bytes, len);
	at[len] = '\0';
	text->len += len;
}

void client_text_printf(struct client_text *text, const char *fmt, ...)
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
		client_text_bytes(text, buf, (size_t)n);
}

void client_text_quoted(struct client_text *text, const char *s)
{
	const char *from = s;

	client_text_bytes(text, "\"", 1);
	for (; *s; s++) {
		if (*s != '"' && *s != '\\' && (unsigned char)*s >= 0x20)
			continue;
		client_text_bytes(text, from, (size_t)(s - from));
		client_text_printf(text, "\\u%04x", (unsigned char)*s);
		from = s + 1;
	}
	client_text_bytes(text, from, (size_t)(s - from));
	client_text_bytes(text, "\"", 1);
}

void client_text_str(struct client_text *text, const char *name, const char *value)
{
	if (!value)
		return;
	client_text_printf(text, ",\"%s\":", name);
	client_text_quoted(text, value);
}

void client_text_int(struct client_text *text, const char *name, uint64_t value)
{
	client_text_printf(text, ",\"%s\":%llu", name, (unsigned long long)value);
}

void client_text_some(struct client_text *text, const char *name, uint64_t value)
{
	if (value)
		client_text_int(text, name, value);
}

void client_text_u64(struct client_text *text, const char *name, uint64_t value)
{
	client_text_printf(text, ",\"%s\":\"%llu\"", name, (unsigned long long)value);
}

/* Digits of a list are most of a request's bytes: no printf for each. */
static void text_number(struct client_text *text, uint32_t v, bool comma)
{
	char buf[12], *p = buf + sizeof(buf);

	do
		*--p = (char)('0' + v % 10);
	while (v /= 10);
	if (comma)
		*--p = ',';
	client_text_bytes(text, p, (size_t)(buf + sizeof(buf) - p));
}

/* A list of numbers, or of runs [[first,count],…] when that is half as long. */
static void text_pages(struct client_text *text, const uint32_t *pages, size_t count)
{
	size_t runs = 0, end;

	for (size_t i = 0; i < count; i++)
		runs += !i || pages[i] != pages[i - 1] + 1;
	client_text_bytes(text, "[", 1);
	if (runs * 2 > count)
		for (size_t i = 0; i < count; i++)
			text_number(text, pages[i], i > 0);
	else
		for (size_t i = 0; i < count; i = end) {
			for (end = i + 1;
			     end < count && pages[end] == pages[end - 1] + 1;)
				end++;
			client_text_printf(text, "%s[%u,%zu]", i ? "," : "", pages[i],
					   end - i);
		}
	client_text_bytes(text, "]", 1);
}

static void text_view(struct client_text *text, const struct kvd_view *view)
{
	client_text_quoted(text, view->name ? view->name : "kv");
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
	client_text_bytes(text, "}", 1);
}

void client_text_views(struct client_text *text, bool first, const struct kvd_view *views,
		       size_t count)
{
	client_text_printf(text, "%s\"views\":{", first ? "" : ",");
	for (size_t i = 0; i < count; i++) {
		if (i)
			client_text_bytes(text, ",", 1);
		text_view(text, &views[i]);
	}
	client_text_bytes(text, "}", 1);
}
