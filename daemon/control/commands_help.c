/* SPDX-License-Identifier: Apache-2.0 */
/* What the command tables say, as `help`. */
#include "daemon/control/commands.h"

#include "daemon/base/mem.h"

const char *field_type_name(enum field_type type)
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

static bool commands_help_add_field(cJSON *list, const struct field *f)
{
	cJSON *json = cJSON_CreateObject();

	if (json && cJSON_AddStringToObject(json, "name", f->name) &&
	    cJSON_AddStringToObject(json, "type", field_type_name(f->type)) &&
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
		filled = commands_help_add_field(fields, f);
	if (filled)
		return json;
	cJSON_Delete(json);
	return NULL;
}
