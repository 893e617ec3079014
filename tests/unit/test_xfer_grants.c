/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Secrets with limits: regions, access, time, one daemon; each is checked when an
 * operation starts, and a started one completes. In-process cluster, virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/handshake/handshake.h"
#include "daemon/session/session.h"
#include "daemon/xfer/grant.h"
#include "proto/kvd_status.h"
#include "tests/lib/xfer_pair.h"

static int setup_users(void **state)
{
	static const char *const users[] = {"anna", "bert"};
	int r;

	cluster_users(users);
	r = pair_setup(state);
	cluster_users(NULL);
	return r;
}

struct secret {
	uint64_t grant;
	char text[33];
};

/* `bounds`: members of secret.create, with a comma in front. */
static struct secret create(struct pair *p, const char *bounds)
{
	cJSON *answer = cluster_call(&p->c, p->you, "{'cmd':'secret.create'%s}", bounds);
	const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(answer, "secret"));
	struct secret secret = {0};

	if (!text)
		fail_msg("no secret in %s", cJSON_PrintUnformatted(answer));
	snprintf(secret.text, sizeof(secret.text), "%s", text);
	secret.grant = cluster_number(answer, "grant");
	return secret;
}

#define ATTACH "{'cmd':'peer.attach','endpoint':'%s','session':'%llu','secret':'%s'}"

/* From now on lists of theirs are by this secret. */
static void attach_by(struct pair *p, const struct secret *secret)
{
	p->attach = cluster_number(
		cluster_call(&p->c, p->me, ATTACH, p->c.nodes[1].endpoint,
			     (unsigned long long)p->you->epoch, secret->text),
		"attach");
}

static void not_attached(struct pair *p, const struct secret *secret)
{
	cluster_refused(&p->c, p->me, "EAUTH", ATTACH, p->c.nodes[1].endpoint,
			(unsigned long long)p->you->epoch, secret->text);
}

static void reading_secret_does_not_write(void **state)
{
	struct pair *p = *state;
	struct secret secret = create(p, ""); /* read is the default */
	uint64_t local = pair_grid(p, true), remote;

	memset(p->yours.base, 7, p->yours.bytes);
	attach_by(p, &secret);
	remote = pair_grid(p, false);
	pair_fails(p, pair_start(p, "write", local, remote, NULL), "EPERM",
		   "access is read");
	for (uint64_t i = 0; i < p->yours.bytes; i++)
		assert_int_equal(p->yours.base[i], 7);
	pair_until(p, pair_start(p, "read", local, remote, NULL), KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

static void writing_secret_writes(void **state)
{
	struct pair *p = *state;
	struct secret secret = create(p, ",'access':'read-write'");
	uint64_t local = pair_grid(p, true);

	attach_by(p, &secret);
	pair_until(p, pair_start(p, "write", local, pair_grid(p, false), NULL),
		   KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

static void secret_of_another_region_is_refused(void **state)
{
	struct pair *p = *state;
	struct cache more = p->yours;
	struct secret secret;
	uint64_t local = pair_grid(p, true), first = p->yours.region;
	char bounds[80];

	cluster_cache(&p->c, p->you, "more", 0, &more);
	snprintf(bounds, sizeof(bounds), ",'access':'read-write','regions':[%llu]",
		 (unsigned long long)more.region);
	secret = create(p, bounds);
	attach_by(p, &secret);
	pair_fails(p, pair_start(p, "write", local, pair_grid(p, false), NULL), "EPERM",
		   "does not include region");
	pair_fails(p, pair_start(p, "read", local, pair_grid(p, false), NULL), "EPERM",
		   "does not include region");
	snprintf(bounds, sizeof(bounds), ",'access':'read-write','regions':[%llu,%llu]",
		 (unsigned long long)more.region, (unsigned long long)first);
	cluster_ok(&p->c, p->you, "{'cmd':'secret.extend','grant':%llu,'regions':[%llu]}",
		   (unsigned long long)secret.grant, (unsigned long long)first);
	pair_until(p, pair_start(p, "write", local, pair_grid(p, false), NULL),
		   KVD_SUCCESS);
	secret = create(p, bounds);
	attach_by(p, &secret);
	pair_until(p, pair_start(p, "write", local, pair_grid(p, false), NULL),
		   KVD_SUCCESS);
	cluster_engine_dies(&p->c, p->you);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cache_close(&more);
}

static void secret_expired_is_refused(void **state)
{
	struct pair *p = *state;
	struct secret secret = create(p, ",'access':'read-write','ttl_ms':2000");
	uint64_t local = pair_grid(p, true), remote, running, x;

	attach_by(p, &secret);
	remote = pair_grid(p, false);
	pair_until(p, pair_start(p, "write", local, remote, NULL), KVD_SUCCESS);
	/* a running one then completes */
	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 1200 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 1500 * LOOP_NS_PER_MS;
	running = pair_start(p, "write", local, remote, NULL);
	cluster_run(&p->c, 2010 * LOOP_NS_PER_MS);
	assert_int_equal(pair_state(p, running), KVD_TRANSFERRING);
	x = pair_start(p, "write", local, remote, NULL);
	cluster_run(&p->c, 500 * LOOP_NS_PER_S);
	pair_fails(p, x, "EAUTH", "secret: expired");
	pair_until(p, running, KVD_SUCCESS);
	not_attached(p, &secret);
}

static void secret_revoked_is_refused(void **state)
{
	struct pair *p = *state;
	struct secret secret = create(p, ",'access':'read-write'"),
		      other = create(p, ",'access':'read-write'");
	uint64_t local = pair_grid(p, true), remote;

	attach_by(p, &secret);
	remote = pair_grid(p, false);
	pair_until(p, pair_start(p, "write", local, remote, NULL), KVD_SUCCESS);
	cluster_refused(&p->c, p->me, "ENOTFOUND", "{'cmd':'secret.revoke','grant':%llu}",
			(unsigned long long)secret.grant); /* not its own */
	cluster_ok(&p->c, p->you, "{'cmd':'secret.revoke','grant':%llu}",
		   (unsigned long long)secret.grant);
	pair_fails(p, pair_start(p, "write", local, remote, NULL), "EAUTH", "no session");
	not_attached(p, &secret);
	attach_by(p, &other);
	pair_until(p, pair_start(p, "write", local, pair_grid(p, false), NULL),
		   KVD_SUCCESS);
}

static void secret_is_valid_for_named_daemon_only(void **state)
{
	struct pair *p = *state;
	struct secret right = create(p, ",'peer':'anna'"),
		      wrong = create(p, ",'peer':'carl'");

	not_attached(p, &wrong);
	attach_by(p, &right);
	pair_until(p,
		   pair_start(p, "read", pair_grid(p, true), pair_grid(p, false), NULL),
		   KVD_SUCCESS);
}

static void bounds_are_checked(void **state)
{
	static const char *const wrong[] = {
		"'regions':[[]]",    "'regions':[99]", "'regions':['x']",
		"'regions':[0.5]",   "'access':'all'", "'ttl_ms':0",
		"'ttl_ms':86400001", "'regions':7",    "'peer':7",
	};
	struct pair *p = *state;
	cJSON *answer;

	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		answer = cluster_call(&p->c, p->you, "{'cmd':'secret.create',%s}",
				      wrong[i]);
		if (!cJSON_GetObjectItem(answer, "code") &&
		    !cJSON_GetObjectItem(answer, "error"))
			fail_msg("taken: %s", wrong[i]);
		cJSON_Delete(answer);
	}
}

static void secrets_of_a_session_are_bounded(void **state)
{
	struct pair *p = *state;

	create(p, ",'ttl_ms':1000");
	for (unsigned int i = 1; i < GRANTS_MAX; i++)
		create(p, "");
	cluster_refused(&p->c, p->you, "ELIMIT", "{'cmd':'secret.create'}");
	cluster_run(&p->c, 2 * LOOP_NS_PER_S);
	create(p, ""); /* in the place of the one that is over */
	cluster_refused(&p->c, p->you, "ELIMIT", "{'cmd':'secret.create'}");
}

/* The regions of a session that were sent to node 0's daemon. */
static const struct remote_pool *told_of(struct pair *p, const struct session *session)
{
	struct remote_pool *pool;
	struct remote *remote;

	list_foreach(remote, handshake_remotes(p->me->kvd->handshake), link) {
		pool = handshake_pool_by_id(remote, session->epoch);
		if (pool && pool->is_session)
			return pool;
	}
	return NULL;
}

static void tells_only(struct pair *p, const struct session *owner, uint32_t count,
		       uint64_t a, uint64_t b)
{
	const struct remote_pool *pool;

	cluster_run(&p->c, LOOP_NS_PER_S);
	pool = told_of(p, owner);
	assert_non_null(pool);
	assert_int_equal(pool->region_count, count);
	for (uint32_t i = 0; i < count; i++)
		if (pool->regions[i].id != a && pool->regions[i].id != b)
			fail_msg("told of region %llu",
				 (unsigned long long)pool->regions[i].id);
}

/* A secret with regions: no key of another region is sent, for any change of the
 * session's regions meanwhile. */
static void keys_of_other_regions_are_not_sent(void **state)
{
	struct pair *p = *state;
	struct session *yours = p->you;
	struct cache a = p->yours, b = p->yours, later = p->yours;
	struct secret first, whole;
	char bounds[80];

	p->you = cluster_engine(&p->c, 1, "owner");
	cluster_cache(&p->c, p->you, "a", 0, &a);
	cluster_cache(&p->c, p->you, "b", 0, &b);
	snprintf(bounds, sizeof(bounds), ",'regions':[%llu]",
		 (unsigned long long)a.region);
	first = create(p, bounds);
	attach_by(p, &first);
	tells_only(p, p->you, 1, a.region, 0);
	cluster_cache(&p->c, p->you, "later", 0, &later); /* all is sent again */
	tells_only(p, p->you, 1, a.region, 0);
	cluster_refused(&p->c, p->me, "ENOTFOUND",
			"{'cmd':'dlist.prep','peer':%llu,'descs':[['%llu',256]]}",
			(unsigned long long)p->attach,
			(unsigned long long)(uintptr_t)b.base);
	cluster_ok(&p->c, p->you, "{'cmd':'secret.extend','grant':%llu,'regions':[%llu]}",
		   (unsigned long long)first.grant, (unsigned long long)b.region);
	tells_only(p, p->you, 2, a.region, b.region);
	cluster_ok(&p->c, p->you, "{'cmd':'secret.revoke','grant':%llu}",
		   (unsigned long long)first.grant);
	tells_only(p, p->you, 0, 0, 0);
	whole = create(p, "");
	attach_by(p, &whole);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(told_of(p, p->you)->region_count, 3);
	cluster_engine_dies(&p->c, p->you);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cache_close(&a);
	cache_close(&b);
	cache_close(&later);
	p->you = yours;
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, pair_setup, pair_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(reading_secret_does_not_write),
		CASE(writing_secret_writes),
		CASE(secret_of_another_region_is_refused),
		CASE(secret_expired_is_refused),
		CASE(secret_revoked_is_refused),
		cmocka_unit_test_setup_teardown(secret_is_valid_for_named_daemon_only,
						setup_users, pair_teardown),
		CASE(keys_of_other_regions_are_not_sent),
		CASE(bounds_are_checked),
		CASE(secrets_of_a_session_are_bounded),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
