/* SPDX-License-Identifier: Apache-2.0 */
/* The command tables in the form of `help`. */
#include "daemon/request/commands.h"

#include "proto/out.h"

const char *field_type_name(enum field_type type)
{
	static const char *const names[] = {
		[FIELD_STR] = "string",	   [FIELD_INT] = "integer",
		[FIELD_U64] = "u64",	   [FIELD_BOOL] = "bool",
		[FIELD_NUMBER] = "number", [FIELD_ARRAY] = "array",
		[FIELD_OBJECT] = "object", [FIELD_FD] = "fd",
		[FIELD_CHOICE] = "string",
	};

	return names[type];
}

static void help_put_field(struct text *out, const struct field *f)
{
	out_object(out, NULL);
	out_text(out, "name", f->name);
	out_text(out, "type", field_type_name(f->type));
	out_bool(out, "required", f->required);
	if (f->type == FIELD_INT)
		out_number(out, "min", f->min);
	if (f->type == FIELD_INT || f->max)
		out_number(out, f->type == FIELD_INT ? "max" : "limit", f->max);
	out_text(out, "help", f->help);
	out_close(out, '}');
}

void command_put(struct text *out, const struct command *cmd)
{
	out_object(out, NULL);
	out_text(out, "name", cmd->name);
	out_text(out, "summary", cmd->summary);
	out_text(out, "reply", cmd->reply);
	out_bool(out, "admin", cmd->flags & COMMAND_ADMIN);
	out_array(out, "fields");
	for (const struct field *f = cmd->fields; f && f->name; f++)
		help_put_field(out, f);
	out_close(out, ']');
	out_close(out, '}');
}
