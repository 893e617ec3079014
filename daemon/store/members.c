/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/members.h"

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/link/link.h"

struct member {
	char endpoint[LINK_ENDPOINT_MAX];
	uint64_t hash;
};

struct members {
	struct member list[MEMBERS_MAX];
	unsigned int count;
	void (*on_change)(void *arg);
	void *arg;
};

static bool members_have(const struct members *members, const char *endpoint)
{
	for (unsigned int i = 0; i < members->count; i++) {
		if (strcmp(members->list[i].endpoint, endpoint) == 0)
			return true;
	}
	return false;
}

/* In canonical form: all daemons must divide the chunks alike. */
static void members_add(struct members *members, const char *word, size_t len)
{
	char text[LINK_ENDPOINT_MAX + 1], endpoint[LINK_ENDPOINT_MAX];
	struct member *member = &members->list[members->count];

	snprintf(text, sizeof(text), "%.*s", (int)len, word);
	if (members->count == MEMBERS_MAX || endpoint_canon(text, endpoint) < 0 ||
	    members_have(members, endpoint)) {
		log_warn("store", NULL, "ignored an entry of chunk_index",
			 "endpoint=\"%s\" limit=%u why=\"duplicate, over the limit, or "
			 "not tcp://HOST:PORT\"",
			 text, MEMBERS_MAX);
		err_clear();
		return;
	}
	memcpy(member->endpoint, endpoint, sizeof(member->endpoint));
	member->hash = home_mix(XXH3_64bits(endpoint, strlen(endpoint)));
	members->count++;
}

static void members_read(struct members *members, const char *words)
{
	size_t len;

	members->count = 0;
	for (words += strspn(words, " ,"); *words; words += strspn(words, " ,")) {
		len = strcspn(words, " ,");
		members_add(members, words, len);
		words += len;
	}
}

int members_new(const char *words, void (*on_change)(void *arg), void *arg,
		struct members **members_p)
{
	struct members *members = mem_zalloc(sizeof(*members));

	*members_p = members;
	if (!members)
		return err_pass(-ENOMEM);
	members->on_change = on_change;
	members->arg = arg;
	members_read(members, words);
	return 0;
}

void members_free(struct members *members)
{
	mem_free(members);
}

void members_set(struct members *members, const char *words)
{
	unsigned int same = 0, before = members->count;
	uint64_t hashes[MEMBERS_MAX];

	for (unsigned int i = 0; i < before; i++)
		hashes[i] = members->list[i].hash;
	members_read(members, words);
	for (unsigned int i = 0; i < members->count && i < before; i++)
		same += members->list[i].hash == hashes[i];
	if (members->count != before || same != before)
		members->on_change(members->arg);
}

unsigned int members_count(const struct members *members)
{
	return members->count;
}

const char *members_endpoint(const struct members *members, unsigned int i)
{
	assert(i < members->count);
	return members->list[i].endpoint;
}

unsigned int members_home(const struct members *members, const struct home_key *key)
{
	uint64_t mixed = home_key_mix(key), most = 0;
	unsigned int home = 0;

	assert(members->count);
	for (unsigned int i = 0; i < members->count; i++) {
		uint64_t score = home_mix(mixed ^ members->list[i].hash);

		if (score < most)
			continue;
		most = score;
		home = i;
	}
	return home;
}
