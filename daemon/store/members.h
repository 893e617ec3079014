/* SPDX-License-Identifier: Apache-2.0 */
/*
 * members: the index nodes. The list is chunk_index; a membership service can replace it
 * by members_set(). A chunk's index node is chosen by rendezvous hashing, so adding or
 * removing one moves its own chunks alone. All daemons must have the same list, to the
 * letter.
 */
#ifndef KVD_STORE_MEMBERS_H
#define KVD_STORE_MEMBERS_H

#include "daemon/store/home_key.h"

struct members;

#define MEMBERS_MAX 32u

/* on_change(arg): the list has changed. Not called for the first one. */
int members_new(const char *words, void (*on_change)(void *arg), void *arg,
		struct members **members_p);
void members_free(struct members *members); /* NULL is fine */
/* Endpoints with blanks or commas between them. Duplicates and entries over the limit are
 * ignored, with a log line. */
void members_set(struct members *members, const char *words);
unsigned int members_count(const struct members *members);
const char *members_endpoint(const struct members *members, unsigned int i);
/* The index node of the key; there is at least one. */
unsigned int members_home(const struct members *members, const struct home_key *key);

#endif
