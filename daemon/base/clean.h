/* SPDX-License-Identifier: Apache-2.0 */
/*
 * clean: what engines, peers and files say, made fit for a log line and a terminal. None
 * of it may end the line, move the cursor, change the terminal or hide a character.
 */
#ifndef KVD_BASE_CLEAN_H
#define KVD_BASE_CLEAN_H

#include <stdbool.h>
#include <stddef.h>

/* In place: control characters (C0, DEL, C1), those that turn the direction of writing or
 * have no width, and what is no UTF-8 become '?'. Returns the length, which is no longer;
 * puts no NUL. */
size_t clean_text(char *text, size_t len);
/* Would it leave the text as it is? */
bool clean_is(const char *text);

#endif
