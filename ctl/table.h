/* SPDX-License-Identifier: Apache-2.0 */
/* table: columns of text, as wide as their widest cell. */
#ifndef KVD_CTL_TABLE_H
#define KVD_CTL_TABLE_H

#include <stdio.h>

struct table;

/* `heads`: column names separated by spaces; a leading '>' aligns right, '_' prints as a
 * space. */
struct table *table_new(const char *heads); /* NULL: no memory; accepted below */
void table_free(struct table *table);
/* Appends a cell, left to right, row by row. NULL prints as "-". */
void table_cell(struct table *table, const char *text);
void table_cellf(struct table *table, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
/* Prints headings and rows; control characters print as '?'. 0, or -ENOMEM if the table
 * or a cell could not be allocated. */
int table_print(const struct table *table, FILE *out);

#endif
