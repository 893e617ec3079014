/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_record: a record as an entry of the directory has it. What is taken can be made
 * again, and comes back the same; nothing of it could not be dialled or printed.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/record.h"
#include "daemon/link/link.h"
#include "tests/fuzz/lib/fuzz.h"

static void need(bool holds, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "fuzz_record: %s\n", what);
	abort();
}

/* Pools at the end may be left out; the rest is as it was. */
static void same(const struct record *a, const struct record *b)
{
	need(strcmp(a->instance, b->instance) == 0, "instance");
	need(strcmp(a->endpoint, b->endpoint) == 0, "endpoint");
	need(strcmp(a->key, b->key) == 0, "key");
	need(strcmp(a->url, b->url) == 0, "url");
	need(strcmp(a->summary, b->summary) == 0, "summary");
	need(a->draining == b->draining, "state");
	need(memcmp(a->size, b->size, sizeof(a->size)) == 0, "size");
	need(a->transport_count == b->transport_count, "transports");
	need(a->pool_count >= b->pool_count, "pools");
	for (unsigned int i = 0; i < b->pool_count; i++)
		need(strcmp(a->pools[i].name, b->pools[i].name) == 0 &&
			     a->pools[i].pages == b->pools[i].pages,
		     "a pool");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct record a, b;
	char endpoint[LINK_ENDPOINT_MAX], made[DIRECTORY_RECORD_MAX];
	char *text = malloc(size + 1);

	need(text, "no memory");
	memcpy(text, data, size);
	text[size] = '\0';
	if (record_read(text, &a) < 0) {
		need(err_last()->code == ERR_PROTO, "another code than EPROTO");
	} else {
		need(endpoint_check(a.endpoint) == 0, "an endpoint");
		record_dial(&a, endpoint);
		need(strlen(endpoint) < LINK_ENDPOINT_MAX, "a long endpoint");
		if (record_make(&a, made) == 0) {
			need(record_read(made, &b) == 0, "it cannot be read again");
			same(&a, &b);
		} else {
			/* what was short by \u or numbers may be long as it is written */
			need(err_last()->code == ERR_TOOBIG, "it cannot be made");
		}
	}
	err_clear();
	free(text);
	return 0;
}
