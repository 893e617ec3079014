/* SPDX-License-Identifier: Apache-2.0 */
/*
 * brief: a small JSON object without the heap, for the replies of commands that
 * have taken effect. Such a command must not be answered "no memory": its engine
 * would take back pages that a room has, or never learn the number of what it now
 * owns. The nodes lie in the struct; names and texts are borrowed until it was
 * printed or copied.
 */
#ifndef KVD_BRIEF_H
#define KVD_BRIEF_H

#include <cjson/cJSON.h>
#include <stdbool.h>

struct err;

#define BRIEF_NODES_MAX 24u
#define BRIEF_WHOLE_MAX 24u

struct brief {
	cJSON nodes[BRIEF_NODES_MAX]; /* the first is the object itself */
	unsigned int used;
	char whole[BRIEF_NODES_MAX][BRIEF_WHOLE_MAX]; /* of whole numbers, by node */
};

/* The digits of a number that is whole: all of them, where cJSON prints the 15 that
 * are almost it, and takes 1 us (printf and scanf of a double); false: it is not. */
bool brief_whole(double value, char text[BRIEF_WHOLE_MAX]);

void brief_init(struct brief *brief);
void brief_number(struct brief *brief, const char *name, double value);
void brief_text(struct brief *brief, const char *name, const char *text);
void brief_bool(struct brief *brief, const char *name, bool value);
/* "error": {code, message, retryable, scope}. */
void brief_error(struct brief *brief, const struct err *err);

#endif
