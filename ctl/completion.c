/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command completion: prints a shell script. Each shell has a template, in which a
 * line with ~COMMAND~ is repeated for each command, and one with ~OPTION~ for each of a
 * command's options. Option values are not completed, except the instance after --name.
 */
#include <stdio.h>
#include <string.h>

#include "ctl/ctl.h"
#include "daemon/base/mem.h"

#define TEMPLATE(shell)                                     \
	__asm__(".section .rodata\n"                        \
		".globl completion_" shell "\n"             \
		"completion_" shell ":\n"                   \
		".incbin \"ctl/completion." shell ".in\"\n" \
		".byte 0\n"                                 \
		".previous\n")
TEMPLATE("bash");
TEMPLATE("zsh");
TEMPLATE("fish");
extern const char completion_bash[], completion_zsh[], completion_fish[];

static void put_line(const char *line, const struct ctl_command *c, const char *option)
{
	size_t plain = strcspn(line, "~\n");

	while (line[plain] == '~') {
		const char *word = line + plain + 1; /* COMMAND, SUMMARY or OPTION */

		printf("%.*s%s", (int)plain, line,
		       *word == 'C'   ? c->name
		       : *word == 'S' ? c->summary
				      : option);
		line = word + strcspn(word, "~") + 1;
		plain = strcspn(line, "~\n");
	}
	printf("%.*s\n", (int)plain, line);
}

static void put_line_for(const char *line, size_t len, const struct ctl_command *c)
{
	const char *name;

	if (!memmem(line, len, "~OPTION~", 8)) {
		put_line(line, c, NULL);
		return;
	}
	for (unsigned int i = 0; (name = ctl_option(c, i)); i++) {
		if (*name)
			put_line(line, c, name);
	}
}

static void put_script(const char *line)
{
	for (size_t len; *line; line += len + 1) {
		len = strcspn(line, "\n");
		if (!memmem(line, len, "~COMMAND~", 9)) {
			put_line(line, NULL, NULL);
			continue;
		}
		for (const struct ctl_command *c = ctl_commands; c->name; c++)
			put_line_for(line, len, c);
	}
}

int ctl_run_completion(struct ctl *ctl)
{
	const struct {
		const char *shell, *script;
	} shells[] = {{"bash", completion_bash},
		      {"zsh", completion_zsh},
		      {"fish", completion_fish}};

	for (size_t i = 0; i < ARRAY_LEN(shells); i++) {
		if (strcmp(ctl->args[0], shells[i].shell) != 0)
			continue;
		put_script(shells[i].script);
		return CTL_OK;
	}
	return ctl_usage("completion: bash, zsh or fish, not '%s'", ctl->args[0]);
}
