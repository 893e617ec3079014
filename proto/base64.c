/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/base64.h"

static const char digits[] =
	"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void base64_encode(const void *data, size_t len, char *out)
{
	const uint8_t *p = data;

	for (size_t i = 0; i < len; i += 3) {
		size_t left = len - i;
		uint32_t v = (uint32_t)p[i] << 16 |
			     (left > 1 ? (uint32_t)p[i + 1] << 8 : 0) |
			     (left > 2 ? p[i + 2] : 0);

		*out++ = digits[v >> 18];
		*out++ = digits[v >> 12 & 63];
		*out++ = left > 1 ? digits[v >> 6 & 63] : '=';
		*out++ = left > 2 ? digits[v & 63] : '=';
	}
	*out = '\0';
}

static int value_of(char c)
{
	if (c >= 'A' && c <= 'Z')
		return c - 'A';
	if (c >= 'a' && c <= 'z')
		return c - 'a' + 26;
	if (c >= '0' && c <= '9')
		return c - '0' + 52;
	if (c == '+')
		return 62;
	return c == '/' ? 63 : -1;
}

/* Number of bytes in the last group of four; 0: invalid group. */
static size_t tail_bytes(const char *s)
{
	if (s[3] != '=')
		return 3;
	return s[2] != '=' ? 2 : 1;
}

bool base64_decode(const char *text, size_t text_len, uint8_t *out, size_t *len_p)
{
	size_t len = 0;

	if (text_len % 4 != 0)
		return false;
	for (size_t i = 0; i < text_len; i += 4) {
		size_t bytes = i + 4 == text_len ? tail_bytes(text + i) : 3;
		uint32_t v = 0;

		for (size_t k = 0; k < 4; k++) {
			int d = k <= bytes ? value_of(text[i + k]) : 0;

			if (d < 0)
				return false;
			v = v << 6 | (uint32_t)d;
		}
		if (v & ((UINT32_C(1) << (8 * (3 - bytes))) - 1))
			return false; /* unused bits */
		for (size_t k = 0; k < bytes; k++)
			out[len++] = (uint8_t)(v >> (16 - 8 * k));
	}
	*len_p = len;
	return true;
}
