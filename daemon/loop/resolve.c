/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A lookup cannot be called off. So a requester that ends leaves its lookup running: the
 * last of the two frees the request. Running lookups are counted, also after their
 * requesters have ended, and bounded.
 *
 * IPv4 is first: a daemon that listens on one kind of address listens on that.
 */
#include "daemon/loop/resolve.h"

#include <errno.h>
#include <netdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/loop/lookup.h"

#define RESOLVES_MAX 64u /* threads */

struct resolve {
	struct lookup lookup;
	pthread_mutex_t lock;	/* of the two below */
	struct loop_wake *wake; /* of the requester; NULL: it has ended */
	bool answered;
	atomic_int refs; /* the requester's, and the thread's */
	char host[RESOLVE_HOST_MAX], port[8];
};

static atomic_uint running;

static void resolve_unref(struct resolve *q)
{
	if (atomic_fetch_sub(&q->refs, 1) != 1)
		return;
	if (q->lookup.list)
		freeaddrinfo(q->lookup.list);
	pthread_mutex_destroy(&q->lock);
	mem_free(q);
	atomic_fetch_sub(&running, 1);
}

/* Its thread. */
static void resolve_on_answer(struct lookup *lookup)
{
	struct resolve *q = container_of(lookup, struct resolve, lookup);

	pthread_mutex_lock(&q->lock);
	q->answered = true;
	if (q->wake)
		loop_wake(q->wake);
	pthread_mutex_unlock(&q->lock);
	resolve_unref(q);
}

int resolve_start(const char *host, const char *port, struct loop_wake *wake,
		  struct resolve **q_p)
{
	struct resolve *q = NULL;
	int r;

	if (atomic_fetch_add(&running, 1) >= RESOLVES_MAX)
		r = err_raise(ERR_BUSY, "%s: too many names being resolved (limit %u)",
			      host, RESOLVES_MAX);
	else
		r = (q = mem_zalloc(sizeof(*q))) ? 0 : -ENOMEM;
	if (r < 0) {
		atomic_fetch_sub(&running, 1);
		return err_pass(r);
	}
	snprintf(q->host, sizeof(q->host), "%s", host);
	snprintf(q->port, sizeof(q->port), "%s", port);
	q->lookup = (struct lookup){
		.host = q->host, .port = q->port, .done = resolve_on_answer};
	q->wake = wake;
	pthread_mutex_init(&q->lock, NULL);
	atomic_init(&q->refs, 2);
	r = lookup_start(&q->lookup);
	if (r < 0) {
		atomic_store(&q->refs, 1);
		resolve_unref(q);
		return err_pass(r);
	}
	*q_p = q;
	return 0;
}

bool resolve_done(struct resolve *q)
{
	bool answered;

	pthread_mutex_lock(&q->lock);
	answered = q->answered;
	pthread_mutex_unlock(&q->lock);
	return answered;
}

static bool resolve_number(const struct addrinfo *ai, char text[RESOLVE_NUMBER_MAX])
{
	char number[RESOLVE_NUMBER_MAX - 2];

	if (getnameinfo(ai->ai_addr, ai->ai_addrlen, number, sizeof(number), NULL, 0,
			NI_NUMERICHOST) != 0 ||
	    strchr(number, '%')) /* of one link only: nothing that others can mean */
		return false;
	snprintf(text, RESOLVE_NUMBER_MAX, ai->ai_family == AF_INET6 ? "[%s]" : "%s",
		 number);
	return true;
}

unsigned int resolve_numbers(const struct resolve *q, char (*numbers)[RESOLVE_NUMBER_MAX],
			     unsigned int max, const char **why_p)
{
	static const int families[] = {AF_INET, AF_INET6};
	unsigned int count = 0;

	for (unsigned int i = 0; i < ARRAY_LEN(families); i++)
		for (const struct addrinfo *ai = q->lookup.list; ai; ai = ai->ai_next)
			if (count < max && ai->ai_family == families[i])
				count += resolve_number(ai, numbers[count]);
	*why_p = q->lookup.status ? gai_strerror(q->lookup.status) : "no usable address";
	return count;
}

void resolve_drop(struct resolve *q)
{
	if (!q)
		return;
	pthread_mutex_lock(&q->lock);
	q->wake = NULL;
	pthread_mutex_unlock(&q->lock);
	resolve_unref(q);
}
