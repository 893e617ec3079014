/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Answers of etcd: the parser of the stream, and what becomes of its keys. In pieces,
 * whose length the first byte says, the text means the same as whole. What it takes as a
 * whole text and one message, json_check() takes, too. A key that is read is written
 * alike.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/cluster_url.h"
#include "daemon/cluster/etcd_key.h"
#include "daemon/cluster/etcd_parse.h"
#include "proto/json.h"
#include "tests/fuzz/lib/fuzz.h"

struct heard {
	struct etcd_parser parser; /* its first member */
	uint64_t sum;
	unsigned int kvs, messages;
};

static void must(bool holds)
{
	if (!holds)
		abort();
}

static void heard_add(struct heard *h, const void *bytes, size_t len)
{
	const uint8_t *p = bytes;

	for (size_t i = 0; i < len; i++)
		h->sum = (h->sum ^ p[i]) * UINT64_C(1099511628211);
}

static void on_kv(struct etcd_parser *parser, const struct etcd_kv *kv)
{
	struct heard *h = container_of(parser, struct heard, parser);
	char key[ETCD_NAME_MAX];
	enum etcd_side side;
	struct place place;

	h->kvs++;
	must(kv->key_len <= ETCD_KEY_MAX && kv->key[kv->key_len] == 0);
	must(kv->bad || (kv->value_len <= ETCD_VALUE_MAX && !kv->value[kv->value_len]));
	heard_add(h, kv->key, kv->key_len);
	if (!kv->bad)
		heard_add(h, kv->value, kv->value_len);
	heard_add(h, &kv->revision, sizeof(kv->revision));
	heard_add(h, &kv->lease, sizeof(kv->lease));
	heard_add(h, &kv->bad, sizeof(kv->bad));
	heard_add(h, &kv->deleted, sizeof(kv->deleted));
	if (!etcd_key_read("/kvd", (const char *)kv->key, kv->key_len, &side, &place))
		return;
	etcd_place_key("/kvd", side, &place, key);
	must(strlen(key) == kv->key_len && memcmp(key, kv->key, kv->key_len) == 0);
}

static void on_message(struct etcd_parser *parser, const struct etcd_message *m)
{
	struct heard *h = container_of(parser, struct heard, parser);

	h->messages++;
	must(m->kvs <= h->kvs);
	must(json_utf8(m->error, strlen(m->error)));
	must(json_utf8(m->reason, strlen(m->reason)));
	must(json_utf8(m->token, strlen(m->token)));
	heard_add(h, &m->revision, sizeof(m->revision));
	heard_add(h, &m->watch_id, sizeof(m->watch_id));
	heard_add(h, &m->more, sizeof(m->more));
	heard_add(h, m->error, strlen(m->error));
}

static struct heard *hear(const char *text, size_t len, size_t piece, int *r_p)
{
	struct heard *h = calloc(1, sizeof(*h));

	must(h);
	etcd_parser_init(&h->parser);
	h->parser.on_kv = on_kv;
	h->parser.on_message = on_message;
	*r_p = 0;
	for (size_t at = 0; *r_p == 0 && at < len; at += piece)
		*r_p = etcd_parser_feed(&h->parser, text + at,
					len - at < piece ? len - at : piece);
	if (*r_p < 0)
		must(err_last()->code == ERR_PROTO);
	err_clear();
	return h;
}

static void read_url(const char *text, size_t len)
{
	char *copy = calloc(1, len + 1);
	struct cluster_url url;

	must(copy);
	memcpy(copy, text, len);
	if (cluster_url_parse(copy, &url) == 0)
		must(url.count >= 1 && url.count <= CLUSTER_URL_ENDPOINTS_MAX &&
		     url.prefix[0] == '/');
	err_clear();
	free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const char *text = (const char *)data + 1;
	struct heard *whole, *pieces;
	int r1, r2;

	if (size < 2)
		return 0;
	size--;
	whole = hear(text, size, size, &r1);
	pieces = hear(text, size, data[0] % 16 + 1u, &r2);
	must(r1 == r2 && whole->sum == pieces->sum && whole->kvs == pieces->kvs &&
	     whole->messages == pieces->messages);
	must(etcd_parser_whole(&whole->parser) == etcd_parser_whole(&pieces->parser));
	read_url(text, size);
	free(whole);
	free(pieces);
	return 0;
}
