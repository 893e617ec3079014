/* SPDX-License-Identifier: Apache-2.0 */
/*
 * words: text of other processes, sanitized for output. Names and messages of engines and
 * other daemons must not move the cursor, change the terminal or hide characters.
 */
#ifndef KVD_CTL_WORDS_H
#define KVD_CTL_WORDS_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* sanitize_text() of a string. */
void words_clean(char *text);
/* The same for each name and string of a reply. */
void words_clean_json(cJSON *json);
/* Width of the text in columns; continuation bytes count as none. */
size_t words_width(const char *text);
/* Number of bytes in its first `columns` columns. */
size_t words_cut(const char *text, size_t columns);
/* Prints JSON and a newline, on one line or indented. Escapes DEL and C1, which cJSON
 * does not. */
void words_print_json(const cJSON *json, bool one_line, FILE *out);

#endif
