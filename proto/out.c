/* SPDX-License-Identifier: Apache-2.0 */
/*
 * out: writes no tree. A comma is needed unless the text ends with an opening bracket,
 * so no depth is kept, and members of an object and elements of an array are alike.
 * Names are mostly literals and short: they are put with their comma and colon at once.
 */
#include "proto/out.h"

#include <endian.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/base/hex.h"
#include "proto/base64.h"

/* `,"name":` in one piece, as far as that fits and has nothing to escape. */
static size_t name_short(char *piece, size_t size, bool comma, const char *name)
{
	size_t n = 0;

	if (comma)
		piece[n++] = ',';
	piece[n++] = '"';
	for (; *name; name++) {
		if (n + 3 > size || (unsigned char)*name < ' ' || *name == '"' ||
		    *name == '\\')
			return 0;
		piece[n++] = *name;
	}
	piece[n++] = '"';
	piece[n++] = ':';
	return n;
}

static void out_name(struct text *out, const char *name)
{
	char last = out->len ? out->data[out->len - 1] : '[';
	bool comma = last != '{' && last != '[';
	char piece[64];
	size_t n = name ? name_short(piece, sizeof(piece), comma, name) : 0;

	if (n) {
		text_put(out, piece, n);
		return;
	}
	if (comma)
		text_puts(out, ",");
	if (!name)
		return;
	text_json(out, name);
	text_puts(out, ":");
}

void out_object(struct text *out, const char *name)
{
	out_name(out, name);
	text_puts(out, "{");
}

void out_array(struct text *out, const char *name)
{
	out_name(out, name);
	text_puts(out, "[");
}

void out_close(struct text *out, char bracket)
{
	text_put(out, &bracket, 1);
}

void out_json(struct text *out, const char *name, const char *json)
{
	out_name(out, name);
	text_puts(out, json);
}

void out_text(struct text *out, const char *name, const char *value)
{
	if (!value)
		return;
	out_name(out, name);
	text_json(out, value);
}

void out_filled(struct text *out, const char *name, const char *value)
{
	if (*value)
		out_text(out, name, value);
}

void out_number(struct text *out, const char *name, int64_t value)
{
	out_name(out, name);
	if (value < 0)
		text_puts(out, "-");
	text_u64(out, value < 0 ? 0 - (uint64_t)value : (uint64_t)value);
}

void out_some(struct text *out, const char *name, uint64_t value)
{
	if (value)
		out_number(out, name, value);
}

void out_double(struct text *out, const char *name, double value)
{
	char digits[32], *point;

	if (!isfinite(value)) {
		out_null(out, name);
		return;
	}
	snprintf(digits, sizeof(digits), "%.15g", value);
	if (strtod(digits, NULL) < value || strtod(digits, NULL) > value)
		snprintf(digits, sizeof(digits), "%.17g", value);
	point = strchr(digits, ','); /* of the program's locale */
	if (point)
		*point = '.';
	out_json(out, name, digits);
}

void out_bool(struct text *out, const char *name, bool value)
{
	out_json(out, name, value ? "true" : "false");
}

void out_null(struct text *out, const char *name)
{
	out_json(out, name, "null");
}

void out_id(struct text *out, const char *name, uint64_t value)
{
	out_name(out, name);
	text_put(out, "\"", 1);
	text_u64(out, value);
	text_put(out, "\"", 1);
}

void out_hex(struct text *out, const char *name, const uint8_t *bytes, size_t len)
{
	char digits[HEX_CHARS(32) + 1];

	out_name(out, name);
	text_puts(out, "\"");
	for (size_t at = 0, n; at < len; at += n) {
		n = len - at < 32 ? len - at : 32;
		hex_write(bytes + at, n, digits);
		text_puts(out, digits);
	}
	text_puts(out, "\"");
}

void out_base64(struct text *out, const char *name, const uint8_t *bytes, size_t len)
{
	char digits[BASE64_CHARS(768) + 1];

	out_name(out, name);
	text_puts(out, "\"");
	for (size_t at = 0, n; at < len; at += n) { /* whole groups of three */
		n = len - at < 768 ? len - at : 768;
		base64_encode(bytes + at, n, digits);
		text_put(out, digits, BASE64_CHARS(n));
	}
	text_puts(out, "\"");
}

void out_pair(struct text *out, const char *name, uint64_t a, uint64_t b)
{
	out_array(out, name);
	out_number(out, NULL, a);
	out_number(out, NULL, b);
	out_close(out, ']');
}

void out_digest(struct text *out, const char *name, uint64_t digest)
{
	digest = htobe64(digest);
	out_hex(out, name, (const uint8_t *)&digest, sizeof(digest));
}
