/* SPDX-License-Identifier: Apache-2.0 */
/* Prints docs/reference.md (make reference): commands and error codes from the
 * daemon's own tables, peer messages from the wire's. */
#include <stdlib.h>

#include "daemon/control/commands.h"
#include "proto/wire.h"

int main(void)
{
	commands_print_reference(stdout);
	wire_print_reference(stdout);
	return fflush(stdout) == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
