/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transfers are given as libkvd gives them: entries of the submission ring, each in a
 * slot of the engine's own. They go by the socket (xfer.submit), so a test needs no
 * shared memory, and is answered when the entry was taken. What is refused shows in the
 * slot, and its text in xfer.state.
 */
#include "tests/lib/xfer_pair.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/hex.h"
#include "daemon/session/status.h"
#include "daemon/request/ring.h"
#include "proto/base64.h"
#include "proto/kvd_status.h"

uint64_t pair_attach(struct pair *p, struct session *from, struct session *to,
		     unsigned int node)
{
	char secret[33];

	hex_write(to->secret, 16, secret);
	return cluster_number(
		cluster_call(&p->c, from,
			     "{'cmd':'peer.attach','endpoint':'%s','session':'%llu',"
			     "'secret':'%s'}",
			     p->c.nodes[node].endpoint, (unsigned long long)to->epoch,
			     secret),
		"attach");
}

static void setup_on(struct pair *p, unsigned int target)
{
	cluster_new(&p->c, 1, 2);
	p->me = cluster_engine(&p->c, 0, "me");
	p->you = cluster_engine(&p->c, target, "you");
	p->mine = p->yours = (struct cache){.layers = 2,
					    .pages = 64,
					    .page_tokens = 1,
					    .units = 1,
					    .total_units = 1,
					    .unit_bytes = 256};
	cluster_cache(&p->c, p->me, "mine", 0, &p->mine);
	cluster_cache(&p->c, p->you, "yours", 0, &p->yours);
	for (uint64_t i = 0; i < p->mine.bytes; i++)
		p->mine.base[i] = (uint8_t)(1 + i % 251);
	p->attach = pair_attach(p, p->me, p->you, target);
}

int pair_setup(void **state)
{
	struct pair *p = calloc(1, sizeof(*p));

	setup_on(p, 1);
	*state = p;
	return 0;
}

int pair_setup_one_daemon(void **state)
{
	struct pair *p = calloc(1, sizeof(*p));

	setup_on(p, 0);
	*state = p;
	return 0;
}

int pair_teardown(void **state)
{
	struct pair *p = *state;

	cluster_free(&p->c);
	cache_close(&p->mine);
	cache_close(&p->yours);
	free(p);
	return 0;
}

uint64_t pair_rows(struct pair *p, bool local, uint64_t count)
{
	const struct cache *k = local ? &p->mine : &p->yours;
	char peer[40] = "";

	if (!local)
		snprintf(peer, sizeof(peer), "'peer':%llu,",
			 (unsigned long long)p->attach);
	return cluster_number(
		cluster_call(&p->c, p->me,
			     "{'cmd':'dlist.prep',%s'descs':[['%llu',256,256,%llu]]}",
			     peer, (unsigned long long)(uintptr_t)k->base,
			     (unsigned long long)count),
		"dlist");
}

/* A grid over the whole cache: 256 rows of 256 bytes. */
uint64_t pair_grid(struct pair *p, bool local)
{
	return pair_rows(p, local, p->mine.bytes / 256);
}

static bool has_run(void *arg)
{
	const struct pair *p = arg;

	return !ring_of(p->me)->work;
}

char *pair_line(const struct kvd_ring_entry *entry, const void *data, size_t bytes)
{
	char text[BASE64_CHARS(sizeof(*entry)) + 1], *line = NULL;
	char *payload = calloc(1, BASE64_CHARS(bytes) + 1);

	base64_encode(entry, sizeof(*entry), text);
	base64_encode(data, bytes, payload);
	assert_true(asprintf(&line,
			     "{\"cmd\":\"xfer.submit\",\"entry\":\"%s\",\"data\":\"%s\"}",
			     text, payload) > 0);
	free(payload);
	return line;
}

void pair_submit(struct pair *p, const struct kvd_ring_entry *entry, const void *data,
		 size_t bytes)
{
	char *line = pair_line(entry, data, bytes);

	cluster_ok(&p->c, p->me, "%s", line);
	free(line);
	cluster_until(&p->c, has_run, p, "the entry's work is done");
}

uint64_t pair_start(struct pair *p, const char *op, uint64_t local, uint64_t remote,
		    const struct pair_args *args)
{
	static const struct pair_args none;
	struct kvd_ring_entry e = {.op = KVD_RING_XFER,
				   .flags = KVD_RING_POSTS,
				   .slot = SESSION_SLOTS + p->slots++,
				   .gen = 1,
				   .a = local,
				   .b = remote};
	uint8_t *data;
	size_t at = 0;

	args = args ? args : &none;
	e.n0 = args->count;
	e.n1 = args->remote_count ? args->remote_count : args->count;
	e.bytes = args->notif ? (uint32_t)strlen(args->notif) : 0;
	e.flags |= strcmp(op, "write") == 0 ? KVD_RING_WRITES : 0;
	e.flags |= args->notif ? KVD_RING_NOTIFIES : 0;
	data = calloc(1, (e.n0 + e.n1) * sizeof(uint32_t) + e.bytes + 1);
	for (uint32_t i = 0; i < e.n0; i++, at += sizeof(uint32_t))
		memcpy(data + at, &args->local[i], sizeof(uint32_t));
	for (uint32_t i = 0; i < e.n1; i++, at += sizeof(uint32_t))
		memcpy(data + at, &args->remote[i], sizeof(uint32_t));
	memcpy(data + at, args->notif ? args->notif : "", e.bytes);
	pair_submit(p, &e, data, at + e.bytes);
	free(data);
	return KVD_RING_IDS + e.slot;
}

void pair_again(struct pair *p, uint64_t xfer, const char *notif)
{
	uint32_t gen = status_slot_gen(p->me->status, (uint32_t)(xfer - KVD_RING_IDS));
	struct kvd_ring_entry e = {.op = KVD_RING_POST,
				   .flags = notif ? KVD_RING_NOTIFIES : 0,
				   .gen = kvd_ring_next_gen(gen),
				   .a = xfer,
				   .bytes = notif ? (uint32_t)strlen(notif) : 0};

	pair_submit(p, &e, notif, e.bytes);
}

void pair_give(struct pair *p, enum kvd_ring_op op, uint64_t object)
{
	pair_submit(p, &(struct kvd_ring_entry){.op = op, .a = object}, NULL, 0);
}

void pair_notify(struct pair *p, const void *data, size_t bytes)
{
	struct kvd_ring_entry e = {
		.op = KVD_RING_NOTIFY, .a = p->attach, .bytes = (uint32_t)bytes};

	pair_submit(p, &e, data, bytes);
}

unsigned int pair_state(struct pair *p, uint64_t xfer)
{
	return (unsigned int)cluster_number(
		cluster_call(&p->c, p->me, "{'cmd':'xfer.state','xfer':%llu}",
			     (unsigned long long)xfer),
		"state");
}

void pair_until(struct pair *p, uint64_t xfer, unsigned int state)
{
	for (int i = 0; i < 1000 && pair_state(p, xfer) != state; i++)
		cluster_run(&p->c, LOOP_NS_PER_MS);
	assert_int_equal(pair_state(p, xfer), state);
}

void pair_fails(struct pair *p, uint64_t xfer, const char *code, const char *words)
{
	cJSON *answer, *error;

	pair_until(p, xfer, KVD_FAILED);
	answer = cluster_call(&p->c, p->me, "{'cmd':'xfer.state','xfer':%llu}",
			      (unsigned long long)xfer);
	error = cJSON_GetObjectItem(answer, "error");
	if (!error ||
	    strcmp(cJSON_GetStringValue(cJSON_GetObjectItem(error, "code")), code) != 0 ||
	    !strstr(cJSON_GetStringValue(cJSON_GetObjectItem(error, "message")), words))
		fail_msg("%s: not %s: %s", cJSON_PrintUnformatted(answer), code, words);
	cJSON_Delete(answer);
}

bool pair_row_is(const struct pair *p, unsigned int yours, unsigned int mine)
{
	return memcmp(p->yours.base + 256 * yours, p->mine.base + 256 * mine, 256) == 0;
}
