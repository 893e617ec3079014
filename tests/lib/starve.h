/* SPDX-License-Identifier: Apache-2.0 */
/*
 * starve: two daemons and their engines, on which commands are tried while memory
 * fails. A line is "aJSON" or "bJSON", spoken by that engine, with ' for " and
 * $name for what is known: see starve_new(), and every number or word of a
 * successful answer under its member's name. "~MS" lets virtual time pass; "=NAME" keeps
 * what is known as $NAME as $kept, too.
 */
#ifndef KVD_TESTS_STARVE_H
#define KVD_TESTS_STARVE_H

#include <stdbool.h>
#include <stdint.h>

#include "tests/lib/cluster.h"

#define STARVE_WORDS_MAX 128

struct starve_word {
	char name[32], value[160];
};

struct starve {
	struct cluster c; /* node 0: engine a, prefill; node 1: engine b, decode */
	struct session *a, *b;
	struct cache src, dst; /* pools "kv" of a and b, alike but for their pages */
	struct starve_word words[STARVE_WORDS_MAX];
	unsigned int word_count;
};

/* Words: ep_a ep_b ep_c (endpoints; node 2 has no engine), pool_a pool_b, region_a
 * region_b, base_a base_b (addresses), epoch_a epoch_b, secret_a secret_b. cJSON
 * allocates through mem.h from now on. */
void starve_new(struct starve *s);
void starve_free(struct starve *s);
void starve_word(struct starve *s, const char *name, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));

/* The line must succeed. A line that begins with '?' may be refused. */
void starve_say(struct starve *s, const char *line);
/* The answer, to be deleted; a descriptor of src's memory goes with it if fd. */
cJSON *starve_try(struct starve *s, const char *line, bool fd, struct cluster_lack *lack);
const char *starve_code(const cJSON *answer); /* "ok" or the error's code */

/* All that both daemons show of their state (heap text), without what is only time,
 * traffic or the counts of commands; counters (not only levels) if asked. */
char *starve_look(struct starve *s, bool counters);
/* Heap blocks in use when no message is under way: virtual time passes. */
int64_t starve_blocks(struct starve *s);
void starve_same(const char *before, const char *after, const char *what);

#endif
