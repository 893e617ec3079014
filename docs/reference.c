/* SPDX-License-Identifier: Apache-2.0 */
/* Prints docs/reference.md (make reference): commands and error codes from the
 * daemon's own tables, metrics from theirs, peer messages from the wire's. */
#include <stdlib.h>

#include "docs/pages.h"

int main(void)
{
	page_commands(stdout);
	page_metrics(stdout);
	fputs("\n# Messages between daemons\n\n", stdout);
	page_messages(stdout);
	return fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
