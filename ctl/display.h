/* SPDX-License-Identifier: Apache-2.0 */
/*
 * display: text of other processes, sanitized for output. Names and messages of engines
 * and other daemons must not move the cursor, change the terminal or hide characters.
 */
#ifndef KVD_CTL_DISPLAY_H
#define KVD_CTL_DISPLAY_H

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdio.h>

/* sanitize_text() of a string. */
void display_sanitize(char *text);
/* The same for each name and string of a reply. */
void display_sanitize_json(cJSON *json);
/* Width of the text in columns; continuation bytes count as none. */
size_t display_width(const char *text);
/* Prints JSON and a newline. Escapes DEL and C1, which cJSON does not. */
void display_print_json(const cJSON *json, FILE *out);

#endif
