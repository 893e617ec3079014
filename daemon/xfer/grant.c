/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A secret is compared with the session's own and its grants, each in constant time; the
 * duration of the search reveals their number, not their values. A caller without a valid
 * secret learns neither that nor whether the session exists.
 *
 * An operation that started by a grant keeps a reference, so that it can be revoked at
 * any time: then it is in no list, and is freed when the last request by it has ended.
 */
#include "daemon/xfer/grant.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/session/session.h"
#include "daemon/xfer/xfer_impl.h"

static struct loop *loop_of(const struct xfer_session *xs)
{
	return xs->xfers->kvd->loop;
}

static bool is_over(const struct grant *grant, uint64_t now_ns)
{
	return grant->until_ns && now_ns >= grant->until_ns;
}

/* The oldest expired one is replaced. */
static int make_place(struct xfer_session *xs)
{
	struct grant *grant;

	if (xs->grant_count < GRANTS_MAX)
		return 0;
	list_foreach(grant, &xs->grants, link) {
		if (!is_over(grant, loop_now_ns(loop_of(xs))))
			continue;
		grant_revoke(grant);
		return 0;
	}
	return err_raise(ERR_LIMIT,
			 "%u secrets in the session (limit); revoke one "
			 "(secret.revoke), or set a ttl_ms",
			 GRANTS_MAX);
}

static int by_number(const void *a, const void *b)
{
	const uint64_t *x = a, *y = b;

	return *x < *y ? -1 : *x > *y;
}

int grant_new(struct xfer_session *xs, const struct grant_args *args,
	      struct grant **grant_p)
{
	struct grant *grant;
	int r = make_place(xs);

	grant = r < 0 ? NULL : mem_zalloc(sizeof(*grant));
	if (r >= 0)
		r = grant ? charge_take(&grant->charge, xs->session->account,
					ACCOUNT_ATTACHES,
					sizeof(*grant) + args->region_count *
								 sizeof(*args->regions))
			  : -ENOMEM;
	if (r < 0) {
		mem_free(grant);
		mem_free(args->regions);
		return err_pass(r);
	}
	grant->refs = 1;
	grant->xs = xs;
	grant->id = ++xs->session->next_id;
	grant->write = args->write;
	grant->regions = args->regions;
	grant->region_count = args->region_count;
	if (grant->regions)
		qsort(grant->regions, grant->region_count, sizeof(*grant->regions),
		      by_number);
	if (args->ttl_ns)
		grant->until_ns = loop_now_ns(loop_of(xs)) + args->ttl_ns;
	snprintf(grant->peer, sizeof(grant->peer), "%s", args->peer ? args->peer : "");
	loop_random(loop_of(xs), grant->secret, sizeof(grant->secret));
	list_push_back(&xs->grants, &grant->link);
	xs->grant_count++;
	*grant_p = grant;
	return 0;
}

static int grant_add(struct grant *grant, const uint64_t *regions, size_t count)
{
	uint64_t *all;
	int r;

	if (!regions) {
		mem_free(grant->regions);
		grant->regions = NULL;
		grant->region_count = 0;
		return 0;
	}
	r = charge_more(&grant->charge, count * sizeof(*all));
	if (r < 0)
		return err_pass(r);
	all = mem_regrow(grant->regions, grant->region_count + count, sizeof(*all));
	if (!all) {
		charge_less(&grant->charge, count * sizeof(*all));
		return err_pass(-ENOMEM);
	}
	grant->regions = all;
	for (size_t i = 0; i < count; i++) {
		if (bsearch(&regions[i], all, grant->region_count, sizeof(*all),
			    by_number))
			continue;
		if (grant->region_count >= GRANT_REGIONS_MAX)
			return err_raise(ERR_LIMIT,
					 "regions: more than %u; omit regions to "
					 "include all",
					 GRANT_REGIONS_MAX);
		all[grant->region_count++] = regions[i];
		qsort(all, grant->region_count, sizeof(*all), by_number);
	}
	return 0;
}

int grant_extend(struct grant *grant, const uint64_t *regions, size_t count)
{
	int r;

	if (!grant->regions)
		return 0;
	r = grant_add(grant, regions, count);
	shares_regrant(grant->xs, grant);
	return err_pass(r);
}

void grant_ref(struct grant *grant)
{
	if (grant)
		grant->refs++;
}

void grant_unref(struct grant *grant)
{
	if (!grant || --grant->refs > 0)
		return;
	charge_drop(&grant->charge);
	mem_free(grant->regions);
	explicit_bzero(grant, sizeof(*grant));
	mem_free(grant);
}

void grant_revoke(struct grant *grant)
{
	struct xfer_session *xs = mem_steal(grant->xs);

	assert(xs && xs->grant_count > 0);
	xs->grant_count--;
	list_remove(&grant->link);
	shares_regrant(xs, grant);
	grant_unref(grant);
}

struct grant *grant_find(struct xfer_session *xs, uint64_t id)
{
	struct grant *grant;

	list_foreach(grant, &xs->grants, link) {
		if (grant->id == id)
			return grant;
	}
	err_raise(ERR_NOTFOUND, "grant: no %llu in this session", (unsigned long long)id);
	return NULL;
}

static int admit(const struct grant *grant, const struct peer *peer, uint64_t now_ns)
{
	if (is_over(grant, now_ns))
		return err_raise(ERR_AUTH,
				 "secret: expired %llu ms ago (ttl_ms); the session's "
				 "engine must create a new one",
				 (unsigned long long)((now_ns - grant->until_ns) /
						      LOOP_NS_PER_MS));
	if (*grant->peer && strcmp(grant->peer, peer->known_as) != 0)
		return err_raise(ERR_AUTH,
				 "secret: valid for daemon '%s' (peer), not for '%s'",
				 grant->peer, peer->known_as);
	return 0;
}

int grant_check(struct xfer_session *xs, const struct peer *peer,
		const uint8_t secret[16], struct grant **grant_p)
{
	const struct session *session = xs->session;
	struct grant *grant;
	int r;

	*grant_p = NULL;
	if (mem_equal(session->secret, secret, sizeof(session->secret)))
		return 0;
	list_foreach(grant, &xs->grants, link) {
		if (!mem_equal(grant->secret, secret, sizeof(grant->secret)))
			continue;
		r = admit(grant, peer, loop_now_ns(loop_of(xs)));
		*grant_p = r >= 0 ? grant : NULL;
		return err_pass(r);
	}
	return err_raise(ERR_AUTH, "no session %llu with this secret",
			 (unsigned long long)session->epoch);
}

static bool names(const struct grant *grant, uint64_t region)
{
	return !grant->regions || bsearch(&region, grant->regions, grant->region_count,
					  sizeof(region), by_number);
}

bool grant_covers(const struct grant *grant, uint64_t region, uint64_t now_ns)
{
	return grant->xs && !is_over(grant, now_ns) && names(grant, region);
}

int grant_allows(const struct grant *grant, uint64_t region, bool write)
{
	if (!grant)
		return 0;
	if (write && !grant->write)
		return err_raise(ERR_PERM,
				 "secret: its access is read; writing requires access "
				 "read-write");
	if (names(grant, region))
		return 0;
	return err_raise(ERR_PERM, "secret: does not include region %llu (regions)",
			 (unsigned long long)region);
}
