/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines of JSON, written front to back into one growing buffer. A chunk's page list is
 * most of a request, so there is no tree and no printf for each number. Lists that are
 * mostly runs are sent as runs, which keeps a request of thousands of contiguous pages
 * under a hundred bytes. Running out of memory is recorded in the text and checked once,
 * when the line is sent.
 */
#include "lib/client.h"

void client_text_names(struct text *text, const char *name, const char *const *names,
		       size_t count)
{
	out_array(text, name);
	for (size_t i = 0; i < count; i++)
		out_text(text, NULL, names[i]);
	out_close(text, ']');
}

/* A list of numbers, or of runs [[first,count],…] when that is half as long. */
static void text_pages(struct text *text, const uint32_t *pages, size_t count)
{
	size_t runs = 0, end;

	for (size_t i = 0; i < count; i++)
		runs += !i || pages[i] != pages[i - 1] + 1;
	out_array(text, "pages");
	if (runs * 2 > count)
		for (size_t i = 0; i < count; i++)
			out_number(text, NULL, pages[i]);
	else
		for (size_t i = 0; i < count; i = end) {
			for (end = i + 1;
			     end < count && pages[end] == pages[end - 1] + 1;)
				end++;
			out_pair(text, NULL, pages[i], end - i);
		}
	out_close(text, ']');
}

void client_text_views(struct text *text, const struct kvd_view *views, size_t count)
{
	out_object(text, "views");
	for (size_t i = 0; i < count; i++) {
		const struct kvd_view *view = &views[i];

		out_object(text, view->name ? view->name : "kv");
		text_pages(text, view->pages, view->page_count);
		out_some(text, "first_token", view->first_token);
		if (view->token_begin || view->token_end)
			out_pair(text, "tokens", view->token_begin, view->token_end);
		if (view->layer_begin || view->layer_end)
			out_pair(text, "layers", view->layer_begin, view->layer_end);
		if (view->select) /* refused: only by the ring */
			out_bool(text, "select", true);
		out_close(text, '}');
	}
	out_close(text, '}');
}
