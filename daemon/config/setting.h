/* SPDX-License-Identifier: Apache-2.0 */
/*
 * setting: one row of a configuration table, and the parsing, checking and printing of
 * its value. Units are part of a value and never guessed: "200" is not a duration.
 * Printed values can be parsed again and yield the same value.
 */
#ifndef KVD_SETTING_H
#define KVD_SETTING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SETTING_IDS_MAX 32u
#define SETTING_WORDS_MAX 8u
#define SETTING_WORD_BYTES 16u
#define SETTING_TEXT_MAX 512u /* bytes of any printed value or range, NUL included */

enum setting_type {
	SETTING_BOOL,	  /* bool: yes, no */
	SETTING_COUNT,	  /* uint32_t */
	SETTING_DURATION, /* uint64_t ns: us, ms, s, min */
	SETTING_SIZE,	  /* uint64_t bytes: B, KiB, MiB, GiB */
	SETTING_MODE,	  /* uint32_t, octal */
	SETTING_ENUM,	  /* uint32_t, index into the list of names */
	SETTING_TEXT,	  /* char[size] */
	SETTING_PATH,	  /* char[size], absolute or empty */
	SETTING_UIDS,	  /* struct setting_ids: numbers or names */
	SETTING_GIDS,	  /* the same */
	SETTING_WORDS,	  /* struct setting_words, no duplicates */
};

struct setting_ids {
	uint32_t id[SETTING_IDS_MAX];
	unsigned int count;
};

struct setting_words {
	char word[SETTING_WORDS_MAX][SETTING_WORD_BYTES];
	unsigned int count;
};

struct setting {
	const char *section, *name;
	enum setting_type type;
	size_t offset, size;	  /* of the field in its struct */
	const char *preset;	  /* the default, as in a file */
	uint64_t min, max;	  /* COUNT … MODE, inclusive */
	const char *zero, *one;	  /* names of the values 0 and 1, below min; NULL: none */
	const char *const *words; /* ENUM: NULL-terminated */
	bool reload;		  /* SIGHUP takes a new value */
	const char *module;	  /* module of the option; NULL: core */
	const char *help;	  /* one sentence or more, plain text */
};

/* Parse `text` into the row's field of `base`. ERR_CONFIG names the fault and the
 * allowed values; the field is unchanged then. */
int setting_parse(const struct setting *setting, const char *text, void *base);
/* Print the value of the field as setting_parse() reads it. */
void setting_format(const struct setting *setting, const void *base,
		    char buf[SETTING_TEXT_MAX]);
/* The allowed values: "10 ms to 10 s", "one of error warn", "yes or no". */
void setting_range(const struct setting *setting, char buf[SETTING_TEXT_MAX]);
bool setting_equal(const struct setting *setting, const void *a, const void *b);
void setting_copy(const struct setting *setting, void *dst, const void *src);

/* "error" … as in SETTING_WORDS: is the name in the list? */
bool setting_words_have(const struct setting_words *words, const char *word);

#endif
