/* SPDX-License-Identifier: Apache-2.0 */
/* keys: the CURVE keys that may connect, and refused connections. Public keys are not
 * secret. */
#include <errno.h>

#include "daemon/base/context.h"
#include "daemon/control/commands.h"
#include "daemon/request/commands.h"
#include "daemon/link/link.h"
#include "daemon/link/link_curve.h"
#include "daemon/link/link_keydir.h"
#include "daemon/link/link_refused.h"
#include "daemon/loop/loop.h"
#include "daemon/session/session.h"

struct allowed {
	cJSON *out;
	bool ok;
};

static void put_allowed(void *arg, const char *name, const char *key)
{
	struct allowed *allowed = arg;
	cJSON *one = allowed->ok ? cJSON_CreateObject() : NULL;

	allowed->ok = one && cJSON_AddItemToArray(allowed->out, one) &&
		      cJSON_AddStringToObject(one, "name", name) &&
		      cJSON_AddStringToObject(one, "key", key);
}

static bool put_refused(cJSON *out, const struct link_refused *entry, uint64_t now_ns)
{
	cJSON *one = cJSON_CreateObject();

	return one && cJSON_AddItemToArray(out, one) &&
	       cJSON_AddStringToObject(one, "address", entry->address) &&
	       cJSON_AddStringToObject(one, "key", entry->key) &&
	       cJSON_AddStringToObject(one, "why", entry->why) &&
	       cJSON_AddNumberToObject(one, "count", (double)entry->count) &&
	       cJSON_AddNumberToObject(
		       one, "first_ms",
		       (double)((now_ns - entry->first_ns) / LOOP_NS_PER_MS)) &&
	       cJSON_AddNumberToObject(
		       one, "last_ms",
		       (double)((now_ns - entry->last_ns) / LOOP_NS_PER_MS));
}

static int keys_run(struct request *req)
{
	struct link *link = req->kvd->link;
	uint64_t now_ns = loop_now_ns(req->kvd->loop);
	struct link_keys keys = {.public_key = "", .line = ""};
	cJSON *result = request_result(), *refused, *list;
	struct allowed allowed = {0};

	if (!result)
		return err_pass(-ENOMEM);
	if (link && link->ops->keys)
		link->ops->keys(link, &keys);
	allowed.ok = cJSON_AddStringToObject(result, "public_key", keys.public_key) &&
		     cJSON_AddStringToObject(result, "line", keys.line);
	allowed.out = cJSON_AddArrayToObject(result, "allowed");
	list = cJSON_AddArrayToObject(result, "beside");
	refused = cJSON_AddArrayToObject(result, "refused");
	allowed.ok = allowed.ok && allowed.out && list && refused;
	if (keys.allow)
		curve_allow_each(keys.allow, put_allowed, &allowed);
	allowed.out = list;
	link_keydir_each(keys.dir, put_allowed, &allowed);
	for (unsigned int i = 0; keys.refusals && i < keys.refusals->count; i++)
		allowed.ok = allowed.ok &&
			     put_refused(refused, &keys.refusals->entries[i], now_ns);
	return request_finish(req, result, allowed.ok);
}

const struct command keys_commands[] = {
	{"keys", "Show this daemon's CURVE key, the allowed keys and refused connections",
	 NULL, 0, keys_run,
	 "public_key (empty if insecure = yes: none); line (to add to curve_allow_file "
	 "of other daemons); allowed [{name, key}] (curve_allow_file); beside [{name, "
	 "key}] (running daemons of this user on this host, including this one); "
	 "refused [{address, key, why, count, first_ms, last_ms}] (the last 64 refused "
	 "connections, with their age in milliseconds)"},
	{.name = NULL},
};
