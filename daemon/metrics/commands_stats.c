/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stats: the metrics, as JSON or for Prometheus; or the resources held by each principal.
 *
 * The loop copies the values and a helper formats them, which takes longer than a turn
 * may. Principals are not a label of a metric, since their number is not bounded by the
 * configuration: the metrics have sums by class, and this command shows the principals.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/control/commands.h"
#include "daemon/request/commands.h"
#include "proto/out.h"
#include "daemon/loop/offload.h"
#include "daemon/metrics/figures.h"
#include "daemon/session/session.h"

#define PRINCIPALS_MAX 4096u

struct stats {
	struct offload_job job;
	struct request *req;
	bool prometheus;
	struct figures figures;
	struct account *principals; /* by: copies, in descending order of bytes;
				     * otherwise NULL */
	unsigned int principal_count, principals_known;
	uint64_t limit, share, total;
	struct text reply;
};

struct stats_args {
	const char *format;
	const char *by;
};

/* ---- by principal ---- */

static void put_principal(const struct account *account, struct text *out)
{
	out_object(out, NULL);
	out_text(out, "name", account->name);
	out_number(out, "bytes", account->total);
	out_number(out, "refused", account->refused);
	out_array(out, "classes");
	for (int i = 0; i < ACCOUNT_CLASS_END; i++) {
		if (!account->objects[i])
			continue;
		out_object(out, NULL);
		out_text(out, "class", account_class_names[i]);
		out_number(out, "objects", account->objects[i]);
		out_number(out, "bytes", account->bytes[i]);
		out_close(out, '}');
	}
	out_close(out, ']');
	out_close(out, '}');
}

static int principals_compare(const void *a, const void *b)
{
	const struct account *x = a, *y = b;

	return x->total != y->total ? (x->total < y->total ? 1 : -1)
				    : strcmp(x->name, y->name);
}

static void put_principals(struct stats *stats)
{
	struct text *out = &stats->reply;

	qsort(stats->principals, stats->principal_count, sizeof(*stats->principals),
	      principals_compare);
	out_number(out, "limit_bytes", stats->limit);
	out_number(out, "share_bytes", stats->share);
	out_number(out, "bytes", stats->total);
	out_number(out, "known", stats->principals_known);
	out_array(out, "principals");
	for (unsigned int i = 0; i < stats->principal_count; i++)
		put_principal(&stats->principals[i], out);
	out_close(out, ']');
}

/* Copied in this turn: about a hundred bytes each. */
static int take_principals(struct stats *stats, const struct accounts *accounts)
{
	const struct account *account;
	unsigned int n =
		accounts->count < PRINCIPALS_MAX ? accounts->count : PRINCIPALS_MAX;

	stats->principals = mem_calloc(n + 1, sizeof(*stats->principals));
	if (!stats->principals)
		return err_pass(-ENOMEM);
	for (account = accounts->first; account && stats->principal_count < n;
	     account = account->next)
		stats->principals[stats->principal_count++] = *account;
	stats->principals_known = accounts->count;
	stats->limit = accounts->limit;
	stats->share = accounts_share(accounts);
	stats->total = accounts->total;
	return 0;
}

/* ---- all ---- */

static void stats_work(struct offload_job *job)
{
	struct stats *stats = container_of(job, struct stats, job);
	struct text exposed = {0};

	if (stats->principals) {
		request_text_begin(stats->req, &stats->reply);
		put_principals(stats);
		return;
	}
	figures_read_process(&stats->figures);
	request_text_begin(stats->req, &stats->reply);
	if (!stats->prometheus) {
		figures_json(&stats->figures, &stats->reply);
		return;
	}
	figures_expose(&stats->figures, &exposed);
	stats->reply.failed = stats->reply.failed || exposed.failed;
	if (!exposed.failed)
		out_text(&stats->reply, "text", exposed.data);
	text_fini(&exposed);
}

static void stats_done(struct offload_job *job)
{
	struct stats *stats = container_of(job, struct stats, job);

	if (request_text_reply(stats->req, &stats->reply) < 0)
		request_fail_last(stats->req);
	text_fini(&stats->reply);
	mem_free(stats->principals);
	mem_free(stats);
}

static int stats_run(struct request *req)
{
	const struct stats_args *args = request_args(req);
	struct stats *stats;

	if (args->format && strcmp(args->format, "json") != 0 &&
	    strcmp(args->format, "prometheus") != 0)
		return err_raise(ERR_INVAL,
				 "format: %s is unknown; use json or prometheus",
				 args->format);
	if (args->by && (args->format || strcmp(args->by, "principal") != 0))
		return err_raise(ERR_INVAL, "by: must be principal, and excludes format");
	stats = mem_zalloc(sizeof(*stats));
	if (!stats)
		return err_pass(-ENOMEM);
	if (args->by && take_principals(stats, &req->kvd->accounts) < 0) {
		mem_free(stats);
		return err_pass(-ENOMEM);
	}
	stats->req = req;
	stats->prometheus = args->format && strcmp(args->format, "prometheus") == 0;
	figures_take(req->kvd, &stats->figures);
	stats->job = (struct offload_job){.work = stats_work,
					  .done = stats_done,
					  .principal = session_principal(req->session)};
	offload_submit(req->kvd->offload, &stats->job);
	return 0;
}

static const struct field stats_fields[] = {
	F_STR("format", stats_args, format, OPTIONAL, 16,
	      "\"json\" (default), or \"prometheus\" for the text that the metrics "
	      "endpoint serves."),
	F_STR("by", stats_args, by, OPTIONAL, 16,
	      "\"principal\": show the resources held by each user, key and address "
	      "instead."),
	F_END,
};

const struct command stats_commands[] = {
	{"stats", "Show all counters, gauges and histograms", stats_fields,
	 COMMAND_NO_HELLO, stats_run,
	 "metrics [{name, type, unit, value, series, help}] (value: sum over all "
	 "series, for histograms the number of samples; series: those that are not "
	 "zero, with their labels, of a histogram with sum, p50, p99, max, first and "
	 "buckets: bucket i counts values of up to first * 2^i, the last one all "
	 "others), loop {busy_us, cpu_us, late_us}, each {count, p50, "
	 "p99, p999, max, buckets}: microseconds per loop turn spent outside poll, of "
	 "CPU time, and of timer delay; bucket i counts turns of up to 2^i us. With "
	 "format prometheus: text. With by principal: limit_bytes (memory_limit), "
	 "share_bytes (limit of one principal), bytes (of all), known (number of "
	 "principals), principals [{name, bytes, refused, classes [{class, objects, "
	 "bytes}]}], at most 4096"},
	{.name = NULL},
};
