/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/cluster/etcd_key.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/hex.h"
#include "proto/json.h"

static const char *const sides[ETCD_SIDES] = {
	[ETCD_RECORDS] = "/groups/",
	[ETCD_LOADS] = "/load/",
};

static char *key_encode(char *at, const char *text)
{
	for (; *text; text++) {
		if ((*text >= '0' && *text <= '9') || (*text >= 'A' && *text <= 'Z') ||
		    (*text >= 'a' && *text <= 'z') || strchr(".-_", *text)) {
			*at++ = *text;
		} else {
			*at++ = '%';
			hex_write(text, 1, at);
			at += 2;
		}
	}
	*at = '\0';
	return at;
}

/* Up to `end`, into `size` bytes with the NUL. */
static bool key_decode(const char *at, const char *end, char *out, size_t size)
{
	size_t len = 0;

	if (at == end)
		return false;
	while (at < end && len + 1 < size) {
		char c = *at++;

		if (c == '%') {
			if (end - at < 2 || !hex_read(at, &c, 1))
				return false;
			at += 2;
		}
		out[len++] = c;
	}
	out[len] = '\0';
	return at == end && json_utf8(out, len);
}

void etcd_group_key(const char *prefix, enum etcd_side side, const char *group,
		    char key[ETCD_NAME_MAX])
{
	char *at = key + snprintf(key, ETCD_NAME_MAX, "%s%s", prefix, sides[side]);

	at = key_encode(at, group);
	at[0] = '/';
	at[1] = '\0';
}

void etcd_place_key(const char *prefix, enum etcd_side side, const struct place *place,
		    char key[ETCD_NAME_MAX])
{
	char *at;

	etcd_group_key(prefix, side, place->group, key);
	at = key_encode(key + strlen(key), place->worker[0] ? place->worker : "-");
	snprintf(at, (size_t)(key + ETCD_NAME_MAX - at), "/%u.%u.%u.%u",
		 place->rank[PLACE_TP], place->rank[PLACE_PP], place->rank[PLACE_DP],
		 place->rank[PLACE_CP]);
}

static bool key_ranks(const char *at, const char *end, struct place *place)
{
	for (int axis = 0; axis < PLACE_AXES; axis++) {
		uint32_t rank = 0;
		const char *begin = at;

		while (at < end && *at >= '0' && *at <= '9' && rank < PLACE_SIZE_MAX)
			rank = rank * 10 + (uint32_t)(*at++ - '0');
		if (at == begin || rank >= PLACE_SIZE_MAX)
			return false;
		place->rank[axis] = rank;
		if (axis + 1 < PLACE_AXES && (at == end || *at++ != '.'))
			return false;
	}
	return at == end;
}

/* A parsed key is written again and compared: one place has one key. */
bool etcd_key_read(const char *prefix, const char *key, size_t len,
		   enum etcd_side *side_p, struct place *place_p)
{
	const char *end = key + len, *at = key + strlen(prefix), *slash, *slash2;
	char again[ETCD_NAME_MAX];
	size_t n;

	memset(place_p, 0, sizeof(*place_p));
	if (len <= strlen(prefix) || len >= ETCD_NAME_MAX ||
	    memcmp(key, prefix, strlen(prefix)) != 0)
		return false;
	for (*side_p = 0;; (*side_p)++) {
		if (*side_p == ETCD_SIDES)
			return false;
		n = strlen(sides[*side_p]);
		if ((size_t)(end - at) > n && memcmp(at, sides[*side_p], n) == 0)
			break;
	}
	at += n;
	slash = memchr(at, '/', (size_t)(end - at));
	slash2 = slash ? memchr(slash + 1, '/', (size_t)(end - slash - 1)) : NULL;
	if (!slash2 || !key_decode(at, slash, place_p->group, sizeof(place_p->group)) ||
	    !key_decode(slash + 1, slash2, place_p->worker, sizeof(place_p->worker)) ||
	    !key_ranks(slash2 + 1, end, place_p))
		return false;
	if (strcmp(place_p->worker, "-") == 0)
		place_p->worker[0] = '\0';
	etcd_place_key(prefix, *side_p, place_p, again);
	return strlen(again) == len && memcmp(again, key, len) == 0;
}
