/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/metrics.h"

#include <stdio.h>
#include <string.h>

const struct metric_row metric_rows[] = {
#define METRIC_OF(id, kind, of, one, two, text, words) \
	{.name = (text),                               \
	 .help = (words),                              \
	 .type = METRIC_##kind,                        \
	 .unit = METRIC_##of,                          \
	 .label = {METRIC_BY_##one, METRIC_BY_##two},  \
	 .cell = METRIC_##id,                          \
	 .count = {METRIC_VALUES_##one, METRIC_VALUES_##two}},
	METRICS(METRIC_OF)
#undef METRIC_OF
#define METRIC_OF(id, of, begins, one, two, text, words)      \
	{.name = (text),                                      \
	 .help = (words),                                     \
	 .type = METRIC_HISTOGRAM,                            \
	 .unit = METRIC_##of,                                 \
	 .label = {METRIC_BY_##one, METRIC_BY_##two},         \
	 .cell = METRIC_##id,                                 \
	 .count = {METRIC_VALUES_##one, METRIC_VALUES_##two}, \
	 .first = (begins)},
		METRIC_HISTOGRAMS(METRIC_OF)
#undef METRIC_OF
};

const struct metric_label_row metric_labels[METRIC_BY_END] = {
#define METRIC_OF(id, values, first, second) [METRIC_BY_##id] = {{(first), (second)}},
	METRIC_LABELS(METRIC_OF)
#undef METRIC_OF
};

uint64_t metrics_sum(const struct metrics *m, unsigned int first, unsigned int last)
{
	uint64_t sum = 0;

	assert(first <= last && last < METRIC_END);
	for (unsigned int i = first; i <= last; i++)
		sum += metrics_get(m, i);
	return sum;
}

unsigned int metrics_peer(struct metrics *m, const char *name, const void *owner)
{
	unsigned int at = METRIC_PEER_OTHER;

	assert(*name && owner);
	for (unsigned int i = 0; i < METRIC_PEERS_MAX; i++) {
		const struct metric_peer *peer = &m->peers[i];

		if (strncmp(peer->name, name, sizeof(peer->name) - 1) == 0) {
			at = i;
			break;
		}
		if (!peer->owner &&
		    (at == METRIC_PEER_OTHER || peer->left < m->peers[at].left))
			at = i;
	}
	if (at == METRIC_PEER_OTHER) {
		m->peers_other = true;
		return at;
	}
	if (strncmp(m->peers[at].name, name, sizeof(m->peers[at].name) - 1) != 0) {
		/* the set now belongs to another peer */
		metrics_set(m, METRIC_AT(PEER_BYTES, at, METRIC_IN), 0);
		metrics_set(m, METRIC_AT(PEER_BYTES, at, METRIC_OUT), 0);
		metrics_set(m, METRIC_AT(PEER_LOST, at, 0), 0);
		snprintf(m->peers[at].name, sizeof(m->peers[at].name), "%s", name);
	}
	m->peers[at].owner = owner;
	return at;
}

void metrics_peer_left(struct metrics *m, unsigned int peer, const void *owner)
{
	if (peer >= METRIC_PEERS_MAX || m->peers[peer].owner != owner)
		return;
	m->peers[peer].owner = NULL;
	m->peers[peer].left = ++m->peers_left;
}
