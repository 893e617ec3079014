/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/hex.h"

#include <string.h>

void hex_write(const void *bytes, size_t len, char *text)
{
	static const char digits[] = "0123456789abcdef";
	const uint8_t *b = bytes;

	for (size_t i = 0; i < len; i++) {
		*text++ = digits[b[i] >> 4];
		*text++ = digits[b[i] & 15];
	}
	*text = '\0';
}

/* Each digit plus one; 0: none. Digits of ids are random, so branches on them would be
 * mispredicted, and a command has up to 2^18 of them. */
static const uint8_t values[256] = {
	['0'] = 1,  ['1'] = 2,	['2'] = 3,  ['3'] = 4,	['4'] = 5,  ['5'] = 6,
	['6'] = 7,  ['7'] = 8,	['8'] = 9,  ['9'] = 10, ['a'] = 11, ['b'] = 12,
	['c'] = 13, ['d'] = 14, ['e'] = 15, ['f'] = 16, ['A'] = 11, ['B'] = 12,
	['C'] = 13, ['D'] = 14, ['E'] = 15, ['F'] = 16,
};

int hex_digit(char c)
{
	return values[(uint8_t)c] - 1;
}

bool hex_read(const char *text, void *bytes, size_t len)
{
	uint8_t *b = bytes;

	for (size_t i = 0; i < len; i++) {
		int high = hex_digit(text[2 * i]), low;

		if (high < 0) /* may be the end: nothing behind it is read */
			return false;
		low = hex_digit(text[2 * i + 1]);
		if (low < 0)
			return false;
		b[i] = (uint8_t)(high << 4 | low);
	}
	return true;
}

/* ---- UUIDs: bytes of each group ---- */

static const uint8_t groups[] = {4, 2, 2, 2, 6};

void uuid_write(const uint8_t uuid[UUID_BYTES], char text[UUID_CHARS + 1])
{
	for (size_t i = 0; i < sizeof(groups); i++) {
		if (i)
			*text++ = '-';
		hex_write(uuid, groups[i], text);
		uuid += groups[i];
		text += HEX_CHARS(groups[i]);
	}
}

bool uuid_read(const char *text, uint8_t uuid[UUID_BYTES])
{
	if (strlen(text) != UUID_CHARS)
		return false;
	for (size_t i = 0; i < sizeof(groups); i++) {
		if ((i && *text++ != '-') || !hex_read(text, uuid, groups[i]))
			return false;
		uuid += groups[i];
		text += HEX_CHARS(groups[i]);
	}
	return true;
}
