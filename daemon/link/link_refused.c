/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/link/link_refused.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "daemon/loop/loop.h"

#define LOG_EVERY_NS (60 * LOOP_NS_PER_S)

static struct link_refused *refused_find(struct link_refusals *table, const char *key,
					 const char *address, const char *why)
{
	for (unsigned int i = 0; i < table->count; i++) {
		struct link_refused *entry = &table->entries[i];

		if (strcmp(entry->key, key) == 0 &&
		    strcmp(entry->address, address) == 0 && strcmp(entry->why, why) == 0)
			return entry;
	}
	return NULL;
}

/* A free entry, else the one that was inactive longest. */
static struct link_refused *refused_slot(struct link_refusals *table)
{
	struct link_refused *oldest = &table->entries[0];

	if (table->count < LINK_REFUSED_MAX)
		return &table->entries[table->count++];
	for (unsigned int i = 1; i < LINK_REFUSED_MAX; i++) {
		if (table->entries[i].last_ns < oldest->last_ns)
			oldest = &table->entries[i];
	}
	return oldest;
}

struct link_refused *link_refused_note(struct link_refusals *table, uint64_t now_ns,
				       const char *key, const char *address,
				       const char *why, bool *log_p)
{
	struct link_refused *entry;

	assert(key && address && why);
	entry = refused_find(table, key, address, why);
	if (!entry) {
		entry = refused_slot(table);
		*entry = (struct link_refused){.why = why, .first_ns = now_ns};
		snprintf(entry->key, sizeof(entry->key), "%s", key);
		snprintf(entry->address, sizeof(entry->address), "%.63s", address);
	}
	*log_p = !entry->count || now_ns - entry->logged_ns >= LOG_EVERY_NS;
	if (*log_p)
		entry->logged_ns = now_ns;
	entry->count++;
	entry->last_ns = now_ns;
	return entry;
}
