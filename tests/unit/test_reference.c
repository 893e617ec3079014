/* SPDX-License-Identifier: Apache-2.0 */
/* docs/reference.md's pages: nothing of the tables is left out. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "daemon/base/metrics.h"
#include "daemon/modules.h"
#include "daemon/request/commands.h"
#include "docs/pages.h"
#include "proto/wire.h"

static void reference_names_every_command_and_code(void **state)
{
	const struct command *cmd;
	char *text = NULL, name[80];
	size_t len = 0;
	FILE *out = open_memstream(&text, &len);

	(void)state;
	page_commands(out);
	fclose(out);
	for (unsigned int i = 0; (cmd = commands_at(modules_built, i)); i++) {
		snprintf(name, sizeof(name), "\n## %s\n", cmd->name);
		assert_non_null(strstr(text, name));
	}
	for (int code = 1; code < ERR_CODE_END; code++) {
		snprintf(name, sizeof(name), "\n| %s |", err_name((enum err_code)code));
		assert_non_null(strstr(text, name));
	}
	free(text);
}

static void reference_lists_every_metric(void **state)
{
	char *text = NULL, name[120];
	size_t size = 0;
	FILE *out = open_memstream(&text, &size);

	(void)state;
	page_metrics(out);
	fclose(out);
	for (size_t i = 0; i < METRIC_ROWS; i++) {
		snprintf(name, sizeof(name), "%s | ", metric_rows[i].name);
		assert_non_null(strstr(text, name));
	}
	for (unsigned int i = 0; modules_built[i]; i++) {
		for (unsigned int n = 0; n < modules_built[i]->metric_count; n++) {
			snprintf(name, sizeof(name), "\n| kvd_%s | ",
				 modules_built[i]->metrics[n].name);
			assert_non_null(strstr(text, name));
		}
	}
	assert_non_null(strstr(text,
			       "\n| kvd_rooms_ended_total | counter | role, result, "
			       "code | "));
	assert_non_null(strstr(text, "\n| process_open_fds | gauge |  | "));
	free(text);
}

static void reference_lists_every_message(void **state)
{
	char *text = NULL;
	size_t size = 0, lines = 0, messages = 0;
	FILE *out = open_memstream(&text, &size);

	(void)state;
	page_messages(out);
	fclose(out);
	for (const char *p = text; (p = strchr(p, '\n')); p++)
		lines++;
#define COUNT(num, NAME, name, owner, cap, about) \
	messages++;                               \
	assert_non_null(strstr(text, "| " #num " | " #NAME " | "));
	WIRE_MESSAGES(COUNT)
	assert_int_equal(lines, messages + 2);
	assert_non_null(
		strstr(text, "| 3 | PING | 64 | liveness probe | u64 `stamp` |\n"));
	free(text);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(reference_names_every_command_and_code),
		cmocka_unit_test(reference_lists_every_metric),
		cmocka_unit_test(reference_lists_every_message),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
