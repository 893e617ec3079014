/* SPDX-License-Identifier: Apache-2.0 */
/* A program that is made set-user-ID root: its memory lies at a known address (it is
 * linked without PIE) and holds a secret. `where` tells the address, `wait` waits. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static char secret[2 * 4096] __attribute__((aligned(4096))) = "the secret of root";

int main(int argc, char **argv)
{
	if (argc > 1 && strcmp(argv[1], "where") == 0) {
		printf("%p\n", (void *)secret);
		return 0;
	}
	if (write(STDOUT_FILENO, "r", 1) != 1)
		return 1;
	pause();
	return secret[0];
}
