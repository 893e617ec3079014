/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_refused: the recently refused peers: for the command `keys`, and so that a daemon
 * that retries forever costs one log line a minute. A fixed table; the entry that was
 * inactive longest is replaced.
 */
#ifndef KVD_LINK_REFUSED_H
#define KVD_LINK_REFUSED_H

#include <stdbool.h>
#include <stdint.h>

#define LINK_REFUSED_MAX 64u

struct link_refused {
	char key[41];	  /* Z85; "" = no key, or not known */
	char address[64]; /* "" = not known */
	const char *why;  /* static */
	uint64_t count, first_ns, last_ns, logged_ns;
};

struct link_refusals {
	struct link_refused entries[LINK_REFUSED_MAX];
	unsigned int count;
};

/* The entry, and whether it is time for a log line. `why` is a static text. */
struct link_refused *link_refused_note(struct link_refusals *table, uint64_t now_ns,
				       const char *key, const char *address,
				       const char *why, bool *log_p);

#endif
