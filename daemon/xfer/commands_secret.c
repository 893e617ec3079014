/* SPDX-License-Identifier: Apache-2.0 */
/*
 * secret.create, .extend, .revoke: access of other sessions to a session's memory
 * (grant.h).
 *
 * The bytes of a secret appear only in the reply of secret.create; later commands use its
 * number. If the reply cannot be sent, the secret is revoked at once. Regions are those
 * of the session that are registered at that moment. Numbers are never reused, so a
 * region unregistered later grants no access.
 */
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "proto/out.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/xfer/commands_xfer.h"
#include "daemon/xfer/grant.h"
#include "daemon/xfer/xfer_impl.h"
#include "proto/json.h"

#define TTL_MS_MAX INT64_C(86400000) /* a day */

static const char *const access_names[] = {"read", "read-write", NULL};

struct create_args {
	const cJSON *regions;
	int access;
	uint32_t ttl_ms;
	const char *peer;
};

static int parse_regions(struct request *req, const cJSON *json, struct grant_args *args)
{
	size_t count = (size_t)cJSON_GetArraySize(json), n = 0;
	cleanup_free uint64_t *regions = NULL;
	const cJSON *item;

	if (!json)
		return 0;
	regions = mem_calloc(count, sizeof(*regions));
	if (!regions)
		return err_pass(-ENOMEM);
	cJSON_ArrayForEach(item, json) {
		double number = cJSON_IsNumber(item) ? item->valuedouble : -1;

		if (!(number >= 0 && number <= (double)JSON_INT_MAX) ||
		    (double)(uint64_t)number != number)
			return err_raise(ERR_INVAL,
					 "regions[%zu]: must be a number from "
					 "region.register",
					 n);
		regions[n] = (uint64_t)number;
		if (!region_find(req->session, regions[n]))
			return err_prefix(-ENOENT, "regions[%zu]", n);
		n++;
	}
	args->regions = mem_steal(regions);
	args->region_count = count;
	return 0;
}

static int run_create(struct request *req)
{
	const struct create_args *in = request_args(req);
	struct grant_args args = {.write = in->access == 1,
				  .ttl_ns = in->ttl_ms * LOOP_NS_PER_MS,
				  .peer = in->peer};
	struct xfer_session *xs = xfer_session_of(req->session);
	struct grant *grant;
	struct reply reply;
	struct text *out;
	int r = xs ? parse_regions(req, in->regions, &args) : -ENOMEM;

	if (r >= 0)
		r = grant_new(xs, &args, &grant);
	if (r < 0)
		return err_pass(r);
	out = reply_begin(&reply, req);
	out_number(out, "grant", grant->id);
	out_id(out, "session", req->session->epoch);
	out_hex(out, "secret", grant->secret, sizeof(grant->secret));
	r = reply_try(&reply);
	if (r < 0) /* it is unknown to any client */
		grant_revoke(grant);
	return r < 0 ? err_pass(r) : 0;
}

struct extend_args {
	uint64_t grant;
	const cJSON *regions;
};

static int run_extend(struct request *req)
{
	const struct extend_args *in = request_args(req);
	struct xfer_session *xs = xfer_session_of(req->session);
	struct grant *grant = xs ? grant_find(xs, in->grant) : NULL;
	struct grant_args args = {0};
	int r = grant ? parse_regions(req, in->regions, &args) : xs ? -ENOENT : -ENOMEM;

	if (r >= 0)
		r = grant_extend(grant, args.regions, args.region_count);
	mem_free(args.regions);
	return r < 0 ? err_pass(r) : request_reply(req);
}

struct revoke_args {
	uint64_t grant;
};

static int run_revoke(struct request *req)
{
	const struct revoke_args *args = request_args(req);
	struct xfer_session *xs = xfer_session_of(req->session);
	struct grant *grant = xs ? grant_find(xs, args->grant) : NULL;

	if (!grant)
		return err_pass(xs ? -ENOENT : -ENOMEM);
	grant_revoke(grant);
	return request_reply(req);
}

static const struct field create_fields[] = {
	F_ARRAY("regions", create_args, regions, OPTIONAL, GRANT_REGIONS_MAX,
		"Regions of this session that the secret gives access to; default: "
		"all, including later ones; []: none yet"),
	F_CHOICE("access", create_args, access, DEFAULT(0), access_names,
		 "read or read-write; default: read"),
	F_INT("ttl_ms", create_args, ttl_ms, OPTIONAL, 1, TTL_MS_MAX,
	      "Milliseconds for which new operations may start; default: while the "
	      "session exists"),
	F_STR("peer", create_args, peer, OPTIONAL, LINK_USER_MAX - 1,
	      "Name in curve_allow_file of the only daemon that may use the secret; "
	      "default: any"),
	F_END,
};
static const struct field extend_fields[] = {
	F_ID("grant", extend_args, grant, REQUIRED, "Number from secret.create"),
	F_ARRAY("regions", extend_args, regions, OPTIONAL, GRANT_REGIONS_MAX,
		"Regions to add; default: all, including later ones"),
	F_END,
};
static const struct field revoke_fields[] = {
	F_ID("grant", revoke_args, grant, REQUIRED, "Number from secret.create"),
	F_END,
};

const struct command secret_commands[] = {
	{"secret.create", "Create a secret with limited access, for peer.attach",
	 create_fields, 0, run_create,
	 "grant (its number), session (the epoch), secret. At most 256 per session; "
	 "expired ones are replaced"},
	{"secret.extend", "Add regions to a secret", extend_fields, 0, run_extend,
	 "nothing"},
	{"secret.revoke", "Revoke a secret: no new operation may use it", revoke_fields,
	 0, run_revoke, "nothing; operations in progress finish"},
	{.name = NULL},
};
