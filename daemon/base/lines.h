/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lines: a file that an operator writes, an entry a line: keys, members of a cluster.
 * Lines starting with '#' and empty lines are skipped; blanks separate the fields.
 */
#ifndef KVD_BASE_LINES_H
#define KVD_BASE_LINES_H

#include <stddef.h>
#include <sys/types.h>

struct lines {
	mode_t mode; /* of the file */
	size_t size;
	char *text; /* with a NUL */
	char *rest;
	unsigned int number; /* of the line that lines_next() returned; from 1 */
};

/* ERR_CONFIG: it cannot be read, is no file, or has more than 1 MiB. */
int lines_load(const char *path, struct lines *lines_p);
/* The next line with fields, which may be written to; NULL at the end. */
char *lines_next(struct lines *lines);
/* Wipes the text. If not loaded, it must be zeroed. */
void lines_fini(struct lines *lines);
/* ERR_CONFIG: others may write the file. */
int lines_check_writers(const struct lines *lines, const char *path);
/* Splits a line into fields. Returns their number, or most + 1 if there are more. */
unsigned int lines_words(char *line, char **words, unsigned int most);

#endif
