/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A checker of JSON that keeps the path and one string. Members are identified by name
 * and path:
 *
 *   header.revision, result.header.revision, result.watch_id, result.events[].kv.key,
 *   kvs[].key, responses[].response_txn.responses[].response_range.kvs[].key, …
 *
 * Unknown members are skipped, even a string of megabytes. int64 is quoted there, as in
 * protobuf's JSON; unquoted numbers are accepted, too.
 *
 * A key is reported at the end of its object in the array `kvs` or `events`, because its
 * members may be in any order.
 */
#include "daemon/cluster/etcd_parse.h"

#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "proto/json.h"

/* The tokens that may follow. */
enum {
	WANT_MESSAGE, /* the first, or another one */
	WANT_VALUE,
	WANT_VALUE_OR_END, /* of an array */
	WANT_NAME,
	WANT_NAME_OR_END, /* of an object */
	WANT_COLON,
	WANT_COMMA_OR_END,
};
enum { IN_NONE, IN_NAME, IN_STRING, IN_WORD }; /* word: number, true, false, null */

enum name {
	NAME_OTHER,
	NAME_HEADER,
	NAME_RESULT,
	NAME_CLUSTER_ID,
	NAME_REVISION,
	NAME_KVS,
	NAME_EVENTS,
	NAME_KV,
	NAME_KEY,
	NAME_VALUE,
	NAME_MOD_REVISION,
	NAME_LEASE,
	NAME_TYPE,
	NAME_MORE,
	NAME_SUCCEEDED,
	NAME_RESPONSE_TXN,
	NAME_ID,
	NAME_TTL,
	NAME_WATCH_ID,
	NAME_CREATED,
	NAME_CANCELED,
	NAME_COMPACT_REVISION,
	NAME_CANCEL_REASON,
	NAME_TOKEN,
	NAME_ERROR,
	NAME_MESSAGE,
	NAME_CODE,
	NAME_GRPC_CODE,
};

static const char *const names[] = {
	[NAME_HEADER] = "header",
	[NAME_RESULT] = "result",
	[NAME_CLUSTER_ID] = "cluster_id",
	[NAME_REVISION] = "revision",
	[NAME_KVS] = "kvs",
	[NAME_EVENTS] = "events",
	[NAME_KV] = "kv",
	[NAME_KEY] = "key",
	[NAME_VALUE] = "value",
	[NAME_MOD_REVISION] = "mod_revision",
	[NAME_LEASE] = "lease",
	[NAME_TYPE] = "type",
	[NAME_MORE] = "more",
	[NAME_SUCCEEDED] = "succeeded",
	[NAME_RESPONSE_TXN] = "response_txn",
	[NAME_ID] = "ID",
	[NAME_TTL] = "TTL",
	[NAME_WATCH_ID] = "watch_id",
	[NAME_CREATED] = "created",
	[NAME_CANCELED] = "canceled",
	[NAME_COMPACT_REVISION] = "compact_revision",
	[NAME_CANCEL_REASON] = "cancel_reason",
	[NAME_TOKEN] = "token",
	[NAME_ERROR] = "error",
	[NAME_MESSAGE] = "message",
	[NAME_CODE] = "code",
	[NAME_GRPC_CODE] = "grpc_code",
};

static enum name name_of(const char *text)
{
	for (unsigned int i = 1; i < ARRAY_LEN(names); i++)
		if (strcmp(names[i], text) == 0)
			return (enum name)i;
	return NAME_OTHER;
}

void etcd_parser_init(struct etcd_parser *p)
{
	p->message = (struct etcd_message){.watch_id = 0};
	p->state = WANT_MESSAGE;
	p->token = IN_NONE;
	p->depth = 0;
	p->names[0] = NAME_OTHER;
	p->failed = p->cut = false;
	p->messages = 0;
	p->len = 0;
}

static int parser_fail(struct etcd_parser *p, const char *what)
{
	p->failed = true;
	return err_raise(ERR_PROTO, "etcd's response: %s", what);
}

/* ---- where it is ---- */

/* The name of the container around the value. An array's elements have its name. */
static enum name parser_around(const struct etcd_parser *p, unsigned int up)
{
	return up < p->depth ? (enum name)p->names[p->depth - 1 - up] : NAME_OTHER;
}

/* In an object that is the message itself, or its `result`. */
static bool parser_at_top(const struct etcd_parser *p)
{
	return p->depth == 1 || (p->depth == 2 && parser_around(p, 0) == NAME_RESULT);
}

static bool parser_in_header(const struct etcd_parser *p)
{
	return parser_around(p, 0) == NAME_HEADER &&
	       (p->depth == 2 || (p->depth == 3 && parser_around(p, 1) == NAME_RESULT));
}

static bool parser_in_error(const struct etcd_parser *p)
{
	return p->depth == 1 || (p->depth == 2 && parser_around(p, 0) == NAME_ERROR);
}

/* Is the object that ends or starts here, under this name, an element of kvs or events?
 */
static bool parser_is_key(const struct etcd_parser *p, enum name name)
{
	return p->depth > 0 && p->arrays[p->depth] &&
	       (name == NAME_KVS || name == NAME_EVENTS);
}

/* ---- values ---- */

static bool parser_number(const char *text, uint64_t *out_p)
{
	const char *digits = *text == '-' ? text + 1 : text;
	uint64_t value = 0;

	if (!*digits)
		return false;
	for (; *digits; digits++) {
		if (*digits < '0' || *digits > '9')
			return false;
		if (__builtin_mul_overflow(value, UINT64_C(10), &value) ||
		    __builtin_add_overflow(value, (uint64_t)(*digits - '0'), &value))
			return false;
	}
	*out_p = *text == '-' ? 0 - value : value;
	return true;
}

static void parser_copy(char to[ETCD_TEXT_MAX], const char *text)
{
	size_t len = strnlen(text, ETCD_TEXT_MAX - 1);

	memcpy(to, text, len);
	to[len] = '\0';
	json_sanitize(to);
}

/* It is copied into a header unchanged. */
static bool parser_token(const struct etcd_parser *p, char to[ETCD_TOKEN_MAX])
{
	if (p->cut || p->len >= ETCD_TOKEN_MAX)
		return false;
	for (size_t i = 0; i < p->len; i++)
		if (p->buf[i] <= ' ' || p->buf[i] > '~')
			return false;
	memcpy(to, p->buf, p->len);
	to[p->len] = '\0';
	return true;
}

/* Base64 of a whole string, or of its start. */
static bool parser_bytes(struct etcd_parser *p, uint8_t *to, size_t max, size_t *len_p)
{
	size_t chars = p->len;

	*len_p = 0;
	if (p->cut)
		chars = BASE64_CHARS(max);
	if (chars > BASE64_CHARS(max) || !base64_decode(p->buf, chars, to, len_p)) {
		*len_p = 0;
		to[0] = '\0';
		return false;
	}
	to[*len_p] = '\0';
	return *len_p <= max;
}

static void parser_key(struct etcd_parser *p)
{
	struct etcd_kv *kv = &p->kv;

	if (p->len > BASE64_CHARS(ETCD_KEY_MAX))
		p->cut = true;
	kv->key_cut = p->cut;
	if (!parser_bytes(p, kv->key, ETCD_KEY_MAX, &kv->key_len))
		kv->bad = true;
}

/* A member of the current key, a string or a literal. */
static bool parser_kv_member(struct etcd_parser *p, enum name name, bool string)
{
	struct etcd_kv *kv = &p->kv;
	enum name around = parser_around(p, 0);

	if (around == NAME_EVENTS && name == NAME_TYPE) {
		kv->deleted = strcmp(p->buf, "DELETE") == 0 || strcmp(p->buf, "1") == 0;
		return true;
	}
	if (around != NAME_KVS &&
	    !(around == NAME_KV && parser_around(p, 1) == NAME_EVENTS))
		return true;
	if (name == NAME_KEY && string)
		parser_key(p);
	else if (name == NAME_VALUE && string)
		kv->bad |= p->cut ||
			   !parser_bytes(p, kv->value, ETCD_VALUE_MAX, &kv->value_len);
	else if (name == NAME_MOD_REVISION)
		return parser_number(p->buf, &kv->revision);
	else if (name == NAME_LEASE)
		return parser_number(p->buf, &kv->lease);
	return true;
}

static bool parser_flag(const struct etcd_parser *p, bool *flag)
{
	if (strcmp(p->buf, "true") != 0 && strcmp(p->buf, "false") != 0)
		return false;
	*flag = p->buf[0] == 't';
	return true;
}

/* A member of the message, or of its result. */
static bool parser_top_member(struct etcd_parser *p, enum name name)
{
	struct etcd_message *m = &p->message;
	uint64_t id = 0;

	switch (name) {
	case NAME_MORE:
		return parser_flag(p, &m->more);
	case NAME_SUCCEEDED:
		return parser_flag(p, &m->succeeded);
	case NAME_CREATED:
		return parser_flag(p, &m->created);
	case NAME_CANCELED:
		return parser_flag(p, &m->canceled);
	case NAME_ID:
		return parser_number(p->buf, &m->lease);
	case NAME_TTL:
		return parser_number(p->buf, &m->ttl);
	case NAME_COMPACT_REVISION:
		return parser_number(p->buf, &m->compact_revision);
	case NAME_WATCH_ID:
		if (!parser_number(p->buf, &id))
			return false;
		m->watch_id = (int64_t)id;
		return true;
	case NAME_CANCEL_REASON:
		parser_copy(m->reason, p->buf);
		return true;
	case NAME_TOKEN:
		return parser_token(p, m->token);
	default:
		return true;
	}
}

static bool parser_error_member(struct etcd_parser *p, enum name name)
{
	struct etcd_message *m = &p->message;

	if (name == NAME_ERROR || name == NAME_MESSAGE) {
		m->failed = true;
		parser_copy(m->error, p->buf);
	} else {
		return parser_number(p->buf, &m->error_code);
	}
	return true;
}

/* A scalar value; its text is in buf. */
static bool parser_scalar(struct etcd_parser *p, bool string)
{
	enum name name = (enum name)p->names[p->depth];

	if (p->arrays[p->depth] || name == NAME_OTHER ||
	    (!string && strcmp(p->buf, "null") == 0))
		return true;
	switch (name) {
	case NAME_ERROR:
	case NAME_MESSAGE:
	case NAME_CODE:
	case NAME_GRPC_CODE:
		return !parser_in_error(p) || parser_error_member(p, name);
	case NAME_CLUSTER_ID:
		return !parser_in_header(p) ||
		       parser_number(p->buf, &p->message.cluster_id);
	case NAME_REVISION:
		return !parser_in_header(p) ||
		       parser_number(p->buf, &p->message.revision);
	case NAME_KEY:
	case NAME_VALUE:
	case NAME_MOD_REVISION:
	case NAME_LEASE:
	case NAME_TYPE:
		return parser_kv_member(p, name, string);
	case NAME_SUCCEEDED:
		if (parser_around(p, 0) == NAME_RESPONSE_TXN)
			return parser_flag(p, &p->message.nested);
		break;
	default:
		break;
	}
	return !parser_at_top(p) || parser_top_member(p, name);
}

/* ---- tokens ---- */

static void parser_value_done(struct etcd_parser *p)
{
	p->state = p->depth ? WANT_COMMA_OR_END : WANT_MESSAGE;
}

static void parser_keep(struct etcd_parser *p, char c)
{
	if (p->len + 1 < sizeof(p->buf))
		p->buf[p->len++] = c;
	else
		p->cut = true;
}

static int parser_token_end(struct etcd_parser *p)
{
	uint8_t token = p->token;

	p->token = IN_NONE;
	p->buf[p->len] = '\0';
	if (token == IN_NAME) {
		p->names[p->depth] = p->cut || strlen(p->buf) != p->len
					     ? NAME_OTHER
					     : (uint8_t)name_of(p->buf);
		p->state = WANT_COLON;
		return 0;
	}
	if (token == IN_WORD && (p->cut || json_check(p->buf, p->len, 1) < 0)) {
		err_clear();
		return parser_fail(p, "an unquoted word other than a number, true, "
				      "false or null");
	}
	if (!parser_scalar(p, token == IN_STRING))
		return parser_fail(p, "a member has the wrong type");
	parser_value_done(p);
	return 0;
}

static void parser_token_begin(struct etcd_parser *p, uint8_t token)
{
	p->token = token;
	p->len = 0;
	p->cut = false;
	p->escape = 0;
}

/* After a backslash: one character, or u and four digits. Non-ASCII characters are not
 * needed, and become '?'. */
static int parser_escape(struct etcd_parser *p, char c)
{
	static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
	const char *simple;

	if (p->escape == 5) {
		p->escape = 0;
		if (c == 'u') {
			p->escape = 4;
			p->utf16 = 0;
			return 0;
		}
		simple = c ? strchr(from, c) : NULL;
		if (!simple)
			return parser_fail(p, "a bad escape in a string");
		parser_keep(p, to[simple - from]);
		return 0;
	}
	if (hex_digit(c) < 0)
		return parser_fail(p, "a bad escape in a string");
	p->utf16 = (uint16_t)(p->utf16 << 4 | hex_digit(c));
	if (--p->escape == 0)
		parser_keep(p, p->utf16 && p->utf16 < 0x80 ? (char)p->utf16 : '?');
	return 0;
}

static int parser_open(struct etcd_parser *p, bool array)
{
	if (p->depth == ETCD_DEPTH_MAX)
		return parser_fail(p, "nested too deeply");
	if (!array && parser_is_key(p, (enum name)p->names[p->depth])) {
		struct etcd_kv *kv = &p->kv;

		kv->deleted = kv->key_cut = kv->bad = false;
		kv->key_len = kv->value_len = 0;
		kv->key[0] = kv->value[0] = '\0';
		kv->revision = kv->lease = 0;
	}
	if (p->depth == 1 && p->names[1] == NAME_ERROR)
		p->message.failed = true;
	p->depth++;
	p->arrays[p->depth] = array;
	/* an array's elements have its name */
	p->names[p->depth] = array ? p->names[p->depth - 1] : (uint8_t)NAME_OTHER;
	p->state = array ? WANT_VALUE_OR_END : WANT_NAME_OR_END;
	return 0;
}

static int parser_close(struct etcd_parser *p, bool array)
{
	if (p->depth == 0 || p->arrays[p->depth] != array)
		return parser_fail(p, "mismatched brackets");
	p->depth--;
	if (!array && parser_is_key(p, (enum name)p->names[p->depth])) {
		p->message.kvs++;
		p->on_kv(p, &p->kv);
	}
	parser_value_done(p);
	if (p->depth == 0) {
		p->messages++;
		p->on_message(p, &p->message);
		p->message = (struct etcd_message){.watch_id = 0};
	}
	return 0;
}

/* The first character of a token, or one that is a token itself. */
static int parser_begin(struct etcd_parser *p, char c)
{
	uint8_t state = p->state;
	bool value = state == WANT_VALUE || state == WANT_VALUE_OR_END;

	switch (c) {
	case ' ':
	case '\t':
	case '\n':
	case '\r':
		return 0;
	case '{':
	case '[':
		if (!value && !(state == WANT_MESSAGE && c == '{'))
			break;
		return parser_open(p, c == '[');
	case '}':
	case ']':
		if (state != WANT_COMMA_OR_END &&
		    state != (c == '}' ? WANT_NAME_OR_END : WANT_VALUE_OR_END))
			break;
		return parser_close(p, c == ']');
	case ',':
		if (state != WANT_COMMA_OR_END)
			break;
		p->state = p->arrays[p->depth] ? WANT_VALUE : WANT_NAME;
		return 0;
	case ':':
		if (state != WANT_COLON)
			break;
		p->state = WANT_VALUE;
		return 0;
	case '"':
		if (value)
			parser_token_begin(p, IN_STRING);
		else if (state == WANT_NAME || state == WANT_NAME_OR_END)
			parser_token_begin(p, IN_NAME);
		else
			break;
		return 0;
	default:
		if (!value)
			break;
		parser_token_begin(p, IN_WORD);
		parser_keep(p, c);
		return 0;
	}
	return parser_fail(p, "not JSON");
}

/* Plain characters of a string, up to the next special one. */
static size_t parser_run(struct etcd_parser *p, const char *bytes, size_t len)
{
	size_t run = 0, room = sizeof(p->buf) - 1 - p->len;

	while (run < len && bytes[run] != '"' && bytes[run] != '\\' &&
	       (unsigned char)bytes[run] >= 0x20)
		run++;
	if (run > room)
		p->cut = true;
	else
		room = run;
	memcpy(p->buf + p->len, bytes, room);
	p->len += room;
	return run;
}

static bool parser_word_char(char c)
{
	return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == '-' || c == '+' ||
	       c == '.' || c == 'E';
}

int etcd_parser_feed(struct etcd_parser *p, const char *bytes, size_t len)
{
	int r = 0;

	if (p->failed)
		return parser_fail(p, "not JSON");
	for (size_t i = 0; r == 0 && i < len;) {
		char c = bytes[i];

		if (p->token == IN_WORD && !parser_word_char(c)) {
			r = parser_token_end(p); /* and the character again */
		} else if (p->token == IN_WORD) {
			parser_keep(p, c);
			i++;
		} else if (p->token == IN_NONE) {
			r = parser_begin(p, c);
			i++;
		} else if (p->escape) {
			r = parser_escape(p, c);
			i++;
		} else if (c == '"') {
			r = parser_token_end(p);
			i++;
		} else if (c == '\\') {
			p->escape = 5;
			i++;
		} else if ((unsigned char)c < 0x20) {
			r = parser_fail(p, "a control character in a string");
		} else {
			i += parser_run(p, bytes + i, len - i);
		}
	}
	return r < 0 ? err_pass(r) : 0;
}

bool etcd_parser_whole(const struct etcd_parser *p)
{
	return !p->failed && p->messages > 0 && p->state == WANT_MESSAGE;
}
