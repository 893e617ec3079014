/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stats, health, config.show, log.level, drain, shutdown: what an operator asks.
 *
 * What is shown comes from the tables of metrics and settings, so a new row
 * needs nothing here. What changes the daemon is for admins; drain and shutdown
 * answer before they act, or the answer would meet a closed connection.
 */
#include "daemon/control/commands.h"

#include <errno.h>
#include <stdio.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/text.h"
#include "daemon/control/brief.h"
#include "daemon/config/config.h"
#include "daemon/handshake/handshake.h"
#include "daemon/base/context.h"
#include "daemon/loop/offload.h"
#include "daemon/session/session.h"
#include "daemon/config/setting.h"
#include "daemon/transport/transport.h"
#include "proto/json.h"

#define DRAIN_MS_MAX (24 * 3600 * 1000)

static void put_metric(struct text *text, const struct metric_row *row, uint64_t value)
{
	static const char *const types[] = {"counter", "gauge"};

	text_puts(text, "{\"name\":\"");
	text_puts(text, row->name);
	text_puts(text, "\",\"type\":\"");
	text_puts(text, types[row->type]);
	text_puts(text, "\",\"value\":");
	text_u64(text, value);
	text_puts(text, ",\"help\":");
	text_json(text, row->help);
	text_puts(text, "}");
}

static void put_figure(struct text *text, const char *member, uint64_t value)
{
	text_puts(text, member);
	text_u64(text, value);
}

static void put_us(struct text *text, const char *member, double us)
{
	char number[32];

	snprintf(number, sizeof(number), "%.3f", us);
	text_puts(text, member);
	text_puts(text, number);
}

static void put_histogram(struct text *text, const char *member,
			  const struct histogram *h)
{
	text_puts(text, member);
	put_figure(text, "{\"count\":", h->count);
	put_us(text, ",\"p50\":", histogram_quantile_us(h, 500));
	put_us(text, ",\"p99\":", histogram_quantile_us(h, 990));
	put_us(text, ",\"p999\":", histogram_quantile_us(h, 999));
	put_us(text, ",\"max\":", (double)h->max_ns / 1000);
	for (unsigned int i = 0; i < HISTOGRAM_BUCKETS; i++)
		put_figure(text, i ? "," : ",\"buckets\":[", h->buckets[i]);
	text_puts(text, "]}");
}

/* The loop counts without knowing this table. */
static void take_loop(struct kvd *kvd)
{
	const struct loop_stats *stats = loop_stats(kvd->loop);

	metrics_set(&kvd->metrics, METRIC_LOOP_TURNS, stats->busy.count);
	metrics_set(&kvd->metrics, METRIC_LOOP_SLOW_TURNS, stats->over);
	metrics_set(&kvd->metrics, METRIC_LOOP_LONGEST, stats->busy.max_ns / 1000);
}

/* As text: a tree of some hundred figures takes longer than a turn may. */
static int stats_run(struct request *req)
{
	const struct loop_stats *stats = loop_stats(req->kvd->loop);
	struct text text = {0};
	int r;

	take_loop(req->kvd);
	request_text_begin(req, &text);
	put_histogram(&text, ",\"loop\":{\"busy_us\":", &stats->busy);
	put_histogram(&text, ",\"cpu_us\":", &stats->cpu);
	put_histogram(&text, ",\"late_us\":", &stats->late);
	text_puts(&text, "},\"metrics\":[");
	for (int i = 0; i < METRIC_END; i++) {
		if (i)
			text_puts(&text, ",");
		put_metric(&text, &metric_rows[i],
			   metrics_get(&req->kvd->metrics, (enum metric)i));
	}
	text_puts(&text, "]");
	r = request_text_reply(req, &text);
	if (r < 0)
		text_fini(&text);
	return err_pass(r);
}

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

/* In a word; where rooms are refused, *why_p says why. */
static const char *state_of(const struct kvd *kvd, struct err *why_p)
{
	if (kvd->stopping)
		return "stopping";
	if (kvd->draining)
		return "draining";
	if (!kvd->handshake || handshake_transports_ok(kvd->handshake) == 0)
		return "serving";
	err_take(why_p);
	return "refusing";
}

static bool add_room_bytes(cJSON *result, const struct metrics *metrics)
{
	double bytes = (double)metrics_get(metrics, METRIC_ROOM_RECEIVED_BYTES) +
		       (double)metrics_get(metrics, METRIC_ROOM_SENT_BYTES);
	double staged = (double)metrics_get(metrics, METRIC_ROOM_STAGED_BYTES);

	return cJSON_AddNumberToObject(result, "room_bytes", bytes) &&
	       cJSON_AddNumberToObject(result, "staged_bytes", staged);
}

static int health_run(struct request *req)
{
	const struct kvd *kvd = req->kvd;
	struct err why = {.code = ERR_OK};
	const char *state = state_of(kvd, &why);
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
			cJSON_AddNumberToObject(
				result, "uptime_ms",
				(double)((now_ns - kvd->started_ns) / LOOP_NS_PER_MS)) &&
			cJSON_AddNumberToObject(result, "sessions", kvd->session_count) &&
			cJSON_AddNumberToObject(result, "helper_jobs",
						offload_pending(kvd->offload)) &&
			cJSON_AddNumberToObject(result, "lag_ms",
						(double)(lag_ns / LOOP_NS_PER_MS)) &&
			add_room_bytes(result, &kvd->metrics) &&
			add_transport_list(result, kvd));
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

static bool add_setting(cJSON *list, const struct setting *setting,
			const struct config *config)
{
	char value[SETTING_TEXT_MAX], range[SETTING_TEXT_MAX];
	cJSON *json = cJSON_CreateObject();

	setting_format(setting, config, value);
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
	filled = cJSON_AddStringToObject(result, "path", config->path);
	if (filled)
		list = cJSON_AddArrayToObject(result, "settings");
	filled = list;
	for (size_t i = 0; filled && i < count; i++)
		filled = add_setting(list, &settings[i], config);
	return request_finish(req, result, filled);
}

/* ---- the end ---- */

struct drain_args {
	int64_t timeout_ms; /* -1: not said */
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
	request_reply(req, NULL); /* before it can become too late */
	kvd_drain(kvd, timeout_ns);
	return 0;
}

static int shutdown_run(struct request *req)
{
	struct kvd *kvd = req->kvd;

	log_info("control", req->session->client, "requests shutdown", "session=%ju",
		 (uintmax_t)req->session->id);
	request_reply(req, NULL);
	kvd_stop(kvd);
	return 0;
}

static const struct field drain_fields[] = {
	F_INT("timeout_ms", drain_args, timeout_ms, DEFAULT(-1), 0, DRAIN_MS_MAX,
	      "Stop at the latest then; default: the setting drain_timeout."),
	F_END,
};

static const struct field log_level_fields[] = {
	F_STR("level", level_args, level, OPTIONAL, 16,
	      "\"error\", \"warn\", \"info\", \"debug\" or \"trace\"; without it: only "
	      "show."),
	F_END,
};

const struct command admin_commands[] = {
	{"stats", "Show all counters and gauges", NULL, 0, stats_run,
	 "metrics [{name, type, value, help}], loop {busy_us, cpu_us, late_us}, each "
	 "{count, p50, p99, p999, max, buckets}: turns of the loop by how long it was "
	 "away from its poll, had a core in that, and was late for a timer; bucket i "
	 "counts what was below 2^i us"},
	{"health", "Show the daemon's state", NULL, 0, health_run,
	 "state (serving, refusing, draining, stopping), why (refusing: no transport "
	 "that `require` allows is usable, so rooms are refused), uptime_ms, sessions, "
	 "helper_jobs, lag_ms (the longest time of the last second that the loop was "
	 "busy), room_bytes (moved by rooms since the start), staged_bytes (of them, by "
	 "way of a buffer of this daemon's), transports"},
	{"config.show", "Show the settings in force", NULL, 0, config_show_run,
	 "path, settings [{section, name, value, default, allowed, reload, help}]"},
	{"drain", "Refuse new rooms, let running ones end, then stop", drain_fields,
	 COMMAND_ADMIN, drain_run, "nothing"},
	{"shutdown", "Stop now: rooms fail, sessions end", NULL, COMMAND_ADMIN,
	 shutdown_run, "nothing"},
	{"log.level", "Set the log level until the next start", log_level_fields,
	 COMMAND_ADMIN, log_level_run, "level, was"},
	{.name = NULL},
};
