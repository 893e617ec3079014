/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/sanitize.h"

#include <stdint.h>
#include <string.h>

/* The character at `s`, which has `left` bytes, and its bytes; 0 bytes: it is no UTF-8.
 */
static size_t clean_decode(const char *s, size_t left, uint32_t *code_p)
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

	if (len > left)
		return 0;
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

size_t sanitize_text(char *text, size_t len)
{
	size_t out = 0, n;
	uint32_t code;

	for (size_t at = 0; at < len; at += n) {
		n = clean_decode(text + at, len - at, &code);
		if (n && is_shown(code)) {
			memmove(text + out, text + at, n);
			out += n;
		} else {
			text[out++] = '?';
			n = n ? n : 1;
		}
	}
	return out;
}

bool sanitize_is_clean(const char *text)
{
	size_t left = strlen(text), n;
	uint32_t code;

	for (; left; text += n, left -= n) {
		n = clean_decode(text, left, &code);
		if (!n || !is_shown(code))
			return false;
	}
	return true;
}
