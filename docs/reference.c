/* SPDX-License-Identifier: Apache-2.0 */
/* Prints docs/reference.md (make reference): commands and error codes from the
 * daemon's own tables. */
#include <stdlib.h>

#include "daemon/commands.h"

int main(void)
{
	commands_print_reference(stdout);
	return fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
