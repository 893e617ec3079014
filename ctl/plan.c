/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan: the command-line front end of the planner. proto/json reads and validates the
 * whole input; daemon/plan/plan_json writes the output.
 */
#include "ctl/plan.h"

#include <errno.h>
#include <stdlib.h>

#include "ctl/ctl.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/plan_json.h"
#include "proto/json.h"

int plan_answer(const char *text, size_t len, uint64_t max_rows, FILE *out)
{
	cJSON *root mem_cleanup(json_freep) = NULL;
	int r = json_parse(text, len, JSON_DEPTH_MAX, &root);

	if (r < 0)
		return err_pass(r);
	if (!cJSON_IsObject(root))
		return err_raise(ERR_INVAL, "input: must be one JSON object");
	return err_pass(plan_json_rows(root, max_rows, out));
}

static int plan_refuse(void)
{
	const struct err *e = err_last();

	fprintf(stderr, "kvd-ctl plan: %s: %s\n", err_name(e->code), e->text);
	return 1;
}

static int plan_text(const char *text, size_t len)
{
	if (plan_answer(text, len, PLAN_ROWS_MAX, stdout) < 0)
		return plan_refuse();
	if (fflush(stdout) != 0 || ferror(stdout)) {
		err_raise_errno(errno, "standard output");
		return plan_refuse();
	}
	return 0;
}

int plan_file(const char *path)
{
	size_t len;
	char *text = ctl_read_file(path, PLAN_INPUT_MAX, &len);
	int r;

	if (!text) {
		err_raise_errno(errno, "%s", path);
		return plan_refuse();
	}
	r = plan_text(text, len);
	free(text);
	return r;
}

int ctl_run_plan(struct ctl *ctl)
{
	return plan_file(ctl->args[0]);
}
