/* SPDX-License-Identifier: Apache-2.0 */
/* The command tables in the form of `help`. */
#include "daemon/request/commands.h"

#include "daemon/base/text.h"

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

static void put_number(struct text *text, const char *name, int64_t value)
{
	text_puts(text, name);
	if (value < 0)
		text_puts(text, "-");
	text_u64(text, value < 0 ? 0 - (uint64_t)value : (uint64_t)value);
}

static void help_put_field(struct text *text, const struct field *f)
{
	text_string(text, "{\"name\":", f->name);
	text_string(text, ",\"type\":", field_type_name(f->type));
	text_puts(text, f->required ? ",\"required\":true" : ",\"required\":false");
	if (f->type == FIELD_INT)
		put_number(text, ",\"min\":", f->min);
	if (f->type == FIELD_INT || f->max)
		put_number(text,
			   f->type == FIELD_INT ? ",\"max\":" : ",\"limit\":", f->max);
	text_string(text, ",\"help\":", f->help);
	text_puts(text, "}");
}

void command_put(struct text *text, const struct command *cmd)
{
	text_string(text, "{\"name\":", cmd->name);
	text_string(text, ",\"summary\":", cmd->summary);
	text_string(text, ",\"reply\":", cmd->reply);
	text_puts(text,
		  cmd->flags & COMMAND_ADMIN ? ",\"admin\":true" : ",\"admin\":false");
	text_puts(text, ",\"fields\":[");
	for (const struct field *f = cmd->fields; f && f->name; f++) {
		if (f != cmd->fields)
			text_puts(text, ",");
		help_put_field(text, f);
	}
	text_puts(text, "]}");
}
