/* SPDX-License-Identifier: Apache-2.0 */
/* stats: the figures, as JSON or for Prometheus. The loop copies them; a helper writes
 * them down, since that takes longer than a turn may. */
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/base/text.h"
#include "daemon/control/commands.h"
#include "daemon/loop/offload.h"
#include "daemon/metrics/figures.h"
#include "daemon/session/session.h"

struct stats {
	struct offload_job job;
	struct request *req;
	bool prometheus;
	struct figures figures;
	struct text reply;
};

struct stats_args {
	const char *format;
};

static void stats_work(struct offload_job *job)
{
	struct stats *stats = container_of(job, struct stats, job);
	struct text exposed = {0};

	figures_read_process(&stats->figures);
	request_text_begin(stats->req, &stats->reply);
	if (!stats->prometheus) {
		figures_json(&stats->figures, &stats->reply);
		return;
	}
	figures_expose(&stats->figures, false, &exposed);
	stats->reply.failed = stats->reply.failed || exposed.failed;
	text_puts(&stats->reply, ",\"text\":");
	if (!exposed.failed)
		text_json(&stats->reply, exposed.data);
	text_fini(&exposed);
}

static void stats_done(struct offload_job *job)
{
	struct stats *stats = container_of(job, struct stats, job);

	if (request_text_reply(stats->req, &stats->reply) < 0)
		request_fail_last(stats->req);
	text_fini(&stats->reply);
	mem_free(stats);
}

static int stats_run(struct request *req)
{
	const struct stats_args *args = request_args(req);
	struct stats *stats;

	if (args->format && strcmp(args->format, "json") != 0 &&
	    strcmp(args->format, "prometheus") != 0)
		return err_raise(ERR_INVAL, "format: json or prometheus, not %s",
				 args->format);
	stats = mem_zalloc(sizeof(*stats));
	if (!stats)
		return err_pass(-ENOMEM);
	stats->req = req;
	stats->prometheus = args->format && strcmp(args->format, "prometheus") == 0;
	figures_take(req->kvd, &stats->figures);
	stats->job = (struct offload_job){.work = stats_work,
					  .done = stats_done,
					  .principal = offload_uid(req->session->uid)};
	offload_submit(req->kvd->offload, &stats->job);
	return 0;
}

static const struct field stats_fields[] = {
	F_STR("format", stats_args, format, OPTIONAL, 16,
	      "\"json\", or \"prometheus\" for the text that the metrics endpoint "
	      "serves."),
	F_END,
};

const struct command stats_commands[] = {
	{"stats", "Show all counters, gauges and histograms", stats_fields,
	 COMMAND_NO_HELLO, stats_run,
	 "metrics [{name, type, unit, value, series, help}] (value: the sum of all "
	 "series, of histograms their counts; series: those that are not zero, with "
	 "their labels), loop {busy_us, cpu_us, late_us}, each {count, p50, p99, p999, "
	 "max, buckets}: turns of the loop by how long it was away from its poll, had a "
	 "core in that, and was late for a timer; bucket i counts what was up to 2^i us. "
	 "With format prometheus: text"},
	{.name = NULL},
};
