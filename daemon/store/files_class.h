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
	bool busy, there;   /* the file: is being written; lasts */
	bool freed;	    /* the class is gone: when it is written */
	uint64_t failed_ns; /* when it could not be written; 0: never */
	struct disk_op op;
};

/* Begins to write them if need be; files_go_on() follows. NULL + ERR_NOMEM, ERR_TOOBIG;
 * ERR_LIMIT: that has failed a moment ago. */
struct class_words *class_words_of(struct files *files, struct store_class *class);
void class_words_free(struct class_words *words); /* NULL is fine */
bool class_words_busy(const struct class_words *words);
/* Is it a name of such a file? */
bool class_words_named(const char *name);
void class_words_name(const uint8_t digest[SEAL_DIGEST_BYTES],
		      char name[DISK_NAME_MAX + 1]);
/* What such a file says, also without one. */
int class_words_print(const struct store_class *class, uint8_t **data_p, size_t *len_p);
/* The class that it tells, found or made. ERR_PROTO; others: there is no room for it. */
int class_words_scan(struct store *store, const void *data, size_t len,
		     struct store_class **class_p);
/* The class that the content of the file `name` tells, found or made. ERR_PROTO; others:
 * there is no room for it. */
int class_words_read(struct store *store, const char *name, const void *data, size_t len,
		     struct store_class **class_p);

#endif
