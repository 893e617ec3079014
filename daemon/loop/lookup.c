/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/loop/lookup.h"

#include <netdb.h>
#include <sys/socket.h>

#include "daemon/base/err.h"
#include "daemon/base/thread.h"

static void *lookup_ask(void *arg)
{
	struct lookup *lookup = arg;
	const struct addrinfo hints = {.ai_family = AF_UNSPEC,
				       .ai_socktype = SOCK_STREAM,
				       .ai_flags = AI_NUMERICSERV};

	lookup->status = getaddrinfo(lookup->host, lookup->port, &hints, &lookup->list);
	lookup->done(lookup);
	return NULL;
}

int lookup_start(struct lookup *lookup)
{
	pthread_t thread;
	int r = thread_start("kvd-lookup", lookup_ask, lookup, &thread);

	if (r == 0)
		pthread_detach(thread);
	return err_pass(r);
}
