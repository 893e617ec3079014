/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two steps. The first one knows brackets and strings only: it keeps the text of one
 * message, with long strings cut, and takes a key out of it as soon as the key's object
 * ends. So the kept text is short, however long the message is. The second step is
 * proto/json, which checks and reads the kept text: of each key, then of the message.
 *
 * A key is an element of an array: {"key": …}, or {"type": …, "kv": {"key": …}} in a
 * watch. One null stays in place of all that follow each other. int64 is quoted, as in
 * protobuf's JSON; unquoted numbers are accepted, too.
 */
#include "daemon/cluster/etcd_parse.h"

#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "proto/json.h"

#define STRING_MAX (BASE64_CHARS(ETCD_VALUE_MAX) + 1) /* longer ones are too long */
#define AFTER_BACKSLASH 5u
#define PLACEHOLDER "null"

void etcd_parser_init(struct etcd_parser *p)
{
	p->depth = p->escape = 0;
	p->failed = p->in_string = p->cut = false;
	p->kvs = 0;
	p->messages = 0;
	p->len = 0;
}

static int parser_fail(const char *what)
{
	return err_raise(ERR_PROTO, "etcd's response: %s", what);
}

/* ---- members; absent, or null: unchanged ---- */

static const cJSON *member(const cJSON *object, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);

	return cJSON_IsNull(item) ? NULL : item;
}

static bool member_number(const cJSON *object, const char *name, uint64_t *out_p)
{
	const cJSON *item = member(object, name);
	const char *text = cJSON_GetStringValue(item);
	bool negative = text && *text == '-';
	int64_t number;

	if (!item)
		return true;
	if (text ? !json_parse_u64(text + negative, out_p)
		 : !json_number_is_int(item, &number))
		return false;
	if (!text)
		*out_p = (uint64_t)number;
	else if (negative)
		*out_p = 0 - *out_p;
	return true;
}

static bool member_flag(const cJSON *object, const char *name, bool *out_p)
{
	const cJSON *item = member(object, name);

	if (item)
		*out_p = cJSON_IsTrue(item);
	return !item || cJSON_IsBool(item);
}

static void member_text(const cJSON *object, const char *name, char to[ETCD_TEXT_MAX])
{
	const char *text = cJSON_GetStringValue(member(object, name));

	if (!text)
		return;
	snprintf(to, ETCD_TEXT_MAX, "%s", text);
	json_sanitize(to);
}

/* It is copied into a header unchanged. */
static bool member_token(const cJSON *object, char to[ETCD_TOKEN_MAX])
{
	const char *text = cJSON_GetStringValue(member(object, "token"));
	size_t len = text ? strlen(text) : 0;

	for (size_t i = 0; i < len; i++)
		if (len >= ETCD_TOKEN_MAX || text[i] <= ' ' || text[i] > '~')
			return false;
	if (text)
		memcpy(to, text, len + 1);
	return true;
}

/* ---- keys and messages ---- */

/* Base64 of a whole string, or of its start. */
static bool kv_bytes(const char *text, uint8_t *to, size_t max, size_t *len_p)
{
	bool good = base64_decode(text, strnlen(text, BASE64_CHARS(max)), to, len_p);

	if (!good)
		*len_p = 0;
	to[*len_p] = '\0';
	return good && *len_p <= max;
}

static bool kv_read(struct etcd_kv *kv, const cJSON *type, const cJSON *item)
{
	const char *key = cJSON_GetStringValue(member(item, "key"));
	const char *value = cJSON_GetStringValue(member(item, "value"));
	const char *word = cJSON_GetStringValue(type);

	kv->deleted = (word && strcmp(word, "DELETE") == 0) ||
		      (cJSON_IsNumber(type) && cJSON_GetNumberValue(type) == 1);
	kv->key_cut = strlen(key) > BASE64_CHARS(ETCD_KEY_MAX);
	kv->bad = !kv_bytes(key, kv->key, ETCD_KEY_MAX, &kv->key_len);
	value = value ? value : "";
	if (!kv_bytes(value, kv->value, ETCD_VALUE_MAX, &kv->value_len) ||
	    strlen(value) > BASE64_CHARS(ETCD_VALUE_MAX))
		kv->bad = true;
	kv->revision = kv->lease = 0;
	return member_number(item, "mod_revision", &kv->revision) &&
	       member_number(item, "lease", &kv->lease);
}

/* The last part of the text is an element of an array: a key, perhaps. */
static int parser_element(struct etcd_parser *p, size_t at)
{
	const size_t before = strlen(PLACEHOLDER ",");
	cJSON *element mem_cleanup(json_freep) = NULL;
	int r = json_parse(p->buf + at, p->len - at, ETCD_DEPTH_MAX, &element);
	const cJSON *item;

	if (r < 0)
		return err_pass(r);
	item = member(element, "kv");
	item = item ? item : element;
	if (!cJSON_IsString(member(item, "key")))
		return 0;
	if (!kv_read(&p->kv, member(element, "type"), item))
		return parser_fail("a member of a key has the wrong type");
	p->len = at;
	if (at >= before && memcmp(p->buf + at - before, PLACEHOLDER ",", before) == 0) {
		p->len--;
	} else { /* shorter than the key was */
		memcpy(p->buf + at, PLACEHOLDER, before - 1);
		p->len += before - 1;
	}
	p->kvs++;
	p->on_kv(p, &p->kv);
	return 0;
}

static bool message_read(const cJSON *root, struct etcd_message *m)
{
	const cJSON *result = member(root, "result"), *error = member(root, "error");
	const cJSON *top = cJSON_IsObject(result) ? result : root;
	const cJSON *header = member(top, "header"), *response;
	const cJSON *fault = cJSON_IsObject(error) ? error : root;
	uint64_t watch_id = 0;

	m->failed = error || member(root, "message");
	member_text(root, "error", m->error);
	member_text(fault, "message", m->error);
	member_text(top, "cancel_reason", m->reason);
	cJSON_ArrayForEach(response, member(top, "responses"))
		if (!member_flag(member(response, "response_txn"), "succeeded",
				 &m->nested))
			return false;
	if (!member_number(fault, "code", &m->error_code) ||
	    !member_number(fault, "grpc_code", &m->error_code) ||
	    !member_number(header, "revision", &m->revision) ||
	    !member_number(top, "ID", &m->lease) || !member_number(top, "TTL", &m->ttl) ||
	    !member_number(top, "compact_revision", &m->compact_revision) ||
	    !member_number(top, "watch_id", &watch_id) ||
	    !member_flag(top, "more", &m->more) ||
	    !member_flag(top, "succeeded", &m->succeeded) ||
	    !member_flag(top, "created", &m->created) ||
	    !member_flag(top, "canceled", &m->canceled) || !member_token(top, m->token))
		return false;
	m->watch_id = (int64_t)watch_id;
	return true;
}

static int parser_message(struct etcd_parser *p)
{
	struct etcd_message message = {.kvs = p->kvs};
	cJSON *root mem_cleanup(json_freep) = NULL;
	int r = json_parse(p->buf, p->len, ETCD_DEPTH_MAX, &root);

	if (r < 0)
		return err_pass(r);
	if (!message_read(root, &message))
		return parser_fail("a member has the wrong type");
	p->messages++;
	p->kvs = 0;
	p->len = 0;
	p->on_message(p, &message);
	return 0;
}

/* ---- the text ---- */

static int parser_keep(struct etcd_parser *p, const char *bytes, size_t len)
{
	if (len > sizeof(p->buf) - p->len)
		return parser_fail("a message is too long");
	memcpy(p->buf + p->len, bytes, len);
	p->len += len;
	return 0;
}

static int parser_open(struct etcd_parser *p, char c)
{
	if (p->depth == ETCD_DEPTH_MAX)
		return parser_fail("nested too deeply");
	p->depth++;
	p->arrays[p->depth] = c == '[';
	p->begins[p->depth] = p->len;
	return parser_keep(p, &c, 1);
}

/* proto/json finds brackets that do not match. */
static int parser_close(struct etcd_parser *p, char c)
{
	bool array = p->arrays[p->depth];
	size_t begin = p->begins[p->depth];
	int r = parser_keep(p, &c, 1);

	p->depth--;
	if (r == 0 && p->depth == 0)
		r = parser_message(p);
	else if (r == 0 && !array && p->arrays[p->depth])
		r = parser_element(p, begin);
	return err_pass(r);
}

static int parser_outside(struct etcd_parser *p, char c)
{
	if (p->len && p->buf[p->len - 1] == ' ' && strchr(",:]}", c))
		p->len--;
	switch (c) {
	case ' ':
	case '\t':
	case '\n':
	case '\r': /* kept between words, which are not JSON then */
		if (p->depth && !strchr("{}[],:\" ", p->buf[p->len - 1]))
			return parser_keep(p, " ", 1);
		return 0;
	case '{':
	case '[':
		if (p->depth == 0 && c == '[')
			break;
		return parser_open(p, c);
	case '}':
	case ']':
		if (p->depth == 0)
			break;
		return parser_close(p, c);
	default:
		if (p->depth == 0)
			break;
		p->in_string = c == '"';
		p->string = p->len;
		p->cut = false;
		return parser_keep(p, &c, 1);
	}
	return parser_fail("not JSON");
}

/* Plain characters of a string, up to the next special one; *r_p: as parser_keep(). A
 * string is not cut within a character. */
static size_t parser_run(struct etcd_parser *p, const char *bytes, size_t len, int *r_p)
{
	size_t run = 0, kept = p->len - p->string;
	size_t room = kept < STRING_MAX ? STRING_MAX - kept : 0;

	while (run < len && bytes[run] != '"' && bytes[run] != '\\')
		run++;
	if (p->cut)
		return run;
	while (room < run && ((unsigned char)bytes[room] & 0xc0) == 0x80)
		room++;
	p->cut = room < run;
	*r_p = parser_keep(p, bytes, p->cut ? room : run);
	return run;
}

/* The end of a string, or a character of an escape. */
static int parser_special(struct etcd_parser *p, char c)
{
	if (p->escape) {
		p->escape = p->escape < AFTER_BACKSLASH ? p->escape - 1
			    : c == 'u'			? 4
							: 0;
	} else if (c == '"') {
		p->in_string = p->cut = false;
	} else {
		p->escape = AFTER_BACKSLASH;
		p->cut |= p->len - p->string >= STRING_MAX;
	}
	return p->cut ? 0 : parser_keep(p, &c, 1);
}

int etcd_parser_feed(struct etcd_parser *p, const char *bytes, size_t len)
{
	int r = p->failed ? parser_fail("not JSON") : 0;

	for (size_t i = 0, run; r == 0 && i < len; i += run) {
		char c = bytes[i];

		run = 1;
		if (!p->in_string)
			r = parser_outside(p, c);
		else if (p->escape || c == '"' || c == '\\')
			r = parser_special(p, c);
		else
			run = parser_run(p, bytes + i, len - i, &r);
	}
	p->failed = r < 0;
	return err_pass(r);
}

bool etcd_parser_whole(const struct etcd_parser *p)
{
	return !p->failed && p->messages > 0 && p->depth == 0;
}
