/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each type has one pair of functions (parse, format), found through a table, so a new
 * type cannot be incomplete. A value is parsed into a local variable and stored last: a
 * refused line leaves the struct unchanged.
 *
 * Units are a table, too. A value is printed with the largest unit that divides it, as a
 * person would write it.
 */
#include "daemon/config/setting.h"

#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"

struct unit {
	const char *name;
	uint64_t scale;
};

static const struct unit duration_units[] = {
	{"min", UINT64_C(60000000000)},
	{"s", UINT64_C(1000000000)},
	{"ms", UINT64_C(1000000)},
	{"us", UINT64_C(1000)},
	{NULL, 0},
};

static const struct unit size_units[] = {
	{"GiB", UINT64_C(1) << 30},
	{"MiB", UINT64_C(1) << 20},
	{"KiB", UINT64_C(1) << 10},
	{"B", 1},
	{NULL, 0},
};

static void *field(const struct setting *setting, const void *base)
{
	return (char *)(uintptr_t)base + setting->offset;
}

static int setting_refuse(const struct setting *setting, const char *why)
{
	char range[SETTING_TEXT_MAX];

	setting_range(setting, range);
	return err_raise(ERR_CONFIG, "%s; allowed: %s", why, range);
}

/* ---- numbers ---- */

/* Digits only, in `base`; *end_p is the rest. False: none, or over 64 bits. */
static bool digits(const char *text, unsigned int base, uint64_t *value_p,
		   const char **end_p)
{
	uint64_t value = 0;
	const char *p = text;

	for (; *p >= '0' && *p < (char)('0' + base); p++) {
		if (__builtin_mul_overflow(value, base, &value) ||
		    __builtin_add_overflow(value, (uint64_t)(*p - '0'), &value))
			return false;
	}
	*value_p = value;
	*end_p = p;
	return p != text;
}

static void print_with_unit(uint64_t value, const struct unit *units, char *buf)
{
	const struct unit *unit = units;

	while (unit[1].name && (value % unit->scale || value == 0))
		unit++;
	snprintf(buf, SETTING_TEXT_MAX, "%llu %s",
		 (unsigned long long)(value / unit->scale), unit->name);
}

static void store_number(const struct setting *setting, uint64_t value, void *base)
{
	if (setting->size == sizeof(uint32_t))
		*(uint32_t *)field(setting, base) = (uint32_t)value;
	else
		*(uint64_t *)field(setting, base) = value;
}

static int store_ranged(const struct setting *setting, uint64_t value, void *base)
{
	if (value < setting->min || value > setting->max)
		return setting_refuse(setting, "outside the range");
	store_number(setting, value, base);
	return 0;
}

static int parse_with_unit(const struct setting *setting, const char *text, void *base,
			   const struct unit *units)
{
	const char *rest;
	uint64_t value;

	if (!digits(text, 10, &value, &rest))
		return setting_refuse(setting, "not a whole number with a unit");
	while (*rest == ' ' || *rest == '\t')
		rest++;
	if (!*rest)
		return setting_refuse(setting, "the unit is missing");
	while (units->name && strcmp(units->name, rest) != 0)
		units++;
	if (!units->name)
		return setting_refuse(setting, "not a unit for this value");
	if (__builtin_mul_overflow(value, units->scale, &value))
		return setting_refuse(setting, "outside the range");
	return store_ranged(setting, value, base);
}

static int parse_duration(const struct setting *setting, const char *text, void *base)
{
	return parse_with_unit(setting, text, base, duration_units);
}

static void format_duration(const struct setting *setting, const void *base, char *buf)
{
	print_with_unit(*(const uint64_t *)field(setting, base), duration_units, buf);
}

static int parse_size(const struct setting *setting, const char *text, void *base)
{
	return parse_with_unit(setting, text, base, size_units);
}

static void format_size(const struct setting *setting, const void *base, char *buf)
{
	print_with_unit(*(const uint64_t *)field(setting, base), size_units, buf);
}

static int parse_plain(const struct setting *setting, const char *text, void *base,
		       unsigned int radix, const char *why)
{
	const char *rest;
	uint64_t value;

	if (!digits(text, radix, &value, &rest) || *rest)
		return setting_refuse(setting, why);
	return store_ranged(setting, value, base);
}

static int parse_count(const struct setting *setting, const char *text, void *base)
{
	return parse_plain(setting, text, base, 10, "not a whole number without a unit");
}

static void format_count(const struct setting *setting, const void *base, char *buf)
{
	snprintf(buf, SETTING_TEXT_MAX, "%u", *(const uint32_t *)field(setting, base));
}

static int parse_mode(const struct setting *setting, const char *text, void *base)
{
	return parse_plain(setting, text, base, 8, "not an octal mode");
}

static void format_mode(const struct setting *setting, const void *base, char *buf)
{
	snprintf(buf, SETTING_TEXT_MAX, "%04o", *(const uint32_t *)field(setting, base));
}

/* ---- names ---- */

static int parse_bool(const struct setting *setting, const char *text, void *base)
{
	bool yes = strcmp(text, "yes") == 0 || strcmp(text, "true") == 0;

	if (!yes && strcmp(text, "no") != 0 && strcmp(text, "false") != 0)
		return setting_refuse(setting, "neither yes nor no");
	*(bool *)field(setting, base) = yes;
	return 0;
}

static void format_bool(const struct setting *setting, const void *base, char *buf)
{
	snprintf(buf, SETTING_TEXT_MAX, "%s",
		 *(const bool *)field(setting, base) ? "yes" : "no");
}

static int parse_enum(const struct setting *setting, const char *text, void *base)
{
	for (uint32_t i = 0; setting->words[i]; i++) {
		if (strcmp(setting->words[i], text) == 0) {
			*(uint32_t *)field(setting, base) = i;
			return 0;
		}
	}
	return setting_refuse(setting, "not an allowed word");
}

static void format_enum(const struct setting *setting, const void *base, char *buf)
{
	snprintf(buf, SETTING_TEXT_MAX, "%s",
		 setting->words[*(const uint32_t *)field(setting, base)]);
}

static int parse_text(const struct setting *setting, const char *text, void *base)
{
	for (const char *p = text; *p; p++) {
		if ((unsigned char)*p < 0x20 || *p == 0x7f)
			return setting_refuse(setting, "control characters");
	}
	if (strlen(text) >= setting->size)
		return setting_refuse(setting, "too long");
	if (setting->type == SETTING_PATH && *text && *text != '/')
		return setting_refuse(setting, "not an absolute path");
	snprintf(field(setting, base), setting->size, "%s", text);
	return 0;
}

static void format_text(const struct setting *setting, const void *base, char *buf)
{
	snprintf(buf, SETTING_TEXT_MAX, "%s", (const char *)field(setting, base));
}

/* ---- lists: words separated by commas or blanks ---- */

/* The next word into `word`; false at the end, *too_long_p when cut. */
static bool next_word(const char **text, char *word, size_t cap, bool *too_long_p)
{
	const char *p = *text;
	size_t len;

	p += strspn(p, ", \t");
	len = strcspn(p, ", \t");
	*text = p + len;
	*too_long_p = len >= cap;
	if (!len || *too_long_p)
		return len != 0;
	memcpy(word, p, len);
	word[len] = '\0';
	return true;
}

static int id_of(const struct setting *setting, const char *word, uint32_t *id_p)
{
	const char *rest;
	uint64_t value;

	if (digits(word, 10, &value, &rest) && !*rest) {
		if (value >= UINT32_MAX) /* -1 means "no id" to the kernel */
			return setting_refuse(setting, "not a user or group number");
		*id_p = (uint32_t)value;
		return 0;
	}
	if (setting->type == SETTING_UIDS) {
		const struct passwd *pw = getpwnam(word);

		if (!pw)
			return setting_refuse(setting, "no such user");
		*id_p = pw->pw_uid;
		return 0;
	}
	const struct group *gr = getgrnam(word);

	if (!gr)
		return setting_refuse(setting, "no such group");
	*id_p = gr->gr_gid;
	return 0;
}

static int parse_ids(const struct setting *setting, const char *text, void *base)
{
	struct setting_ids ids = {.count = 0};
	char word[64];
	bool too_long;
	int r;

	while (next_word(&text, word, sizeof(word), &too_long)) {
		if (too_long || ids.count == SETTING_IDS_MAX)
			return setting_refuse(setting, "too long");
		r = id_of(setting, word, &ids.id[ids.count]);
		if (r < 0)
			return err_pass(r);
		ids.count++;
	}
	*(struct setting_ids *)field(setting, base) = ids;
	return 0;
}

static void format_ids(const struct setting *setting, const void *base, char *buf)
{
	const struct setting_ids *ids = field(setting, base);
	size_t n = 0;

	buf[0] = '\0';
	for (unsigned int i = 0; i < ids->count; i++)
		n += (size_t)snprintf(buf + n, SETTING_TEXT_MAX - n, "%s%u",
				      i ? ", " : "", ids->id[i]);
}

static int parse_words(const struct setting *setting, const char *text, void *base)
{
	struct setting_words words = {.count = 0};
	char word[SETTING_WORD_BYTES];
	bool too_long;

	while (next_word(&text, word, sizeof(word), &too_long)) {
		if (too_long || words.count == SETTING_WORDS_MAX)
			return setting_refuse(setting, "too long");
		if (setting_words_have(&words, word))
			return setting_refuse(setting, "a word is repeated");
		memcpy(words.word[words.count++], word, sizeof(word));
	}
	*(struct setting_words *)field(setting, base) = words;
	return 0;
}

static void format_words(const struct setting *setting, const void *base, char *buf)
{
	const struct setting_words *words = field(setting, base);
	size_t n = 0;

	buf[0] = '\0';
	for (unsigned int i = 0; i < words->count; i++)
		n += (size_t)snprintf(buf + n, SETTING_TEXT_MAX - n, "%s%s",
				      i ? ", " : "", words->word[i]);
}

bool setting_words_have(const struct setting_words *words, const char *word)
{
	for (unsigned int i = 0; i < words->count; i++) {
		if (strcmp(words->word[i], word) == 0)
			return true;
	}
	return false;
}

/* ---- allowed values ---- */

/* "<min> to <max>", each as the type prints it. */
static void range_of_numbers(const struct setting *setting, char *buf)
{
	char low[SETTING_TEXT_MAX], high[SETTING_TEXT_MAX];
	struct setting row = *setting;
	uint32_t narrow[2] = {(uint32_t)setting->min, (uint32_t)setting->max};
	uint64_t wide[2] = {setting->min, setting->max};
	bool is_wide = setting->size == sizeof(uint64_t);

	row.offset = 0;
	setting_format(&row, is_wide ? (const void *)&wide[0] : &narrow[0], low);
	setting_format(&row, is_wide ? (const void *)&wide[1] : &narrow[1], high);
	snprintf(buf, SETTING_TEXT_MAX, "%s%s%s%s%.200s to %.200s",
		 setting->zero ? setting->zero : "", setting->one ? ", " : "",
		 setting->one ? setting->one : "", setting->zero ? ", or " : "", low,
		 high);
}

static void range_of_words(const struct setting *setting, char *buf)
{
	size_t n = (size_t)snprintf(buf, SETTING_TEXT_MAX, "one of");

	for (unsigned int i = 0; setting->words[i]; i++)
		n += (size_t)snprintf(buf + n, SETTING_TEXT_MAX - n, " %s",
				      setting->words[i]);
}

static void range_of_bool(const struct setting *setting, char *buf)
{
	(void)setting;
	snprintf(buf, SETTING_TEXT_MAX, "yes or no");
}

static void range_of_text(const struct setting *setting, char *buf)
{
	snprintf(buf, SETTING_TEXT_MAX, "%s of up to %zu bytes",
		 setting->type == SETTING_PATH ? "an absolute path" : "text",
		 setting->size - 1);
}

static void range_of_ids(const struct setting *setting, char *buf)
{
	snprintf(buf, SETTING_TEXT_MAX, "up to %u %s names or numbers", SETTING_IDS_MAX,
		 setting->type == SETTING_UIDS ? "user" : "group");
}

static void range_of_list(const struct setting *setting, char *buf)
{
	(void)setting;
	snprintf(buf, SETTING_TEXT_MAX, "up to %u words of up to %u bytes",
		 SETTING_WORDS_MAX, SETTING_WORD_BYTES - 1);
}

/* ---- the types ---- */

static const struct {
	int (*parse)(const struct setting *setting, const char *text, void *base);
	void (*format)(const struct setting *setting, const void *base, char *buf);
	void (*range)(const struct setting *setting, char *buf);
} types[] = {
	[SETTING_BOOL] = {parse_bool, format_bool, range_of_bool},
	[SETTING_COUNT] = {parse_count, format_count, range_of_numbers},
	[SETTING_DURATION] = {parse_duration, format_duration, range_of_numbers},
	[SETTING_SIZE] = {parse_size, format_size, range_of_numbers},
	[SETTING_MODE] = {parse_mode, format_mode, range_of_numbers},
	[SETTING_ENUM] = {parse_enum, format_enum, range_of_words},
	[SETTING_TEXT] = {parse_text, format_text, range_of_text},
	[SETTING_PATH] = {parse_text, format_text, range_of_text},
	[SETTING_UIDS] = {parse_ids, format_ids, range_of_ids},
	[SETTING_GIDS] = {parse_ids, format_ids, range_of_ids},
	[SETTING_WORDS] = {parse_words, format_words, range_of_list},
};

/* The name of a number, if it has one. */
static const char *setting_number_name(const struct setting *setting, const void *base)
{
	const void *at = (const char *)base + setting->offset;
	uint64_t value;

	if (!setting->zero)
		return NULL;
	value = setting->size == sizeof(uint32_t) ? *(const uint32_t *)at
						  : *(const uint64_t *)at;
	return value == 0 ? setting->zero : value == 1 ? setting->one : NULL;
}

int setting_parse(const struct setting *setting, const char *text, void *base)
{
	bool zero = setting->zero && strcmp(text, setting->zero) == 0;

	if (zero || (setting->one && strcmp(text, setting->one) == 0)) {
		store_number(setting, zero ? 0 : 1, base);
		return 0;
	}
	return types[setting->type].parse(setting, text, base);
}

void setting_format(const struct setting *setting, const void *base,
		    char buf[SETTING_TEXT_MAX])
{
	const char *name = setting_number_name(setting, base);

	if (name)
		snprintf(buf, SETTING_TEXT_MAX, "%s", name);
	else
		types[setting->type].format(setting, base, buf);
}

void setting_range(const struct setting *setting, char buf[SETTING_TEXT_MAX])
{
	types[setting->type].range(setting, buf);
}

bool setting_equal(const struct setting *setting, const void *a, const void *b)
{
	char text_a[SETTING_TEXT_MAX], text_b[SETTING_TEXT_MAX];

	setting_format(setting, a, text_a);
	setting_format(setting, b, text_b);
	return strcmp(text_a, text_b) == 0;
}

void setting_copy(const struct setting *setting, void *dst, const void *src)
{
	memcpy(field(setting, dst), field(setting, src), setting->size);
}
