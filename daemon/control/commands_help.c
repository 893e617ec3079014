/* SPDX-License-Identifier: Apache-2.0 */
/* What the command tables say, as `help` and as the reference page. */
#include "daemon/control/commands.h"

#include <inttypes.h>

#include "daemon/base/mem.h"
#include "proto/json.h"

static const char *type_name(enum field_type type)
{
	static const char *const names[] = {
		[FIELD_STR] = "string",	 [FIELD_INT] = "integer",
		[FIELD_U64] = "u64",	 [FIELD_BOOL] = "bool",
		[FIELD_ARRAY] = "array", [FIELD_OBJECT] = "object",
		[FIELD_FD] = "fd",	 [FIELD_CHOICE] = "string",
	};

	return names[type];
}

static bool add_range(cJSON *json, const struct field *f)
{
	if (f->type == FIELD_INT)
		return cJSON_AddNumberToObject(json, "min", (double)f->min) &&
		       cJSON_AddNumberToObject(json, "max", (double)f->max);
	return !f->max || cJSON_AddNumberToObject(json, "limit", (double)f->max);
}

static bool add_field(cJSON *list, const struct field *f)
{
	cJSON *json = cJSON_CreateObject();

	if (json && cJSON_AddStringToObject(json, "name", f->name) &&
	    cJSON_AddStringToObject(json, "type", type_name(f->type)) &&
	    cJSON_AddBoolToObject(json, "required", f->required) && add_range(json, f) &&
	    cJSON_AddStringToObject(json, "help", f->help) &&
	    cJSON_AddItemToArray(list, json))
		return true;
	cJSON_Delete(json);
	return false;
}

cJSON *command_describe(const struct command *cmd)
{
	cJSON *json = cJSON_CreateObject(), *fields;
	bool filled = json && cJSON_AddStringToObject(json, "name", cmd->name) &&
		      cJSON_AddStringToObject(json, "summary", cmd->summary) &&
		      cJSON_AddStringToObject(json, "reply", cmd->reply) &&
		      cJSON_AddBoolToObject(json, "admin", cmd->flags & COMMAND_ADMIN);

	fields = filled ? cJSON_AddArrayToObject(json, "fields") : NULL;
	filled = fields;
	for (const struct field *f = cmd->fields; filled && f && f->name; f++)
		filled = add_field(fields, f);
	if (filled)
		return json;
	cJSON_Delete(json);
	return NULL;
}

/* ---- the reference page ---- */

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
		fprintf(out, "- `%s` (%s%s", f->name, type_name(f->type),
			f->required ? ", required" : "");
		print_limits(out, f);
		fprintf(out, "): %s\n", f->help);
	}
	fprintf(out, "%sReply: %s\n", cmd->fields && cmd->fields->name ? "\n" : "",
		cmd->reply);
}

void commands_print_reference(FILE *out)
{
	const struct command *cmd;

	fprintf(out,
		"# Control commands\n\n"
		"Made from the daemon's tables. One JSON object a line, at most 1 MiB:\n"
		"`{\"id\":1,\"cmd\":\"ping\"}`; the reply is `{\"id\":1,\"ok\":true,…}` "
		"or\n"
		"`{\"id\":1,\"error\":{\"code\":\"EINVAL\",\"message\":\"…\","
		"\"retryable\":false,\"scope\":\"op\"}}`.\n"
		"`id` (an integer or a string of at most 128 bytes) comes back as it "
		"was.\n"
		"An integer without a range is 0 … 2^53 - 1.\n"
		"A u64 is a decimal string. An fd is the index of a descriptor that "
		"came\n"
		"with the line (SCM_RIGHTS, in the sendmsg that begins the line). "
		"Unknown\n"
		"fields and descriptors that no field names are refused.\n");
	for (unsigned int i = 0; (cmd = commands_at(i)); i++)
		print_command(out, cmd);
	fprintf(out, "\n# Error codes\n\n| code | meaning | scope | retryable |\n"
		     "|---|---|---|---|\n");
	for (int code = 1; code < ERR_CODE_END; code++)
		fprintf(out, "| %s | %s | %s | %s |\n", err_name((enum err_code)code),
			err_meaning((enum err_code)code),
			err_scope_name(err_default_scope((enum err_code)code)),
			err_default_retryable((enum err_code)code) ? "yes" : "no");
}
