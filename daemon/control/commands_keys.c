/* SPDX-License-Identifier: Apache-2.0 */
/* keys: the CURVE keys that may connect, and refused connections. Public keys are not
 * secret. */

#include "daemon/base/context.h"
#include "daemon/control/commands.h"
#include "daemon/request/commands.h"
#include "proto/out.h"
#include "daemon/link/link.h"
#include "daemon/link/link_curve.h"
#include "daemon/link/link_keydir.h"
#include "daemon/link/link_refused.h"
#include "daemon/loop/loop.h"

static void put_allowed(void *arg, const char *name, const char *key)
{
	struct text *out = arg;

	out_object(out, NULL);
	out_text(out, "name", name);
	out_text(out, "key", key);
	out_close(out, '}');
}

static void put_refused(struct text *out, const struct link_refused *entry,
			uint64_t now_ns)
{
	out_object(out, NULL);
	out_text(out, "address", entry->address);
	out_text(out, "key", entry->key);
	out_text(out, "why", entry->why);
	out_number(out, "count", entry->count);
	out_number(out, "first_ms", (now_ns - entry->first_ns) / LOOP_NS_PER_MS);
	out_number(out, "last_ms", (now_ns - entry->last_ns) / LOOP_NS_PER_MS);
	out_close(out, '}');
}

static int keys_run(struct request *req)
{
	struct link *link = req->kvd->link;
	uint64_t now_ns = loop_now_ns(req->kvd->loop);
	struct link_keys keys = {.public_key = "", .line = ""};
	struct reply reply;
	struct text *out = reply_begin(&reply, req);

	if (link && link->ops->keys)
		link->ops->keys(link, &keys);
	out_text(out, "public_key", keys.public_key);
	out_text(out, "line", keys.line);
	out_array(out, "allowed");
	if (keys.allow)
		curve_allow_each(keys.allow, put_allowed, out);
	out_close(out, ']');
	out_array(out, "beside");
	link_keydir_each(keys.dir, put_allowed, out);
	out_close(out, ']');
	out_array(out, "refused");
	for (unsigned int i = 0; keys.refusals && i < keys.refusals->count; i++)
		put_refused(out, &keys.refusals->entries[i], now_ns);
	out_close(out, ']');
	return reply_end(&reply);
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
