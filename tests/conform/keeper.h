/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keeper: an end's place on another machine. What the driver does by itself for an
 * end on its own machine, the keeper does there: it starts the puppet's process and
 * hands it commands, makes and watches the engine's memory, stops and kills.
 *
 *   conform --keeper TRANSPORT ADDRESS:PORT
 *
 * A connection is one end's whole life. It speaks to whom it is told to, without any
 * check: for a network of the test's own.
 */
#ifndef TESTS_CONFORM_KEEPER_H
#define TESTS_CONFORM_KEEPER_H

#include <sys/types.h>

#include "tests/conform/puppet.h"

/* beside the puppet's, which it passes on */
enum keeper_cmd {
	KEEP_MAKE = CMD_COUNT, /* mem, kind, length: result 0 or -errno */
	KEEP_READ,	       /* mem, offset, length -> blob; result 0 or -errno */
	KEEP_SAMPLES,	       /* mem, bytes each; blob: offsets -> blob */
	KEEP_WRITE,	       /* mem, offset; blob */
	KEEP_CUT,	       /* mem, length */
	KEEP_OWNER_KILL,       /* mem */
	KEEP_END,	       /* mem */
	KEEP_SIGNAL,	       /* signal for the puppet; waits when it is SIGKILL */
	KEEP_EXIT,	       /* CMD_EXIT, then its exit status as v[0] */
};

/* A puppet's process on this machine and its control socket. 0, or raised. */
int puppet_spawn(const char *transport, pid_t *pid_p, int *sock_p);
/* Says "listening on ADDRESS:PORT", serves until it is killed; 2 when it cannot
 * listen there. */
int keeper_main(const char *transport, const char *where);
/* A connection to a keeper. 0, or raised. */
int keeper_dial(const char *where, int *sock_p);

#endif
