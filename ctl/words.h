/* SPDX-License-Identifier: Apache-2.0 */
/*
 * words: what others said, made fit to be shown. Names and messages come from engines
 * and other daemons; none may move the cursor, change the terminal or hide a character.
 */
#ifndef KVD_CTL_WORDS_H
#define KVD_CTL_WORDS_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/* clean_text() of a string. */
void words_clean(char *text);
/* The same of each name and string of an answer. */
void words_clean_json(cJSON *json);
/* Columns that the text takes; continuation bytes take none. */
size_t words_width(const char *text);
/* Bytes of its first `columns` columns. */
size_t words_cut(const char *text, size_t columns);
/* JSON, and a newline; in one line or indented. DEL and C1, which cJSON leaves as they
 * are, are escaped. */
void words_print_json(const cJSON *json, bool one_line, FILE *out);

#endif
