/* SPDX-License-Identifier: Apache-2.0 */
/*
 * health, config.show, config.reload, log.level, drain: commands for operators. The
 * settings are read from the option table. Commands that change the daemon are for
 * administrators. drain replies before it acts, because the connection may be closed by
 * the drain.
 */
#include "daemon/request/commands.h"

#include <errno.h>

#include "daemon/base/log.h"
#include "daemon/control/commands.h"
#include "daemon/request/brief.h"
#include "daemon/control/control.h"
#include "daemon/control/health.h"
#include "daemon/config/config.h"
#include "daemon/gate/sandbox.h"
#include "daemon/handshake/handshake.h"
#include "daemon/base/context.h"
#include "daemon/link/link_curve.h"
#include "daemon/loop/offload.h"
#include "daemon/session/session.h"
#include "daemon/config/setting.h"
#include "daemon/transport/transport.h"

#define DRAIN_MS_MAX (24 * 3600 * 1000)
#define ABOUT_MAX 128u

static bool add_transport(cJSON *list, const struct transport *transport)
{
	cJSON *json = cJSON_CreateObject();

	return json && cJSON_AddItemToArray(list, json) &&
	       cJSON_AddStringToObject(json, "name", transport->ops->name) &&
	       cJSON_AddBoolToObject(json, "rdma", transport->caps & XP_CAP_RDMA) &&
	       (!transport->about[0] ||
		cJSON_AddStringToObject(json, "about", transport->about));
}

static bool add_transport_list(cJSON *result, const struct kvd *kvd)
{
	cJSON *list = cJSON_AddArrayToObject(result, "transports");
	bool filled = list;

	for (unsigned int i = 0; filled && i < kvd->transport_count; i++) {
		if (kvd->transports[i])
			filled = add_transport(list, kvd->transports[i]);
	}
	return filled;
}

const char *const health_names[] = {"serving", "refusing", "draining", "stopping",
				    "degraded"};

static enum health modules_health(const struct kvd *kvd, struct err *why_p)
{
	MODULES_EACH(kvd, m)
	{
		if (m->health && kvd->part[m->id] && !m->health(kvd->part[m->id], why_p))
			return HEALTH_DEGRADED;
	}
	return HEALTH_SERVING;
}

enum health health_of(const struct kvd *kvd, struct err *why_p)
{
	if (kvd->stopping)
		return HEALTH_STOPPING;
	if (kvd->draining)
		return HEALTH_DRAINING;
	if (control_of(kvd) && control_is_lost(control_of(kvd), why_p))
		return HEALTH_DEGRADED;
	if (!kvd->handshake || handshake_transports_ok(kvd->handshake) == 0)
		return modules_health(kvd, why_p);
	err_take(why_p);
	return HEALTH_REFUSING;
}

static bool add_room_bytes(cJSON *result, const struct metrics *metrics)
{
	double bytes = (double)metrics_get(metrics, METRIC_ROOM_RECEIVED_BYTES) +
		       (double)metrics_get(metrics, METRIC_ROOM_SENT_BYTES);
	double staged = (double)metrics_get(metrics, METRIC_ROOM_STAGED_BYTES);

	return cJSON_AddNumberToObject(result, "room_bytes", bytes) &&
	       cJSON_AddNumberToObject(result, "staged_bytes", staged);
}

static bool add_about(cJSON *result, const struct kvd *kvd)
{
	char text[ABOUT_MAX];
	bool filled = true;

	MODULES_EACH(kvd, m)
	{
		if (filled && m->about.member && kvd->part[m->id] &&
		    m->about.text(kvd->part[m->id], text, sizeof(text)))
			filled = cJSON_AddStringToObject(result, m->about.member, text);
	}
	return filled;
}

static int health_run(struct request *req)
{
	const struct kvd *kvd = req->kvd;
	struct err why = {.code = ERR_OK};
	const char *state = health_names[health_of(kvd, &why)];
	uint64_t now_ns = loop_now_ns(kvd->loop);
	uint64_t lag_ns = loop_lag_ns(kvd->loop, now_ns - LOOP_NS_PER_S);
	cJSON *result = request_result();

	if (!result)
		return err_pass(-ENOMEM);
	return request_finish(
		req, result,
		cJSON_AddStringToObject(result, "state", state) &&
			(why.code == ERR_OK ||
			 cJSON_AddStringToObject(result, "why", why.text)) &&
			result_add_daemon(result, req->session) &&
			cJSON_AddNumberToObject(
				result, "uptime_ms",
				(double)((now_ns - kvd->started_ns) / LOOP_NS_PER_MS)) &&
			cJSON_AddNumberToObject(result, "sessions", kvd->session_count) &&
			cJSON_AddNumberToObject(result, "helper_jobs",
						offload_pending(kvd->offload)) &&
			cJSON_AddNumberToObject(result, "lag_ms",
						(double)(lag_ns / LOOP_NS_PER_MS)) &&
			add_room_bytes(result, &kvd->metrics) &&
			cJSON_AddBoolToObject(result, "insecure",
					      kvd->config->insecure) &&
			cJSON_AddNumberToObject(
				result, "plain_peers",
				kvd->handshake ? handshake_plain_peers(kvd->handshake)
					       : 0) &&
			cJSON_AddStringToObject(result, "sandbox", sandbox_words()) &&
			(!*sandbox_lacks() ||
			 cJSON_AddStringToObject(result, "sandbox_lacks",
						 sandbox_lacks())) &&
			add_about(result, kvd) && add_transport_list(result, kvd));
}

struct level_args {
	const char *level;
};

static int log_level_run(struct request *req)
{
	const struct level_args *args = request_args(req);
	const char *was = log_level_name((enum log_level)log_threshold);
	enum log_level level;
	struct brief brief;
	int r;

	if (args->level) {
		r = log_level_parse(args->level, &level);
		if (r < 0)
			return err_pass(r);
		log_set_level(level);
	}
	brief_init(&brief);
	brief_text(&brief, "level", args->level ? args->level : was);
	brief_text(&brief, "was", was);
	request_reply_brief(req, &brief);
	return 0;
}

/* ---- config.show ---- */

/* Paths, users and groups, which engines do not need. */
static bool is_for_admins(const struct setting *setting)
{
	return setting->type == SETTING_PATH || setting->type == SETTING_UIDS ||
	       setting->type == SETTING_GIDS;
}

static bool add_setting(cJSON *list, const struct setting *setting,
			const struct config *config, bool admin)
{
	char value[SETTING_TEXT_MAX], range[SETTING_TEXT_MAX];
	cJSON *json = cJSON_CreateObject();

	setting_format(setting, config, value);
	if (*value && !admin && is_for_admins(setting)) /* whether it is set is not
							 * secret */
		snprintf(value, sizeof(value), "%s", "(for administrators)");
	setting_range(setting, range);
	return json && cJSON_AddItemToArray(list, json) &&
	       cJSON_AddStringToObject(json, "section", setting->section) &&
	       cJSON_AddStringToObject(json, "name", setting->name) &&
	       cJSON_AddStringToObject(json, "value", value) &&
	       cJSON_AddStringToObject(json, "default", setting->preset) &&
	       cJSON_AddStringToObject(json, "allowed", range) &&
	       cJSON_AddBoolToObject(json, "reload", setting->reload) &&
	       cJSON_AddStringToObject(json, "help", setting->help);
}

static int config_show_run(struct request *req)
{
	const struct config *config = req->kvd->config;
	size_t count = 0;
	const struct setting *settings = config_settings(&count);
	cJSON *result = request_result(), *list = NULL;
	bool filled;

	if (!result)
		return err_pass(-ENOMEM);
	filled = cJSON_AddStringToObject(result, "path",
					 req->session->admin ? config->path
							     : "(for administrators)");
	if (filled)
		list = cJSON_AddArrayToObject(result, "settings");
	filled = list;
	for (size_t i = 0; filled && i < count; i++)
		filled = add_setting(list, &settings[i], config, req->session->admin);
	return request_finish(req, result, filled);
}

/* ---- config.reload ---- */

struct reload_args {
	bool check;
};

struct differing {
	const struct config *config;
	cJSON *list;
	bool filled;
};

static void add_differing(void *arg, const struct setting *row,
			  const struct config *fresh)
{
	struct differing *d = arg;
	char running[SETTING_TEXT_MAX], file[SETTING_TEXT_MAX];
	cJSON *json = cJSON_CreateObject();

	setting_format(row, d->config, running);
	setting_format(row, fresh, file);
	d->filled = d->filled && json && cJSON_AddItemToArray(d->list, json) &&
		    cJSON_AddStringToObject(json, "section", row->section) &&
		    cJSON_AddStringToObject(json, "name", row->name) &&
		    cJSON_AddStringToObject(json, "running", running) &&
		    cJSON_AddStringToObject(json, "file", file) &&
		    cJSON_AddBoolToObject(json, "restart", !row->reload);
}

static bool add_keys(cJSON *result, const char *path, const struct curve_changes *keys)
{
	cJSON *json = cJSON_AddObjectToObject(result, "keys");

	return json && cJSON_AddStringToObject(json, "path", path) &&
	       cJSON_AddNumberToObject(json, "added", keys->added) &&
	       cJSON_AddNumberToObject(json, "removed", keys->removed) &&
	       cJSON_AddNumberToObject(json, "changed", keys->changed);
}

static bool add_ended(cJSON *result, const struct kvd_ended *ended)
{
	cJSON *json = cJSON_AddObjectToObject(result, "ended");

	return json && cJSON_AddNumberToObject(json, "peerings", ended->peerings) &&
	       cJSON_AddNumberToObject(json, "sessions", ended->sessions);
}

static int config_reload_run(struct request *req)
{
	const struct reload_args *args = request_args(req);
	struct differing d = {.config = req->kvd->config, .filled = true};
	cJSON *result = request_result();
	struct curve_changes keys;
	struct kvd_ended ended;
	int r;

	if (!result)
		return err_pass(-ENOMEM);
	d.list = cJSON_AddArrayToObject(result, "options");
	r = d.list ? kvd_reload(req->kvd, !args->check, add_differing, &d, &keys, &ended)
		   : -ENOMEM;
	if (r < 0) {
		cJSON_Delete(result);
		return err_pass(r);
	}
	if (!args->check)
		log_info("control", req->session->client, "configuration reloaded",
			 "session=%ju changed=%d peerings_ended=%u sessions_ended=%u",
			 (uintmax_t)req->session->id, cJSON_GetArraySize(d.list),
			 ended.peerings, ended.sessions);
	return request_finish(
		req, result,
		d.filled && cJSON_AddStringToObject(result, "path", d.config->path) &&
			add_keys(result, d.config->curve_allow_file, &keys) &&
			add_ended(result, &ended));
}

/* ---- the end ---- */

struct drain_args {
	int64_t timeout_ms; /* -1: not given */
};

static int drain_run(struct request *req)
{
	const struct drain_args *args = request_args(req);
	struct kvd *kvd = req->kvd;
	uint64_t timeout_ns = kvd->config->drain_timeout_ns;

	if (args->timeout_ms >= 0)
		timeout_ns = (uint64_t)args->timeout_ms * LOOP_NS_PER_MS;
	log_info("control", req->session->client, "requests a drain", "session=%ju",
		 (uintmax_t)req->session->id);
	request_reply(req, NULL); /* before the connection can be closed */
	kvd_drain(kvd, timeout_ns);
	return 0;
}

static const struct field reload_fields[] = {
	F_BOOL("check", reload_args, check,
	       "Only report the differences; apply nothing."),
	F_END,
};

static const struct field drain_fields[] = {
	F_INT("timeout_ms", drain_args, timeout_ms, DEFAULT(-1), 0, DRAIN_MS_MAX,
	      "Milliseconds until the daemon stops, whether or not rooms are open; "
	      "default: the option drain_timeout."),
	F_END,
};

static const struct field log_level_fields[] = {
	F_STR("level", level_args, level, OPTIONAL, 16,
	      "\"error\", \"warn\", \"info\", \"debug\" or \"trace\"; without it: only "
	      "show."),
	F_END,
};

const struct command admin_commands[] = {
	{"health", "Show the daemon's state", NULL, COMMAND_NO_HELLO, health_run,
	 "daemon (version), name, instance, pid, endpoint, state (serving, refusing, "
	 "draining, stopping; degraded: serving, but the directory of the option "
	 "cluster is unavailable, another process owns the socket path, or the disk of "
	 "chunk_dir does not respond), why (refusing: no transport allowed by "
	 "`require` is usable, so rooms are refused), uptime_ms, sessions, "
	 "helper_jobs, lag_ms (longest time that the event loop was busy within the "
	 "last second), room_bytes (moved by rooms since the start), staged_bytes (of "
	 "these, copied through a buffer of this daemon), insecure (insecure = yes: "
	 "peers are not authenticated), plain_peers (daemons on other hosts that "
	 "receive unencrypted data), sandbox (active: seccomp, landlock), "
	 "sandbox_lacks (why the sandbox is incomplete), attention (instruction set "
	 "and threads of attention; absent: attention_threads is off), transports"},
	{"config.show",
	 "Show the settings in force; paths, users and groups only to administrators",
	 NULL, 0, config_show_run,
	 "path, settings [{section, name, value, default, allowed, reload, help}]"},
	{"config.reload", "Reload the configuration, as SIGHUP does", reload_fields,
	 COMMAND_ADMIN, config_reload_run,
	 "path, options [{section, name, running, file, restart}]: the options that "
	 "differ; keys {path, added, removed, changed}: the lines of curve_allow_file "
	 "that differ. Keys and options without restart have been applied, unless "
	 "check was set. ended {peerings, sessions}: numbers of connections ended: "
	 "peerings whose key was removed or has another name or other hosts, and "
	 "sessions of users that allow_uids and allow_gids no longer admit"},
	{"drain", "Refuse new rooms, let open rooms finish, then stop", drain_fields,
	 COMMAND_ADMIN, drain_run, "nothing"},
	{"log.level", "Show the log level, or set it until the next start",
	 log_level_fields, COMMAND_ADMIN, log_level_run, "level, was"},
	{.name = NULL},
};
