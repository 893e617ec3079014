/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sanitize: text from engines, peers and files, sanitized for a log line and a terminal.
 * It may not end the line, move the cursor, change the terminal or hide a character.
 */
#ifndef KVD_BASE_SANITIZE_H
#define KVD_BASE_SANITIZE_H

#include <stdbool.h>
#include <stddef.h>

/* In place: control characters (C0, DEL, C1), characters that change the text direction
 * or have no width, and invalid UTF-8 become '?'. Returns the length, which is no longer;
 * adds no NUL. */
size_t sanitize_text(char *text, size_t len);
/* Would sanitize_text() leave the text unchanged? */
bool sanitize_is_clean(const char *text);

#endif
