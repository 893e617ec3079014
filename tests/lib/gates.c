/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/gates.h"

#include <stdio.h>
#include <stdlib.h>

#include "daemon/base/err.h"
#include "daemon/gate/gate.h"
#include "daemon/gate/warden.h"

static void gates_on_lost(void *arg)
{
	(void)arg;
	fprintf(stderr, "the warden has ended\n");
	abort();
}

void gates_begin(struct loop *loop, struct gates **gates_p)
{
	int socket = -1, r = warden_fork(&socket);

	if (r == 0)
		r = gates_new(loop, socket, gates_on_lost, NULL, gates_p);
	if (r < 0) {
		fprintf(stderr, "gates: %s\n", err_last()->text);
		abort();
	}
}
