/* SPDX-License-Identifier: Apache-2.0 */
/*
 * files_class: what a class of parts is, in a named file: its user, its space's words,
 * its layout. The file's name is a digest of its content, and slots carry it.
 */
#ifndef KVD_STORE_FILES_CLASS_H
#define KVD_STORE_FILES_CLASS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/store/disk.h"
#include "daemon/store/seal.h"

struct files;
struct store_class;
struct store;

struct class_words {
	struct files *files;
	uint8_t digest[SEAL_DIGEST_BYTES];
	char name[DISK_NAME_MAX + 1];
	uint8_t *data;
	size_t len;
	bool busy, there;	   /* the file: is being written or removed; lasts */
	unsigned int users;	   /* classes: one, or some that leave beside it */
	struct store_class *class; /* that can be found; NULL: none */
	uint64_t failed_ns;	   /* when that could not be done; 0: never */
	struct disk_op op;
};

/* Begins to write them if need be; files_go_on() follows. NULL + ERR_NOMEM, ERR_TOOBIG;
 * ERR_LIMIT: that has failed a moment ago. */
struct class_words *class_words_of(struct files *files, struct store_class *class);
/* The class has none any more; with the last of its name the file goes. */
void class_words_leave(struct store_class *class);
/* Is it a name of such a file? */
bool class_words_named(const char *name);
void class_words_name(const uint8_t digest[SEAL_DIGEST_BYTES],
		      char name[DISK_NAME_MAX + 1]);
/* What such a file says, also without one. */
int class_words_print(const struct store_class *class, uint8_t **data_p, size_t *len_p);
/* The class that it tells, found or made; spaces leave for it that are older than this
 * generation of its parts. ERR_PROTO; others: there is no room for it. */
int class_words_scan(struct store *store, const void *data, size_t len,
		     uint64_t generation, struct store_class **class_p);
/* The same of the content of the file `name`. */
int class_words_read(struct store *store, const char *name, const void *data, size_t len,
		     uint64_t generation, struct store_class **class_p);

#endif
