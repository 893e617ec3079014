/* SPDX-License-Identifier: Apache-2.0 */
/*
 * grant: a secret with limits, which gives others access to a session's memory: to some
 * of its regions, for reading only, for some time, by one daemon. The session's own
 * secret, which only its engine receives, has no limits.
 *
 * Limits are checked when an operation starts: an attachment, a list, a transfer, a
 * notification. An operation that has started completes.
 */
#ifndef KVD_GRANT_H
#define KVD_GRANT_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/account.h"
#include "daemon/base/list.h"
#include "daemon/link/link.h"

#define GRANTS_MAX 256u /* of a session */
#define GRANT_REGIONS_MAX 4096u

struct peer;
struct xfer_session;

struct grant {
	struct list link;	 /* in xs->grants, oldest first */
	struct xfer_session *xs; /* NULL: revoked */
	unsigned int refs;
	uint64_t id;
	uint8_t secret[16];
	bool write;
	uint64_t until_ns;	  /* 0: as long as the session */
	char peer[LINK_USER_MAX]; /* name in the allow-list; "": any */
	uint64_t *regions; /* ascending, may be empty; NULL: all, including future ones */
	size_t region_count;
	struct charge charge;
};

struct grant_args {
	uint64_t *regions; /* taken */
	size_t region_count;
	bool write;
	uint64_t ttl_ns; /* 0: none */
	const char *peer;
};
/* ERR_LIMIT, ERR_NOMEM. */
int grant_new(struct xfer_session *xs, const struct grant_args *args,
	      struct grant **grant_p);
void grant_ref(struct grant *grant); /* NULL is fine in both */
void grant_unref(struct grant *grant);
/* Add these regions, or (NULL) all. ERR_LIMIT: more than GRANT_REGIONS_MAX. */
int grant_extend(struct grant *grant, const uint64_t *regions, size_t count);
/* It gives no access any more. */
void grant_revoke(struct grant *grant);
struct grant *grant_find(struct xfer_session *xs, uint64_t id); /* NULL: raised */

/* Does the secret give this peer access to the session, and (outcome) by which grant?
 * NULL: by its own secret. ERR_AUTH, and *grant_p is NULL. */
int grant_check(struct xfer_session *xs, const struct peer *peer,
		const uint8_t secret[16], struct grant **grant_p);
/* Does it give any access to this region now? */
bool grant_covers(const struct grant *grant, uint64_t region, uint64_t now_ns);
/* May the holder write there (or read)? NULL is fine. ERR_PERM. */
int grant_allows(const struct grant *grant, uint64_t region, bool write);

#endif
