/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/text.h"

#include "daemon/base/mem.h"

#define DIGITS_MAX 20u /* of 2^64 - 1 */

struct text text_on(char *space, size_t size)
{
	return (struct text){.data = space, .cap = size, .borrowed = true};
}

void text_fini(struct text *text)
{
	if (!text->borrowed)
		mem_free_large(text->data, text->len);
	*text = (struct text){0};
}

static bool grow(struct text *text, size_t more)
{
	size_t cap = text->cap ? text->cap : 4096;
	char *data;

	while (cap - text->len <= more)
		cap = mem_grown(cap);
	data = mem_regrow(text->borrowed ? NULL : text->data, cap, 1);
	if (!data) {
		text->failed = true;
		return false;
	}
	if (text->borrowed)
		memcpy(data, text->data, text->len);
	text->borrowed = false;
	text->data = data;
	text->cap = cap;
	return true;
}

void text_put(struct text *text, const char *bytes, size_t len)
{
	if (text->failed || (text->cap - text->len <= len && !grow(text, len)))
		return;
	memcpy(text->data + text->len, bytes, len);
	text->len += len;
	text->data[text->len] = '\0';
}

void text_u64(struct text *text, uint64_t value)
{
	char digits[DIGITS_MAX];
	size_t at = DIGITS_MAX;

	do
		digits[--at] = (char)('0' + value % 10);
	while (value /= 10);
	text_put(text, digits + at, DIGITS_MAX - at);
}

void text_json(struct text *text, const char *s)
{
	static const char hex[] = "0123456789abcdef";
	char escape[] = "\\u00xx";
	size_t plain;

	text_put(text, "\"", 1);
	for (; *s; s += plain) {
		for (plain = 0; (unsigned char)s[plain] >= ' ' && s[plain] != '"' &&
				s[plain] != '\\';)
			plain++;
		text_put(text, s, plain);
		if (!s[plain])
			continue;
		escape[4] = hex[(unsigned char)s[plain] >> 4];
		escape[5] = hex[s[plain] & 15];
		text_put(text, escape, sizeof(escape) - 1);
		plain++;
	}
	text_put(text, "\"", 1);
}
