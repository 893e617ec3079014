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

int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

bool hex_read(const char *text, void *bytes, size_t len)
{
	uint8_t *b = bytes;

	for (size_t i = 0; i < len; i++) {
		int high = hex_digit(text[2 * i]), low;

		if (high < 0) /* perhaps the end: nothing behind it is looked at */
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
