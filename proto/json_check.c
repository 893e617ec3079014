/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The check before cJSON: one pass over the text that accepts exactly RFC 8259. cJSON 1.7
 * accepts bad UTF-8, raw control characters, a byte order mark, "01", 1e999 (as
 * infinity), cuts a number after 63 characters, keeps both of two equal keys, and
 * recurses as deep as the text.
 *
 * The pass is iterative with a fixed stack of frames. The keys of open objects are in one
 * growing stack. When an object closes, its keys are sorted by hash of their decoded
 * characters ("a" equals "\u0061") and neighbours are compared. The hash only saves work:
 * equal hashes are compared by content, so a client that produces collisions costs only n
 * log n comparisons of its own bytes.
 *
 * A number must fit a double. This is decided from the digits, not by strtod(): libkvd
 * runs in processes whose locale may use a comma.
 */
#include "proto/json.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "daemon/base/mem.h"

#define NUMBER_MAX 63u /* size of cJSON's buffer */
#define EXPONENT_CAP 100000
#define KEYS_INLINE 32u
#define CHAR_BAD UINT32_MAX

struct key {
	const uint8_t *at; /* between the quotes */
	uint32_t len, hash;
};

struct frame {
	bool object;
	size_t first_key;
};

struct scan {
	const uint8_t *text;
	size_t len, pos;
	size_t depth, max_depth;
	struct frame frames[JSON_DEPTH_MAX];
	struct key *keys; /* keys_inline until more are needed */
	size_t key_count, key_cap;
	struct key keys_inline[KEYS_INLINE];
};

static int bad(const struct scan *s, const char *what)
{
	return err_raise(ERR_PROTO, "byte %zu: %s", s->pos, what);
}

static int peek(const struct scan *s)
{
	return s->pos < s->len ? s->text[s->pos] : -1;
}

static bool accept(struct scan *s, char c)
{
	if (peek(s) != c)
		return false;
	s->pos++;
	return true;
}

static void skip_space(struct scan *s)
{
	int c;

	while ((c = peek(s)) == ' ' || c == '\t' || c == '\n' || c == '\r')
		s->pos++;
}

static bool is_digit(int c)
{
	return c >= '0' && c <= '9';
}

/* ---- characters ---- */

/* One UTF-8 sequence of [p, end): its code point and length, or CHAR_BAD for overlong
 * forms, surrogates, incomplete sequences and code points above U+10FFFF. */
static uint32_t utf8_take(const uint8_t *p, const uint8_t *end, size_t *len_p)
{
	static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
	size_t len = *p < 0x80 ? 1 : *p < 0xc2 ? 0 : *p < 0xe0 ? 2 : *p < 0xf0 ? 3 : 4;
	uint32_t c;

	if (!len || *p > 0xf4 || len > (size_t)(end - p))
		return CHAR_BAD;
	c = len == 1 ? *p : *p & (0x7fu >> len);
	for (size_t i = 1; i < len; i++) {
		if ((p[i] & 0xc0) != 0x80)
			return CHAR_BAD;
		c = c << 6 | (p[i] & 0x3f);
	}
	if (c < least[len] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
		return CHAR_BAD;
	*len_p = len;
	return c;
}

bool json_utf8(const char *s, size_t len)
{
	const uint8_t *p = (const uint8_t *)s, *end = p + len;
	size_t n = 0;

	for (; p < end; p += n)
		if (*p == 0 || utf8_take(p, end, &n) == CHAR_BAD)
			return false;
	return true;
}

static uint32_t hex4(const uint8_t *p, const uint8_t *end)
{
	uint32_t v = 0;

	if (end - p < 4)
		return CHAR_BAD;
	for (int i = 0; i < 4; i++) {
		int digit = hex_digit((char)p[i]);

		if (digit < 0)
			return CHAR_BAD;
		v = v << 4 | (uint32_t)digit;
	}
	return v;
}

/* The character after a backslash. */
static uint32_t escape_take(const uint8_t *p, const uint8_t *end, size_t *len_p)
{
	static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
	const char *simple;
	uint32_t c, low;

	if (p == end)
		return CHAR_BAD;
	*len_p = 1;
	if (*p != 'u') {
		simple = *p ? strchr(from, *p) : NULL;
		return simple ? (uint32_t)to[simple - from] : CHAR_BAD;
	}
	c = hex4(p + 1, end);
	*len_p = 5;
	if (c < 0xd800 || c > 0xdfff)
		return c; /* CHAR_BAD too */
	if (c > 0xdbff || end - p < 7 || p[5] != '\\' || p[6] != 'u')
		return CHAR_BAD;
	low = hex4(p + 7, end);
	if (low < 0xdc00 || low > 0xdfff)
		return CHAR_BAD;
	*len_p = 11;
	return 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
}

/* One character of a string, with escapes decoded. */
static uint32_t char_take(const uint8_t *p, const uint8_t *end, size_t *len_p)
{
	uint32_t c;

	*len_p = 1;
	if (*p != '\\')
		return *p < 0x80 ? *p : utf8_take(p, end, len_p);
	c = escape_take(p + 1, end, len_p);
	*len_p += 1;
	return c;
}

static int scan_string(struct scan *s, struct key *key)
{
	const uint8_t *end = s->text + s->len;
	uint32_t hash = 2166136261u;
	size_t start, n = 0;

	if (!accept(s, '"'))
		return bad(s, "a string was expected");
	start = s->pos;
	while (s->pos < s->len && s->text[s->pos] != '"') {
		uint32_t c = char_take(s->text + s->pos, end, &n);

		if (c == CHAR_BAD)
			return bad(s,
				   s->text[s->pos] == '\\' ? "bad escape" : "bad UTF-8");
		if (c == 0 || s->text[s->pos] < 0x20)
			return bad(s, "control character in a string");
		hash = (hash ^ c) * 16777619u;
		s->pos += n;
	}
	*key = (struct key){s->text + start, (uint32_t)(s->pos - start), hash};
	return accept(s, '"') ? 0 : bad(s, "unterminated string");
}

/* ---- keys ---- */

static int key_order(const void *a, const void *b)
{
	const struct key *x = a, *y = b;
	const uint8_t *p = x->at, *q = y->at;
	const uint8_t *p_end = p + x->len, *q_end = q + y->len;
	size_t n = 0;

	if (x->hash != y->hash)
		return x->hash < y->hash ? -1 : 1;
	while (p < p_end && q < q_end) {
		uint32_t c = char_take(p, p_end, &n), d;

		p += n;
		d = char_take(q, q_end, &n);
		q += n;
		if (c != d)
			return c < d ? -1 : 1;
	}
	return (p < p_end) - (q < q_end);
}

static int keys_grow(struct scan *s)
{
	bool is_inline = s->keys == s->keys_inline;
	struct key *keys;

	keys = mem_regrow(is_inline ? NULL : s->keys, 2 * s->key_cap, sizeof(*keys));
	if (!keys)
		return err_pass(-ENOMEM);
	if (is_inline)
		memcpy(keys, s->keys_inline, sizeof(s->keys_inline));
	s->keys = keys;
	s->key_cap *= 2;
	return 0;
}

/* `"key" :`, leaving the cursor at the value. */
static int scan_key(struct scan *s)
{
	struct key key;
	int r;

	skip_space(s);
	r = scan_string(s, &key);
	if (r == 0 && s->key_count == s->key_cap)
		r = keys_grow(s);
	if (r < 0)
		return err_pass(r);
	s->keys[s->key_count++] = key;
	skip_space(s);
	return accept(s, ':') ? 0 : bad(s, "':' was expected");
}

static int keys_close(struct scan *s, size_t first)
{
	struct key *keys = s->keys + first;
	size_t count = s->key_count - first;

	qsort(keys, count, sizeof(*keys), key_order);
	for (size_t i = 1; i < count; i++) {
		if (key_order(&keys[i - 1], &keys[i]) != 0)
			continue;
		s->pos = (size_t)(keys[i].at - s->text);
		return bad(s, "duplicate key in an object");
	}
	s->key_count = first;
	return 0;
}

/* ---- numbers ---- */

struct number {
	char digits[18]; /* the leading ones of the mantissa, for the edge of range */
	size_t kept;
	int64_t exponent; /* of the first non-zero digit: d.ddd * 10^exponent */
	bool zero;
};

static size_t scan_digits(struct scan *s, struct number *n, bool fraction)
{
	size_t start = s->pos;

	for (int c; is_digit(c = peek(s)); s->pos++) {
		if (n->zero && c != '0') {
			n->zero = false;
			n->exponent = fraction ? -(int64_t)(s->pos - start) - 1 : 0;
		}
		if (!n->zero && n->kept < sizeof(n->digits) - 1)
			n->digits[n->kept++] = (char)c;
	}
	return s->pos - start;
}

static int scan_exponent(struct scan *s, int64_t *exponent_p)
{
	int64_t v = 0;
	bool minus;
	size_t start;

	if (!accept(s, 'e') && !accept(s, 'E'))
		return 0;
	minus = accept(s, '-');
	if (!minus)
		(void)accept(s, '+');
	start = s->pos;
	for (; is_digit(peek(s)); s->pos++) {
		if (v < EXPONENT_CAP)
			v = v * 10 + (peek(s) - '0');
	}
	*exponent_p = minus ? -v : v;
	return s->pos > start ? 0 : bad(s, "a digit was expected");
}

static int scan_number(struct scan *s)
{
	struct number n = {.zero = true};
	size_t start = s->pos, whole;
	int64_t exponent = 0;
	int r;

	(void)accept(s, '-');
	if (peek(s) == '0' && s->pos + 1 < s->len && is_digit(s->text[s->pos + 1]))
		return bad(s, "number with a leading zero");
	whole = scan_digits(s, &n, false);
	if (!whole)
		return bad(s, "a value was expected");
	if (!n.zero)
		n.exponent = (int64_t)whole - 1;
	if (accept(s, '.') && !scan_digits(s, &n, true))
		return bad(s, "a digit was expected");
	r = scan_exponent(s, &exponent);
	if (r < 0)
		return err_pass(r);
	if (s->pos - start > NUMBER_MAX)
		return bad(s, "number longer than 63 characters");
	exponent += n.exponent;
	/* DBL_MAX is 1.7976931348623157e308 */
	if (!n.zero && (exponent > 308 ||
			(exponent == 308 && strcmp(n.digits, "17976931348623157") > 0)))
		return bad(s, "number out of the range of a double");
	return 0;
}

/* ---- structure ---- */

static int scan_word(struct scan *s, const char *word)
{
	size_t len = strlen(word);

	if (s->len - s->pos < len || memcmp(s->text + s->pos, word, len) != 0)
		return bad(s, "a value was expected");
	s->pos += len;
	return 0;
}

static int container_close(struct scan *s)
{
	struct frame *frame = &s->frames[s->depth - 1];

	if (!accept(s, frame->object ? '}' : ']'))
		return bad(s, frame->object ? "',' or '}' was expected"
					    : "',' or ']' was expected");
	s->depth--;
	return frame->object ? keys_close(s, frame->first_key) : 0;
}

/* Outcome 1: another value starts here (in a container that was opened). */
static int container_open(struct scan *s, bool object)
{
	if (s->depth == s->max_depth)
		return bad(s, "nested too deep");
	s->pos++;
	s->frames[s->depth++] = (struct frame){object, s->key_count};
	skip_space(s);
	if (peek(s) == (object ? '}' : ']'))
		return container_close(s);
	if (object) {
		int r = scan_key(s);

		if (r < 0)
			return err_pass(r);
	}
	return 1;
}

/* Outcome 1: a container was opened and its first value follows. */
static int scan_value(struct scan *s)
{
	struct key ignored;

	skip_space(s);
	switch (peek(s)) {
	case '{':
		return container_open(s, true);
	case '[':
		return container_open(s, false);
	case '"':
		return scan_string(s, &ignored);
	case 't':
		return scan_word(s, "true");
	case 'f':
		return scan_word(s, "false");
	case 'n':
		return scan_word(s, "null");
	default:
		return scan_number(s);
	}
}

/* Close containers that end here. Outcome 1: another value follows; 0: the end of the
 * text. */
static int scan_after(struct scan *s)
{
	for (;;) {
		int r;

		skip_space(s);
		if (!s->depth)
			return s->pos == s->len ? 0 : bad(s, "bytes after the value");
		if (accept(s, ',')) {
			r = s->frames[s->depth - 1].object ? scan_key(s) : 0;
			return r < 0 ? err_pass(r) : 1;
		}
		r = container_close(s);
		if (r < 0)
			return err_pass(r);
	}
}

int json_check(const char *text, size_t len, size_t max_depth)
{
	struct scan s;
	int r;

	assert(max_depth <= JSON_DEPTH_MAX);
	s.text = (const uint8_t *)text;
	s.len = len;
	s.pos = s.depth = s.key_count = 0;
	s.max_depth = max_depth;
	s.keys = s.keys_inline;
	s.key_cap = KEYS_INLINE;
	if (len > UINT32_MAX)
		return err_raise(ERR_TOOBIG, "%zu bytes of JSON: limit %u", len,
				 UINT32_MAX);
	do {
		r = scan_value(&s);
		if (r == 0)
			r = scan_after(&s);
	} while (r > 0);
	if (s.keys != s.keys_inline)
		mem_free(s.keys);
	return r < 0 ? err_pass(r) : 0;
}

void json_sanitize(char *s)
{
	const uint8_t *end = (const uint8_t *)s + strlen(s);
	size_t n = 0;

	for (uint8_t *p = (uint8_t *)s; p < end; p += n) {
		if (utf8_take(p, end, &n) != CHAR_BAD && *p >= 0x20 && *p != 0x7f)
			continue;
		*p = '?';
		n = 1;
	}
}
