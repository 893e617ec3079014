/* SPDX-License-Identifier: Apache-2.0 */
#include "ctl/words.h"

#include <stdint.h>
#include <string.h>

/* The character at `s` and its bytes; 0 bytes: it is no UTF-8. */
static size_t words_decode(const char *s, uint32_t *code_p)
{
	const unsigned char *b = (const unsigned char *)s;
	size_t len = b[0] < 0x80   ? 1
		     : b[0] < 0xc2 ? 0
		     : b[0] < 0xe0 ? 2
		     : b[0] < 0xf0 ? 3
		     : b[0] < 0xf5 ? 4
				   : 0;
	static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
	uint32_t code = len < 2 ? b[0] : b[0] & (0x7fu >> len);

	for (size_t i = 1; i < len; i++) {
		if ((b[i] & 0xc0) != 0x80)
			return 0;
		code = code << 6 | (b[i] & 0x3f);
	}
	if (len &&
	    (code < least[len] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)))
		return 0;
	*code_p = code;
	return len;
}

static bool is_shown(uint32_t code)
{
	if (code < 0x20 || (code >= 0x7f && code < 0xa0))
		return false;
	return code != 0x61c && !(code >= 0x200b && code <= 0x200f) &&
	       !(code >= 0x2028 && code <= 0x202e) &&
	       !(code >= 0x2066 && code <= 0x2069) && code != 0xfeff;
}

void words_clean(char *text)
{
	char *out = text;
	uint32_t code;

	for (size_t len; *text; text += len) {
		len = words_decode(text, &code);
		if (len && is_shown(code)) {
			memmove(out, text, len);
			out += len;
		} else {
			*out++ = '?';
			len = len ? len : 1;
		}
	}
	*out = '\0';
}

void words_clean_json(cJSON *json)
{
	for (; json; json = json->next) {
		if (json->string)
			words_clean(json->string);
		if (json->valuestring)
			words_clean(json->valuestring);
		words_clean_json(json->child);
	}
}

size_t words_width(const char *text)
{
	size_t n = 0;

	for (; *text; text++)
		n += ((unsigned char)*text & 0xc0) != 0x80;
	return n;
}

size_t words_cut(const char *text, size_t columns)
{
	const char *at = text;

	for (; *at; at++) {
		if (((unsigned char)*at & 0xc0) == 0x80)
			continue;
		if (!columns--)
			break;
	}
	return (size_t)(at - text);
}

void words_print_json(const cJSON *json, bool one_line, FILE *out)
{
	char *text = !json	? NULL
		     : one_line ? cJSON_PrintUnformatted(json)
				: cJSON_Print(json);

	for (const unsigned char *b = (unsigned char *)text; b && *b; b++) {
		if (*b == 0x7f)
			fputs("\\u007f", out);
		else if (*b == 0xc2 && b[1] >= 0x80 && b[1] < 0xa0)
			fprintf(out, "\\u00%02x", *++b);
		else
			fputc(*b, out);
	}
	if (text)
		fputc('\n', out);
	cJSON_free(text);
}
