/* SPDX-License-Identifier: Apache-2.0 */
/*
 * brief: a small JSON object without heap allocation, for replies to commands that have
 * taken effect. Such a command must not fail with "out of memory": its engine would reuse
 * pages that a room has, or never learn the number of its new object. The nodes are in
 * the struct; names and texts are borrowed until it has been printed or copied.
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

/* The digits of a whole number, exactly; cJSON prints 15 digits and takes 1 us (printf
 * and scanf of a double). False: not whole. */
bool brief_whole(double value, char text[BRIEF_WHOLE_MAX]);

void brief_init(struct brief *brief);
void brief_number(struct brief *brief, const char *name, double value);
void brief_text(struct brief *brief, const char *name, const char *text);
void brief_bool(struct brief *brief, const char *name, bool value);
/* "error": {code, message, retryable, scope}. */
void brief_error(struct brief *brief, const struct err *err);

#endif
