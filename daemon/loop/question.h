/* SPDX-License-Identifier: Apache-2.0 */
/*
 * question: a lookup (lookup.h) whose requester may end before the reply. Loop thread.
 */
#ifndef KVD_QUESTION_H
#define KVD_QUESTION_H

#include <stdbool.h>

#include "daemon/loop/loop.h"

#define QUESTION_HOST_MAX 256u /* bytes with the NUL */
#define QUESTION_NUMBER_MAX 48u

struct question;

/* `wake` is woken when the answer is available. ERR_BUSY: too many are running. */
int question_ask(const char *host, const char *port, struct loop_wake *wake,
		 struct question **q_p);
/* False: the wake-up was for an older question. */
bool question_answered(struct question *q);
/* Of an answer: its addresses as text, IPv4 first, IPv6 in brackets; at most `max`. 0:
 * there is none, *why_p has the reason. */
unsigned int question_numbers(const struct question *q,
			      char (*numbers)[QUESTION_NUMBER_MAX], unsigned int max,
			      const char **why_p);
/* `wake` is no longer touched. NULL is allowed. */
void question_drop(struct question *q);

#endif
