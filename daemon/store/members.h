/* SPDX-License-Identifier: Apache-2.0 */
/*
 * members: the daemons that keep the directory of chunks, its homes. The list is what
 * chunk_index says; a membership service would give another one by members_set(). A
 * chunk's home is chosen by rendezvous hash, so one that comes or goes moves its own
 * chunks alone. All daemons have to have the same list, word by word.
 */
#ifndef KVD_STORE_MEMBERS_H
#define KVD_STORE_MEMBERS_H

#include <stdint.h>

#include "daemon/store/home_key.h"

struct members;

#define MEMBERS_MAX 32u

/* on_change(arg): the list is another one. Not called for the first. */
int members_new(const char *words, void (*on_change)(void *arg), void *arg,
		struct members **members_p);
void members_free(struct members *members); /* NULL is fine */
/* Endpoints with blanks or commas between them. What is too many, or there twice, is left
 * out, and the log says so. */
void members_set(struct members *members, const char *words);
unsigned int members_count(const struct members *members);
const char *members_endpoint(const struct members *members, unsigned int i);
/* Which of them is the key's home; there is one at least. */
unsigned int members_home(const struct members *members, const struct home_key *key);

#endif
