/* SPDX-License-Identifier: Apache-2.0 */
/*
 * term: a terminal as a screen of lines. Written with the sequences of ECMA-48 that all
 * terminals of today know, not with ncurses: lines are drawn anew each time, nothing else
 * is asked of it, and containers seldom have the terminfo entry that ncurses needs.
 *
 * One at a time. However the process ends, the terminal is as it was before: by return,
 * by a signal that ends it, while it is stopped (SIGTSTP); SIGKILL cannot be helped.
 */
#ifndef KVD_CTL_TERM_H
#define KVD_CTL_TERM_H

#include <stdbool.h>
#include <stddef.h>

enum term_look { TERM_PLAIN, TERM_HEAD, TERM_BAD };

struct term_line {
	const char *text; /* cut at the right border */
	enum term_look look;
};

#define TERM_KEY_NONE (-1)   /* the time is over, or the size changed */
#define TERM_KEY_END (-2)    /* the terminal is gone */
#define TERM_KEY_ESCAPE 0x1b /* alone; sequences of other keys are dropped */
#define TERM_KEY_ENTER 0x0a
#define TERM_KEY_ERASE 0x7f

/* Standard input and output are one, and no dumb one. */
bool term_usable(void);
/* 0, or -errno. No look but TERM_PLAIN shows where NO_COLOR is set. */
int term_open(void);
void term_close(void); /* idempotent */
void term_size(unsigned int *rows_p, unsigned int *columns_p);
/* The first lines that fit. */
void term_draw(const struct term_line *lines, size_t count);
/* A key, within so many milliseconds. */
int term_key(int timeout_ms);

#endif
