/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lookup: one query to the resolver (getaddrinfo), on its own thread, because it may wait
 * ten seconds for a name server and cannot be called off.
 */
#ifndef KVD_LOOKUP_H
#define KVD_LOOKUP_H

struct addrinfo;

struct lookup {
	const char *host, *port; /* numeric port; both stay until done() */
	/* On that thread, once; may free the lookup. */
	void (*done)(struct lookup *lookup);
	int status;	       /* getaddrinfo's: 0 or EAI_… */
	struct addrinfo *list; /* of streams, IPv4 and IPv6; the owner frees it */
};

/* ERR_*: no thread; done() is not called then. */
int lookup_start(struct lookup *lookup);

#endif
