/* SPDX-License-Identifier: Apache-2.0 */
/*
 * resolve: a lookup (lookup.h) whose requester may end before the reply. Loop thread.
 */
#ifndef KVD_RESOLVE_H
#define KVD_RESOLVE_H

#include <stdbool.h>

#include "daemon/loop/loop.h"

#define RESOLVE_HOST_MAX 256u /* bytes with the NUL */
#define RESOLVE_NUMBER_MAX 48u

struct resolve;

/* `wake` is woken when the answer is available. ERR_BUSY: too many are running. */
int resolve_start(const char *host, const char *port, struct loop_wake *wake,
		  struct resolve **q_p);
/* False: the wake-up was for an older request. */
bool resolve_done(struct resolve *q);
/* Of an answer: its addresses as text, IPv4 first, IPv6 in brackets; at most `max`. 0:
 * there is none, *why_p has the reason. */
unsigned int resolve_numbers(const struct resolve *q, char (*numbers)[RESOLVE_NUMBER_MAX],
			     unsigned int max, const char **why_p);
/* `wake` is no longer touched. NULL is allowed. */
void resolve_drop(struct resolve *q);

#endif
