/* SPDX-License-Identifier: Apache-2.0 */
/*
 * text: a growing buffer, into which proto/out.h writes JSON where there is so much of it
 * that a tree of cJSON costs more than the work (rooms by the thousand). A failure is
 * kept until the end; later text is dropped.
 */
#ifndef KVD_BASE_TEXT_H
#define KVD_BASE_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

struct text {
	char *data; /* ends with a NUL once something was put */
	size_t len, cap;
	bool failed;   /* no memory */
	bool borrowed; /* data is the caller's, and not the heap's yet */
};

/* An empty one that needs no memory until it is longer than `space`. */
struct text text_on(char *space, size_t size);
void text_fini(struct text *text);
void text_put(struct text *text, const char *bytes, size_t len);
void text_u64(struct text *text, uint64_t value); /* decimal */
void text_json(struct text *text, const char *s); /* a JSON string, quoted */
static inline void text_puts(struct text *text, const char *s)
{
	text_put(text, s, strlen(s));
}

#endif
