/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_diag: diagnoses why a line does not connect, from libzmq's events
 * (link_monitor.h) and the other side's first bytes (link_probe.h).
 */
#ifndef KVD_LINK_DIAG_H
#define KVD_LINK_DIAG_H

#include <stdbool.h>

struct err;
struct link_diag;
struct loop;

struct link_diag_args {
	struct loop *loop;
	void *context, *socket; /* of the line */
	bool curve;		/* this daemon has keys; then: */
	const char *line;	/* this daemon's, for the other's allow-list */
	const char *expected;	/* the other side's public key, copied; NULL: not known */
	bool queried;		/* the directory is queried for the key */
	/* On the loop, never from inside the functions here; may free it. `final`: the
	 * line is dead, or the fault needs an operator. */
	void (*on_diagnosis)(void *owner, const struct err *why, bool final);
	void *owner;
};

/* Texts of args except `expected` are borrowed. */
int link_diag_new(const struct link_diag_args *args, struct link_diag **diag_p);
/* The current address of the line: tcp://NUMBER:PORT. */
void link_diag_address(struct link_diag *diag, const char *address);
/* The line has no address: its name does not resolve. */
void link_diag_name(struct link_diag *diag, const char *host, const char *why);
/* Before the socket is closed, and when it has connected. NULL is fine. */
void link_diag_free(struct link_diag *diag);

#endif
