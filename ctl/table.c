/* SPDX-License-Identifier: Apache-2.0 */
#include "ctl/table.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <string.h>

#include "daemon/base/mem.h"

#define COLUMNS_MAX 16u

struct table {
	unsigned int columns;
	bool right[COLUMNS_MAX];
	size_t widths[COLUMNS_MAX];
	char **cells; /* heads first */
	size_t count, cap;
	bool failed;
};

/* Columns on a terminal: UTF-8 continuation bytes take none. */
static size_t text_width(const char *text)
{
	size_t n = 0;

	for (; *text; text++)
		n += ((unsigned char)*text & 0xc0) != 0x80;
	return n;
}

void table_cell(struct table *table, const char *text)
{
	size_t column = table->count % table->columns, width;
	char **cells = table->cells, *copy = mem_strdup(text && *text ? text : "-");

	if (table->count == table->cap) {
		table->cap = table->cap ? table->cap * 2 : 64;
		cells = mem_regrow(cells, table->cap, sizeof(*cells));
	}
	if (!cells || !copy) {
		table->cap = table->count;
		table->failed = true;
		mem_free(copy);
		return;
	}
	/* names come from other processes: none may draw on the terminal */
	for (char *p = copy; *p; p++)
		if ((unsigned char)*p < 0x20 || *p == 0x7f)
			*p = '?';
	width = text_width(copy);
	if (width > table->widths[column])
		table->widths[column] = width;
	table->cells = cells;
	cells[table->count++] = copy;
}

void table_cellf(struct table *table, const char *fmt, ...)
{
	char buf[512];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(buf, sizeof(buf), fmt, ap);
	va_end(ap);
	table_cell(table, buf);
}

int table_new(const char *heads, struct table **table_p)
{
	struct table *table = mem_zalloc(sizeof(*table));
	char head[64];
	size_t len;

	if (!table)
		return -ENOMEM;
	for (const char *p = heads; *p; p += strspn(p, " ")) {
		p += strcspn(p, " ");
		table->columns++;
	}
	for (unsigned int i = 0; *heads && i < COLUMNS_MAX; i++) {
		table->right[i] = *heads == '>';
		heads += table->right[i];
		len = strcspn(heads, " ");
		snprintf(head, sizeof(head), "%.*s", (int)len, heads);
		for (char *p = head; *p; p++)
			*p = *p == '_' ? ' ' : *p;
		table_cell(table, head);
		heads += len;
		heads += strspn(heads, " ");
	}
	*table_p = table;
	return 0;
}

void table_free(struct table *table)
{
	if (!table)
		return;
	for (size_t i = 0; i < table->count; i++)
		mem_free(table->cells[i]);
	mem_free(table->cells);
	mem_free(table);
}

int table_print(const struct table *table, FILE *out)
{
	for (size_t i = 0; i < table->count; i++) {
		size_t column = i % table->columns;
		bool last = column + 1 == table->columns;
		int pad = (int)(table->widths[column] - text_width(table->cells[i]));

		if (table->right[column])
			fprintf(out, "%*s", pad, "");
		fputs(table->cells[i], out);
		if (!last)
			fprintf(out, "%*s", table->right[column] ? 2 : pad + 2, "");
		else
			fputc('\n', out);
	}
	return table->failed ? -ENOMEM : 0;
}
