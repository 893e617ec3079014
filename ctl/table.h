/* SPDX-License-Identifier: Apache-2.0 */
/* table: columns of text, as wide as their widest cell. Nothing is shortened but the one
 * column that table_fit() names: a figure that is not seen whole is no figure. */
#ifndef KVD_CTL_TABLE_H
#define KVD_CTL_TABLE_H

#include <stdio.h>

struct table;

/* `heads`: column names separated by spaces; a '>' before one aligns it right, a '_' in
 * one shows as a space. */
struct table *table_new(const char *heads); /* NULL: no memory; others take that, too */
void table_free(struct table *table);
/* One cell, left to right, row after row. NULL shows as "-". */
void table_cell(struct table *table, const char *text);
void table_cellf(struct table *table, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
/* Make this column narrower, not below its head, until a line takes `columns`. */
void table_fit(struct table *table, unsigned int column, size_t columns);
/* Heads and rows; control characters show as '?'. 0, or -ENOMEM when the table or a cell
 * could not be kept. */
int table_print(const struct table *table, FILE *out);

#endif
