/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages from the daemon's own tables, so that no list is kept twice: Markdown of
 * commands, error codes, metrics and messages between daemons for docs/reference.md, and
 * roff of the options for kvd.conf(5). make docs writes them, make check compares them.
 */
#include "docs/pages.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/config/config.h"
#include "daemon/metrics/figures.h"
#include "daemon/modules.h"
#include "daemon/request/commands.h"
#include "proto/wire.h"

#define COMMANDS_MAX 200u

static void print_limits(FILE *out, const struct field *f)
{
	if (f->type == FIELD_INT && f->max != JSON_INT_MAX)
		fprintf(out, ", %" PRId64 " … %" PRId64, f->min, f->max);
	else if (f->type == FIELD_STR && f->max)
		fprintf(out, ", at most %" PRId64 " bytes", f->max);
	else if (f->type == FIELD_ARRAY && f->max)
		fprintf(out, ", at most %" PRId64 " entries", f->max);
}

static void print_command(FILE *out, const struct command *cmd)
{
	fprintf(out, "\n## %s\n\n%s.", cmd->name, cmd->summary);
	if (cmd->flags & COMMAND_ADMIN)
		fprintf(out, " For root, the daemon's user and `admin_uids`.");
	if (cmd->flags & COMMAND_NO_HELLO)
		fprintf(out, " Allowed before `hello`.");
	fprintf(out, "\n\n");
	for (const struct field *f = cmd->fields; f && f->name; f++) {
		fprintf(out, "- `%s` (%s%s", f->name, field_type_name(f->type),
			f->required ? ", required" : "");
		print_limits(out, f);
		fprintf(out, "): %s\n", f->help);
	}
	fprintf(out, "%sReply: %s\n", cmd->fields && cmd->fields->name ? "\n" : "",
		cmd->reply);
}

static int by_name(const void *a, const void *b)
{
	return strcmp((*(const struct command *const *)a)->name,
		      (*(const struct command *const *)b)->name);
}

static void print_commands(FILE *out)
{
	const struct command *all[COMMANDS_MAX];
	size_t count = 0;

	while (count < COMMANDS_MAX &&
	       (all[count] = commands_at(modules_built, (unsigned int)count)))
		count++;
	assert(count < COMMANDS_MAX);
	qsort(all, count, sizeof(*all), by_name);
	for (size_t i = 0; i < count; i++)
		print_command(out, all[i]);
}

void page_commands(FILE *out)
{

	fprintf(out,
		"# Control commands\n\n"
		"Generated from the daemon's tables. Each request and reply is one line\n"
		"with a JSON object, at most 1 MiB:\n"
		"`{\"id\":1,\"cmd\":\"ping\"}`; the reply is `{\"id\":1,\"ok\":true,…}` "
		"or\n"
		"`{\"id\":1,\"error\":{\"code\":\"EINVAL\",\"message\":\"…\","
		"\"retryable\":false,\"scope\":\"op\"}}`.\n"
		"The reply repeats `id` (an integer or a string of at most 128 bytes).\n"
		"An integer without a given range may be 0 … 2^53 - 1.\n"
		"A u64 is a decimal string. An fd is the index of a descriptor passed\n"
		"with the line (SCM_RIGHTS, in the sendmsg that sends its first byte).\n"
		"Unknown fields, and descriptors that no field names, are refused.\n");
	print_commands(out);
	fprintf(out,
		"\n# Error codes\n\n"
		"The last column is the advice of `kvd-ctl doctor`. For programs, see "
		"[clients.md](clients.md#errors).\n\n"
		"| code | meaning | scope | retryable | what to do |\n"
		"|---|---|---|---|---|\n");
	for (int code = 1; code < ERR_CODE_END; code++)
		fprintf(out, "| %s | %s | %s | %s | %s |\n",
			err_name((enum err_code)code), err_meaning((enum err_code)code),
			err_scope_name(err_default_scope((enum err_code)code)),
			err_default_retryable((enum err_code)code) ? "yes" : "no",
			err_remedy((enum err_code)code));
}

static void print_labels(FILE *out, const struct metric_row *row)
{
	const char *sep = "";

	for (unsigned int i = 0; i < 2; i++) {
		const struct metric_label_row *label = &metric_labels[row->label[i]];

		for (unsigned int n = 0; n < 2 && label->name[n]; n++, sep = ", ")
			fprintf(out, "%s%s", sep, label->name[n]);
	}
}

static void print_family(void *arg, const struct figures_family *family)
{
	static const char *const types[] = {"counter", "gauge", "histogram"};
	const struct metric_row *row = family->row;
	bool ours = strncmp(row->name, "process_", 8) != 0;
	FILE *out = arg;

	fprintf(out, "| %s%s | %s | ", ours ? "kvd_" : "", row->name, types[row->type]);
	print_labels(out, row);
	fprintf(out, " | %s |\n", row->help);
}

void page_metrics(FILE *out)
{
	static struct figures all = {.modules = modules_built};

	fputs("\n# Metrics\n\nServed at `metrics_listen` and by `kvd-ctl stats "
	      "--prometheus`;\n`stats` omits the prefix `kvd_`.\n\n"
	      "| name | type | labels | meaning |\n|---|---|---|---|\n",
	      out);
	figures_families(&all, print_family, out);
}

static void print_message(FILE *out, unsigned int number, const char *name, uint32_t cap,
			  const char *purpose, const char *fields)
{
	int len = (int)strlen(fields) - 1; /* without the last comma */

	fprintf(out, "| %u | %s | %u | %s |%.*s |\n", number, name, cap, purpose, len,
		fields);
}

void page_messages(FILE *out)
{
	fputs("| number | message | body cap (bytes) | purpose | fields in wire order |\n"
	      "|---|---|---|---|---|\n",
	      out);
#define FIELD_TEXT(type, f) " " #type " `" #f "`,"
#define MESSAGE(num, NAME, name, owner, cap, text) \
	print_message(out, num, #NAME, cap, text, "" WIRE_##NAME(FIELD_TEXT));
	WIRE_MESSAGES(MESSAGE)
}

/* ---- options ---- */

/* Roff takes a '.' or '\'' in column one and every backslash for itself. */
static void print_roff(FILE *out, const char *text)
{
	if (*text == '.' || *text == '\'')
		fputs("\\&", out);
	for (; *text; text++) {
		if (*text == '\\')
			fputs("\\e", out);
		else if (*text == '-')
			fputs("\\-", out);
		else
			fputc(*text, out);
	}
}

void page_options(FILE *out)
{
	const char *section = "";
	char range[SETTING_TEXT_MAX];
	const struct setting *row;
	size_t count;

	row = config_settings(&count);
	for (; count; count--, row++) {
		if (strcmp(section, row->section) != 0) {
			section = row->section;
			fprintf(out, ".SS [%s]\n", section);
		}
		setting_range(row, range);
		fprintf(out, ".TP\n.B ");
		print_roff(out, row->name);
		fprintf(out, "\n");
		print_roff(out, row->help);
		fprintf(out, "\nDefault: \\fB");
		print_roff(out, *row->preset ? row->preset : "(empty)");
		fprintf(out, "\\fR. Allowed: ");
		print_roff(out, range);
		fprintf(out, ".%s\n", row->reload ? " Reloadable." : "");
	}
}
