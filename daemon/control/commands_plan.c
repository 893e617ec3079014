/* SPDX-License-Identifier: Apache-2.0 */
/* plan: the planner as a control command. It has no side effects. A long plan takes
 * long to compute, so it runs on a helper, and the result is inserted into the reply
 * as text. */
#include "daemon/request/commands.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/control/commands.h"
#include "daemon/plan/plan_json.h"
#include "daemon/session/session.h"

#define REPLY_ROWS_MAX 65536u /* about 4 MiB of reply; kvd-ctl plan has no such limit */

struct planning {
	struct offload_job job;
	struct request *req;
	char *answer; /* of open_memstream() */
	size_t len;
};

struct plan_args {
	const cJSON *src, *dst, *map, *wants, *sources;
	uint64_t room;
};

static int plan_into(const struct request *req, FILE *out)
{
	const struct plan_args *args = request_args(req);

	/* checks the members itself: files of kvd-ctl plan are not checked by a field
	 * table */
	if (args->sources)
		return err_pass(plan_json_cover(req->line, NULL, out));
	return err_pass(plan_json_rows(req->line, REPLY_ROWS_MAX, NULL, out));
}

static void commands_plan_work(struct offload_job *job)
{
	struct planning *p = container_of(job, struct planning, job);
	FILE *out = open_memstream(&p->answer, &p->len);

	if (!out) {
		job->result = err_raise(ERR_NOMEM, "out of memory for a plan");
		return;
	}
	job->result = plan_into(p->req, out);
	if (fclose(out) != 0 && job->result == 0)
		job->result = err_raise(ERR_NOMEM, "out of memory for a plan");
}

static void commands_plan_done(struct offload_job *job)
{
	struct planning *p = container_of(job, struct planning, job);
	struct request *req = p->req;
	cJSON *raw = NULL;

	if (job->result == 0) {
		p->answer[strcspn(p->answer, "\n")] = '\0';
		raw = cJSON_CreateRaw(p->answer);
		if (!raw)
			err_set(&job->err, ERR_NOMEM,
				"out of memory for the reply of a plan");
	}
	if (raw)
		request_reply(req, raw);
	else
		request_fail(req, &job->err);
	free(p->answer);
	mem_free(p);
}

static int plan_run(struct request *req)
{
	struct planning *p = mem_zalloc(sizeof(*p));

	if (!p)
		return err_pass(-ENOMEM);
	p->req = req;
	p->job = (struct offload_job){.work = commands_plan_work,
				      .done = commands_plan_done,
				      .principal = session_principal(req->session)};
	offload_submit(req->kvd->offload, &p->job);
	return 0;
}

static const struct field plan_fields[] = {
	F_OBJECT("src", plan_args, src, OPTIONAL,
		 "Layout of the source: {rank, buffers, views}."),
	F_OBJECT("dst", plan_args, dst, REQUIRED, "Layout of the destination."),
	F_ARRAY("map", plan_args, map, OPTIONAL, 1024,
		"[{view, src_pages, dst_pages, src_first_token, dst_first_token, "
		"tokens}]."),
	F_ARRAY("wants", plan_args, wants, OPTIONAL, PLAN_JSON_WANTS_MAX,
		"Restrict the plan to these parts, in the form of `sends` of a shard "
		"selection: [{view, layer, field, first_unit, units}]."),
	F_ARRAY("sources", plan_args, sources, OPTIONAL, 65536,
		"Instead of src and map: the layouts of all source ranks; the reply "
		"shows the part that each rank sends."),
	F_U64("room", plan_args, room, OPTIONAL,
	      "With sources: seed that spreads data held by several ranks over them."),
	F_END,
};

const struct command plan_commands[] = {
	{"plan",
	 "Show the bytes that would move between two layouts, without moving them",
	 plan_fields, 0, plan_run,
	 "rows [[src_buffer, src_offset, dst_buffer, dst_offset, length]], runs, "
	 "descriptors, bytes; with sources: sends, contributions, idle (ranks that "
	 "send nothing)"},
	{.name = NULL},
};
