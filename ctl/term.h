/* SPDX-License-Identifier: Apache-2.0 */
/*
 * term: a terminal as a screen of lines. It uses ECMA-48 sequences that all current
 * terminals support, not ncurses: each update redraws all lines, and containers seldom
 * have the terminfo entry that ncurses needs.
 *
 * One instance per process. The terminal is restored on return, on a fatal signal and
 * while the process is stopped (SIGTSTP), but not on SIGKILL.
 */
#ifndef KVD_CTL_TERM_H
#define KVD_CTL_TERM_H

#include <stdbool.h>
#include <stddef.h>

enum term_look { TERM_PLAIN, TERM_HEAD, TERM_BAD };

struct term_line {
	const char *text; /* truncated at the right border */
	enum term_look look;
};

#define TERM_KEY_NONE (-1) /* timeout, or the size changed */
#define TERM_KEY_END (-2)  /* the terminal was closed */

/* Whether standard input and output are a terminal other than TERM=dumb. */
bool term_usable(void);
/* 0, or -errno. With NO_COLOR every line is drawn as TERM_PLAIN. */
int term_open(void);
void term_close(void); /* idempotent */
void term_size(unsigned int *rows_p, unsigned int *columns_p);
/* Draws as many of the lines as fit. */
void term_draw(const struct term_line *lines, size_t count);
/* Waits at most so long for a key; escape sequences are ignored. */
int term_key(int timeout_ms);

#endif
