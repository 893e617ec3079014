/* SPDX-License-Identifier: Apache-2.0 */
/*
 * health, config.show, config.reload, log.level, drain: commands for operators. The
 * settings are read from the option table. Commands that change the daemon are for
 * administrators. drain replies before it acts, because the connection may be closed by
 * the drain.
 */
#include "daemon/request/commands.h"

#include "daemon/base/log.h"
#include "daemon/control/commands.h"
#include "proto/out.h"
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

static void put_transports(struct text *out, const struct kvd *kvd)
{
	out_array(out, "transports");
	for (unsigned int i = 0; i < kvd->transport_count; i++) {
		const struct transport *transport = kvd->transports[i];

		if (!transport)
			continue;
		out_object(out, NULL);
		out_text(out, "name", transport->ops->name);
		out_bool(out, "rdma", transport->caps & XP_CAP_RDMA);
		out_filled(out, "about", transport->about);
		out_close(out, '}');
	}
	out_close(out, ']');
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

static void put_about(struct text *out, const struct kvd *kvd)
{
	char text[ABOUT_MAX];

	MODULES_EACH(kvd, m)
	{
		if (m->about.member && kvd->part[m->id] &&
		    m->about.text(kvd->part[m->id], text, sizeof(text)))
			out_text(out, m->about.member, text);
	}
}

static int health_run(struct request *req)
{
	const struct kvd *kvd = req->kvd;
	const struct metrics *metrics = &kvd->metrics;
	struct err why = {.code = ERR_OK};
	const char *state = health_names[health_of(kvd, &why)];
	uint64_t now_ns = loop_now_ns(kvd->loop);
	uint64_t lag_ns = loop_lag_ns(kvd->loop, now_ns - LOOP_NS_PER_S);
	struct reply reply;
	struct text *out = reply_begin(&reply, req);

	out_text(out, "state", state);
	if (why.code != ERR_OK)
		out_text(out, "why", why.text);
	put_daemon(out, req->session);
	out_number(out, "uptime_ms", (now_ns - kvd->started_ns) / LOOP_NS_PER_MS);
	out_number(out, "sessions", kvd->session_count);
	out_number(out, "helper_jobs", offload_pending(kvd->offload));
	out_number(out, "lag_ms", lag_ns / LOOP_NS_PER_MS);
	out_number(out, "room_bytes",
		   metrics_get(metrics, METRIC_ROOM_RECEIVED_BYTES) +
			   metrics_get(metrics, METRIC_ROOM_SENT_BYTES));
	out_number(out, "staged_bytes", metrics_get(metrics, METRIC_ROOM_STAGED_BYTES));
	out_bool(out, "insecure", kvd->config->insecure);
	out_number(out, "plain_peers",
		   kvd->handshake ? handshake_plain_peers(kvd->handshake) : 0);
	out_text(out, "sandbox", sandbox_words());
	out_filled(out, "sandbox_lacks", sandbox_lacks());
	put_about(out, kvd);
	put_transports(out, kvd);
	return reply_end(&reply);
}

struct level_args {
	const char *level;
};

static int log_level_run(struct request *req)
{
	const struct level_args *args = request_args(req);
	const char *was = log_level_name((enum log_level)log_threshold);
	enum log_level level;
	struct reply reply;
	struct text *out;
	int r;

	if (args->level) {
		r = log_level_parse(args->level, &level);
		if (r < 0)
			return err_pass(r);
		log_set_level(level);
	}
	out = reply_begin(&reply, req);
	out_text(out, "level", args->level ? args->level : was);
	out_text(out, "was", was);
	return reply_end(&reply);
}

/* ---- config.show ---- */

/* Paths, users and groups, which engines do not need. */
static bool is_for_admins(const struct setting *setting)
{
	return setting->type == SETTING_PATH || setting->type == SETTING_UIDS ||
	       setting->type == SETTING_GIDS;
}

static void put_setting(struct text *out, const struct setting *setting,
			const struct config *config, bool admin)
{
	char value[SETTING_TEXT_MAX], range[SETTING_TEXT_MAX];

	setting_format(setting, config, value);
	if (*value && !admin && is_for_admins(setting)) /* whether it is set is not
							 * secret */
		snprintf(value, sizeof(value), "%s", "(for administrators)");
	setting_range(setting, range);
	out_object(out, NULL);
	out_text(out, "section", setting->section);
	out_text(out, "name", setting->name);
	out_text(out, "value", value);
	out_text(out, "default", setting->preset);
	out_text(out, "allowed", range);
	out_bool(out, "reload", setting->reload);
	out_text(out, "help", setting->help);
	out_close(out, '}');
}

static int config_show_run(struct request *req)
{
	const struct config *config = req->kvd->config;
	bool admin = req->session->admin;
	size_t count = 0;
	const struct setting *settings = config_settings(&count);
	struct reply reply;
	struct text *out = reply_begin(&reply, req);

	out_text(out, "path", admin ? config->path : "(for administrators)");
	out_array(out, "settings");
	for (size_t i = 0; i < count; i++)
		put_setting(out, &settings[i], config, admin);
	out_close(out, ']');
	return reply_end(&reply);
}

/* ---- config.reload ---- */

struct reload_args {
	bool check;
};

struct differing {
	const struct config *config;
	struct text *out;
	unsigned int count;
};

static void put_differing(void *arg, const struct setting *row,
			  const struct config *fresh)
{
	struct differing *d = arg;
	char running[SETTING_TEXT_MAX], file[SETTING_TEXT_MAX];

	setting_format(row, d->config, running);
	setting_format(row, fresh, file);
	d->count++;
	out_object(d->out, NULL);
	out_text(d->out, "section", row->section);
	out_text(d->out, "name", row->name);
	out_text(d->out, "running", running);
	out_text(d->out, "file", file);
	out_bool(d->out, "restart", !row->reload);
	out_close(d->out, '}');
}

static int config_reload_run(struct request *req)
{
	const struct reload_args *args = request_args(req);
	struct reply reply;
	struct text *out = reply_begin(&reply, req);
	struct differing d = {.config = req->kvd->config, .out = out};
	struct curve_changes keys;
	struct kvd_ended ended;
	int r;

	out_array(out, "options");
	r = kvd_reload(req->kvd, !args->check, put_differing, &d, &keys, &ended);
	if (r < 0) {
		text_fini(out);
		return err_pass(r);
	}
	if (!args->check)
		log_info("control", req->session->client, "configuration reloaded",
			 "session=%ju changed=%u peerings_ended=%u sessions_ended=%u",
			 (uintmax_t)req->session->id, d.count, ended.peerings,
			 ended.sessions);
	out_close(out, ']');
	out_text(out, "path", d.config->path);
	out_object(out, "keys");
	out_text(out, "path", d.config->curve_allow_file);
	out_number(out, "added", keys.added);
	out_number(out, "removed", keys.removed);
	out_number(out, "changed", keys.changed);
	out_close(out, '}');
	out_object(out, "ended");
	out_number(out, "peerings", ended.peerings);
	out_number(out, "sessions", ended.sessions);
	out_close(out, '}');
	return reply_end(&reply);
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
	request_reply(req); /* before the connection can be closed */
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
