/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A record is small and flat: it is written piece by piece, and read through a table of
 * fields, which has the limits. Members that a newer daemon adds are skipped; a value of
 * the wrong type, a text that is too long or has control characters in it, or an endpoint
 * that cannot be dialled makes the whole record invalid: half a record would send engines
 * to the wrong place.
 */
#include "daemon/cluster/record.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/sanitize.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/roster.h"
#include "proto/fields.h"
#include "proto/json.h"
#include "proto/out.h"

#define RECORD_DEPTH_MAX 4u
#define DIGEST_CHARS 16u
/* bytes of an endpoint, with space for its key */
#define ENDPOINT_WITH_KEY_MAX (LINK_ENDPOINT_MAX - 1 - (RECORD_KEY_CHARS + 1))

void record_init(struct record *record)
{
	memset(record, 0, sizeof(*record));
	for (unsigned int i = 0; i < PLACE_AXES; i++)
		record->size[i] = 1;
}

/* ---- checks, of both directions ---- */

static bool is_key(const char *key)
{
	static const char alphabet[] =
		"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
		".-:+=^!/*?&<>()[]{}@%$#";

	return strlen(key) == RECORD_KEY_CHARS &&
	       strspn(key, alphabet) == RECORD_KEY_CHARS;
}

static bool is_hex(const char *text, size_t chars)
{
	return strlen(text) == chars && strspn(text, "0123456789abcdef") == chars;
}

static bool is_url(const char *url)
{
	return (strncmp(url, "http://", 7) == 0 || strncmp(url, "https://", 8) == 0) &&
	       !strpbrk(url, " \"<>\\^`{|}");
}

static int record_check_texts(const struct record *record)
{
	const struct {
		const char *name, *text;
	} texts[] = {
		{"name", record->name},
		{"version", record->version},
		{"url", record->url},
		{"engine", record->engine},
		{"bootstrap", record->bootstrap},
		{"summary", record->summary},
	};

	for (size_t i = 0; i < ARRAY_LEN(texts); i++) {
		if (!sanitize_is_clean(texts[i].text))
			return err_raise(ERR_INVAL,
					 "%s: must not contain control "
					 "characters",
					 texts[i].name);
	}
	for (unsigned int i = 0; i < record->pool_count; i++) {
		if (!sanitize_is_clean(record->pools[i].name) ||
		    !sanitize_is_clean(record->pools[i].model))
			return err_raise(ERR_INVAL,
					 "pools[%u]: must not contain "
					 "control characters",
					 i);
		if (*record->pools[i].digest &&
		    !is_hex(record->pools[i].digest, DIGEST_CHARS))
			return err_raise(ERR_INVAL,
					 "pools[%u].digest: must be 16 hex "
					 "digits",
					 i);
	}
	return 0;
}

int record_check(const struct record *record, const struct place *place)
{
	int r = endpoint_check(record->endpoint);

	if (r == 0)
		r = record_check_texts(record);
	if (r < 0)
		return err_pass(r);
	if (*record->instance && !is_hex(record->instance, 32))
		return err_raise(ERR_INVAL, "instance: must be 32 hex digits");
	if (*record->key && !is_key(record->key))
		return err_raise(ERR_INVAL, "key: must be 40 characters of Z85");
	if (*record->key && strlen(record->endpoint) > ENDPOINT_WITH_KEY_MAX)
		return err_raise(ERR_INVAL,
				 "endpoint: too long (limit %u bytes without "
				 "its key)",
				 ENDPOINT_WITH_KEY_MAX);
	if (*record->url && !is_url(record->url))
		return err_raise(ERR_INVAL, "url: must be http://… or https://…");
	for (unsigned int i = 0; i < PLACE_AXES; i++) {
		if (record->size[i] < 1 || record->size[i] > PLACE_SIZE_MAX)
			return err_raise(ERR_INVAL, "%s_size: %u, must be 1 to %u",
					 place_axis_names[i], record->size[i],
					 PLACE_SIZE_MAX);
		if (place && place->rank[i] >= record->size[i])
			return err_raise(ERR_INVAL,
					 "%s_rank: %u, must be under %s_size %u",
					 place_axis_names[i], place->rank[i],
					 place_axis_names[i], record->size[i]);
	}
	return 0;
}

/* ---- writing ---- */

void record_put_pool(struct text *text, const struct record_pool *pool)
{
	out_object(text, NULL);
	out_text(text, "name", pool->name);
	out_filled(text, "model", pool->model);
	out_filled(text, "digest", pool->digest);
	out_number(text, "pages", pool->pages);
	out_number(text, "page_tokens", pool->page_tokens);
	out_close(text, '}');
}

void record_put(struct text *text, const struct record *record)
{
	out_filled(text, "instance", record->instance);
	out_filled(text, "name", record->name);
	out_filled(text, "key", record->key);
	out_filled(text, "version", record->version);
	out_array(text, "transports");
	for (unsigned int i = 0; i < record->transport_count; i++)
		out_text(text, NULL, record->transports[i]);
	out_close(text, ']');
	out_text(text, "state", record->draining ? "draining" : "serving");
	if (record->session)
		out_id(text, "session", record->session);
	out_filled(text, "url", record->url);
	out_filled(text, "engine", record->engine);
	out_filled(text, "bootstrap", record->bootstrap);
}

/* As many as fit: of a daemon with hundreds the first are included. */
static void put_pools(struct text *text, const struct record *record)
{
	for (unsigned int i = 0; i < record->pool_count; i++) {
		size_t before = text->len;

		if (i == 0)
			out_array(text, "pools");
		record_put_pool(text, &record->pools[i]);
		if (text->len + sizeof("]}") > DIRECTORY_RECORD_MAX && !text->failed) {
			text->len = before;
			if (i == 0)
				return;
			break;
		}
	}
	if (record->pool_count)
		out_close(text, ']');
}

static void put_head(struct text *text, const struct record *record)
{
	out_object(text, NULL);
	out_number(text, "v", RECORD_VERSION);
	record_put(text, record);
	out_text(text, "endpoint", record->endpoint);
	out_object(text, "size");
	for (unsigned int i = 0; i < PLACE_AXES; i++)
		out_number(text, place_axis_names[i], record->size[i]);
	out_close(text, '}');
	out_filled(text, "summary", record->summary);
}

int record_make(const struct record *record, char text_p[DIRECTORY_RECORD_MAX])
{
	struct text text = {0};
	int r = record_check(record, NULL);

	if (r < 0)
		return err_pass(r);
	put_head(&text, record);
	put_pools(&text, record);
	out_close(&text, '}');
	if (text.failed)
		r = err_raise(ERR_NOMEM, "out of memory for a record");
	else if (text.len >= DIRECTORY_RECORD_MAX)
		r = err_raise(ERR_TOOBIG, "record: %zu bytes (limit %u); shorten summary",
			      text.len, DIRECTORY_RECORD_MAX - 1);
	else
		memcpy(text_p, text.data, text.len + 1);
	text_fini(&text);
	return r < 0 ? err_pass(r) : 0;
}

/* ---- reading ---- */

struct record_args {
	int64_t v;
	const char *instance, *name, *endpoint, *key, *version, *url, *engine;
	const char *bootstrap, *summary;
	const cJSON *transports, *size, *pools;
	uint64_t session;
	int state;
};
static const char *const state_words[] = {"serving", "draining", NULL};
static const struct field record_fields[] = {
	F_INT("v", record_args, v, REQUIRED, 1, RECORD_VERSION, ""),
	F_STR("instance", record_args, instance, OPTIONAL, 32, ""),
	F_STR("name", record_args, name, OPTIONAL, 63, ""),
	F_STR("endpoint", record_args, endpoint, REQUIRED, LINK_ENDPOINT_MAX - 1, ""),
	F_STR("key", record_args, key, OPTIONAL, RECORD_KEY_CHARS, ""),
	F_STR("version", record_args, version, OPTIONAL, 31, ""),
	F_ARRAY("transports", record_args, transports, OPTIONAL, 64, ""),
	F_CHOICE("state", record_args, state, DEFAULT(0), state_words, ""),
	F_U64("session", record_args, session, OPTIONAL, ""),
	F_OBJECT("size", record_args, size, OPTIONAL, ""),
	F_ARRAY("pools", record_args, pools, OPTIONAL, 128, ""),
	F_STR("url", record_args, url, OPTIONAL, RECORD_URL_MAX - 1, ""),
	F_STR("engine", record_args, engine, OPTIONAL, 31, ""),
	F_STR("bootstrap", record_args, bootstrap, OPTIONAL, 127, ""),
	F_STR("summary", record_args, summary, OPTIONAL, RECORD_SUMMARY_MAX - 1, ""),
	F_END,
};

struct size_args {
	uint32_t of[PLACE_AXES];
};
#define F_SIZE(name, i) F_INT(name, size_args, of[i], DEFAULT(1), 1, PLACE_SIZE_MAX, "")
static const struct field size_fields[] = {
	F_SIZE("tp", PLACE_TP),
	F_SIZE("pp", PLACE_PP),
	F_SIZE("dp", PLACE_DP),
	F_SIZE("cp", PLACE_CP),
	F_END,
};

struct record_pool_args {
	const char *name, *model, *digest;
	int64_t pages;
	uint32_t page_tokens;
};
static const struct field pool_fields[] = {
	F_STR("name", record_pool_args, name, REQUIRED, 63, ""),
	F_STR("model", record_pool_args, model, OPTIONAL, 127, ""),
	F_STR("digest", record_pool_args, digest, OPTIONAL, DIGEST_CHARS, ""),
	F_ID("pages", record_pool_args, pages, OPTIONAL, ""),
	F_INT("page_tokens", record_pool_args, page_tokens, OPTIONAL, 0, UINT32_MAX, ""),
	F_END,
};

static int read_pools(const cJSON *list, struct record *record)
{
	const cJSON *item;
	unsigned int i = 0;

	cJSON_ArrayForEach(item, list) {
		struct record_pool *pool = &record->pools[record->pool_count];
		struct record_pool_args args;
		int r = cJSON_IsObject(item) ? fields_read(pool_fields, item, &args)
					     : err_raise(ERR_INVAL, "must be an object");

		if (r < 0)
			return err_prefix(r, "pools[%u]", i);
		if (i++ >= RECORD_POOLS_MAX)
			continue;
		field_copy(pool->name, sizeof(pool->name), args.name);
		field_copy(pool->model, sizeof(pool->model), args.model);
		field_copy(pool->digest, sizeof(pool->digest), args.digest);
		pool->pages = (uint64_t)args.pages;
		pool->page_tokens = args.page_tokens;
		record->pool_count++;
	}
	return 0;
}

static int read_transports(const cJSON *list, struct record *record)
{
	const cJSON *item;

	cJSON_ArrayForEach(item, list) {
		const char *word = cJSON_GetStringValue(item);

		if (!word || !*word || strlen(word) >= sizeof(record->transports[0]) ||
		    strspn(word, "abcdefghijklmnopqrstuvwxyz0123456789_-") !=
			    strlen(word))
			return err_raise(ERR_INVAL,
					 "transports: must be names of 1 to 15 "
					 "characters");
		if (record->transport_count < RECORD_TRANSPORTS_MAX)
			field_copy(record->transports[record->transport_count++],
				   sizeof(record->transports[0]), word);
	}
	return 0;
}

static int record_fill(const cJSON *json, struct record *record)
{
	struct size_args size = {.of = {1, 1, 1, 1}};
	struct record_args args;
	int r = fields_read(record_fields, json, &args);

	if (r >= 0 && args.size)
		r = fields_read(size_fields, args.size, &size);
	if (r < 0)
		return err_pass(r);
	field_copy(record->instance, sizeof(record->instance), args.instance);
	field_copy(record->name, sizeof(record->name), args.name);
	field_copy(record->endpoint, sizeof(record->endpoint), args.endpoint);
	field_copy(record->key, sizeof(record->key), args.key);
	field_copy(record->version, sizeof(record->version), args.version);
	field_copy(record->url, sizeof(record->url), args.url);
	field_copy(record->engine, sizeof(record->engine), args.engine);
	field_copy(record->bootstrap, sizeof(record->bootstrap), args.bootstrap);
	field_copy(record->summary, sizeof(record->summary), args.summary);
	record->draining = args.state == 1;
	record->session = args.session;
	memcpy(record->size, size.of, sizeof(record->size));
	r = read_transports(args.transports, record);
	if (r >= 0)
		r = read_pools(args.pools, record);
	return r < 0 ? err_pass(r) : err_pass(record_check(record, NULL));
}

int record_read(const char *text, struct record *record_p)
{
	cJSON *json mem_cleanup(json_freep) = NULL;
	size_t len = strnlen(text, DIRECTORY_RECORD_MAX + 1);
	struct err why;
	int r;

	record_init(record_p);
	if (len > DIRECTORY_RECORD_MAX)
		return err_raise(ERR_PROTO, "record: more than %u bytes",
				 DIRECTORY_RECORD_MAX);
	r = json_parse(text, len, RECORD_DEPTH_MAX, &json);
	if (r >= 0 && !cJSON_IsObject(json))
		r = err_raise(ERR_PROTO, "must be an object");
	if (r >= 0)
		r = record_fill(json, record_p);
	if (r >= 0)
		return 0;
	err_take(&why);
	record_init(record_p);
	return why.code == ERR_NOMEM ? err_reraise(&why)
				     : err_raise(ERR_PROTO, "record: %s", why.text);
}

/* ---- endpoints ---- */

void record_dial(const struct record *record, char text[LINK_ENDPOINT_MAX])
{
	if (*record->key)
		snprintf(text, LINK_ENDPOINT_MAX, "%.*s#%s", (int)ENDPOINT_WITH_KEY_MAX,
			 record->endpoint, record->key);
	else
		snprintf(text, LINK_ENDPOINT_MAX, "%s", record->endpoint);
}

int record_reach(struct record *record, const char *endpoint)
{
	size_t len = strcspn(endpoint, "#");
	const char *key = endpoint[len] ? endpoint + len + 1 : "";

	if (strlen(endpoint) >= LINK_ENDPOINT_MAX)
		return err_raise(ERR_INVAL, "endpoint: too long (limit %d bytes)",
				 LINK_ENDPOINT_MAX - 1);
	if (endpoint[len] && !is_key(key))
		return err_raise(ERR_INVAL,
				 "endpoint '%s': a key after '#' must have 40 characters",
				 endpoint);
	snprintf(record->endpoint, sizeof(record->endpoint), "%.*s", (int)len, endpoint);
	snprintf(record->key, sizeof(record->key), "%s", key);
	return err_pass(endpoint_check(record->endpoint));
}
