/* SPDX-License-Identifier: Apache-2.0 */
/*
 * option: one row of a configuration table, and the parsing, checking and
 * printing of its value. Units are part of a value and never guessed: "200" is
 * not a duration. What is printed parses back to the same value.
 */
#ifndef KVD_OPTION_H
#define KVD_OPTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define OPTION_IDS_MAX 32u
#define OPTION_WORDS_MAX 8u
#define OPTION_WORD_BYTES 16u
#define OPTION_TEXT_MAX 512u /* bytes of any printed value or range, NUL included */

enum option_type {
	OPTION_BOOL,	   /* bool: yes, no */
	OPTION_COUNT,	   /* uint32_t */
	OPTION_AUTO_COUNT, /* uint32_t, 0 = "auto" */
	OPTION_DURATION,   /* uint64_t ns: us, ms, s, min */
	OPTION_SIZE,	   /* uint64_t bytes: B, KiB, MiB, GiB */
	OPTION_MODE,	   /* uint32_t, octal */
	OPTION_ENUM,	   /* uint32_t, index into words */
	OPTION_TEXT,	   /* char[size] */
	OPTION_PATH,	   /* char[size], absolute or empty */
	OPTION_UIDS,	   /* struct option_ids: numbers or names */
	OPTION_GIDS,	   /* the same */
	OPTION_WORDS,	   /* struct option_words, no word twice */
};

struct option_ids {
	uint32_t id[OPTION_IDS_MAX];
	unsigned int count;
};

struct option_words {
	char word[OPTION_WORDS_MAX][OPTION_WORD_BYTES];
	unsigned int count;
};

struct option {
	const char *section, *name;
	enum option_type type;
	size_t offset, size; /* of the field in its struct */
	const char *preset;  /* the default, as one would write it */
	uint64_t min, max;   /* COUNT … MODE, both allowed */
	const char *const *words; /* ENUM: NULL-terminated */
	bool reload;	     /* SIGHUP takes a new value */
	const char *help;    /* one sentence or more, plain text */
};

/* Parse `text` into the row's field of `base`. ERR_CONFIG says what is wrong and
 * what is allowed; the field is unchanged then. */
int option_parse(const struct option *option, const char *text, void *base);
/* The field's value, as option_parse() reads it. */
void option_format(const struct option *option, const void *base,
		   char buf[OPTION_TEXT_MAX]);
/* What is allowed: "10 ms to 10 s", "one of error warn", "yes or no". */
void option_range(const struct option *option, char buf[OPTION_TEXT_MAX]);
bool option_equal(const struct option *option, const void *a, const void *b);
void option_copy(const struct option *option, void *dst, const void *src);

/* "error" … as in OPTION_WORDS: is the word in the list? */
bool option_words_have(const struct option_words *words, const char *word);

#endif
