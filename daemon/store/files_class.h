/* SPDX-License-Identifier: Apache-2.0 */
/*
 * files_class: the description of a class of parts, in a named file: its user, its
 * space's labels, its layout. The file's name is a digest of its content, and slots carry
 * it.
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
	bool busy, there;   /* the file is being written or removed; it is durable */
	unsigned int users; /* classes: one, or some that are being removed */
	struct store_class *class; /* findable; NULL: none */
	uint64_t failed_ns;	   /* when the last attempt failed; 0: never */
	struct disk_op op;
};

/* Starts to write them if need be; files_go_on() follows. NULL + ERR_NOMEM, ERR_TOOBIG;
 * ERR_LIMIT: that failed a moment ago. */
struct class_words *class_words_of(struct files *files, struct store_class *class);
/* Unlinks them from the class; the file of a name is removed with its last class. */
void class_words_leave(struct store_class *class);
/* Is it the name of such a file? */
bool class_words_named(const char *name);
void class_words_name(const uint8_t digest[SEAL_DIGEST_BYTES],
		      char name[DISK_NAME_MAX + 1]);
/* The content of such a file, also before it is written. */
int class_words_print(const struct store_class *class, uint8_t **data_p, size_t *len_p);
/* The class that it describes, found or made; spaces older than this generation of its
 * parts are evicted for it. ERR_PROTO; others: no space for it. */
int class_words_scan(struct store *store, const void *data, size_t len,
		     uint64_t generation, struct store_class **class_p);
/* The same of the content of the file `name`. */
int class_words_read(struct store *store, const char *name, const void *data, size_t len,
		     uint64_t generation, struct store_class **class_p);

#endif
