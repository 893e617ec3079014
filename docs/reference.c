/* SPDX-License-Identifier: Apache-2.0 */
/* Prints docs/reference.md: commands and error codes from the daemon's own tables,
 * metrics from theirs, peer messages from the wire's; with an argument, the options. */
#include <stdlib.h>

#include "docs/pages.h"

int main(int argc, char **argv)
{
	(void)argv;
	if (argc > 1) {
		page_options(stdout);
		return fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
	}
	page_commands(stdout);
	page_metrics(stdout);
	fputs("\n# Messages between daemons\n\n", stdout);
	page_messages(stdout);
	return fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
